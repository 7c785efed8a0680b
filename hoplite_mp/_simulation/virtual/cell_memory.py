"""Which memory a simulated engine still uses, so that a block which is freed too early is noticed.

The engine reads and writes memory that its node owns, and a block that is freed meanwhile may be
somebody else's at the next moment. In production such bytes are only spoiled now and then; here
each block that is freed is compared with all cells.

    open:    until it is FILLED the engine writes it, or may do so at the next pull
             as long as it has a key, other hosts may read it
             as long as a fold is filled from it, the engine reads it
    closed:  as before until CLOSED was taken, except that what other hosts still read of a whole
             cell counts no more: their plan is over, so they discard it
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CellMemory"]


@dataclass(slots=True)
class _Cell:
    """The addresses of one cell, and what the engine may still do with them."""

    begin: int
    end: int
    served: bool  # other hosts may read it
    whole: bool  # nothing is written into it any more
    folds: set[int] = field(default_factory=set)  # cells that are being filled from it
    freed: bool = False

    @property
    def is_used(self) -> bool:
        return not self.whole or self.served or bool(self.folds)


class CellMemory:
    """The memory of all cells of one engine."""

    def __init__(self) -> None:
        self._cells: dict[int, _Cell] = {}
        self._sources: dict[int, Sequence[int]] = {}  # cell -> cells from which a fold fills it

    def make(self, cell: int, begin: int, end: int, *, served: bool, whole: bool) -> None:
        """A cell was made over these addresses, or placed there. served: it has a key. whole: all
        is there."""
        folds = {filled for filled, sources in self._sources.items() if cell in sources}
        self._cells[cell] = _Cell(begin, end, served, whole, folds)

    def fold(self, cell: int, sources: Sequence[int]) -> None:
        """The cell is filled from these. AssertionError if the memory of one of them is freed."""
        self._sources[cell] = sources
        for source in sources:
            memory = self._cells.get(source)
            if memory is not None:
                if memory.freed:
                    raise AssertionError(f"cell {source} is folded, but its memory is freed")
                memory.folds.add(cell)

    def fold_is_over(self, cell: int) -> None:
        """The fold that filled the cell, if there was one, reads nothing any more."""
        for source in self._sources.pop(cell, ()):
            memory = self._cells.get(source)
            if memory is not None:
                memory.folds.discard(cell)

    def filled(self, cell: int) -> None:
        """The engine has said that the cell is FILLED."""
        self.fold_is_over(cell)
        if cell in self._cells:
            self._cells[cell].whole = True

    def close(self, cell: int, watermark: int) -> None:
        """The node has closed the cell, of which so many bytes are there."""
        memory = self._cells.get(cell)
        if memory is not None and watermark == memory.end - memory.begin:
            memory.whole, memory.served = True, False

    def closed(self, cell: int) -> None:
        """The engine has said that the cell is CLOSED."""
        self.fold_is_over(cell)
        self._cells.pop(cell, None)

    def free(self, begin: int, end: int) -> None:
        """These addresses are freed. AssertionError if the engine still uses any of them."""
        for cell, memory in self._cells.items():
            if begin < memory.end and memory.begin < end:
                if memory.is_used:
                    raise AssertionError(f"memory of cell {cell} is freed")
                memory.freed = True
