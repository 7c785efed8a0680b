"""Memory that knows what is in it, to the byte.

Why it exists: what a simulated block brings is told here in ranges instead of bytes. A range has a
content and a shift: its byte at x is byte x + shift of that content, so a block that was written to
the wrong place shows as much as one that holds the wrong thing.
It must never know: who writes, what contents mean.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp.simulation.contents import Content

__all__ = ["Memory", "Range"]


class Range(NamedTuple):
    """Bytes [begin, end) of a memory."""

    begin: int
    end: int
    content: Content
    shift: int


class Memory:
    """`nbytes` that are unknown until they are written."""

    __slots__ = ("nbytes", "rows")

    def __init__(self, nbytes: int, content: Content | None = None) -> None:
        """content: of which it is full from the start."""
        self.nbytes = nbytes
        self.rows: list[Range] = []  # in order, apart from each other
        if content is not None and nbytes:
            self.rows.append(Range(0, nbytes, content, 0))

    def write(self, begin: int, end: int, content: Content, shift: int) -> None:
        """Over whatever was there."""
        assert 0 <= begin <= end <= self.nbytes, (begin, end, self.nbytes)
        if begin == end:
            return
        rows = self.rows
        if not rows or rows[-1].end <= begin:
            last = rows[-1] if rows else None
            if last and last.end == begin and last.content is content and last.shift == shift:
                rows[-1] = Range(last.begin, end, content, shift)
            else:
                rows.append(Range(begin, end, content, shift))
            return
        first = max(0, bisect_right(rows, begin, key=_begin_of) - 1)
        new: list[Range] = []
        at = first
        while at < len(rows) and rows[at].begin < end:
            row = rows[at]
            if row.begin < begin:
                new.append(row._replace(end=min(row.end, begin)))
            if row.end > end:
                new.append(row._replace(begin=end))
            at += 1
        mine = Range(begin, end, content, shift)
        place = sum(row.begin < begin for row in new)
        rows[first:at] = [*new[:place], mine, *new[place:]]

    def read(self, begin: int, end: int) -> Iterator[Range]:
        """What is in those bytes, in order; ranges that nobody has written are left out."""
        rows = self.rows
        at = max(0, bisect_right(rows, begin, key=_begin_of) - 1)
        while begin < end and at < len(rows) and rows[at].begin < end:
            row = rows[at]
            if row.end > begin:
                yield Range(max(begin, row.begin), min(end, row.end), row.content, row.shift)
            at += 1


def _begin_of(row: Range) -> int:
    return row.begin
