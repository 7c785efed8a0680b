"""A client's line to its node: one request, one reply, from any thread.

Why it exists: a few things cannot be answered from shared memory. Each message is one packet, so an
interrupted call (Ctrl-C) can leave a stale reply behind but never half of one; stale replies are
recognised by their number. Before each request it is checked that the descriptor is still the line,
because user code may have closed it and opened a file of its own under the same number.
It must never know: what is asked.
"""

from __future__ import annotations

import errno
import socket
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp import errors
from hoplite_mp.client.descriptors import Watched, close_socket, lift_socket
from hoplite_mp.errors import ClosedError
from hoplite_mp.protocol.local import Ask, Reply, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Channel"]

PACKET_BYTES_MAX = 1 << 20
TAKEN_AWAY = (
    "this process has closed the file descriptor over which it speaks to the node of its host "
    "(os.closerange?), so it does not take part in the cluster any more"
)


INSIDE = (
    "a finalizer or a signal handler asked the node for something while its thread was in the "
    "middle of another question: do it later, in a thread say"
)


class Channel:
    """Requests to the node over a SEQPACKET socketpair."""

    def __init__(self, sock: socket.socket, first: int = 0) -> None:
        """first: requests are numbered from here, because another client may have had the slot
        before."""
        self._sock = lift_socket(sock)
        self.line = Watched(self._sock.fileno())
        # Called when the descriptor is no longer the line.
        self.taken_away: Callable[[], None] = lambda: None
        self._closed = False
        # An RLock because that knows its owner (see `_check_not_inside`); it is never taken twice.
        self._lock = threading.RLock()
        self._number = first
        # Number of the last reply that has arrived; the node takes back what a lost later one gave.
        self._seen = [first]
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        # Allocated once, because each new buffer of this size would be mapped and unmapped again.
        self._packet = memoryview(bytearray(PACKET_BYTES_MAX))

    def tell(self, ask: Ask) -> None:
        """Sends a request that has no reply."""
        try:
            self._check_not_inside()
            with self._lock:
                self._look()
                self._sock.send(self._encoder.encode(Request(0, self._seen[0], ask)))
        except OSError as error:
            raise self._lost(error) from error

    def call(
        self,
        ask: Ask,
        take: Callable[..., Any] | None = None,
        descriptors: Sequence[int] = (),
    ) -> Any:
        """Sends a request and returns its Reply; `descriptors` are passed along. ValueError carries
        the node's complaint; NodeLostError: the request concerns another node, which is gone.

        `take(value, number, seen)` makes an owner of what the node gave, which is returned, and
        records in the same step that the reply was seen; otherwise Ctrl-C between the two would
        leave it without an owner.
        """
        try:
            self._check_not_inside()
            with self._lock:
                self._look()
                self._number += 1
                number = self._number
                packet = self._encoder.encode(Request(number, self._seen[0], ask))
                if descriptors:
                    socket.send_fds(self._sock, [packet], descriptors)
                else:
                    self._sock.send(packet)
                while True:
                    nbytes = self._sock.recv_into(self._packet)
                    if not nbytes:
                        raise self._ended()
                    reply = self._decoder.decode(self._packet[:nbytes])
                    if take is not None and reply.number == number and not reply.error:
                        taken = take(reply.value, number, self._seen)
                        return taken
                    self._seen[0] = reply.number
                    if reply.number == number:
                        break
        except OSError as error:
            raise self._lost(error) from error
        if reply.error and not reply.full:
            raise (errors.NodeLostError if reply.gone else ValueError)(reply.error)
        return reply

    def _check_not_inside(self) -> None:
        """A finalizer run by the garbage collector, or a signal handler, may get here in the middle
        of a call of its own thread, and would wait for that call for ever."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(INSIDE)

    def _look(self) -> None:
        if not self.line.there() and not self._closed:
            self.taken_away()
            raise OSError(errno.EBADF, TAKEN_AWAY)

    def _lost(self, error: OSError) -> Exception:
        if self._closed:
            return self._ended()
        if isinstance(error, errors.NodeLostError):
            return error
        if not self.line.there():
            self.taken_away()
            return errors.NodeLostError(TAKEN_AWAY)
        return errors.NodeLostError(f"the node of this host does not answer: {error}")

    def _ended(self) -> Exception:
        if self._closed:
            return ClosedError("the cluster is closed")
        return errors.NodeLostError("the node of this host has ended")

    def close(self) -> None:
        """Ends the line, also if a forked child has the socket; a call in another thread ends,
        too."""
        self._closed = True
        close_socket(self._sock, self.line)

    def fileno(self) -> int:
        return self._sock.fileno()


def seqpacket_pair() -> tuple[socket.socket, socket.socket]:
    """A pair of connected sockets with room for large packets."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 4 * PACKET_BYTES_MAX)
    return pair


def dump(message: Any) -> bytes:
    """Any message of protocol.local as bytes."""
    return msgspec.msgpack.encode(message)
