"""Everything that can happen to a planner, in any order: walks against the naive model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.support.planner_walk_copies import CopyWalk
from tests.support.planner_walk_group import GroupWalk
from tests.support.planner_walk_reduce import ReduceWalk


class EverythingWalk(ReduceWalk, GroupWalk):
    """Collectives and groups at once: neither disturbs the other."""


# About a second each. `stateful_step_count` lets operations and groups live through several
# plans and memberships.
_SETTINGS = settings(max_examples=25, stateful_step_count=60, deadline=None, print_blob=True)

TestCopyWalk = CopyWalk.TestCase
TestCopyWalk.settings = _SETTINGS
TestReduceWalk = ReduceWalk.TestCase
TestReduceWalk.settings = _SETTINGS
TestGroupWalk = GroupWalk.TestCase
TestGroupWalk.settings = _SETTINGS
TestEverythingWalk = EverythingWalk.TestCase
TestEverythingWalk.settings = _SETTINGS


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("walk", [CopyWalk, ReduceWalk, GroupWalk, EverythingWalk])
def test_random_walks_of_many_seeds_hold(walk: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(walk, settings=settings(_SETTINGS, max_examples=500))


def test_walk_with_a_vanished_source_transfers_nothing() -> None:
    """A walk that failed: a source vanishes, and the others are where they should be."""
    walk = ReduceWalk()
    walk.begin()
    walk.request(
        node=0,
        sources="aab",
        num=2,
        deadline_s=0.0,
        kind="alltoall",
        to=[0, 1],
        reproducible=False,
        ready=[0, 2],
        grouping=None,
        doubled=False,
    )
    walk.execution_failed(number=0, late=0, vanished={0})
    walk.nothing_is_left_of_finished_operations()
    walk.teardown()


def test_walk_with_a_node_without_members_ends() -> None:
    """Another walk that failed: the members elsewhere hear that nobody waits for its word."""
    walk = GroupWalk()
    walk.begin()
    walk.join(again=False, node=0)
    walk.join(again=False, node=1)
    walk.group_join(client=1, name="g", node=0, rank=1, size=2, use=1)
    walk.group_join(client=1, name="g", node=1, rank=None, size=2, use=1)
    walk.leave(late=0, name="g", rank=0, stranger=False)
    walk.join(again=True, node=1)
    walk.one_holder_per_rank_and_one_group_per_board()
    walk.teardown()


def test_node_that_fetches_again_after_a_broadcast_has_served_it_counts_as_served() -> None:
    walk = CopyWalk()
    walk.begin()
    for node in (1, 2):
        walk.join(node=node, again=False)
    walk.fetch(node=0, letter="a", nbytes=1024, holders=[0, 1], times=1)
    walk.fetched(letter="a", node=0, late=0)
    walk.broadcast(letter="a", node=0, holder=1, to=[2, 1, 0], nbytes=1 << 20)
    walk.fetched(letter="a", node=2, late=0)
    walk.fetch(node=2, letter="a", nbytes=1024, holders=[1, 2, 0], times=1)
    walk.fetched(letter="a", node=0, late=0)
    assert not walk.broadcasts
