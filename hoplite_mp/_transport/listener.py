"""The listening side of a manager or node, which trusts no caller before the end of the handshake.

All connections of unauthenticated callers (strangers) are handled here, with limits on their
number, and on the time and memory for each. The loop that owns the listener receives only
authenticated connections.

A loop must watch `fileno()` for reading (an epoll for the listening socket and the strangers), and
call `turn(now)` when it is readable and at `deadline`.
"""

from __future__ import annotations

import contextlib
import logging
import select
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any

from hoplite_mp._protocol.greetings import refusal
from hoplite_mp._protocol.handshake import PLAIN, ServerHandshake
from hoplite_mp._transport.addresses import Address
from hoplite_mp._transport.conversation import Admission, Conversation
from hoplite_mp._transport.sockets import OUT_OF, bound_address, prepare
from hoplite_mp._transport.stream import TcpStream
from hoplite_mp.errors import AuthError, HopliteError, ProtocolError

if TYPE_CHECKING:
    import socket
    import ssl

    from hoplite_mp._protocol.greetings import Introduction
    from hoplite_mp._protocol.secret import Secret
    from hoplite_mp._transport.certificates import Certificate

__all__ = ["Listener"]

# The first byte of a TLS connection. The plain protocol never begins with this byte, so a mismatch
# between caller and listener can be reported.
TLS_OPENER = 22
# How long a refused caller may take to read the reason before its connection is closed.
LEAVE_S = 1.0
# Pause between two calls to `accept` if descriptors or memory are missing, because each attempt
# would fail and wake the loop.
ACCEPT_PAUSE_S = 0.1
THIS_HOST = Address("a process on this host", 0)
# Queue length, as a multiple of the number of callers served simultaneously. Each queued caller
# needs only a descriptor. With a higher value, fewer callers need a second attempt.
LINE_FACTOR = 4
# If a host has more than its share of the strangers, one that has been silent for this time is
# dropped in favour of another host. With a lower value, a flood hinders other hosts less. With a
# higher value, callers on slow hosts keep their connections.
SILENT_S = 1.0
WARNING_PAUSE_S = 1.0  # limits the log entries that a persistent stranger causes

_log = logging.getLogger("hoplite_mp")


def _address(where: Any) -> Address:
    """The caller's address. `where` is empty for a caller over a UNIX socket. A dual-stack IPv6
    socket reports IPv4 addresses in mapped form."""
    return Address(where[0].removeprefix("::ffff:"), where[1]) if where else THIS_HOST


class _PendingHandshake:
    """A connection that is not yet authenticated."""

    def __init__(
        self, sock: socket.socket, address: Address, deadline: float, heard_at: float
    ) -> None:
        self.address = address
        self.deadline = deadline
        self.heard_at = heard_at  # time at which data last arrived
        self.stream = TcpStream(sock)
        self.conversation: Conversation | None = None  # None until the first byte has arrived
        self.leaving = False  # the caller was refused, and may still read the reason

    @property
    def events(self) -> int:
        stream = self.stream
        read = self.leaving or self.conversation is None or stream.wants_read
        write = not self.leaving and stream.wants_write
        return (select.EPOLLIN if read else 0) | (select.EPOLLOUT if write else 0)


