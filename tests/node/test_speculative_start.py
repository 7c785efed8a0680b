"""Which calls of a Group begin before all have called, and who owns what then."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from hoplite_mp._node.groups.group_decisions import UndecidedCall
from hoplite_mp._node.groups.plan_sources import (
    Speculative,
    fill_in,
    fits,
    lacks,
    transfer_s,
)
from hoplite_mp._planner.link_speeds import HostRates
from hoplite_mp._planner.program import filled_links
from hoplite_mp._protocol.fields import NO_OBJECT
from hoplite_mp._protocol.group_calls import GroupAttempt
from hoplite_mp._protocol.messages import ExecuteReduce
from tests.support.node_group_calls import PART_ELEMENTS, group_part, striped_members

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hoplite_mp._node.groups.plan_sources import PlannedCall
    from hoplite_mp._protocol.messages import Stripe


def speculative(
    size: int,
    there: list[int],
    *,
    rates: Mapping[int, HostRates] = MappingProxyType({}),
    **like: Any,
) -> PlannedCall | None:
    given = {rank: group_part(rank, **like) for rank in there}
    return Speculative().plan(
        UndecidedCall(striped_members(size), 0, 5, list(range(size)), given, rates)
    )


def stripes_of(found: PlannedCall | None) -> tuple[Stripe, ...]:
    assert found is not None
    return found[0].plans[0].stripes


def owners(found: PlannedCall | None) -> list[int]:
    return [stripe.owner for stripe in stripes_of(found)]


def widths(stripes: Sequence[Stripe]) -> list[int]:
    return [stripe.end_share - stripe.begin_share for stripe in stripes]


def test_early_call_gives_equal_stripes_to_present_hosts() -> None:
    found = speculative(4, [3, 0, 1])
    assert found is not None
    outcome, missing, _ = found
    assert missing == {2}
    (plan,) = outcome.plans
    assert isinstance(plan, ExecuteReduce)
    assert owners(found) == [0, 1, 3]
    assert max(widths(plan.stripes)) - min(widths(plan.stripes)) <= 1
    assert plan.objects[2] == NO_OBJECT
    assert plan.is_early
    assert outcome.waits == {0, 1, 2, 3}
    assert [filled_links(plan, node) for node in range(4)] == [(False, False)] * 4


@pytest.mark.parametrize(
    ("size", "there"),
    [(4, [0]), (4, [0, 1]), (2, [0]), (3, [1]), (8, [0, 1, 2, 3, 4, 5]), (4, [0, 1, 2, 3])],
)
def test_call_starts_early_only_if_one_host_is_missing(size: int, there: list[int]) -> None:
    assert speculative(size, there) is None


def test_early_call_with_unequal_links_excludes_the_late_host() -> None:
    rates = {node: HostRates(rate, rate) for node, rate in enumerate((1e8, 1e8, 1e8, 2.5e7))}
    found = speculative(4, [0, 1, 2], rates=rates)
    assert owners(found) == [0, 1, 2]
    assert max(widths(stripes_of(found))) - min(widths(stripes_of(found))) <= 1


def test_only_large_allreduces_start_early() -> None:
    assert speculative(4, [0, 1, 2], kind="barrier") is None
    assert transfer_s(group_part(0, kind="reduce"), {}) is None
    assert transfer_s(group_part(0, count=100), {}) is None
    slow, fast = (transfer_s(group_part(0), {0: HostRates(rate, rate)}) for rate in (1e7, 1e9))
    assert slow == group_part(0).pieces[0].nbytes / 1e7
    assert fast == slow / 100


def test_early_plan_checks_the_late_contribution() -> None:
    found = speculative(4, [0, 1, 3])
    assert found is not None
    (plan,) = found[0].plans
    assert fits(group_part(2), plan)
    for other in (
        group_part(2, PART_ELEMENTS + 1),
        group_part(2, op="max"),
        group_part(2, kind="reduce"),
    ):
        assert not fits(other, plan)
        assert fill_in(GroupAttempt(1, 0, 5, (plan,)), other) is None
    assert not fits(msgspec.structs.replace(group_part(2), mistake="no", pieces=()), plan)
    go = GroupAttempt(1, 0, 5, (plan,))
    assert lacks(go, {2})
    assert not lacks(go, {0, 1, 3})
    filled = fill_in(go, group_part(2))
    assert filled is not None
    assert not lacks(filled, {0, 1, 2, 3})
    assert isinstance(filled.plans[0], ExecuteReduce)
    assert filled.plans[0].objects == tuple(bytes([rank + 1] * 16) for rank in range(4))
