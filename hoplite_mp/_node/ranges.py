"""Sets of byte ranges: which bytes of a block have arrived or been written.

A block that a process is still writing, and a copy whose transfer was planned anew, are filled in
pieces that come in any order. Bytes that are there are not transferred again.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

__all__ = ["Ranges"]

# How many gaps of one stripe are filled one by one. Higher: more requests to a parent. Lower: more
# bytes behind the last gap are sent again although they are there.
GAPS_MAX = 8


@dataclass(slots=True)
class Ranges:
    """A set of bytes. Invariant: the ranges [begin, end) are sorted and do not touch."""

    found: list[tuple[int, int]] = field(default_factory=list)

    def add(self, begin: int, end: int) -> None:
        """Adds the bytes [begin, end)."""
        if begin >= end:
            return
        first = bisect.bisect_left(self.found, (begin, 0))
        if first and self.found[first - 1][1] >= begin:
            first -= 1
            begin = self.found[first][0]
        last = first
        while last < len(self.found) and self.found[last][0] <= end:
            end = max(end, self.found[last][1])
            last += 1
        self.found[first:last] = [(begin, end)]

    def reach(self, begin: int, end: int) -> int:
        """How many bytes are there without a gap from `begin` on, up to `end`."""
        place = bisect.bisect_right(self.found, begin, key=lambda one: one[0]) - 1
        if place < 0 or self.found[place][1] <= begin:
            return 0
        return min(self.found[place][1], end) - begin

    def gaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The missing parts of [begin, end): at most GAPS_MAX ranges, of which the last one may
        contain bytes that are there."""
        missing: list[tuple[int, int]] = []
        while begin < end:
            begin += self.reach(begin, end)
            if begin == end:
                break
            place = bisect.bisect_right(self.found, begin, key=lambda one: one[0])
            upto = end
            if place < len(self.found) and len(missing) + 1 < GAPS_MAX:
                upto = min(end, self.found[place][0])
            missing.append((begin, upto))
            begin = upto
        return missing

    def copy(self) -> Ranges:
        """An independent copy."""
        return Ranges(list(self.found))
