"""Which cells a node makes for its part of a fold."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from hoplite_mp import _serialize
from hoplite_mp._common import ids
from hoplite_mp._node.execution.folding import Folding
from hoplite_mp._node.execution.plan_state import PlanState
from hoplite_mp._node.objects.remote_objects import payload_layout
from hoplite_mp._planner.program import program_of
from hoplite_mp._planner.tree_shapes import halves
from hoplite_mp._protocol import messages as m

MEMBERS = 3
SLICES = 5


def array(rows: int) -> bytearray:
    """The payload of an array of ones."""
    dtype = np.dtype(np.float64)
    head, offset, nbytes = _serialize.encode_array_head(dtype, (rows,), "C", ())
    payload = bytearray(nbytes)
    payload[: len(head)] = head
    payload[offset:] = np.ones(rows).tobytes()
    return payload


@pytest.mark.parametrize("rows", [2, 5, 7])
def test_slices_without_elements_fold_no_members(rows: int) -> None:
    """Node 0 has all members, and node 1 all slices; there may be more slices than rows."""
    payload = memoryview(array(rows))
    indices = tuple(range(MEMBERS))
    stripes = tuple(m.Stripe(1, begin, end) for begin, end in halves(SLICES))
    plan = m.ExecuteReduce(
        9, 1, indices, indices, stripes, "any", "reduce_scatter", "sum", 0,
        (ids.pack_id(1000, 7),) * MEMBERS, (0,) * MEMBERS, (1,) * SLICES,
        (ids.pack_id(1000, 8),) * SLICES, 8 * rows, payload_layout(payload),
    )  # fmt: skip
    events: Any = mock.Mock()
    execution = PlanState(plan, program_of(plan, 0), events, 0)
    execution.views = dict.fromkeys(indices, payload)
    cells: Any = mock.Mock()
    cells.own.side_effect = range(100, 200)
    cells.make.side_effect = range(200, 300)
    results: Any = mock.Mock()
    results.client.number = 0
    results.config.small_object_bytes_max = 1 << 20
    Folding(results, execution, plan, cells).begin()
    filled = min(rows, SLICES)
    assert cells.own.call_count == MEMBERS * filled
    assert cells.make.call_count == SLICES  # each slice is served, also the empty ones
    assert [call.args[1:3] for call in cells.fold.call_args_list] == [
        (200 + index, [100 + MEMBERS * index + member for member in indices])
        for index in range(filled)
    ]
