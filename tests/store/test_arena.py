"""The arena against a naive picture of the same ranges, over arbitrary sequences of calls."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hoplite_mp._common.arena import PAGE, Arena

SIZES = st.one_of(st.integers(1, 40 * PAGE), st.sampled_from([PAGE, 2 * PAGE, 16 * PAGE]))
ALIGNS = st.sampled_from([PAGE, PAGE, 4 * PAGE, 16 * PAGE])


def _aligned(page: int, to: int) -> int:
    return (page + to - 1) // to * to


def pages(nbytes: int) -> int:
    return (nbytes + PAGE - 1) // PAGE


class Walk(RuleBasedStateMachine):
    """`owner` has one entry for each page: "taken", "warm" or "cold"; new ground has none."""

    @initialize(length=st.integers(20, 400), start=st.sampled_from([0, PAGE]))
    def begin(self, length: int, start: int) -> None:
        self.arena = Arena(length * PAGE, start)
        self.first = start // PAGE
        self.pages: dict[int, str] = {}
        self.taken: dict[int, int] = {}  # start -> bytes asked for
        self.least = 0  # warm pages, since the last time that unneeded ones were given back

    @rule(nbytes=SIZES, align=ALIGNS)
    def allocate(self, nbytes: int, align: int) -> None:
        resident, predicted = self.arena.resident, self.arena.growth(nbytes, align)
        start = self.arena.allocate(nbytes, align)
        if start is None:
            assert not self.fits(pages(nbytes), align)
            assert self.arena.resident == resident
            return
        assert start % align == 0
        assert start + nbytes <= self.arena.length
        mine = range(start // PAGE, start // PAGE + pages(nbytes))
        found = {self.pages.get(page, "new") for page in mine}
        assert "taken" not in found, "it overlaps a range that is handed out"
        mixed = len(found) > 1 and "warm" in found  # a last resort; `growth` then says too much
        grown = self.arena.resident - resident
        assert grown < predicted if mixed else grown == predicted
        assert (predicted == 0) == (found == {"warm"})
        self.taken[start] = nbytes
        for page in mine:
            self.pages[page] = "taken"

    def fits(self, count: int, align: int) -> bool:
        """Whether some aligned place is free, by looking at every page below the length."""
        last = self.arena.length // PAGE
        return any(
            all(self.pages.get(page) != "taken" for page in range(at, at + count))
            for at in range(_aligned(self.first, align // PAGE), last - count + 1, align // PAGE)
        )

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), warm=st.booleans())
    def free(self, data: st.DataObject, warm: bool) -> None:
        start = data.draw(st.sampled_from(sorted(self.taken)))
        count = pages(self.taken.pop(start))
        assert self.arena.size_of(start) == count * PAGE
        self.arena.free(start, warm)
        for page in range(start // PAGE, start // PAGE + count):
            self.pages[page] = "warm" if warm else "cold"

    @rule(nbytes=st.integers(0, 200 * PAGE))
    def cool(self, nbytes: int) -> None:
        before = self.arena.warm
        ranges = self.arena.cool(nbytes)
        assert sum(size for _, size in ranges) >= min(nbytes, before)
        for start, size in ranges:
            for page in range(start // PAGE, (start + size) // PAGE):
                assert self.pages[page] == "warm"
                self.pages[page] = "cold"

    @rule()
    def cool_unneeded(self) -> None:
        ranges = self.arena.cool_unneeded()
        assert sum(size for _, size in ranges) == self.least * PAGE
        for start, size in ranges:
            for page in range(start // PAGE, (start + size) // PAGE):
                assert self.pages[page] == "warm"
                self.pages[page] = "cold"
        self.least = list(self.pages.values()).count("warm")

    @rule(nbytes=SIZES, align=ALIGNS)
    def look(self, nbytes: int, align: int) -> None:
        """A question changes nothing that a later answer depends on."""
        before = sorted(self.arena._free.items())
        assert self.arena.growth(nbytes, align) in (0, pages(nbytes) * PAGE)
        assert sorted(self.arena._free.items()) == before

    @invariant()
    def counts(self) -> None:
        kinds = list(self.pages.values())
        assert self.arena.used == kinds.count("taken") * PAGE
        assert self.arena.warm == kinds.count("warm") * PAGE
        self.least = min(self.least, kinds.count("warm"))
        assert self.arena.resident == self.arena.used + self.arena.warm

    @invariant()
    def coalesced(self) -> None:
        """Free neighbours of one temperature are one range."""
        free = sorted((start, size, warm) for start, (size, warm) in self.arena._free.items())
        for (a, size, warm), (b, _, next_warm) in itertools.pairwise(free):
            assert a + size < b or (a + size == b and warm != next_warm)


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@given(st.lists(SIZES, min_size=1, max_size=20))
def test_everything_freed_is_one_range_again(sizes: list[int]) -> None:
    arena = Arena(1 << 40, 0)
    starts = [arena.allocate(size) for size in sizes]
    total = arena.used
    for start in starts:
        assert start is not None
        arena.free(start)
    assert arena.used == 0
    assert arena.warm == total
    assert arena.growth(total) == 0
    assert arena.allocate(total) == 0


def test_the_latest_warm_range_of_a_size_comes_first() -> None:
    arena = Arena(1 << 30, 0)
    starts = [arena.allocate(PAGE) for _ in range(9)]
    for index in (1, 5, 3):
        arena.free(starts[index] or 0)
    assert [arena.allocate(PAGE) for _ in range(3)] == [starts[3], starts[5], starts[1]]


def test_warm_pages_are_preferred_to_cold_ones() -> None:
    arena = Arena(1 << 30, 0)
    cold, _, warm, _ = (arena.allocate(4 * PAGE) for _ in range(4))
    arena.free(warm or 0)
    arena.free(cold or 0, warm=False)
    assert arena.growth(4 * PAGE) == 0
    assert arena.allocate(4 * PAGE) == warm
    assert arena.growth(4 * PAGE) == 4 * PAGE
    assert arena.allocate(4 * PAGE) == cold


def test_warm_and_cold_neighbours_are_one_place_when_nothing_else_fits() -> None:
    arena = Arena(13 * PAGE, 0)
    warm, cold, last = (arena.allocate(4 * PAGE) for _ in range(3))
    arena.free(warm or 0)
    arena.free(cold or 0, warm=False)
    assert arena.allocate(6 * PAGE) == warm
    assert arena.resident == 10 * PAGE
    arena.free(last or 0)
    assert arena.allocate(7 * PAGE) == 6 * PAGE  # cold, warm and new ground together
    assert arena.allocate(PAGE) is None


def test_what_it_remembers_stays_bounded() -> None:
    """The same block over and over, and blocks of ever new sizes."""
    arena = Arena(1 << 40)
    for size in range(3000):
        for nbytes in (PAGE, (size % 700) * PAGE + 1):
            start = arena.allocate(nbytes)
            _ = arena.allocate(PAGE) if size % 3 == 0 else None  # keeps neighbours apart
            assert start is not None
            arena.free(start)
    remembered = sum(len(starts) for starts in arena._recent.values())
    assert remembered <= 2 * len(arena._free) + 256


def test_pages_that_each_wave_needs_stay_warm() -> None:
    arena = Arena(1 << 30, 0)
    once = arena.allocate(16 * PAGE) or 0  # not used again
    between = arena.allocate(PAGE)  # keeps what is freed apart
    assert between is not None
    arena.free(once)
    given: list[list[tuple[int, int]]] = []
    for _ in range(4):  # waves of 2, 5 and 2 pages
        starts = [arena.allocate(n * PAGE) or 0 for n in (2, 5, 2)]
        for start in starts:
            arena.free(start)
        given.append(arena.cool_unneeded())
    assert given[0] == []  # the first look knows of no time before
    assert sum(size for _, size in given[1]) == 7 * PAGE
    assert given[2:] == [[], []], "each wave begins with the pages of the one before"
    assert arena.warm == 9 * PAGE
    given = [arena.cool_unneeded()]
    assert arena.warm == 0, "nobody has needed any since"


def test_what_was_freed_the_longest_ago_is_given_back_first() -> None:
    arena = Arena(1 << 30, 0)
    large, _, small, _ = (arena.allocate(n * PAGE) or 0 for n in (8, 1, 4, 1))
    arena.free(small)
    arena.free(large)
    arena.cool_unneeded()
    arena.free(arena.allocate(8 * PAGE) or 0)
    assert arena.cool_unneeded() == [(small, 4 * PAGE)]
    assert arena.growth(8 * PAGE) == 0


def test_of_a_range_that_is_needed_in_part_the_beginning_stays() -> None:
    arena = Arena(1 << 30, 0)
    start = arena.allocate(64 * PAGE) or 0
    arena.free(start)
    arena.cool_unneeded()
    for _ in range(3):
        arena.free(arena.allocate(4 * PAGE) or 0)
    assert arena.cool_unneeded() == [(start + 4 * PAGE, 60 * PAGE)]
    assert arena.growth(4 * PAGE) == 0
