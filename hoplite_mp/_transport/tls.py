"""TLS 1.3 over a non-blocking socket, with the same interface as plain TCP.

An SSLSocket is used instead of a memory BIO, because a connection for bulk data is passed to a
thread that calls recv_into and send on it, after the same handshake as any other connection.
OpenSSL reads at most one record ahead. No bytes stay there unnoticed by the loop, because `read`
requests at least a complete record each time, or reports the rest of a record through `buffered`.

The certificate's name and authority are not verified here. OpenSSL verifies that the server has the
private key for its certificate, and the inner handshake proves that the server belongs to the
cluster and uses this certificate (_protocol/handshake.py). Session tickets are off, because
resuming a session would save nothing on a LAN.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ssl
from typing import TYPE_CHECKING

from hoplite_mp._transport.certificates import in_memory_file
from hoplite_mp._transport.stream import NOT_TLS, QUEUE_BYTES_MAX, READ_BYTES, TcpStream

if TYPE_CHECKING:
    import socket

    from hoplite_mp._transport.certificates import Certificate

__all__ = ["TlsStream", "client_context", "server_context"]

RECORD_BYTES = 16 << 10  # maximum payload of a TLS record
# The first byte of a TLS record during the handshake: 21 is an alert, 22 a handshake message.
OPENERS = frozenset((21, 22))


@functools.cache
def client_context() -> ssl.SSLContext:
    """The TLS settings of all clients in this process."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the inner handshake verifies the certificate
    return context


def server_context(certificate: Certificate) -> ssl.SSLContext:
    """The TLS settings of a server with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    with in_memory_file(certificate.pem) as path:
        context.load_cert_chain(path)
    return context


class TlsStream(TcpStream):
    """A connected stream socket with TLS. `read` and `flush` advance the TLS handshake."""

    # OpenSSL requires that an unfinished send is repeated with at least the same bytes. This is the
    # case, because the queue only grows at its end. In TLS 1.3, a send never has to read first.
    _later = (*TcpStream._later, ssl.SSLWantReadError, ssl.SSLWantWriteError)

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_sha256: bytes | None = None,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
    ) -> None:
        """Takes over the socket. Raises OSError if the connection has already ended.

        server_sha256: for a server, the hash of its own certificate. None for a client, which
        computes the hash of the certificate that it receives.
        """
        sock.setblocking(False)
        try:
            # Fails if the connection has ended. `wrap_socket` would then leave the socket open.
            sock.getpeername()
            inner = context.wrap_socket(
                sock,
                server_side=server_sha256 is not None,
                do_handshake_on_connect=False,
                suppress_ragged_eofs=False,  # an end without close_notify may be forged
            )
        except BaseException:
            sock.close()
            raise
        super().__init__(inner, queue_bytes_max)
        self._tls: ssl.SSLSocket = inner
        self._server_sha256 = server_sha256
        self.certificate_sha256 = None
        self._opener_missing = True  # the other side's first byte has not been checked yet
        # A server has nothing to send before the other side's first byte.
        self._may_send = server_sha256 is not None
        self._no_tls_likely = False
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
        # Queued data cannot be sent before the end of the handshake, even if the socket is
        # writable.
        ready = self.certificate_sha256 is not None
        return self._read_must_write or self._shake_must_write or (ready and bool(self._queue))

    def read(self, nbytes_max: int = READ_BYTES) -> bytes | None:
        self._read_must_write = False
        pieces: list[bytes] = []
        remaining = nbytes_max
        # Unless nbytes_max is smaller, each recv has space for a complete record. Then no part of a
        # record stays in OpenSSL, where the loop cannot detect it. A record that is not full is
        # probably the last for now. Another recv would only cost a system call and an exception,
        # because the loop is woken when the next record arrives.
        while self._advance_handshake() and not self._ended:
            try:
                # `recv` returns at most one record.
                piece = self._tls.recv(min(remaining, RECORD_BYTES))
            except ssl.SSLWantReadError:
                break
            except ssl.SSLWantWriteError:  # TLS itself must first send data (for a change of keys)
                self._read_must_write = True
                break
            except OSError as error:
                self._break(error)
                break
            self._ended = not piece  # an orderly end ("close_notify")
            pieces.append(piece)
            remaining -= len(piece)
            if len(piece) < RECORD_BYTES or remaining < RECORD_BYTES:
                break
        data = b"".join(pieces)
        self.bytes_received += len(data)
        return None if self._ended and not data else data

    def flush(self) -> bool:
        # The next read continues an unfinished write by an earlier read.
        self._read_must_write = self._shake_must_write = False
        return super().flush() if self._advance_handshake() else self.failure is None

    def finish(self) -> None:
        self._send_close_notify()
        super().finish()

    def detach(self) -> ssl.SSLSocket:
        super().detach()
        return self._tls

    def close(self) -> None:
        if not self._detached:
            self._send_close_notify()
        super().close()

    def _send_close_notify(self) -> None:
        """Sends "close_notify" if the queue is empty and the socket accepts the message now."""
        if self.certificate_sha256 is None or self.failure is not None or self._queue:
            return
        # `unwrap` sends the message, and raises because the other side's close_notify is missing.
        # That message is not needed.
        with contextlib.suppress(OSError, ValueError):
            self._tls.unwrap()

    def _advance_handshake(self) -> bool:
        """Continues the TLS handshake. Returns whether it is finished."""
        if self.certificate_sha256 is not None:
            return True
        if self._ended or self.failure is not None:
            return False
        try:
            if self._opener_missing and not self._check_opener() and self._may_send:
                return False
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._may_send = True
            return False
        except ssl.SSLWantWriteError:
            self._shake_must_write = True
            return False
        except OSError as error:
            self._break(error)
            return False
        self.certificate_sha256 = self._server_sha256 or self._certificate_bytes()
        return True

    def _check_opener(self) -> bool:
        """Checks the first unread byte, because OpenSSL raises a dozen different errors for data
        that is not TLS. Returns whether there is an unread byte.

        For a client, a single call to OpenSSL sends the first message and may then read the
        beginning of a reply that arrived after this check. In that case the next unread byte is not
        the other side's first byte, and only determines the text of an OpenSSL error.
        """
        opener = self.opener()
        self._opener_missing = opener is None
        if opener is not None and opener not in OPENERS:
            if self._server_sha256 is not None or not self._may_send:
                raise ConnectionError(NOT_TLS)
            self._no_tls_likely = True
        return opener is not None

    def _certificate_bytes(self) -> bytes:
        certificate = self._tls.getpeercert(binary_form=True)
        assert certificate is not None  # a server without a pre-shared key has a certificate
        return hashlib.sha256(certificate).digest()

    def _break(self, error: OSError) -> None:
        self._ended = True
        if not isinstance(error, ssl.SSLZeroReturnError):
            self.failure = self._words(error)

    def _words(self, error: OSError) -> str:
        if isinstance(error, ssl.SSLEOFError):
            return "the connection was cut"
        if isinstance(error, ssl.SSLError):
            if self._no_tls_likely and self.certificate_sha256 is None:
                return NOT_TLS
            return f"TLS failed: {(error.reason or 'unknown').lower().replace('_', ' ')}"
        return super()._words(error)
