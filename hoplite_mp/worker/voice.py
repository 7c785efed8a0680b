"""Tells the node for which driver this worker's output is: marks in its stdout and stderr.

Why it exists: the node reads output later, when another task may be running. So the worker writes a
mark into the pipes where lines for another driver begin; between two tasks of one driver it writes
none. It has descriptors of its own, because a task may redirect 1 and 2.
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
    """The two output pipes of this process."""

    def __init__(self, home: int, audience: int) -> None:
        """audience: the one that the node assumes at the beginning."""
        self.home = home
        self.audience = audience
        self.pipes = [Watched(lift(os.dup(stream))) for stream in (STDOUT, STDERR)]

    def turn_to(self, audience: int) -> None:
        """Everything that is printed from now on is for that audience."""
        if audience == self.audience:
            return
        self.flush()
        self.audience = audience
        for pipe in self.pipes:
            if not pipe.there():
                continue  # a task has closed it, so there will be no lines
            with contextlib.suppress(OSError):
                # A process that a task has started may have changed the mode, which is shared by
                # duplicates.
                os.set_blocking(pipe.fd, True)
                os.write(pipe.fd, mark(self.home, audience))

    def finish(self) -> None:
        """The task ends. A driver on another host must get its last lines before its result; one on
        this host gets them at the latest when this process ends."""
        if self.audience:
            self.flush()

    def flush(self) -> None:
        """Flushes what has been printed."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # an object of the user's, or None
                stream.flush()
