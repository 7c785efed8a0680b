"""Which bytes of a block are there: ranges, with gaps between.

Why it exists: a block that a process writes, and a copy whose transfer has been planned anew, are
filled in pieces that come in any order. What is there is neither written nor sent a second time.
It must never know: memory, who fills the block, what the bytes mean.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

__all__ = ["Ranges"]

# Gaps in one stripe that are filled one by one. Higher: more requests to a parent; lower: what lies
# behind the last one is sent although it is there.
GAPS_MAX = 8


@dataclass(slots=True)
class Ranges:
    """A set of bytes. Ranges are [begin, end), in order, and do not touch each other."""

    found: list[tuple[int, int]] = field(default_factory=list)

    def add(self, begin: int, end: int) -> None:
        """These bytes are there."""
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
        """How many bytes are there from `begin` on, up to `end`."""
        place = bisect.bisect_right(self.found, begin, key=lambda one: one[0]) - 1
        if place < 0 or self.found[place][1] <= begin:
            return 0
        return min(self.found[place][1], end) - begin

    def gaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """What is missing of [begin, end): at most GAPS_MAX ranges, of which the last one may hold
        bytes that are there."""
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
        """Another one with the same bytes."""
        return Ranges(list(self.found))
