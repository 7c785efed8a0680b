"""The user's side of a trace: a `with` block that leaves a file.

The nodes record what happens; this module begins and ends the recording, reads the records and
writes the timeline. A wrong path is found before the recording begins, and the timeline's file
appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hoplite_mp._common import clock
from hoplite_mp._protocol.local import TraceBegin, TraceDrop, TraceEnd, TracePiece
from hoplite_mp._version import __version__
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._client.runtime import Runtime

__all__ = ["Trace"]

TRACE_BITS = 63  # of the random number that identifies a trace
_log = logging.getLogger("hoplite_mp")


class Trace:
    """One trace, which can be entered once."""

    def __init__(self, runtime: Runtime, path: str | os.PathLike[str]) -> None:
        """OSError if no file can be created at `path`, which is tested by creating one beside
        it."""
        runtime.memory.check()
        self._runtime = runtime
        self.path = Path(os.path.abspath(path))
        self._trace = 0
        self.cluster: Any = None  # kept alive as long as this object
        self._begin_ns = 0
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self.path))
        try:
            with self._beside() as (_, made):
                made.unlink()
        except OSError as error:  # report the file that the user has named
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    @contextlib.contextmanager
    def _beside(self) -> Iterator[tuple[TextIO, Path]]:
        """A new file in the same directory, deleted at the end unless it was renamed."""
        begin = os.fsdecode(os.fsencode(self.path.name)[:100])  # names are limited in bytes
        made = self.path.with_name(f".{begin}.{os.urandom(4).hex()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(made, flags, 0o666), "w", encoding="utf-8") as file:
            try:
                yield file, made
            finally:
                made.unlink(missing_ok=True)

    def __enter__(self) -> Trace:
        if self._trace:
            raise RuntimeError("this trace has been entered before: ask for another one")
        self._trace = int(os.urandom(8).hex(), 16) >> (64 - TRACE_BITS) | 1
        self._begin_ns = clock.monotonic_ns()
        try:
            refusal = self._runtime.channel.call(TraceBegin(self._trace)).value
        except BaseException:  # Ctrl-C, for example: the trace may have begun
            self._drop()
            raise
        if refusal:
            raise RuntimeError(refusal)
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        try:
            self._finish()
        except Exception as error:
            if kind is None or not isinstance(error, (OSError, HopliteError)):
                raise
            # The exception of the block takes precedence.
            _log.error("%s could not be written: %s", self.path, error)
        finally:
            self._drop()

    def _drop(self) -> None:
        """Makes the nodes discard the trace."""
        with contextlib.suppress(HopliteError):
            self._runtime.channel.call(TraceDrop(self._trace))

    def _finish(self) -> None:
        from hoplite_mp._client.trace_file import (
            TraceText,  # imports json, which only a trace needs
        )

        self._runtime.memory.check()
        found = self._runtime.channel.call(TraceEnd(self._trace)).value
        end_ns = clock.monotonic_ns()
        if found is None:
            raise RuntimeError("this trace has ended before: nothing is left to write")
        nodes, lost, left = found
        text = TraceText(self._begin_ns, end_ns)
        with self._beside() as (file, made):
            file.write(text.head())
            for node, nbytes, clocks in nodes:
                data = self._read(node, nbytes)
                if data is None:
                    lost.append(node)
                    continue
                file.writelines(text.node(node, data, [tuple(clock) for clock in clocks]))
            file.write(text.tail(sorted(lost), left, __version__))
            file.flush()
            os.replace(made, self.path)

    def _read(self, node: int, nbytes: int) -> bytes | None:
        """A node's document; None if that node is lost."""
        data = bytearray()
        while len(data) < nbytes:
            ask = TracePiece(self._trace, node, len(data))
            piece = self._runtime.channel.call(ask).value
            if not piece:
                return None
            data += piece
        return bytes(data)
