"""A block that is freed while the simulated engine uses it fails the run, and no other one does."""

from __future__ import annotations

import pytest

from hoplite_mp._simulation.virtual.engine import CellMemory


def test_what_is_to_be_filled_is_used_until_it_is_full() -> None:
    memory = CellMemory()
    memory.make(1, 100, 200, served=False, whole=False)
    memory.free(200, 300)  # beside it
    memory.free(0, 100)
    with pytest.raises(AssertionError, match="memory of cell 1 is freed"):
        memory.free(150, 160)
    memory.filled(1)
    memory.free(150, 160)


def test_what_others_may_read_is_used_until_it_is_closed() -> None:
    memory = CellMemory()
    memory.make(1, 100, 200, served=True, whole=True)
    with pytest.raises(AssertionError, match="memory of cell 1 is freed"):
        memory.free(100, 200)
    memory.close(1, 100)
    memory.free(100, 200)


def test_what_a_fold_reads_is_used_while_it_runs() -> None:
    memory = CellMemory()
    memory.make(1, 100, 200, served=False, whole=False)
    memory.make(2, 200, 300, served=False, whole=True)
    memory.make(3, 300, 400, served=False, whole=False)
    memory.fold(3, [1, 2])
    memory.filled(1)
    for begin in (100, 200):
        with pytest.raises(AssertionError, match="is freed"):
            memory.free(begin, begin + 100)
    memory.close(1, 100)
    with pytest.raises(AssertionError, match="memory of cell 1 is freed"):
        memory.free(100, 200)
    memory.filled(3)
    memory.free(100, 300)


@pytest.mark.parametrize("end", ["fold_ended", "closed"])
def test_a_fold_that_ends_early_reads_nothing(end: str) -> None:
    memory = CellMemory()
    memory.make(1, 100, 200, served=False, whole=True)
    memory.make(2, 200, 300, served=False, whole=False)
    memory.fold(2, [1])
    getattr(memory, end)(2)
    memory.free(100, 200)


def test_what_was_freed_may_not_be_folded() -> None:
    memory = CellMemory()
    memory.make(1, 100, 200, served=False, whole=True)
    memory.make(2, 200, 300, served=False, whole=False)
    memory.free(100, 200)
    with pytest.raises(AssertionError, match="cell 1 is folded, but its memory is freed"):
        memory.fold(2, [1])


def test_what_was_closed_half_full_is_used_until_the_engine_says_so() -> None:
    memory = CellMemory()
    memory.make(1, 100, 200, served=True, whole=False)
    memory.close(1, 50)
    with pytest.raises(AssertionError, match="memory of cell 1 is freed"):
        memory.free(100, 200)
    memory.closed(1)
    memory.free(100, 200)
