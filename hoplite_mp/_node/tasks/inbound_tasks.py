"""Guests: tasks of other hosts that workers of this host run.

Why it exists: a task of another host becomes a task in the node's own table as soon as everything
that it names is held here; workers cannot tell the difference. When it ends, the host that sent it
gets a message, with the result if that is small; a big result stays here until that host releases
it.
It must never know: how messages travel, what tasks do, which host would be best to run one.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp import _serialize, _tasks, errors
from hoplite_mp._common.object_states import AWAY, KIND_TASK, NODE_SLOT, STATE
from hoplite_mp._node.objects.array_layouts import layout_of, payload_layout
from hoplite_mp._protocol.fields import NO_OBJECT
from hoplite_mp._protocol.peers import INLINE_BYTES_MAX, TaskEnded

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.objects.imports import Imports
    from hoplite_mp._node.objects.results import ResultWriter
    from hoplite_mp._node.trace_events import TraceEvents
    from hoplite_mp._planner.resources import Demand
    from hoplite_mp._protocol.peers import PeerMessage, Release, RunTask

__all__ = ["InboundTasks"]

POOL = 0
RANKED_FLAG: int = _tasks.RANKED_FLAG
POOL_CLOSING = 2

_log = logging.getLogger("hoplite_mp")


@dataclass(slots=True)
class InboundTask:
    """One task of another host; `holds` are on its result and on all that it names."""

    peer: int
    task: bytes
    holds: list[Any]
    oid: int = 0  # its header here; 0: what it names is not held here yet
    ended: bool = False
    unwanted: bool = False
    ready: bool = False  # of a call of an actor: what it names is held here
    pool: int = POOL
    late: bool = False  # a call that has arrived after its actor was closed
    target: bytes = b""  # the lost result that it reconstructs


class InboundTasksEvents(Protocol):
    """What this room asks of the rooms above it."""

    def queue_of(self, pool: int) -> int:
        """The node's hint queue to the pool's workers on this host."""

    def post_guest(self, oid: int) -> None:
        """Announces a task to workers of this host, as soon as there is room for its hint."""

    def interrupt(self, oid: int, slot: int) -> None:
        """Interrupts the worker in that slot, which runs that task."""

    def is_actor(self, pool: int) -> bool:
        """Whether that is the pool of an actor of this host, which every other host may call."""

    def refuse_calls(self, pool: int) -> None:
        """Fails the queued calls to that actor if it has ended."""

    def is_round(self, pool: int) -> bool:
        """See _node/tasks/worker_broadcast.py."""

    def arrived(self, pool: int) -> None:
        """That pool has a new task."""

    def task_ends(self, slot: int) -> None:
        """A task of the worker in that slot has ended: forwards what the worker has printed, before
        the task's end is reported."""

    def admit(self, peer: int, task: bytes, demand: Demand, needed: bool) -> bool:
        """Reserves resources for a task; False: they are not free."""

    def admitted(self, oid: int, task: bytes, demand: Demand) -> None:
        """The task for which resources were reserved has that header here."""

    def dropped(self, task: bytes) -> None:
        """The task for which resources were reserved will not run here."""


