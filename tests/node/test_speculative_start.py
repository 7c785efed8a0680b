"""Which calls of a Group begin before all have called, and who owns what then."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from hoplite_mp import _serialize
from hoplite_mp._node.groups.speculative_start import (
    BYTES_MIN,
    decide_speculatively,
    fill_in,
    fits,
    is_better_anew,
    lacks,
    transfer_s,
)
from hoplite_mp._node.objects.array_layouts import payload_layout
from hoplite_mp._planner.program import filled_links
from hoplite_mp._planner.stripe_plan import cut
from hoplite_mp._planner.topology import HostRates
from hoplite_mp._protocol.fields import NO_OBJECT
from hoplite_mp._protocol.group_calls import GroupGo, GroupPart, Piece
from hoplite_mp._protocol.messages import ExecuteReduce, GroupMembers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hoplite_mp._node.groups.speculative_start import Early
    from hoplite_mp._protocol.messages import Stripe

COUNT = BYTES_MIN // 4


def members(size: int) -> GroupMembers:
    nodes = tuple(range(size))
    stripes = cut((node, 1.0) for node in nodes)
    return GroupMembers("g", 1, 0, size, (1 << size) - 1, 0, True, 1, nodes, stripes)


def part(rank: int, count: int = COUNT, kind: str = "allreduce", op: str = "sum") -> GroupPart:
    encoded = _serialize.encode(np.zeros(count, np.float32))
    layout = payload_layout(memoryview(encoded.tobytes()))
    name = bytes([rank + 1] * 16)
    pieces = (Piece(rank, -1, encoded.nbytes, None, name, layout),)
    return GroupPart(1, 1, 0, (rank,), kind, op, 0, pieces)


def speculative(
    size: int,
    there: list[int],
    *,
    few: bool = True,
    likely: Sequence[int] = (),
    before: Sequence[Stripe] = (),
    rates: Mapping[int, HostRates] = MappingProxyType({}),
    **like: Any,
) -> Early | None:
    given = {rank: part(rank, **like) for rank in there}
    about = members(size), 0, 5, list(range(size)), given, rates
    return decide_speculatively(*about, few=few, likely=likely, before=before)


def stripes_of(found: Early | None) -> tuple[Stripe, ...]:
    assert found is not None
    return found.outcome.plans[0].stripes


def owners(found: Early | None) -> list[int]:
    return [stripe.owner for stripe in stripes_of(found)]


def widths(stripes: Sequence[Stripe]) -> list[int]:
    return [stripe.end_share - stripe.begin_share for stripe in stripes]


def test_all_but_the_last_own_stripes_in_the_order_in_which_they_call() -> None:
    found = speculative(4, [3, 0, 1], few=False)
    assert found is not None
    assert found.missing == {2}
    (plan,) = found.outcome.plans
    assert isinstance(plan, ExecuteReduce)
    assert owners(found) == [3, 0, 1]
    assert found.in_order
    first, second, last = widths(plan.stripes)
    assert first - 1 <= second <= first + 1
    assert 0.8 * first < last < 0.85 * first
    assert plan.objects[2] == NO_OBJECT
    assert plan.is_early
    assert found.outcome.waits == {0, 1, 2, 3}
    assert [filled_links(plan, node) for node in range(4)] == [(False, False)] * 4


def test_those_that_are_missing_own_stripes_in_the_order_of_the_last_call() -> None:
    assert owners(speculative(5, [3, 0])) == [3, 0, 1, 2]
    assert owners(speculative(5, [3, 0], likely=[4, 3, 2, 1, 0])) == [3, 0, 4, 2]
    assert owners(speculative(5, [3, 0], likely=[7, 4])) == [3, 0, 4, 1]  # h7 has left


def test_who_calls_next_takes_over_the_next_stripe() -> None:
    stripes = stripes_of(speculative(5, [3, 0]))
    for there, owning in (
        ([3, 0, 1], [3, 0, 1, 2]),
        ([3, 0, 4], [3, 0, 4, 1]),
        ([3, 0, 4, 2], [3, 0, 4, 2]),
    ):
        again = speculative(5, there, before=stripes)
        assert owners(again) == owning
        assert widths(stripes_of(again)) == widths(stripes)


def test_who_comes_last_loses_its_stripe_to_the_one_that_has_none() -> None:
    """Also if stripes have not passed on each time that one has called."""
    stripes = stripes_of(speculative(6, [3, 0]))
    assert [stripe.owner for stripe in stripes] == [3, 0, 1, 2, 4]
    assert owners(speculative(6, [3, 0, 5, 4, 1], before=stripes)) == [3, 0, 1, 5, 4]
    assert owners(speculative(6, [3, 0, 4, 2, 1], before=stripes)) == [3, 0, 1, 2, 4]


@pytest.mark.parametrize(
    ("size", "there", "few"),
    [
        (4, [0], True),
        (4, [0, 1], False),
        (2, [0], True),
        (3, [1], True),
        (8, [0, 1, 2, 3, 4, 5], False),
        (4, [0, 1, 2, 3], True),
    ],
)
def test_not_with_too_few_nor_with_all(size: int, there: list[int], few: bool) -> None:
    assert speculative(size, there, few=few) is None


def test_with_unequal_links_only_those_that_are_there_own() -> None:
    rates = {node: HostRates(rate, rate) for node, rate in enumerate((1e8, 1e8, 1e8, 2.5e7))}
    assert speculative(4, [0, 1], rates=rates) is None
    found = speculative(4, [0, 1, 2], rates=rates)
    assert owners(found) == [0, 1, 2]
    assert found is not None
    assert not found.in_order
    of_three = {node: rate for node, rate in rates.items() if node != 3} | {2: rates[3]}
    found = speculative(3, [0, 1], rates=of_three)  # whose stripes have the same width
    assert found is not None
    assert not found.in_order


def test_when_it_is_better_to_begin_anew() -> None:
    """Beside 1.5 transfers of four hosts that own as much as each other."""
    stripes = stripes_of(speculative(4, [0, 1]))
    assert is_better_anew(stripes, 0.0, 0.0)
    assert is_better_anew(stripes, 0.2, 0.2)  # the first one has 1.51 to receive
    assert not is_better_anew(stripes, 0.22, 0.22)
    assert not is_better_anew(stripes, 2.0, 0.09)
    assert is_better_anew(stripes, 2.0, 0.07)  # the last but one has 1.51 to send


def test_only_large_allreduces_wait() -> None:
    assert speculative(4, [0, 1, 2], kind="barrier") is None
    assert transfer_s(part(0, kind="reduce"), {}) is None
    assert transfer_s(part(0, count=100), {}) is None
    slow, fast = (transfer_s(part(0), {0: HostRates(rate, rate)}) for rate in (1e7, 1e9))
    assert slow == part(0).pieces[0].nbytes / 1e7
    assert fast == slow / 100


def test_what_was_taken_for_granted() -> None:
    found = speculative(4, [0, 1, 3])
    assert found is not None
    (plan,) = found.outcome.plans
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
    assert isinstance(filled.plans[0], ExecuteReduce)
    assert filled.plans[0].objects == tuple(bytes([rank + 1] * 16) for rank in range(4))
