"""Hosts on a switch: rates and delays of their links, stopped hosts, cuts.

Blocks leave a host one after another, at the host's up rate. They arrive at the receiver's down
rate, behind earlier blocks. Sending and receiving overlap, as with packets. Streams with a ready
block are served in turn, and each has at most WINDOW_BLOCKS in flight, so a blocked stream does not
block others. Messages have priority over blocks and are ordered within a connection; they delay the
next block by their transmission time. Messages on different connections may overtake each other.

Data for a stopped or unreachable host is queued. When a connection ends, data in flight is lost.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._simulation.timeline import Timeline

__all__ = ["OutgoingStream", "Port", "VirtualNetwork", "VirtualPipe"]

# Blocks of one stream that may be in flight. Higher: one stream fills a busy receiver's queue. At
# 1, a link would be idle while the last byte of a block arrives.
WINDOW_BLOCKS = 2
# Delay between processes on one host.
LOCAL_DELAY_S = 20e-6


class OutgoingStream(Protocol):
    """A stream that has a block ready."""

    to: int

    def take(self) -> tuple[int, int] | None:
        """Returns the next block, which is then sent. Returns None if it is no longer needed."""

    def arrive(self, begin: int, end: int) -> None:
        """Called when the block has arrived."""


class Port:
    """A host's connection to the switch."""

    __slots__ = ("control_free", "debt_s", "down", "down_free", "host", "ready", "sending", "up")

    def __init__(self, host: int, up: float, down: float) -> None:
        self.host = host
        self.up = up
        self.down = down
        self.ready: deque[OutgoingStream] = deque()
        self.sending = False
        self.down_free = 0.0  # when all data in flight to this host has arrived
        self.control_free = 0.0  # when all queued messages have been sent
        self.debt_s = 0.0  # time by which messages delay the next block


class VirtualNetwork:
    """Hosts by number, and the network between them."""

    def __init__(self, timeline: Timeline, latency_s: float, jitter_s: float) -> None:
        self.timeline = timeline
        self.latency_s = latency_s
        self.jitter_s = jitter_s
        self.ports: list[Port] = []
        self.stopped: set[int] = set()
        self.cut: set[tuple[int, int]] = set()  # pairs in both directions
        # (sender, receiver) -> (bytes per second, time when all blocks have passed this path)
        self.narrow: dict[tuple[int, int], tuple[float, float]] = {}
        self.blocks = 0  # number of blocks sent
        self._blocked: dict[
            tuple[int, int], list[tuple[Callable[..., object], tuple[Any, ...]]]
        ] = {}

    def add(self, up: float, down: float) -> int:
        """Adds a host; returns its number."""
        self.ports.append(Port(len(self.ports), up, down))
        return len(self.ports) - 1

    def delay(self, one: int, other: int) -> float:
        """The delay of one packet, in seconds."""
        if one == other:
            return LOCAL_DELAY_S
        if not self.jitter_s:
            return self.latency_s
        return self.latency_s + self.jitter_s * self.timeline.rng.random()

    # ---- blocks

    def offer(self, host: int, stream: OutgoingStream) -> None:
        """Queues a stream that has a block ready."""
        port = self.ports[host]
        port.ready.append(stream)
        if not port.sending:
            self._turn(port)

    def _turn(self, port: Port) -> None:
        port.sending = False
        if port.host in self.stopped:
            return
        ready, timeline = port.ready, self.timeline
        port.sending = True  # set before `take`, in which the stream may offer its next block
        while ready:
            stream = ready.popleft()
            block = stream.take()
            if block is None:
                continue
            begin, end = block
            receiver = self.ports[stream.to]
            now, nbytes = timeline.now, end - begin
            sent = now + nbytes / port.up + port.debt_s
            port.debt_s = 0.0
            first = max(now + self.latency_s, receiver.down_free)
            arrives = max(first + nbytes / receiver.down, sent + self.latency_s)
            receiver.down_free = arrives
            if (path := (port.host, stream.to)) in self.narrow:
                rate, free = self.narrow[path]
                free = max(now, free) + nbytes / rate
                self.narrow[path] = rate, free
                arrives = max(arrives, free + self.latency_s)
            self.blocks += 1
            timeline.at(sent, self._turn, port)
            timeline.at(arrives, stream.arrive, begin, end)
            return
        port.sending = False

    # ---- messages

    def leaves_at(self, host: int, to: int, nbytes: int) -> float:
        """Sends a message of the given size. Returns the time at which its last byte is sent."""
        now = self.timeline.now
        if host == to:
            return now
        port = self.ports[host]
        seconds = nbytes / port.up
        port.debt_s += seconds
        port.control_free = max(now, port.control_free) + seconds
        return port.control_free

    # ---- stopped hosts and cuts

    def is_blocked(self, one: int, other: int) -> bool:
        """Whether `other` is stopped, or cut off from `one`."""
        return other in self.stopped or (one, other) in self.cut

    def deliver(self, one: int, other: int, call: Callable[..., object], *arguments: Any) -> None:
        """Delivers data from `one` to `other` as soon as that path is unblocked."""
        if self.is_blocked(one, other):
            self._blocked.setdefault((one, other), []).append((call, arguments))
        else:
            call(*arguments)

    def stop(self, host: int) -> None:
        """Stops the host: it neither sends nor receives."""
        self.stopped.add(host)

    def resume(self, host: int) -> None:
        """Resumes a stopped host."""
        self.stopped.discard(host)
        if not self.ports[host].sending:
            self._turn(self.ports[host])
        self._release()

    def separate(self, some: set[int], others: set[int]) -> None:
        """Cuts all traffic between `some` and `others`."""
        for one in some:
            for other in others:
                self.cut |= {(one, other), (other, one)}

    def join(self, some: set[int], others: set[int]) -> None:
        """Ends a cut made by `separate`."""
        for one in some:
            for other in others:
                self.cut -= {(one, other), (other, one)}
        self._release()

    def narrow_path(self, sender: int, receiver: int, rate: float) -> None:
        """Limits the rate of this path, even if both links are faster."""
        self.narrow[sender, receiver] = rate, 0.0

    def _release(self) -> None:
        for pair in [pair for pair in self._blocked if not self.is_blocked(*pair)]:
            for call, arguments in self._blocked.pop(pair):
                self.deliver(*pair, call, *arguments)


class VirtualPipe:
    """Messages in one direction between two processes, in order."""

    __slots__ = ("_last", "ends", "is_open", "network", "receive")

    def __init__(
        self, network: VirtualNetwork, ends: tuple[int, int], receive: Callable[[Any], object]
    ) -> None:
        self.network = network
        self.ends = ends
        self.receive = receive
        self.is_open = True
        self._last = 0.0

    def send(self, message: Any, nbytes: int) -> None:
        """Sends a message, which arrives after earlier ones. It is lost if the pipe is closed
        before it arrives."""
        network, (sender, receiver) = self.network, self.ends
        at = network.leaves_at(sender, receiver, nbytes) + network.delay(sender, receiver)
        self._last = max(self._last, at)
        network.timeline.at(self._last, self._arrive, message)

    def _arrive(self, message: Any) -> None:
        if self.is_open:
            self.network.deliver(*self.ends, self._hand_over, message)

    def _hand_over(self, message: Any) -> None:
        if self.is_open:
            self.receive(message)

    def close(self) -> None:
        """Closes the pipe. Messages in flight are lost."""
        self.is_open = False
