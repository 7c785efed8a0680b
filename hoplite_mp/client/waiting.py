"""How a process waits for its objects: in a worker by running them, or as one that is stood in for.

Why it exists: a worker that only waited would be one worker less; if all wait for tasks that they
have sent, nobody runs them. So what is waited for runs in place where it may, and a worker that has
waited for a while counts as blocked, and the node starts another one.
It must never know: how tasks are sent, who starts workers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from hoplite_mp import _tasks, errors
from hoplite_mp.client.calls import OwnCalls
from hoplite_mp.client.memory import FOREVER_NS
from hoplite_mp.errors import HopliteTimeoutError
from hoplite_mp.headers import AWAY

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from hoplite_mp.client.ports import Submitting

__all__ = ["Waiting"]

BLOCKED_AFTER_NS = 2_000_000
ALL_AT_ONCE = 256  # objects that are waited for together; all of more are waited for in parts
TAKEN_LOOKS = 32  # tasks claimed by others that are tried again at each news


class _Needed:
    """What one wait of a worker needs: it may run any of that in place."""

    __slots__ = ("all", "ready", "taken")

    def __init__(self, everything: set[int]) -> None:
        self.all = everything
        self.ready: list[int] = []  # has its arguments, and has not been tried yet
        self.taken: deque[int] = deque()  # had been claimed by others when it was tried


class Waiting:
    """The waits of one process."""

    def __init__(self, submitter: Submitting) -> None:
        self.submitter = submitter
        self.memory = submitter.memory
        self.tasks = submitter.tasks
        self.run_in_place: Callable[[int], bool] | None = None  # set in a worker
        self.own_calls: OwnCalls | None = None  # of an actor
        self._needed: list[_Needed] = []  # of the waits under way, one inside the other
        self._blocked = 0  # threads of a worker that wait inside a task
        self._lock = threading.Lock()

    def forbid(self, pool: int, places: int = 1) -> None:
        """This process runs that pool's tasks, an actor's calls, so many at a time: one that waits
        for a later one may have to wait for ever."""
        self.own_calls = OwnCalls(self.tasks, pool, places)

    def own_waits(self, oids: list[int], awaits: bool = False) -> AbstractContextManager[None]:
        """Around a wait. RuntimeError: it is for a later call of the actor that waits."""
        if self.own_calls is None:
            return contextlib.nullcontext()
        return self.own_calls.waits(oids, awaits)

    def wait_done(self, oid: int, deadline: int) -> None:
        """Until the object is done. A worker runs what it waits for, or counts as blocked."""
        begun = time.monotonic_ns()
        forever = deadline == FOREVER_NS
        needed: _Needed | None = None
        try:
            while not self.tasks.done(oid):
                if needed is None and forever and self.run_in_place is not None:
                    needed = self._find_needed(oid)
                if needed is not None and self._run_needed(needed):
                    self.submitter.drain()  # what it was needed for may be sent now
                elif not self.wait_many([oid], 1, deadline, forever):
                    name = self.tasks.name(oid)
                    what = f"the result of {name}()" if name else "the object"
                    seconds = max(0, deadline - begun) / 1e9  # a little less than what was asked
                    within = f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"
                    raise HopliteTimeoutError(f"{what} was not ready within {within} s")
        finally:
            if needed is not None:
                self._needed.remove(needed)

    def _find_needed(self, oid: int) -> _Needed:
        """All that this object needs, as far as this process has submitted it, is looked at once;
        tasks of it that are sent later are told by ready()."""
        needed = _Needed({oid})
        self._needed.append(needed)  # first: what is sent during the look is told, too
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
        """A task of this process was sent that had waited for its arguments."""
        for needed in self._needed:
            if oid in needed.all:
                needed.ready.append(oid)

    def _run_needed(self, needed: _Needed) -> bool:
        """In a worker: runs in place this task of its own, or one that this one waits for. False:
        there is none that others are not running already. Without it, workers that all wait for
        tasks that they have sent would leave nobody to run them."""
        assert self.run_in_place is not None
        while needed.ready:
            oid = needed.ready.pop()
            if self.run_in_place(oid):
                return True
            if not self.tasks.done(oid):
                needed.taken.append(oid)
        # Those that others have claimed: after a death, or sent by another process, they may be
        # free. Few are looked at, because each is looked at again for every news.
        for _ in range(min(len(needed.taken), TAKEN_LOOKS)):
            oid = needed.taken.popleft()
            if self.run_in_place(oid):
                return True
            if not self.tasks.done(oid):
                needed.taken.append(oid)
        return False

    def wait_many(self, oids: list[int], need: int, deadline: int, news: bool = False) -> bool:
        """Until `need` of them are done; False at the deadline. `news`: True also when something
        else has become done."""
        if need == len(oids) > ALL_AT_ONCE:  # each news would cost a look at all of them
            parts = (oids[at : at + ALL_AT_ONCE] for at in range(0, need, ALL_AT_ONCE))
            return all(self.wait_many(part, len(part), deadline) for part in parts)
        if self.own_calls is not None:
            with self.own_calls.waits(oids):
                return self._wait_many(oids, need, deadline, news)
        return self._wait_many(oids, need, deadline, news)

    def _wait_many(self, oids: list[int], need: int, deadline: int, news: bool) -> bool:
        counted, blocked = self.run_in_place is None, False
        try:
            while True:
                self.memory.check()
                until = deadline
                if not counted:
                    until = min(deadline, time.monotonic_ns() + BLOCKED_AFTER_NS)
                outcome = self.tasks.wait(oids, need, until, True)
                if outcome == _tasks.NEWS:
                    self.submitter.drain()
                    if news:
                        return True
                elif outcome == _tasks.DONE:
                    return True
                elif outcome == _tasks.CLOSING:
                    self.memory.check_lost()
                    raise errors.NodeLostError("the node of this host has ended")
                elif time.monotonic_ns() >= deadline:
                    return False
                elif not counted:
                    counted = blocked = True
                    self.count_blocked(1)
        finally:
            if blocked:
                self.count_blocked(-1)

    def wait_moved(self, oid: int, deadline: int) -> bool:
        """Until the bytes of a done object are no longer elsewhere; False at the deadline."""
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
                    until = min(deadline, time.monotonic_ns() + BLOCKED_AFTER_NS)
                outcome = self.tasks.wait_event(seen, until, False, oid)
                if outcome == _tasks.CLOSING:
                    self.memory.check_lost()
                    raise errors.NodeLostError("the node of this host has ended")
                if time.monotonic_ns() >= deadline:
                    return False
                if not counted:
                    counted = blocked = True
                    self.count_blocked(1)
        finally:
            self.tasks.unpark(parked)
            if blocked:
                self.count_blocked(-1)

    def count_blocked(self, change: int) -> None:
        """While any thread of a task waits, its worker counts as blocked: others stand in."""
        with self._lock:
            self._blocked += change
            if self.memory.client.usable:
                self.tasks.set_blocked(self._blocked > 0)

    def wait_idle(self, deadline: int) -> bool:
        """Until every task of this process is done."""
        while self.submitter.pending:
            self.submitter.drain()
            oids = list(self.submitter.pending)
            if oids and not self.wait_many(oids, len(oids), deadline):
                return False
            self.submitter.drain()
            if all(self.tasks.done(oid) for oid in oids):
                self.submitter.look_at_all()  # the bits of the last ones may still be on their way
                if not self.submitter.pending.keys() - oids:
                    break  # what is left cannot be looked after now: no room for refs inside it
        return True
