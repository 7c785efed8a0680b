"""The timeline of a run, and the loop of a simulated host with its timers and descriptors.

It implements LoopPort (_node/ports.py), so a real node can run on it. Everything on a host happens
in turns, and a stopped host has no turns.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._simulation.faults.message_faults import MessageFault
    from hoplite_mp._simulation.network import VirtualNetwork

__all__ = ["EPOCH_S", "Descriptor", "Descriptors", "Timeline", "VirtualLoop"]


T = TypeVar("T")

# Initial time of the clocks of a run. Zero would mean "never" in some places.
EPOCH_S = 1000.0
# The longest time until a sleeping process runs again.
WAKE_S = 20e-6
# The longest time that work in a thread takes.
THREAD_S = 0.002
# Numbers from here on are simulated descriptors; the system's are below.
FIRST_DESCRIPTOR = 1 << 24


class Descriptor(Protocol):
    """An object that a loop can watch."""

    @property
    def is_ready(self) -> bool:
        """Whether there is data to read."""


class Descriptors:
    """All descriptors of a run, by number. `message_faults`: faults that wait for a message."""

    def __init__(self) -> None:
        self.all: dict[int, Descriptor] = {}
        self.message_faults: list[MessageFault] = []
        self._last = FIRST_DESCRIPTOR

    def add(self, one: Descriptor) -> int:
        """Registers a descriptor; returns its number."""
        self._last += 1
        self.all[self._last] = one
        return self._last


class VirtualLoop:
    """The loop of one process of one host. `over`: the process has ended, and so has the loop."""

    def __init__(
        self,
        timeline: Timeline,
        network: VirtualNetwork,
        host: int,
        descriptors: Descriptors,
        turn: Callable[[Callable[[], object]], None],
    ) -> None:
        """turn: executes its argument as one turn of the process."""
        self.timeline = timeline
        self.network = network
        self.host = host
        self.over = False
        self._descriptors = descriptors
        self._turn = turn
        self._ready: dict[int, Callable[[], None]] = {}
        self._noticed: set[int] = set()

    # -- turns ---------------------------------------------------------------------------------

    def run(self, action: Callable[[], object]) -> None:
        """Makes a turn now, or when a stopped host continues."""
        if self.over:
            return
        if self.host in self.network.stopped:
            self.network.pass_on(self.host, self.host, self.run, action)
        else:
            self._turn(action)

    def run_soon(self, action: Callable[[], object]) -> None:
        """Makes a turn after the time for waking a process."""
        timeline = self.timeline
        timeline.after(WAKE_S * timeline.chance.random(), self.run, action)

    # -- the port ------------------------------------------------------------------------------

    def now(self) -> float:
        return EPOCH_S + self.timeline.now

    def now_ns(self) -> int:
        return int(self.now() * 1e9)

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        self.timeline.after(max(0.0, seconds), self.run, action)

    def watch(
        self, fd: int, ready: Callable[[], None], *, read: bool = True, write: bool = False
    ) -> None:
        self._ready[fd] = ready
        one = self._descriptors.all.get(fd)
        if one is not None and one.is_ready:
            self.notice(fd)

    def unwatch(self, fd: int) -> None:
        self._ready.pop(fd, None)

    def run_in_thread(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        def ended() -> None:
            found = work()
            self.run_soon(lambda: done(found))

        self.timeline.after(THREAD_S * self.timeline.chance.random(), ended)

    def repeat_in_thread(
        self, interval_s: float, work: Callable[[], None], name: str
    ) -> Callable[[], None]:
        ends: list[bool] = []

        def again() -> None:
            if ends or self.over:
                return
            if self.host in self.network.stopped:
                self.network.pass_on(self.host, self.host, again)
                return
            work()
            self.timeline.after(interval_s, again)

        self.timeline.after(interval_s, again)
        return lambda: ends.append(True)

    # -- descriptors ---------------------------------------------------------------------------

    def notice(self, fd: int) -> None:
        """There is data to read at this descriptor."""
        if fd in self._ready and fd not in self._noticed and not self.over:
            self._noticed.add(fd)
            self.run_soon(partial(self._serve, fd))

    def _serve(self, fd: int) -> None:
        self._noticed.discard(fd)
        ready = self._ready.get(fd)
        if ready is None:
            return
        ready()
        one = self._descriptors.all.get(fd)
        # Repeats the event for unread data, as level-triggered epoll does.
        if one is not None and one.is_ready:
            self.notice(fd)


# Virtual time: a queue of events, whose order depends on nothing but a seed.
#
# A run must be deterministic. Everything that happens is an event here, simultaneous events are
# processed in the order of their creation, and there is one source of randomness.


# Log lines kept for diagnosing a failed run. Higher: a longer history.
TAIL_LINES = 400


class Timeline:
    """A clock that jumps from event to event."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.events = 0  # number of processed events
        self.chance = random.Random(seed)
        self.passed: Callable[[], None] | None = None  # called when the time has changed
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._made = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def at(self, time: float, call: Callable[..., object], *arguments: Any) -> None:
        """Calls `call` at the given time, or now if that is past."""
        self._made += 1
        heappush(self._heap, (max(time, self.now), self._made, call, arguments))

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        """Calls `call` after the given number of seconds."""
        self._made += 1
        heappush(self._heap, (self.now + seconds, self._made, call, arguments))

    def note(self, line: str) -> None:
        """Adds a line to the log, of which `digest` is the hash."""
        line = f"{self.now:.9f} {line}"
        self._digest.update(line.encode())
        self.tail.append(line)

    @property
    def digest(self) -> str:
        """A hash of the log: equal digests mean equal logs."""
        return self._digest.hexdigest()

    def run(self, events_max: int, until: float) -> bool:
        """Processes all events in order; False if there are more than events_max, or later ones."""
        heap = self._heap
        while heap:
            if self.events >= events_max or heap[0][0] > until:
                return False
            time, _, call, arguments = heappop(heap)
            if time != self.now:
                self.now = time
                if self.passed is not None:
                    self.passed()
            self.events += 1
            call(*arguments)
        return True
