"""Members that leave a Group before it is whole: when the others stop waiting for them."""

from __future__ import annotations

import pytest

from hoplite_mp._planner.group_members import VACATED_MAX, Vacated
from hoplite_mp._planner.groups import GroupRegistry
from hoplite_mp._planner.link_speeds import LinkSpeeds
from hoplite_mp._protocol import membership as r
from hoplite_mp._protocol import messages as m
from tests.support.planner_groups import (
    RegistryWorld,
    end_tasks,
    is_refused_as_ended,
    member_ranks,
    task_id,
)

TEAM = 99


@pytest.mark.parametrize("dies", [False, True])
def test_vacated_rank_fails_the_group_when_its_task_has_ended(
    dies: bool,
) -> None:
    world = RegistryWorld()
    world.join(1, 1, 0)
    world.join(2, 2, 1)
    if dies:
        world.die(2, 2)
    else:
        world.leave(2, 2, 1)
    assert world.asked == [(0, task_id(2))]
    assert not world.given_up
    end_tasks(world, 2)
    assert world.given_up == [(1, 0)]
    assert not world.groups.groups, "the name and the board are free"


def test_vacated_rank_is_awaited_while_its_task_may_be_retried() -> None:
    world = RegistryWorld()
    for who in (1, 2):
        world.join(who, who, who - 1)
    world.die(2, 2)
    assert isinstance(world.join(3, 3, 2), m.GroupJoined)
    assert isinstance(world.join(2, 22, 1, tries=1), m.GroupJoined)
    assert world.shown[0].formed
    end_tasks(world, 2)
    assert member_ranks(world) == [0, 1, 2], "it is whole"


def test_vacated_rank_may_be_taken_by_another_task() -> None:
    world = RegistryWorld()
    world.join(1, 1, 0)
    world.join(2, 2, 1)
    world.leave(2, 2, 1)
    world.join(4, 4, 1)
    end_tasks(world, 2)
    assert not world.given_up
    world.leave(4, 4, 1)
    end_tasks(world, 4)
    assert world.given_up == [(1, 0)]


def test_rank_of_a_driver_thread_that_left_is_awaited() -> None:
    world = RegistryWorld()
    world.join(1, 1, 0)
    world.join(0, 2, 1)
    world.leave(0, 2, 1)
    assert not world.asked
    assert member_ranks(world) == [0]


def test_join_after_all_others_have_left_is_refused() -> None:
    world = RegistryWorld()
    world.join(1, 1, 0, team=TEAM)
    world.die(1, 1)
    assert not world.groups.groups
    assert isinstance(world.join(2, 2, 1, team=TEAM), m.GroupJoined)
    assert world.asked == [(0, task_id(1))]
    end_tasks(world, 1)
    assert world.given_up == [(2, 1)]
    assert is_refused_as_ended(world.join(3, 3, 2, team=TEAM)), "what is known is not asked again"


def test_join_after_all_others_have_left_waits_for_a_retried_task() -> None:
    world = RegistryWorld()
    world.join(1, 1, 0, 2, team=TEAM)
    world.die(1, 1)
    world.join(2, 2, 1, 2, team=TEAM)
    world.join(1, 11, 0, 2, tries=1, team=TEAM)
    end_tasks(world, 1)
    assert member_ranks(world) == [0, 1]
    assert not world.given_up


@pytest.mark.parametrize("other", [{"team": 5}, {}, {"size": 2, "team": TEAM}], ids=str)
def test_next_group_of_the_same_name_waits_for_its_own_members(other: dict[str, int]) -> None:
    world = RegistryWorld()
    world.join(1, 1, 0, team=TEAM)
    world.leave(1, 1, 0)
    assert isinstance(world.join(2, 2, 1, **other), m.GroupJoined)
    assert not world.asked
    assert member_ranks(world) == [1]


@pytest.mark.parametrize("knows", [True, False], ids=["the leave is shown", "only reported"])
def test_next_planner_queries_the_task_of_a_vacated_rank(knows: bool) -> None:
    world = RegistryWorld()
    world.join(1, 1, 0, team=TEAM)
    world.join(2, 2, 1, team=TEAM)
    if knows:
        world.leave(2, 2, 1)
    held = [
        r.ReportedGroup(1, world.shown[1], ((0, 1, 1),)),
        r.ReportedGroup(0, world.shown[0], (), () if knows else (1,)),
    ]
    world.asked.clear()
    world.groups = GroupRegistry(8, LinkSpeeds())
    world.take(world.groups.restore(held, [], range(100)))
    assert world.asked == [(0, task_id(2))]
    end_tasks(world, 2)
    assert world.given_up == [(1, 0)]
    world.join(3, 3, 2, team=TEAM)
    end_tasks(world, 2)
    assert not member_ranks(world), "the team of the member that was restored is known"


def test_oldest_vacated_rank_is_evicted() -> None:
    vacated = Vacated()
    for number in range(VACATED_MAX + 1):
        vacated.add(f"g{number}", 2, {0: (task_id(1), task_id(TEAM))})
    assert not vacated.take("g0", 2, task_id(TEAM))
    assert vacated.take("g1", 2, task_id(TEAM)) == {0: (task_id(1), task_id(TEAM))}
    assert not vacated.take("g1", 2, task_id(TEAM)), "the Group has it now"
