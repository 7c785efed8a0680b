"""A second planner, told by the nodes what they know, goes on where the first one was."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hoplite_mp._planner.manager_recovery import OWN_S, RESTORE_S
from hoplite_mp._planner.program import participants
from hoplite_mp._protocol import membership as r
from hoplite_mp._protocol import messages as m
from tests.support.planner_clusters import (
    NBYTES,
    NODES,
    A,
    B,
    C,
    RestartedPlanner,
    empty_reports,
    planner_members,
    start_fold,
)


def test_restored_members_keep_their_numbers() -> None:
    cluster = RestartedPlanner()
    cluster.die()
    assert cluster.back(empty_reports()) == []
    ((_, admitted), *_) = cluster.say(m.NodeJoined(999, 1, 1))
    assert isinstance(admitted, m.NodeAdmitted)
    assert admitted.node == NODES
    assert [member.node for member in admitted.members] == [0, 1, 2, 3]


def test_number_of_a_lost_node_is_not_assigned_again() -> None:
    cluster = RestartedPlanner()
    cluster.say(m.NodeLost(2, 1))
    cluster.die()
    assert cluster.back({0: (), 1: ()}, known=(0, 1)) == []
    ((_, admitted), *_) = cluster.say(m.NodeJoined(999, 1, 1))
    assert admitted.node == NODES


def test_member_that_does_not_return_is_lost() -> None:
    cluster = RestartedPlanner()
    cluster.die()
    for node in (0, 1):
        cluster.say(r.NodeReturned(node, 1, NODES, planner_members(0, 1, 2)))
        assert cluster.say(r.ReportComplete(node)) == []
    assert cluster.planner.tick(RESTORE_S - 0.1).sends == ()
    plan = cluster.planner.tick(RESTORE_S)
    for node, admitted in plan.sends:
        assert isinstance(admitted, m.NodeAdmitted)
        assert [member.node for member in admitted.members] == [0, 1]
        assert admitted.node == node
    assert len(plan.sends) == 2
    assert cluster.say(m.FetchRequested(2, A, NBYTES, (0,))) == []


def test_member_that_returns_and_dies_is_lost() -> None:
    cluster = RestartedPlanner()
    cluster.die()
    cluster.say(r.NodeReturned(2, 1, NODES, planner_members(0, 1, 2)))
    cluster.say(r.ReportedCopy(2, A, NBYTES))
    cluster.say(r.ReportComplete(2))
    cluster.say(m.NodeLost(2, 1))
    for node in (0, 1):
        cluster.say(r.NodeReturned(node, 1, NODES, planner_members(0, 1, 2)))
        cluster.say(r.ReportComplete(node))
    plan = cluster.planner.tick(RESTORE_S)
    assert [node for node, _ in plan.sends] == [0, 1]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_member_declared_dead_before_is_refused(order: tuple[int, ...]) -> None:
    """It has not heard of its end, but one of the others has."""
    cluster = RestartedPlanner()
    cluster.die()
    known = {0: (0, 1, 2), 1: (0, 1), 2: (0, 1, 2)}
    sends = []
    for node in order:
        cluster.say(r.NodeReturned(node, 1, NODES, planner_members(*known[node])))
        cluster.say(r.ReportedCopy(node, A, NBYTES))
        sends += cluster.say(r.ReportComplete(node))
    assert (2, m.DeclaredDead(0.0)) in sends
    admitted = {node: one for node, one in sends if isinstance(one, m.NodeAdmitted)}
    assert set(admitted) == {0, 1}
    assert [member.node for member in admitted[0].members] == [0, 1]
    assert cluster.say(m.NodeLost(2, 1)) == []


def test_later_incarnation_of_a_dead_member_is_admitted() -> None:
    cluster = RestartedPlanner()
    cluster.die()
    for node in (0, 1):
        cluster.say(r.NodeReturned(node, 1, NODES, planner_members(0, 1, 2)))
        cluster.say(r.ReportComplete(node))
    again = m.Member(2, 2, 702, 1)
    cluster.say(r.NodeReturned(2, 2, NODES, (*planner_members(0, 1), again)))
    admitted = [
        node for node, one in cluster.say(r.ReportComplete(2)) if isinstance(one, m.NodeAdmitted)
    ]
    assert admitted == [0, 1, 2]


def test_running_copy_continues_after_a_restart() -> None:
    cluster = RestartedPlanner()
    cluster.say(m.FetchRequested(1, A, NBYTES, (0,)))
    plan = cluster.latest(m.Distribute)
    cluster.die()
    reports = {
        0: (r.ReportedDistribute(0, plan, False),),
        1: (r.ReportedDistribute(1, plan, True),),
        2: (),
    }
    assert cluster.back(reports) == []
    over = m.Withdraw(plan.operation, A, plan.epoch)
    assert {*cluster.say(m.FetchComplete(1, A, plan.epoch))} == {(0, over), (1, over)}
    cluster.say(m.FetchRequested(2, A, NBYTES, (0,)))
    later = cluster.latest(m.Distribute)
    assert later.operation == plan.operation  # of one and the same object, as 1 still has it
    assert later.epoch > plan.epoch
    cluster.say(m.FetchRequested(2, B, NBYTES, (0,)))
    assert cluster.latest(m.Distribute).operation > plan.operation


def test_copy_completed_without_a_manager_is_recorded() -> None:
    cluster = RestartedPlanner()
    cluster.say(m.FetchRequested(1, A, NBYTES, (0,)))
    plan = cluster.latest(m.Distribute)
    cluster.die()
    reports = {
        0: (r.ReportedDistribute(0, plan, False),),
        1: (r.ReportedCopy(1, A, NBYTES),),
        2: (),
    }
    over = m.Withdraw(plan.operation, A, plan.epoch)
    assert {*cluster.back(reports)} == {(0, over), (1, over)}
    # Its holder is known: who comes next has somebody else than the owner to ask.
    cluster.say(m.FetchRequested(2, A, NBYTES, (0,)))
    assert 1 in participants(cluster.latest(m.Distribute))


def test_second_report_of_a_node_replaces_the_first() -> None:
    """Its first connection broke, and meanwhile the copy has come."""
    cluster = RestartedPlanner()
    cluster.say(m.FetchRequested(2, A, NBYTES, (0,)))
    plan = cluster.latest(m.Distribute)
    cluster.die()
    cluster.say(r.NodeReturned(2, 1, NODES, planner_members(0, 1, 2)))
    cluster.say(r.ReportedDistribute(2, plan, True))
    reports: dict[int, tuple[Any, ...]] = {
        2: (r.ReportedCopy(2, A, NBYTES),),
        0: (r.ReportedDistribute(0, plan, False), r.ReportedCopy(0, A, NBYTES)),
        1: (),
    }
    over = m.Withdraw(plan.operation, A, plan.epoch)
    assert {*cluster.back(reports)} == {(0, over), (2, over)}
    entry = cluster.planner.copies.entries[A]
    assert not entry.transfers
    assert not entry.receiving


def test_replacement_plan_read_only_by_its_source_is_repeated() -> None:
    """Only its source has read it: who receives goes by the first one, and says again why not."""
    cluster = RestartedPlanner()
    cluster.say(m.FetchRequested(2, A, NBYTES, (0, 1)))
    first = cluster.latest(m.Distribute)
    parent = first.stripes[0].owner
    failed = m.FetchFailed(2, A, first.epoch, parent, "reset")
    cluster.say(failed)
    second = cluster.latest(m.Distribute)
    other = second.stripes[0].owner
    assert {parent, other} == {0, 1}
    cluster.die()
    reports: dict[int, tuple[Any, ...]] = {
        parent: (r.ReportedDistribute(parent, first, False),),
        other: (r.ReportedDistribute(other, second, False),),
        2: (r.ReportedDistribute(2, first, True), failed),
    }
    sends = cluster.back(reports)
    plans = [one for node, one in sends if node == 2 and isinstance(one, m.Distribute)]
    assert [plan.stripes[0].owner for plan in plans] == [other]
    assert plans[0].epoch > second.epoch


def test_plan_unread_by_its_source_is_sent_again() -> None:
    cluster = RestartedPlanner()
    cluster.say(m.FetchRequested(1, A, NBYTES, (0,)))
    plan = cluster.latest(m.Distribute)
    cluster.die()
    assert cluster.back(empty_reports() | {1: (r.ReportedDistribute(1, plan, True),)}) == [
        (0, plan)
    ]


def test_plan_unread_by_its_receiver_is_replaced() -> None:
    """It asks again, and there is a new one."""
    cluster = RestartedPlanner()
    asked = m.FetchRequested(1, A, NBYTES, (0,))
    cluster.say(asked)
    plan = cluster.latest(m.Distribute)
    cluster.die()
    sends = cluster.back(
        empty_reports() | {0: (r.ReportedDistribute(0, plan, False),), 1: (asked,)}
    )
    over = m.Withdraw(plan.operation, A, plan.epoch)
    new = cluster.latest(m.Distribute)
    assert new.epoch > plan.epoch
    assert {*sends[:2]} == {(0, over), (1, over)}
    assert {*sends[2:]} == {(0, new), (1, new)}


def test_source_that_died_with_the_manager_is_replaced() -> None:
    cluster = RestartedPlanner()
    cluster.say(m.FetchRequested(1, A, NBYTES, (2,)))
    plan = cluster.latest(m.Distribute)
    cluster.die()
    for node, facts in (
        (1, (r.ReportedDistribute(1, plan, True),)),
        (0, (r.ReportedCopy(0, A, NBYTES),)),
    ):
        cluster.say(r.NodeReturned(node, 1, NODES, planner_members(0, 1, 2)))
        for fact in facts:
            cluster.say(fact)
        cluster.say(r.ReportComplete(node))
    sends = cluster.planner.tick(RESTORE_S).sends
    plans = [one for node, one in sends if isinstance(one, m.Distribute) and node == 1]
    assert len(plans) == 1
    assert plans[0].sources == (0,)
    assert plans[0].epoch > plan.epoch


def test_running_fold_continues_after_a_restart() -> None:
    cluster = RestartedPlanner()
    request, plan = start_fold(cluster)
    cluster.die()
    reports: dict[int, tuple[Any, ...]] = {
        node: (r.ReportedReduce(node, plan, node == 1),) for node in range(NODES)
    }
    reports[0] = (request, *reports[0])
    assert cluster.back(reports) == []
    assert cluster.say(m.StripesComplete(7, 1, 0)) == []
    commit = m.Commit(7, 1, (0, 1, 2), (0, 1, 2))
    assert {*cluster.say(m.StripesComplete(7, 1, 2))} == {(node, commit) for node in range(NODES)}
    assert not cluster.planner.reductions.operations


def test_fold_completed_without_a_manager_is_committed() -> None:
    cluster = RestartedPlanner()
    request, plan = start_fold(cluster)
    cluster.die()
    reports: dict[int, tuple[Any, ...]] = {
        node: (r.ReportedReduce(node, plan, True),) for node in range(NODES)
    }
    reports[0] = (*reports[0], request)
    commit = m.Commit(7, 1, (0, 1, 2), (0, 1, 2))
    assert {*cluster.back(reports)} == {(node, commit) for node in range(NODES)}


def test_commit_read_by_some_nodes_is_sent_to_all() -> None:
    cluster = RestartedPlanner()
    request, plan = start_fold(cluster)
    commit = m.Commit(7, 1, (0, 1, 2), (0, 1, 2))
    cluster.die()
    reports = {
        0: (request, r.ReportedReduce(0, plan, True)),
        1: (r.OperationEnded(1, commit),),
        2: (r.ReportedReduce(2, plan, True),),
    }
    assert {*cluster.back(reports)} == {(0, commit), (2, commit)}
    assert not cluster.planner.reductions.operations


def test_commit_precedes_copies_of_its_result() -> None:
    """A node that has not heard of the commit does not have the result that it is to serve."""
    cluster = RestartedPlanner()
    request, plan = start_fold(cluster)
    commit = m.Commit(7, 1, (0, 1, 2), (0, 1, 2))
    cluster.say(m.FetchRequested(0, A, NBYTES, (2,)))
    copy = cluster.latest(m.Distribute)
    cluster.die()
    reports = {
        0: (request, r.OperationEnded(0, commit), r.ReportedDistribute(0, copy, True)),
        1: (r.OperationEnded(1, commit),),
        2: (r.ReportedReduce(2, plan, True),),
    }
    told = [type(one) for node, one in cluster.back(reports) if node == 2]
    assert told[0] is m.Commit
    assert m.Distribute in told


def test_fold_with_a_released_member_continues() -> None:
    """A member whose source vanished was told to forget; the others go on."""
    cluster = RestartedPlanner()
    request, plan = start_fold(cluster)
    cluster.die()
    reports = {
        0: (request, r.ReportedReduce(0, plan, False)),
        1: (r.ReportedReduce(1, plan, False),),
        2: (r.OperationEnded(2, m.Forget(7)), r.ReportedReduce(2, plan, False)),
    }
    assert cluster.back(reports) == []
    commit = m.Commit(7, 1, (0, 1, 2), (0, 1, 2))
    cluster.die()
    reports[1] = (r.OperationEnded(1, commit),)
    assert {*cluster.back(reports)} == {(0, commit), (2, commit)}


@pytest.mark.parametrize("known", [(0, 1, 2), (1, 2)])
def test_restarted_manager_waits_for_its_own_node(known: tuple[int, ...]) -> None:
    """It is that of the manager's host, and busy. known: to the others, who may take it for dead,
    if it was given up and its standby was promoted."""
    cluster = RestartedPlanner()
    cluster.die()
    for node in (1, 2):
        cluster.say(r.NodeReturned(node, 1, NODES, planner_members(*known)))
        assert cluster.say(r.ReportComplete(node)) == []
    plan = cluster.planner.tick(RESTORE_S)
    assert (plan.sends, plan.wake_at) == ((), OWN_S)
    cluster.say(r.NodeReturned(0, 1, NODES, planner_members(0, 1, 2)))
    sends = cluster.say(r.ReportComplete(0), RESTORE_S + 1)
    assert [node for node, _ in sends] == [1, 2, 0]


def test_incomplete_report_is_ignored() -> None:
    """As long as it goes on it is waited for; who has stopped in the middle is given up."""
    cluster = RestartedPlanner()
    cluster.die()
    for node in (0, 1):
        cluster.say(r.NodeReturned(node, 1, NODES, planner_members(0, 1, 2)))
        cluster.say(r.ReportComplete(node))
    cluster.say(r.NodeReturned(2, 1, NODES, planner_members(0, 1, 2)), 0.1)
    for turn in range(3):
        assert cluster.say(r.ReportedCopy(2, A, NBYTES), 1.5 * (turn + 1)) == []
    assert cluster.planner.tick(4.5 + RESTORE_S - 0.1).sends == ()
    sends = cluster.planner.tick(4.5 + RESTORE_S).sends
    assert (2, m.DeclaredDead(0.0)) in sends
    admitted = [one for _, one in sends if isinstance(one, m.NodeAdmitted)]
    assert [[member.node for member in one.members] for one in admitted] == [[0, 1]] * 2
    assert cluster.say(r.ReportComplete(2), 10.0) == []


def test_fold_without_a_requester_is_dropped() -> None:
    cluster = RestartedPlanner()
    _, plan = start_fold(cluster)
    cluster.die()
    reports = empty_reports() | {1: (r.ReportedReduce(1, plan, False),)}
    assert cluster.back(reports) == [(1, m.Forget(7))]


def test_failure_known_to_the_requester_is_forgotten_elsewhere() -> None:
    cluster = RestartedPlanner()
    _, plan = start_fold(cluster)
    failed = m.OperationFailed(7, "value", "no")
    cluster.die()
    reports = empty_reports() | {
        0: (r.OperationEnded(0, failed),),
        1: (r.ReportedReduce(1, plan, False),),
    }
    assert cluster.back(reports) == [(1, m.Forget(7))]


def test_latest_epoch_of_a_plan_is_sent_to_all() -> None:
    cluster = RestartedPlanner()
    _, plan = start_fold(cluster)
    request = m.ReduceRequested(
        7, 0, 1, (A, B, C), "sum", 2, kind="allreduce", ready=(0, 1),
        ready_nbytes=(NBYTES,) * 2, ready_layouts=(b"x",) * 2, ready_holders=((0,), (1,)),
    )  # fmt: skip
    cluster = RestartedPlanner()
    cluster.say(request)
    second = cluster.latest(m.ExecuteReduce)
    later = msgspec.structs.replace(second, epoch=2)
    cluster.die()
    reports = {
        0: (request, r.ReportedReduce(0, later, False)),
        1: (r.ReportedReduce(1, plan, True),),
        2: (r.ReportedReduce(2, plan, True),),
    }
    assert {*cluster.back(reports)} == {(1, later), (2, m.Forget(7))}
    assert cluster.say(m.StripesComplete(7, 1, 1)) == []  # of the earlier one
    cluster.say(m.StripesComplete(7, 2, 0))
    commit = m.Commit(7, 2, (0, 1), (0, 1))
    assert {*cluster.say(m.StripesComplete(7, 2, 1))} == {(0, commit), (1, commit)}


def test_fold_waiting_for_sources_is_restored() -> None:
    cluster = RestartedPlanner()
    request = m.ReduceRequested(7, 0, 1, (A, B), "sum", 2, ready=(0,))
    cluster.say(request)
    cluster.die()
    assert cluster.back(empty_reports() | {0: (request,)}) == []
    assert cluster.say(m.SourceReady(7, 1, 0))


def test_counters_continue_after_a_restart() -> None:
    """Although nothing of it runs any more."""
    cluster = RestartedPlanner()
    cluster.die()
    for node, counted in enumerate([(7, 0, 3), (9, 5, 0), (0, 0, 0)]):
        cluster.say(r.NodeReturned(node, 1, NODES, planner_members(0, 1, 2), *counted))
        cluster.say(r.ReportComplete(node))
    cluster.say(m.FetchRequested(1, A, NBYTES, (0,)))
    plan = cluster.latest(m.Distribute)
    assert (plan.epoch, plan.operation) == (10, (1 << 63) + 5)
    assert cluster.group().generation == 4


def test_unrequested_reports_change_nothing() -> None:
    cluster = RestartedPlanner()
    assert cluster.say(r.ReportedCopy(1, A, NBYTES)) == []
    assert cluster.say(r.ReportComplete(1)) == []
    assert not cluster.planner.copies.entries


def test_node_is_informed_of_unknown_lost_numbers() -> None:
    """Node 2 was admitted and died with the manager, and node 1 had not heard of either: it must
    report as well what it holds of that node's objects."""
    cluster = RestartedPlanner()
    cluster.die()
    for node, known in ((0, (0, 1, 2)), (1, (0, 1))):
        cluster.say(r.NodeReturned(node, 1, len(known), planner_members(*known)))
        cluster.say(r.ReportComplete(node))
    sends = cluster.planner.tick(RESTORE_S).sends
    assert [(node, one.given) for node, one in sends if isinstance(one, m.NodeAdmitted)] == [
        (0, 3),
        (1, 3),
    ]
    for node in (0, 1):
        assert cluster.planner.owners._rounds
        cluster.say(m.OrphansReported(node, 2, (), (), (), ()))
    assert not cluster.planner.owners._rounds
