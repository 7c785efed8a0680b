"""Runs the handshake on a stream, step by step as bytes arrive.

The code is the same for clients and servers, with and without TLS, over TCP and memory. Only the
handshake's bytes are read. Later bytes are left for the stream's next owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hoplite_mp._protocol.greetings import REFUSED_TEXTS
from hoplite_mp._transport.stream import NOT_TLS
from hoplite_mp.errors import HopliteError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._protocol.greetings import Introduction
    from hoplite_mp._protocol.handshake import ClientHandshake, HandshakeOutcome, ServerHandshake
    from hoplite_mp._transport.stream import ByteStream, TcpStream

__all__ = ["Admission", "Conversation"]


@dataclass(frozen=True, slots=True)
class Admission:
    """A connection whose two sides have authenticated each other.

    stream: must be read once immediately, because no selector reports bytes that arrived together
    with the end of the handshake. For the role "data", `stream.detach()` returns the non-blocking
    socket (an SSLSocket if TLS is used), and no bytes are buffered outside it. address: the other
    end's address, as reported by the system.
    """

    stream: TcpStream
    role: str
    cluster: bytes
    peer: Introduction
    address: str


class Conversation:
    """The handshake on one connection. begin: creates the handshake. Its argument is the hash of
    the server's certificate."""

    def __init__(
        self, stream: ByteStream, begin: Callable[[bytes], ClientHandshake | ServerHandshake]
    ) -> None:
        self.stream = stream
        self._begin = begin
        self._handshake: ClientHandshake | ServerHandshake | None = None

    def advance(self) -> HandshakeOutcome | None:
        """Makes as much progress as possible without blocking. Returns the outcome at the end.

        Raises AuthError or ProtocolError if the handshake has failed, after the reply was sent to
        the other side. Raises ConnectionError if the connection has ended.
        """
        while True:
            self._send()
            handshake = self._handshake
            if handshake is None:  # the TLS handshake is not finished
                return None
            if handshake.result is not None:
                return None if self.stream.wants_write else handshake.result
            data = self.stream.read(handshake.wanted)
            if data is None:
                raise ConnectionError(self.stream.failure or "the other side closed the connection")
            if not data:
                return None
            try:
                handshake.feed(data)
            except HopliteError:
                self.stream.write(handshake.outgoing())
                self.stream.flush()
                raise

    def _send(self) -> None:
        """Sends queued data, and continues the TLS handshake if it is not finished."""
        stream = self.stream
        stream.flush()
        if self._handshake is None and stream.certificate_sha256 is not None:
            self._handshake = self._begin(stream.certificate_sha256)
        if self._handshake is not None:
            stream.write(self._handshake.outgoing())
            stream.flush()
        if stream.failure == NOT_TLS:
            raise ProtocolError(REFUSED_TEXTS["plain"])
        # During the handshake, a failure is not reported here, because the other side's last bytes
        # may still be readable.
        if stream.failure is not None and (
            self._handshake is None or self._handshake.result is not None
        ):
            raise ConnectionError(stream.failure)
