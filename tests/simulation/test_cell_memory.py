"""A block that is freed while the simulated engine uses it fails the run, and no other one does."""

from __future__ import annotations

import pytest

from hoplite_mp._simulation.virtual.engine import CellMemory


def test_cell_memory_of_a_filling_cell_is_used_until_full() -> None:
    memory = CellMemory()
    memory.make(1, 100, 200, served=False, whole=False)
    memory.free(200, 300)  # beside it
    memory.free(0, 100)
    with pytest.raises(AssertionError, match="memory of cell 1 is freed"):
        memory.free(150, 160)
    memory.filled(1)
    memory.free(150, 160)


def test_cell_memory_of_a_served_cell_is_used_until_closed() -> None:
    memory = CellMemory()
    memory.make(1, 100, 200, served=True, whole=True)
    with pytest.raises(AssertionError, match="memory of cell 1 is freed"):
        memory.free(100, 200)
    memory.close(1, 100)
    memory.free(100, 200)


def test_cell_memory_of_a_folds_source_is_used_during_the_fold() -> None:
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
def test_cell_memory_after_a_failed_fold_is_unused(end: str) -> None:
    memory = CellMemory()
    memory.make(1, 100, 200, served=False, whole=True)
    memory.make(2, 200, 300, served=False, whole=False)
    memory.fold(2, [1])
    getattr(memory, end)(2)
    memory.free(100, 200)


def test_cell_memory_freed_before_a_fold_raises() -> None:
    memory = CellMemory()
    memory.make(1, 100, 200, served=False, whole=True)
    memory.make(2, 200, 300, served=False, whole=False)
    memory.free(100, 200)
    with pytest.raises(AssertionError, match="cell 1 is folded, but its memory is freed"):
        memory.fold(2, [1])


def test_cell_memory_closed_half_full_is_used_until_closed_event() -> None:
    memory = CellMemory()
    memory.make(1, 100, 200, served=True, whole=False)
    memory.close(1, 50)
    with pytest.raises(AssertionError, match="memory of cell 1 is freed"):
        memory.free(100, 200)
    memory.closed(1)
    memory.free(100, 200)
