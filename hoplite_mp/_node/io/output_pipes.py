"""The read ends of the pipes into which workers print.

Why it exists: rooms make no system calls of their own.
It must never know: lines, drivers.
"""

from __future__ import annotations

import os

__all__ = ["close", "open_for_reading", "read"]


def open_for_reading(fd: int) -> None:
    """Makes `read` return at once from now on."""
    os.set_blocking(fd, False)


def read(fd: int, nbytes_max: int) -> bytes | None:
    """What is there, at most so many bytes; b"": nobody can write into the pipe any more; None:
    nothing is there now."""
    try:
        return os.read(fd, nbytes_max)
    except BlockingIOError:
        return None


def close(fd: int) -> None:
    """Closes the read end."""
    os.close(fd)
