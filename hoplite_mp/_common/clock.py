"""The clock for deadlines, and sleep.

Libraries that freeze time for tests replace `time.monotonic` and all module attributes that refer
to it, and tests mock `time.sleep`. Deadlines on a frozen clock would be wrong, because the compiled
modules and the other processes on the host use the system's clock. Only the simulation replaces the
functions in this module.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
import os
import select
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

__all__ = [
    "FOREVER_NS",
    "Deadline",
    "check_timeout",
    "deadline_ns",
    "monotonic",
    "monotonic_ns",
    "sleep",
    "wait_for_process",
]


monotonic = functools.partial(time.clock_gettime, time.CLOCK_MONOTONIC)
monotonic_ns = functools.partial(time.clock_gettime_ns, time.CLOCK_MONOTONIC)
sleep = time.sleep


POLL_MS_MAX = (1 << 31) - 1  # limit of poll(2), whose timeout is a C int


def wait_for_process(process: subprocess.Popen[Any], seconds: float) -> int | None:
    """Waits for the process. Returns its exit code; None after the timeout. `Popen.wait` is not
    used, because it uses the clock that tests freeze, and polls at intervals."""
    if process.poll() is not None:
        return process.returncode
    try:
        exited = os.pidfd_open(process.pid)
    except ProcessLookupError:  # the process has just exited
        return process.poll()
    except OSError:  # no descriptor is free
        import subprocess

        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.returncode
    try:
        poll = select.poll()
        poll.register(exited, select.POLLIN)
        end = monotonic() + seconds
        while not poll.poll(min(max(0.0, end - monotonic()) * 1e3, POLL_MS_MAX)):
            if monotonic() >= end:
                break
    finally:
        os.close(exited)
    return process.poll()


# Users' timeouts, and the resulting deadlines.
#
# All waits have a deadline on the monotonic clock, so that the timeout of a wait with several steps
# does not restart with each step. Error messages contain the user's timeout.


FOREVER_NS = 1 << 62


class Deadline(int):
    """A time on the monotonic clock in nanoseconds, and the timeout from which it was computed."""

    within_s: float  # the timeout, for error messages


def deadline_ns(timeout: float | None) -> int:
    """The deadline for a timeout in seconds; None means never, and a timeout of at most 0 polls."""
    check_timeout(timeout)
    if timeout is None:
        return FOREVER_NS
    if timeout <= 0:
        return 0
    deadline = Deadline(monotonic_ns() + int(min(timeout, 1e9) * 1e9))
    deadline.within_s = float(timeout)
    return deadline


def check_timeout(timeout: Any) -> None:
    """Raises TypeError unless the timeout is a number or None, and ValueError for NaN."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout={timeout!r}: it must be a number of seconds or None")
    if timeout != timeout:
        raise ValueError("timeout=nan: it must be a number of seconds or None")
