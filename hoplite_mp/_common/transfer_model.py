"""A model of the rule that the compiled engine follows when it moves bulk bytes.

Code that plans or simulates transfers must follow the engine's rule: *a block moves when the
watermarks of its inputs have passed it*. `cext/engine_*.c` applies the rule to bytes; here cells
are only numbers. `tests/cext/test_engine_rule.py` compares random programs in both.

    cell    bytes [0, watermark) are valid and final
    pull    copies each block of another cell when the block is complete; a shorter cell receives
            only the beginning
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
"""Smaller blocks are inefficient, because a frame takes a few microseconds, however short it is."""
BLOCKS_WANTED = 8
"""The preferred number of blocks in a cell, so that all hosts in a chain work simultaneously."""
FOLD_BYTES_MAX = 256 * 1024
"""Maximum number of bytes in a step of a fold. No socket is polled during a step."""


def block_bytes_for(nbytes: int, block_bytes_max: int) -> int:
    """The block size for a cell of `nbytes`: a multiple of 64, from 16 KiB to `block_bytes_max`."""
    lines = -(-(nbytes // BLOCKS_WANTED) // LINE_BYTES)
    return min(block_bytes_max, max(BLOCK_BYTES_LEAST, lines * LINE_BYTES))


def goal(nbytes: int, watermark: int, block_bytes: int) -> int:
    """The end of the block that contains byte `watermark`. The last block ends with the cell."""
    return min(nbytes, (watermark // block_bytes + 1) * block_bytes)


def serve_goal(nbytes: int, watermark: int, block_bytes: int, end: int) -> int:
    """Like `goal`, but for a reader of the cell's bytes up to `end`."""
    return min(end, goal(nbytes, watermark, block_bytes))


def fold_goal(nbytes: int, watermark: int, block_bytes: int) -> int:
    """The end of the fold step that begins at `watermark`."""
    return goal(nbytes, watermark, min(block_bytes, FOLD_BYTES_MAX))


@dataclasses.dataclass
class _Cell:
    nbytes: int
    watermark: int
    block_bytes: int
    source: Hashable = None
    """The cell that this cell pulls from, or None."""
    sources: tuple[tuple[Hashable, int], ...] = ()
    """The cells that this cell folds, each with the size of its elements in bytes."""
    item_bytes: int = 1


class TransferModel:
    """Named cells, their pulls and folds, and the resulting steps."""

    def __init__(self) -> None:
        self._cells: dict[Hashable, _Cell] = {}

    def cell(
        self, name: Hashable, nbytes: int, filled: int = 0, block_bytes_max: int = 256 * 1024
    ) -> None:
        """Adds a cell. block_bytes_max: the limit in the cell's engine."""
        if name in self._cells:
            raise ValueError(f"cell {name!r} already exists")
        if not 0 <= filled <= nbytes:
            raise ValueError(f"filled must be from 0 to {nbytes} bytes, not {filled}")
        self._cells[name] = _Cell(nbytes, filled, block_bytes_for(nbytes, block_bytes_max))

    def pull(self, name: Hashable, source: Hashable) -> None:
        """Fills a cell from another cell, which need not exist yet. Replaces an earlier pull."""
        cell = self._cells[name]
        if cell.sources:
            raise ValueError(f"cell {name!r} is filled by a fold")
        cell.source = source

    def fold(
        self, name: Hashable, sources: Sequence[tuple[Hashable, int]], item_bytes: int
    ) -> None:
        """Fills a cell, whose elements have `item_bytes`, with the fold of `sources`, in order.
        sources: (cell, size of its elements in bytes)."""
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
        """The origin of the cell's bytes: a cell's name or, for a fold, the tuple of its sources'
        origins."""
        cell = self._cells[name]
        if cell.source is not None:
            return self.contributors(cell.source)
        if cell.sources:
            return tuple(self.contributors(source) for source, _ in cell.sources)
        return name

    def advance(self) -> list[tuple[Hashable, int]]:
        """Makes a simultaneous step in every cell that can advance. Returns (cell, watermark) for
        each."""
        steps = [(name, self._next(cell)) for name, cell in self._cells.items()]
        made = [(name, end) for name, end in steps if end > self._cells[name].watermark]
        for name, end in made:
            self._cells[name].watermark = end
        return made

    def run(self) -> list[tuple[Hashable, int]]:
        """Makes steps until no cell can advance, and returns all steps."""
        trace: list[tuple[Hashable, int]] = []
        while steps := self.advance():
            trace += steps
        return trace

    def _next(self, cell: _Cell) -> int:
        """The watermark after the cell's next step; unchanged if the cell cannot advance."""
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
