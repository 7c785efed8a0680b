"""Groups after two managers have died in a row, and members of which their hosts never heard."""

from __future__ import annotations

from typing import Any

import pytest

from hoplite_mp._protocol import membership as r
from hoplite_mp._protocol import messages as m
from tests.support.planner_clusters import (
    RestartedPlanner,
    answer_to,
    empty_reports,
    join_request,
    shown_by,
    task_at,
    versions_to,
)


def test_founder_informed_without_a_reply_joins_again() -> None:
    """It joins again. The version that counts it then is a later one, which its node must have,
    because what it reports to the manager after the next is compared with that."""
    cluster = RestartedPlanner()
    whole = cluster.group()
    founders = ((0, 0, 5, 1), (1, 1, 5, 1))
    about = {"parent": whole.generation, "founders": founders}
    parts = [join_request(7, node, 5, "part", 2, node, **about) for node in (0, 1)]
    cluster.say(parts[0])
    first = shown_by(cluster)
    parents = {n: r.ReportedGroup(n, whole, ((n, 5, 1),)) for n in (0, 1)}
    cluster.die()
    reports = {0: (parents[0], r.ReportedGroup(0, first, ()), parts[0]), 1: (parents[1],)}
    sends = cluster.back(empty_reports() | reports)
    assert answer_to(sends, 0).rank == 0
    at_0 = ([one for one in versions_to(sends, 0) if one.name == "part"] or [first])[-1]
    cluster.say(parts[1])  # sent to node 1 only
    latest = shown_by(cluster)
    assert latest.formed
    cluster.die()
    reports = {
        0: (parents[0], r.ReportedGroup(0, at_0, ((0, 5, 1),))),
        1: (parents[1], r.ReportedGroup(1, latest, ((1, 5, 1),))),
    }
    sends = cluster.back(empty_reports() | reports)
    assert not [one for _, one in sends if isinstance(one, m.GroupMemberRemoved)]
    assert shown_by(cluster).alive == 0b11


@pytest.mark.parametrize("elsewhere", ["", "held", "a", "z"])
def test_retried_task_of_an_unannounced_member_is_refused(elsewhere: str) -> None:
    """When it is tried again it is refused, because the others have left. held: its host has a
    member of another group; a, z: such a member is found by its request, in a group whose name
    comes before or after."""
    cluster = RestartedPlanner()
    reports: dict[int, list[Any]] = {0: [], 1: [], 2: []}

    def make_other(name: str) -> None:
        cluster.say(join_request(1, 0, 7, name, 2, 0))
        asked = join_request(8, 2, 7, name, 2, 1)
        cluster.say(asked)
        shown = shown_by(cluster)
        reports[0].append(r.ReportedGroup(0, shown, ((0, 7, 1),)))
        held = r.ReportedGroup(2, shown, ((1, 7, 1),))
        reports[2].append(held if elsewhere == "held" else asked)

    if elsewhere in ("held", "a"):
        make_other("a")
    cluster.say(join_request(2, 0, 5, "g", 2, 0, task=task_at(1)))
    cluster.say(join_request(2, 2, 5, "g", 2, 1, task=task_at(2)))
    reports[0].append(r.ReportedGroup(0, shown_by(cluster), (), (0,)))
    if elsewhere == "z":
        make_other("z")
    reports[2].append(m.ClientLost(2, 5, 1))
    cluster.die()
    cluster.back(reports)
    sends = cluster.say(join_request(9, 1, 5, "g", 2, 1, task=task_at(2), tries=1))
    assert [type(one) for _, one in sends] == [m.GroupRefused], sends


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_first_announced_end_of_a_group_counts(order: tuple[int, ...]) -> None:
    """A task came back elsewhere and left. Its former host alone has not heard the end; it is not
    told one in which that task is dead."""
    cluster = RestartedPlanner()
    cluster.say(join_request(1, 0, 5, "g", 3, 0, task=task_at(1)))
    cluster.say(join_request(1, 1, 5, "g", 3, 1, task=task_at(2)))
    cluster.say(join_request(1, 0, 7, "g", 3, 2, task=task_at(3)))
    early = shown_by(cluster)
    cluster.say(m.ClientLost(0, 5, 1))
    cluster.say(m.GroupLeft("g", early.generation, 2, 0, 7, 1))
    cluster.say(join_request(2, 1, 6, "g", 3, 0, task=task_at(1), tries=1))
    cluster.say(m.GroupAdmitted("g", early.generation, 0))
    cluster.say(m.GroupLeft("g", early.generation, 1, 1, 5, 1))
    cluster.say(m.GroupLeft("g", early.generation, 0, 1, 6, 1))
    closed = cluster.latest(m.GroupClosed)
    assert closed.end is not None
    assert closed.end.dead == ()
    cluster.die()
    reports = {0: (r.ReportedGroup(0, early, (), (0, 2), (0,)),), 1: (closed.end,)}
    sends = cluster.back(empty_reports() | reports)
    (told,) = [one for node, one in sends if node == 0 and isinstance(one, m.GroupClosed)]
    cluster.die()
    ends = {0: (told.end,) if told.end else (), 1: (closed.end,), 2: ()}
    cluster.back({node: ends[node] for node in order})
    again = cluster.say(join_request(3, 1, 6, "g", 3, 0, task=task_at(1), tries=1))
    assert [type(one) for _, one in again] == [m.GroupMembers, m.GroupJoined], again


def test_join_refused_for_its_size_gets_no_rank() -> None:
    """It does not get the rank of a member that has died before it was answered."""
    cluster = RestartedPlanner()
    cluster.say(join_request(1, 0, 5, "g", 2, 0))
    cluster.say(join_request(1, 1, 5, "g", 2, 1))
    whole = shown_by(cluster)
    wrong = join_request(2, 1, 6, "g", 3, None)
    assert [type(one) for _, one in cluster.say(wrong)] == [m.GroupRefused]
    cluster.die()
    reports = {
        0: (r.ReportedGroup(0, whole, ((0, 5, 1),)),),
        1: (m.ClientLost(1, 5, 1), wrong),
    }
    sends = cluster.back(empty_reports() | reports)
    told = [type(one) for to, one in sends if to == 1 and not isinstance(one, m.GroupMembers)]
    assert told == [m.GroupRefused]


@pytest.mark.parametrize("other", [False, True])
def test_join_during_the_last_leaves_forms_a_new_group(other: bool) -> None:
    """Its task has never been a member before, and nothing of it has died. other: its host has a
    member of another group."""
    cluster = RestartedPlanner()
    for node in (0, 1):
        cluster.say(join_request(1, node, 5, "g", 2, node, task=task_at(node)))
    cluster.say(m.ClientLost(1, 5, 1))
    asked = join_request(2, 2, 5, "g", 2, 1, task=task_at(9))
    cluster.say(asked)
    latest = shown_by(cluster)
    assert latest.nodes == (0, 2)
    more: tuple[Any, ...] = ()
    if other:
        cluster.say(join_request(1, 2, 7, "other", 1, 0))
        more = (r.ReportedGroup(2, shown_by(cluster), ((0, 7, 1),)),)
    cluster.die()
    reports = {
        0: (r.ReportedGroup(0, latest, (), (0,)),),
        1: (r.ReportedGroup(1, latest, ()),),
        2: (*more, asked),
    }
    sends = cluster.back(reports)
    assert not [one for _, one in sends if isinstance(one, m.GroupRefused)]
