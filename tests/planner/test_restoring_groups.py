"""A second planner, told by the nodes what they know: who is a member of which Group."""

from __future__ import annotations

import pytest

from hoplite_mp._protocol import membership as r
from hoplite_mp._protocol import messages as m
from tests.support.planner_clusters import RestartedPlanner, empty_reports


def test_group_restored_is_unchanged() -> None:
    cluster = RestartedPlanner()
    shown = cluster.group()
    cluster.die()
    reports = empty_reports() | {
        node: (r.ReportedGroup(node, shown, ((node, 5, 1),)),) for node in (0, 1)
    }
    assert cluster.back(reports) == []
    told = cluster.say(m.ClientLost(1, 5, 1))
    assert {node for node, _ in told} == {0, 1}
    assert isinstance(told[0][1], m.GroupMembers)
    assert (told[0][1].alive, told[0][1].version) == (1, shown.version + 1)


def test_member_that_died_without_a_manager_is_removed() -> None:
    cluster = RestartedPlanner()
    shown = cluster.group()
    cluster.die()
    reports = empty_reports() | {
        0: (r.ReportedGroup(0, shown, ((0, 5, 1),)),),
        1: (r.ReportedGroup(1, shown, ()),),
    }
    sends = cluster.back(reports)
    assert {node for node, _ in sends} == {0, 1}
    assert all(one.alive == 1 and one.version > shown.version for _, one in sends)


def test_member_that_died_before_its_host_was_informed_is_ended() -> None:
    """Its host has to say that nothing comes from it, because the others wait for that before they
    are told that its rank is gone; for that the host must know of the group."""
    cluster = RestartedPlanner()
    shown = cluster.group()
    assert shown.formed
    cluster.die()
    reports = empty_reports() | {0: (r.ReportedGroup(0, shown, ((0, 5, 1),)),)}
    sends = [send for send in cluster.back(reports) if isinstance(send[1], m.GroupMembers)]
    assert sends[0] == (1, shown)
    later = {node: one for node, one in sends[1:]}
    assert later.keys() == {0, 1}
    assert all(one.nodes == (0, None) and one.former == (1,) for one in later.values())


def test_member_of_a_lost_host_is_removed_from_an_older_version() -> None:
    """The manager died after it had told the nodes that the host is gone, and before it told them
    of the group's next version. Nobody reports that host again, so no call may wait for it."""
    cluster = RestartedPlanner()
    shown = cluster.group()
    cluster.die()
    reports = {0: (r.ReportedGroup(0, shown, ((0, 5, 1),)),), 2: ()}
    sends = cluster.back(reports, known=(0, 2))
    versions = [one for _, one in sends if isinstance(one, m.GroupMembers)]
    assert versions[-1].nodes == (0, None)
    assert versions[-1].former == ()
    assert all(node != 1 for node, _ in sends)


def test_version_known_to_some_nodes_is_sent_to_all() -> None:
    cluster = RestartedPlanner()
    first = cluster.group()
    cluster.say(m.ClientLost(1, 5, 1))
    second = cluster.latest(m.GroupMembers)
    assert second.version > first.version
    cluster.die()
    reports = empty_reports() | {
        0: (r.ReportedGroup(0, second, ((0, 5, 1),)),),
        1: (r.ReportedGroup(1, first, ()),),
    }
    assert cluster.back(reports) == [(1, second)]


def test_board_of_an_ended_group_belongs_to_the_next_group() -> None:
    """Seed 1816302: the earlier group was restored, and its members' nodes were told to make its
    board again, which erased that of the later group: its calls failed on one host alone."""
    cluster = RestartedPlanner()
    first = cluster.group()
    for node in (0, 1):
        cluster.say(m.ClientLost(node, 5, 1))
    for node in (0, 1):
        cluster.say(m.GroupJoinRequested(2, node, 6, 1, "later", 2, node))
    later = cluster.latest(m.GroupMembers)
    assert (later.board, later.generation) == (first.board, first.generation + 1)
    cluster.die()
    reports = empty_reports() | {
        0: (r.ReportedGroup(0, later, ((0, 6, 1),)),),
        1: (r.ReportedGroup(1, first, ()), m.GroupJoinRequested(2, 1, 6, 1, "later", 2, 1)),
    }
    sends = cluster.back(reports)
    about = {one.name for _, one in sends if isinstance(one, m.GroupMembers)}
    assert about == {"later"}
    closed = [(node, one) for node, one in sends if isinstance(one, m.GroupClosed)]
    assert closed == [(1, m.GroupClosed("g", first.generation, first.board))]


