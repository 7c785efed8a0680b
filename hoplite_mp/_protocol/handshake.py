"""The handshake: both sides prove that they have the token, and a man in the middle is detected.

    client                                            server
    Hello(role, nonce, required cluster)       ->
                                               <-     Challenge(service, nonce, cluster)
    Proof(HMAC "client" over the transcript)   ->     compared in constant time
                                               <-     Welcome(HMAC "server" over the same)
    Introduction(host_id, versions)            ->     compared
                                               <-     Introduction(host_id, versions)

The transcript consists of the preamble with the protocol's version, role and service, both nonces,
the cluster's id, and the SHA-256 hash of the server's certificate as seen by this side (zeros
without TLS). The nonces protect against replay, and the labels protect against reflected proofs.
The certificate protects against a relay between two TLS connections, which does not have the
certificate's private key. This is the channel binding of RFC 5929 ("tls-server-end-point"). No key
is derived for later bytes: TLS protects them; without TLS they are unprotected.

Sans-io: pass received bytes to `feed`, and send the bytes from `outgoing`, until there is a
`result` or `feed` raises an exception. `wanted` is the number of bytes to read for the handshake,
so that later bytes stay in the connection. Nothing is unpickled, and lengths are compared with a
limit of a few KiB before memory is allocated.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hoplite_mp._protocol.greetings import (
    LENGTH,
    MAGIC,
    NONCE_BYTES,
    PREAMBLE,
    REASON_CHARS_MAX,
    REFUSED_TEXTS,
    SERVICE_OF,
    Challenge,
    Hello,
    Introduction,
    Proof,
    Refused,
    Welcome,
    compare_versions,
    decode_body,
    encode_frame,
    frame_length,
    printable,
)
from hoplite_mp.errors import AuthError, HopliteError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._protocol.greetings import Greeting
    from hoplite_mp._protocol.secret import Secret

__all__ = ["PLAIN", "ClientHandshake", "HandshakeOutcome", "ServerHandshake", "transcript"]

PLAIN = bytes(32)  # instead of the certificate's hash, without TLS
CLIENT_LABEL = b"hoplite_mp client has the token"
SERVER_LABEL = b"hoplite_mp server has the token"


@dataclass(frozen=True, slots=True)
class HandshakeOutcome:
    """The peer's role, service and cluster, which are proved, and its introduction."""

    role: str
    service: str
    cluster: bytes
    peer: Introduction


def transcript(
    role: str, service: str, nonces: tuple[bytes, bytes], cluster: bytes, certificate_sha256: bytes
) -> bytes:
    """The bytes that must be equal on both sides. Each part is preceded by its length, so different
    lists of parts give different bytes."""
    parts = (PREAMBLE, role.encode(), service.encode(), *nonces, cluster, certificate_sha256)
    return b"".join(LENGTH.pack(len(part)) + part for part in parts)


def _mac(key: Secret, label: bytes, proved: bytes) -> bytes:
    return key.mac(LENGTH.pack(len(label)) + label + proved)