class Listener:
    """Admits connections that pass the handshake. `mine`: this side's introduction. A new value
    applies to later connections."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        key: Secret,
        service: str,
        cluster: bytes,
        mine: Introduction,
        certificate: Certificate | None,
        handshake_timeout_s: float,
        pending_handshakes_max: int,
    ) -> None:
        """listener: a socket from `listen`, or a UNIX socket. This object becomes its owner.
        certificate: None without TLS."""
        self.mine = mine
        self.not_now: frozenset[str] = frozenset()  # roles that are refused at present
        self.refused = 0
        self._listener = listener
        self._key = key
        self._service = service
        self._cluster = cluster
        self._timeout_s = handshake_timeout_s
        self._pending_max = pending_handshakes_max
        self._certificate_sha256 = PLAIN
        self._context: ssl.SSLContext | None = None
        if certificate is not None:
            from hoplite_mp._transport.tls import server_context

            self._context = server_context(certificate)
            self._certificate_sha256 = certificate.sha256
        self._pending: dict[int, _PendingHandshake] = {}  # by descriptor, the oldest first
        # Accepted connections for which no handshake has begun yet.
        self._queue: deque[tuple[socket.socket, Address]] = deque()
        self._full = False  # `accept` is paused until the queue is shorter
        # Time at which a silent stranger may be dropped in favour of a queued caller.
        self._evict_at: float | None = None
        self._accept_again_at: float | None = None
        self._starved = False  # descriptors or memory were missing in the last `accept`
        self._warn_again_at = 0.0
        self._unwarned = 0  # number of refusals without a warning since the last warning
        listener.setblocking(False)
        self._poll = select.epoll()
        self._poll.register(listener, select.EPOLLIN)

    @property
    def address(self) -> Address:
        """The listening address, with the chosen port."""
        return bound_address(self._listener)

    @property
    def strangers(self) -> int:
        """The number of unauthenticated connections."""
        return len(self._pending)

    @property
    def deadline(self) -> float | None:
        """The time at which the next `turn` is due even without an event."""
        times = [pending.deadline for pending in self._pending.values()]
        times += [at for at in (self._accept_again_at, self._evict_at) if at is not None]
        return min(times, default=None)

    def fileno(self) -> int:
        return self._poll.fileno()

    def turn(self, now: float) -> list[Admission]:
        """Makes as much progress as possible without blocking. Returns newly admitted
        connections."""
        if self._accept_again_at is not None and self._accept_again_at <= now:
            self._accept_again_at = None
            self._poll.modify(self._listener, select.EPOLLIN)
        admitted: list[Admission] = []
        ready = [fd for fd, _ in self._poll.poll(0)]
        # Read all data first: strangers are not silent merely because this loop was busy.
        for fd in ready:
            if fd in self._pending:
                self._serve(fd, now, admitted)
        if self._listener.fileno() in ready:
            self._accept(now)
        for fd, pending in list(self._pending.items()):
            if pending.deadline <= now:
                if not pending.leaving:
                    self._report(pending, "it took too long", now)
                self._drop(fd)
        self._admit_queued(now)
        return admitted

    def close(self) -> None:
        """Closes the listener and the strangers' connections. Admitted connections remain open."""
        for fd in list(self._pending):
            self._drop(fd)
        for sock, _ in self._queue:
            sock.close()
        self._queue.clear()
        self._poll.close()
        self._listener.close()

    # -- strangers -----------------------------------------------------------------------------

    def _accept(self, now: float) -> None:
        for _ in range(self._pending_max):
            try:
                sock, where = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in OUT_OF:
                    if not self._starved:
                        _log.error("no connection can be accepted now: %s", error.strerror)
                    self._starved = True
                    self._accept_again_at = now + ACCEPT_PAUSE_S
                    self._poll.modify(self._listener, 0)
                    return
                continue  # this caller has already left
            self._starved = False
            address = _address(where)
            if len(self._pending) < self._pending_max and not self._queue:
                self._begin_serving(sock, address, now)
            else:
                self._queue.append((sock, address))
                if len(self._queue) > LINE_FACTOR * self._pending_max and not self._drop_queued():
                    self._full = True
                    self._poll.modify(self._listener, 0)
                    return

    def _begin_serving(self, sock: socket.socket, address: Address, now: float) -> None:
        """Begins the handshake, whose timeout starts now."""
        pending = _PendingHandshake(prepare(sock), address, now + self._timeout_s, now)
        try:
            self._poll.register(sock, pending.events)
        except OSError as error:  # no memory, or the user's limit of epoll watches is reached
            _log.error("%s: %s cannot be served now: %s", self._service, address, error)
            pending.stream.close()
            return
        self._pending[sock.fileno()] = pending

    def _admit_queued(self, now: float) -> None:
        """Begins the handshakes with queued callers, as far as the limit permits. Callers from
        hosts with less than their share are first; others are served in order of arrival."""
        self._evict_at = None
        while self._queue:
            counts = Counter(pending.address.host for pending in self._pending.values())
            hosts = {*counts, *(address.host for _, address in self._queue)}
            share = max(1, self._pending_max // len(hosts))
            below = (n for n, (_, caller) in enumerate(self._queue) if counts[caller.host] < share)
            index = next(below, None)
            if len(self._pending) >= self._pending_max and (
                index is None or not self._drop_silent(counts, share, now)
            ):
                break
            sock, address = self._queue[index or 0]
            del self._queue[index or 0]
            self._begin_serving(sock, address, now)
        if self._full and len(self._queue) < LINE_FACTOR * self._pending_max:
            self._full = False
            if self._accept_again_at is None:
                self._poll.modify(self._listener, select.EPOLLIN)

    def _drop_silent(self, counts: Counter[str], share: int, now: float) -> bool:
        """Among the strangers from hosts with more than their share, drops the one that has been
        silent the longest, unless it has sent data within SILENT_S. A host with many connections
        thus hinders mostly itself, and no caller is dropped during its handshake."""
        strangers = self._pending
        over = [fd for fd, pending in strangers.items() if counts[pending.address.host] > share]
        if not over:
            return False
        fd = min(over, key=lambda candidate: strangers[candidate].heard_at)
        silent_at = strangers[fd].heard_at + SILENT_S
        if silent_at > now:
            self._evict_at = silent_at
            return False
        self._drop(fd)
        return True

    def _drop_queued(self) -> bool:
        """Drops the latest caller from the host with the most callers in the queue. Returns False
        if no host has more than one caller in the queue."""
        most, count = Counter(address.host for _, address in self._queue).most_common(1)[0]
        if count == 1:
            return False
        place = max(n for n, (_, address) in enumerate(self._queue) if address.host == most)
        self._queue[place][0].close()
        del self._queue[place]
        return True

    def _serve(self, fd: int, now: float, admitted: list[Admission]) -> None:
        pending = self._pending[fd]
        pending.heard_at = now
        try:
            if pending.leaving:
                if not pending.stream.discard():
                    self._drop(fd)
                return
            if pending.conversation is None and not self._open(pending):
                return
            assert pending.conversation is not None
            outcome = pending.conversation.advance()
        except HopliteError as error:
            self._report(pending, error, now)
            self._refuse(pending, now)
        except OSError as error:  # the caller has left; HopliteErrors are caught above
            _log.info("%s: %s left: %s", self._service, pending.address, error)
            self._drop(fd)
            return
        except Exception:  # an error caused by one stranger must not stop the whole process
            _log.exception("%s: closing the connection of %s", self._service, pending.address)
            self._drop(fd)
            return
        else:
            if outcome is not None:
                self._poll.unregister(fd)
                del self._pending[fd]
                address = str(pending.address)
                role, cluster, peer = outcome.role, outcome.cluster, outcome.peer
                admitted.append(Admission(pending.stream, role, cluster, peer, address))
                return
        self._poll.modify(fd, pending.events)

    def _open(self, pending: _PendingHandshake) -> bool:
        """Determines from the first byte whether the caller uses TLS, and begins the handshake.
        Returns False if nothing has arrived yet. Raises ProtocolError if only one of the two sides
        uses TLS."""
        opener = pending.stream.opener()
        if opener is None:
            return False
        if (opener == TLS_OPENER) != (self._context is not None):
            pending.stream.write(refusal("plain" if self._context is None else "tls"))
            pending.stream.flush()
            used = "TLS" if opener == TLS_OPENER else "no TLS"
            raise ProtocolError(f"it speaks {used}, unlike this cluster")
        if self._context is not None:
            from hoplite_mp._transport.tls import TlsStream

            sock = pending.stream.detach()
            pending.stream = TlsStream(sock, self._context, server_sha256=self._certificate_sha256)
        pending.conversation = Conversation(pending.stream, partial(self._begin, pending.deadline))
        return True

    def _begin(self, deadline: float, certificate_sha256: bytes) -> ServerHandshake:
        return ServerHandshake(
            self._key,
            self._service,
            self._cluster,
            self.mine,
            certificate_sha256=certificate_sha256,
            deadline=deadline,
            not_now=self.not_now,
        )

    def _refuse(self, pending: _PendingHandshake, now: float) -> None:
        pending.leaving = True
        pending.deadline = min(pending.deadline, now + LEAVE_S)
        pending.stream.finish()

    def _drop(self, fd: int) -> None:
        pending = self._pending.pop(fd)
        with contextlib.suppress(OSError):  # the connection is already closed
            self._poll.unregister(fd)
        pending.stream.close()

    def _report(self, pending: _PendingHandshake, why: HopliteError | str, now: float) -> None:
        """Logs a refusal. Only a wrong token causes a warning."""
        self.refused += 1
        if not isinstance(why, AuthError):
            _log.info("%s refused %s: %s", self._service, pending.address, why)
        elif now < self._warn_again_at:
            self._unwarned += 1
        else:
            more = f" (and {self._unwarned} more since the last warning)" if self._unwarned else ""
            _log.warning("%s refused %s: %s%s", self._service, pending.address, why, more)
            self._warn_again_at, self._unwarned = now + WARNING_PAUSE_S, 0
