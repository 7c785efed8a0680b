"""What the published Hoplite got wrong, where a planner could get it wrong again: one test each."""

from __future__ import annotations

import pytest

from hoplite_mp._planner.link_speeds import LinkSpeeds
from hoplite_mp._planner.program import program_of
from hoplite_mp._protocol import messages as m
from tests.support.planner_clusters import NBYTES, A, B, PlannedCluster
from tests.support.planner_edges import check_edges
from tests.support.planner_scenarios import letter_id


def parents(plan: m.Distribute, node: int) -> set[int]:
    return {pull.parent for pull in program_of(plan, node).pulls}


def test_1_links_are_measured_not_constants() -> None:
    cluster = PlannedCluster(3)
    for node, rate in enumerate((1e8, 1e8, 2.5e7)):
        cluster.say(m.HostMeasured(node, rate, rate))
    cluster.ask(1, A, B, letter_id("c"), kind="allreduce")
    for index in (0, 1):
        cluster.say(m.SourceReady(1, index, index, NBYTES))
    plan = cluster.plan(m.SourceReady(1, 2, 2, NBYTES))
    assert 2 not in {stripe.owner for stripe in plan.stripes}


def test_3_allreduce_moves_at_most_twice_the_object_through_a_node() -> None:
    cluster = PlannedCluster(4)
    cluster.ask(1, A, B, letter_id("c"), letter_id("d"), kind="allreduce")
    for index in range(3):
        cluster.say(m.SourceReady(1, index, index, NBYTES))
    plan = cluster.plan(m.SourceReady(1, 3, 3, NBYTES))
    for node in range(4):
        pulls = program_of(plan, node).pulls
        pulled = sum(pull.end_share - pull.begin_share for pull in pulls)
        assert abs(pulled / m.SHARES - 1.5) < 0.001  # 2 (n - 1) / n


def test_5_gather_copies_sources_concurrently() -> None:
    cluster = PlannedCluster(3)
    cluster.ask(1, A, B, kind="gather", to=(0,))
    cluster.say(m.SourceReady(1, 0, 1))
    plan = cluster.plan(m.SourceReady(1, 1, 2))
    program = program_of(plan, 0)
    assert len(program.pulls) == 2
    assert program.inbound_max >= 2


def test_6_death_in_a_chain_gives_new_parents_only_to_its_children() -> None:
    cluster = PlannedCluster(4)
    cluster.fetch(1, 0)
    cluster.fetch(2, 0)
    assert parents(cluster.fetch(3, 0), 3) == {2}
    sends = cluster.say(m.NodeLost(2, 1))
    new = [one for _, one in sends if isinstance(one, m.Distribute)]
    assert {one.receivers for one in new} == {(3,)}  # node 1 streams on
    assert parents(new[0], 3) == {1}


def test_7_old_epoch_cannot_commit_after_a_membership_change() -> None:
    cluster = PlannedCluster(2)
    message = m.ReduceRequested(1, 0, 1, (A, B, letter_id("c")), "sum", 2, to=(0,))
    cluster.say(message)
    cluster.say(m.SourceReady(1, 0, 0, 8))
    first = cluster.plan(m.SourceReady(1, 1, 1, 8))
    cluster.say(m.SourceReady(1, 2, 0, 8))
    sends = cluster.say(m.NodeLost(1, 1))
    second = next(one for _, one in sends if isinstance(one, m.ExecuteReduce))
    assert (first.members, second.members) == ((0, 1), (0, 2))
    assert second.epoch == first.epoch + 1
    assert cluster.say(m.StripesComplete(1, first.epoch, 0)) == []
    commits = cluster.say(m.StripesComplete(1, second.epoch, 0))
    assert [one for _, one in commits] == [m.Commit(1, 2, (0, 2), (0,))]


def test_8_object_in_two_reductions_counts_once_in_each() -> None:
    cluster = PlannedCluster(2)
    cluster.ask(1, A, B)
    cluster.ask(2, B, A)
    for number in (1, 2):
        cluster.say(m.SourceReady(number, 0, 0, 8))
        plan = cluster.plan(m.SourceReady(number, 1, 1, 8))
        assert plan.members == (0, 1)
        check_edges(plan)


def test_9_object_put_again_after_a_loss_is_not_a_duplicate() -> None:
    cluster = PlannedCluster(3)
    cluster.fetch(1, 0)
    cluster.say(m.ObjectDeleted(A))
    assert not cluster.planner.copies.entries
    again = cluster.fetch(1, 2)
    assert parents(again, 1) == {2}
    # What is said about the first one is not taken for the second.
    assert cluster.say(m.FetchComplete(1, A, 1)) == []
    assert cluster.say(m.FetchComplete(1, A, again.epoch)) != []