@pytest.mark.parametrize("later", [True, False])
def test_end_of_a_group_unknown_to_all_nodes_is_remembered(later: bool) -> None:
    """A task that died in it is tried again, and would wait for members that never come. later:
    another group has its board since then."""
    cluster = RestartedPlanner()
    tasks = [(701).to_bytes(8, "little") + at.to_bytes(8, "little") for at in (1, 2)]
    for rank, task in enumerate(tasks):
        cluster.say(m.GroupJoinRequested(1 + rank, 1, 5 + rank, 1, "g", 2, rank, task=task))
    first = cluster.latest(m.GroupMembers)
    cluster.say(m.ClientLost(1, 6, 1))  # rank 1
    second = cluster.latest(m.GroupMembers)
    cluster.say(m.GroupLeft("g", first.generation, 0, 1, 5, 1))
    reports = empty_reports()
    if later:
        cluster.say(m.GroupJoinRequested(3, 0, 6, 1, "later", 1, 0))
        shown = cluster.latest(m.GroupMembers)
        assert shown.board == first.board
        reports |= {0: (r.ReportedGroup(0, shown, ((0, 6, 1),)),)}
    cluster.die()
    reports |= {1: (r.ReportedGroup(1, second, (), (0, 1), (1,)),)}
    cluster.back(reports)
    closed = cluster.latest(m.GroupClosed)
    assert closed.end is not None
    assert closed.end.dead == (tasks[1],)
    again = m.GroupJoinRequested(9, 1, 7, 1, "g", 2, 1, task=tasks[1], tries=1)
    assert [type(one) for _, one in cluster.say(again)] == [m.GroupRefused]


def test_member_of_a_host_given_up_by_the_former_manager_is_removed() -> None:
    """Its host is in the cluster all the same, and has heard nothing of that: the member would wait
    for ever for calls that the others make without it."""
    cluster = RestartedPlanner()
    first = cluster.group()
    cluster.say(m.NodeLost(1, 1))
    second = cluster.latest(m.GroupMembers)
    assert second.nodes == (0, None)
    cluster.die()
    reports = empty_reports() | {
        0: (r.ReportedGroup(0, second, ((0, 5, 1),)),),
        1: (r.ReportedGroup(1, first, ((1, 5, 1),)),),
    }
    sends = cluster.back(reports)
    given_up = [(node, one) for node, one in sends if isinstance(one, m.GroupMemberRemoved)]
    ((node, one),) = given_up
    assert (node, one.rank, one.client, one.client_generation) == (1, 1, 5, 1)
    assert "declared dead" in one.message
    (shown,) = [one for node, one in sends if node == 1 and isinstance(one, m.GroupMembers)]
    assert shown.nodes == (0, None)


def test_formation_known_to_some_nodes_is_sent_to_all() -> None:
    """Who has not heard so would never have begun with call 0."""
    cluster = RestartedPlanner()
    whole = cluster.group()
    forming = next(one for one in cluster.told if isinstance(one, m.GroupMembers))
    assert (forming.formed, whole.formed, whole.first) == (False, True, True)
    cluster.die()
    reports = empty_reports() | {
        0: (r.ReportedGroup(0, forming, ((0, 5, 1),)),),
        1: (r.ReportedGroup(1, whole, ((1, 5, 1),)),),
    }
    sends = cluster.back(reports)
    assert [node for node, _ in sends] == [0, 1]
    assert all(one.first and one.version == whole.version + 1 for _, one in sends)


@pytest.mark.parametrize("rank", [None, 1])
def test_node_unaware_of_a_formed_group_starts_with_call_0(
    rank: int | None,
) -> None:
    """Its members are in from call 0 on: the others wait for them there."""
    cluster = RestartedPlanner()
    cluster.say(m.GroupJoinRequested(1, 0, 5, 1, "g", 2, 0))
    asked = m.GroupJoinRequested(1, 1, 5, 1, "g", 2, rank)
    cluster.say(asked)
    whole = cluster.latest(m.GroupMembers)
    cluster.die()
    reports = empty_reports() | {0: (r.ReportedGroup(0, whole, ((0, 5, 1),)),), 1: (asked,)}
    sends = cluster.back(reports)
    (answer,) = [one for node, one in sends if node == 1 and isinstance(one, m.GroupJoined)]
    assert (answer.rank, answer.formed, answer.admitted) == (1, True, True)
    shown = [one for node, one in sends if node == 1 and isinstance(one, m.GroupMembers)]
    assert (shown[-1].alive, shown[-1].joining, shown[-1].formed) == (0b11, 0, True)
    # Others have sent it messages since then, which are for it and not for one before it.
    assert shown[-1].version > whole.version == shown[-1].since_of(1)


