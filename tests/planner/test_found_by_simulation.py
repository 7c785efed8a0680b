"""What `hoplite-mp simulate` has found in the planner: one test each, as short as it can be."""

from __future__ import annotations

from hoplite_mp._planner import cost, tree_shapes
from hoplite_mp._planner.link_speeds import LinkSpeeds
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._planner.program import program_of
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.membership import (
    NodeReturned,
    ReportComplete,
    ReportedDistribute,
    ReportedReduce,
)
from tests.support.planner_clusters import NBYTES, A, B, PlannedCluster
from tests.support.planner_scenarios import letter_id


def test_destination_without_a_part_reports_completion() -> None:
    """Its plan waits for all destinations; it had no part in it, so it never reported."""
    cluster = PlannedCluster(3)
    cluster.ask(1, A, kind="alltoall", to=(1, 2))
    plan = cluster.plan(m.SourceReady(1, 0, 0, NBYTES))
    program = program_of(plan, 2)
    assert program.reports
    assert not program.is_empty
    assert program_of(plan, 5).is_empty


def test_rates_below_a_byte_a_second_are_counted_to_their_end() -> None:
    """What was left of the first of two was taken for nothing, and the second one not found."""
    cluster = PlannedCluster(3)
    for node in (1, 2):
        cluster.say(m.LinkMeasured(node, 0, 2.0))
    plans = [cluster.plan(m.FetchRequested(node, A, 1, (0,))) for node in (1, 2)]
    for node, plan in enumerate(plans, 1):
        cluster.say(m.FetchComplete(node, A, plan.epoch))
    assert not cluster.planner.copies._busy


def test_commit_names_no_dead_destination() -> None:
    """Who reads a result there would ask a node that does not hold it."""
    cluster = PlannedCluster(3)
    cluster.ask(1, A, B, kind="allgather", to=(0, 1, 2))
    for index in (0, 1):
        cluster.say(m.SourceReady(1, index, index, NBYTES))
    cluster.say(m.NodeLost(2, 1))
    cluster.say(m.StripesComplete(1, 1, 0))
    sends = cluster.say(m.StripesComplete(1, 1, 1))
    commits = {message for _, message in sends if isinstance(message, m.Commit)}
    assert commits == {m.Commit(1, 1, (0, 1), (0, 1))}


def test_commit_after_a_death_names_current_destinations() -> None:
    """After a death nothing was left to move: the commit named the destinations of before."""
    cluster = PlannedCluster(3)
    sources = (A, letter_id("c"))
    cluster.say(
        m.ReduceRequested(1, 0, 1, sources, "sum", 2, 1.0, kind="allgather", to=(0, 2), ready=(0,))
    )
    cluster.plan(m.SourceReady(1, 1, 2, NBYTES))
    cluster.planner.tick(2.0)
    sends = cluster.say(m.NodeLost(2, 1))
    commits = {message for _, message in sends if isinstance(message, m.Commit)}
    assert commits == {m.Commit(1, 1, (0,), (0,))}


def test_source_ready_on_a_lost_node_is_answered() -> None:
    """Who says so had not heard of the death, and waited for an answer ever after."""
    cluster = PlannedCluster(3)
    cluster.ask(1, A, B)
    cluster.say(m.NodeLost(2, 1))
    ((node, failed),) = cluster.say(m.SourceReady(1, 1, 2, NBYTES))
    assert node == 0
    assert isinstance(failed, m.OperationFailed)
    assert (failed.error, failed.cause_index) == ("reduce", 1)


def test_source_with_a_living_holder_survives() -> None:
    cluster = PlannedCluster(4)
    cluster.ask(1, A, B)
    cluster.say(m.NodeLost(2, 1))
    cluster.say(m.SourceReady(1, 0, 0, NBYTES))
    plan = cluster.plan(m.SourceReady(1, 1, 2, NBYTES, b"", (3, 1)))
    assert plan.holders == (0, 3)
    again = cluster.plan(m.NodeLost(3, 1))
    assert again.holders == (0, 1)


def test_restarted_manager_does_not_wait_for_dead_nodes() -> None:
    """They died before it: no connection of theirs will end once more."""
    plan = m.ExecuteReduce(
        1, 1, (0,), (0,), (), "any", "alltoall", "sum", 0, (A,), (1,), (0, 2), sizes=(NBYTES,)
    )
    members = tuple(m.Member(node, 1, 700 + node, 1) for node in (0, 1))
    planner = Planner(again=True)
    sends = []
    for node in (0, 1):
        planner.step(NodeReturned(node, 1, 3, members), 0.0)
        if node == 0:
            asked = m.ReduceRequested(1, 0, 1, (A,), "sum", 1, kind="alltoall", to=(0, 2))
            planner.step(asked, 0.0)
            planner.step(m.SourceReady(1, 0, 1, NBYTES), 0.0)
        planner.step(ReportedReduce(node, plan, node == 0), 0.0)
        sends += planner.step(ReportComplete(node), 0.0).sends
    ends = [message for _, message in sends if isinstance(message, m.Commit)]
    assert ends
    assert not planner.reductions.operations


def test_copy_whose_source_died_before_the_manager_is_forgotten() -> None:
    """The plan still named it as a holder, and nobody would have lost it again."""
    plan = m.Distribute(1 << 63, A, 4, NBYTES, (2,), (1,), (m.Stripe(2, 0, m.SHARES),), "stripes")
    members = tuple(m.Member(node, 1, 700 + node, 1) for node in (0, 1))
    planner = Planner(again=True)
    refused = []
    for node in (0, 1):
        planner.step(NodeReturned(node, 1, 3, members), 0.0)
        if node == 1:
            planner.step(ReportedDistribute(1, plan, True), 0.0)
        refused += planner.step(ReportComplete(node), 0.0).sends
    assert [to for to, message in refused if isinstance(message, m.FetchRefused)] == [1]
    assert not planner.copies.entries


def test_chain_model_includes_the_delay_of_each_hop() -> None:
    """The model left that out, and took a chain of 128 nodes for 4 MiB: 310 ms instead of 40."""
    speeds = LinkSpeeds()
    for nodes in (32, 64, 128):
        spread = tree_shapes.spread(4 << 20, 0, range(1, nodes), speeds)
        fold = tree_shapes.reduction("allreduce", 4 << 20, dict.fromkeys(range(nodes), 1),
                                range(nodes), speeds)  # fmt: skip
        assert (spread.shape, fold.shape) == ("stripes", "stripes")
    # A hop takes a block's time besides its latency, in a chain of sixteen at least sixteen times.
    alone = 1 << 20
    assert cost.tree_s(16, 1, alone, 125e6, 1e-4) > alone / 125e6 + 16 * (128 << 10) / 125e6
