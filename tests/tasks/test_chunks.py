"""Chunks of a map: every item once and in order, and larger ones only while they are done at once.

Without workers: what sends them is a list here, and the clock is turned by hand.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoplite_mp._client import chunks
from hoplite_mp._client.chunks import Chunks, Items, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Sent:
    """Stands for a Future."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        self.done = ended


class Clock:
    """Seconds, as `hoplite_mp._common.clock` gives them."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def fixture_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(chunks, "clock", clock)
    return clock


def sizes(clock: Clock, count: int, seconds: Callable[[int, int], float]) -> list[int]:
    """Of the chunks of so many items, which are sent every millisecond. seconds: how long after it
    was sent a chunk is done, from its place and its size."""
    found: list[int] = []

    def send(column: list[int]) -> Any:
        end = clock.now + seconds(len(found), len(column))
        found.append(len(column))
        clock.now += 0.001
        return Sent(lambda: clock.now >= end)

    sent = list(Chunks(Items([range(count)], True), send, 10, 80))
    assert [size for _, size in sent] == found
    assert sum(found) == count
    return found


def test_they_grow_while_they_are_done_at_once(clock: Clock) -> None:
    assert sizes(clock, 310, lambda place, size: 0) == [10, 20, 40, 80, 80, 80]


def test_they_stay_small_while_items_take_time(clock: Clock) -> None:
    assert sizes(clock, 300, lambda place, size: 1) == [10] * 30


def test_one_that_was_late_ends_nothing(clock: Clock) -> None:
    """A pause of the machine: after it, a chunk that is done at once counts again."""
    found = sizes(clock, 400, lambda place, size: 0.02 if place == 0 else 0)
    late = [10] * 6  # until the first one has been waited for
    assert found[: len(late) + 3] == [*late, 10, 20, 40]


def test_larger_ones_may_show_that_they_are_too_large(clock: Clock) -> None:
    found = sizes(clock, 1000, lambda place, size: size / 10_000)
    assert max(found) == 80
    found = sizes(clock, 1000, lambda place, size: size / 4_000)
    assert max(found) == 40


columns = st.lists(st.lists(st.integers(), max_size=30), max_size=4)


@given(columns, st.integers(1, 12), st.booleans(), st.sampled_from([list, tuple, iter]))
def test_rows_are_those_of_zip(
    given_columns: list[list[int]], size: int, at_once: bool, kind: Callable[[Any], Iterable[int]]
) -> None:
    wanted = list(zip(*given_columns, strict=False))
    items = Items([kind(column) for column in given_columns], at_once)
    assert items.count == (len(wanted) if at_once else None)
    found: list[tuple[int, ...]] = []
    while taken := items.take(size):
        assert {len(column) for column in taken} <= set(range(1, size + 1))
        found += rows_of(taken)
    assert found == wanted
    assert list(Items([kind(column) for column in given_columns], at_once).rows()) == wanted


def test_what_has_no_end_is_read_beside_the_shortest() -> None:
    items = Items([range(3), itertools.count(5)], True)
    assert items.count == 3
    assert items.take(9) == [[0, 1, 2], [5, 6, 7]]
    later = Items([itertools.count()], False)
    assert later.take(2) == [[0, 1]]
    assert next(later.rows()) == (2,)
