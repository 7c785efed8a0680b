"""The socket over which a driver on this host receives workers' output.

A driver reads at its own pace, so frames are queued here. Each sender is notified how many of its
bytes have been sent to the driver, and limits its bytes in the queue.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.ports import LoopPort

__all__ = ["DriverSocket", "OutputLine", "Socket", "frames"]

Socket = socket.socket  # for components that pass a socket to a DriverSocket

LENGTH_BYTES = 4


class OutputLine(msgspec.Struct, frozen=True, array_like=True):
    """One line from a worker, without the line end. `stream`: 1 for stdout, 2 for stderr."""

    stream: int
    label: str
    line: bytes


_encode = msgspec.msgpack.Encoder().encode


def frames(stream: int, label: str, lines: list[bytes]) -> bytes:
    """Encodes lines for the driver, each as a length followed by an encoded OutputLine."""
    found: list[bytes] = []
    for line in lines:
        data = _encode(OutputLine(stream, label, line))
        found += (len(data).to_bytes(LENGTH_BYTES, "little"), data)
    return b"".join(found)


class DriverSocket:
    """A queue of data for one driver. It has no limit, because each sender limits its own bytes."""

    def __init__(self, sock: socket.socket, loop: LoopPort) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.loop = loop
        # (data, bytes that count for the sender, function to call when the data has been sent)
        self.backlog: deque[tuple[memoryview, int, Callable[[int], None]]] = deque()
        self.broken = False
        self._sending = False
        self._ends = False  # close as soon as everything has been sent
        loop.watch(sock.fileno(), self.ready, read=False)

    def put(self, data: bytes, nbytes: int, taken: Callable[[int], None]) -> None:
        """Queues data. Calls `taken(nbytes)` when the data has been sent or the driver is gone,
        which may be before this method returns."""
        self.backlog.append((memoryview(data), nbytes, taken))
        self.send()

    def send(self) -> None:
        """Sends as much as the driver accepts now. The loop calls `ready` for the rest."""
        if self._sending:
            return  # a `taken` function has queued more data
        self._sending = True
        try:
            while credits := self._send():
                for taken, nbytes in credits.items():
                    taken(nbytes)
        finally:
            self._sending = False
        if not self.broken:
            self.loop.watch(self.sock.fileno(), self.ready, read=False, write=bool(self.backlog))
        if self._ends and not self.backlog:
            self._close()

    def ready(self) -> None:
        """Called by the loop when the socket is writable or the driver has closed its end. In the
        latter case the socket is unwatched, because epoll would report the end in every turn."""
        if not self.backlog and not self.broken:
            closed = select.poll()
            closed.register(self.sock, 0)
            if closed.poll(0):
                self.broken = True
                self.loop.unwatch(self.sock.fileno())
        self.send()

    def end(self) -> None:
        """Closes the socket when the queued data has been sent or the driver is gone. No more data
        may be queued."""
        self._ends = True
        if not self.backlog:
            self._close()

    def _close(self) -> None:
        if not self.broken:
            self.broken = True
            self.loop.unwatch(self.sock.fileno())
        self.sock.close()

    def _send(self) -> dict[Callable[[int], None], int]:
        credits: dict[Callable[[int], None], int] = {}
        with contextlib.suppress(BlockingIOError):
            while self.backlog:
                data, nbytes, taken = self.backlog[0]
                sent = len(data) if self.broken else self._pass(data)
                if sent < len(data):
                    self.backlog[0] = data[sent:], nbytes, taken
                    continue
                self.backlog.popleft()
                credits[taken] = credits.get(taken, 0) + nbytes
        return credits

    def _pass(self, data: memoryview) -> int:
        try:
            return self.sock.send(data)
        except BlockingIOError:
            raise
        except OSError:  # the driver is gone, so its lines are dropped
            self.broken = True
            self.loop.unwatch(self.sock.fileno())
            return len(data)
