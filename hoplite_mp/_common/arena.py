"""Allocates ranges for large blocks and spans in the store's address space.

The store is a sparse file with plenty of address space, but limited memory. The arena prefers
*warm* ranges, whose pages are still in memory, in LIFO order. It counts resident bytes, and warm
bytes that recent allocations have not needed. It only computes, and does not access the memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["Arena"]

PAGE = 4096
REMEMBERED_MIN = 256


class Arena:
    """Allocates, in this order of preference: the most recently freed warm range with exactly that
    size, the best fit among warm ranges, the best fit among cold ranges, unused address space, and
    several adjacent free ranges."""

    def __init__(self, length: int, start: int = PAGE) -> None:
        self.length = length
        self.used = 0  # allocated bytes
        self.warm = 0  # free bytes whose pages are still in memory
        self._end = start  # start of the unused space
        self._free: dict[int, tuple[int, bool]] = {}  # start -> (size, warm)
        self._ends: dict[int, int] = {}  # end -> start
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        self._recent: dict[int, list[int]] = {}  # size -> starts of warm ranges, latest last
        self._remembered = 0  # number of entries in `_recent`
        self._taken: dict[int, int] = {}  # start -> size
        self._unneeded = 0  # minimum of `warm` since the last `cool_unneeded`
        self._frees = 0
        self._freed: dict[int, int] = {}  # start of a free range -> number of its last free

    @property
    def resident(self) -> int:
        """The number of bytes that may be in memory because they are allocated, or free and
        warm."""
        return self.used + self.warm

    def size_of(self, start: int) -> int:
        """The size of an allocated range."""
        return self._taken[start]

    def growth(self, nbytes: int, align: int = PAGE) -> int:
        """The maximum growth of `resident` by such an allocation; 0 if a warm range fits."""
        size = _round(nbytes, PAGE)
        found = self._find(size, align)
        return 0 if found is not None and self._free[found[0]][1] else size

    def allocate(self, nbytes: int, align: int = PAGE) -> int | None:
        """The start of a range; None if the address space is exhausted."""
        size = _round(nbytes, PAGE)
        found = self._find(size, align)
        if found is None:
            start = _round(self._end, align)
            if start + size > self.length:
                return self._allocate_across(size, align)
            if start > self._end:
                gap = self._end
                self._taken[gap] = start - gap
                self.used += start - gap
                self.free(gap, warm=False)
            self._end = start + size
        else:
            free, start = found
            freed = self._freed[free]
            whole, warm = self._remove(free)
            if start > free:
                self._add(free, start - free, warm, freed)
            if free + whole > start + size:
                self._add(start + size, free + whole - start - size, warm, freed)
            recent = self._recent.get(size)
            if recent and recent[-1] == start:
                recent.pop()
                self._remembered -= 1
        self._taken[start] = size
        self.used += size
        self._unneeded = min(self._unneeded, self.warm)
        return start

    def free(self, start: int, warm: bool = True) -> None:
        """Frees a range. Adjacent free ranges are merged if both are warm or both are cold."""
        size = self._taken.pop(start)
        self.used -= size
        exact = size
        end = start + size
        if end in self._free and self._free[end][1] == warm:
            size += self._remove(end)[0]
        before = self._ends.get(start)
        if before is not None and self._free[before][1] == warm:
            size += self._remove(before)[0]
            start = before
        self._frees += 1
        self._add(start, size, warm, self._frees)
        if warm and size == exact:
            self._remember(start, size)

    def cool(self, nbytes: int) -> list[tuple[int, int]]:
        """Makes at least `nbytes` warm bytes cold, in the largest ranges first. Returns these
        ranges, whose pages the caller must return to the system."""
        found: list[tuple[int, int]] = []
        total = 0
        for size, start in reversed(list(self._by_size)):
            if total >= nbytes:
                break
            if start in self._free and self._free[start][1]:
                found.append((start, size))
                total += size
        for start, size in found:
            self._turn_cold(start, size)
        self._unneeded = min(self._unneeded, self.warm)
        return found

    def cool_unneeded(self) -> list[tuple[int, int]]:
        """Makes the warm bytes cold that no allocation has needed since the last call. Returns
        these ranges, whose pages the caller must return to the system. Begins with the ranges that
        were freed first. If only a part of the last range is unneeded, its end is made cold,
        because allocations use its beginning."""
        left, found = self._unneeded, []
        for start in sorted(self._freed, key=self._freed.__getitem__):
            size, warm = self._free[start]
            if warm and left:
                taken = min(size, left)
                found.append((start + size - taken, taken))
                left -= taken
        for start, size in found:
            self._turn_cold(start, size)
        self._unneeded = self.warm
        return found

    def _turn_cold(self, start: int, size: int) -> None:
        """Makes the end of a warm free range cold."""
        free = self._ends[start + size]
        freed = self._freed[free]
        whole, _ = self._remove(free)
        if start > free:
            self._add(free, whole - size, True, freed)
        self._taken[start] = size
        self.used += size
        self.free(start, warm=False)

    def _allocate_across(self, size: int, align: int) -> int | None:
        """Allocates across adjacent free ranges, both warm and cold."""
        self._use_up()
        run: list[tuple[int, int, bool]] = []
        for free in sorted(self._free):
            whole, warm = self._free[free]
            if run and run[-1][0] + run[-1][1] != free:
                run.clear()
            run.append((free, whole, warm))
            start = _round(run[0][0], align)
            if start + size <= free + whole:
                break
        else:
            return None
        for free, whole, warm in run:
            freed = self._freed[free]
            self._remove(free)
            if free < start:
                self._add(free, min(whole, start - free), warm, freed)
            if free + whole > start + size:
                rest = max(free, start + size)
                self._add(rest, free + whole - rest, warm, freed)
        self._taken[start] = size
        self.used += size
        self._unneeded = min(self._unneeded, self.warm)
        return start

    def _use_up(self) -> None:
        """Turns the unused space into a cold free range."""
        unused = self.length // PAGE * PAGE - self._end
        if unused > 0:
            start = self._end
            self._end += unused
            self._taken[start] = unused
            self.used += unused
            self.free(start, warm=False)

    def _remember(self, start: int, size: int) -> None:
        self._recent.setdefault(size, []).append(start)
        self._remembered += 1
        if self._remembered > 2 * len(self._free) + REMEMBERED_MIN:  # most entries are stale
            self._recent = {}
            self._remembered = 0

    def _find(self, size: int, align: int) -> tuple[int, int] | None:
        """(start of a free range, start of `size` bytes in it). Allocates nothing."""
        recent = self._recent.get(size)
        while recent:
            start = recent[-1]
            if self._free.get(start) == (size, True) and start % align == 0:
                return start, start
            recent.pop()
            self._remembered -= 1
        for cold in (False, True):
            at = bisect_left(self._by_size, (size, 0))
            for whole, start in self._by_size[at:]:
                if self._free[start][1] == cold:
                    continue
                inside = _round(start, align)
                if inside + size <= start + whole:
                    return start, inside
        return None

    def _add(self, start: int, size: int, warm: bool, freed: int) -> None:
        self._free[start] = (size, warm)
        self._freed[start] = freed
        self._ends[start + size] = start
        insort(self._by_size, (size, start))
        if warm:
            self.warm += size

    def _remove(self, start: int) -> tuple[int, bool]:
        size, warm = self._free.pop(start)
        del self._freed[start]
        del self._ends[start + size]
        self._by_size.pop(bisect_left(self._by_size, (size, start)))
        if warm:
            self.warm -= size
        return size, warm


def _round(number: int, to: int) -> int:
    return (number + to - 1) // to * to