@pytest.mark.parametrize("newcomer", [False, True])
def test_node_unaware_of_a_group_with_a_death_starts_with_call_0(
    newcomer: bool,
) -> None:
    """Seed 2042625: its members were taken for newcomers, and began with the third call, while they
    made their first one. newcomer: the member there is one indeed."""
    cluster = RestartedPlanner()
    joins = [m.GroupJoinRequested(1, node, 5, 1, "g", 3, node) for node in range(3)]
    for join in joins:
        cluster.say(join)
    cluster.say(m.ClientLost(2, 5, 1))
    asked = joins[1]
    if newcomer:
        cluster.say(m.ClientLost(1, 5, 1))
        asked = m.GroupJoinRequested(2, 1, 6, 1, "g", 3, 1)
        cluster.say(asked)
    shown = cluster.latest(m.GroupMembers)
    assert shown.nodes == (0, 1, None)
    assert not shown.first
    cluster.die()
    reports = empty_reports() | {0: (r.ReportedGroup(0, shown, ((0, 5, 1),)),), 1: (asked,)}
    sends = cluster.back(reports)
    (answer,) = [one for node, one in sends if node == 1 and isinstance(one, m.GroupJoined)]
    assert (answer.rank, answer.admitted) == (1, not newcomer)
    last = [one for node, one in sends if node == 1 and isinstance(one, m.GroupMembers)][-1]
    assert (last.first, last.alive) == ((False, 0b01) if newcomer else (True, 0b11))


def test_nodes_unaware_of_group_and_formation_start_with_call_0() -> None:
    """Seeds 2052625 and 2052799 of a build that told the latter first."""
    cluster = RestartedPlanner()
    joins = [m.GroupJoinRequested(1, node, 5, 1, "g", 3, node) for node in range(3)]
    shown = []
    for join in joins:
        cluster.say(join)
        shown.append(cluster.latest(m.GroupMembers))
    assert [one.formed for one in shown] == [False, False, True]
    cluster.die()
    reports = empty_reports() | {
        0: (r.ReportedGroup(0, shown[2], ((0, 5, 1),)),),
        1: (r.ReportedGroup(1, shown[1], ((1, 5, 1),)),),
        2: (joins[2],),
    }
    sends = cluster.back(reports)
    (answer,) = [one for node, one in sends if node == 2 and isinstance(one, m.GroupJoined)]
    assert (answer.rank, answer.admitted) == (2, True)
    last = [one for node, one in sends if node == 2 and isinstance(one, m.GroupMembers)][-1]
    assert (last.first, last.alive, last.joining) == (True, 0b111, 0)


def test_rank_owner_is_resolved_by_membership_version() -> None:
    """A newcomer is told from the member before it, also by the next manager."""
    cluster = RestartedPlanner()
    first = cluster.group()
    assert first.since_of(0) <= first.since_of(1) <= first.version
    cluster.say(m.ClientLost(1, 5, 1))
    cluster.say(m.GroupJoinRequested(1, 1, 6, 1, "g", 2, 1))
    shown = cluster.latest(m.GroupMembers)
    assert shown.since_of(0) == first.since_of(0)
    assert shown.since_of(1) == shown.version > first.version
    cluster.die()
    reports = empty_reports() | {
        0: (r.ReportedGroup(0, shown, ((0, 5, 1),)),),
        1: (r.ReportedGroup(1, shown, ((1, 6, 1),)),),
    }
    assert cluster.back(reports) == []
    cluster.say(m.ClientLost(0, 5, 1))
    later = cluster.latest(m.GroupMembers)
    assert later.version > shown.version
    assert later.since_of(1) == shown.since_of(1)


def test_returning_member_on_an_unaware_host_starts_with_a_later_call() -> None:
    """The group has made calls meanwhile, so it is taken in at a later one, not at call 0."""
    cluster = RestartedPlanner()
    cluster.group()
    cluster.say(m.ClientLost(1, 5, 1))
    asked = m.GroupJoinRequested(9, 2, 5, 1, "g", 2, 1)
    cluster.say(asked)
    latest = cluster.latest(m.GroupMembers)
    assert (latest.alive, latest.joining, latest.nodes) == (0b01, 0b10, (0, 2))
    cluster.die()
    reports = empty_reports() | {
        0: (r.ReportedGroup(0, latest, ((0, 5, 1),)),),
        1: (r.ReportedGroup(1, latest, ()),),
        2: (asked,),
    }
    sends = cluster.back(reports)
    (answer,) = [one for node, one in sends if node == 2 and isinstance(one, m.GroupJoined)]
    assert (answer.rank, answer.admitted) == (1, False)
    shown = [one for _, one in sends if isinstance(one, m.GroupMembers)]
    assert all((one.alive, one.first) == (0b01, False) for one in shown)
    assert shown[-1].joining == 0b10


