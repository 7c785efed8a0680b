"""Collectives of a manager that has died, taken up by the next one when a node has died too."""

from __future__ import annotations

from typing import Any

import msgspec

from hoplite_mp._planner.manager_recovery import RESTORE_S
from hoplite_mp._protocol import membership as r
from hoplite_mp._protocol import messages as m
from tests.support.planner_clusters import (
    NBYTES,
    NODES,
    RestartedPlanner,
    planner_members,
    start_fold,
)


def test_plan_ended_by_a_loss_is_not_sent() -> None:
    """Who never had it would wait for what it brings from the lost node, and say nothing of it."""
    cluster = RestartedPlanner()
    request, plan = start_fold(cluster)
    cluster.die()
    some = {"ready": (0, 1), "ready_nbytes": (NBYTES,) * 2, "ready_layouts": (b"x",) * 2}
    request = msgspec.structs.replace(request, **some, ready_holders=((0,), (1,)))
    facts: dict[int, tuple[Any, ...]] = {0: (r.ReportedReduce(0, plan, False), request), 1: ()}
    for node, said in facts.items():
        for message in (
            r.NodeReturned(node, 1, NODES, planner_members(0, 1, 2)),
            *said,
            r.ReportComplete(node),
        ):
            assert cluster.say(message) == []
    sends = cluster.planner.tick(RESTORE_S).sends
    assert {type(one) for _, one in sends} == {m.NodeAdmitted}
    assert cluster.say(m.SourceReady(7, 2, 1, NBYTES, b"x"))
    again = cluster.latest(m.ExecuteReduce)
    assert again.epoch == 2
    assert again.holders == (0, 1, 1)
