"""Virtual time: a queue of events, whose order depends on nothing but a seed.

A run must be deterministic. Everything that happens is an event here, simultaneous events are
processed in the order of their creation, and there is one source of randomness.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Timeline"]

# Log lines kept for diagnosing a failed run. Higher: a longer history.
TAIL_LINES = 400


class Timeline:
    """A clock that jumps from event to event."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.events = 0  # number of processed events
        self.rng = random.Random(seed)
        self.time_changed: Callable[[], None] | None = None  # called when the time has changed
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def at(self, time: float, call: Callable[..., object], *arguments: Any) -> None:
        """Calls `call` at the given time, or now if that is past."""
        self._scheduled += 1
        heappush(self._heap, (max(time, self.now), self._scheduled, call, arguments))

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        """Calls `call` after the given number of seconds."""
        self._scheduled += 1
        heappush(self._heap, (self.now + seconds, self._scheduled, call, arguments))

    def note(self, line: str) -> None:
        """Adds a line to the log. `digest` is a hash of the log."""
        line = f"{self.now:.9f} {line}"
        self._digest.update(line.encode())
        self.tail.append(line)

    @property
    def digest(self) -> str:
        """A hash of the log: equal digests mean equal logs."""
        return self._digest.hexdigest()

    def run(self, events_max: int, until: float) -> bool:
        """Processes all events in order. Returns False if it stops at `events_max` events, or
        before an event after `until`."""
        heap = self._heap
        while heap:
            if self.events >= events_max or heap[0][0] > until:
                return False
            time, _, call, arguments = heappop(heap)
            if time != self.now:
                self.now = time
                if self.time_changed is not None:
                    self.time_changed()
            self.events += 1
            call(*arguments)
        return True
