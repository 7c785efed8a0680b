"""Inbound tasks: tasks from other hosts that run on this host's workers.

A task from another host is added to the node's own table once this host holds every object to which
the task refers. Workers treat it like any other task. When the task ends, its host receives a
message, which contains the result if that is small. A large result stays here until the task's host
releases it.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp import _serialize, _tasks, errors
from hoplite_mp._common.object_states import AWAY, KIND_TASK, NODE_SLOT, STATE
from hoplite_mp._node.objects.remote_objects import layout_of, payload_layout
from hoplite_mp._protocol.fields import INLINE_BYTES_MAX, NO_OBJECT
from hoplite_mp._protocol.peers import TaskEnded

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.objects.imports import Imports
    from hoplite_mp._node.objects.results import ResultWriter
    from hoplite_mp._node.trace_events import TraceEvents
    from hoplite_mp._planner.resources import Demand
    from hoplite_mp._protocol.messages import Member
    from hoplite_mp._protocol.peers import PeerMessage, Release, RunTask

__all__ = ["InboundTasks"]

POOL = 0
RANKED_FLAG: int = _tasks.RANKED_FLAG
POOL_CLOSING = 2

_log = logging.getLogger("hoplite_mp")


@dataclass(slots=True)
class InboundTask:
    """One task from another host. `holds`: holds (references) on the task's result and on its named
    objects, which are its function, its arguments, and the refs in them."""

    peer: int
    task: bytes
    holds: list[Any]
    oid: int = 0  # id of its header here; 0: this host does not hold all named objects yet
    ended: bool = False
    unwanted: bool = False
    ready: bool = False  # for a call to an actor: this host holds all named objects
    pool: int = POOL
    late: bool = False  # for a call to an actor: the call arrived after the actor was closed
    target: bytes = b""  # the lost result that the task reconstructs


class InboundTasksEvents(Protocol):
    """Reports and requests from this component to the components above it."""

    def queue_of(self, pool: int) -> int:
        """The queue in which the node announces tasks to the pool's workers on this host."""

    def post_inbound(self, oid: int) -> None:
        """Announces a task to workers on this host once the queue has space."""

    def interrupt(self, oid: int, slot: int) -> None:
        """Interrupts the worker in the slot if it is running the task."""

    def is_actor(self, pool: int) -> bool:
        """Whether the pool belongs to an actor on this host, which every other host may call."""

    def refuse_calls(self, pool: int) -> None:
        """Fails the queued calls to the pool's actor if the actor has ended."""

    def is_round(self, pool: int) -> bool:
        """Whether the pool belongs to a worker broadcast (_node/tasks/worker_broadcast.py)."""

    def arrived(self, pool: int) -> None:
        """Called when a task has been added to the pool."""

    def task_ends(self, slot: int) -> None:
        """Called when a task in the slot has ended. Forwards the worker's output before the end of
        the task is reported."""

    def admit(self, peer: int, task: bytes, demand: Demand, needed: bool) -> bool:
        """Reserves resources for a task. Returns False if they are not free."""

    def admitted(self, oid: int, task: bytes, demand: Demand) -> None:
        """Records the header of a task for which resources were reserved."""

    def dropped(self, task: bytes) -> None:
        """Releases resources that were reserved for a task that will not run here."""


