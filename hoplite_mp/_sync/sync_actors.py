"""The objects in the actors' processes: one for each synchronization object.

A table (see `waiting`) makes the decisions. This module manages the promises for waiting calls, and
the *lives* of the calling processes (promises that are never fulfilled, see below). When a process
or its host dies, its life fails; its locks are then released, and its waiting calls are removed.
Any thread may detect a death, so a lock protects the table. If the lock is taken, the thread that
holds it handles the death.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize
from hoplite_mp._client.collector import watch
from hoplite_mp._client.runtime import current_runtime
from hoplite_mp._common import clock, locks
from hoplite_mp._common.object_states import KIND_PUT, STATE
from hoplite_mp._sync.waiting import (
    CallAnswer,
    Gathering,
    Item,
    Notifications,
    Permits,
    QueueTable,
    Recursive,
)
from hoplite_mp.errors import ObjectLostError, PeerLostError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._common.ref import ObjectRef
    from hoplite_mp._sync.waiting import Ticket

__all__ = [
    "PROCESS_BYTES",
    "BarrierActor",
    "BoundedSemaphoreActor",
    "ConditionActor",
    "EventActor",
    "LockActor",
    "PromiseLife",
    "QueueActor",
    "RLockActor",
    "Reply",
    "SemaphoreActor",
    "keep",
    "life_of",
    "promise",
]


# The reply to a call: (a CallAnswer as a number, a promise to wait for if the answer is WAIT).
Reply = tuple[int, Any]
_JOINED = "joined"
# How long other calls wait for an item that a cancelled caller may give back. With a higher value,
# items stay in order even if the caller's event loop is busy. With a lower value, the other calls
# return sooner.
UNCERTAIN_S = 0.5


class Served:
    """The base class of the objects. Fulfils promises, and handles the deaths of processes."""

    def __init__(self, table: Any = None) -> None:
        self._table = table
        self._runtime = current_runtime()
        self._promises: dict[Hashable, ObjectRef[Any]] = {}  # by ticket, or by a string if shared
        self._lives: dict[bytes, ObjectRef[Any]] = {}  # calling process -> its life
        self._lock = locks.lock("sync.table")
        self._deaths: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def enter(self, process: bytes, life: ObjectRef[Any]) -> None:
        """Registers a process, and is its first call. After this call, the actor detects the death
        of the process."""
        if process in self._lives:
            return
        self._lives[process] = life
        try:
            if life._hold is None:
                raise ObjectLostError("the process has died meanwhile")
            oid = self._runtime.memory.local_id(life)
            watch(self._runtime.submitter, oid, functools.partial(self._life_failed, process, oid))
        except ObjectLostError:
            self._deaths.put(process)
            self._look()

    def ping(self) -> None:
        """Does nothing. A handle calls this method to get the error if the actor has ended."""

    def waiters(self) -> int:
        """The number of waiting calls. All calls that are waiting for an event, or in `join`, count
        as one."""
        return len(self._promises)

    @contextlib.contextmanager
    def _alone(self, process: bytes | None = None) -> Iterator[Any]:
        """A context manager around a call's access to the table. Holds the lock, and at the end
        fulfils the promises for woken calls."""
        try:
            with self._lock:
                if process is not None and process not in self._lives:
                    raise PeerLostError(
                        "this process was declared dead after its host missed its heartbeats; "
                        "its locks and permits have been released"
                    )
                yield self._table
                self._wake()
        finally:  # even if the call has failed: a death may have been detected meanwhile
            self._look()

    def _wait(self, key: Hashable) -> Reply:
        promised = self._promises.get(key)
        if promised is None:
            promised = self._promises[key] = promise(self._runtime)
        return int(CallAnswer.WAIT), promised

    def _keep(self, key: Hashable, answer: CallAnswer) -> None:
        promised = self._promises.pop(key, None)
        if promised is not None:
            keep(self._runtime, promised, self._reply(key, answer))

    def _reply(self, key: Hashable, answer: CallAnswer) -> Any:
        """The value of a fulfilled promise."""
        return int(answer)

    def _wake(self) -> None:
        """Fulfils the promises for the calls that were just woken."""
        woken, self._table.woken = self._table.woken, []
        for ticket, answer in woken:
            self._keep(ticket, answer)

    # -- deaths --------------------------------------------------------------------------------

    def _life_failed(self, process: bytes, oid: int) -> None:
        """Called when a life has failed, because its process or host has died. May run in any
        thread, even during a call."""
        if self._runtime.tasks.done(oid):  # otherwise this process has lost its cluster
            self._deaths.put(process)
            self._look()

    def _look(self) -> None:
        """Handles deaths, unless another thread holds the lock. No death is missed, because every
        thread calls this method after it has released the lock."""
        while not self._deaths.empty() and self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(queue.Empty):
                    self._remove_process(self._deaths.get_nowait())
            finally:
                self._lock.release()

    def _remove_process(self, process: bytes) -> None:
        if self._lives.pop(process, None) is None:
            return
        self._table.died(process)
        self._wake()
        for key in [one for one in self._promises if one[0] == process]:  # type: ignore[index]
            self._keep(key, CallAnswer.REFUSED)


class QueueActor(Served):
    """The object for one queue."""

    def __init__(self, size_max: int) -> None:
        super().__init__(QueueTable(size_max))
        self._decided_by = 0.0  # time until which other calls wait for an uncertain item
        self.size_max = size_max

    def put(self, process: bytes, turn: int, value: Any, waits: bool) -> Reply:
        """Puts an item. The arguments, and the reply of `take`, are not nested, because messages
        without nested values are the fastest."""
        ticket = process, turn
        with self._alone(process) as table:
            answer = table.put(ticket, value, waits)
            return self._wait(ticket) if answer is CallAnswer.WAIT else (int(answer), None)

    def stop_putting(self, ticket: Ticket) -> int:
        with self._alone(ticket[0]) as table:
            answer = table.stop_putting(ticket)
            self._keep(ticket, answer)
            return int(answer)

    def take(
        self, process: bytes, turn: int, waits: bool, uncertain: bool = False
    ) -> Reply | tuple[int, int, Any]:
        """Returns (CallAnswer.DONE, the item's number, its value), or a Reply."""
        ticket = process, turn
        with self._alone(process) as table:
            if table.uncertain is not None and clock.monotonic() >= self._decided_by:
                table.decide()  # the caller's event loop is too busy to confirm the item in time
            found = table.take(ticket, waits, uncertain)
            if isinstance(found, Item):
                if uncertain:
                    self._decided_by = clock.monotonic() + UNCERTAIN_S
                if ticket in self._promises:  # the caller called again before it was woken
                    self._keep(ticket, CallAnswer.DONE)
                return int(CallAnswer.DONE), found.number, found.value
            if found is CallAnswer.WAIT:
                return self._wait(ticket)
            if found is CallAnswer.BUSY:
                return int(found), self._wait(ticket)[1]
            self._keep(ticket, found)
            return int(found), None

    def keep_item(self, process: bytes, turn: int) -> None:
        """Records that the caller has received its item, and will not give it back."""
        with self._alone(process) as table:
            table.keep_item((process, turn))

    def stop_taking(self, ticket: Ticket) -> None:
        with self._alone(ticket[0]) as table:
            table.stop_taking(ticket)
            self._keep(ticket, CallAnswer.REFUSED)

    def give_back(self, process: bytes, number: int, value: Any) -> None:
        with self._alone(process) as table:
            table.give_back(process, Item(number, value))

    def finish_one(self, process: bytes) -> bool:
        with self._alone(process) as table:
            return bool(table.finish_one(process))

    def join(self) -> Reply:
        with self._alone() as table:
            answer = table.join()
            return self._wait(_JOINED) if answer is CallAnswer.WAIT else (int(answer), table.lost)

    def end(self, at_once: bool) -> None:
        with self._alone() as table:
            table.end(at_once)

    def sizes(self) -> tuple[int, int]:
        """The number of items, and the queue's limit."""
        return len(self._table.items), self.size_max

    def _wake(self) -> None:
        super()._wake()
        if _JOINED in self._promises and (answer := self._table.join()) is not CallAnswer.WAIT:
            self._keep(_JOINED, answer)


class SemaphoreActor(Served):
    """The object for one semaphore."""

    def __init__(self, value: int, bounded: bool = False) -> None:
        super().__init__(Permits(value, bounded))
        self._first = value

    def acquire(self, ticket: Ticket, waits: bool) -> Reply:
        with self._alone(ticket[0]) as table:
            answer = table.acquire(ticket, waits)
            return self._wait(ticket) if answer is CallAnswer.WAIT else (int(answer), None)

    def stop_waiting(self, ticket: Ticket, keep: bool) -> int:
        with self._alone(ticket[0]) as table:
            answer = table.stop_waiting(ticket, keep)
            self._keep(ticket, answer)
            return int(answer)

    def release(self, process: bytes) -> bool:
        with self._alone(process) as table:
            return bool(table.release(process))

    def value(self) -> int:
        return int(self._table.free)

    def first_value(self) -> int:
        return self._first


class LockActor(SemaphoreActor):
    """The object for one lock."""

    def __init__(self) -> None:
        super().__init__(1, True)

    # Methods for a condition. `number` is the owner's number, which only a recursive lock uses.

    def is_held(self, process: bytes, number: int) -> bool:
        return process in self._table.held

    def release_all(self, process: bytes, number: int) -> int:
        with self._alone(process) as table:
            return int(process in table.held and table.release(process))

    def acquire_again(self, ticket: Ticket, number: int, times: int) -> Reply:
        return self.acquire(ticket, True)


class BoundedSemaphoreActor(SemaphoreActor):
    """The object for one bounded semaphore."""

    def __init__(self, value: int) -> None:
        super().__init__(value, True)


class RLockActor(Served):
    """The object for one recursive lock."""

    def __init__(self) -> None:
        super().__init__(Recursive())

    def acquire(self, ticket: Ticket, waits: bool, number: int, times: int = 1) -> Reply:
        with self._alone(ticket[0]) as table:
            answer = table.acquire(ticket, waits, number, times)
            return self._wait(ticket) if answer is CallAnswer.WAIT else (int(answer), None)

    def stop_waiting(self, ticket: Ticket, keep: bool) -> int:
        with self._alone(ticket[0]) as table:
            answer = table.stop_waiting(ticket, keep)
            self._keep(ticket, answer)
            return int(answer)

    def release(self, process: bytes, number: int) -> bool:
        with self._alone(process) as table:
            return bool(table.release(process, number))

    def value(self) -> int:
        return int(self._table.owner is None)

    def is_held(self, process: bytes, number: int) -> bool:
        return bool(self._table.owner == (process, number))

    def release_all(self, process: bytes, number: int) -> int:
        with self._alone(process) as table:
            return int(table.release_all(process, number))

    def acquire_again(self, ticket: Ticket, number: int, times: int) -> Reply:
        return self.acquire(ticket, True, number, times)


class ConditionActor(Served):
    """The object for one condition. Its lock is a separate object."""

    def __init__(self) -> None:
        super().__init__(Notifications())

    def wait(self, ticket: Ticket) -> ObjectRef[Any]:
        with self._alone(ticket[0]) as table:
            table.wait(ticket)
            promised: ObjectRef[Any] = self._wait(ticket)[1]
            return promised

    def stop_waiting(self, ticket: Ticket, keep: bool) -> int:
        with self._alone(ticket[0]) as table:
            answer = table.stop_waiting(ticket, keep)
            self._keep(ticket, answer)
            return int(answer)

    def returned(self, ticket: Ticket) -> None:
        with self._alone(ticket[0]) as table:
            table.returned(ticket)

    def notify(self, process: bytes, count: int) -> None:
        with self._alone(process) as table:
            table.notify(count)


class BarrierActor(Served):
    """The object for one barrier."""

    def __init__(self, parties: int) -> None:
        super().__init__(Gathering(parties))

    def arrive(self, ticket: Ticket, waits: bool, acts: bool) -> Reply:
        """Adds a call to the round. Returns a Reply that contains the call's index in place of
        None."""
        with self._alone(ticket[0]) as table:
            answer = table.arrive(ticket, waits, acts)
            # A call that completes a round is the last one in the round.
            return (
                self._wait(ticket)
                if answer is CallAnswer.WAIT
                else (int(answer), table.parties - 1)
            )

    def _reply(self, key: Hashable, answer: CallAnswer) -> tuple[int, int]:
        """The answer, and the call's index in its round."""
        return int(answer), self._table.indices.get(key, 0)

    def _wake(self) -> None:
        super()._wake()
        self._table.indices.clear()

    def acted(self, ticket: Ticket) -> bool:
        with self._alone(ticket[0]) as table:
            return bool(table.acted(ticket))

    def give_up(self, ticket: Ticket) -> int:
        with self._alone(ticket[0]) as table:
            answer = table.give_up(ticket)
            return int(answer)

    def leave(self, ticket: Ticket) -> None:
        with self._alone(ticket[0]) as table:
            table.leave(ticket)
            self._keep(ticket, CallAnswer.REFUSED)

    def abort(self) -> None:
        with self._alone() as table:
            table.abort()

    def reset(self) -> None:
        with self._alone() as table:
            table.reset()

    def state(self) -> tuple[int, int, bool]:
        """The number of parties, the number of waiting calls, and whether the barrier is broken."""
        return self._table.parties, len(self._table.waiting), self._table.broken


class EventActor(Served):
    """The object for one event. All waiting calls share one promise."""

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        self._keep("set", CallAnswer.DONE)

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, waits: bool) -> Reply:
        if self._is_set:
            return int(CallAnswer.DONE), None
        return self._wait("set") if waits else (int(CallAnswer.REFUSED), None)


