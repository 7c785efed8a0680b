"""Data links under TLS: two one-way connections, each driven by a Python thread.

Why it exists: OpenSSL's state of a connection may be used by one thread at a time, so a link that
sends and receives concurrently has two connections. The threads only move bytes: the engine decides
block by block which frame is next and where received bytes belong, directly from and into shared
memory.
It must never know: what the frames are about.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from hoplite_mp._engine import Driver
    from hoplite_mp.node.ports import Engine

__all__ = ["TlsLink"]

LOOK_S = 1.0  # how often an idle thread checks whether its link is still open
_log = logging.getLogger("hoplite_mp")


class TlsLink:
    """One link of the engine. Frames wait until the connection for sending is there."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine = engine
        self.number = number
        self.driver: Driver = engine.drive(number)
        self.link = self.driver.link
        self.receiving = False
        self._open = True
        self._sockets: list[socket.socket] = []

    def send_over(self, sock: socket.socket) -> None:
        """Sends over this connection, which this side has opened."""
        if not self._open:
            sock.close()
            return
        self._begin(sock, self._send, "send")

    def receive_over(self, sock: socket.socket) -> None:
        """Receives over this connection, which the other side has opened. Only once, because a
        second stream would not continue the first."""
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
        thread.start()

    def _send(self, sock: socket.socket) -> None:
        driver = self.driver
        try:
            while self._open:
                frame = driver.next_frame(LOOK_S)
                if frame is None:
                    if _has_ended(sock):
                        raise ConnectionError("the peer has closed the connection")
                    continue
                try:
                    while frame:
                        sock.sendall(frame.pop(0))
                finally:  # an idle thread must not keep an object's memory in use
                    del frame
                    driver.sent()
        except (OSError, RuntimeError) as error:  # ConnectionError: the link has ended
            _log.info("sending to node h%d ended: %s", self.number, error)
            self._end()

    def _receive(self, sock: socket.socket) -> None:
        driver = self.driver
        count = 0
        try:
            while self._open:
                place = driver.receive_into(LOOK_S)
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
        """Ends both threads."""
        self._end()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(2)


def _has_ended(sock: socket.socket) -> bool:
    """Has the other side, which never sends on this connection, closed it? Without this check that
    would go unnoticed until the next frame, while the answers to the last requests are awaited."""
    sock.setblocking(False)
    try:
        return not sock.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    finally:
        sock.setblocking(True)
