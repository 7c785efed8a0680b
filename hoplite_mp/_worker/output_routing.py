"""Tells the node, by marks in stdout and stderr, for which driver this worker's output is.

The node reads output later, when another task may be running. So the worker writes a mark into both
pipes where lines for another driver begin; between two tasks of one driver it writes none. It
writes to duplicates of descriptors 1 and 2, because a task may redirect these.
"""

from __future__ import annotations

import contextlib
import os
import sys

from hoplite_mp._client.descriptors import Watched, lift
from hoplite_mp._protocol.output import mark

__all__ = ["OutputRouting"]

STDOUT, STDERR = 1, 2


class OutputRouting:
    """The two output pipes of this process."""

    def __init__(self, host_id: int, output_owner: int) -> None:
        """output_owner: the one that the node assumes before the first mark."""
        self.host_id = host_id
        self.output_owner = output_owner
        self._marked = False
        self.pipes = [Watched(lift(os.dup(stream))) for stream in (STDOUT, STDERR)]

    def turn_to(self, output_owner: int) -> None:
        """Everything that is printed from now on is for that output owner. The first one is marked
        in any case, so that the node knows whom this worker has served."""
        if output_owner == self.output_owner and self._marked:
            return
        self._marked = True
        self.flush()
        self.output_owner = output_owner
        for pipe in self.pipes:
            if not pipe.there():
                continue  # a task has closed it, so there will be no lines
            with contextlib.suppress(OSError):
                # A process that a task has started may have made the pipe non-blocking; all
                # duplicates of a descriptor share that mode.
                os.set_blocking(pipe.fd, True)
                os.write(pipe.fd, mark(self.host_id, output_owner))

    def finish(self) -> None:
        """To be called when a task ends. A driver on another host must get the task's last lines
        before its result; a driver on this host gets them when this process ends, or sooner."""
        if self.output_owner:
            self.flush()

    def flush(self) -> None:
        """Flushes what has been printed."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # an object of the user's, or None
                stream.flush()
