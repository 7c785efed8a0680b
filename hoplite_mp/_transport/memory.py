"""Connections inside one process, for tests. The test itself moves each byte.

Tests can thus reproduce all interruptions and delays of a network, in any order. In all other
respects these streams behave like those in stream.py.
"""

from __future__ import annotations

from hoplite_mp._protocol.handshake import PLAIN
from hoplite_mp._transport.stream import QUEUE_BYTES_MAX, READ_BYTES, Outgoing

__all__ = ["MemoryStream", "MemoryWire", "pair"]


class MemoryWire:
    """One direction of a connection: bytes in transit, and bytes that have arrived."""

    def __init__(self) -> None:
        self.bytes_passed = 0
        self._way = bytearray()
        self._arrived = bytearray()
        self._ended = False  # the sender has closed the connection, after the bytes in transit
        self._cut_at: int | None = None

    def cut_after(self, nbytes: int) -> None:
        """Cuts the connection: byte number `nbytes` and all later bytes are lost."""
        self._cut_at = nbytes

    @property
    def broken(self) -> bool:
        return self._cut_at is not None and self.bytes_passed >= self._cut_at

    def pump(self, nbytes_max: int | None = None) -> int:
        """Lets bytes arrive, by default all of them. Returns their number."""
        count = len(self._way) if nbytes_max is None else min(nbytes_max, len(self._way))
        if self._cut_at is not None:
            count = min(count, self._cut_at - self.bytes_passed)
        self._arrived += self._way[:count]
        del self._way[:count]
        self.bytes_passed += count
        return count

    def send(self, data: bytearray) -> None:
        self._way += data

    def end(self) -> None:
        self._ended = True

    def take(self, nbytes_max: int) -> bytes:
        data = bytes(self._arrived[:nbytes_max])
        del self._arrived[:nbytes_max]
        return data

    @property
    def at_end(self) -> bool:
        """Whether the reader has received all bytes that can still arrive."""
        return not self._arrived and (self.broken or (self._ended and not self._way))


class MemoryStream:
    """One end of a connection. certificate_sha256: the hash of the certificate that this side
    pretends to have received."""

    def __init__(
        self,
        incoming: MemoryWire,
        outgoing: MemoryWire,
        certificate_sha256: bytes = PLAIN,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
    ) -> None:
        self.incoming = incoming
        self.outgoing = outgoing
        self.certificate_sha256: bytes | None = certificate_sha256
        self.failure: str | None = None
        self.bytes_received = 0
        self.bytes_sent = 0
        self._queue = Outgoing(queue_bytes_max)
        self._ended = False

    def fileno(self) -> int:
        raise ValueError("a stream in memory has no descriptor: pump its wires")

    @property
    def buffered(self) -> bool:
        return False

    @property
    def wants_read(self) -> bool:
        return not self._ended

    @property
    def wants_write(self) -> bool:
        return bool(self._queue) and self.failure is None

    def read(self, nbytes_max: int = READ_BYTES) -> bytes | None:
        data = b"" if self._ended else self.incoming.take(nbytes_max)
        self.bytes_received += len(data)
        if not data and (self._ended or self.incoming.at_end):
            if self.incoming.broken and not self._ended:
                self.failure = "the connection was cut"
            self._ended = True
            return None
        return data

    def write(self, data: bytes) -> None:
        self._queue.add(data)

    def flush(self) -> bool:
        if self.outgoing.broken:
            self.failure = "the connection was cut"
        if self.failure is None:
            self.outgoing.send(self._queue.waiting)
            self.bytes_sent += len(self._queue)
            self._queue.waiting.clear()
        return self.failure is None

    def close(self) -> None:
        self._ended = True
        self._queue.waiting.clear()
        self.outgoing.end()


def pair(
    client_sees: bytes = PLAIN, server_has: bytes = PLAIN, queue_bytes_max: int = QUEUE_BYTES_MAX
) -> tuple[MemoryStream, MemoryStream]:
    """Returns (the client's end, the server's end) of a new connection. To move bytes, pump their
    `incoming` and `outgoing` wires."""
    up, down = MemoryWire(), MemoryWire()
    return (
        MemoryStream(down, up, client_sees, queue_bytes_max),
        MemoryStream(up, down, server_has, queue_bytes_max),
    )
