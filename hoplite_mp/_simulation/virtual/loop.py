"""The loop of a simulated host: its time, timers and descriptors come from the timeline.

It implements LoopPort (_node/ports.py), so a real node can run on it. All code of a host runs in
turns of its loop; a stopped host has no turns.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._simulation.faults.message_faults import MessageFault
    from hoplite_mp._simulation.network import VirtualNetwork
    from hoplite_mp._simulation.timeline import Timeline

__all__ = ["EPOCH_S", "Descriptor", "Descriptors", "VirtualLoop"]

T = TypeVar("T")

# Initial time of the clocks, which is not 0, because 0 means "never" in some places.
EPOCH_S = 1000.0
# The longest time that it takes to wake a process.
WAKE_S = 20e-6
# The longest duration of work in a thread.
THREAD_S = 0.002
# The first simulated descriptor; numbers below belong to the system.
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

    def add(self, descriptor: Descriptor) -> int:
        """Registers a descriptor; returns its number."""
        self._last += 1
        self.all[self._last] = descriptor
        return self._last


class VirtualLoop:
    """The loop of one process on one host. `ended`: whether the process has ended."""

    def __init__(
        self,
        timeline: Timeline,
        network: VirtualNetwork,
        host: int,
        descriptors: Descriptors,
        turn: Callable[[Callable[[], object]], None],
    ) -> None:
        """turn: runs its argument as one turn of the process."""
        self.timeline = timeline
        self.network = network
        self.host = host
        self.ended = False
        self._descriptors = descriptors
        self._turn = turn
        self._ready: dict[int, Callable[[], None]] = {}
        self._notified: set[int] = set()

    # -- turns ---------------------------------------------------------------------------------

    def run(self, action: Callable[[], object]) -> None:
        """Runs a turn now, or when a stopped host is resumed."""
        if self.ended:
            return
        if self.host in self.network.stopped:
            self.network.deliver(self.host, self.host, self.run, action)
        else:
            self._turn(action)

    def run_soon(self, action: Callable[[], object]) -> None:
        """Runs a turn after a random time, at most WAKE_S."""
        timeline = self.timeline
        timeline.after(WAKE_S * timeline.rng.random(), self.run, action)

    # -- the interface of LoopPort -------------------------------------------------------------

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
        descriptor = self._descriptors.all.get(fd)
        if descriptor is not None and descriptor.is_ready:
            self.notify(fd)

    def unwatch(self, fd: int) -> None:
        self._ready.pop(fd, None)

    def run_in_thread(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        def ended() -> None:
            found = work()
            self.run_soon(lambda: done(found))

        self.timeline.after(THREAD_S * self.timeline.rng.random(), ended)

    def repeat_in_thread(
        self, interval_s: float, work: Callable[[], None], name: str
    ) -> Callable[[], None]:
        ends: list[bool] = []

        def again() -> None:
            if ends or self.ended:
                return
            if self.host in self.network.stopped:
                self.network.deliver(self.host, self.host, again)
                return
            work()
            self.timeline.after(interval_s, again)

        self.timeline.after(interval_s, again)
        return lambda: ends.append(True)

    # -- descriptors ---------------------------------------------------------------------------

    def notify(self, fd: int) -> None:
        """Called when there is data to read at this descriptor."""
        if fd in self._ready and fd not in self._notified and not self.ended:
            self._notified.add(fd)
            self.run_soon(partial(self._serve, fd))

    def _serve(self, fd: int) -> None:
        self._notified.discard(fd)
        ready = self._ready.get(fd)
        if ready is None:
            return
        ready()
        descriptor = self._descriptors.all.get(fd)
        # Repeats the event for unread data, as level-triggered epoll does.
        if descriptor is not None and descriptor.is_ready:
            self.notify(fd)
