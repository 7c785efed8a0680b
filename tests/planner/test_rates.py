"""What nodes report of their links, as plans take it."""

from __future__ import annotations

from hoplite_mp._planner import cost
from hoplite_mp._planner.link_speeds import BYTES_PER_S_DEFAULT, PAIR_S, HostRates
from hoplite_mp._planner.packing import pack
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol import messages as m


def planner(nodes: int) -> Planner:
    made = Planner()
    for node in range(nodes):
        made.step(m.NodeJoined(node + 1, 1, 2), 0.0)
    return made


def report(made: Planner, node: int, up: float | None, down: float | None) -> None:
    made.step(m.HostMeasured(node, up, down), 0.0)


def test_similar_rates_count_as_equal_in_any_order() -> None:
    for order in ((0, 1, 2), (2, 1, 0)):
        made = planner(3)
        for node in order:
            report(made, node, (100e6, 119e6, 30e6)[node], 119e6)
        alike = HostRates(119e6, 119e6)
        first, second, slow = made.speeds.hosts((0, 1, 2))
        assert second == alike
        assert first == alike
        assert slow == HostRates(30e6, 119e6)


def test_rate_of_a_departed_node_is_ignored() -> None:
    made = planner(3)
    report(made, 0, 1e9, 1e9)
    report(made, 1, 100e6, 100e6)
    made.step(m.NodeLost(0, 1), 0.0)
    report(made, 2, 120e6, 120e6)
    assert made.speeds.hosts((1,))[0].up == 120e6


def test_unknown_direction_uses_the_default_rate() -> None:
    made = planner(2)
    report(made, 0, None, 50e6)
    report(made, 1, None, None)
    assert made.speeds.hosts((0,))[0].down == 50e6


def narrow(made: Planner, now: float, sender: int = 0, receiver: int = 1) -> None:
    made.step(m.LinkMeasured(sender, receiver, None, 1e7), now)


def spread(made: Planner, now: float, number: int, packs: bool = True) -> m.Distribute:
    """A broadcast from node 0 to all others. packs: trees that are asked for are there then."""
    one = (1).to_bytes(8, "little") + number.to_bytes(8, "little")
    made.step(m.ReduceRequested(number, 0, 1, (one,), "", 1, kind="broadcast"), now)
    plan = made.step(m.SourceReady(number, 0, 0, 64 << 20), now)
    assert packs or plan.packing
    for wanted in plan.packing if packs else ():
        made.step(pack(wanted), now)
    (found,) = {one for _, one in plan.sends if isinstance(one, m.Distribute)}
    made.step(m.ObjectDeleted(one), now)
    return found


def test_packed_trees_avoid_a_narrow_path_until_it_expires() -> None:
    made = planner(4)
    narrow(made, 0.0)
    assert spread(made, 1.0, 1).rule == "stripes"  # trees are asked for
    assert spread(made, 2.0, 2).rule == "parents"
    narrow(made, 100.0)
    assert spread(made, 99.0 + PAIR_S, 3).rule == "parents"
    assert spread(made, 101.0 + PAIR_S, 4).rule == "stripes"


def test_outdated_packed_trees_are_used_until_new_ones_are_ready() -> None:
    made = planner(4)
    narrow(made, 0.0)
    spread(made, 1.0, 1)
    assert spread(made, 2.0, 2).rule == "parents"
    for node in range(4):  # all hosts were slowed down by something
        made.step(m.HostMeasured(node, 8e7, 8e7), 2.0)
    assert spread(made, 3.0, 3, packs=False).rule == "parents"
    made.step(m.LinkMeasured(0, 1, None, 1.2e8), 4.0)  # the path that they avoid
    for peer in (2, 3):  # those that they use
        made.step(m.LinkMeasured(0, peer, None, 1e6), 4.0)
    assert spread(made, 5.0, 4, packs=False).rule == "stripes"


def test_path_that_is_fast_again_is_used_immediately() -> None:
    made = planner(4)
    narrow(made, 0.0)
    made.step(m.LinkMeasured(0, 1, None, 1.2e8), 1.0)
    assert made.speeds.is_star(range(4), 1.0)


def test_stripes_stay_where_a_narrow_path_carries_little() -> None:
    """Each of nine receivers owns a ninth, and the path has a tenth of the links' rate."""
    made = planner(10)
    made.step(m.LinkMeasured(0, 1, None, 0.15 * BYTES_PER_S_DEFAULT), 0.0)
    plan = spread(made, 1.0, 1)
    assert plan.rule == "stripes"
    assert spread(made, 2.0, 2).rule == "stripes"
    pairs = made.speeds.pair_rates(range(10), 2.0)
    assert cost.narrow_s(plan, pairs) < 64e6 / BYTES_PER_S_DEFAULT


def test_rate_report_keeps_the_latency_of_a_path() -> None:
    made = planner(2)
    made.step(m.LinkMeasured(0, 1, 5e-3), 0.0)
    narrow(made, 0.0)
    assert made.speeds.pair_latency_s(0, 1) == 5e-3
    assert made.speeds.pair_latency_s(1, 0) == 5e-3
    assert made.speeds.pair_rates((0, 1), 1.0) == {(0, 1): 1e7}
    assert made.speeds.pair_rates((1,), 1.0) == {}