class InboundTasks:
    """All tasks from other hosts on this host."""

    def __init__(
        self,
        results: ResultWriter,
        imports: Imports,
        send: Callable[[int, PeerMessage], bool],
        trace_events: TraceEvents,
        events: InboundTasksEvents,
    ) -> None:
        self.results = results
        self.client = results.client
        self.tasks = results.tasks
        self.imports = imports
        self.send = send
        self.events = events
        self.by_task: dict[bytes, InboundTask] = {}
        self.by_oid: dict[int, InboundTask] = {}
        self.pools: dict[int, int] = {}  # pool that only runs tasks of one other host -> host id
        # (host id, pool of an actor) -> calls that have not begun, in the order of arrival.
        self.rows: dict[tuple[int, int], deque[tuple[InboundTask, RunTask]]] = {}
        self.trace_events = trace_events
        trace_events.ask_at_start(
            lambda: [(oid, inbound_task.task) for oid, inbound_task in self.by_oid.items()]
        )
        self.ranked = _tasks.Ranked(self.tasks)

    def __contains__(self, oid: int) -> bool:
        return oid in self.by_oid

    def run(self, peer: int, message: RunTask) -> None:
        """Accepts a task. Ignores a duplicate."""
        if message.task in self.by_task:
            return
        if message.demand:
            needed = message.floor != _tasks.NO_FLOOR
            if not self.events.admit(peer, message.task, message.demand, needed):
                self.send(peer, TaskEnded(message.task, "full"))
                return
        inbound_task = self.by_task[message.task] = InboundTask(
            peer, message.task, [], pool=message.pool, target=message.target
        )
        named = [message.function]
        if message.args:
            named += _serialize.read_refs(memoryview(message.args))
        if message.args_object != NO_OBJECT:
            named.append(message.args_object)
        try:
            self._ask(inbound_task, message, named)
        except Exception as error:  # for example, no header is free; the sender needs an answer
            for key, row in list(self.rows.items()):
                self.rows[key] = deque(waiting for waiting in row if waiting[0] is not inbound_task)
            self.rows = {key: row for key, row in self.rows.items() if row}
            if self.by_task.get(inbound_task.task) is inbound_task:
                self._fail(inbound_task, error)

    def _ask(self, inbound_task: InboundTask, message: RunTask, named: list[bytes]) -> None:
        """Begins the task once this host holds every object that the task names."""
        if not self.events.is_actor(message.pool):
            # The sender keeps these objects alive until the task has ended.
            self.imports.ask(
                named, lambda holds: self._begin(inbound_task, message, holds), inbound_task.peer
            )
            return
        # Calls from one host to one actor begin in the order of their arrival, even if the objects
        # of a later call are available first.
        row = self.rows.setdefault((inbound_task.peer, message.pool), deque())
        row.append((inbound_task, message))
        inbound_task.late = self.tasks.pool_state(message.pool) == POOL_CLOSING
        self.imports.ask(named, lambda holds: self._ready(inbound_task, holds), inbound_task.peer)

    def _ready(self, inbound_task: InboundTask, holds: list[Any]) -> None:
        """Marks a call to an actor as ready, because this host now holds its named objects. Begins
        all ready calls that are not waiting for an earlier one."""
        inbound_task.holds = holds
        inbound_task.ready = True
        for key, row in list(self.rows.items()):
            if key[0] == inbound_task.peer:
                while row and row[0][0].ready:
                    first, message = row.popleft()
                    self._begin(first, message, first.holds)
                if not row:
                    del self.rows[key]

    def _begin(self, inbound_task: InboundTask, message: RunTask, holds: list[Any]) -> None:
        if inbound_task.unwanted:
            self._refused(inbound_task)
            return
        with_args = message.args_object != NO_OBJECT
        if holds[0] is None or (with_args and holds[-1] is None):
            self._refused(inbound_task)
            # The sender knows why the function or the arguments are missing.
            self.send(inbound_task.peer, TaskEnded(inbound_task.task, "returned"))
            return
        pool, closed = message.pool, inbound_task.late
        if closed or (
            pool != POOL
            and self.pools.get(pool) != inbound_task.peer
            and not self.events.is_actor(pool)
        ):
            self._refused(inbound_task)
            kind = errors.ActorLostError if closed else errors.WorkerLostError
            short = kind("the actor was closed" if closed else "its pool has been closed")
            payload = _serialize.encode_error(short, "").tobytes()
            self.send(
                inbound_task.peer,
                TaskEnded(inbound_task.task, "failed", len(payload), False, payload),
            )
            return
        try:
            self._post(inbound_task, message, holds)
        except Exception as error:  # for example, no queue is free; the sender needs an answer
            self._fail(inbound_task, error)
            return
        self._prefetch(message, holds)
        self.events.arrived(pool)
        if self.events.is_actor(pool):
            self.events.refuse_calls(pool)

    def _post(self, inbound_task: InboundTask, message: RunTask, holds: list[Any]) -> None:
        """Adds the task to the node's own table and announces it."""
        oid = self.client.new(KIND_TASK, STATE["WAITING"], 0, message.pool)
        inbound_task.oid, inbound_task.holds = oid, [self.client.hold(oid, False), *holds]
        self.by_oid[oid] = inbound_task
        self.imports.adopt(inbound_task.task, oid)
        self.trace_events.inbound_task(oid, inbound_task.task)
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
            self.events.queue_of(message.pool),
            not ranked,
            self.output_owner_here(inbound_task.peer, message.output_owner),
            message.tries,
        )
        if ranked:
            self.ranked.rank(oid, message.priority, message.floor)
        if message.demand:
            self.events.admitted(oid, message.task, message.demand)
        if ranked or not posted:
            self.events.post_inbound(oid)

    def _fail(self, inbound_task: InboundTask, error: Exception) -> None:
        """Fails a task that cannot begin here."""
        self.events.dropped(inbound_task.task)
        _log.error("a task of node %#x cannot begin", inbound_task.peer, exc_info=error)
        if inbound_task.oid and self.client.take_over(inbound_task.oid, NODE_SLOT):
            # `completed` will report the error to the sender.
            self.results.store_error(inbound_task.oid, error)
            return
        self._forget(inbound_task)
        payload = _serialize.encode_error(error, "").tobytes()
        self.send(
            inbound_task.peer, TaskEnded(inbound_task.task, "failed", len(payload), False, payload)
        )

    def _refused(self, inbound_task: InboundTask) -> None:
        """Forgets a task that will not run here."""
        del self.by_task[inbound_task.task]
        self.events.dropped(inbound_task.task)

    def has_pending_calls(self, pool: int) -> bool:
        """Whether calls to the actor have arrived and are still waiting for objects."""
        return any(key[1] == pool for key in self.rows)

    def output_owner_here(self, peer: int, output_owner: int) -> int:
        """Translates the output owner (the driver that receives the output) in a message from
        another host. In such a message 0 means the driver of the sending host."""
        output_owner = output_owner or peer
        return 0 if output_owner == self.client.host_id else output_owner

    def _prefetch(self, message: RunTask, holds: list[Any]) -> None:
        """Fetches the task's arguments while the workers are busy with earlier tasks."""
        mem = memoryview(message.args)
        if message.args_object != NO_OBJECT:
            got = self.client.view(holds[-1].oid)
            if isinstance(got, int):  # the object that contains the arguments is not here yet
                return
            mem = memoryview(got)
        remote_objects = self.imports.remote_objects
        for object_id in dict.fromkeys(_serialize.read_dependencies(mem) if mem else ()):
            record = self.imports.by_object.get(object_id)
            if record is not None and record.oid in remote_objects:
                # If the object does not fit now, the worker fetches it.
                remote_objects.want(record.oid, _nothing)

    # -- ends of tasks -------------------------------------------------------------------------

    def completed(self, oids: list[int]) -> None:
        """Reports the ends of inbound tasks to their hosts. oids: ended tasks in the node's
        tables."""
        for oid in oids:
            inbound_task = self.by_oid.get(oid)
            if inbound_task is not None and not inbound_task.ended:
                self._end(inbound_task)

    def _end(self, inbound_task: InboundTask) -> None:
        state = self.client.state(inbound_task.oid)
        if state == STATE["ABORTED"]:
            return  # the task is still running, and is reported when it has stopped
        inbound_task.ended = True
        inbound_task.holds = inbound_task.holds[:1]
        self.events.task_ends(self.tasks.claimant(inbound_task.oid))
        message = self._ending(inbound_task)
        kept = message.refs or (message.outcome == "ready" and message.payload is None)
        if not self.send(inbound_task.peer, message) or not kept:
            self._forget(inbound_task)

    def _ending(self, inbound_task: InboundTask) -> TaskEnded:
        oid = inbound_task.oid
        got = self.client.view(oid)
        if isinstance(got, int):
            if got in AWAY:
                nbytes, refs = self.client.inspect(oid)["size"], self.client.flags(oid)[0]
                layout = layout_of(self.results, self.imports.remote_objects, oid)
                return TaskEnded(inbound_task.task, "ready", nbytes, refs, None, layout)
            return TaskEnded(inbound_task.task, "cancelled")
        mem = memoryview(got)
        refs = bool(_serialize.read_refs(mem))
        if _serialize.payload_kind(mem) == _serialize.ERROR:
            payload = _serialize.short_error(mem)
            refs = bool(_serialize.read_refs(memoryview(payload)))
            return TaskEnded(inbound_task.task, "failed", len(payload), refs, payload)
        small = bytes(mem) if mem.nbytes <= INLINE_BYTES_MAX else None
        return TaskEnded(inbound_task.task, "ready", mem.nbytes, refs, small, payload_layout(mem))

    def release(self, peer: int, message: Release) -> bool:
        """Releases a result that the sender no longer needs. Returns False if the message is not
        about an inbound task."""
        inbound_task = self.by_task.get(message.object)
        if inbound_task is None or inbound_task.peer != peer:
            return False
        self._forget(inbound_task)
        return True

    def _forget(self, inbound_task: InboundTask) -> None:
        self.by_task.pop(inbound_task.task, None)
        self.by_oid.pop(inbound_task.oid, None)
        inbound_task.holds = []

    # -- cancelling and returning --------------------------------------------------------------

    def cancel(self, task: bytes) -> None:
        """Cancels a task. If the task is running, interrupts its worker."""
        inbound_task = self.by_task.get(task)
        if inbound_task is None or inbound_task.ended:
            return
        if not inbound_task.oid:
            inbound_task.unwanted = True
            self.send(inbound_task.peer, TaskEnded(task, "cancelled"))
        elif self.tasks.cancel(inbound_task.oid, True) == 2:
            self.events.interrupt(inbound_task.oid, self.tasks.claimant(inbound_task.oid))

    def withdraw(self, pool: int) -> None:
        """Cancels the tasks of a pool that have not begun."""
        for inbound_task in [task for task in self.by_task.values() if task.pool == pool]:
            if not inbound_task.oid:
                self.cancel(inbound_task.task)
            else:
                self.tasks.cancel(inbound_task.oid, False)

    def recall(self, peer: int, tasks: list[bytes]) -> None:
        """Returns the listed tasks to their host. Tasks that have begun stay here."""
        for task in tasks:
            inbound_task = self.by_task.get(task)
            if inbound_task is not None and inbound_task.peer == peer:
                self._return(inbound_task)

    def recall_all(self, peer: int) -> None:
        """Returns a host's tasks that have not begun, except calls to actors and tasks of worker
        broadcasts, which only this host can run."""
        for inbound_task in [task for task in self.by_task.values() if task.peer == peer]:
            pool = self.tasks.pool_of(inbound_task.oid) if inbound_task.oid else POOL
            if not (self.events.is_actor(pool) or self.events.is_round(pool)):
                self._return(inbound_task)

    def give_back(self, oid: int) -> None:
        """Returns a task to its host if it has not begun."""
        self._return(self.by_oid[oid])

    def try_again(self, oid: int) -> None:
        """Returns a task to its host, which measures the delay before the task runs again."""
        self._return(self.by_oid[oid], "again")

    def _return(self, inbound_task: InboundTask, outcome: str = "returned") -> None:
        oid = inbound_task.oid
        if not oid or inbound_task.ended:
            return
        if self._is_held(oid):  # its holders must not read that the task was cancelled
            if not self.client.take_over(oid, NODE_SLOT):
                return  # it is running
            # The result may have no holder on another host, so the owner must count this host as a
            # holder before it receives the task.
            self.imports.follow_owner(oid)
            self.events.dropped(inbound_task.task)
        elif self.tasks.cancel(oid, False) != 1:
            return
        inbound_task.ended = True
        self.send(inbound_task.peer, TaskEnded(inbound_task.task, outcome))
        self._forget(inbound_task)

    def _is_held(self, oid: int) -> bool:
        """Whether a process on this host, or another component of this node, also holds the task's
        result."""
        refs = self.client.inspect(oid)["refs"]
        return refs != [NODE_SLOT] or self.client.private_counts(oid)[0] > 1

    def peer_lost(self, member: Member) -> None:
        """Cancels and forgets the tasks from a lost host."""
        for inbound_task in [task for task in self.by_task.values() if task.peer == member.host_id]:
            if not inbound_task.ended:
                self.cancel(inbound_task.task)
            if inbound_task.oid:
                self._forget(inbound_task)


def _nothing() -> None:
    """Does nothing, because waiting readers are woken through the object's header."""
