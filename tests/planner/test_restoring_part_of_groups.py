"""A second planner restores Groups of which each node has heard something else.

The manager had told some nodes of a change, and died before it told the others. What one node
reports of a member counts only if the Group's latest version shows the same member.
"""

from __future__ import annotations

import msgspec
import pytest

from hoplite_mp._protocol import membership as r
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.groups import NO_TASK, GroupEnd
from tests.support.planner_clusters import (
    NODES,
    RestartedPlanner,
    answer_to,
    empty_reports,
    join_request,
    planner_members,
    shown_by,
    task_at,
    versions_to,
)


@pytest.mark.parametrize("name", ["later", "g"])
def test_founder_on_a_host_with_the_previous_group_is_restored(name: str) -> None:
    """Also if the next group has the same name, its host has heard nothing of that one."""
    cluster = RestartedPlanner()
    first = cluster.group()
    for node in (0, 1):
        cluster.say(m.GroupLeft("g", first.generation, node, node, 5, 1))
    asked = [join_request(2, node, 5, name, 2, node) for node in (0, 1)]
    for one in asked:
        cluster.say(one)
    whole = shown_by(cluster)
    cluster.die()
    reports = {
        0: (r.ReportedGroup(0, whole, ((0, 5, 1),)),),
        1: (r.ReportedGroup(1, first, (), (1,)), asked[1]),
    }
    sends = cluster.back(empty_reports() | reports)
    assert answer_to(sends, 1).admitted
    last = versions_to(sends, 1)[-1]
    assert (last.first, last.alive) == (True, 0b11)


def test_dead_founder_on_a_host_with_the_previous_group_is_ended() -> None:
    """Its host is sent the version of which it has not heard, because all wait for its report."""
    cluster = RestartedPlanner()
    first = cluster.group()
    for node in (0, 1):
        cluster.say(m.GroupLeft("g", first.generation, node, node, 5, 1))
    for node in (0, 1):
        cluster.say(join_request(2, node, 6, "g", 2, node))
    whole = shown_by(cluster)
    cluster.die()
    reports = {
        0: (r.ReportedGroup(0, whole, ((0, 6, 1),)),),
        1: (r.ReportedGroup(1, first, (), (1,)), m.ClientLost(1, 6, 1)),
    }
    assert versions_to(cluster.back(empty_reports() | reports), 1)[-1].former == (1,)


def test_founders_with_a_death_before_the_formation_are_restored() -> None:
    """It had more versions than ranks until it was whole."""
    cluster = RestartedPlanner()
    cluster.say(join_request(1, 0, 5, "g", 3, 0))
    cluster.say(join_request(1, 2, 5, "g", 3, 2))
    cluster.say(m.ClientLost(2, 5, 1))
    cluster.say(join_request(2, 2, 6, "g", 3, 2))
    asked = join_request(1, 1, 5, "g", 3, 1)
    cluster.say(asked)
    assert shown_by(cluster).first
    cluster.say(m.ClientLost(2, 6, 1))
    shown = shown_by(cluster)
    cluster.die()
    sends = cluster.back(
        empty_reports() | {0: (r.ReportedGroup(0, shown, ((0, 5, 1),)),), 1: (asked,)}
    )
    assert (answer_to(sends, 1).rank, answer_to(sends, 1).admitted) == (1, True)


def test_founder_is_distinct_from_an_earlier_member_of_its_rank() -> None:
    """That one's death is not the founder's."""
    cluster = RestartedPlanner()
    cluster.say(join_request(1, 0, 5, "g", 3, 0))
    cluster.say(join_request(1, 1, 5, "g", 3, 1))
    early = shown_by(cluster)
    cluster.say(m.ClientLost(1, 5, 1))
    cluster.say(join_request(1, 2, 5, "g", 3, 2))
    asked = join_request(2, 1, 6, "g", 3, 1)
    cluster.say(asked)
    whole = shown_by(cluster)
    assert whole.first
    cluster.die()
    reports = {
        0: (r.ReportedGroup(0, whole, ((0, 5, 1),)),),
        1: (r.ReportedGroup(1, early, (), (1,), (1,)), asked),
        2: (r.ReportedGroup(2, whole, ((2, 5, 1),)),),
    }
    sends = cluster.back(reports)
    assert (answer_to(sends, 1).rank, answer_to(sends, 1).admitted) == (1, True)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_death_of_an_earlier_run_does_not_end_a_living_member(order: tuple[int, ...]) -> None:
    """A host reports the death of its earlier run, and does not know of the present one."""
    cluster = RestartedPlanner()
    for node in (0, 1):
        cluster.say(join_request(1, node, 5, "g", 2, node, task=task_at(node + 1)))
    whole = shown_by(cluster)
    cluster.say(m.ClientLost(1, 5, 1))
    cluster.say(join_request(2, 2, 5, "g", 2, 1, task=task_at(2), tries=1))
    latest = shown_by(cluster)
    assert latest.nodes == (0, 2)
    cluster.die()
    held = {
        0: (r.ReportedGroup(0, latest, ((0, 5, 1),)),),
        1: (r.ReportedGroup(1, whole, (), (1,), (1,)),),
        2: (r.ReportedGroup(2, latest, ((1, 5, 1),)),),
    }
    cluster.back({node: held[node] for node in order})
    cluster.say(m.GroupAdmitted("g", whole.generation, 1))
    cluster.say(m.GroupLeft("g", whole.generation, 0, 0, 5, 1))
    cluster.say(m.GroupLeft("g", whole.generation, 1, 2, 5, 1))
    again = cluster.say(join_request(3, 2, 5, "g", 2, 1, task=task_at(2), tries=1))
    assert [type(one) for _, one in again] == [m.GroupMembers, m.GroupJoined], again


