"""The loop of a node on a real host: epoll, a clock, timers, threads.

It implements LoopPort (_node/ports.py) for one process.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import threading
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from hoplite_mp._common import clock

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EpollLoop"]

T = TypeVar("T")


class EpollLoop:
    """See LoopPort in _node/ports.py. In each turn, the user of the loop calls `call_due`, `wait`
    and `serve`."""

    def __init__(self) -> None:
        self.now = clock.monotonic
        self.now_ns = clock.monotonic_ns
        self._epoll = select.epoll()
        self._ready: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        # The number of timers so far. Of two timers with the same time, the one added first runs
        # first.
        self._timer = 0
        # Results of threads, to be handled in the loop.
        self._finished: deque[Callable[[], None]] = deque()
        # An eventfd with which threads wake the loop. It is created now, because descriptors may
        # run out later.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self._wake, self._finish)

    # -- descriptors ---------------------------------------------------------------------------

    def watch(
        self, fd: int, ready: Callable[[], None], *, read: bool = True, write: bool = False
    ) -> None:
        events = (select.EPOLLIN if read else 0) | (select.EPOLLOUT if write else 0)
        known = fd in self._ready
        self._ready[fd] = ready
        # Epoll may have dropped a descriptor that was closed without `unwatch`. Conversely, it may
        # still watch an unwatched descriptor, because a duplicate is open.
        with contextlib.suppress(FileNotFoundError if known else FileExistsError):
            (self._epoll.modify if known else self._epoll.register)(fd, events)
            return
        (self._epoll.register if known else self._epoll.modify)(fd, events)

    def unwatch(self, fd: int) -> None:
        self._ready.pop(fd, None)
        with contextlib.suppress(OSError, ValueError):  # it is closed or no longer watched
            self._epoll.unregister(fd)

    def wait(self, seconds: float | None) -> list[int]:
        """Waits at most `seconds` (None: no limit). Returns the descriptors that are ready."""
        return [fd for fd, _ in self._epoll.poll(seconds)]

    def serve(self, ready: list[int]) -> None:
        """Calls the handlers of these descriptors, except those that an earlier handler
        unwatched."""
        for fd in ready:
            action = self._ready.get(fd)
            if action is not None:
                action()

    # -- time ----------------------------------------------------------------------------------

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        self._timer += 1
        heapq.heappush(self._timers, (self.now() + seconds, self._timer, action))

    def call_due(self) -> None:
        """Calls the timers that are due."""
        now = self.now()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    @property
    def due(self) -> float | None:
        """The time of the next timer, or None if there is none."""
        return self._timers[0][0] if self._timers else None

    # -- threads -------------------------------------------------------------------------------

    def run_in_thread(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        def run() -> None:
            found = work()
            self._finished.append(lambda: done(found))
            os.eventfd_write(self._wake, 1)

        try:
            threading.Thread(target=run, name="hoplite_mp work", daemon=True).start()
        # The user has reached the limit of threads, so the loop runs the work itself.
        except RuntimeError:
            run()

    def repeat_in_thread(
        self, interval_s: float, work: Callable[[], None], name: str
    ) -> Callable[[], None]:
        over = threading.Event()

        def run() -> None:
            while not over.wait(interval_s):
                work()

        threading.Thread(target=run, name=name, daemon=True).start()
        return over.set

    def _finish(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._finished:
            self._finished.popleft()()