def test_10_two_simultaneous_failures_are_survived() -> None:
    cluster = PlannedCluster(5)
    cluster.fetch(1, 0)
    cluster.fetch(2, 0)
    cluster.fetch(3, 0)
    cluster.say(m.NodeLost(1, 1))
    sends = cluster.say(m.NodeLost(2, 1))
    new = next(one for _, one in sends if isinstance(one, m.Distribute))
    assert parents(new, 3) == {0}
    refused = cluster.say(m.NodeLost(0, 1))
    assert any(node == 3 and isinstance(one, m.FetchRefused) for node, one in refused)
    assert not cluster.planner.copies.entries


def test_11_failed_parent_is_excluded_only_for_its_receiver() -> None:
    cluster = PlannedCluster(4)
    seen = cluster.fetch(2, 0, 1)
    (parent,) = parents(seen, 2)
    sends = cluster.say(m.FetchFailed(2, A, seen.epoch, parent, "reset"))
    new = next(one for _, one in sends if isinstance(one, m.Distribute))
    assert parent not in parents(new, 2)
    # Late, about a plan that is over: nobody else is blamed for it.
    (other,) = parents(new, 2)
    assert cluster.say(m.FetchFailed(2, A, seen.epoch, other, "reset")) == []
    # The blamed one is not evicted: it serves the next receiver.
    assert parent in cluster.planner.copies.entries[A].whole
    assert parents(cluster.fetch(3, 0, 1), 3) == {parent}


def test_12_dead_destination_leaves_no_state() -> None:
    cluster = PlannedCluster(3)
    cluster.ask(1, A, B, to=(2,))
    cluster.say(m.SourceReady(1, 0, 0, NBYTES))
    cluster.say(m.SourceReady(1, 1, 1, NBYTES))
    sends = cluster.say(m.NodeLost(2, 1))
    failed = [one for _, one in sends if isinstance(one, m.OperationFailed)]
    assert [one.error for one in failed] == ["lost"]
    assert (1, m.Forget(1)) in sends
    assert not cluster.planner.reductions.operations
    plan = cluster.fetch(1, 0)
    cluster.say(m.FetchComplete(1, A, plan.epoch))
    cluster.say(m.CopyDropped(1, A))
    cluster.say(m.CopyDropped(0, A))
    assert not cluster.planner.copies.entries


def test_copy_without_a_living_holder_is_refused() -> None:
    def refused(*to: int, kind: str) -> bool:
        cluster = PlannedCluster(3)
        cluster.say(m.NodeLost(2, 1))
        message = m.ReduceRequested(1, 0, 1, (A, B), "sum", 2, kind=kind, to=to)
        return any(isinstance(one, m.OperationFailed) for _, one in cluster.say(message))

    assert refused(2, kind="allreduce")
    assert not refused(1, 2, kind="allreduce")
    assert refused(2, kind="reduce")
    assert not refused(1, kind="reduce")


@pytest.mark.parametrize("full", ["", "store of h1 is full"])
def test_broadcast_to_a_full_host_fails_with_its_error(full: str) -> None:
    """The object is not lost then."""
    cluster = PlannedCluster(3)
    ask = m.ReduceRequested(1, 0, 1, (A,), "", 1, kind="broadcast", to=(1, 2))
    cluster.say(ask)
    cluster.say(m.SourceReady(1, 0, 0, NBYTES))
    sends = cluster.say(m.CopyDropped(1, A, full))
    (failed,) = [one for _, one in sends if isinstance(one, m.OperationFailed)]
    assert failed.error == ("full" if full else "lost")
    assert (full or "it gave its copy up") in failed.message


@pytest.mark.parametrize("full", ["", "store of h0 is full"])
def test_object_unreadable_on_a_full_host_is_not_lost(full: str) -> None:
    cluster = PlannedCluster(3)
    cluster.say(m.ReduceRequested(1, 0, 1, (A,), "", 1, kind="broadcast", to=(1,)))
    cluster.say(m.SourceReady(1, 0, 0, NBYTES))
    cluster.fetch(2, 0)
    sends = cluster.say(m.CopyDropped(0, A, full))
    refused = {node: one.error for node, one in sends if isinstance(one, m.FetchRefused)}
    assert refused == dict.fromkeys((1, 2), "full" if full else "lost")
    (failed,) = [one for _, one in sends if isinstance(one, m.OperationFailed)]
    assert failed.error == ("full" if full else "lost")
    assert full in failed.message


def test_lost_host_leaves_no_measurements() -> None:
    speeds = LinkSpeeds()
    speeds.measure_link(0, 1, 5e-3, 1e6, 0.0)
    speeds.lose(1)
    assert speeds.pair_rates((0, 1), 0.0) == {}
