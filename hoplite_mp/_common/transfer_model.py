"""A model of the rule by which the compiled engine moves bulk bytes.

Code that plans or simulates transfers must follow the engine's rule: *a block moves when the
watermarks of its inputs have passed it*. `cext/engine_*.c` applies it to bytes; here cells are
numbers. `tests/cext/test_engine_rule.py` compares random programs in both.

    cell    bytes [0, watermark) are valid and final
    pull    copies the next block of another cell once it is complete; a shorter cell gets only the
            beginning
    fold    computes the next block of its cell once all sources have reached its end

The size of a cell determines the ends of its blocks (`block_bytes_for`, `goal`), so the possible
watermarks of a cell do not depend on timing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = ["TransferModel", "block_bytes_for", "fold_goal", "goal", "serve_goal"]

LINE_BYTES = 64
BLOCK_BYTES_LEAST = 16 * 1024
"""A frame takes some microseconds, regardless of its length."""
BLOCKS_WANTED = 8
"""In a cell, so that all hosts of a chain work simultaneously."""
FOLD_BYTES_MAX = 256 * 1024
"""Bytes of a step of a fold, during which no socket is polled."""


def block_bytes_for(nbytes: int, block_bytes_max: int) -> int:
    """The block of a cell of `nbytes`: a multiple of 64, from 16 KiB to `block_bytes_max`."""
    lines = -(-(nbytes // BLOCKS_WANTED) // LINE_BYTES)
    return min(block_bytes_max, max(BLOCK_BYTES_LEAST, lines * LINE_BYTES))


def goal(nbytes: int, watermark: int, block_bytes: int) -> int:
    """The end of the block that holds byte `watermark`; the last block ends with the cell."""
    return min(nbytes, (watermark // block_bytes + 1) * block_bytes)


def serve_goal(nbytes: int, watermark: int, block_bytes: int, end: int) -> int:
    """Like `goal`, for a reader of the cell's bytes up to `end`."""
    return min(end, goal(nbytes, watermark, block_bytes))


def fold_goal(nbytes: int, watermark: int, block_bytes: int) -> int:
    """The end of the step of a fold that begins at `watermark`."""
    return goal(nbytes, watermark, min(block_bytes, FOLD_BYTES_MAX))


@dataclasses.dataclass
class _Cell:
    nbytes: int
    watermark: int
    block_bytes: int
    source: Hashable = None
    """The cell from which it pulls, or None."""
    sources: tuple[tuple[Hashable, int], ...] = ()
    """The cells that it folds, and the bytes of an element of each."""
    item_bytes: int = 1


class TransferModel:
    """Named cells, their pulls and folds, and the resulting steps."""

    def __init__(self) -> None:
        self._cells: dict[Hashable, _Cell] = {}

    def cell(
        self, name: Hashable, nbytes: int, filled: int = 0, block_bytes_max: int = 256 * 1024
    ) -> None:
        """Adds a cell; `block_bytes_max` is that of its engine."""
        if name in self._cells:
            raise ValueError(f"cell {name!r} exists already")
        if not 0 <= filled <= nbytes:
            raise ValueError(f"filled must be from 0 to {nbytes} bytes, not {filled}")
        self._cells[name] = _Cell(nbytes, filled, block_bytes_for(nbytes, block_bytes_max))

    def pull(self, name: Hashable, source: Hashable) -> None:
        """Fills a cell from another, which need not exist yet. Replaces an earlier pull."""
        cell = self._cells[name]
        if cell.sources:
            raise ValueError(f"cell {name!r} is filled by a fold")
        cell.source = source

    def fold(
        self, name: Hashable, sources: Sequence[tuple[Hashable, int]], item_bytes: int
    ) -> None:
        """Fills a cell with elements of `item_bytes` from `sources`: (cell, bytes of its elements),
        in order."""
        cell = self._cells[name]
        if cell.source is not None or cell.sources:
            raise ValueError(f"cell {name!r} is already filled by a pull or fold")
        for source, source_item_bytes in sources:
            if self._cells[source].nbytes * item_bytes != cell.nbytes * source_item_bytes:
                raise ValueError(f"cells {source!r} and {name!r} have different numbers of items")
        cell.sources = tuple(sources)
        cell.item_bytes = item_bytes

    def watermark(self, name: Hashable) -> int:
        """The number of bytes of the cell that are valid."""
        return self._cells[name].watermark

    def contributors(self, name: Hashable) -> object:
        """The origin of the cell's bytes: a name, or for a fold the tuple of its sources'
        origins."""
        cell = self._cells[name]
        if cell.source is not None:
            return self.contributors(cell.source)
        if cell.sources:
            return tuple(self.contributors(source) for source, _ in cell.sources)
        return name

    def advance(self) -> list[tuple[Hashable, int]]:
        """Makes one simultaneous step of every cell that can; returns (cell, watermark) of
        each."""
        steps = [(name, self._next(cell)) for name, cell in self._cells.items()]
        made = [(name, end) for name, end in steps if end > self._cells[name].watermark]
        for name, end in made:
            self._cells[name].watermark = end
        return made

    def run(self) -> list[tuple[Hashable, int]]:
        """Makes and returns all steps, until no cell can advance."""
        trace: list[tuple[Hashable, int]] = []
        while steps := self.advance():
            trace += steps
        return trace

    def _next(self, cell: _Cell) -> int:
        """The watermark after the cell's next step; unchanged if it cannot make one."""
        if cell.watermark == cell.nbytes:
            return cell.watermark
        if cell.source is not None and (source := self._cells.get(cell.source)) is not None:
            end = serve_goal(source.nbytes, cell.watermark, source.block_bytes, cell.nbytes)
            return end if source.watermark >= end else cell.watermark
        if cell.sources:
            end = fold_goal(cell.nbytes, cell.watermark, cell.block_bytes)
            items = end // cell.item_bytes
            if all(self._cells[name].watermark // size >= items for name, size in cell.sources):
                return end
        return cell.watermark
