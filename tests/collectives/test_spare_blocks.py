"""When a member asks for the block of its next part in advance, and what becomes of that."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp._common.arena import Arena
from hoplite_mp._group.multi_host import PREALLOCATED_BYTES_MAX, MultiHost
from hoplite_mp._node.objects.leases import Leases
from hoplite_mp._node.store.budget import HEAD, Store
from hoplite_mp.errors import HopliteError

NBYTES = 1 << 20


class Memory:
    """Counts what is asked for; the node answers with numbers."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.spares: list[int] = []
        self.answer: Any = "spare"

    def allocate(self, nbytes: int) -> Any:
        self.allocated.append(nbytes)
        return "block"

    def preallocate(self, nbytes: int) -> Any:
        self.spares.append(nbytes)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def member(memory: Memory) -> MultiHost:
    made = object.__new__(MultiHost)
    made._memory = memory  # type: ignore[assignment]
    made._preallocated, made._given = (0, None), 0
    return made


def call(member: MultiHost, nbytes: int) -> Any:
    """One part of one block: what it lies in."""
    block = member._block(nbytes)
    member._next_block([(7, nbytes, nbytes)])
    return block


def test_next_block_after_two_parts_of_one_size_is_asked_for(
    member: MultiHost, memory: Memory
) -> None:
    assert call(member, NBYTES) == "block"
    assert memory.spares == []
    assert call(member, NBYTES) == "block"
    assert memory.spares == [NBYTES]
    for _ in range(3):
        assert call(member, NBYTES) == "spare"
    assert memory.allocated == [NBYTES] * 2
    assert memory.spares == [NBYTES] * 4


def test_block_of_another_size_lets_the_spare_go(member: MultiHost, memory: Memory) -> None:
    for _ in range(2):
        call(member, NBYTES)
    assert call(member, NBYTES + 8) == "block"
    assert member._preallocated == (NBYTES + 8, None)
    assert memory.spares == [NBYTES]


def test_next_block_after_large_or_several_parts_is_not_asked_for(
    member: MultiHost, memory: Memory
) -> None:
    for _ in range(3):
        call(member, PREALLOCATED_BYTES_MAX + 1)
    for _ in range(3):
        for _ in range(2):
            member._block(NBYTES)
        member._next_block([(7, NBYTES, NBYTES), (8, NBYTES, NBYTES)])
        member._next_block([b"small"])
        member._next_block([])
    assert memory.spares == []


def test_next_block_of_a_node_that_is_gone_raises_no_error(
    member: MultiHost, memory: Memory
) -> None:
    call(member, NBYTES)
    memory.answer = HopliteError("the node is gone")
    assert call(member, NBYTES) == "block"
    assert memory.spares == [NBYTES]
    memory.answer = None  # others need the room
    assert call(member, NBYTES) == "block"
    assert call(member, NBYTES) == "block"


class Late(Exception):
    """What a signal handler raises."""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Late()])
def test_next_block_that_is_interrupted_raises_and_is_not_there(
    member: MultiHost, memory: Memory, error: BaseException
) -> None:
    """What is raised ends the membership, so no call goes on without a spare."""
    call(member, NBYTES)
    memory.answer = error
    with pytest.raises(type(error)):
        call(member, NBYTES)
    assert memory.spares == [NBYTES]
    assert member._preallocated == (NBYTES, None)


def test_spares_leave_the_store_to_others() -> None:
    with hoplite_mp.Cluster(workers=1, memory="64MiB") as c:
        memory = c._runtime.memory
        spares = [memory.preallocate(1 << 20) for _ in range(3)]
        assert None not in spares
        assert memory.preallocate(1 << 20) is None  # together they would be more than a part
        assert memory.preallocate(1 << 40) is None
        array = c.put(np.zeros(36 << 20, np.uint8))
        assert c.get(array).nbytes == 36 << 20
        spares.clear()
        memory.collect()
        assert memory.preallocate(1 << 20) is None  # half of the store is full
        del array
        memory.collect()
        assert memory.preallocate(3 << 20) is not None


def test_a_spare_whose_pages_are_in_memory_reads_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much memory the host has left stands in four files, which took longer to read than all
    the rest of the request: a sixth of what a node does for a call of 1 MiB."""
    arena = Arena(1 << 30)
    arena.free(arena.allocate((1 << 20) + HEAD) or 0)
    store: Any = mock.Mock(limit=1 << 30, leases={}, arena=arena)
    store.has_spare = functools.partial(Store.has_spare, store)
    store.used_bytes.return_value = 0
    store.fits.side_effect = AssertionError
    leases = object.__new__(Leases)
    leases.store, leases.preallocated_blocks = store, {}
    assert leases._preallocated(1 << 20, 7) is store.lease.return_value
    store.fits.side_effect, store.fits.return_value = None, False
    assert leases._preallocated(2 << 20, 7) is None  # cold
