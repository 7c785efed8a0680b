"""Connections between simulated hosts: bytes in order, ends, resets; and bulk frames beside them.

Why it exists: a real node, or manager, writes into a stream and reads from one. These have the face
of transport/stream.py, and the network in the place of the kernel.
It must never know: who is at an end, what the bytes mean.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from hoplite_mp.simulation.cluster.traps import spring
from hoplite_mp.simulation.network import Channel
from hoplite_mp.transport.stream import READ_BYTES

if TYPE_CHECKING:
    from types import TracebackType

    from hoplite_mp.simulation.cluster.loop import Descriptors
    from hoplite_mp.simulation.network import Network

__all__ = ["VirtualSocket", "VirtualStream", "connect"]

RESET = "Connection reset by peer"


class Noticing(Protocol):
    """The loop of a process."""

    def notice(self, fd: int) -> None:
        """There is something to be read there."""


class Bulk(Protocol):
    """An engine's end of a connection."""

    def take(self, data: bytes) -> None:
        """These bytes have come."""

    def ended(self) -> None:
        """None will come any more."""


class VirtualStream:
    """One end of a connection; see `Stream` in transport/stream.py."""

    certificate_sha256: bytes | None = bytes(32)
    peer: VirtualStream
    out: Channel

    def __init__(self, descriptors: Descriptors, loop: Noticing, host: int) -> None:
        self.loop = loop
        self.host = host
        self.failure: str | None = None
        self.bytes_received = self.bytes_sent = 0
        self.bulk: Bulk | None = None  # the engine that has taken it over
        self.is_closed = False
        self._fd = descriptors.add(self)
        self._traps = descriptors.traps
        self._inbox: deque[bytes] = deque()
        self._queue: list[bytes] = []
        self._ended = False  # the other side has closed it, and nothing comes after the inbox
        self._early: list[bytes] = []  # of an engine, before there is one at this end

    # -- the face ------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return not self.is_closed and bool(self._inbox or self._ended or self.failure)

    @property
    def buffered(self) -> bool:
        return False

    @property
    def wants_read(self) -> bool:
        return not self._ended

    @property
    def wants_write(self) -> bool:
        return bool(self._queue) and self.failure is None

    def fileno(self) -> int:
        return self._fd

    def read(self, nbytes_max: int = READ_BYTES) -> bytes | None:
        found: list[bytes] = []
        room = nbytes_max
        while self._inbox and room:
            data = self._inbox.popleft()
            if len(data) > room:
                self._inbox.appendleft(data[room:])
                data = data[:room]
            found.append(data)
            room -= len(data)
        whole = b"".join(found)
        self.bytes_received += len(whole)
        if not whole and (self._ended or self.failure or self.is_closed):
            return None
        return whole

    def write(self, data: bytes) -> None:
        self._queue.append(data)

    def flush(self) -> bool:
        if self.failure is None and self._queue and not self.is_closed:
            data = b"".join(self._queue)
            self._queue.clear()
            self.bytes_sent += len(data)
            if self._traps:
                spring(self._traps, data, (self.host, self.peer.host), False)
            self.out.send(data, len(data))
        return self.failure is None

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._queue.clear()
            if self.failure is None:
                self.out.send(b"", 1)

    def detach(self) -> VirtualSocket:
        """The same, for an engine."""
        return VirtualSocket(self)

    # -- what comes ----------------------------------------------------------------------------

    def receive(self, data: bytes | None) -> None:
        """From the other end; no bytes: it was closed there; None: what was sent from here came
        after that."""
        if data is None:
            self.break_off()
        elif self.is_closed:
            if data:
                self.out.send(None, 1)
        elif data:
            self._inbox.append(data)
            self.loop.notice(self._fd)
            if self._traps:
                spring(self._traps, data, (self.peer.host, self.host), True)
        else:
            self._end()

    def receive_bulk(self, data: bytes) -> None:
        """The same, from engine to engine."""
        if self.bulk is not None:
            self.bulk.take(data)
        elif not self.is_closed:
            self._early.append(data)

    def attach(self, bulk: Bulk) -> None:
        """An engine has taken this end over."""
        self.bulk = bulk
        early, self._early = self._early, []
        for data in early:
            bulk.take(data)
        if self._ended or self.failure:
            bulk.ended()

    def break_off(self) -> None:
        """The connection is reset: what was on its way is lost."""
        if self.failure is None and not self.is_closed:
            self.failure = RESET
            self._end()

    def _end(self) -> None:
        self._ended = True
        if self.bulk is not None:
            self.bulk.ended()
        else:
            self.loop.notice(self._fd)


class VirtualSocket:
    """A stream that is handed over; see `TcpStream.detach`."""

    def __init__(self, stream: VirtualStream) -> None:
        self.stream = stream

    def fileno(self) -> int:
        return self.stream.fileno()

    def __enter__(self) -> VirtualSocket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """The engine has a descriptor of its own."""


def connect(
    network: Network,
    descriptors: Descriptors,
    one: tuple[Noticing, int],
    other: tuple[Noticing, int],
) -> tuple[VirtualStream, VirtualStream]:
    """A connection between two processes, each given as its loop and its host."""
    ours, theirs = (VirtualStream(descriptors, *end) for end in (one, other))
    ours.peer, theirs.peer = theirs, ours
    ours.out = Channel(network, (ours.host, theirs.host), theirs.receive)
    theirs.out = Channel(network, (theirs.host, ours.host), ours.receive)
    return ours, theirs
