"""How a process waits for objects. A waiting worker runs awaited tasks, or counts as blocked.

If all workers only waited for tasks that they have submitted, no worker could run these tasks. So a
worker runs an awaited task in place if it can. A worker that has waited for a while counts as
blocked, and the node then starts another worker.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

from hoplite_mp import _tasks
from hoplite_mp._client.calls import OwnCalls
from hoplite_mp._common import clock, locks
from hoplite_mp._common.clock import FOREVER_NS, Deadline
from hoplite_mp._common.object_states import AWAY
from hoplite_mp.errors import HopliteTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from hoplite_mp._client.ports import Submitting

__all__ = ["Waiting"]

BLOCKED_AFTER_NS = 2_000_000
ALL_AT_ONCE = 256  # maximum number of objects in one wait; longer lists are divided
TAKEN_POLLS = 32  # maximum number of tasks that are tried again at each wake-up


class _Needed:
    """The objects that a waiting worker needs. The worker may run their tasks in place."""

    __slots__ = ("all", "ready", "taken")

    def __init__(self, everything: set[int]) -> None:
        self.all = everything
        self.ready: list[int] = []  # tasks whose arguments are ready and that have not been tried
        self.taken: deque[int] = deque()  # tasks that were tried and could not be run in place


class Waiting:
    """Performs the waits of one process."""

    def __init__(self, submitter: Submitting) -> None:
        self.submitter = submitter
        self.memory = submitter.memory
        self.tasks = submitter.tasks
        self.run_in_place: Callable[[int], bool] | None = None  # set in a worker
        self.own_calls: OwnCalls | None = None  # set in an actor
        self._needed: list[_Needed] = []  # one for each wait in progress; waits may be nested
        self._blocked = 0  # number of threads in this worker that are waiting inside a task
        self._lock = locks.lock("client.blocked")

    def forbid(self, pool: int, places: int = 1) -> None:
        """From now on, raises an error if an actor's call waits for a later call to the same actor
        and the wait would never end. Called in the actor's process. pool: the pool whose tasks are
        the actor's calls. places: the maximum number of calls that run at the same time."""
        self.own_calls = OwnCalls(self.tasks, pool, places)

    def own_waits(self, oids: list[int], awaits: bool = False) -> AbstractContextManager[None]:
        """A context manager around a wait. Raises RuntimeError if the wait would never end, because
        it is for a later call to the same actor."""
        if self.own_calls is None:
            return contextlib.nullcontext()
        return self.own_calls.waits(oids, awaits)

    def wait_done(self, oid: int, deadline: int) -> None:
        """Waits until the object is done. Meanwhile a worker runs needed tasks or counts as
        blocked."""
        forever = deadline == FOREVER_NS
        needed: _Needed | None = None
        try:
            while not self.tasks.done(oid):
                if needed is None and forever and self.run_in_place is not None:
                    needed = self._find_needed(oid)
                if needed is not None and self._run_needed(needed):
                    self.submitter.drain()  # tasks that needed the result may be ready now
                elif not self.wait_many([oid], 1, deadline, forever):
                    name = self.tasks.name(oid)
                    what = f"the result of {name}()" if name else "the object"
                    within_s = deadline.within_s if isinstance(deadline, Deadline) else 0
                    raise HopliteTimeoutError(f"{what} was not ready within {within_s:g} s")
        finally:
            if needed is not None:
                self._needed.remove(needed)

    def _find_needed(self, oid: int) -> _Needed:
        """Collects this process's tasks that the object depends on, directly or indirectly. Called
        once for each wait. `ready` adds tasks that become ready later."""
        needed = _Needed({oid})
        # Registered first, so that tasks that become ready during the search are added, too.
        self._needed.append(needed)
        path = [oid]
        while path:
            oid = path.pop()
            pending = self.submitter.pending.get(oid)
            missing = () if pending is None else tuple(pending.missing)
            if not missing:
                needed.ready.append(oid)
            for need in missing:
                if need not in needed.all:
                    needed.all.add(need)
                    path.append(need)
        return needed

    def ready(self, oid: int) -> None:
        """Called when a task that this process has submitted can run. Adds the task to the waits
        that need it."""
        for needed in self._needed:
            if oid in needed.all:
                needed.ready.append(oid)

    def _run_needed(self, needed: _Needed) -> bool:
        """Runs the awaited task, or a task that it depends on, in place in this worker. Returns
        False if none can be run now, usually because other workers are running them."""
        assert self.run_in_place is not None
        while needed.ready:
            oid = needed.ready.pop()
            if self.run_in_place(oid):
                return True
            if not self.tasks.done(oid):
                needed.taken.append(oid)
        # A task that could not be claimed may be in the queue now: again, after its worker's death,
        # or for the first time, if another process submitted it. Only a few tasks are tried,
        # because this happens at every wake-up.
        for _ in range(min(len(needed.taken), TAKEN_POLLS)):
            oid = needed.taken.popleft()
            if self.run_in_place(oid):
                return True
            if not self.tasks.done(oid):
                needed.taken.append(oid)
        return False

    def wait_many(self, oids: list[int], need: int, deadline: int, news: bool = False) -> bool:
        """Waits until `need` of these objects are done. Returns False at the deadline. news:
        whether to return True also when any other object completes."""
        if need == len(oids) > ALL_AT_ONCE:  # otherwise each wake-up would check all of them
            parts = (oids[at : at + ALL_AT_ONCE] for at in range(0, need, ALL_AT_ONCE))
            return all(self.wait_many(part, len(part), deadline) for part in parts)
        if self.own_calls is not None:
            with self.own_calls.waits(oids):
                return self._wait_many(oids, need, deadline, news)
        return self._wait_many(oids, need, deadline, news)

    def _wait_many(self, oids: list[int], need: int, deadline: int, news: bool) -> bool:
        locks.waits("objects")
        counted, blocked = self.run_in_place is None, False
        try:
            while True:
                self.memory.check()
                until = deadline
                if not counted:
                    until = min(deadline, clock.monotonic_ns() + BLOCKED_AFTER_NS)
                outcome = self.tasks.wait(oids, need, until, True)
                if outcome == _tasks.NEWS:
                    self.submitter.drain()
                    if news:
                        return True
                elif outcome == _tasks.DONE:
                    return True
                elif outcome == _tasks.CLOSING:
                    raise self.memory.node_gone()
                elif clock.monotonic_ns() >= deadline:
                    return False
                elif not counted:
                    counted = blocked = True
                    self.count_blocked(1)
        finally:
            if blocked:
                self.count_blocked(-1)

    def wait_moved(self, oid: int, deadline: int) -> bool:
        """Waits until the bytes of a finished object are on this host. Returns False at the
        deadline."""
        locks.waits("the bytes of an object")
        counted, blocked = self.run_in_place is None, False
        parked = self.tasks.park([oid])
        try:
            while True:
                seen = self.tasks.event()
                self.memory.check()
                if self.memory.client.state(oid) not in AWAY:
                    return True
                until = deadline
                if not counted:
                    until = min(deadline, clock.monotonic_ns() + BLOCKED_AFTER_NS)
                outcome = self.tasks.wait_event(seen, until, False, oid)
                if outcome == _tasks.CLOSING:
                    raise self.memory.node_gone()
                if clock.monotonic_ns() >= deadline:
                    return False
                if not counted:
                    counted = blocked = True
                    self.count_blocked(1)
        finally:
            self.tasks.unpark(parked)
            if blocked:
                self.count_blocked(-1)

    def count_blocked(self, change: int) -> None:
        """Adds `change` to the number of threads in this worker that are waiting inside a task. If
        the number is not 0, the worker counts as blocked, and another worker may take its place."""
        with self._lock:
            # Not below 0: a forced cancel may interrupt a wait after it has set `blocked`, but
            # before it has added 1.
            self._blocked = max(0, self._blocked + change)
            if self.memory.client.usable:
                self.tasks.set_blocked(self._blocked > 0)

    def wait_idle(self, deadline: int) -> bool:
        """Waits until every task submitted by this process is done. Returns False at the
        deadline."""
        while self.submitter.pending:
            self.submitter.drain()
            oids = list(self.submitter.pending)
            if oids and not self.wait_many(oids, len(oids), deadline):
                return False
            self.submitter.drain()
            if all(self.tasks.done(oid) for oid in oids):
                self.submitter.look_at_all()  # the last done bits may not be set yet
                if not self.submitter.pending.keys() - oids:
                    break  # the rest cannot be processed now, for example because the store is full
        return True
