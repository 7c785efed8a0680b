"""Copies of sources that go while a collective is planned: others may still hold them."""

from __future__ import annotations

import pytest

from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol import messages as m

ID = bytes(16)


def test_holder_without_the_source_is_replaced() -> None:
    planner = Planner()
    for node in range(3):
        planner.step(m.NodeJoined(70 + node, 1, 2), 0.0)
    request = m.ReduceRequested(
        7,
        0,
        1,
        (ID,),
        "sum",
        1,
        ready=(0,),
        ready_nbytes=(4096,),
        ready_layouts=(b"x",),
        ready_holders=((1, 2),),
    )
    plans = [one for _, one in planner.step(request, 0.0).sends if isinstance(one, m.ExecuteReduce)]
    assert {plan.holders for plan in plans} == {(1,)}
    sends = planner.step(m.ExecutionFailed(7, 1, 1, "it is gone", (0,)), 0.0).sends
    plans = [one for _, one in sends if isinstance(one, m.ExecuteReduce)]
    assert {(plan.epoch, plan.holders) for plan in plans} == {(2, (2,))}
    sends = planner.step(m.ExecutionFailed(7, 2, 2, "it is gone", (0,)), 0.0).sends
    ((node, failure),) = [send for send in sends if isinstance(send[1], m.OperationFailed)]
    assert isinstance(failure, m.OperationFailed)
    assert node == 0
    assert failure.gone == (0, 1, 0, 2)
    assert failure.error == "reduce"


def test_holder_without_the_source_reports_all_indices() -> None:
    """Another node holds the source, whatever number of times it was given."""
    planner = Planner()
    for node in range(3):
        planner.step(m.NodeJoined(70 + node, 1, 2), 0.0)
    request = m.ReduceRequested(
        7,
        0,
        1,
        (ID, ID),
        "sum",
        2,
        ready=(0, 1),
        ready_nbytes=(4096,) * 2,
        ready_layouts=(b"x",) * 2,
        ready_holders=((1, 2),) * 2,
    )
    planner.step(request, 0.0)
    sends = planner.step(m.ExecutionFailed(7, 1, 1, "it is gone", (0, 1)), 0.0).sends
    plans = [one for _, one in sends if isinstance(one, m.ExecuteReduce)]
    assert {(plan.epoch, plan.holders) for plan in plans} == {(2, (2, 2))}
    sends = planner.step(m.ExecutionFailed(7, 2, 2, "it is gone", (0, 1)), 0.0).sends
    ((_, failure),) = [send for send in sends if isinstance(send[1], m.OperationFailed)]
    assert isinstance(failure, m.OperationFailed)
    assert failure.gone == (0, 1, 1, 1, 0, 2, 1, 2)


def test_requester_is_informed_of_sources_lost_with_a_host() -> None:
    """It may have another copy of them, which the manager does not know of."""
    planner = Planner()
    for node in range(3):
        planner.step(m.NodeJoined(70 + node, 1, 2), 0.0)
    request = m.ReduceRequested(
        7,
        0,
        1,
        (ID, bytes([1]) * 16),
        "",
        2,
        kind="gather",
        to=(0,),
        ready=(0,),
        ready_nbytes=(4096,),
        ready_layouts=(b"",),
        ready_holders=((1,),),
    )
    planner.step(request, 0.0)
    sends = planner.step(m.NodeLost(1, 1), 0.0).sends
    (failure,) = [one for _, one in sends if isinstance(one, m.OperationFailed)]
    assert failure.gone == (0, 1)


def gather(ready: tuple[int, ...]) -> m.ReduceRequested:
    """Node 0 asks for two sources of which node 1 has the ready ones."""
    return m.ReduceRequested(
        7,
        0,
        1,
        (ID, bytes([1]) * 16),
        "",
        2,
        kind="gather",
        to=(0,),
        ready=ready,
        ready_nbytes=(4096,) * len(ready),
        ready_layouts=(b"",) * len(ready),
        ready_holders=((1, 2),) * len(ready),
    )


@pytest.mark.parametrize("requested_before", [False, True])
def test_reporter_of_a_source_on_lost_hosts_is_informed(
    requested_before: bool,
) -> None:
    """It has not heard of the deaths, and would otherwise not make the source again."""
    planner = Planner()
    for node in range(3):
        planner.step(m.NodeJoined(70 + node, 1, 2), 0.0)
    if requested_before:
        planner.step(gather(()), 0.0)
    planner.step(m.NodeLost(1, 1), 0.0)
    planner.step(m.NodeLost(2, 1), 0.0)
    last = m.SourceReady(7, 0, 1, 4096, b"", (2,)) if requested_before else gather((0,))
    (failure,) = [
        one for _, one in planner.step(last, 0.0).sends if isinstance(one, m.OperationFailed)
    ]
    assert failure.gone == (0, 1, 0, 2)
    assert failure.error == "source"
