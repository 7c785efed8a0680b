"""The clock that deadlines are computed with, and the pause between two looks.

Libraries that freeze time for tests replace `time.monotonic` and every module attribute that refers
to it, and tests replace `time.sleep` by a mock. A deadline by such a clock would never pass, or
would have passed already, because the compiled modules and the other processes of the host go by
the clock of the system. Nobody replaces the functions of this module, except the simulation.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

__all__ = ["monotonic", "monotonic_ns", "sleep", "wait_for_process"]

monotonic = functools.partial(time.clock_gettime, time.CLOCK_MONOTONIC)
monotonic_ns = functools.partial(time.clock_gettime_ns, time.CLOCK_MONOTONIC)
sleep = time.sleep

PROCESS_POLL_S_MAX = 0.05  # longest pause between two looks at a process; the first is 0.5 ms


def wait_for_process(process: subprocess.Popen[Any], seconds: float) -> int | None:
    """Waits for the process and returns its exit code; None if it has not ended in time. Like
    `Popen.wait`, whose timeout uses the clock that tests freeze."""
    end, pause = monotonic() + seconds, 5e-4
    while (code := process.poll()) is None and (left := end - monotonic()) > 0:
        sleep(min(left, pause))
        pause = min(2 * pause, PROCESS_POLL_S_MAX)
    return code
