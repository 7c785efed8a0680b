"""Connects to a manager or node: tries its addresses until a connection is authenticated.

Not every address of a host is reachable, an address may belong to another process, and a cluster
may still be starting. Temporary failures are retried until the deadline. Other failures are
reported after all addresses have been tried once.

A loop must watch `fileno()` for reading, and call `turn(now)` when it is readable and at
`deadline`, until `turn` returns the connection or raises an error. `wait` does the same without a
loop.
"""

from __future__ import annotations

import random
import select
from typing import TYPE_CHECKING

from hoplite_mp._common import clock
from hoplite_mp._protocol.greetings import REFUSED_TEXTS, SERVICE_OF
from hoplite_mp._protocol.handshake import ClientHandshake
from hoplite_mp._transport.conversation import Admission, Conversation
from hoplite_mp._transport.sockets import OUT_OF, begin_connect, connect_error
from hoplite_mp._transport.stream import TcpStream
from hoplite_mp.errors import HopliteError, ManagerLostError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from hoplite_mp._protocol.greetings import Introduction
    from hoplite_mp._protocol.handshake import HandshakeOutcome
    from hoplite_mp._protocol.secret import Secret
    from hoplite_mp._transport.addresses import Endpoint

__all__ = ["Dialer"]

# Timeout for connecting to one address, after which the next address is tried. The kernel repeats a
# lost SYN after 1 s.
ARRIVE_S = 2.0
NO_HANDSHAKE = "it accepts connections, but does not reply to the handshake"
# How long a standby that does not lead is retried, because it may be about to take over. With a
# higher value, callers survive longer take-overs. With a lower value, a caller that has only the
# standby's address fails sooner.
LEADS_S = 5.0
# The mean pause between rounds over all addresses. Each pause is random, from 0.5 to 1.5 times the
# mean, so that callers that failed together do not retry together.
ROUND_PAUSE_S = 0.2
# How long a server may be silent after it has accepted a connection. The caller may be waiting in
# the listener's queue, for up to LINE_FACTOR (in listener.py) times the handshake timeout. Callers
# with several addresses wait for the handshake timeout in the first round, and add it once more in
# each further round, up to this limit. Lower: a stopped process is detected sooner.
SILENT_S_MAX = 20.0


