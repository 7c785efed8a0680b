"""What nodes report of their links, as plans take it."""

from __future__ import annotations

from hoplite_mp.planner.machine import Planner
from hoplite_mp.planner.topology import Host
from hoplite_mp.protocol import messages as m


def planner(nodes: int) -> Planner:
    made = Planner()
    for node in range(nodes):
        made.step(m.NodeJoined(node + 1, 1, 2), 0.0)
    return made


def report(made: Planner, node: int, up: float | None, down: float | None) -> None:
    made.step(m.HostMeasured(node, up, down), 0.0)


def test_nearly_alike_is_alike_whoever_reports_first() -> None:
    for order in ((0, 1, 2), (2, 1, 0)):
        made = planner(3)
        for node in order:
            report(made, node, (100e6, 119e6, 30e6)[node], 119e6)
        for _ in range(80):  # reports are smoothed: the first one of all is forgotten
            report(made, 1, 119e6, 119e6)
            report(made, 0, 100e6, 119e6)
        alike = Host(119e6, 119e6)
        first, second, slow = made.topology.hosts((0, 1, 2))
        assert second == alike
        assert abs(first.up - 119e6) < 1e4
        assert slow == Host(30e6, 119e6)


def test_who_has_left_is_no_measure() -> None:
    made = planner(3)
    report(made, 0, 1e9, 1e9)
    report(made, 1, 100e6, 100e6)
    made.step(m.NodeLost(0, 1), 0.0)
    report(made, 2, 120e6, 120e6)
    for _ in range(80):
        report(made, 1, 100e6, 100e6)
    assert abs(made.topology.hosts((1,))[0].up - 120e6) < 1e4


def test_a_direction_that_nobody_knows() -> None:
    made = planner(2)
    report(made, 0, None, 50e6)
    report(made, 1, None, None)
    assert made.topology.hosts((0,))[0].down == 50e6
