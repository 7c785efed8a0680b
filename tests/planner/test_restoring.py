"""A second planner, told by the nodes what they know, goes on where the first one was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from hoplite_mp._planner.manager_recovery import OWN_S, RESTORE_S
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._planner.program import participants
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol import reports as r
from tests.planner.scenario import letter_id

if TYPE_CHECKING:
    from collections.abc import Iterable

A, B, C = map(letter_id, "abc")
NBYTES = 64 << 20
NODES = 3


def members(*nodes: int) -> tuple[m.Member, ...]:
    return tuple(m.Member(node, 1, 700 + node, 1) for node in nodes)


class Cluster:
    """A planner before and one after, and all that was said to nodes."""

    def __init__(self) -> None:
        self.planner = Planner()
        self.told: list[Any] = []
        for node in range(NODES):
            self.say(m.NodeJoined(700 + node, 1, 1))

    def say(self, message: Any, now: float = 0.0) -> list[tuple[int, Any]]:
        sends = list(self.planner.step(message, now).sends)
        self.told += [one for _, one in sends]
        return sends

    def latest(self, kind: type) -> Any:
        return next(one for one in reversed(self.told) if isinstance(one, kind))

    def die(self) -> None:
        """The planner; nothing has come back yet."""
        self.planner = Planner(again=True)

    def back(
        self, reports: dict[int, Iterable[Any]], known: Iterable[int] = range(NODES)
    ) -> list[tuple[int, Any]]:
        """All of these nodes come and report; returns what is said, but for who is there."""
        sends = []
        for node, facts in reports.items():
            returned = r.NodeReturned(node, 1, NODES, members(*known))
            for message in (returned, *facts, r.Reported(node)):
                sends += self.say(message)
        admitted = [node for node, one in sends if isinstance(one, m.NodeAdmitted)]
        assert admitted == list(reports)
        return [send for send in sends if not isinstance(send[1], m.NodeAdmitted)]

    def group(self) -> m.GroupMembers:
        """Formed, of one member on each of the nodes 0 and 1."""
        for node in (0, 1):
            self.say(m.GroupJoinRequested(1, node, 5, 1, "g", 2, node))
        shown = self.latest(m.GroupMembers)
        assert isinstance(shown, m.GroupMembers)
        return shown


def nothing() -> dict[int, tuple[Any, ...]]:
    return {node: () for node in range(NODES)}


def test_nobody_is_lost_and_no_number_is_given_twice() -> None:
    cluster = Cluster()
    cluster.die()
    assert cluster.back(nothing()) == []
    ((_, admitted), *_) = cluster.say(m.NodeJoined(999, 1, 1))
    assert isinstance(admitted, m.NodeAdmitted)
    assert admitted.node == NODES
    assert [member.node for member in admitted.members] == [0, 1, 2, 3]


def test_the_number_of_a_node_that_is_gone_is_not_given_again() -> None:
    cluster = Cluster()
    cluster.say(m.NodeLost(2, 1))
    cluster.die()
    assert cluster.back({0: (), 1: ()}, known=(0, 1)) == []
    ((_, admitted), *_) = cluster.say(m.NodeJoined(999, 1, 1))
    assert admitted.node == NODES


def test_who_does_not_come_back_is_lost() -> None:
    cluster = Cluster()
    cluster.die()
    for node in (0, 1):
        cluster.say(r.NodeReturned(node, 1, NODES, members(0, 1, 2)))
        assert cluster.say(r.Reported(node)) == []
    assert cluster.planner.tick(RESTORE_S - 0.1).sends == ()
    plan = cluster.planner.tick(RESTORE_S)
    for node, admitted in plan.sends:
        assert isinstance(admitted, m.NodeAdmitted)
        assert [member.node for member in admitted.members] == [0, 1]
        assert admitted.node == node
    assert len(plan.sends) == 2
    assert cluster.say(m.FetchRequested(2, A, NBYTES, (0,))) == []


def test_who_comes_back_and_dies_is_lost() -> None:
    cluster = Cluster()
    cluster.die()
    cluster.say(r.NodeReturned(2, 1, NODES, members(0, 1, 2)))
    cluster.say(r.CopyHeld(2, A, NBYTES))
    cluster.say(r.Reported(2))
    cluster.say(m.NodeLost(2, 1))
    for node in (0, 1):
        cluster.say(r.NodeReturned(node, 1, NODES, members(0, 1, 2)))
        cluster.say(r.Reported(node))
    plan = cluster.planner.tick(RESTORE_S)
    assert [node for node, _ in plan.sends] == [0, 1]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_who_was_given_up_is_not_let_in_again(order: tuple[int, ...]) -> None:
    """It has not heard of its end, but one of the others has."""
    cluster = Cluster()
    cluster.die()
    known = {0: (0, 1, 2), 1: (0, 1), 2: (0, 1, 2)}
    sends = []
    for node in order:
        cluster.say(r.NodeReturned(node, 1, NODES, members(*known[node])))
        cluster.say(r.CopyHeld(node, A, NBYTES))
        sends += cluster.say(r.Reported(node))
    assert (2, m.GivenUp(0.0)) in sends
    admitted = {node: one for node, one in sends if isinstance(one, m.NodeAdmitted)}
    assert set(admitted) == {0, 1}
    assert [member.node for member in admitted[0].members] == [0, 1]
    assert cluster.say(m.NodeLost(2, 1)) == []


def test_a_later_life_is_not_the_one_that_was_given_up() -> None:
    cluster = Cluster()
    cluster.die()
    for node in (0, 1):
        cluster.say(r.NodeReturned(node, 1, NODES, members(0, 1, 2)))
        cluster.say(r.Reported(node))
    again = m.Member(2, 2, 702, 1)
    cluster.say(r.NodeReturned(2, 2, NODES, (*members(0, 1), again)))
    admitted = [node for node, one in cluster.say(r.Reported(2)) if isinstance(one, m.NodeAdmitted)]
    assert admitted == [0, 1, 2]


def test_a_running_copy_is_not_disturbed() -> None:
    cluster = Cluster()
    cluster.say(m.FetchRequested(1, A, NBYTES, (0,)))
    plan = cluster.latest(m.Distribute)
    cluster.die()
    reports = {
        0: (r.DistributeHeld(0, plan, False),),
        1: (r.DistributeHeld(1, plan, True),),
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


def test_a_copy_that_came_meanwhile() -> None:
    cluster = Cluster()
    cluster.say(m.FetchRequested(1, A, NBYTES, (0,)))
    plan = cluster.latest(m.Distribute)
    cluster.die()
    reports = {0: (r.DistributeHeld(0, plan, False),), 1: (r.CopyHeld(1, A, NBYTES),), 2: ()}
    over = m.Withdraw(plan.operation, A, plan.epoch)
    assert {*cluster.back(reports)} == {(0, over), (1, over)}
    # Its holder is known: who comes next has somebody else than the owner to ask.
    cluster.say(m.FetchRequested(2, A, NBYTES, (0,)))
    assert 1 in participants(cluster.latest(m.Distribute))


def test_who_calls_twice_says_all_anew() -> None:
    """Its first connection broke, and meanwhile the copy has come."""
    cluster = Cluster()
    cluster.say(m.FetchRequested(2, A, NBYTES, (0,)))
    plan = cluster.latest(m.Distribute)
    cluster.die()
    cluster.say(r.NodeReturned(2, 1, NODES, members(0, 1, 2)))
    cluster.say(r.DistributeHeld(2, plan, True))
    reports: dict[int, tuple[Any, ...]] = {
        2: (r.CopyHeld(2, A, NBYTES),),
        0: (r.DistributeHeld(0, plan, False), r.CopyHeld(0, A, NBYTES)),
        1: (),
    }
    over = m.Withdraw(plan.operation, A, plan.epoch)
    assert {*cluster.back(reports)} == {(0, over), (2, over)}
    entry = cluster.planner.copies.entries[A]
    assert not entry.transfers
    assert not entry.receiving


def test_a_plan_in_place_of_one_that_failed() -> None:
    """Only its source has read it: who receives goes by the first one, and says again why not."""
    cluster = Cluster()
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
        parent: (r.DistributeHeld(parent, first, False),),
        other: (r.DistributeHeld(other, second, False),),
        2: (r.DistributeHeld(2, first, True), failed),
    }
    sends = cluster.back(reports)
    plans = [one for node, one in sends if node == 2 and isinstance(one, m.Distribute)]
    assert [plan.stripes[0].owner for plan in plans] == [other]
    assert plans[0].epoch > second.epoch


def test_a_plan_that_its_source_has_not_read() -> None:
    cluster = Cluster()
    cluster.say(m.FetchRequested(1, A, NBYTES, (0,)))
    plan = cluster.latest(m.Distribute)
    cluster.die()
    assert cluster.back(nothing() | {1: (r.DistributeHeld(1, plan, True),)}) == [(0, plan)]


def test_a_plan_that_its_receiver_has_not_read() -> None:
    """It asks again, and there is a new one."""
    cluster = Cluster()
    asked = m.FetchRequested(1, A, NBYTES, (0,))
    cluster.say(asked)
    plan = cluster.latest(m.Distribute)
    cluster.die()
    sends = cluster.back(nothing() | {0: (r.DistributeHeld(0, plan, False),), 1: (asked,)})
    over = m.Withdraw(plan.operation, A, plan.epoch)
    new = cluster.latest(m.Distribute)
    assert new.epoch > plan.epoch
    assert {*sends[:2]} == {(0, over), (1, over)}
    assert {*sends[2:]} == {(0, new), (1, new)}


def test_a_source_that_died_with_the_planner() -> None:
    cluster = Cluster()
    cluster.say(m.FetchRequested(1, A, NBYTES, (2,)))
    plan = cluster.latest(m.Distribute)
    cluster.die()
    for node, facts in (
        (1, (r.DistributeHeld(1, plan, True),)),
        (0, (r.CopyHeld(0, A, NBYTES),)),
    ):
        cluster.say(r.NodeReturned(node, 1, NODES, members(0, 1, 2)))
        for fact in facts:
            cluster.say(fact)
        cluster.say(r.Reported(node))
    sends = cluster.planner.tick(RESTORE_S).sends
    plans = [one for node, one in sends if isinstance(one, m.Distribute) and node == 1]
    assert len(plans) == 1
    assert plans[0].sources == (0,)
    assert plans[0].epoch > plan.epoch


def fold(cluster: Cluster) -> tuple[m.ReduceRequested, m.ExecuteReduce]:
    request = m.ReduceRequested(
        7, 0, 1, (A, B, C), "sum", 3, kind="allreduce", ready=(0, 1, 2),
        ready_nbytes=(NBYTES,) * 3, ready_layouts=(b"x",) * 3, ready_holders=((0,), (1,), (2,)),
    )  # fmt: skip
    cluster.say(request)
    plan = cluster.latest(m.ExecuteReduce)
    assert isinstance(plan, m.ExecuteReduce)
    return request, plan


def test_a_running_fold_is_not_disturbed() -> None:
    cluster = Cluster()
    request, plan = fold(cluster)
    cluster.die()
    reports: dict[int, tuple[Any, ...]] = {
        node: (r.ReduceHeld(node, plan, node == 1),) for node in range(NODES)
    }
    reports[0] = (request, *reports[0])
    assert cluster.back(reports) == []
    assert cluster.say(m.StripesComplete(7, 1, 0)) == []
    commit = m.Commit(7, 1, (0, 1, 2), (0, 1, 2))
    assert {*cluster.say(m.StripesComplete(7, 1, 2))} == {(node, commit) for node in range(NODES)}
    assert not cluster.planner.reductions.operations


def test_a_fold_that_came_to_its_end_meanwhile() -> None:
    cluster = Cluster()
    request, plan = fold(cluster)
    cluster.die()
    reports: dict[int, tuple[Any, ...]] = {
        node: (r.ReduceHeld(node, plan, True),) for node in range(NODES)
    }
    reports[0] = (*reports[0], request)
    commit = m.Commit(7, 1, (0, 1, 2), (0, 1, 2))
    assert {*cluster.back(reports)} == {(node, commit) for node in range(NODES)}


def test_a_commit_that_some_have_read() -> None:
    cluster = Cluster()
    request, plan = fold(cluster)
    commit = m.Commit(7, 1, (0, 1, 2), (0, 1, 2))
    cluster.die()
    reports = {
        0: (request, r.ReduceHeld(0, plan, True)),
        1: (r.OperationEnded(1, commit),),
        2: (r.ReduceHeld(2, plan, True),),
    }
    assert {*cluster.back(reports)} == {(0, commit), (2, commit)}
    assert not cluster.planner.reductions.operations


def test_a_commit_comes_before_the_copies_of_its_result() -> None:
    """A node that has not heard of the commit does not have the result that it is to serve."""
    cluster = Cluster()
    request, plan = fold(cluster)
    commit = m.Commit(7, 1, (0, 1, 2), (0, 1, 2))
    cluster.say(m.FetchRequested(0, A, NBYTES, (2,)))
    copy = cluster.latest(m.Distribute)
    cluster.die()
    reports = {
        0: (request, r.OperationEnded(0, commit), r.DistributeHeld(0, copy, True)),
        1: (r.OperationEnded(1, commit),),
        2: (r.ReduceHeld(2, plan, True),),
    }
    told = [type(one) for node, one in cluster.back(reports) if node == 2]
    assert told[0] is m.Commit
    assert m.Distribute in told


def test_who_was_let_go_in_the_middle_has_not_seen_the_end() -> None:
    """A member whose source vanished was told to forget; the others go on."""
    cluster = Cluster()
    request, plan = fold(cluster)
    cluster.die()
    reports = {
        0: (request, r.ReduceHeld(0, plan, False)),
        1: (r.ReduceHeld(1, plan, False),),
        2: (r.OperationEnded(2, m.Forget(7)), r.ReduceHeld(2, plan, False)),
    }
    assert cluster.back(reports) == []
    commit = m.Commit(7, 1, (0, 1, 2), (0, 1, 2))
    cluster.die()
    reports[1] = (r.OperationEnded(1, commit),)
    assert {*cluster.back(reports)} == {(0, commit), (2, commit)}


@pytest.mark.parametrize("known", [(0, 1, 2), (1, 2)])
def test_the_first_node_is_waited_for(known: tuple[int, ...]) -> None:
    """It is that of the manager's host, and busy. known: to the others, who may take it for dead,
    if it was given up and its standby was promoted."""
    cluster = Cluster()
    cluster.die()
    for node in (1, 2):
        cluster.say(r.NodeReturned(node, 1, NODES, members(*known)))
        assert cluster.say(r.Reported(node)) == []
    plan = cluster.planner.tick(RESTORE_S)
    assert (plan.sends, plan.wake_at) == ((), OWN_S)
    cluster.say(r.NodeReturned(0, 1, NODES, members(0, 1, 2)))
    sends = cluster.say(r.Reported(0), RESTORE_S + 1)
    assert [node for node, _ in sends] == [1, 2, 0]


def test_half_a_report_is_no_report() -> None:
    """As long as it goes on it is waited for; who has stopped in the middle is given up."""
    cluster = Cluster()
    cluster.die()
    for node in (0, 1):
        cluster.say(r.NodeReturned(node, 1, NODES, members(0, 1, 2)))
        cluster.say(r.Reported(node))
    cluster.say(r.NodeReturned(2, 1, NODES, members(0, 1, 2)), 0.1)
    for turn in range(3):
        assert cluster.say(r.CopyHeld(2, A, NBYTES), 1.5 * (turn + 1)) == []
    assert cluster.planner.tick(4.5 + RESTORE_S - 0.1).sends == ()
    sends = cluster.planner.tick(4.5 + RESTORE_S).sends
    assert (2, m.GivenUp(0.0)) in sends
    admitted = [one for _, one in sends if isinstance(one, m.NodeAdmitted)]
    assert [[member.node for member in one.members] for one in admitted] == [[0, 1]] * 2
    assert cluster.say(r.Reported(2), 10.0) == []


def test_a_fold_that_nobody_waits_for() -> None:
    cluster = Cluster()
    _, plan = fold(cluster)
    cluster.die()
    reports = nothing() | {1: (r.ReduceHeld(1, plan, False),)}
    assert cluster.back(reports) == [(1, m.Forget(7))]


def test_a_failure_that_only_the_one_who_asked_has_read() -> None:
    cluster = Cluster()
    _, plan = fold(cluster)
    failed = m.OperationFailed(7, "value", "no")
    cluster.die()
    reports = nothing() | {
        0: (r.OperationEnded(0, failed),),
        1: (r.ReduceHeld(1, plan, False),),
    }
    assert cluster.back(reports) == [(1, m.Forget(7))]


def test_a_plan_of_which_some_have_an_earlier_one() -> None:
    cluster = Cluster()
    _, plan = fold(cluster)
    request = m.ReduceRequested(
        7, 0, 1, (A, B, C), "sum", 2, kind="allreduce", ready=(0, 1),
        ready_nbytes=(NBYTES,) * 2, ready_layouts=(b"x",) * 2, ready_holders=((0,), (1,)),
    )  # fmt: skip
    cluster = Cluster()
    cluster.say(request)
    second = cluster.latest(m.ExecuteReduce)
    later = msgspec.structs.replace(second, epoch=2)
    cluster.die()
    reports = {
        0: (request, r.ReduceHeld(0, later, False)),
        1: (r.ReduceHeld(1, plan, True),),
        2: (r.ReduceHeld(2, plan, True),),
    }
    assert {*cluster.back(reports)} == {(1, later), (2, m.Forget(7))}
    assert cluster.say(m.StripesComplete(7, 1, 1)) == []  # of the earlier one
    cluster.say(m.StripesComplete(7, 2, 0))
    commit = m.Commit(7, 2, (0, 1), (0, 1))
    assert {*cluster.say(m.StripesComplete(7, 2, 1))} == {(0, commit), (1, commit)}


def test_a_fold_that_waits_for_sources() -> None:
    cluster = Cluster()
    request = m.ReduceRequested(7, 0, 1, (A, B), "sum", 2, ready=(0,))
    cluster.say(request)
    cluster.die()
    assert cluster.back(nothing() | {0: (request,)}) == []
    assert cluster.say(m.SourceReady(7, 1, 0))


def test_what_was_counted_goes_on() -> None:
    """Although nothing of it runs any more."""
    cluster = Cluster()
    cluster.die()
    for node, counted in enumerate([(7, 0, 3), (9, 5, 0), (0, 0, 0)]):
        cluster.say(r.NodeReturned(node, 1, NODES, members(0, 1, 2), *counted))
        cluster.say(r.Reported(node))
    cluster.say(m.FetchRequested(1, A, NBYTES, (0,)))
    plan = cluster.latest(m.Distribute)
    assert (plan.epoch, plan.operation) == (10, (1 << 63) + 5)
    assert cluster.group().generation == 4


def test_reports_that_nobody_has_asked_for_change_nothing() -> None:
    cluster = Cluster()
    assert cluster.say(r.CopyHeld(1, A, NBYTES)) == []
    assert cluster.say(r.Reported(1)) == []
    assert not cluster.planner.copies.entries


def test_a_node_hears_of_numbers_it_has_never_met() -> None:
    """Node 2 was admitted and died with the manager, and node 1 had not heard of either: it must
    report as well what it holds of that node's objects."""
    cluster = Cluster()
    cluster.die()
    for node, known in ((0, (0, 1, 2)), (1, (0, 1))):
        cluster.say(r.NodeReturned(node, 1, len(known), members(*known)))
        cluster.say(r.Reported(node))
    sends = cluster.planner.tick(RESTORE_S).sends
    assert [(node, one.given) for node, one in sends if isinstance(one, m.NodeAdmitted)] == [
        (0, 3),
        (1, 3),
    ]
    for node in (0, 1):
        assert cluster.planner.owners._rounds
        cluster.say(m.HoldingsReported(node, 2, (), (), (), ()))
    assert not cluster.planner.owners._rounds