class Dialer:
    """One attempt to connect to one of several addresses."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        key: Secret,
        role: str,
        mine: Introduction,
        tls: bool,
        now: float,
        timeout_s: float,
        handshake_timeout_s: float,
        cluster: bytes = b"",
        host_id: int | None = None,
        rounds_max: int = 0,
        chance: Callable[[], float] | None = None,
    ) -> None:
        """endpoints: the addresses, best first. handshake_timeout_s: counted from the server's
        first byte. cluster, host_id: the ids that the other side must have. rounds_max: the attempt
        fails after this number of consecutive rounds without a connection; 0 for no limit. chance:
        returns random numbers between 0 and 1 for the pauses between rounds; replaced in tests."""
        if not endpoints:
            raise ValueError("no endpoints to call")
        self._endpoints = tuple(endpoints)
        self._key = key
        self._role = role
        self._mine = mine
        self._tls = tls
        self._began = now
        self._timeout_s = timeout_s
        self._handshake_timeout_s = handshake_timeout_s
        self._cluster = cluster
        self._host_id = host_id
        self._rounds_max = rounds_max
        # A separate generator, so that the program's own random numbers are not affected.
        self._chance = chance or random.Random().random
        self._rounds = 0
        self._rounds_lost = 0  # consecutive rounds in which no address accepted a connection
        self.starved = False  # local descriptors or memory were missing for an attempt
        self._arrived = False  # an address has accepted a connection in this round
        self._next = 0  # index of the present endpoint
        self._attempt_ends = now
        self._answered = False  # the server has sent data in this attempt
        self._again_at: float | None = now  # time of the next attempt; None during an attempt
        self._connecting: socket.socket | None = None  # a socket that is connecting
        self._conversation: Conversation | None = None
        self._stream: TcpStream | None = None
        self._refusal: HopliteError | None = None  # a refusal in this round
        self._last = "no attempt was made"  # the latest failure
        self._poll = select.epoll()

    @property
    def deadline(self) -> float:
        """The time at which the next `turn` is due even without an event."""
        soonest = self._attempt_ends if self._again_at is None else self._again_at
        return min(soonest, self._began + self._timeout_s)

    def fileno(self) -> int:
        return self._poll.fileno()

    def turn(self, now: float) -> Admission | None:
        """Makes as much progress as possible without blocking. Returns the connection when it is
        established.

        Raises AuthError or ProtocolError if the other side has replied, but a retry is useless. If
        there is no reply within the timeout, raises ManagerLostError for a manager and
        ConnectionError for a node. The Dialer is closed after an error, and after it has returned a
        connection.
        """
        try:
            admission = self._turn(now)
        except BaseException:
            self.close()
            raise
        if admission is not None:
            self._poll.unregister(admission.stream.fileno())
            self._stream = None
            self.close()
        return admission

    def wait(self, clock: Callable[[], float] = clock.monotonic) -> Admission:
        """Blocks until the connection is established. Raises the same errors as `turn`."""
        try:
            while (admission := self.turn(clock())) is None:
                self._poll.poll(max(0.0, self.deadline - clock()))
        except BaseException:  # even after Ctrl-C
            self.close()
            raise
        return admission

    def close(self) -> None:
        """Ends the attempt. May be called more than once."""
        self._abandon()
        self._poll.close()

    def _turn(self, now: float) -> Admission | None:
        while now < self._began + self._timeout_s:
            if self._again_at is not None and now < self._again_at:
                return None
            try:
                if self._again_at is not None:
                    self._begin(now)
                outcome = self._continue(now)
            # Must precede OSError, because some HopliteErrors are OSErrors.
            except HopliteError as error:
                early = str(error) == REFUSED_TEXTS["standby"] and now < self._began + LEADS_S
                if not early:
                    self._refusal = type(error)(f"{self._target}: {error}")
                self._fail(str(error), now)
            except OSError as error:
                if error.errno in OUT_OF:
                    self.starved = True
                    self._abandon()
                    self._last, self._again_at = str(error), now + self._pause_s()
                    continue
                self._fail(error.strerror or str(error), now)
            else:
                return None if outcome is None else self._admit(outcome)
        if self._again_at is None:
            why = "no answer" if self._connecting is not None else NO_HANDSHAKE
            self._last = f"{self._endpoints[self._next]}: {why}"
        seconds = f"{self._timeout_s:.3g} s"
        raise self._lost(f"no answer within {seconds} ({self._last})")

    # -- one attempt ---------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        self._again_at = None
        self._attempt_ends = now + ARRIVE_S
        self._connecting = begin_connect(self._endpoints[self._next])
        self._poll.register(self._connecting, select.EPOLLOUT | select.EPOLLIN)
        self.starved = False

    def _continue(self, now: float) -> HandshakeOutcome | None:
        if self._connecting is not None:
            events = dict(self._poll.poll(0))
            if events:
                self._connected(self._connecting, now)
            elif self._attempt_ends <= now:
                raise TimeoutError("no answer")
            else:
                return None
        assert self._conversation is not None
        assert self._stream is not None
        if not self._answered and any(found & select.EPOLLIN for _, found in self._poll.poll(0)):
            self._answered = True
            self._attempt_ends = now + self._handshake_timeout_s
        outcome = self._conversation.advance()
        if outcome is None:
            if self._attempt_ends <= now:
                raise TimeoutError(NO_HANDSHAKE)
            self._poll.modify(self._stream.fileno(), self._events(self._stream))
        elif self._host_id is not None and outcome.peer.host_id != self._host_id:
            raise ConnectionError("another host answers there")
        return outcome

    def _connected(self, sock: socket.socket, now: float) -> None:
        """Begins the handshake on the socket, or raises ConnectionError if it has failed to
        connect."""
        failure = connect_error(sock)
        if failure is not None:
            raise ConnectionError(failure)
        self._connecting = None
        self._arrived = True
        self._answered = False
        self._attempt_ends = now + self._silent_s()
        if self._tls:
            from hoplite_mp._transport.tls import TlsStream, client_context

            self._stream = TlsStream(sock, client_context())
        else:
            self._stream = TcpStream(sock)
        self._conversation = Conversation(self._stream, self._handshake)

    def _silent_s(self) -> float:
        """How long the server may be silent. A caller with only one address waits for the longest
        time, because a new attempt would start at the end of the listener's queue."""
        longest = max(SILENT_S_MAX, self._handshake_timeout_s)
        if len(self._endpoints) == 1:
            return longest
        return min(longest, self._handshake_timeout_s * (1 + self._rounds))

    def _pause_s(self) -> float:
        return ROUND_PAUSE_S * (0.5 + self._chance())

    def _handshake(self, certificate_sha256: bytes) -> ClientHandshake:
        return ClientHandshake(
            self._key,
            self._role,
            self._mine,
            cluster=self._cluster,
            certificate_sha256=certificate_sha256,
            deadline=self._attempt_ends,
        )

    @staticmethod
    def _events(stream: TcpStream) -> int:
        read = select.EPOLLIN if stream.wants_read else 0
        return read | (select.EPOLLOUT if stream.wants_write else 0)

    def _admit(self, outcome: HandshakeOutcome) -> Admission:
        assert self._stream is not None
        address = str(self._endpoints[self._next])
        return Admission(self._stream, outcome.role, outcome.cluster, outcome.peer, address)

    def _fail(self, why: str, now: float) -> None:
        """Continues with the next address. After the last address, raises the refusal if there was
        a refusal in this round; otherwise begins another round after a pause."""
        self._last = f"{self._endpoints[self._next]}: {why}"
        self._abandon()
        self._next = (self._next + 1) % len(self._endpoints)
        if self._next:
            self._again_at = now
        elif self._refusal is not None:
            raise self._refusal
        else:
            self._rounds_lost = 0 if self._arrived else self._rounds_lost + 1
            self._arrived = False
            self._rounds += 1
            if self._rounds_max and self._rounds_lost == self._rounds_max:
                raise self._lost(f"it cannot be reached ({self._last})")
            self._again_at = now + self._pause_s()

    def _abandon(self) -> None:
        """Closes the sockets of the present attempt, which also removes them from the epoll."""
        if self._connecting is not None:
            self._connecting.close()
        if self._stream is not None:
            self._stream.close()
        self._connecting = self._stream = self._conversation = None

    # -- error texts ------------------------------------------------------------------------------

    @property
    def _target(self) -> str:
        return f"{self._service} at {self._endpoints[self._next]}"

    @property
    def _service(self) -> str:
        # A tool cannot distinguish a manager from a standby.
        return "host" if self._role == "tool" else SERVICE_OF[self._role]

    def _lost(self, words: str) -> ConnectionError:
        where = " or ".join(map(str, self._endpoints))
        if SERVICE_OF[self._role] == "manager":
            return ManagerLostError(
                f"no process at {where} answers for the cluster: {words}; check the address, and "
                "whether the cluster is running"
            )
        return ConnectionError(f"{self._service} at {where}: {words}")
