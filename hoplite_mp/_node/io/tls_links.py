"""Data links with TLS: two one-way connections, each driven by a Python thread.

OpenSSL allows only one thread at a time to use a connection, so a link that sends and receives
concurrently has two connections. The threads only move bytes from and to shared memory. The engine
decides block by block which frame is next and where received bytes belong.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from typing import TYPE_CHECKING

from hoplite_mp._common import clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._engine import Driver
    from hoplite_mp._node.ports import EnginePort

__all__ = ["TlsLink"]

# A frame that is available within this time after the previous one was sent had to wait, so the
# link counts as backlogged.
GAP_NS = 2_000_000
POLL_S = 1.0  # interval at which an idle thread checks whether its link is still open
_log = logging.getLogger("hoplite_mp")


class TlsLink:
    """One link of the engine. Frames wait until its sending connection is open."""

    def __init__(self, engine: EnginePort, number: int, answers: int = 0) -> None:
        """answers: the other node's link that this link answers, or 0 if this side began."""
        self.engine = engine
        self.number = number
        self.answers = answers
        self.driver: Driver = engine.drive(number)
        self.link = self.driver.link
        self.receiving = False
        # The time during which another frame was waiting. `EnginePort.counters` has the same
        # counter for sockets that the engine itself uses.
        self.backlogged_ns = 0
        self._open = True
        self._sockets: list[socket.socket] = []

    def send_over(self, sock: socket.socket) -> None:
        """Sends over this connection, which this side has opened."""
        if not self._open:
            sock.close()
            return
        self._begin(sock, self._send, "send")

    def receive_over(self, sock: socket.socket) -> None:
        """Receives over this connection, which the other side has opened. Called only once, because
        a second stream would not continue the first."""
        assert not self.receiving
        self.receiving = True
        self._begin(sock, self._receive, "receive")

    def _begin(self, sock: socket.socket, run: Callable[[socket.socket], None], name: str) -> None:
        sock.setblocking(True)
        self._sockets.append(sock)

        def work() -> None:
            with sock:
                run(sock)

        thread = threading.Thread(
            target=work,
            name=f"hoplite_mp {name} h{self.number}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:  # the user has reached the limit of threads
            _log.error("cannot start the %s thread for node h%d: %s", name, self.number, error)
            sock.close()
            self._end()

    def _send(self, sock: socket.socket) -> None:
        driver = self.driver
        since = 0  # time at which the last frame was sent
        try:
            while self._open:
                frame = driver.next_frame(POLL_S)
                if frame is None:
                    if _has_ended(sock):
                        raise ConnectionError("the peer has closed the connection")
                    continue
                if clock.monotonic_ns() - since > GAP_NS:
                    since = clock.monotonic_ns()
                try:
                    while frame:
                        sock.sendall(frame.pop(0))
                finally:  # an idle thread must not keep an object's memory in use
                    del frame
                    driver.sent()
                now = clock.monotonic_ns()
                self.backlogged_ns += now - since
                since = now
        except (OSError, RuntimeError) as error:  # ConnectionError: the link has ended
            _log.info("sending to node h%d ended: %s", self.number, error)
            self._end()

    def _receive(self, sock: socket.socket) -> None:
        driver = self.driver
        count = 0
        try:
            while self._open:
                place = driver.receive_into(POLL_S)
                if place is None:
                    continue
                try:
                    count = sock.recv_into(place)
                finally:
                    del place
                    driver.received(count)
                    count = 0
        except (OSError, RuntimeError) as error:
            _log.info("receiving from node h%d ended: %s", self.number, error)
            self._end()

    def _end(self) -> None:
        self._open = False
        with contextlib.suppress(KeyError, RuntimeError):
            self.engine.disconnect(self.link)

    def close(self) -> None:
        """Closes the link, and ends its threads."""
        self._end()
        for sock in self._sockets:
            # SSLSocket.shutdown() would first remove the TLS state, so that a thread inside
            # sendall() would send the rest unencrypted.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _has_ended(sock: socket.socket) -> bool:
    """Whether the other side, which never sends over this connection, has closed it. Without this
    check the closure would only be detected at the next frame, even while this node is waiting for
    answers to its last requests."""
    sock.setblocking(False)
    try:
        return not sock.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    finally:
        sock.setblocking(True)