class _Handshake:
    """The common part of both sides: decodes bytes into messages, and keeps the outcome."""

    def __init__(
        self, key: Secret, mine: Introduction, certificate_sha256: bytes, deadline: float
    ) -> None:
        self.deadline = deadline
        self.result: HandshakeOutcome | None = None
        self.failure: HopliteError | None = None
        self._key = key
        self._mine = mine
        self._certificate = certificate_sha256
        self._buffer = bytearray()
        self._outgoing = bytearray()
        self._preamble_received = False
        self._expected: tuple[type[Greeting], ...] = ()
        self._next: Callable[[Greeting], None] = self._take_nothing

    @property
    def wanted(self) -> int:
        """The number of missing bytes for the next step; 0: the handshake has ended."""
        if self.result is not None or self.failure is not None:
            return 0
        if not self._preamble_received:
            return len(PREAMBLE) - len(self._buffer)
        if len(self._buffer) < LENGTH.size:
            return LENGTH.size - len(self._buffer)
        return LENGTH.size + frame_length(self._buffer[: LENGTH.size]) - len(self._buffer)

    def outgoing(self) -> bytes:
        """The bytes to send now. Send them even after a failure, because they may contain the
        reason."""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def feed(self, data: bytes) -> bytes:
        """Processes received bytes. Returns the bytes that follow the handshake (none if the caller
        reads only `wanted` bytes).

        Raises AuthError if the peer does not have the token, and ProtocolError if it has sent
        illegal data or is incompatible. After either error the caller must close the connection.
        """
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)
        position = 0
        try:
            while self.result is None and position < len(data):
                piece = data[position : position + self.wanted]
                self._buffer += piece
                position += len(piece)
                self._step()
        except HopliteError as failure:
            self.failure = failure
            self._buffer.clear()
            raise
        return data[position:]

    def _step(self) -> None:
        """Processes the buffer. A length is checked as soon as it has arrived (by `wanted`)."""
        if not self._preamble_received:
            self._take_preamble()
        elif self.wanted == 0:
            message = decode_body(self._buffer[LENGTH.size :])
            self._buffer.clear()
            if not isinstance(message, self._expected):
                raise ProtocolError(f"unexpected {type(message).__name__}")
            self._next(message)

    def _take_preamble(self) -> None:
        name = self._buffer[: len(MAGIC)]
        if name != MAGIC[: len(name)]:
            raise ProtocolError("it does not use the protocol of hoplite_mp")
        if len(self._buffer) < len(PREAMBLE):
            return
        self._preamble_received = True
        version = self._buffer[-1]
        same = self._buffer == PREAMBLE
        self._buffer.clear()
        self._answer_preamble()
        if not same:
            raise ProtocolError(
                f"it uses version {version} of the protocol, and this side version {PREAMBLE[-1]}:"
                " install the same hoplite_mp on both sides"
            )

    def _answer_preamble(self) -> None:
        """Sends the server's preamble; a client has already sent its preamble."""

    def _take_nothing(self, message: Greeting) -> None:
        raise AssertionError  # never called: _expected is empty before this step

    def _expect(self, *kinds: type[Greeting], then: Callable[[Greeting], None]) -> None:
        self._expected = kinds
        self._next = then

    def _send(self, message: Greeting) -> None:
        self._outgoing += encode_frame(message)


class ServerHandshake(_Handshake):
    """The called side. It does not answer a wrong preamble, sends its proof after the caller's, and
    refuses callers with incompatible software."""

    def __init__(
        self,
        key: Secret,
        service: str,
        cluster: bytes,
        mine: Introduction,
        *,
        certificate_sha256: bytes = PLAIN,
        deadline: float = float("inf"),
        nonce: bytes | None = None,
        not_now: frozenset[str] = frozenset(),
    ) -> None:
        """not_now: roles that this service currently refuses."""
        super().__init__(key, mine, certificate_sha256, deadline)
        self._not_now = not_now
        self._challenge = Challenge(service, nonce or secrets.token_bytes(NONCE_BYTES), cluster)
        self._role = ""
        self._transcript = b""
        self._expect(Hello, then=self._take_hello)

    def _answer_preamble(self) -> None:
        self._outgoing += PREAMBLE

    def _take_hello(self, message: Greeting) -> None:
        assert isinstance(message, Hello)
        challenge = self._challenge
        if SERVICE_OF[message.role] != challenge.service:
            raise self._refuse(
                "role", ProtocolError(f"a {message.role} called the {challenge.service}")
            )
        if message.cluster and message.cluster != challenge.cluster:
            raise self._refuse("cluster", ProtocolError("it requires another cluster"))
        self._role = message.role
        nonces = (message.nonce, challenge.nonce)
        self._transcript = transcript(
            self._role, challenge.service, nonces, challenge.cluster, self._certificate
        )
        self._send(challenge)
        self._expect(Proof, then=self._take_proof)

    def _take_proof(self, message: Greeting) -> None:
        assert isinstance(message, Proof)
        if not hmac.compare_digest(message.mac, _mac(self._key, CLIENT_LABEL, self._transcript)):
            raise self._refuse(
                "token", AuthError("it has another token, or a third party relays the connection")
            )
        self._send(Welcome(_mac(self._key, SERVER_LABEL, self._transcript)))
        self._expect(Introduction, then=self._take_introduction)

    def _take_introduction(self, message: Greeting) -> None:
        assert isinstance(message, Introduction)
        own, other = self._mine.versions, message.versions
        table = compare_versions(own, other)
        if table is not None:
            error = ProtocolError(f"its software does not match:\n{printable(table)}")
            table_for_peer = compare_versions(other, own) or ""
            raise self._refuse("software", error, table_for_peer[:REASON_CHARS_MAX])
        if self._role in self._not_now:
            raise self._refuse("standby", ProtocolError(f"a {self._role} is refused for now"))
        self._send(self._mine)
        challenge = self._challenge
        self.result = HandshakeOutcome(self._role, challenge.service, challenge.cluster, message)

    def _refuse(self, code: str, error: HopliteError, reason: str = "") -> HopliteError:
        self._send(Refused(code, reason))
        return error


