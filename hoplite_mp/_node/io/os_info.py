"""What components ask the operating system of this host without waiting for anything.

Components reach the operating system only through `io/`, so that all system calls are in one
folder.
"""

from __future__ import annotations

import os
import signal
import socket

__all__ = ["file_bytes", "hostname", "resident_bytes", "signal_name", "yield_core"]

BLOCKS_UNIT = 512  # of st_blocks, whatever a file system's blocks are


def hostname() -> str:
    """The name of this host, as people know it."""
    return socket.gethostname()


def file_bytes(fd: int) -> int:
    """The length of an open file."""
    return os.fstat(fd).st_size


def resident_bytes(fd: int) -> int:
    """Bytes of an open memory file for which the kernel has pages."""
    return os.fstat(fd).st_blocks * BLOCKS_UNIT


def yield_core() -> None:
    """Lets another thread of this host run first."""
    os.sched_yield()


def signal_name(number: int) -> str:
    """The name of a signal, or "signal" and its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
