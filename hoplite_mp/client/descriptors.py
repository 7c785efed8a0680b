"""File descriptors of this library: given high numbers, and checked before each use.

Why it exists: code that makes daemons closes all descriptors, including ours, and the numbers are
then reused for its own files. So ours get high numbers, which are rarely closed or reused, and
`Watched` knows whether its number is still the same file.
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

# Our numbers begin here, or at half of the process's limit. Higher: less likely to be closed by
# code that closes "all" numbers up to a limit of its own. Lower: a fork copies a smaller table.
NUMBER_MIN = 1000


def lift(fd: int) -> int:
    """Duplicates a descriptor to a high number, close-on-exec, and closes the old one. Returns the
    old one if no high number is free."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = NUMBER_MIN if soft == resource.RLIM_INFINITY else min(NUMBER_MIN, soft // 2)
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, low)
    except OSError:
        return fd
    os.close(fd)
    return high


def lift_socket(sock: socket.socket) -> socket.socket:
    """Moves a socket to a high number; the given object is detached."""
    timeout = sock.gettimeout()
    lifted = socket.socket(fileno=lift(sock.detach()))
    lifted.settimeout(timeout)
    return lifted


def close_socket(sock: socket.socket, line: Watched) -> None:
    """Ends the connection for the other side, even if a forked child has the socket, too. If the
    number is another file's by now, that file is left alone."""
    if line.there():
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    else:
        sock.detach()


class Watched:
    """A descriptor, and the identity of its file."""

    __slots__ = ("device", "fd", "number")

    def __init__(self, fd: int) -> None:
        found = os.fstat(fd)
        self.fd, self.device, self.number = fd, found.st_dev, found.st_ino

    def there(self) -> bool:
        """Is it still the same file? Costs one system call."""
        return _shm.same_file(self.fd, self.device, self.number)

    def close(self) -> None:
        """Closes it, unless the number is another file's by now."""
        if self.there():
            with contextlib.suppress(OSError):
                os.close(self.fd)
