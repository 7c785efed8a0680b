"""A worker's sys.stdin, sys.stdout and sys.stderr, and the driver that receives the output.

sys.stdin is empty, and a debugger that reads it gets an error with advice. sys.stdout and
sys.stderr count each write in shared memory.

A driver checks the count before it returns a result, so that it first prints the task's lines.
Tasks without output have no overhead. Only writes to these two objects are counted, not writes to
the descriptors by compiled code or other processes.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any

from hoplite_mp._client.descriptors import Watched, lift
from hoplite_mp._protocol.output import mark

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["OutputRouting", "note_prints", "without_stdin"]


DEBUGGERS = ("bdb", "pdb", "IPython.core.debugger", "pdbpp", "ipdb.__main__")
NO_STDIN = (
    "a task has no stdin, so {name} cannot read commands; run the program with "
    "hoplite_mp.Cluster(debug=True), which runs the tasks of submit and map in the calling process "
    "(actors, spmd and executors keep their processes)"
)


class _NoStdin(io.TextIOWrapper):
    """An empty stream. If a debugger reads from it, the task gets a RuntimeError."""

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            name = frame.f_globals.get("__name__")
            if name in DEBUGGERS:
                _forget_debugger()
                raise RuntimeError(NO_STDIN.format(name=name))
            frame = frame.f_back
        return super().readline(size)


def _forget_debugger() -> None:
    """Makes `pdb.set_trace` use a new instance. Since Python 3.14, it reuses its last instance,
    which no longer traces after an error."""
    pdb: Any = sys.modules.get("pdb")
    if hasattr(pdb, "Pdb"):
        pdb.Pdb._last_pdb_instance = None


def without_stdin() -> None:
    """Replaces sys.stdin, whose descriptor is /dev/null."""
    raw = io.FileIO(0, closefd=False)
    sys.stdin = sys.__stdin__ = _NoStdin(io.BufferedReader(raw))  # type: ignore[misc]


class _Noting(io.FileIO):
    """A stream for a descriptor that calls `note` after each write."""

    def __init__(self, fd: int, note: Callable[[], None]) -> None:
        super().__init__(fd, "w", closefd=False)
        self._note = note

    def write(self, data: Any) -> int:
        written = super().write(data)
        self._note()  # last, so that the line is in the pipe when the count increases
        return written


def note_prints(note: Callable[[], None]) -> None:
    """Replaces sys.stdout and sys.stderr with line-buffered streams that call `note`."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old: Any = getattr(sys, name)
        raw = _Noting(fd, note)
        buffered = raw if isinstance(old.buffer, io.RawIOBase) else io.BufferedWriter(raw)
        made = io.TextIOWrapper(
            buffered,
            old.encoding,
            old.errors,
            line_buffering=True,
            write_through=old.write_through,
        )
        made.mode = "w"  # type: ignore[misc]  # like the interpreter's own streams
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)


# Marks in stdout and stderr name the driver to which this worker's output belongs.
#
# The node reads output later, when another task may be running. So the worker writes a mark into
# both pipes when the driver changes. It writes to duplicates of descriptors 1 and 2, because a task
# may redirect the originals.


STDOUT, STDERR = 1, 2


class OutputRouting:
    """This process's two output pipes."""

    def __init__(self, host_id: int, output_owner: int) -> None:
        """output_owner: the output owner that the node assumes before the first mark."""
        self.host_id = host_id
        self.output_owner = output_owner
        self._marked = False
        self.pipes = [Watched(lift(os.dup(stream))) for stream in (STDOUT, STDERR)]

    def turn_to(self, output_owner: int) -> None:
        """Sets the output owner for all later output. The first owner is always marked, so that the
        node knows the output owner of this worker's tasks."""
        if output_owner == self.output_owner and self._marked:
            return
        self._marked = True
        self.flush()
        self.output_owner = output_owner
        for pipe in self.pipes:
            if not pipe.there():
                continue  # a task has closed the pipe, so no more lines follow
            with contextlib.suppress(OSError):
                # A process started by a task may have made the pipe non-blocking: all duplicates of
                # a descriptor share this mode.
                os.set_blocking(pipe.fd, True)
                os.write(pipe.fd, mark(self.host_id, output_owner))

    def finish(self) -> None:
        """Flushes output at the end of a task. A driver on another host must get the task's last
        lines before the task's result. A driver on this host gets them when this process exits, or
        sooner."""
        if self.output_owner:
            self.flush()

    def flush(self) -> None:
        """Flushes sys.stdout and sys.stderr."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the stream may be a user's object, or None
                stream.flush()
