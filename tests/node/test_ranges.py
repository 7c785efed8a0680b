"""Sets of bytes, against a plain set of numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hoplite_mp._node.store import growing_block
from hoplite_mp._node.store.growing_block import Ranges

SIZE = 50
ADDED = st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(0, SIZE)), max_size=30)


@given(ADDED, st.integers(0, SIZE), st.integers(0, SIZE))
def test_ranges_match_a_set_of_bytes(added: list[tuple[int, int]], begin: int, end: int) -> None:
    mine = Ranges()
    there: set[int] = set()
    for first, last in added:
        mine.add(first, last)
        there.update(range(first, last))
    assert mine.found == sorted(mine.found)
    assert {byte for one in mine.found for byte in range(*one)} == there
    touching = zip(mine.found, mine.found[1:], strict=False)
    assert all(one[1] < other[0] for one, other in touching)
    if begin < end:
        reached = begin
        while reached in there and reached < end:
            reached += 1
        assert mine.reach(begin, end) == reached - begin
    gaps = mine.gaps(begin, end)
    missing = {byte for gap in gaps for byte in range(*gap)}
    assert missing >= set(range(begin, end)) - there
    assert len(gaps) <= growing_block.GAPS_MAX
    if len(gaps) < growing_block.GAPS_MAX:
        assert missing == set(range(begin, end)) - there
    assert all(first < last and first not in there for first, last in gaps)


def test_gaps_beyond_the_maximum_are_merged() -> None:
    mine = Ranges()
    for byte in range(0, 100, 2):
        mine.add(byte, byte + 1)
    gaps = mine.gaps(0, 100)
    assert gaps[:2] == [(1, 2), (3, 4)]
    assert gaps[-1] == (2 * growing_block.GAPS_MAX - 1, 100)


def test_copy_of_ranges_is_independent() -> None:
    mine = Ranges()
    mine.add(0, 5)
    other = mine.copy()
    other.add(5, 9)
    assert mine.gaps(0, 9) == [(5, 9)]
    assert not other.gaps(0, 9)
