"""Non-blocking connections for event loops, and a failure detector for the other side.

Manager and node communicate over TCP, TLS and, in tests, memory. `ByteStream` is the common
interface of all three. Writes are queued up to a limit. When a connection has broken, `failure` is
the reason.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import Protocol

from hoplite_mp._protocol.handshake import PLAIN

__all__ = [
    "NOT_TLS",
    "QUEUE_BYTES_MAX",
    "READ_BYTES",
    "ByteStream",
    "Outgoing",
    "Silence",
    "TcpStream",
]


READ_BYTES = 256 << 10  # maximum number of bytes read before other connections are served
# The size of the first read. Most messages are small, and a buffer of READ_BYTES would be mapped
# and unmapped each time, which takes 20 us. A higher value saves calls for large messages.
FIRST_BYTES = 16 << 10
# Queue limit for a peer that does not read: four of the protocol's longest frames. With a higher
# value, slower peers are tolerated. With a lower value, a stopped peer occupies less memory until
# it is dropped.
QUEUE_BYTES_MAX = 64 << 20
SEND_BYTES = 256 << 10  # maximum passed to the kernel in one call, which rarely accepts more
# The text of a failure for which callers check, because the user can fix its cause.
NOT_TLS = "the other side does not speak TLS"

_AGAIN = (BlockingIOError, InterruptedError)


class ByteStream(Protocol):
    """The common interface for all kinds of connections. No method blocks."""

    # The numbers of application bytes transferred, for statistics.
    bytes_received: int
    bytes_sent: int

    @property
    def certificate_sha256(self) -> bytes | None:
        """The SHA-256 of the server's certificate as received by this side. Zeros without TLS; None
        until it is known."""

    @property
    def failure(self) -> str | None:
        """The reason why the connection broke. None while it works, and after an orderly end."""

    @property
    def buffered(self) -> bool:
        """Whether the stream has unread bytes that have already left the socket, so that no
        selector reports them. Always False after a read of READ_BYTES. May be True after a shorter
        read, and when the stream gets a new owner, which must therefore read once immediately."""

    @property
    def wants_read(self) -> bool:
        """Whether the loop should wake this stream when it is readable."""

    @property
    def wants_write(self) -> bool:
        """Whether the loop should wake this stream when it is writable."""

    def fileno(self) -> int:
        """The descriptor for the loop."""

    def read(self, nbytes_max: int = READ_BYTES) -> bytes | None:
        """Returns received data. b"": nothing has arrived. None: the connection has ended."""

    def write(self, data: bytes) -> None:
        """Queues data. If the queue would exceed its limit, queues nothing and raises
        ConnectionAbortedError, because the peer does not read, and the caller should drop it."""

    def flush(self) -> bool:
        """Sends as many queued bytes as the connection accepts now. Returns False if the connection
        is broken."""

    def close(self) -> None:
        """Closes the connection. Queued data is lost. May be called more than once."""


class Outgoing:
    """The send queue of one stream."""

    def __init__(self, nbytes_max: int) -> None:
        self.waiting = bytearray()
        self._nbytes_max = nbytes_max

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, data: bytes) -> None:
        if len(self.waiting) + len(data) > self._nbytes_max:
            raise ConnectionAbortedError(
                errno.ECONNABORTED,
                f"the other side does not read: {len(self.waiting)} bytes are queued, and with "
                f"{len(data)} more the queue would exceed {self._nbytes_max}",
            )
        self.waiting += data


class TcpStream:
    """A connected stream socket, which is made non-blocking."""

    certificate_sha256: bytes | None = PLAIN
    # Exceptions after which a send must be repeated later.
    _later: tuple[type[OSError], ...] = _AGAIN

    def __init__(self, sock: socket.socket, queue_bytes_max: int = QUEUE_BYTES_MAX) -> None:
        sock.setblocking(False)
        self.failure: str | None = None
        self.bytes_received = 0
        self.bytes_sent = 0
        self._sock = sock
        self._queue = Outgoing(queue_bytes_max)
        self._ended = False  # nothing more can be read
        self._detached = False

    def fileno(self) -> int:
        return self._sock.fileno()

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
        if self._ended:
            return None
        try:
            data = self._sock.recv(min(nbytes_max, FIRST_BYTES))
            if len(data) == FIRST_BYTES < nbytes_max:
                with contextlib.suppress(OSError):  # the next read raises the error again
                    data += self._sock.recv(nbytes_max - FIRST_BYTES)
        except _AGAIN:
            return b""
        except OSError as error:
            self._ended = True
            self.failure = self._words(error)
            return None
        self.bytes_received += len(data)
        self._ended = not data
        return data or None

    def opener(self) -> int | None:
        """Returns the first unread byte without removing it. None: nothing has arrived.

        Raises OSError if the connection is broken or has ended.
        """
        try:
            # Use the base class's method, because SSLSocket's method does not support MSG_PEEK.
            data = socket.socket.recv(self._sock, 1, socket.MSG_PEEK)
        except _AGAIN:
            return None
        if not data:
            raise ConnectionError("the other side closed the connection")
        return data[0]

    def write(self, data: bytes) -> None:
        self._queue.add(data)

    def flush(self) -> bool:
        # A failed write does not end reading, because the other side may have sent a message about
        # the failure.
        waiting = self._queue.waiting
        while waiting and self.failure is None:
            try:
                if len(waiting) <= SEND_BYTES:
                    sent = self._sock.send(waiting)
                else:  # the views must be released before the queue shrinks
                    with memoryview(waiting) as whole, whole[:SEND_BYTES] as piece:
                        sent = self._sock.send(piece)
            except self._later:
                break
            except OSError as error:
                self.failure = self._words(error)
                break
            self.bytes_sent += sent
            del waiting[:sent]
        return self.failure is None

    def finish(self) -> None:
        """Informs the other side that nothing more will be sent. Data that still arrives can only
        be discarded."""
        self._ended = True
        with contextlib.suppress(OSError):  # the other side has already left
            self._sock.shutdown(socket.SHUT_WR)

    def discard(self) -> bool:
        """Discards received data. Returns False at the end of the stream.

        After `finish`, call this method until it returns False. If a socket with unread bytes were
        closed, the kernel would send a reset, and the last data could be lost.
        """
        try:
            return bool(socket.socket.recv(self._sock, READ_BYTES))
        except _AGAIN:
            return True
        except OSError:
            return False

    def detach(self) -> socket.socket:
        """Returns the socket, which is still non-blocking, for another owner. Ends this stream.

        Raises ValueError if bytes are still queued, because they would be lost.
        """
        if self._queue:
            raise ValueError(f"{len(self._queue)} bytes are still to be sent")
        self._detached = self._ended = True
        return self._sock

    def close(self) -> None:
        self._ended = True
        self._queue.waiting.clear()
        if not self._detached:
            self._sock.close()

    def _words(self, error: OSError) -> str:
        return reason_of(error)


def reason_of(error: OSError) -> str:
    """Describes an error of the operating system."""
    return os.strerror(error.errno) if error.errno is not None else str(error)


# The silence after which the other side of a connection counts as dead.
#
# A stopped or disconnected host does not close its connections. Both sides therefore send a
# heartbeat (an empty frame) at fixed intervals. The timeout adapts to the longest recent silence,
# so a loaded host has more time, and a failure in a quiet LAN is detected soon.


# The timeout as a multiple of the longest recent silence. With a higher value, a loaded host is
# mistaken for a dead host less often, but a dead host is detected later.
PATIENCE_FACTOR = 4.0
# The longest timeout, as a multiple of `patience_s`.
PATIENCE_MOST = 8.0
# A silence counts as recent for at least this time, and for at most twice this time.
LATELY_S = 30.0


class Silence:
    """The silence of one peer. patience_s: the duration of silence that is always permitted."""

    def __init__(self, now: float, patience_s: float) -> None:
        self.patience_s = patience_s
        self.heard_at = now
        self._longest = self._before = 0.0  # longest silences in this and in the previous period
        self._period_ends = now + LATELY_S

    def heard(self, now: float) -> None:
        """Records that data has arrived."""
        silent = now - self.heard_at
        self.heard_at = now
        if now >= self._period_ends:
            self._before, self._longest = self._longest, 0.0
            self._period_ends = now + LATELY_S
        self._longest = max(self._longest, silent)

    def excuse(self, seconds: float) -> None:
        """Records that this process itself did not run for this time, so that the time does not
        count as silence."""
        self.heard_at += seconds

    @property
    def deadline(self) -> float:
        """The time at which the peer counts as dead if no data arrives before."""
        longest = max(self._longest, self._before)
        timeout_max = PATIENCE_MOST * self.patience_s
        return self.heard_at + min(max(self.patience_s, PATIENCE_FACTOR * longest), timeout_max)