# Promises: objects that stay pending until the process that created them fulfils them, or dies.
#
# A process may have to wait for an action by another process. A promise is an object that its
# creator has claimed, that is, reserved for its own writing. Any process on any host with a ref to
# the promise can wait for it as it would for any other object. When the creator or its host dies,
# the promise fails, like every object that is being written. So a wait for a promise also ends when
# its creator dies. If other processes must detect the death of a process, that process creates a
# promise that it never fulfils, its *life*.


PROCESS_BYTES = 8
_lock = locks.lock("sync.first_life")


def promise(runtime: Runtime) -> ObjectRef[Any]:
    """Creates a promise, which this process is to fulfil."""
    client = runtime.client
    oid = client.new(KIND_PUT, STATE["CLAIMED"], client.slot, 0)
    return runtime.memory.own_ref(oid)


def keep(runtime: Runtime, promised: ObjectRef[Any], value: Any) -> None:
    """Fulfils a promise that this process has created: seals it with a small value without refs."""
    oid = runtime.memory.local_id(promised)
    runtime.submitter.store_result(oid, _serialize.encode(value), False)


class PromiseLife:
    """The promise that lets other processes detect the death of this process."""

    def __init__(self, runtime: Runtime) -> None:
        self.process = os.urandom(PROCESS_BYTES)
        self.promise = promise(runtime)
        self.turns = itertools.count(1)
        self.lock = locks.rlock("sync.life")
        self.known_to: set[bytes] = set()  # identities of the actors that have received the promise


def life_of(runtime: Runtime) -> PromiseLife:
    """This process's PromiseLife."""
    life: PromiseLife | None = runtime.life
    if life is None:
        with _lock:
            life = runtime.life
            if life is None:
                life = runtime.life = PromiseLife(runtime)
    return life


def _forked() -> None:
    """Replaces the lock in a forked child, because a thread that does not exist there may hold
    it."""
    global _lock
    _lock = locks.lock("sync.first_life")


os.register_at_fork(after_in_child=_forked)