class ClientHandshake(_Handshake):
    """The calling side. It sends first, and trusts nothing before the Welcome."""

    def __init__(
        self,
        key: Secret,
        role: str,
        mine: Introduction,
        *,
        cluster: bytes = b"",
        certificate_sha256: bytes = PLAIN,
        deadline: float = float("inf"),
        nonce: bytes | None = None,
    ) -> None:
        super().__init__(key, mine, certificate_sha256, deadline)
        self._hello = Hello(role, nonce or secrets.token_bytes(NONCE_BYTES), cluster)
        self._cluster = cluster
        self._transcript = b""
        self._authenticated = False
        self._outgoing += PREAMBLE
        self._send(self._hello)
        self._expect(Challenge, Refused, then=self._take_challenge)

    def _take_challenge(self, message: Greeting) -> None:
        if isinstance(message, Refused):
            raise self._refused(message)
        assert isinstance(message, Challenge)
        role = self._hello.role
        if message.service != SERVICE_OF[role]:
            raise ProtocolError(REFUSED_TEXTS["role"])
        if self._cluster and message.cluster != self._cluster:
            raise ProtocolError(REFUSED_TEXTS["cluster"])
        self._cluster = message.cluster
        nonces = (self._hello.nonce, message.nonce)
        self._transcript = transcript(
            role, message.service, nonces, message.cluster, self._certificate
        )
        self._send(Proof(_mac(self._key, CLIENT_LABEL, self._transcript)))
        self._expect(Welcome, Refused, then=self._take_welcome)

    def _take_welcome(self, message: Greeting) -> None:
        if isinstance(message, Refused):
            raise self._refused(message)
        assert isinstance(message, Welcome)
        if not hmac.compare_digest(message.mac, _mac(self._key, SERVER_LABEL, self._transcript)):
            raise AuthError("it does not have the token, or a third party relays the connection")
        self._authenticated = True
        self._send(self._mine)
        self._expect(Introduction, Refused, then=self._take_introduction)

    def _take_introduction(self, message: Greeting) -> None:
        if isinstance(message, Refused):
            raise self._refused(message)
        assert isinstance(message, Introduction)
        table = compare_versions(self._mine.versions, message.versions)
        if table is not None:
            raise ProtocolError(f"{REFUSED_TEXTS['software']}:\n{printable(table)}")
        role = self._hello.role
        self.result = HandshakeOutcome(role, SERVICE_OF[role], self._cluster, message)

    def _refused(self, message: Refused) -> HopliteError:
        """The error for a refusal. Until the server has proved its key, its reason is not shown;
        its code only selects a local text."""
        text = REFUSED_TEXTS[message.code]
        if self._authenticated and message.reason:
            text = f"{text}:\n{printable(message.reason)}"
        return AuthError(text) if message.code == "token" else ProtocolError(text)