class InboundTasks:
    """All tasks of other hosts on this one."""

    def __init__(
        self,
        results: ResultWriter,
        imports: Imports,
        send: Callable[[int, PeerMessage], bool],
        notes: TraceEvents,
        above: InboundTasksEvents,
    ) -> None:
        self.results = results
        self.client = results.client
        self.tasks = results.tasks
        self.imports = imports
        self.send = send
        self.above = above
        self.by_task: dict[bytes, InboundTask] = {}
        self.by_oid: dict[int, InboundTask] = {}
        self.pools: dict[int, int] = {}  # pool for one other host alone -> id of that host
        # (host id, pool of an actor) -> calls that have not begun, in their order.
        self.rows: dict[tuple[int, int], deque[tuple[InboundTask, RunTask]]] = {}
        self.notes = notes
        notes.ask_at_start(lambda: [(oid, guest.task) for oid, guest in self.by_oid.items()])
        self.ranked = _tasks.Ranked(self.tasks)

    def __contains__(self, oid: int) -> bool:
        return oid in self.by_oid

    def run(self, peer: int, message: RunTask) -> None:
        """Accepts a task; a duplicate is ignored."""
        if message.task in self.by_task:
            return
        if message.demand:
            needed = message.floor != _tasks.NO_FLOOR
            if not self.above.admit(peer, message.task, message.demand, needed):
                self.send(peer, TaskEnded(message.task, "full"))
                return
        guest = self.by_task[message.task] = InboundTask(
            peer, message.task, [], pool=message.pool, target=message.target
        )
        named = [message.function]
        if message.args:
            named += _serialize.read_refs(memoryview(message.args))
        if message.args_object != NO_OBJECT:
            named.append(message.args_object)
        try:
            self._ask(guest, message, named)
        except Exception as error:  # no header is left; the sender must not wait for ever
            for key, row in list(self.rows.items()):
                self.rows[key] = deque(one for one in row if one[0] is not guest)
            self.rows = {key: row for key, row in self.rows.items() if row}
            if self.by_task.get(guest.task) is guest:
                self._fail(guest, error)

    def _ask(self, guest: InboundTask, message: RunTask, named: list[bytes]) -> None:
        """Begins the task when everything that it names is held here."""
        if not self.above.is_actor(message.pool):
            # The sender keeps what a task of its own names until the task has ended.
            self.imports.ask(named, lambda holds: self._begin(guest, message, holds), guest.peer)
            return
        # Calls of one host to one actor begin in the order in which they arrived, even if the
        # objects that a later one names are here first.
        row = self.rows.setdefault((guest.peer, message.pool), deque())
        row.append((guest, message))
        guest.late = self.tasks.pool_state(message.pool) == POOL_CLOSING
        self.imports.ask(named, lambda holds: self._ready(guest, holds), guest.peer)

    def _ready(self, guest: InboundTask, holds: list[Any]) -> None:
        """Everything that a call of an actor names is held here."""
        guest.holds = holds
        guest.ready = True
        for key, row in list(self.rows.items()):
            if key[0] == guest.peer:
                while row and row[0][0].ready:
                    first, message = row.popleft()
                    self._begin(first, message, first.holds)
                if not row:
                    del self.rows[key]

    def _begin(self, guest: InboundTask, message: RunTask, holds: list[Any]) -> None:
        if guest.unwanted:
            self._refused(guest)
            return
        with_args = message.args_object != NO_OBJECT
        if holds[0] is None or (with_args and holds[-1] is None):
            self._refused(guest)
            self.send(guest.peer, TaskEnded(guest.task, "returned"))  # the sender knows the reason
            return
        pool, closed = message.pool, guest.late
        if closed or (
            pool != POOL and self.pools.get(pool) != guest.peer and not self.above.is_actor(pool)
        ):
            self._refused(guest)
            kind = errors.ActorLostError if closed else errors.WorkerLostError
            short = kind("the actor was closed" if closed else "its pool has been closed")
            payload = _serialize.encode_error(short, "").tobytes()
            self.send(guest.peer, TaskEnded(guest.task, "failed", len(payload), False, payload))
            return
        try:
            self._post(guest, message, holds)
        except Exception as error:  # no table or queue is left; the sender must not wait for ever
            self._fail(guest, error)
            return
        self._prefetch(message, holds)
        self.above.arrived(pool)
        if self.above.is_actor(pool):
            self.above.refuse_calls(pool)

    def _post(self, guest: InboundTask, message: RunTask, holds: list[Any]) -> None:
        """Makes it a task in the node's own table."""
        oid = self.client.new(KIND_TASK, STATE["WAITING"], 0, message.pool)
        guest.oid, guest.holds = oid, [self.client.hold(oid, False), *holds]
        self.by_oid[oid] = guest
        self.imports.adopt(guest.task, oid)
        self.notes.guest(oid, guest.task)
        ranked = bool(message.flags & RANKED_FLAG)
        posted = self.tasks.submit(
            oid,
            holds[0].oid,
            message.args,
            holds[-1].oid if message.args_object != NO_OBJECT else 0,
            message.retries,
            message.timeout_ns,
            message.flags,
            message.name,
            self.above.queue_of(message.pool),
            not ranked,
            self.audience_here(guest.peer, message.audience),
            message.tries,
        )
        if ranked:
            self.ranked.rank(oid, message.priority, message.floor)
        if message.demand:
            self.above.admitted(oid, message.task, message.demand)
        if ranked or not posted:
            self.above.post_guest(oid)

    def _fail(self, guest: InboundTask, error: Exception) -> None:
        """Fails a task that cannot begin here."""
        self.above.dropped(guest.task)
        _log.error("a task of node %#x cannot begin", guest.peer, exc_info=error)
        if guest.oid and self.client.take_over(guest.oid, NODE_SLOT):
            self.results.store_error(guest.oid, error)  # `completed` will report it to the sender
            return
        self._forget(guest)
        payload = _serialize.encode_error(error, "").tobytes()
        self.send(guest.peer, TaskEnded(guest.task, "failed", len(payload), False, payload))

    def _refused(self, guest: InboundTask) -> None:
        """Forgets a task that will not run here."""
        del self.by_task[guest.task]
        self.above.dropped(guest.task)

    def on_their_way(self, pool: int) -> bool:
        """Whether calls to that actor have arrived and wait for objects that they name."""
        return any(key[1] == pool for key in self.rows)

    def audience_here(self, peer: int, audience: int) -> int:
        """Translates an audience (which driver gets the output) that another host has sent. 0 is
        the driver of the host that names it."""
        audience = audience or peer
        return 0 if audience == self.client.host_id else audience

    def _prefetch(self, message: RunTask, holds: list[Any]) -> None:
        """Fetches the task's arguments while the workers are busy with tasks before it."""
        mem = memoryview(message.args)
        if message.args_object != NO_OBJECT:
            got = self.client.view(holds[-1].oid)
            if isinstance(got, int):  # the object that contains the arguments is not here yet
                return
            mem = memoryview(got)
        remote_objects = self.imports.remote_objects
        for object_id in dict.fromkeys(_serialize.read_dependencies(mem) if mem else ()):
            one = self.imports.by_object.get(object_id)
            if one is not None and one.oid in remote_objects:
                remote_objects.want(one.oid, _nothing)  # without room the worker asks for it later

    # -- ends of tasks -------------------------------------------------------------------------

    def completed(self, oids: list[int]) -> None:
        """Tasks in the node's tables have ended: reports those that are guests."""
        for oid in oids:
            guest = self.by_oid.get(oid)
            if guest is not None and not guest.ended:
                self._end(guest)

    def _end(self, guest: InboundTask) -> None:
        state = self.client.state(guest.oid)
        if state == STATE["ABORTED"]:
            return  # it still runs, and is reported when it has stopped
        guest.ended = True
        guest.holds = guest.holds[:1]
        self.above.task_ends(self.tasks.claimant(guest.oid))
        message = self._ending(guest)
        kept = message.refs or (message.outcome == "ready" and message.payload is None)
        if not self.send(guest.peer, message) or not kept:
            self._forget(guest)

    def _ending(self, guest: InboundTask) -> TaskEnded:
        oid = guest.oid
        got = self.client.view(oid)
        if isinstance(got, int):
            if got in AWAY:
                nbytes, refs = self.client.inspect(oid)["size"], self.client.flags(oid)[0]
                layout = layout_of(self.results, self.imports.remote_objects, oid)
                return TaskEnded(guest.task, "ready", nbytes, refs, None, layout)
            return TaskEnded(guest.task, "cancelled")
        mem = memoryview(got)
        refs = bool(_serialize.read_refs(mem))
        if _serialize.payload_kind(mem) == _serialize.ERROR:
            payload = _serialize.short_error(mem)
            refs = bool(_serialize.read_refs(memoryview(payload)))
            return TaskEnded(guest.task, "failed", len(payload), refs, payload)
        small = bytes(mem) if mem.nbytes <= INLINE_BYTES_MAX else None
        return TaskEnded(guest.task, "ready", mem.nbytes, refs, small, payload_layout(mem))

    def release(self, peer: int, message: Release) -> bool:
        """Releases a result that the sender does not need any more. False: that is no guest."""
        guest = self.by_task.get(message.object)
        if guest is None or guest.peer != peer:
            return False
        self._forget(guest)
        return True

    def _forget(self, guest: InboundTask) -> None:
        self.by_task.pop(guest.task, None)
        self.by_oid.pop(guest.oid, None)
        guest.holds = []

    # -- cancelling and returning --------------------------------------------------------------

    def cancel(self, task: bytes) -> None:
        """Cancels a task by force: if it runs, its worker is interrupted."""
        guest = self.by_task.get(task)
        if guest is None or guest.ended:
            return
        if not guest.oid:
            guest.unwanted = True
            self.send(guest.peer, TaskEnded(task, "cancelled"))
        elif self.tasks.cancel(guest.oid, True) == 2:
            self.above.interrupt(guest.oid, self.tasks.claimant(guest.oid))

    def withdraw(self, pool: int) -> None:
        """Cancels the tasks of a pool that have not begun."""
        for guest in [one for one in self.by_task.values() if one.pool == pool]:
            if not guest.oid:
                self.cancel(guest.task)
            else:
                self.tasks.cancel(guest.oid, False)

    def recall(self, peer: int, tasks: list[bytes]) -> None:
        """Returns those of these tasks that have not begun to the host that sent them."""
        for task in tasks:
            guest = self.by_task.get(task)
            if guest is not None and guest.peer == peer:
                self._return(guest)

    def recall_all(self, peer: int) -> None:
        """Returns all tasks of that host that have not begun, except calls of actors and tasks of
        rounds, which only this host can run."""
        for guest in [one for one in self.by_task.values() if one.peer == peer]:
            pool = self.tasks.pool_of(guest.oid) if guest.oid else POOL
            if not (self.above.is_actor(pool) or self.above.is_round(pool)):
                self._return(guest)

    def give_back(self, oid: int) -> None:
        """Returns a task to its host, if it has not begun."""
        self._return(self.by_oid[oid])

    def try_again(self, oid: int) -> None:
        """Returns a task that is to run again after a delay; its host keeps the time."""
        self._return(self.by_oid[oid], "again")

    def _return(self, guest: InboundTask, outcome: str = "returned") -> None:
        oid = guest.oid
        if not oid or guest.ended:
            return
        if self._is_held(oid):  # its holders must not read that the task was cancelled
            if not self.client.take_over(oid, NODE_SLOT):
                return  # it runs
            # The owner must count this host before it receives the task, because perhaps no process
            # of another host holds the result.
            self.imports.follow_owner(oid)
            self.above.dropped(guest.task)
        elif self.tasks.cancel(oid, False) != 1:
            return
        guest.ended = True
        self.send(guest.peer, TaskEnded(guest.task, outcome))
        self._forget(guest)

    def _is_held(self, oid: int) -> bool:
        """Whether a process or room of this host holds that task's result, besides the guest."""
        refs = self.client.inspect(oid)["refs"]
        return refs != [NODE_SLOT] or self.client.private_counts(oid)[0] > 1

    def lose_peer(self, peer: int) -> None:
        """Cancels the tasks of a host that is gone, and forgets them."""
        for guest in [one for one in self.by_task.values() if one.peer == peer]:
            if not guest.ended:
                self.cancel(guest.task)
            if guest.oid:
                self._forget(guest)


def _nothing() -> None:
    """Readers that wait for the object are woken through its header, not by this callback."""
