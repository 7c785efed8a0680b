"""Connections between simulated hosts: ordered bytes, closing, resets; and frames of engines.

Real nodes and managers read from and write to streams. These have the interface of
_transport/stream.py, with the simulated network instead of the kernel.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from hoplite_mp._simulation.faults.message_faults import spring
from hoplite_mp._simulation.network import VirtualPipe
from hoplite_mp._transport.stream import READ_BYTES

if TYPE_CHECKING:
    from types import TracebackType

    from hoplite_mp._simulation.network import VirtualNetwork
    from hoplite_mp._simulation.virtual.loop import Descriptors

__all__ = ["VirtualSocket", "VirtualStream", "connect"]

RESET = "Connection reset by peer"


class Noticing(Protocol):
    """The loop of a process."""

    def notice(self, fd: int) -> None:
        """There is something to read at this descriptor."""


class Bulk(Protocol):
    """An engine's end of a connection."""

    def take(self, data: bytes) -> None:
        """These bytes have arrived."""

    def ended(self) -> None:
        """No more bytes will arrive."""


class VirtualStream:
    """One end of a connection; see `Stream` in _transport/stream.py."""

    certificate_sha256: bytes | None = bytes(32)
    peer: VirtualStream
    out: VirtualPipe

    def __init__(self, descriptors: Descriptors, loop: Noticing, host: int) -> None:
        self.loop = loop
        self.host = host
        self.failure: str | None = None
        self.bytes_received = self.bytes_sent = 0
        self.bulk: Bulk | None = None  # the engine that has taken it over
        self.is_closed = False
        self._fd = descriptors.add(self)
        self._traps = descriptors.message_faults
        self._inbox: deque[bytes] = deque()
        self._queue: list[bytes] = []
        self._ended = False  # closed or reset by the other end; nothing follows the inbox
        self._early: list[bytes] = []  # frames that arrived before an engine took it over

    # -- the interface of Stream -----------------------------------------------------------------

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
        """Hands the stream over to an engine."""
        return VirtualSocket(self)

    # -- receiving -------------------------------------------------------------------------------

    def receive(self, data: bytes | None) -> None:
        """Receives data from the other end. b"": that end was closed. None: data from here reached
        that end after it was closed, which resets the connection."""
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
        """Receives a frame of the other end's engine."""
        if self.bulk is not None:
            self.bulk.take(data)
        elif not self.is_closed:
            self._early.append(data)

    def attach(self, bulk: Bulk) -> None:
        """An engine takes this end over."""
        self.bulk = bulk
        early, self._early = self._early, []
        for data in early:
            bulk.take(data)
        if self._ended or self.failure:
            bulk.ended()

    def break_off(self) -> None:
        """Resets this end of the connection."""
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
    """A stream on its way to an engine; see `TcpStream.detach`."""

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
        """Does nothing, because the engine keeps a descriptor of its own."""


def connect(
    network: VirtualNetwork,
    descriptors: Descriptors,
    one: tuple[Noticing, int],
    other: tuple[Noticing, int],
) -> tuple[VirtualStream, VirtualStream]:
    """Connects two processes, each given as (loop, host). Returns both ends."""
    ours, theirs = (VirtualStream(descriptors, *end) for end in (one, other))
    ours.peer, theirs.peer = theirs, ours
    ours.out = VirtualPipe(network, (ours.host, theirs.host), theirs.receive)
    theirs.out = VirtualPipe(network, (theirs.host, ours.host), ours.receive)
    return ours, theirs
