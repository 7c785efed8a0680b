"""Blocks that are sent while they are written: ranges, cells, and when they are free."""

from __future__ import annotations

from typing import Any

import pytest

from hoplite_mp._node.store.growing_block import GrowingBlocks

SLOT = 7


class FakeStore:
    def __init__(self) -> None:
        self.leases = {1000: SLOT}

    def size_of(self, payload: int) -> int:
        return 100


class FakeClient:
    host_id = 5

    def __init__(self) -> None:
        self.given_back: list[int] = []

    def give_back(self, payload: int) -> None:
        self.given_back.append(payload)


class FakeEngine:
    def __init__(self) -> None:
        self.marks: dict[int, int] = {}

    def advance(self, cell: int, watermark: int) -> None:
        if cell == 99:
            raise KeyError(cell)  # closed meanwhile
        self.marks[cell] = max(watermark, self.marks.get(cell, 0))


@pytest.fixture
def blocks() -> Any:
    return GrowingBlocks(FakeStore(), FakeClient(), FakeEngine())  # type: ignore[arg-type]


def test_cells_advance_with_written_ranges(blocks: Any) -> None:
    block = blocks.take(SLOT, 1000, 80, 10)
    block.cells = {1: (0, 40), 2: (40, 40), 99: (0, 80)}
    blocks.write(SLOT, 1000, [(10, 20), (40, 50)])
    assert blocks.engine.marks == {1: 20, 2: 10}
    blocks.write(SLOT, 1000, [(18, 45)])
    assert blocks.engine.marks == {1: 40, 2: 10}
    heard = []
    blocks.when_whole([block], lambda: heard.append(1))
    assert not heard
    blocks.write(SLOT, 1000, [(50, 80)])
    assert heard == [1]


def test_block_is_freed_after_its_last_user(blocks: Any) -> None:
    block = blocks.take(SLOT, 1000, 80, 80)
    block.users = 1
    blocks.let_go(block)
    assert not blocks.client.given_back
    blocks.leave(block)
    assert blocks.client.given_back == [1000]
    assert blocks.get(blocks.name(1000)) is None


def test_block_is_not_freed_while_it_is_written(blocks: Any) -> None:
    block = blocks.take(SLOT, 1000, 80, 10)
    blocks.let_go(block)
    assert not blocks.client.given_back
    blocks.lose(SLOT)  # its writer has died
    assert blocks.client.given_back == [1000]


def test_process_without_the_lease_cannot_lend_or_write(blocks: Any) -> None:
    for slot, payload, nbytes, written in ((8, 1000, 80, 10), (SLOT, 2000, 80, 10)):
        with pytest.raises(ValueError, match="not leased to this member"):
            blocks.take(slot, payload, nbytes, written)
    for nbytes, written in ((101, 10), (80, 81), (80, 0)):
        with pytest.raises(ValueError, match="bytes"):
            blocks.take(SLOT, 1000, nbytes, written)
    block = blocks.take(SLOT, 1000, 80, 10)
    blocks.write(8, 1000, [(10, 80)])
    blocks.write(SLOT, 1000, [(-5, 20), (30, 20), (60, 81)])
    assert block.written.found == [(0, 10)]
