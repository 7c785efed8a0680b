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
