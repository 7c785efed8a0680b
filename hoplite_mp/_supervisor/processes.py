"""Functions for processes: descriptor limits, children, exits."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hoplite_mp._protocol.local import LanStart

__all__ = [
    "DESCRIPTORS_MAX",
    "children",
    "descriptors",
    "kill_group",
    "leave",
    "print_error",
    "raise_descriptor_limit",
]

DESCRIPTORS_MAX = 4096


def children() -> list[int]:
    """The pids of this single-threaded process's children."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # the kernel does not have this file
        return []


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def print_error(line: str) -> None:
    """Prints a line to stderr, because this process has no logging."""
    with contextlib.suppress(OSError):
        os.write(2, f"hoplite_mp: {line}\n".encode())


def descriptors(lan: LanStart | None, *names: str) -> list[int]:
    """The open descriptors in these fields of `lan`."""
    found = [] if lan is None else [getattr(lan, name) for name in names]
    return [fd for fd in found if fd >= 0]


def leave(code: int) -> None:
    """Exits from a child process. Runs exit handlers and flushes output, but does not finalize the
    interpreter, which is a copy of the template's."""
    import atexit
    import threading

    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)


def raise_descriptor_limit() -> None:
    """Raises the soft limit on descriptors. A starting worker takes six of them (both ends of a
    connection and of two pipes), so 1024 descriptors suffice for about 170 workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
