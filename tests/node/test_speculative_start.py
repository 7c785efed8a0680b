"""Which calls of a Group begin before all have called, and who owns what then."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hoplite_mp import serial
from hoplite_mp.node.groups.group_decisions import NO_OBJECT
from hoplite_mp.node.groups.speculative_start import (
    BYTES_MIN,
    decide_speculatively,
    fill_in,
    fits,
    lacks,
    wait_s,
)
from hoplite_mp.node.objects.layouts import payload_layout
from hoplite_mp.planner.forest import cut
from hoplite_mp.planner.topology import Host
from hoplite_mp.protocol.group_calls import GroupGo, GroupPart, Piece
from hoplite_mp.protocol.messages import GroupMembers

COUNT = BYTES_MIN // 4


def members(size: int) -> GroupMembers:
    nodes = tuple(range(size))
    stripes = cut((node, 1.0) for node in nodes)
    return GroupMembers("g", 1, 0, size, (1 << size) - 1, 0, True, 1, nodes, stripes)


def part(rank: int, count: int = COUNT, kind: str = "allreduce", op: str = "sum") -> GroupPart:
    encoded = serial.encode(np.zeros(count, np.float32))
    layout = payload_layout(memoryview(encoded.tobytes()))
    name = bytes([rank + 1] * 16)
    pieces = (Piece(rank, -1, encoded.nbytes, None, name, layout),)
    return GroupPart(1, 1, 0, (rank,), kind, op, 0, pieces)


def speculative(size: int, there: list[int], **like: str):
    given = {rank: part(rank, **like) for rank in there}
    return decide_speculatively(members(size), 0, 5, list(range(size)), given, {})


def test_the_early_ones_own_all() -> None:
    found = speculative(4, [0, 1, 3])
    assert found is not None
    outcome, missing = found
    assert missing == {2}
    (plan,) = outcome.plans
    assert {stripe.owner for stripe in plan.stripes} == {0, 1, 3}
    assert plan.objects[2] == NO_OBJECT
    assert outcome.waits == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("size", "there"), [(4, [0, 1]), (2, [0]), (3, [1]), (8, [0, 1, 2, 3, 4]), (4, [0, 1, 2, 3])]
)
def test_not_with_too_few_nor_with_all(size: int, there: list[int]) -> None:
    assert speculative(size, there) is None


def test_eight_begin_with_six() -> None:
    assert speculative(8, [0, 1, 2, 4, 6, 7]) is not None


def test_only_large_allreduces_wait() -> None:
    assert speculative(4, [0, 1, 2], kind="barrier") is None
    assert wait_s(part(0, kind="reduce"), {}) is None
    assert wait_s(part(0, count=100), {}) is None
    slow, fast = (wait_s(part(0), {0: Host(rate, rate)}) for rate in (1e7, 1e9))
    assert slow is not None
    assert fast is not None
    assert slow > 50 * fast > 0


def test_what_was_taken_for_granted() -> None:
    found = speculative(4, [0, 1, 3])
    assert found is not None
    (plan,) = found[0].plans
    assert fits(part(2), plan)
    for other in (part(2, COUNT + 1), part(2, op="max"), part(2, kind="reduce")):
        assert not fits(other, plan)
        assert fill_in(GroupGo(1, 0, 5, (plan,)), other) is None
    assert not fits(msgspec.structs.replace(part(2), mistake="no", pieces=()), plan)
    go = GroupGo(1, 0, 5, (plan,))
    assert lacks(go, {2})
    assert not lacks(go, {0, 1, 3})
    filled = fill_in(go, part(2))
    assert filled is not None
    assert not lacks(filled, {0, 1, 2, 3})
    assert filled.plans[0].objects == tuple(bytes([rank + 1] * 16) for rank in range(4))
