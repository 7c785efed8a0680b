"""The port Loop of a node in the hands of a test: time passes when it is told to."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ManualLoop"]

T = TypeVar("T")


class ManualLoop:
    """See hoplite_mp/_node/ports.py. `watched`: what is called when a descriptor is ready."""

    def __init__(self, now: float = 1000.0) -> None:
        self.time = now
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.watched: dict[int, Callable[[], None]] = {}
        self._order = itertools.count()

    def now(self) -> float:
        return self.time

    def now_ns(self) -> int:
        return round(self.time * 1e9)

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (self.time + seconds, next(self._order), action))

    def watch(
        self, fd: int, ready: Callable[[], None], *, read: bool = True, write: bool = False
    ) -> None:
        self.watched[fd] = ready

    def unwatch(self, fd: int) -> None:
        self.watched.pop(fd, None)

    def run_in_thread(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        found = work()
        self.call_later(0.0, lambda: done(found))

    def repeat_in_thread(
        self, interval_s: float, work: Callable[[], None], name: str
    ) -> Callable[[], None]:
        over = []

        def again() -> None:
            if not over:
                work()
                self.call_later(interval_s, again)

        self.call_later(interval_s, again)
        return lambda: over.append(True)

    def pass_to(self, time: float) -> None:
        """Calls what is due until then, each at its time."""
        while self.timers and self.timers[0][0] <= time:
            at, _, action = heapq.heappop(self.timers)
            self.time = max(self.time, at)
            action()
        self.time = time

    def pass_time(self, seconds: float) -> None:
        self.pass_to(self.time + seconds)

    def call_all(self) -> None:
        """Calls each timer that waits now, once, whenever it is due."""
        timers, self.timers = sorted(self.timers), []
        for _, _, action in timers:
            action()
