"""Who owns stripes when the link of one owner has become slow in the middle of a call."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hoplite_mp._node.groups.group_decisions import UndecidedCall, decide
from hoplite_mp._planner.link_speeds import HostRates
from hoplite_mp._planner.repair import is_slow, owners_without, slow_one, stays_slow
from hoplite_mp._planner.tree_shapes import cut
from hoplite_mp._protocol.group_calls import GroupSlow
from tests.support.node_group_calls import group_part, striped_members

LINK, SLOW = 100_000_000, 25_000_000  # bytes per second


def plan(size: int, kind: str = "allreduce") -> Any:
    given = {rank: group_part(rank, kind=kind) for rank in range(size)}
    undecided = UndecidedCall(striped_members(size), 0, 5, list(range(size)), given, {})
    (made,) = decide(undecided).plans
    return made


def report(of: Any, moved: float = 0.0, up: int = SLOW, down: int = SLOW) -> GroupSlow:
    """moved: the part of the array that has been sent, and received, so far."""
    return GroupSlow(1, 0, 5, up, down, int(moved * of.nbytes), int(moved * of.nbytes))


@pytest.mark.parametrize("size", [3, 4, 8])
def test_slow_owner_relieved_others_own_everything(size: int) -> None:
    made = plan(size)
    assert owners_without({1: report(made)}, made) == set(range(size)) - {1}


@pytest.mark.parametrize(
    ("moved", "relieved"), [(0.0, True), (0.3, True), (0.4, False), (0.5, False), (1.2, False)]
)
def test_slow_owner_with_most_bytes_keeps_its_stripe(moved: float, relieved: bool) -> None:
    made = plan(4)
    assert bool(owners_without({1: report(made, moved)}, made)) == relieved


def test_slow_sender_is_relieved() -> None:
    made = plan(4)
    assert owners_without({1: report(made, 0.7, down=LINK)}, made)


def test_clearly_slowest_owner_is_relieved() -> None:
    made = plan(4)
    both = {1: report(made), 2: report(made, up=2 * SLOW)}
    assert slow_one(both) == 1
    assert owners_without(both, made) == {0, 2, 3}


def test_several_slow_owners_are_not_relieved() -> None:
    made = plan(4)
    assert slow_one({1: report(made), 2: report(made)}) is None
    assert not owners_without({1: report(made), 2: report(made)}, made)
    assert not owners_without({}, made)
    assert not owners_without({1: report(plan(2))}, plan(2))


def test_slow_node_without_a_stripe_changes_nothing() -> None:
    made = plan(4)
    others = msgspec.structs.replace(made, stripes=cut((node, 1.0) for node in (0, 2, 3)))
    assert not owners_without({1: report(made)}, others)


@pytest.mark.parametrize("kind", ["reduce", "reduce_scatter", "allgather"])
def test_other_kinds_are_not_replanned(kind: str) -> None:
    made = plan(4, kind)
    assert not owners_without({1: report(made)}, made)
    assert not owners_without({1: report(plan(4))}, None)


@pytest.mark.parametrize("share", [0.04, 0.1])
def test_small_stripe_of_a_slow_owner_is_kept(share: float) -> None:
    """One that is known to be slower has one: to take it would make the call longer."""
    made = plan(4)
    rest = (1 - share) / 3
    shares = cut([(0, rest), (1, share), (2, rest), (3, rest)])
    narrow = msgspec.structs.replace(made, stripes=shares)
    assert not owners_without({1: report(narrow, 0.3)}, narrow)


@pytest.mark.parametrize(("each", "relieved"), [(1, True), (2, True), (3, False), (6, False)])
def test_slow_owner_of_many_members_keeps_its_stripe(each: int, relieved: bool) -> None:
    """A reproducible fold adds members in their order, so the owner's own need not travel: without
    a stripe they all would."""
    made = plan(4)
    count = 4 * each
    holders = tuple(index % 4 for index in range(count))
    objects = tuple(index.to_bytes(16, "big") for index in range(count))
    about = {"members": tuple(range(count)), "order": tuple(range(count)), "objects": objects}
    many = msgspec.structs.replace(made, rule="fold", holders=holders, **about)
    assert bool(owners_without({1: report(many, 0.1)}, many)) == relieved
    # Members that are added up first travel as one.
    assert owners_without({1: report(many, 0.1)}, msgspec.structs.replace(many, rule="any"))


def test_slow_owner_with_a_single_destination_keeps_its_stripe() -> None:
    """It sends its array once with a stripe and without; with two destinations it gains."""
    made = plan(4)
    assert not owners_without({1: report(made)}, msgspec.structs.replace(made, destinations=(0,)))
    two = msgspec.structs.replace(made, destinations=(0, 1))
    assert not owners_without({2: report(made)}, msgspec.structs.replace(two, destinations=(3,)))
    assert owners_without({1: report(made)}, two)


def test_fast_host_that_waits_for_others_is_not_slow() -> None:
    """It sends a quarter of what it could, because the others take no more."""
    made = plan(4)
    rates = dict.fromkeys(range(4), HostRates(LINK, LINK))
    rates[1] = HostRates(4 * LINK, 4 * LINK)
    assert not is_slow(1, report(made, up=LINK), made, rates)
    assert is_slow(1, report(made, up=LINK // 4), made, rates)
    assert not is_slow(1, report(made, up=LINK // 4), made, {0: rates[0]})
    assert not is_slow(7, report(made), made, rates)


def test_rate_of_a_slow_link_is_kept_until_it_is_faster() -> None:
    made = plan(4)
    fast, slow = HostRates(LINK, LINK), HostRates(SLOW, LINK)
    assert stays_slow(report(made), slow, LINK)
    assert not stays_slow(report(made, up=2 * SLOW), slow, LINK)
    assert not stays_slow(report(made), fast, LINK)
    assert not stays_slow(None, slow, LINK)
    assert not stays_slow(report(made), None, LINK)
