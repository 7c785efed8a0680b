"""Which links a plan fills, against the bytes that its programs move."""

from __future__ import annotations

import pytest

from hoplite_mp._planner.program import filled_links, program_of
from hoplite_mp._planner.tree_shapes import cut
from hoplite_mp._protocol.fields import SHARES
from hoplite_mp._protocol.messages import Distribute, ExecuteReduce

NODES = (3, 4, 5, 6)


def fold(kind: str, destinations: tuple[int, ...], owners: tuple[int, ...]) -> ExecuteReduce:
    stripes = cut([(owner, 1.0) for owner in owners]) if owners else ()
    count = len(NODES)
    return ExecuteReduce(
        1, 1, tuple(range(count)), tuple(range(count)), stripes, "any", kind, "sum",
        NODES[0], (bytes(15) + b"1",) * count, NODES, destinations, nbytes=1 << 20,
        sizes=() if stripes else (1 << 20,) * count,
    )  # fmt: skip


PLANS = {
    "broadcast": Distribute(
        1, bytes(16), 1, 1 << 20, (3,), (4, 5, 6), cut([(4, 1), (5, 1), (6, 1)]), "stripes"
    ),
    "reduce": fold("reduce", (3,), (4, 5, 6)),
    "allreduce": fold("allreduce", NODES, NODES),
    "gather": fold("gather", (3,), ()),
    "allgather": fold("allgather", NODES, ()),
}


@pytest.mark.parametrize("kind", PLANS)
def test_filled_links_carry_as_many_bytes_as_the_busiest(kind: str) -> None:
    plan = PLANS[kind]
    up = dict.fromkeys(NODES, 0)
    down = dict.fromkeys(NODES, 0)
    for node in NODES:
        for pull in program_of(plan, node).pulls:
            share = pull.end_share - pull.begin_share
            up[pull.parent] += share
            down[node] += share
    busiest = max(*up.values(), *down.values())
    assert busiest >= SHARES
    for node in NODES:
        filled = filled_links(plan, node)
        assert filled == (up[node] > 0.95 * busiest, down[node] > 0.95 * busiest), node
