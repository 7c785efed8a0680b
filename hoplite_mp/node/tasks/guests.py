"""Tasks of other hosts that workers of this host run.

Why it exists: a task from elsewhere becomes a task of the node's own table as soon as everything
that it names is held here; the workers cannot tell the difference. Its end is told to the host that
sent it, with the result if that is small; a big one stays until that host lets go of it.
It must never know: how messages travel, what tasks do, which host it would be best to run on.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp import _tasks, errors, ids, serial
from hoplite_mp.headers import AWAY, KIND_TASK, NODE_SLOT, STATE
from hoplite_mp.node.objects.layouts import layout_of, payload_layout
from hoplite_mp.protocol.peers import INLINE_BYTES_MAX, PAYLOAD_BYTES_MAX, TaskEnded

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.notes import Notes
    from hoplite_mp.node.objects.imports import Imports
    from hoplite_mp.node.objects.results import Results
    from hoplite_mp.planner.resources import Demand
    from hoplite_mp.protocol.peers import PeerMessage, Release, RunTask

__all__ = ["NO_OBJECT", "Guests"]

POOL = 0
RANKED_FLAG: int = _tasks.RANKED_FLAG
POOL_CLOSING = 2
NO_OBJECT = bytes(ids.ID_BYTES)

_log = logging.getLogger("hoplite_mp")


@dataclass(slots=True)
class Guest:
    """One task from elsewhere; `holds` are on its result and on all that it names."""

    peer: int
    task: bytes
    holds: list[Any]
    oid: int = 0  # 0: what it names is not here yet
    ended: bool = False
    unwanted: bool = False
    ready: bool = False  # a call of an actor: what it names is held here
    pool: int = POOL
    late: bool = False  # a call that has come after its actor was closed
    target: bytes = b""  # the lost result that it makes again


class Above(Protocol):
    """What rooms above this one know of its tasks, or must hear."""

    def queue_of(self, pool: int) -> int:
        """Of hints to workers of this host."""

    def post_guest(self, oid: int) -> None:
        """A task is announced to workers of this host, as soon as there is room for its hint."""

    def interrupt(self, oid: int, slot: int) -> None:
        """The worker in that slot, which runs that task."""

    def is_actor(self, pool: int) -> bool:
        """Is that the pool of an actor of this host? Then every other host may call it."""

    def refuse_calls(self, pool: int) -> None:
        """There are calls of that actor; it may have ended."""

    def is_round(self, pool: int) -> bool:
        """See node/tasks/rounds.py."""

    def arrived(self, pool: int) -> None:
        """That pool has a new task."""

    def task_ends(self, slot: int) -> None:
        """A task has ended that ran there; what its worker has printed goes before that word."""

    def admit(self, peer: int, task: bytes, demand: Demand, needed: bool) -> bool:
        """Is there room for a task with resources?"""

    def admitted(self, oid: int, task: bytes, demand: Demand) -> None:
        """A task with resources has that header."""

    def dropped(self, task: bytes) -> None:
        """A task with resources has not become one."""


class Guests:
    """All tasks of other hosts on this one."""

    def __init__(
        self,
        results: Results,
        imports: Imports,
        send: Callable[[int, PeerMessage], bool],
        notes: Notes,
        above: Above,
    ) -> None:
        self.results = results
        self.client = results.client
        self.tasks = results.tasks
        self.imports = imports
        self.send = send
        self.above = above
        self.by_task: dict[bytes, Guest] = {}
        self.by_oid: dict[int, Guest] = {}
        self.pools: dict[int, int] = {}  # of workers for one other host alone -> its home
        self.rows: dict[tuple[int, int], deque[tuple[Guest, RunTask]]] = {}
        self.notes = notes
        notes.ask_at_start(lambda: [(oid, guest.task) for oid, guest in self.by_oid.items()])
        self.ranked = _tasks.Ranked(self.tasks)

    def __contains__(self, oid: int) -> bool:
        return oid in self.by_oid

    def run(self, peer: int, message: RunTask) -> None:
        """Takes the task in; a double is ignored."""
        if message.task in self.by_task:
            return
        if message.demand:
            needed = message.floor != _tasks.NO_FLOOR
            if not self.above.admit(peer, message.task, message.demand, needed):
                self.send(peer, TaskEnded(message.task, "full"))
                return
        guest = self.by_task[message.task] = Guest(
            peer, message.task, [], pool=message.pool, target=message.target
        )
        named = [message.function]
        if message.args:
            named += serial.read_refs(memoryview(message.args))
        if message.args_object != NO_OBJECT:
            named.append(message.args_object)
        if not self.above.is_actor(message.pool):
            self.imports.ask(named, lambda holds: self._begin(guest, message, holds))
            return
        # Calls of one host begin in the order in which they came, whatever they wait for.
        row = self.rows.setdefault((peer, message.pool), deque())
        row.append((guest, message))
        guest.late = self.tasks.pool_state(message.pool) == POOL_CLOSING
        self.imports.ask(named, lambda holds: self._ready(guest, holds))

    def _ready(self, guest: Guest, holds: list[Any]) -> None:
        """What that call names is held here."""
        guest.holds = holds
        guest.ready = True
        for key, row in list(self.rows.items()):
            if key[0] == guest.peer:
                while row and row[0][0].ready:
                    first, message = row.popleft()
                    self._begin(first, message, first.holds)
                if not row:
                    del self.rows[key]

    def _begin(self, guest: Guest, message: RunTask, holds: list[Any]) -> None:
        if guest.unwanted:
            self._refused(guest)
            return
        with_args = message.args_object != NO_OBJECT
        if holds[0] is None or (with_args and holds[-1] is None):
            self._refused(guest)
            self.send(guest.peer, TaskEnded(guest.task, "returned"))  # it knows what has become
            return
        pool, closed = message.pool, guest.late
        if closed or (
            pool != POOL and self.pools.get(pool) != guest.peer and not self.above.is_actor(pool)
        ):
            self._refused(guest)
            kind = errors.ActorLostError if closed else errors.WorkerLostError
            short = kind("the actor was closed" if closed else "its pool has been closed")
            payload = serial.encode_error(short, "").tobytes()
            self.send(guest.peer, TaskEnded(guest.task, "failed", len(payload), False, payload))
            return
        try:
            self._post(guest, message, holds)
        except Exception as error:  # no table, no queue: who has sent it does not wait for ever
            self._fail(guest, error)
            return
        self._prefetch(message, holds)
        self.above.arrived(pool)
        if self.above.is_actor(pool):
            self.above.refuse_calls(pool)

    def _post(self, guest: Guest, message: RunTask, holds: list[Any]) -> None:
        """It becomes a task of this host's."""
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

    def _fail(self, guest: Guest, error: Exception) -> None:
        """It cannot begin here."""
        self.above.dropped(guest.task)
        _log.error("a task of node %#x cannot begin", guest.peer, exc_info=error)
        if guest.oid and self.client.take_over(guest.oid, NODE_SLOT):
            self.results.store_error(guest.oid, error)  # of which its sender is told
            return
        self._forget(guest)
        payload = serial.encode_error(error, "").tobytes()
        self.send(guest.peer, TaskEnded(guest.task, "failed", len(payload), False, payload))

    def _refused(self, guest: Guest) -> None:
        """It does not become a task of this host."""
        del self.by_task[guest.task]
        self.above.dropped(guest.task)

    def on_their_way(self, pool: int) -> bool:
        """Have calls come for that actor which wait for what they name?"""
        return any(key[1] == pool for key in self.rows)

    def audience_here(self, peer: int, audience: int) -> int:
        """An audience that another host has named, as this one does: 0 is its own driver."""
        audience = audience or peer
        return 0 if audience == self.client.home else audience

    def _prefetch(self, message: RunTask, holds: list[Any]) -> None:
        """Brings what it needs while the workers are busy with tasks before it."""
        mem = memoryview(message.args)
        if message.args_object != NO_OBJECT:
            got = self.client.view(holds[-1].oid)
            if isinstance(got, int):  # its arguments themselves are on their way
                return
            mem = memoryview(got)
        needed = set(serial.read_dependencies(mem)) if mem else set()
        remote_objects = self.imports.remote_objects
        for object_id in needed:
            one = self.imports.by_object.get(object_id)
            if one is not None and one.oid in remote_objects:
                remote_objects.want(one.oid, _nothing)  # without room its reader will ask for it

    # -- the end -------------------------------------------------------------------------------

    def completed(self, oids: list[int]) -> None:
        """Tasks of the node's tables that have become done: which of them are guests?"""
        for oid in oids:
            guest = self.by_oid.get(oid)
            if guest is not None and not guest.ended:
                self._end(guest)

    def _end(self, guest: Guest) -> None:
        state = self.client.state(guest.oid)
        if state == STATE["ABORTED"]:
            return  # it still runs; another word follows when it has stopped
        guest.ended = True
        guest.holds = guest.holds[:1]
        self.above.task_ends(self.tasks.claimant(guest.oid))
        message = self._ending(guest)
        kept = message.refs or (message.outcome == "ready" and message.payload is None)
        if not self.send(guest.peer, message) or not kept:
            self._forget(guest)

    def _ending(self, guest: Guest) -> TaskEnded:
        oid = guest.oid
        got = self.client.view(oid)
        if isinstance(got, int):
            if got in AWAY:
                nbytes, refs = self.client.inspect(oid)["size"], self.client.flags(oid)[0]
                layout = layout_of(self.results, self.imports.remote_objects, oid)
                return TaskEnded(guest.task, "ready", nbytes, refs, None, layout)
            return TaskEnded(guest.task, "cancelled")
        mem = memoryview(got)
        refs = bool(serial.read_refs(mem))
        if serial.payload_kind(mem) == serial.ERROR:
            if mem.nbytes > PAYLOAD_BYTES_MAX:
                short = MemoryError("the task's error is too large to travel")
                payload = serial.encode_error(short, "").tobytes()
                return TaskEnded(guest.task, "failed", len(payload), False, payload)
            return TaskEnded(guest.task, "failed", mem.nbytes, refs, bytes(mem))
        small = bytes(mem) if mem.nbytes <= INLINE_BYTES_MAX else None
        return TaskEnded(guest.task, "ready", mem.nbytes, refs, small, payload_layout(mem))

    def release(self, peer: int, message: Release) -> bool:
        """The sender has what it needs of the result. False: that is no guest."""
        guest = self.by_task.get(message.object)
        if guest is None or guest.peer != peer:
            return False
        self._forget(guest)
        return True

    def _forget(self, guest: Guest) -> None:
        self.by_task.pop(guest.task, None)
        self.by_oid.pop(guest.oid, None)
        guest.holds = []

    # -- before the end ------------------------------------------------------------------------

    def cancel(self, task: bytes) -> None:
        """By force: what waits does not begin, what runs is interrupted."""
        guest = self.by_task.get(task)
        if guest is None or guest.ended:
            return
        if not guest.oid:
            guest.unwanted = True
            self.send(guest.peer, TaskEnded(task, "cancelled"))
        elif self.tasks.cancel(guest.oid, True) == 2:
            self.above.interrupt(guest.oid, self.tasks.claimant(guest.oid))

    def withdraw(self, pool: int) -> None:
        """What has not begun of that pool's tasks is cancelled."""
        for guest in [one for one in self.by_task.values() if one.pool == pool]:
            if not guest.oid:
                self.cancel(guest.task)
            else:
                self.tasks.cancel(guest.oid, False)

    def recall(self, peer: int, tasks: list[bytes]) -> None:
        """Those of them that have not begun go back to that host."""
        for task in tasks:
            guest = self.by_task.get(task)
            if guest is not None and guest.peer == peer:
                self._return(guest)

    def recall_all(self, peer: int) -> None:
        """All that have not begun go back to that host, but calls of actors and tasks of rounds:
        nobody else can run those."""
        for guest in [one for one in self.by_task.values() if one.peer == peer]:
            pool = self.tasks.pool_of(guest.oid) if guest.oid else POOL
            if not (self.above.is_actor(pool) or self.above.is_round(pool)):
                self._return(guest)

    def give_back(self, oid: int) -> None:
        """That one, if it has not begun."""
        self._return(self.by_oid[oid])

    def _return(self, guest: Guest) -> None:
        if guest.oid and not guest.ended and self.tasks.cancel(guest.oid, False) == 1:
            guest.ended = True
            self.send(guest.peer, TaskEnded(guest.task, "returned"))
            self._forget(guest)

    def lose_peer(self, peer: int) -> None:
        """That host is gone, and nobody waits for its tasks."""
        for guest in [one for one in self.by_task.values() if one.peer == peer]:
            if not guest.ended:
                self.cancel(guest.task)
            if guest.oid:
                self._forget(guest)


def _nothing() -> None:
    """Who waits for the object is woken by its header."""
