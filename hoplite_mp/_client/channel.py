"""A client's connection to its node, for requests and replies from any thread.

The channel carries requests that cannot be answered from shared memory. Each message is one packet,
so an interrupted call (Ctrl-C) can leave a stale reply behind, but never part of a reply. Stale
replies are recognised by their number. Before each request, the channel checks that its descriptor
still refers to its socket, because user code may have closed the socket and opened a file with the
same number.

Calls are made one at a time, under a lock. No other lock is acquired while this lock is held.
Messages without a reply are sent without the lock, so they never wait for another thread's call.
"""

from __future__ import annotations

import errno
import select
import socket
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from hoplite_mp import errors
from hoplite_mp._client.descriptors import Watched, close_socket, lift_socket
from hoplite_mp._common import locks
from hoplite_mp._common.signals import is_interruption
from hoplite_mp._protocol.local import AnyRequest, Imported, Reply, Request
from hoplite_mp.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp import _shm
    from hoplite_mp._protocol.local import AnyRequest

__all__ = ["Channel", "take_over", "take_over_all"]


PACKET_BYTES_MAX = 1 << 20
GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)  # the other end is closed
TOO_LARGE = (
    f"a request has at most {PACKET_BYTES_MAX} bytes, fewer if the system's net.core.wmem_max is "
    "small; pass fewer options, names or refs at once"
)
TAKEN_AWAY = (
    "this process has closed the file descriptor of its connection to the node of its host "
    "(os.closerange?), so it does not take part in the cluster any more"
)


INSIDE = (
    "a finalizer or a signal handler made a request to the node while its thread was in the "
    "middle of another request: make the request later, for example in another thread"
)