def test_split_group_waits_for_a_founder_without_a_reply() -> None:
    """The part waits for it, although it has come once."""
    cluster = RestartedPlanner()
    for node in range(3):
        cluster.say(join_request(1, node, 5, "g", 3, node))
    whole = shown_by(cluster)
    about = {"parent": whole.generation, "founders": tuple((n, n, 5, 1) for n in range(3))}
    parts = [join_request(7, node, 5, "part", 3, node, **about) for node in range(3)]
    cluster.say(parts[0])
    cluster.say(parts[1])
    shown = shown_by(cluster)
    assert (shown.name, shown.formed, shown.founders_joined) == ("part", False, 0b11)
    cluster.die()
    cluster.back(
        {
            0: (r.ReportedGroup(0, whole, ((0, 5, 1),)), r.ReportedGroup(0, shown, ((0, 5, 1),))),
            2: (r.ReportedGroup(2, whole, ((2, 5, 1),)), parts[2]),
            1: (r.ReportedGroup(1, whole, ((1, 5, 1),)), parts[1]),
        }
    )
    last = shown_by(cluster)
    assert (last.alive, last.joining, last.formed) == (0b111, 0, True)


def test_join_of_a_lost_node_is_dropped() -> None:
    """It has called, and died before all had; nobody will report its members' end."""
    cluster = RestartedPlanner()
    cluster.say(join_request(1, 0, 5, "g", 2, 0))
    asked = join_request(1, 1, 5, "g", 2, 1)
    cluster.say(asked)
    whole = shown_by(cluster)
    cluster.die()
    returned = r.NodeReturned(1, 1, NODES, planner_members(0, 1, 2))
    for one in (returned, asked, r.ReportComplete(1), m.NodeLost(1, 1)):
        cluster.say(one)
    sends = cluster.back({0: (r.ReportedGroup(0, whole, ((0, 5, 1),)),), 2: ()}, known=(0, 2))
    assert cluster.planner.membership.nodes == (0, 2)
    assert versions_to(sends, 0)[-1].nodes == (0, None)


def test_join_reported_twice_gets_one_rank() -> None:
    """Its node called twice. It gets one rank."""
    cluster = RestartedPlanner()
    joins = [
        join_request(1, 0, 5, "g", 3, None),
        join_request(1, 1, 5, "g", 3, None),
        join_request(2, 1, 6, "g", 3, None),
    ]
    for one in joins:
        cluster.say(one)
    whole = shown_by(cluster)
    cluster.die()
    cluster.say(r.NodeReturned(1, 1, NODES, planner_members(0, 1, 2)))
    cluster.say(joins[1])
    cluster.back(
        {
            0: (r.ReportedGroup(0, whole, ((0, 5, 1),)),),
            1: (joins[1], m.ClientLost(1, 6, 1)),
            2: (),
        }
    )
    assert shown_by(cluster).nodes == (0, 1, None)


@pytest.mark.parametrize("of_tasks", [True, False])
def test_group_whose_end_one_node_knows_has_ended(of_tasks: bool) -> None:
    """It is over. Members that ask for its name again are those of the next one."""
    cluster = RestartedPlanner()
    tasks = {node: task_at(node + 1) if of_tasks else NO_TASK for node in (0, 1)}
    for node in (0, 1):
        cluster.say(join_request(1, node, 5, "g", 2, node, task=tasks[node]))
    whole = shown_by(cluster)
    for node in (0, 1):
        cluster.say(m.GroupLeft("g", whole.generation, node, node, 5, 1))
    closed = cluster.latest(m.GroupClosed)
    assert (closed.end is not None) == of_tasks
    cluster.die()
    again = [join_request(2, node, 5, "g", 2, node, task=tasks[node]) for node in (0, 1)]
    end = closed.end or GroupEnd("g", whole.generation, (), (), ())  # as a node reports it
    reports = {0: (r.ReportedGroup(0, whole, (), (0,)), again[0]), 1: (end, again[1])}
    sends = cluster.back(empty_reports() | reports)
    joined = [one for _, one in sends if isinstance(one, m.GroupJoined)]
    assert {one.generation for one in joined} == {whole.generation + 1}
    assert all(one.admitted for one in joined)


def test_member_of_an_ended_group_is_informed_before_its_node() -> None:
    """It is told that its group goes on without it, before its node is told that the group is over,
    so that its call raises at once."""
    cluster = RestartedPlanner()
    cluster.say(join_request(1, 1, 5, "g", 2, 0))
    early = shown_by(cluster)
    later = msgspec.structs.replace(early, generation=early.generation + 1, nodes=(0, None))
    cluster.die()
    reports = {
        0: (r.ReportedGroup(0, later, ((0, 5, 1),)),),
        1: (r.ReportedGroup(1, early, ((0, 5, 1),)),),
    }
    sends = cluster.back(empty_reports() | reports)
    to_1 = [type(one).__name__ for node, one in sends if node == 1]
    assert to_1 == ["GroupMemberRemoved", "GroupClosed"]
