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

from hoplite_mp.client.descriptors import Watched, lift
from hoplite_mp.protocol.output import mark

__all__ = ["Voice"]

STDOUT, STDERR = 1, 2


class Voice:
    """The two pipes of this process."""

    def __init__(self, home: int, audience: int) -> None:
        """audience: to whom its node takes it to speak."""
        self.home = home
        self.audience = audience
        self.pipes = [Watched(lift(os.dup(stream))) for stream in (STDOUT, STDERR)]

    def turn_to(self, audience: int) -> None:
        """Everything that is printed from now on is for that one."""
        if audience == self.audience:
            return
        self.flush()
        self.audience = audience
        for pipe in self.pipes:
            if not pipe.there():
                continue  # a task has closed it: there are no lines, either
            with contextlib.suppress(OSError):
                # What a task has started may have changed it: both share the description.
                os.set_blocking(pipe.fd, True)
                os.write(pipe.fd, mark(self.home, audience))

    def finish(self) -> None:
        """The task ends. A driver on another host hears its last words before its result; one of
        this host at the latest when this process ends."""
        if self.audience:
            self.flush()

    def flush(self) -> None:
        """What has been printed is written."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # of the user's making, or none at all
                stream.flush()
