"""TLS 1.3 over a non-blocking socket, under the same interface as plain TCP.

Why a real SSLSocket and no memory BIO between: a connection for bulk data is handed to a thread
that uses recv_into and send on it, after the same handshake as any other. One implementation
serves both, and OpenSSL reads no more than one record ahead, so nothing hides from the loop:
`read` asks for at least a whole record each time, or says through `buffered` what is left of one.

A certificate is not verified here, neither by name nor by authority. OpenSSL verifies that the
server has the private key of the certificate that it shows; the handshake inside proves that the
server meant that certificate (protocol/handshake.py). Session tickets are off: a resumed session
would save nothing on a LAN.

This module must never know tokens, nor what the bytes mean. Importing it loads OpenSSL: only who
uses TLS does so.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ssl
from typing import TYPE_CHECKING

from hoplite_mp.transport.certificates import in_memory_file
from hoplite_mp.transport.stream import NOT_TLS, QUEUE_BYTES_MAX, READ_BYTES, TcpStream

if TYPE_CHECKING:
    import socket

    from hoplite_mp.transport.certificates import Certificate

__all__ = ["TlsStream", "client_context", "server_context"]

RECORD_BYTES = 16 << 10  # the longest payload of a TLS record
# The first byte of a record during a handshake: an alert or a handshake message.
OPENERS = frozenset((21, 22))


@functools.cache
def client_context() -> ssl.SSLContext:
    """The settings of every client of this process."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # see above: the handshake inside does it
    return context


def server_context(certificate: Certificate) -> ssl.SSLContext:
    """The settings of a server that shows this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    with in_memory_file(certificate.pem) as path:
        context.load_cert_chain(path)
    return context


class TlsStream(TcpStream):
    """A connected stream socket with TLS in it. The handshake of TLS happens in read and flush."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_sha256: bytes | None = None,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
    ) -> None:
        """A server says what the hash of its own certificate is; a client learns it.

        Takes the socket over. OSError if the connection is gone already.
        """
        sock.setblocking(False)
        try:
            sock.getpeername()  # where it is gone, wrapping would leave it open
            inner = context.wrap_socket(
                sock,
                server_side=server_sha256 is not None,
                do_handshake_on_connect=False,
                suppress_ragged_eofs=False,  # an end that anybody can forge is no orderly end
            )
        except BaseException:
            sock.close()
            raise
        super().__init__(inner, queue_bytes_max)
        self._tls: ssl.SSLSocket = inner
        self._server_sha256 = server_sha256
        self.certificate_sha256 = None
        self._opener_missing = True  # the other side's first byte has not been looked at
        self._read_must_write = False
        self._shake_must_write = False

    @property
    def buffered(self) -> bool:
        return not self._ended and self._tls.pending() > 0

    @property
    def wants_read(self) -> bool:
        return not self._ended and not self._read_must_write

    @property
    def wants_write(self) -> bool:
        if self.failure is not None:
            return False
        # Before the handshake is through, the queue cannot move however writable the socket is.
        ready = self.certificate_sha256 is not None
        return self._read_must_write or self._shake_must_write or (ready and bool(self._queue))

    def read(self, nbytes_max: int = READ_BYTES) -> bytes | None:
        self._read_must_write = False
        pieces: list[bytes] = []
        room = nbytes_max
        # With room for a whole record each time, none is left that the loop would not announce.
        while self._shake() and not self._ended and (not pieces or room >= RECORD_BYTES):
            try:
                piece = self._tls.recv(min(room, RECORD_BYTES))  # it never gives more at once
            except ssl.SSLWantReadError:
                break
            except ssl.SSLWantWriteError:  # TLS must answer by itself (a change of keys) first
                self._read_must_write = True
                break
            except OSError as error:
                self._break(error)
                break
            self._ended = not piece  # "close_notify": the other side says that this is the end
            pieces.append(piece)
            room -= len(piece)
        data = b"".join(pieces)
        self.bytes_received += len(data)
        return None if self._ended and not data else data

    def flush(self) -> bool:
        # Whatever a read could not write, the next read begins with.
        self._read_must_write = self._shake_must_write = False
        return super().flush() if self._shake() else self.failure is None

    def _send_some(self, waiting: bytearray) -> int:
        # OpenSSL wants a send that it could not finish repeated with at least the same bytes: the
        # queue only grows behind them. In TLS 1.3 a send never waits for something to read.
        try:
            return super()._send_some(waiting)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def finish(self) -> None:
        self._say_goodbye()
        super().finish()

    def detach(self) -> ssl.SSLSocket:
        super().detach()
        return self._tls

    def close(self) -> None:
        if not self._detached:
            self._say_goodbye()
        super().close()

    def _say_goodbye(self) -> None:
        """The "close_notify", if it is true that everything was sent, and if it can leave now."""
        if self.certificate_sha256 is None or self.failure is not None or self._queue:
            return
        with contextlib.suppress(OSError, ValueError):  # it waits for the other's, we do not
            self._tls.unwrap()

    def _shake(self) -> bool:
        """Go on with the handshake of TLS; whether it is done."""
        if self.certificate_sha256 is not None:
            return True
        if self._ended or self.failure is not None:
            return False
        try:
            if self._opener_missing:
                self._look_at_opener()
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self._shake_must_write = True
            return False
        except OSError as error:
            self._break(error)
            return False
        self.certificate_sha256 = self._server_sha256 or self._shown()
        return True

    def _look_at_opener(self) -> None:
        """OpenSSL has a dozen names for what is no TLS; the first byte says it plainly."""
        opener = self.opener()
        self._opener_missing = opener is None
        if opener is not None and opener not in OPENERS:
            raise ConnectionError(NOT_TLS)

    def _shown(self) -> bytes:
        certificate = self._tls.getpeercert(binary_form=True)
        assert certificate is not None  # without a pre-shared key a server always shows one
        return hashlib.sha256(certificate).digest()

    def _break(self, error: OSError) -> None:
        self._ended = True
        if not isinstance(error, ssl.SSLZeroReturnError):
            self.failure = self._words(error)

    def _words(self, error: OSError) -> str:
        if isinstance(error, ssl.SSLEOFError):
            return "the connection was cut"
        if isinstance(error, ssl.SSLError):
            return f"TLS failed: {(error.reason or 'unknown').lower().replace('_', ' ')}"
        return super()._words(error)
