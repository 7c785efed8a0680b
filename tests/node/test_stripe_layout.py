"""Which cells of a fold have the same bytes, so that one memory does for both."""

from __future__ import annotations

import pytest

from hoplite_mp._common.reduction import result_dtype
from hoplite_mp._node.execution.folding import StripeLayout
from hoplite_mp._planner.program import program_of
from hoplite_mp._protocol import messages as m

# One stripe of arrays on nodes 0 and 2, which are folded on node 1, where the result is to be.
MEMBERS = (0, 1)


@pytest.mark.parametrize("op", ["sum", "max", "mean", "min", "prod"])
@pytest.mark.parametrize("dtype", ["<f4", "<i4"])
def test_mean_does_not_share_the_memory_of_its_sum(op: str, dtype: str) -> None:
    """The quotient is made where a cell becomes final; all else is copied as it is, but into
    another dtype."""
    plan = m.ExecuteReduce(
        9, 1, MEMBERS, MEMBERS, (m.Stripe(1, 0, m.SHARES),), "fold", "reduce", op, 0,
        (bytes(16),) * 2, (0, 2), (1,), (bytes(16),), 400,
        f"shape (100,) and dtype {dtype}".encode(),
    )  # fmt: skip
    program = program_of(plan, 1)
    layout = StripeLayout(plan, program)
    part, (result,) = program.pulls[0].cell, program.result
    assert layout.same_bytes(part, part)
    assert layout.same_bytes(result, result)
    same = op != "mean" and result_dtype(op, dtype) == dtype
    assert layout.same_bytes(part, result) is layout.same_bytes(result, part) is same
