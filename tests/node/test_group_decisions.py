"""Plans of large calls of a Group: who gets the result, and who folds."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hoplite_mp import _serialize
from hoplite_mp._node.groups.group_decisions import UndecidedCall, decide
from hoplite_mp._node.objects.remote_objects import payload_layout
from hoplite_mp._planner.link_speeds import HostRates
from hoplite_mp._protocol import codec
from hoplite_mp._protocol.group_calls import PIECE_BYTES_MAX, GroupCommit, GroupPart, Piece
from hoplite_mp._serialize.contributions import REDUCTIONS
from tests.support.node_group_calls import group_part, striped_members

SIZE = 4


@pytest.mark.parametrize("root", range(SIZE))
@pytest.mark.parametrize("rates", [{}, {node: HostRates(1e9, 1e9) for node in range(SIZE)}])
def test_other_nodes_fold_for_the_root(root: int, rates: dict[int, HostRates]) -> None:
    """Its link is the one that is full."""
    given = {
        rank: msgspec.structs.replace(group_part(rank, kind="reduce"), root=root)
        for rank in range(SIZE)
    }
    outcome = decide(UndecidedCall(striped_members(SIZE), 0, 5, list(range(SIZE)), given, rates))
    assert not outcome.error
    (plan,) = outcome.plans
    assert plan.destinations == (root,)  # type: ignore[union-attr]
    assert {stripe.owner for stripe in plan.stripes} == {*range(SIZE)} - {root}
    assert outcome.waits


@pytest.mark.parametrize("dtype", ["?", "u1", "i2"])
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_result_may_be_larger_than_the_parts(kind: str, dtype: str) -> None:
    """The mean of bytes: the largest parts that travel inside messages."""
    count = (PIECE_BYTES_MAX - 100) // np.dtype(dtype).itemsize
    arrays = [np.full(count, rank, dtype) for rank in range(SIZE)]
    given = {}
    for rank, array in enumerate(arrays):
        payload = _serialize.encode(array).tobytes()
        assert len(payload) <= PIECE_BYTES_MAX
        piece = Piece(rank, -1, len(payload), payload, layout=payload_layout(memoryview(payload)))
        given[rank] = GroupPart(7, 3, 0, (rank,), kind, "mean", 0, (piece,))
    group = striped_members(SIZE)
    outcome = decide(UndecidedCall(group, 0, 5, list(range(SIZE)), given, {}))
    assert not outcome.error
    commit = outcome.commit(group, 0, 0, 0)
    (arrived,) = codec.Decoder(GroupCommit).feed(codec.encode(commit))
    found = _serialize.decode(memoryview(arrived.pieces[0].payload), make_ref=lambda _: None)  # type: ignore[arg-type,return-value]
    assert np.array_equal(found, np.mean(arrays, axis=0))
    assert found.dtype == np.float64
