"""Reductions of the first ready source of each group: which source is taken, and how they end."""

from __future__ import annotations

from typing import Any

from hoplite_mp._protocol import messages as m
from tests.support.planner_clusters import RestartedPlanner
from tests.support.planner_scenarios import letter_id

SOURCES = tuple(letter_id(letter) for letter in "abcd")


def cluster_of_three(**request: Any) -> tuple[RestartedPlanner, list[tuple[int, Any]]]:
    """A cluster in which node 0 has requested a sum of groups (2, 3) and (0, 1)."""
    cluster = RestartedPlanner()
    groups = {"one_of": ((2, 3), (0, 1)), "num": 2}
    message = m.ReduceRequested(1, 0, 1, SOURCES, "sum", **(groups | request))
    return cluster, cluster.say(message)


def plan_in(sends: list[tuple[int, Any]]) -> m.ExecuteReduce:
    return next(one for _, one in sends if isinstance(one, m.ExecuteReduce))


def test_first_of_each_group_takes_part_and_later_ones_do_not() -> None:
    cluster, _ = cluster_of_three()
    assert cluster.say(m.SourceReady(1, 1, 1, 64)) == []
    assert cluster.say(m.SourceReady(1, 0, 2, 64)) == [], "its group is ready already"
    plan = plan_in(cluster.say(m.SourceReady(1, 3, 2, 64)))
    assert (plan.members, plan.order) == ((1, 3), (1, 3))


def test_reproducible_reduction_folds_in_the_order_of_the_groups() -> None:
    cluster, sends = cluster_of_three(reproducible=True, ready=(0, 1, 3))
    plan = plan_in(sends)
    assert (plan.members, plan.order, plan.rule) == ((0, 3), (3, 0), "fold")
    assert cluster.say(m.SourceReady(1, 2, 2, 64)) == []


def test_num_counts_groups_by_the_arrival_of_their_first_sources() -> None:
    _, sends = cluster_of_three(num=1, ready=(1, 0))
    assert plan_in(sends).members == (1,)


def test_deadline_takes_the_groups_that_are_ready() -> None:
    _, sends = cluster_of_three(deadline_s=0.0, ready=(3, 2))
    assert plan_in(sends).members == (3,)


def test_other_source_of_a_group_replaces_a_lost_one() -> None:
    cluster, _ = cluster_of_three(ready=(0,))
    cluster.say(m.SourceReady(1, 2, 1, 64))  # the plan has 0 and 2
    cluster.say(m.SourceReady(1, 3, 2, 64))
    plan = plan_in(cluster.say(m.NodeLost(1, 1)))
    assert (plan.epoch, plan.members, plan.holders) == (2, (0, 3), (0, 2))


def test_group_whose_sources_have_all_failed_fails_the_reduction() -> None:
    cluster, _ = cluster_of_three()
    assert cluster.say(m.SourceFailed(1, 0, "first")) == []
    assert cluster.say(m.SourceFailed(1, 2, "second")) == []
    ((node, end),) = cluster.say(m.SourceFailed(1, 3, "third"))
    assert isinstance(end, m.OperationFailed)
    assert (node, end.error, end.cause_index) == (0, "reduce", 3)
    assert "1 of 2 groups of sources failed" in end.message
    assert "source 3: third" in end.message


def test_failed_group_is_skipped_if_enough_groups_are_left() -> None:
    cluster, _ = cluster_of_three(num=1)
    cluster.say(m.SourceFailed(1, 2, "gone"))
    cluster.say(m.SourceFailed(1, 3, "gone"))
    cluster.say(m.SourceFailed(1, 0, "gone"))
    assert plan_in(cluster.say(m.SourceReady(1, 1, 2, 64))).members == (1,)


def test_object_in_two_groups_counts_in_each() -> None:
    cluster = RestartedPlanner()
    ids = (SOURCES[0], SOURCES[1], SOURCES[0])
    cluster.say(m.ReduceRequested(1, 0, 1, ids, "sum", 2, one_of=((0, 1), (2,))))
    assert plan_in(cluster.say(m.SourceReady(1, 0, 1, 64))).members == (0, 2)
