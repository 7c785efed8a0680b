"""CPU time of simulated hosts: the computation of workers, engines and a server.

Runnable threads share the cores evenly, as under the scheduler of Linux. A host has a number of
cores; emulated hosts also share the cores of one machine. An engine has one thread, which processes
blocks in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._simulation.timeline import Timeline

__all__ = ["Cores"]

# A thread is done when less work than this remains, because sums have rounding errors.
OVER_S = 1e-12


@dataclass(slots=True, eq=False)
class _Thread:
    """A runnable thread. `left_s`: remaining CPU seconds."""

    host: int
    left_s: float
    done: Callable[..., object]
    arguments: tuple[Any, ...]
    rate: float = 0.0


class Cores:
    """The cores of all hosts. `used_s`: CPU seconds that each host has used."""

    def __init__(
        self,
        timeline: Timeline,
        hosts: int,
        per_host: float,
        shared: float | None,
        byte_s: float,
    ) -> None:
        """per_host: cores of each host; shared: cores of all hosts together, if they are emulated
        on one machine; byte_s: CPU seconds that an engine needs to send or to receive one byte."""
        self.timeline = timeline
        self.per_host = per_host
        self.shared = float("inf") if shared is None else shared
        self.byte_s = byte_s
        self.used_s = [0.0] * hosts
        self._ready: list[_Thread] = []
        self._since = 0.0  # when the rates were computed
        self._timer = 0  # number of the latest timer; earlier timers are invalid
        self._blocks: list[deque[tuple[int, Callable[..., object], tuple[Any, ...]]]] = [
            deque() for _ in range(hosts)
        ]

    def compute(
        self, host: int, seconds: float, done: Callable[..., object], *arguments: Any
    ) -> None:
        """Calls `done` when a thread of the host has computed for this many CPU seconds."""
        self._advance()
        self._ready.append(_Thread(host, seconds, done, arguments))
        self._share()

    def process(self, host: int, nbytes: int, done: Callable[..., object], *arguments: Any) -> None:
        """Calls `done` when the engine of the host has processed a block, after earlier ones."""
        if not self.byte_s:
            done(*arguments)
            return
        queue = self._blocks[host]
        queue.append((nbytes, done, arguments))
        if len(queue) == 1:
            self.compute(host, nbytes * self.byte_s, self._processed, host)

    def _processed(self, host: int) -> None:
        queue = self._blocks[host]
        _, done, arguments = queue.popleft()
        if queue:
            self.compute(host, queue[0][0] * self.byte_s, self._processed, host)
        done(*arguments)

    # ---- shares

    def settle(self) -> None:
        """Updates `used_s`."""
        self._advance()
        self._share()

    def _advance(self) -> None:
        seconds = self.timeline.now - self._since
        self._since = self.timeline.now
        if seconds > 0:
            for thread in self._ready:
                thread.left_s -= seconds * thread.rate
                self.used_s[thread.host] += seconds * thread.rate

    def _share(self) -> None:
        """Computes the rates, and sets a timer for the thread that finishes first."""
        if not self._ready:
            return
        counts = [0] * len(self.used_s)
        for thread in self._ready:
            counts[thread.host] += 1
        total = 0.0
        for thread in self._ready:
            thread.rate = min(1.0, self.per_host / counts[thread.host])
            total += thread.rate
        part = min(1.0, self.shared / total)
        for thread in self._ready:
            thread.rate *= part
        first = min(thread.left_s / thread.rate for thread in self._ready)
        self._timer += 1
        self.timeline.after(max(0.0, first), self._due, self._timer)

    def _due(self, timer: int) -> None:
        if timer != self._timer:
            return
        self._advance()
        over = [thread for thread in self._ready if thread.left_s <= OVER_S]
        self._ready = [thread for thread in self._ready if thread.left_s > OVER_S]
        self._share()
        for thread in over:
            thread.done(*thread.arguments)
