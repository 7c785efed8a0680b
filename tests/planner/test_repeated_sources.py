"""A source that is given many times in one collective costs no more than as many sources do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp._planner.operation import Operation
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._planner.step_result import Send

TIMES = 200
ONE, OTHER = bytes(16), bytes([1]) * 16
SOURCES = (ONE,) * TIMES + (OTHER,)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every index that the planner visits because a source was reported by any of its indices."""
    found: list[int] = []
    same = Operation.same

    def counted(op: Operation, index: int) -> Iterator[int]:
        for one in same(op, index):
            found.append(one)
            yield one

    monkeypatch.setattr(Operation, "same", counted)
    return found


@pytest.fixture
def planner() -> Planner:
    made = Planner()
    for node in range(3):
        made.step(m.NodeJoined(70 + node, 1, 2), 0.0)
    return made


def request(
    *, ready: int = 0, num: int = len(SOURCES), holders: tuple[int, ...] = (1, 2)
) -> m.ReduceRequested:
    """The first `ready` sources are ready at these holders."""
    return m.ReduceRequested(
        operation=7,
        node=0,
        caller=1,
        sources=SOURCES,
        op="sum",
        num=num,
        ready=tuple(range(ready)),
        ready_nbytes=(8,) * ready,
        ready_layouts=(b"x",) * ready,
        ready_holders=(holders,) * ready,
    )


def plans(sends: tuple[Send, ...]) -> list[m.ExecuteReduce]:
    return [message for _, message in sends if isinstance(message, m.ExecuteReduce)]


def test_repeated_source_is_recorded_once_for_each_holder(
    planner: Planner, looks: list[int]
) -> None:
    found = plans(planner.step(request(ready=len(SOURCES)), 0.0).sends)
    assert {plan.order for plan in found} == {tuple(range(len(SOURCES)))}
    assert {plan.holders for plan in found} == {(1,) * len(SOURCES)}
    assert len(looks) == 2 * len(SOURCES)


def test_ready_reports_of_a_repeated_source_cost_little(planner: Planner, looks: list[int]) -> None:
    planner.step(request(), 0.0)
    for index in range(TIMES):
        assert not planner.step(m.SourceReady(7, index, 1, 8), 0.0).sends
    assert len(looks) == TIMES
    assert plans(planner.step(m.SourceReady(7, TIMES, 1, 8), 0.0).sends)


def test_failure_reports_of_a_repeated_source_cost_little(
    planner: Planner, looks: list[int]
) -> None:
    planner.step(request(num=1), 0.0)
    for index in range(TIMES):
        assert not planner.step(m.SourceFailed(7, index, "it is gone"), 0.0).sends
    assert len(looks) == TIMES
    assert plans(planner.step(m.SourceReady(7, TIMES, 1, 8), 0.0).sends)


def test_lost_holder_of_a_repeated_source_costs_little(planner: Planner, looks: list[int]) -> None:
    planner.step(request(ready=TIMES, holders=(1,)), 0.0)
    looks.clear()
    sends = planner.step(m.NodeLost(1, 1), 0.0).sends
    assert [type(message) for node, message in sends if node == 0][-1] is m.OperationFailed
    assert len(looks) == TIMES
