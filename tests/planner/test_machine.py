"""Everything that can happen to a planner, in any order: walks against the naive model."""

from __future__ import annotations

from hypothesis import settings

from tests.planner.walk_copies import CopyWalk
from tests.planner.walk_group import GroupWalk
from tests.planner.walk_reduce import ReduceWalk


class EverythingWalk(ReduceWalk, GroupWalk):
    """Collectives and groups at once: neither disturbs the other."""


# About two seconds each. `stateful_step_count` lets operations and groups live through several
# plans and memberships.
_SETTINGS = settings(max_examples=50, stateful_step_count=60, deadline=None, print_blob=True)

TestCopyWalk = CopyWalk.TestCase
TestCopyWalk.settings = _SETTINGS
TestReduceWalk = ReduceWalk.TestCase
TestReduceWalk.settings = _SETTINGS
TestGroupWalk = GroupWalk.TestCase
TestGroupWalk.settings = _SETTINGS
TestEverythingWalk = EverythingWalk.TestCase
TestEverythingWalk.settings = _SETTINGS


def test_what_is_left_after_a_loss_need_not_move() -> None:
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
        doubled=False,
    )
    walk.execution_failed(number=0, late=0, vanished={0})
    walk.nothing_is_left_of_finished_operations()
    walk.teardown()
