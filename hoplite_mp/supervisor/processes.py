"""Functions on processes: this process's limits, its children, and their ends.

Why it exists: these few calls have no state, and each has a reason of its own.
It must never know: which process is which.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys

__all__ = ["DESCRIPTORS_MAX", "children", "kill_group", "leave", "raise_descriptor_limit"]

DESCRIPTORS_MAX = 4096


def children() -> list[int]:
    """Pids of this single-threaded process's children."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without that file: they end by themselves
        return []


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def leave(code: int) -> None:
    """Ends a child: exit handlers run, but nothing of the template's is torn down a second time."""
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
    """Raises the limit, because each worker has a line and two pipes at the node: 1024 descriptors
    are used up by about 170 workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