class Channel:
    """Requests to the node over a SEQPACKET socketpair."""

    def __init__(self, sock: socket.socket, first: int = 0) -> None:
        """first: the first request number, chosen so that numbers differ from those of an earlier
        client in the same slot."""
        self._sock = lift_socket(sock)
        self.line = Watched(self._sock.fileno())
        # Returns the reason why the node was lost, if it is known.
        self.why_gone: Callable[[], BaseException | None] = lambda: None
        # Called when the descriptor no longer refers to the channel's socket.
        self.taken_away: Callable[[], None] = lambda: None
        self._closed = False
        # Held during a call. An RLock, because `check_not_inside` must know whether the current
        # thread holds it. No thread acquires it twice.
        self._lock = locks.rlock("client.channel")
        self._number = first
        # Number of the last reply that this process has read. Each request contains this number, so
        # that the node can take back the resources in later replies, which were never read
        # (Ctrl-C).
        self._seen = [first]
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        # Allocated once, because each new buffer of this size would be mapped and unmapped again.
        self._packet = memoryview(bytearray(PACKET_BYTES_MAX))

    def tell(self, ask: AnyRequest, sent: list[int] | None = None) -> None:
        """Sends a request that has no reply. Raises ValueError if the request is too large. sent: a
        list to which an item is added in the same step that sends the request, so that no signal
        handler can raise an exception in between.

        Acquires no lock, so the caller may hold any lock. Messages from one thread arrive in
        order."""
        locks.sends("client.channel")
        try:
            self._look()
            packet = self._packet_of(Request(0, 0, ask))
            if sent is None:
                self._sock.send(packet)
            else:  # signal handlers run between Python instructions; this is one C call
                sent.extend(map(self._sock.send, (packet,)))
        except OSError as error:
            if is_interruption(error):  # for example TimeoutError
                raise
            raise self._lost(error) from error

    def call(
        self,
        ask: AnyRequest,
        take: Callable[..., Any] | None = None,
        descriptors: Sequence[int] = (),
        sent: list[int] | None = None,
    ) -> Any:
        """Sends a request, with `descriptors`, and returns its Reply. Raises ValueError with the
        reason if the node refuses the request, and NodeLostError if the request concerns another
        node, which is gone. sent: as for `tell`.

        `take(value, number, seen)` creates an object that owns the resource in the reply, and
        records that the reply was read. `call` then returns this object instead of the Reply.
        Without `take`, Ctrl-C after the reply was read could leave the resource without an owner.
        `take` must not acquire a lock, because other threads may be waiting for the end of this
        call.
        """
        self.check_not_inside()
        locks.waits("a reply from the node")
        try:
            with self._lock:
                self._look()
                self._number += 1
                number = self._number
                packet = self._packet_of(Request(number, self._seen[0], ask))
                if descriptors:
                    socket.send_fds(self._sock, [packet], descriptors)
                elif sent is None:
                    self._sock.send(packet)
                else:
                    sent.extend(map(self._sock.send, (packet,)))
                while True:
                    nbytes = self._sock.recv_into(self._packet)
                    if not nbytes:
                        raise ConnectionResetError(errno.ECONNRESET, "it has ended")
                    reply = self._decoder.decode(self._packet[:nbytes])
                    if take is not None and reply.number == number and not reply.error:
                        taken = take(reply.value, number, self._seen)
                        return taken
                    self._seen[0] = reply.number
                    if reply.number == number:
                        break
        except OSError as error:
            if is_interruption(error):  # for example TimeoutError
                raise
            raise self._lost(error) from error
        if reply.error and not reply.full:
            raise (errors.NodeLostError if reply.gone else ValueError)(reply.error)
        return reply

    def _packet_of(self, request: Request) -> bytes:
        packet = self._encoder.encode(request)
        if len(packet) > PACKET_BYTES_MAX:
            raise ValueError(f"a request of {len(packet)} bytes to the node: {TOO_LARGE}")
        return packet

    def check_not_inside(self) -> None:
        """Raises RuntimeError in a finalizer or a signal handler that has interrupted a call by the
        same thread. Otherwise the handler would wait for this call indefinitely."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(INSIDE)

    def _look(self) -> None:
        if not self.line.there() and not self._closed:
            self.taken_away()
            raise OSError(errno.EBADF, TAKEN_AWAY)

    def _lost(self, error: OSError) -> BaseException:
        """The error to raise for a call whose socket operation has failed. Called without the
        lock."""
        if self._closed:
            return ClosedError("the cluster is closed")
        if isinstance(error, errors.NodeLostError):
            return error
        if error.errno == errno.EMSGSIZE:
            return ValueError(f"a request to the node: {TOO_LARGE}")
        if not self.line.there():
            self.taken_away()
            return errors.NodeLostError(TAKEN_AWAY)
        if error.errno not in GONE:
            return errors.NodeLostError(f"the node of this host does not reply: {error}")
        return self.why_gone() or errors.NodeLostError("the node of this host has ended")

    def close(self) -> None:
        """Ends the connection, even if a forked child has the socket, too. A concurrent call by
        another thread fails."""
        self._closed = True
        self.why_gone = lambda: None
        close_socket(self._sock, self.line)

    @property
    def is_open(self) -> bool:
        """Whether there is a node at the other end. When a node is killed, its end is closed before
        the thread that watches the node detects the death."""
        if self._closed or not self.line.there():
            return False
        poll = select.poll()
        poll.register(self._sock, 0)  # no events: a closed connection is always reported
        return not poll.poll(0)

    def fileno(self) -> int:
        return self._sock.fileno()


def seqpacket_pair() -> tuple[socket.socket, socket.socket]:
    """A pair of connected sockets with buffers for large packets."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 4 * PACKET_BYTES_MAX)
    return pair


def dump(message: Any) -> bytes:
    """Encodes a message defined in `_protocol.local`."""
    return msgspec.msgpack.encode(message)


# Taking over objects that the node holds on behalf of this process.
#
# The node holds an object that it has passed to a process until the process acknowledges it with
# Imported. This message acknowledges all earlier replies, too, because some replies may never be
# read (Ctrl-C). A thread must therefore acquire its hold before another thread in the process can
# send Imported, so it acquires the hold under the channel's lock.


class Holder(Protocol):
    """A process's connection to its node, and its client."""

    @property
    def client(self) -> _shm.Client: ...
    @property
    def channel(self) -> Channel: ...


def take_over(holder: Holder, ask: AnyRequest, oid_in: Callable[[Any], int]) -> Any:
    """Sends the request, and returns a hold on the object whose id `oid_in` finds in the reply;
    None if there is no object."""
    (hold,) = take_over_all(holder, ask, lambda value: [oid_in(value)])
    return hold


def take_over_all(
    holder: Holder, ask: AnyRequest, oids_in: Callable[[Any], list[int]]
) -> list[Any]:
    """Sends the request, and returns holds on the objects whose ids `oids_in` finds in the reply;
    None for an id that is 0 and for an object that is gone."""

    def take(value: Any, number: int, seen: list[int]) -> tuple[int, list[Any]]:
        holds = [holder.client.hold(oid) if oid else None for oid in oids_in(value)]
        seen[0] = number
        return number, holds

    taken: tuple[int, list[Any]] = holder.channel.call(ask, take)
    number, holds = taken
    holder.channel.tell(Imported(number))
    return holds
