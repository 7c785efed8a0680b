"""Plans of large calls of a Group: who gets the result, and who folds."""

from __future__ import annotations

import msgspec
import pytest

from hoplite_mp.node.groups.group_decisions import decide
from hoplite_mp.planner.topology import Host
from tests.node.test_speculative_start import members, part

SIZE = 4


@pytest.mark.parametrize("root", range(SIZE))
@pytest.mark.parametrize("rates", [{}, {node: Host(1e9, 1e9) for node in range(SIZE)}])
def test_the_others_fold_for_the_root(root: int, rates: dict[int, Host]) -> None:
    """Its link is the one that is full."""
    given = {
        rank: msgspec.structs.replace(part(rank, kind="reduce"), root=root) for rank in range(SIZE)
    }
    outcome = decide(members(SIZE), 0, 5, list(range(SIZE)), given, rates)
    assert not outcome.error
    (plan,) = outcome.plans
    assert plan.destinations == (root,)  # type: ignore[union-attr]
    assert {stripe.owner for stripe in plan.stripes} == {*range(SIZE)} - {root}
    assert outcome.waits
