"""The library's file descriptors: moved to high numbers, and checked before each use.

Programs that turn themselves into daemons close all descriptors, including the library's, and the
kernel then assigns their numbers to other files. The library's descriptors therefore have high
numbers, which are rarely closed or reused, and `Watched` checks whether a number still refers to
the same file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket

from hoplite_mp import _shm

__all__ = [
    "Watched",
    "close_socket",
    "fill_standard_descriptors",
    "lift",
    "lift_socket",
]

# The library's numbers begin here, or at half of the process's limit. With a higher value, the
# descriptors survive more programs that close all numbers up to some limit. With a lower value, a
# fork copies a smaller table.
NUMBER_MIN = 1000


def lift(fd: int) -> int:
    """Moves a descriptor to a high number, and marks it close-on-exec. Returns the new descriptor,
    or the old one if no high number is free."""
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
    """Ends the connection for the other side, even if a forked child has the socket, too. Does
    nothing to the descriptor if its number now belongs to another file."""
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
        """Whether the number still refers to the same file. Costs one system call."""
        return _shm.same_file(self.fd, self.device, self.number)

    def close(self) -> None:
        """Closes the descriptor, unless its number now belongs to another file."""
        if self.there():
            with contextlib.suppress(OSError):
                os.close(self.fd)


def fill_standard_descriptors() -> None:
    """Opens /dev/null as standard input, output or error if the program has closed them. Otherwise
    one of the library's files would get such a number, and the supervisor would replace it."""
    number = os.open(os.devnull, os.O_RDWR)
    while number <= 2:
        os.set_inheritable(number, True)  # the supervisor needs them, too
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
