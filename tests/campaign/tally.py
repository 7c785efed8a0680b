"""What has been done to a cluster so far, counted in a file that all its programs can read.

A driver may forgive an error only if a fault explains it, so it must know of the fault before the
error can arrive. Each fault is counted twice, as it begins and when it is done; one that may have
hit a call is one that was done after the call had begun, or may just be done.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["KINDS", "Mark", "Tally"]

KINDS = ("worker", "manager", "stop", "driver", "host")
Mark = tuple[int, ...]


class Tally:
    """The counts; only the process that makes faults writes them."""

    def __init__(self, path: Path | str, make: bool = False) -> None:
        shape = (2, len(KINDS))
        self._counts = np.memmap(path, np.int64, "w+" if make else "r", shape=shape)

    def begin(self, kind: str) -> None:
        """From now on one of that kind may be felt."""
        self._counts[0, KINDS.index(kind)] += 1

    def end(self, kind: str) -> None:
        """Nobody who begins a call now will feel it."""
        self._counts[1, KINDS.index(kind)] += 1

    @contextlib.contextmanager
    def fault(self, kind: str) -> Iterator[None]:
        """While one of that kind is made."""
        self.begin(kind)
        try:
            yield
        finally:
            self.end(kind)

    def mark(self) -> Mark:
        """What was over and done with by now."""
        return tuple(int(count) for count in self._counts[1])

    def since(self, mark: Mark, kind: str) -> int:
        """How many of that kind may have happened since then."""
        at = KINDS.index(kind)
        return int(self._counts[0, at]) - mark[at]

    def begun(self, kind: str) -> int:
        """How many of that kind there have been at all."""
        return int(self._counts[0, KINDS.index(kind)])

    def counts(self) -> dict[str, int]:
        return dict(zip(KINDS, self.mark(), strict=True))
