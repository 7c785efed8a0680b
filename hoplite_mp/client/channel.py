"""A client's line to its node: one request, one reply, any thread.

Why it exists: the few things that shared memory cannot answer. Each message is one packet, so an
interrupted call (Ctrl-C) can leave a stale reply behind but never half of one; stale replies are
known by their number. Before anything is said it is looked whether the number of the line still is
the line: user code may have closed it, and opened a file of its own.
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
        """first: what questions are numbered from; another client may have had the slot before."""
        self._sock = lift_socket(sock)
        self.line = Watched(self._sock.fileno())
        self.taken_away: Callable[[], None] = lambda: None  # called when the line is not there
        self._closed = False
        self._lock = threading.RLock()  # which knows its owner; it is never taken twice
        self._number = first
        self._seen = [first]  # what the node need not keep for whoever was interrupted
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        # Kept: a new one for each packet would be mapped by the system, and taken back.
        self._packet = memoryview(bytearray(PACKET_BYTES_MAX))

    def tell(self, ask: Ask) -> None:
        """A request without a reply."""
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
        """A request and its Reply; the node gets these descriptors, too. ValueError carries the
        node's complaint; NodeLostError: it is about another node, which is gone.

        `take(value, number, seen)` makes an owner of what was given, which is returned, and says in
        the same step that it was seen: else Ctrl-C between the two would leave it to nobody."""
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
        """A finalizer that the garbage collector calls, or a signal handler, may come here in the
        middle of a call of its own thread, which it would wait for for ever."""
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
        """A call of another thread ends, and for the node the line does, whoever was forked."""
        self._closed = True
        close_socket(self._sock, self.line)

    def fileno(self) -> int:
        return self._sock.fileno()


def seqpacket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends with room for large packets."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 4 * PACKET_BYTES_MAX)
    return pair


def dump(message: Any) -> bytes:
    """Any message of protocol.local as bytes."""
    return msgspec.msgpack.encode(message)
