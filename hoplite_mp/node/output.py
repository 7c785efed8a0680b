"""Workers' stdout and stderr, line by line, on their way to the driver.

Why it exists: what a task prints belongs in front of the user. Each worker writes to pipes; whole
lines go to the driver with the worker's label. When the driver does not read, the pipes are left
alone until it does, so that nothing grows.
It must never know: what the lines mean.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections import deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["Output", "OutputLine"]

BACKLOG_BYTES_MAX = 1 << 20
READ_BYTES = 65536


class OutputLine(msgspec.Struct, frozen=True, array_like=True):
    """One line of a worker: stream 1 (stdout) or 2 (stderr), without the line's end."""

    stream: int
    label: str
    line: bytes


class Output:
    """Pipes in, one socket to the driver out."""

    def __init__(self, sock: socket.socket, poll: select.epoll, line_bytes_max: int) -> None:
        self.sock = sock
        self.sock.setblocking(False)
        self.poll = poll
        self.line_bytes_max = line_bytes_max
        self.pipes: dict[int, tuple[int, str, bytearray]] = {}  # fd -> (stream, label, rest)
        self.paused: set[int] = set()
        self.backlog: deque[bytes] = deque()
        self.backlog_bytes = 0
        self.broken = False
        self._encode = msgspec.msgpack.Encoder().encode

    def add(self, fd: int, stream: int, label: str) -> Callable[[], bool]:
        """Reads a worker's pipe from now on; returns what to call when it is readable."""
        os.set_blocking(fd, False)
        self.pipes[fd] = (stream, label, bytearray())
        self.poll.register(fd, select.EPOLLIN)
        return lambda: self.read(fd)

    def read(self, fd: int) -> bool:
        """Takes what is there; False when the pipe has ended."""
        stream, label, rest = self.pipes[fd]
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return True
        rest += data
        *lines, last = bytes(rest).split(b"\n")
        rest[:] = last
        if len(rest) > self.line_bytes_max or (not data and rest):
            lines.append(bytes(rest))
            rest.clear()
        for line in lines:
            self.send(OutputLine(stream, label, line))
        if not data:
            self.close(fd)
            return False
        return True

    def drain(self, fd: int) -> None:
        """The worker is dead: everything that it wrote, and then the end."""
        while fd in self.pipes:
            before = len(self.pipes[fd][2])
            if not self.read(fd) or len(self.pipes[fd][2]) == before:
                break
        if fd in self.pipes:  # somebody else still holds the other end
            stream, label, rest = self.pipes[fd]
            if rest:
                self.send(OutputLine(stream, label, bytes(rest)))
            self.close(fd)

    def finish(self, patience_s: float) -> None:
        """The host ends: what the workers wrote goes to the driver, to the last byte."""
        for fd in list(self.pipes):
            self.drain(fd)
        self.sock.settimeout(patience_s)
        with contextlib.suppress(OSError):  # the driver does not read, or is gone
            while self.backlog:
                self.sock.sendall(self.backlog.popleft())

    def close(self, fd: int) -> None:
        del self.pipes[fd]
        self.paused.discard(fd)
        os.close(fd)  # epoll forgets it

    def send(self, line: OutputLine) -> None:
        if self.broken:
            return
        data = self._encode(line)
        self.backlog.append(len(data).to_bytes(4, "little") + data)
        self.backlog_bytes += len(self.backlog[-1])
        self.flush()
        if self.backlog_bytes > BACKLOG_BYTES_MAX:
            for fd in self.pipes:
                if fd not in self.paused:
                    self.paused.add(fd)
                    self.poll.modify(fd, 0)

    def flush(self) -> None:
        """Sends what the driver takes; asks to be called again for the rest."""
        try:
            while self.backlog:
                sent = self.sock.send(self.backlog[0])
                self.backlog_bytes -= sent
                if sent < len(self.backlog[0]):
                    self.backlog[0] = self.backlog[0][sent:]
                else:
                    self.backlog.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.broken = True
            self.backlog.clear()
            self.backlog_bytes = 0
        self.poll.modify(self.sock, select.EPOLLOUT if self.backlog else 0)
        if self.paused and self.backlog_bytes < BACKLOG_BYTES_MAX // 2:
            for fd in self.paused:
                self.poll.modify(fd, select.EPOLLIN)
            self.paused.clear()
