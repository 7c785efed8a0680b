"""Tasks that have left their Group, are tried again and ask for it: who may wait, and how long."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from hoplite_mp._common import ids
from hoplite_mp._planner.group_members import Rejoins, Tombstones
from hoplite_mp._planner.groups import GroupRegistry
from hoplite_mp._planner.link_speeds import LinkSpeeds
from hoplite_mp._protocol import membership as r
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.groups import ASKED_MAX, GroupEnd
from tests.support.planner_groups import (
    RegistryWorld,
    end_tasks,
    is_refused_as_ended,
    member_ranks,
    task_id,
)


def ended_world(*whos: int) -> RegistryWorld:
    """They were members of a Group, in this order of ranks, and have left it."""
    world = RegistryWorld()
    world.form(*whos)
    for rank, who in enumerate(whos):
        world.leave(who, who, rank)
    assert not world.groups.groups
    return world


def test_retried_member_is_refused_when_the_last_partner_has_ended() -> None:
    world = ended_world(1, 2, 3)
    assert isinstance(world.join(3, 33, 2), m.GroupJoined)
    assert world.asked == [(0, task_id(1)), (0, task_id(2))], "once, and not about itself"
    end_tasks(world, 1)
    assert not world.given_up
    end_tasks(world, 2)
    assert world.given_up == [(33, 2)]
    assert not world.groups.groups, "the name and the board are free"
    assert is_refused_as_ended(world.join(3, 33, 2)), (
        "it asks once more, and what is known is not asked again"
    )
    assert not world.asked[2:]


@pytest.mark.parametrize("order", [*permutations([1, 2, 3])], ids=str)
def test_group_is_formed_again_if_all_members_are_retried(order: tuple[int, ...]) -> None:
    world = ended_world(1, 2, 3)
    for who in order:
        assert isinstance(world.join(who, 30 + who, who - 1), m.GroupJoined)
    assert not world.given_up
    assert world.shown[0].formed
    end_tasks(world, 1, 2, 3)
    assert member_ranks(world) == [0, 1, 2], "it is whole: who is over says so by leaving"


def test_several_retried_members_do_not_wait_for_each_other() -> None:
    world = ended_world(1, 2, 3)
    world.join(1, 31, 0)
    world.join(2, 32, 1)
    end_tasks(world, 3)
    assert world.given_up == [(31, 0), (32, 1)]


def test_next_group_of_the_same_name_waits_for_new_members() -> None:
    """In the same run, with or without one that is tried again."""
    world = ended_world(1, 2, 3)
    assert isinstance(world.join(1, 1, 0), m.GroupJoined)
    assert not world.asked
    assert isinstance(world.join(3, 33, 2), m.GroupJoined)
    end_tasks(world, 2)
    assert not world.given_up, "the first one may wait for somebody, so this one may, too"
    world.leave(1, 1, 0)
    assert not world.given_up
    end_tasks(world, 1)
    assert world.given_up == [(33, 2)]


def test_task_run_is_identified_by_process_and_attempt() -> None:
    world = ended_world(1, 2)
    world.join(1, 1, 0, 2, tries=1)
    end_tasks(world, 2)
    assert world.given_up == [(1, 0)]
    again = ended_world(1, 2)
    again.join(1, 1, 0, 2)
    end_tasks(again, 2)
    assert not again.given_up


def test_partners_of_a_driver_wait_for_it() -> None:
    world = ended_world(0, 1, 2)
    world.join(1, 31, 1)
    assert not world.asked


def test_member_with_changing_partners_waits_for_an_unknown_partner() -> None:
    world = ended_world(1, 2)
    world.form(1, 4)
    world.leave(1, 1, 0)
    world.leave(4, 4, 1)
    world.join(1, 31, 0, 2)
    end_tasks(world, 2, 4)
    assert not world.given_up


def test_new_members_keep_their_ranks_and_take_a_refused_one() -> None:
    world = ended_world(1, 2, 3)
    assert isinstance(world.join(5, 5, 0), m.GroupJoined)
    assert isinstance(world.join(3, 33, 2), m.GroupJoined)
    end_tasks(world, 1, 2)
    assert world.given_up == [(33, 2)]
    for who, rank in ((6, 1), (7, 2)):
        assert isinstance(world.join(who, who, rank), m.GroupJoined)
    assert world.shown[0].formed


def test_rank_of_a_waiting_member_may_be_requested() -> None:
    world = ended_world(1, 2, 3)
    world.join(3, 33, 2)
    assert isinstance(world.join(5, 5, 2), m.GroupRefused)


def test_waiting_member_is_refused_when_the_hosts_of_its_partners_are_lost() -> None:
    """At once, with the answer, if nobody can be asked; else when it happens."""
    host_ids: dict[int, int] = {}
    whos = [ids.pack_id(host_id, 7) for host_id in (1, 2)]

    def world() -> GroupRegistry:
        groups = GroupRegistry(8, LinkSpeeds(), host_ids.get)
        groups.remember([GroupEnd("g", 4, (), tuple(whos), ((0, 3, 1, 0), (1, 3, 1, 0)))])
        return groups

    def join(groups: GroupRegistry) -> Any:
        return groups.join(m.GroupJoinRequested(9, 0, 8, 1, "g", 2, 0, 64, whos[0]))

    groups = world()
    node, answer = join(groups)[-1]
    assert node == 0
    assert is_refused_as_ended(answer)
    assert not groups.groups
    host_ids[2] = 5
    groups = world()
    sends = join(groups)
    assert (5, m.GroupTasksQuery((whos[1],))) in sends
    assert isinstance(sends[-1][1], m.GroupJoined)
    assert [type(one) for _, one in groups.lose_node(4)] == []
    given_up, closed = [one for _, one in groups.lose_node(5)]
    assert isinstance(given_up, m.GroupMemberRemoved)
    assert isinstance(closed, m.GroupClosed)


@pytest.mark.parametrize("when", ["after the end", "while it waits"])
def test_next_planner_continues_a_rejoin(when: str) -> None:
    world = ended_world(1, 2, 3)
    ends = [*world.ends, *world.ends]
    if when == "while it waits":
        world.join(3, 33, 2, tries=1)
    held = [
        r.ReportedGroup(node, shown, ((2, 33, 1),))
        for node, shown in world.shown.items()
        if node == 1
    ]
    world.groups = GroupRegistry(8, LinkSpeeds())
    world.groups.remember(ends)
    world.asked.clear()
    world.take(world.groups.restore(held, [], range(100)))
    if when == "after the end":
        world.join(3, 33, 2, tries=1)
    assert world.asked == [(0, task_id(1)), (0, task_id(2))]
    end_tasks(world, 1, 2)
    assert world.given_up == [(33, 2)]


def test_task_queries_are_sent_once_and_forgotten() -> None:
    returns = Rejoins(lambda host_id: host_id or None)
    far = [ids.pack_id(2, n) for n in range(ASKED_MAX + 1)]
    sends = returns.ask([*far, *far])
    assert [(node, len(one.tasks)) for node, one in sends] == [(2, ASKED_MAX), (2, 1)]  # type: ignore[union-attr]
    returns.told(m.GroupTasksEnded(2, (far[0], ids.pack_id(2, 1 << 20))))
    assert returns.hopeless({0: (far[1], frozenset(far[:1]))}) == [0]
    returns.keep(far[:1])
    assert not returns.ask(far[:1]), "it is known"
    returns.keep(())
    assert len(returns.ask(far[:1])) == 1, "it is forgotten"


def test_latest_end_of_a_task_counts_in_any_order() -> None:
    runs = (0, 1, 1, 0), (0, 2, 1, 0)
    whos = task_id(1), task_id(2)
    early = GroupEnd("g", 4, (task_id(1),), whos, runs)
    late = GroupEnd("g", 5, (), whos, runs)
    for order in ((early, late), (late, early), (late, early, late)):
        ends = Tombstones()
        for end in order:
            ends.add(end)
        assert not ends.refusal("g", task_id(1), ())
        assert ends.mates("g", task_id(1), (0, 9, 1, 1)) == {task_id(2)}
        assert ends.mates("g", task_id(1), runs[0]) is None
        assert ends.mates("h", task_id(1), (0, 9, 1, 1)) is None
        assert ends.mates("g", b"", (0, 9, 1, 1)) is None
