"""Makes children that user code has forked in a task exit when they return to the worker's code.

Such a child is a copy of the worker. It must not write results or claim tasks, so it exits when the
user's function has returned or raised an exception. Its exit code is that of a script that calls
the function.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

__all__ = ["end_if_forked"]


def end_if_forked(pid: int, error: BaseException | None = None) -> None:
    """Exits from this process unless it is the worker itself. pid: the worker's pid. error: the
    exception raised by the user's function. The code of a SystemExit is the exit code; any other
    exception is printed."""
    if os.getpid() == pid:
        return
    code = 0
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            code = error.code & 0xFF
        elif error.code is not None:
            code = 1
            print(error.code, file=sys.stderr)
    elif error is not None:
        code = 1
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the task may have replaced or closed the stream
            stream.flush()
    os._exit(code)