@pytest.mark.parametrize("rank", [None, 1])
def test_unread_reply_that_formed_the_group_is_repeated(rank: int | None) -> None:
    """The others begin with call 0, and count on it."""
    cluster = RestartedPlanner()
    cluster.say(m.GroupJoinRequested(1, 0, 5, 1, "g", 2, 0))
    asked = m.GroupJoinRequested(1, 1, 5, 1, "g", 2, rank)
    cluster.say(asked)
    whole = cluster.latest(m.GroupMembers)
    cluster.die()
    reports = empty_reports() | {
        0: (r.ReportedGroup(0, whole, ((0, 5, 1),)),),
        1: (r.ReportedGroup(1, whole, ()), asked),
    }
    ((node, answer),) = cluster.back(reports)
    assert (node, answer.rank, answer.admitted) == (1, 1, True)


def test_members_of_the_next_group_do_not_join_the_ended_one() -> None:
    """All have left, as the manager had not heard when it died: who asks for the same name is not
    let in to the group that is over."""
    cluster = RestartedPlanner()
    whole = cluster.group()
    cluster.die()
    again = [m.GroupJoinRequested(2, node, 5, 1, "g", 2, None) for node in (0, 1)]
    reports = empty_reports() | {
        node: (r.ReportedGroup(node, whole, (), (node,)), again[node]) for node in (0, 1)
    }
    sends = cluster.back(reports)
    assert (0, m.GroupClosed("g", whole.generation, whole.board)) in sends
    joined = [one for _, one in sends if isinstance(one, m.GroupJoined)]
    assert {one.generation for one in joined} == {whole.generation + 1}
    assert [one.rank for one in joined] == [0, 1]


def test_report_of_a_node_without_members_is_awaited() -> None:
    """What was decided while it had one it may be the only one to know."""
    cluster = RestartedPlanner()
    assert cluster.group().former == ()
    cluster.say(m.GroupLeft("g", cluster.group().generation, 1, 1, 5, 1))
    assert cluster.latest(m.GroupMembers).former == (1,)
    cluster.say(m.NodeLost(1, 1))
    assert cluster.latest(m.GroupMembers).former == ()


def test_join_without_a_reply_is_answered() -> None:
    cluster = RestartedPlanner()
    asked = m.GroupJoinRequested(9, 1, 5, 1, "g", 1, 0)
    cluster.say(asked)
    cluster.die()
    sends = cluster.back(empty_reports() | {1: (asked,)})
    assert [type(one) for _, one in sends] == [m.GroupMembers, m.GroupJoined]


def test_death_of_the_last_member_ends_the_group() -> None:
    cluster = RestartedPlanner()
    shown = cluster.group()
    cluster.die()
    reports = empty_reports() | {node: (r.ReportedGroup(node, shown, ()),) for node in (0, 1)}
    sends = cluster.back(reports)
    assert [type(one) for _, one in sends] == [m.GroupClosed] * 2
    fresh = cluster.say(m.GroupJoinRequested(2, 0, 6, 1, "g", 1, 0))
    assert fresh[-1][1].generation > shown.generation


def test_incomplete_split_group_waits_for_its_members() -> None:
    """The next manager waits for the one that has not joined yet, until it dies."""
    cluster = RestartedPlanner()
    whole = cluster.group()
    founders = ((0, 0, 5, 1), (1, 1, 5, 1))
    about = {"parent": whole.generation, "founders": founders}
    cluster.say(m.GroupJoinRequested(7, 0, 5, 1, "part", 2, 0, **about))
    shown = cluster.latest(m.GroupMembers)
    assert (shown.name, shown.formed, shown.founders_joined) == ("part", False, 1)
    cluster.die()
    reports = empty_reports() | {
        0: (r.ReportedGroup(0, whole, ((0, 5, 1),)), r.ReportedGroup(0, shown, ((0, 5, 1),))),
        1: (r.ReportedGroup(1, whole, ((1, 5, 1),)),),
    }
    assert cluster.back(reports) == []
    cluster.say(m.ClientLost(1, 5, 1))
    told = cluster.latest(m.GroupMembers)
    assert (told.name, told.formed, told.alive, told.first) == ("part", True, 1, True)
