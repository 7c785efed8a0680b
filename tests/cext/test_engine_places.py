"""Cells that are made before it is known where their bytes lie, and requests that outlive one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp import _engine
from hoplite_mp._engine import CLOSED, FILLED, FOLD_FAILED
from tests.cext.engines import Host, join

if TYPE_CHECKING:
    from collections.abc import Iterator

NBYTES = 100_000
KEY = (7, 1, 2, 3)
WHOLE = bytes(range(250)) * (NBYTES // 250)


@pytest.fixture
def engine() -> _engine.Engine:
    """Without a thread, so that nothing happens between two steps."""
    return _engine.Engine(1, threaded=False)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host, int]]:
    """Two of them, and the number of their link at the second one."""
    giver, taker = Host(1), Host(2)
    _, link = join(giver, taker)
    yield giver, taker, link
    giver.engine.stop()
    taker.engine.stop()


def told(engine: _engine.Engine) -> list[tuple[int, int]]:
    engine.step()
    return [event[:2] for event in engine.events()]


def test_who_asks_for_a_cell_waits_until_it_is_placed(hosts: tuple[Host, Host, int]) -> None:
    giver, taker, link = hosts
    into, other = bytearray(NBYTES), bytearray(10)
    source = giver.engine.cell(KEY, None, nbytes=NBYTES)
    cell = taker.engine.cell(None, into)
    taker.engine.pull(cell, link, KEY)
    # A second pull that has come shows that the request before it has come, too.
    giver.engine.cell((8, 0, 0, 0), b"0123456789", filled=True)
    beside = taker.engine.cell(None, other)
    taker.engine.pull(beside, link, (8, 0, 0, 0))
    taker.filled(beside)
    assert taker.engine.watermark(cell) == 0
    giver.engine.place(source, WHOLE)
    taker.filled(cell)
    assert into == WHOLE
    assert (FILLED, source) not in [event[:2] for event in giver.engine.events()]


def test_a_fold_waits_for_a_source_that_is_not_placed(engine: _engine.Engine) -> None:
    total = bytearray(16)
    ones, twos = (bytes([n, 0, 0, 0]) * 4 for n in (1, 2))
    first = engine.cell(None, None, nbytes=16)
    second = engine.cell(None, twos, filled=True)
    cell = engine.cell(None, total)
    engine.fold(cell, [first, second], "sum", "int32")
    assert told(engine) == []
    engine.place(first, b"...." + ones, 4)
    assert told(engine) == [(FILLED, cell)]
    assert total == bytes([3, 0, 0, 0]) * 4


def test_a_part_is_placed_and_the_rest_follows(engine: _engine.Engine) -> None:
    memory = bytearray(100)
    cell = engine.cell(None, None, nbytes=60)
    engine.place(cell, memory, 40, filled=20)
    assert told(engine) == []
    assert engine.watermark(cell) == 20
    engine.advance(cell, 60)
    assert told(engine) == [(FILLED, cell)]


def test_requests_outlive_a_cell(hosts: tuple[Host, Host, int]) -> None:
    """Half of it has gone over when it is closed; the rest comes from the next one."""
    giver, taker, link = hosts
    into = bytearray(NBYTES)
    first = giver.engine.cell(KEY, bytearray(WHOLE), filled=NBYTES // 2)
    cell = taker.engine.cell(None, into)
    taker.engine.pull(cell, link, KEY)
    taker.wait(lambda: taker.engine.watermark(cell) > 0)
    giver.engine.close(first, keep_requests=True)
    giver.wait_for(CLOSED, first)
    giver.engine.cell(KEY, WHOLE, filled=True)
    taker.filled(cell)
    assert into == WHOLE


def test_without_a_word_they_are_refused(hosts: tuple[Host, Host, int]) -> None:
    giver, taker, link = hosts
    first = giver.engine.cell(KEY, None, nbytes=NBYTES)
    cell = taker.engine.cell(None, bytearray(NBYTES))
    taker.engine.pull(cell, link, KEY)
    giver.engine.close(first)
    giver.engine.cell((8, 0, 0, 0), b"0123456789", filled=True)
    beside = taker.engine.cell(None, bytearray(10))
    taker.engine.pull(beside, link, (8, 0, 0, 0))
    taker.filled(beside)
    # Either the request came first and was refused, or it waits for the next cell.
    giver.engine.cell(KEY, WHOLE, filled=True)
    outcomes = (_engine.PULL_FAILED, cell), (FILLED, cell)
    taker.wait(lambda: any(event[:2] in outcomes for event in taker.told))


def test_a_fold_fails_with_its_unplaced_source(engine: _engine.Engine) -> None:
    source = engine.cell(None, None, nbytes=16)
    cell = engine.cell(None, bytearray(16))
    engine.fold(cell, [source], "sum", "int32")
    engine.close(source, keep_requests=True)
    assert told(engine) == [(FOLD_FAILED, cell), (CLOSED, source)]


def test_mistakes(engine: _engine.Engine) -> None:
    for arguments in ((None, 0, None, False), (None, 0, -1, False), (None, 0, 10, True)):
        with pytest.raises(ValueError, match="without a buffer"):
            engine.cell(None, *arguments)
    cell = engine.cell(None, None, nbytes=10)
    for ask in (
        lambda: engine.advance(cell, 1),
        lambda: engine.fold(cell, [engine.cell(None, bytearray(10))], "sum", "int8"),
    ):
        with pytest.raises(ValueError, match="not placed"):
            ask()
    with pytest.raises(ValueError, match="10 bytes from 1 on in a buffer of 10"):
        engine.place(cell, bytearray(10), 1)
    with pytest.raises(ValueError, match="filled must be"):
        engine.place(cell, bytearray(10), 0, 11)
    with pytest.raises(BufferError):
        engine.place(cell, b"0123456789", 0, 5)  # the rest could not be written
    engine.place(cell, bytearray(10), 0, False)
    with pytest.raises(ValueError, match="has a buffer"):
        engine.place(cell, bytearray(10))
    with pytest.raises(KeyError):
        engine.place(99, bytearray(10))
    assert told(engine) == []
