"""Descriptors that user code does not know of: out of its way, and watched.

Why it exists: code that makes daemons closes all descriptors, also ours, and the numbers come again
as its own files. So ours get high numbers, which are neither in the way nor soon used again, and a
`Line` knows whether its number still is what it was.
It must never know: what is sent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket

from hoplite_mp import _shm

__all__ = ["Watched", "close_socket", "lift", "lift_socket"]

# Numbers begin here, or at half of what the process may open. Higher: code that closes "all" up to
# a number of its own misses ours. Lower: a fork copies a smaller table.
NUMBER_MIN = 1000


def lift(fd: int) -> int:
    """The same file under a high number, closed on exec; the old number is closed. The old one if
    there is no high one left."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = NUMBER_MIN if soft == resource.RLIM_INFINITY else min(NUMBER_MIN, soft // 2)
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, low)
    except OSError:
        return fd
    os.close(fd)
    return high


def lift_socket(sock: socket.socket) -> socket.socket:
    """The same socket under a high number; the object given is closed."""
    timeout = sock.gettimeout()
    lifted = socket.socket(fileno=lift(sock.detach()))
    lifted.settimeout(timeout)
    return lifted


def close_socket(sock: socket.socket, line: Watched) -> None:
    """For the other side it ends, whoever was forked meanwhile; a number that is another file's by
    now is left alone."""
    if line.there():
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    else:
        sock.detach()


class Watched:
    """A descriptor, and which file it was."""

    __slots__ = ("device", "fd", "number")

    def __init__(self, fd: int) -> None:
        found = os.fstat(fd)
        self.fd, self.device, self.number = fd, found.st_dev, found.st_ino

    def there(self) -> bool:
        """Is it still that file? Costs one system call."""
        return _shm.same_file(self.fd, self.device, self.number)

    def close(self) -> None:
        """Unless the number is another file's by now."""
        if self.there():
            with contextlib.suppress(OSError):
                os.close(self.fd)
