"""The planner's records of plans: what users are summary of them, and how many are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp._planner.packing import pack
from hoplite_mp._planner.plan_log import PlanLog, PlanRecord
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._planner.tree_shapes import cut
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.plans import NODES_REPORTED_MAX, PLANS_REPORTED_MAX
from tests.support.planner_clusters import NBYTES, A, B, C

if TYPE_CHECKING:
    from hoplite_mp._protocol.plans import PlanSummary

RESULT = b"r" * 16
RATE = 1e8


class Cluster:
    """A planner with nodes whose links have been measured."""

    def __init__(self, nodes: int, measured: int | None = None) -> None:
        self.planner = Planner()
        for node in range(nodes):
            self.say(m.NodeJoined(700 + node, 1, 1))
        for node in range(nodes if measured is None else measured):
            self.say(m.HostMeasured(node, RATE, RATE))

    def say(self, message: m.NodeToManager, now: float = 0.0) -> list[m.ManagerToNode]:
        step = self.planner.step(message, now)
        for wanted in step.packing:
            self.planner.step(pack(wanted), now)
        return [one for _, one in step.sends]

    def plan(self, message: m.NodeToManager, now: float = 0.0) -> m.Distribute | m.ExecuteReduce:
        """The one plan that the message causes."""
        sends = self.say(message, now)
        (plan,) = {one for one in sends if isinstance(one, (m.Distribute, m.ExecuteReduce))}
        return plan

    def summaries(self, object_id: bytes) -> tuple[PlanSummary, ...]:
        (answer,) = self.say(m.PlansRequested(9, 0, object_id))
        assert isinstance(answer, m.PlansReported)
        assert answer.request == 9
        return answer.plans

    def broadcast(self, number: int = 7, object_id: bytes = A) -> m.Distribute:
        plan = self.plan(request("broadcast", number, (object_id,), (NBYTES,)))
        assert isinstance(plan, m.Distribute)
        return plan


def request(
    kind: str, number: int, sources: tuple[bytes, ...], ready: tuple[int, ...], need: int = 1
) -> m.ReduceRequested:
    """By node 0. ready: the bytes of the first sources, source k at node k."""
    return m.ReduceRequested(
        number, 0, 1, sources, "sum", max(need, len(ready)), results=(RESULT,), kind=kind,
        ready=tuple(range(len(ready))), ready_nbytes=ready,
        ready_layouts=(b"x",) * len(ready), ready_holders=tuple((k,) for k in range(len(ready))),
    )  # fmt: skip


def test_copy_from_a_receiver_is_recorded_as_a_chain() -> None:
    cluster = Cluster(3, measured=2)
    cluster.say(m.FetchRequested(1, A, NBYTES, (0,)))
    (first,) = cluster.summaries(A)
    assert (first.kind, first.shape, first.state) == ("copy", "direct copy", "running")
    assert (first.sources, first.receivers, first.owners) == ((0,), (1,), ((0, m.SHARES),))
    assert first.expected_s == pytest.approx(NBYTES / RATE, rel=0.01)
    assert first.rates == ((0, RATE, RATE, True), (1, RATE, RATE, True))
    plan = cluster.plan(m.FetchRequested(2, A, NBYTES, (0,)), 0.125)
    cluster.say(m.FetchComplete(1, A, 1), 0.75)
    cluster.say(m.FetchComplete(2, A, plan.epoch), 1.0)
    first, second = cluster.summaries(A)
    assert (second.shape, second.sources, second.receivers) == ("chain", (1,), (2,))
    assert [known for _, _, _, known in second.rates] == [True, False]
    assert {shape for shape, _, _ in second.estimates} == {"only from h0", "only from h1"}
    assert [one.state for one in (first, second)] == ["done", "done"]
    assert (first.last_s, second.last_s) == (0.75, 0.875)


def test_broadcast_is_recorded_with_its_alternatives() -> None:
    cluster = Cluster(4)
    plan = cluster.broadcast()
    (summary,) = cluster.summaries(A)
    assert cluster.summaries(RESULT) == (summary,)
    assert (summary.kind, summary.shape, summary.owner_count) == ("broadcast", "stripes", 3)
    assert summary.estimates[0] == ("stripes", 3, summary.expected_s)
    assert {shape for shape, _, _ in summary.estimates} == {"stripes", "chain", "tree of degree 2"}
    seconds = [one for _, _, one in summary.estimates]
    assert seconds == sorted(seconds)
    for node in (1, 3, 2):
        cluster.say(m.FetchComplete(node, A, plan.epoch), float(node))
        cluster.say(m.FetchComplete(node, A, plan.epoch), 100.0)  # doubled
    (summary,) = cluster.summaries(RESULT)
    assert (summary.state, summary.finished, summary.last_node, summary.last_s) == (
        "done",
        3,
        2,
        2.0,
    )


def test_narrow_path_is_the_reason_for_packed_trees() -> None:
    cluster = Cluster(4)
    cluster.say(m.LinkMeasured(0, 1, None, RATE / 8))
    cluster.broadcast()
    cluster.broadcast(8, B)
    (before,), (summary,) = cluster.summaries(A), cluster.summaries(B)
    assert (before.shape, summary.shape) == ("stripes", "packed trees")
    (trees, _, packed_s), (stripes, _, stripes_s) = summary.estimates
    assert (trees, stripes) == ("packed trees", "stripes")
    assert summary.expected_s == packed_s
    assert before.expected_s == stripes_s == pytest.approx(8 / 3 * NBYTES / RATE, rel=0.01)
    assert before.why == summary.why == "narrow paths: h0 to h1 12.5 MB/s"


def test_copy_over_a_narrow_path_names_it() -> None:
    cluster = Cluster(3)
    cluster.say(m.LinkMeasured(0, 1, None, RATE / 8))
    cluster.say(m.FetchRequested(1, A, NBYTES, (0,)))
    cluster.say(m.FetchRequested(2, B, NBYTES, (0,)))
    (slow,), (fast,) = cluster.summaries(A), cluster.summaries(B)
    assert (slow.why, fast.why) == ("narrow paths: h0 to h1 12.5 MB/s", "")
    assert slow.expected_s == pytest.approx(8 * NBYTES / RATE, rel=0.01)


def test_lost_source_ends_one_plan_and_begins_another() -> None:
    cluster = Cluster(4)
    cluster.say(m.FetchRequested(2, A, NBYTES, (1, 3)))
    (first,) = cluster.summaries(A)
    (source,) = first.sources
    cluster.say(m.NodeLost(source, 1), 1.0)
    before, after = cluster.summaries(A)
    assert (before.state, after.state) == ("replaced", "running")
    assert set(after.sources) == {1, 3} - {source}


def test_reduction_is_recorded_from_request_to_end() -> None:
    cluster = Cluster(3)
    cluster.say(request("reduce", 7, (A, B, C), (NBYTES, NBYTES), need=3))
    (waiting,) = cluster.summaries(RESULT)
    assert (waiting.state, waiting.shape, waiting.nbytes) == ("waiting", "", NBYTES)
    assert waiting.why == "2 of 3 sources are ready, 3 are needed"
    plan = cluster.plan(m.SourceReady(7, 2, 2, NBYTES, b"x"), 1.0)
    (running,) = cluster.summaries(RESULT)
    assert (running.kind, running.state, running.receivers) == ("reduce", "running", (0,))
    assert (running.source_count, running.expected_s) == (3, running.estimates[0][2])
    for node in range(3):
        cluster.say(m.StripesComplete(7, plan.epoch, node), 1.5 + node)
    (done,) = cluster.summaries(RESULT)
    assert (done.state, done.last_s) == ("done", running.expected_s and 2.5)


def test_failed_reduction_records_the_reason() -> None:
    cluster = Cluster(4)
    cluster.say(request("reduce", 7, (A, B), (NBYTES, NBYTES)))
    cluster.say(m.ExecutionFailed(7, 1, 1, "dtype", (), "value"), 1.0)
    (failed,) = cluster.summaries(RESULT)
    assert (failed.state, failed.why, failed.last_s) == ("failed", "dtype", 1.0)


def test_lost_host_of_a_reduction_is_named_as_the_reason() -> None:
    cluster = Cluster(4)
    ask = m.ReduceRequested(
        7, 0, 1, (A, B, C), "sum", 2, results=(RESULT,), ready=(0, 1), ready_nbytes=(8, 8),
        ready_layouts=(b"x", b"x"), ready_holders=((0,), (3,)),
    )  # fmt: skip
    cluster.say(ask)
    cluster.say(m.SourceReady(7, 2, 2, 8, b"x"))
    cluster.say(m.NodeLost(3, 1), 1.0)
    before, after = cluster.summaries(RESULT)
    assert (before.state, after.state) == ("replaced", "running")
    assert after.why == "planned again: a host or a source was lost"
    assert set(after.sources) == {0, 2}


def test_single_host_and_copying_kinds_have_no_estimate() -> None:
    cluster = Cluster(2)
    cluster.say(request("gather", 7, (A, B), (8, 8)))
    (gather,) = cluster.summaries(RESULT)
    assert (gather.shape, gather.expected_s, gather.sources) == ("direct copies", None, (0, 1))
    alone = Cluster(1)
    alone.say(request("reduce", 7, (A,), (8,)))
    (summary,) = alone.summaries(RESULT)
    assert (summary.shape, summary.expected_s, summary.estimates) == ("one node", None, ())


def test_unknown_object_has_no_plans_and_a_lost_node_gets_no_reply() -> None:
    cluster = Cluster(2)
    assert cluster.summaries(B) == ()
    cluster.say(m.NodeLost(1, 1))
    assert cluster.say(m.PlansRequested(9, 1, B)) == []


def test_records_are_bounded() -> None:
    log = PlanLog(records_max=3)
    ids = [bytes([number]) * 16 for number in range(5)]
    many = tuple(range(1, 2 * NODES_REPORTED_MAX))
    plan = m.Distribute(1 << 63, A, 1, 8, (0,), many, cut([(node, 1) for node in many]), "stripes")
    for object_id in ids:
        log.add((object_id,), PlanRecord(plan, 0.0))
    assert [len(log.summaries(object_id)) for object_id in ids] == [0, 0, 1, 1, 1]
    log.add(ids, PlanRecord(plan, 0.0))  # a collective with many results
    assert [len(log.summaries(object_id)) for object_id in ids] == [1, 1, 1, 0, 0]
    for _ in range(2 * PLANS_REPORTED_MAX):
        log.add(ids[:1], PlanRecord(plan, 0.0))
    summary = log.summaries(ids[0])
    assert len(summary) == PLANS_REPORTED_MAX
    assert (len(summary[0].receivers), summary[0].receiver_count) == (NODES_REPORTED_MAX, len(many))
    assert (len(summary[0].owners), summary[0].owner_count) == (NODES_REPORTED_MAX, len(many))
    log.share(RESULT, ids[0])
    assert log.summaries(RESULT) == summary
    log.share(B, ids[4])  # of which no record is left
    assert log.summaries(B) == ()
