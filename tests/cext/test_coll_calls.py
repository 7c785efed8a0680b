"""Small calls of Groups: the compiled machine of several nodes, stepped in every order.

Each node is an engine without a thread and a board in a memory of its own; frames are carried by
the test, so they are late, lost and sent again as it likes. Beside the machine stands what Python
does on each node: it freezes, reports, decides what was not committed, and opens a new version.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoplite_mp import _serialize, _tasks
from hoplite_mp._common.reduction import DTYPES, OPS, has_kernel, reduce_arrays, result_dtype
from tests.support.engine_calls import (
    ALLGATHER,
    ALLREDUCE,
    BARRIER,
    BROADCAST,
    GATHER,
    GROUP,
    PART,
    REDUCE,
    SPLIT,
    TAKEN,
    EngineRun,
    EngineWorld,
    record_of,
)


@pytest.fixture
def world() -> Any:
    made: list[EngineWorld] = []

    def make(*about: Any) -> EngineWorld:
        made.append(EngineWorld(*about))
        return made[-1]

    yield make
    for one in made:
        one.close()


def pairs() -> list[tuple[str, str]]:
    """The operators and dtypes whose result has the dtype of the parts, and that have a kernel."""
    return [
        (op, name)
        for name in DTYPES
        if name != "bfloat16"
        for op in OPS
        if has_kernel(op, np.dtype(name).str)
        and result_dtype(op, np.dtype(name).str) == np.dtype(name).str
    ]


@pytest.mark.parametrize(("op", "name"), pairs())
def test_same_bits_as_python(world: Any, op: str, name: str) -> None:
    all_ = world(3)
    all_.open(1, 5)
    chance = np.random.default_rng(hash((op, name)) % 1000)
    parts = [(chance.normal(size=(3, 7)) * 100).astype(name) for _ in range(3)]
    for node, part in zip(all_.nodes, parts, strict=True):
        node.give(node.number, 5, ALLREDUCE, part, op)
    all_.carry_all()
    expected = np.empty_like(parts[0])
    reduce_arrays(op, parts, expected, 1)
    for node in all_.nodes:
        call, ranks, kind, *_, found = record_of(node)
        assert (call, ranks, kind, node.board.done()) == (5, 0b111, ALLREDUCE, 6)
        assert found == {0: _serialize.encode(expected).tobytes()}


@pytest.mark.parametrize("kind", [BROADCAST, GATHER, ALLGATHER, SPLIT, BARRIER])
def test_copies(world: Any, kind: int) -> None:
    all_ = world(3, [0, 1, 2, 1])
    all_.open(4, 0)
    values = [np.full(5, rank, np.float32) for rank in range(4)]
    for rank, at in enumerate(all_.places):
        gives = kind != BARRIER and (kind != BROADCAST or rank == 2)
        all_.nodes[at].give(rank, 0, kind, values[rank] if gives else None, root=2)
    all_.carry_all()
    sources = {BROADCAST: [2], BARRIER: []}.get(kind, [0, 1, 2, 3])
    for node in all_.nodes:
        _, ranks, _, _, _, root, found = record_of(node)
        assert (ranks, root) == (0b1111, 2)
        assert found == {s: _serialize.encode(values[s]).tobytes() for s in sources}


@pytest.mark.parametrize(
    "other",
    [
        {"array": np.zeros(3, np.float64)},
        {"array": np.zeros((1, 4), np.float64)},
        {"array": np.zeros(4, np.float32)},
        {"op": "max"},
        {"kind": REDUCE},
        {"kind": BARRIER, "array": None},
    ],
)
def test_what_differs_is_given_to_python_everywhere(world: Any, other: dict[str, Any]) -> None:
    all_ = world(3)
    all_.open(1, 0)
    usual = {"kind": ALLREDUCE, "array": np.zeros(4, np.float64)}
    for node in all_.nodes:
        about = usual if node.number != 1 else {**usual, **other}
        node.give(node.number, 0, **about)
    all_.carry_all()
    for node in all_.nodes:
        assert node.board.done() == 0
        assert [event[0] for event in node.told] == [TAKEN, PART]
        assert node.told[0][2:] == (0, b"")


def test_a_yield_reaches_all_and_later_parts_are_passed_on(world: Any) -> None:
    all_ = world(3)
    all_.open(1, 0)
    first, second, third = all_.nodes
    first.give(0, 0, BARRIER)
    second.engine.coll_yield(GROUP, 0)
    second.step()
    all_.carry_all()
    assert [event[0] for event in first.told] == [TAKEN, PART]
    assert [event[0] for event in second.told] == [TAKEN]
    assert [event[0] for event in third.told] == [TAKEN]
    third.give(2, 0, BARRIER)
    assert third.told[1][:3] == (PART, GROUP, 0)
    all_.open(1, 1)
    for node in all_.nodes:
        node.give(node.number, 1, BARRIER)
    all_.carry_all()
    assert [node.board.done() for node in all_.nodes] == [2, 2, 2]


def test_who_has_given_does_not_yield(world: Any) -> None:
    all_ = world(2)
    all_.open(1, 0)
    first, second = all_.nodes
    first.give(0, 0, BARRIER)
    first.engine.coll_yield(GROUP, 0)
    first.step()
    assert not first.told
    second.give(1, 0, BARRIER)
    all_.carry_all()
    assert [node.board.done() for node in all_.nodes] == [1, 1]
    assert not any(event[0] == TAKEN for node in all_.nodes for event in node.told)


def test_a_yield_of_a_later_call_waits_for_it(world: Any) -> None:
    all_ = world(2)
    all_.open(1, 0)
    first, second = all_.nodes
    first.give(0, 0, BARRIER)
    first.engine.coll_yield(GROUP, 1)
    first.step()
    second.give(1, 0, BARRIER)
    all_.carry_all()
    assert [node.board.done() for node in all_.nodes] == [1, 1]
    assert [event[2] for node in all_.nodes for event in node.told if event[0] == TAKEN] == [1, 1]


def test_part_given_before_the_engine_is_open_counts(world: Any) -> None:
    all_ = world(2)
    all_.nodes[0].give(0, 3, BARRIER)
    all_.open(1, 3)
    all_.nodes[1].give(1, 3, BARRIER)
    all_.carry_all()
    assert [node.board.done() for node in all_.nodes] == [4, 4]


def test_frames_of_an_earlier_version_do_not_count(world: Any) -> None:
    all_ = world(3)
    all_.open(1, 0)
    for node in all_.nodes:
        node.give(node.number, 0, BARRIER)
    old = [frame for node in all_.nodes for frame in node.out]
    for node in all_.nodes:
        node.out = []
        node.engine.coll_close(GROUP)
        node.step()
    all_.open(2, 1)  # Python has decided call 0
    for frame in old:
        all_.carry(frame)
    assert [node.board.done() for node in all_.nodes] == [0, 0, 0]
    for node in all_.nodes:
        node.give(node.number, 1, BARRIER)
    all_.carry_all()
    assert [node.board.done() for node in all_.nodes] == [2, 2, 2]


def test_the_last_commit_is_told_whole(world: Any) -> None:
    all_ = world(2)
    all_.open(1, 0)
    for node in all_.nodes:
        node.give(node.number, 0, ALLREDUCE, np.full(3, node.number + 1))
    all_.carry_all()
    first = all_.nodes[0]
    first.engine.coll_close(GROUP)
    first.step()
    *_, taken = first.told
    assert taken[:3] == (TAKEN, GROUP, 1)
    *_, found = _tasks.read_record(taken[3])
    np.testing.assert_array_equal(
        _serialize.decode(memoryview(found[0]), make_ref=lambda i: i), [3, 3, 3]
    )


@settings(max_examples=30, deadline=None)
@given(count=st.integers(2, 5), calls=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_any_order_with_freezes_and_deaths(count: int, calls: int, seed: int) -> None:
    played = EngineRun(count, calls, random.Random(seed))
    try:
        played.play()
    finally:
        played.world.close()
