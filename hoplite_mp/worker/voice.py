"""To whom this worker speaks: marks in its stdout and stderr when that changes.

Why it exists: the node reads what was printed later, when another task may run. So the worker says
in the pipes themselves where lines for another driver begin; between two tasks of one driver it
says nothing. It keeps descriptors of its own: a task may point 1 and 2 elsewhere.
It must never know: tasks, who reads the pipes.
"""

from __future__ import annotations

import contextlib
import os
import sys

from hoplite_mp.protocol.output import mark

__all__ = ["Voice"]

STDOUT, STDERR = 1, 2


class Voice:
    """The two pipes of this process."""

    def __init__(self, home: int, audience: int) -> None:
        """audience: to whom its node takes it to speak."""
        self.home = home
        self.audience = audience
        self.pipes = [os.dup(STDOUT), os.dup(STDERR)]

    def turn_to(self, audience: int) -> None:
        """Everything that is printed from now on is for that one."""
        if audience == self.audience:
            return
        _flush()
        self.audience = audience
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a task has closed it: there are no lines, either
                # What a task has started may have changed it: both share the description.
                os.set_blocking(pipe, True)
                os.write(pipe, mark(self.home, audience))

    def finish(self) -> None:
        """The task ends. A driver on another host hears its last words before its result; one of
        this host at the latest when this process ends."""
        if self.audience:
            _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # of the user's making, or none at all
            stream.flush()
