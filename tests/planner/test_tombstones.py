"""What is remembered of a Group that has ended without a member that died: by which tasks, how
long, and by the next planner."""

from __future__ import annotations

import pytest

from hoplite_mp._planner.group_members import ENDED_TASKS_MAX, TASKS_MAX, Tombstones
from hoplite_mp._planner.groups import GroupRegistry
from hoplite_mp._planner.link_speeds import LinkSpeeds
from hoplite_mp._protocol import membership as r
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.groups import GroupEnd
from tests.support.planner_groups import RegistryWorld, is_refused_as_ended, task_id

RUN = 0, 1, 1, 0


@pytest.mark.parametrize("dies", ["first", "between", "last"])
def test_member_that_died_is_refused_after_the_others_left(dies: str) -> None:
    world = RegistryWorld()
    world.form(1, 2, 3)
    order = {"first": "xab", "between": "axb", "last": "abx"}[dies]
    for one in order:
        if one == "x":
            world.die(3, 3)
        else:
            world.leave(*{"a": (1, 1, 0), "b": (2, 2, 1)}[one])
    assert is_refused_as_ended(world.join(3, 33, 2))
    assert is_refused_as_ended(world.join(3, 34, None)), "tried again once more"
    assert isinstance(world.join(1, 1, 0), m.GroupJoined), "who has left may use the name again"
    assert isinstance(world.join(3, 35, 2), m.GroupJoined), "where it is, this one is waited for"


def test_tombstone_protects_ranks_of_the_next_group() -> None:
    world = RegistryWorld()
    world.form(1, 2, 3)
    world.die(3, 3)
    world.leave(1, 1, 0)
    world.leave(2, 2, 1)
    assert isinstance(world.join(4, 4, 0), m.GroupJoined)
    assert is_refused_as_ended(world.join(3, 33, 2))
    assert isinstance(world.join(5, 5, 2), m.GroupJoined)
    assert isinstance(world.join(0, 6, 1), m.GroupJoined), "a thread of a driver"


def test_group_without_departures_is_formed_again() -> None:
    world = RegistryWorld()
    world.form(1, 2, 3)
    for who in (1, 2, 3):
        world.die(who, who)
    world.form(1, 2, 3)


def test_member_that_rejoined_and_left_is_not_refused() -> None:
    world = RegistryWorld()
    world.form(1, 2, 3)
    world.die(3, 3)
    assert isinstance(world.join(3, 33, 2), m.GroupJoined)
    for who, slot, rank in ((1, 1, 0), (2, 2, 1), (3, 33, 2)):
        world.leave(who, slot, rank)
    assert isinstance(world.join(3, 34, 2), m.GroupJoined)


def test_group_never_formed_leaves_no_tombstone() -> None:
    world = RegistryWorld()
    world.join(1, 1, 0)
    world.join(2, 2, 1)
    world.die(2, 2)
    world.leave(1, 1, 0)
    assert isinstance(world.join(2, 22, 1), m.GroupJoined)


def test_tasks_of_a_lost_host_may_rejoin() -> None:
    """Its tasks are tried again elsewhere, under the same ids."""
    world = RegistryWorld()
    world.form(2, 1, 4)
    world.take(world.groups.lose_node(1))
    world.leave(2, 2, 0)
    world.leave(4, 4, 2)
    about = 7, 0, 7, 1, "g", 3, 1, 64, task_id(1)
    assert is_refused_as_ended(world.take(world.groups.join(m.GroupJoinRequested(*about))))


@pytest.mark.parametrize("when", ["before all", "after the death", "after the end"])
def test_tombstone_is_restored_from_node_reports(when: str) -> None:
    world = RegistryWorld()
    world.form(1, 2, 3)

    def next_planner(here: dict[int, list[int]]) -> None:
        ranks = {1: 0, 2: 1, 3: 2}
        held = [
            r.ReportedGroup(node, world.shown[node], tuple((ranks[w], w, 1) for w in here[node]))
            for node in sorted(world.shown)
        ]
        world.groups = GroupRegistry(8, LinkSpeeds())
        world.groups.remember(world.ends)
        world.take(world.groups.restore(held, [], range(100)))

    if when == "before all":
        next_planner({0: [2], 1: [1, 3]})
    world.die(3, 3)
    if when == "after the death":
        next_planner({0: [2], 1: [1]})
    world.leave(1, 1, 0)
    world.leave(2, 2, 1)
    assert world.ends, "every node that had a member is told, for the next planner"
    if when == "after the end":
        next_planner({})
    assert is_refused_as_ended(world.join(3, 33, 2))


@pytest.mark.parametrize("died", [True, False])
def test_end_of_a_group_without_a_planner_is_recorded(died: bool) -> None:
    world = RegistryWorld()
    world.form(1, 2, 3)
    first = r.ReportedGroup(0, world.shown[0], (), (1,))
    other = r.ReportedGroup(1, world.shown[1], (), (0, 2), (2,) if died else ())
    world.groups = GroupRegistry(8, LinkSpeeds())
    world.take(world.groups.restore([first, other], [], range(100)))
    assert is_refused_as_ended(world.join(3, 33, 2)) == died


def test_oldest_tombstones_are_evicted() -> None:
    ends = Tombstones()
    for number in range(ENDED_TASKS_MAX + 1):
        ends.add(GroupEnd("g", number + 1, (task_id(number),), (task_id(number),), (RUN,)))
    assert not ends.refusal("g", task_id(0), ())
    assert ends.refusal("g", task_id(1), ())
    assert ends.refusal("g", task_id(ENDED_TASKS_MAX), ())
    assert not ends.refusal("h", task_id(1), ())
    world = RegistryWorld()
    world.form(1, 2)
    for number in range(10, 10 + 3 * TASKS_MAX):
        world.die(number - 1 if number > 10 else 2, number - 1 if number > 10 else 2)
        assert isinstance(world.join(number, number, None, 2), m.GroupJoined)
    assert len(world.groups.groups["g"].tasks) == TASKS_MAX
    assert len(world.groups.groups["g"].dead) <= TASKS_MAX
