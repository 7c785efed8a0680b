"""An allreduce of results goes on with other owners when the link of one of them becomes slow."""

from __future__ import annotations

import pytest

from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._planner.repair import FRESH_S, SLOW_GATHER_S
from hoplite_mp._protocol import messages as m
from tests.support.planner_scenarios import letter_id

LINK, SLOW = 10**8, 25 * 10**6  # bytes per second
NBYTES = 64 << 20
NODES = 4
SLOW_NODE = 2
OPERATION = 7


class Running:
    """A planner whose nodes have measured their links, and an operation that it has planned."""

    def __init__(
        self,
        kind: str = "allreduce",
        measured: int = NODES,
        to: tuple[int, ...] = tuple(range(NODES)),
        leaving: int | None = None,
    ) -> None:
        """to: of an allreduce. leaving: a node that is leaving, so it owns nothing."""
        self.planner = Planner()
        for node in range(max(NODES, 1 + max(to))):
            self.say(m.NodeJoined(700 + node, 1, 1), 0.0)
        if leaving is not None:
            self.say(m.NodeLeaving(leaving, 1), 0.0)
        for node in range(measured):
            self.say(m.HostMeasured(node, float(LINK), float(LINK)), 0.0)
        sources = tuple(map(letter_id, "abcd"))
        to = to if kind == "allreduce" else (0,)
        about = OPERATION, 0, 1, sources, "sum", NODES, None
        self.say(m.ReduceRequested(*about, kind=kind, to=to), 0.0)
        sends: list[tuple[int, m.ManagerToNode]] = []
        for node in range(NODES):
            sends = self.say(m.SourceReady(OPERATION, node, node, NBYTES), 0.0)
        self.plan = next(one for _, one in sends if isinstance(one, m.ExecuteReduce))

    def say(self, message: m.NodeToManager, now: float) -> list[tuple[int, m.ManagerToNode]]:
        return list(self.planner.step(message, now).sends)

    def report(
        self, node: int = SLOW_NODE, now: float = 1.0, up: int = SLOW, moved: float = 0.1,
        epoch: int = 1,
    ) -> list[tuple[int, m.ManagerToNode]]:  # fmt: skip
        """That node's link is slow; `moved`: the part of the object that it has moved."""
        about = up, up, int(moved * NBYTES), int(moved * NBYTES)
        return self.say(m.OperationSlow(OPERATION, epoch, node, *about), now)

    def planned(self, now: float) -> dict[int, m.ExecuteReduce]:
        """The plans that nodes are sent at that time."""
        sends = self.planner.tick(now).sends
        assert all(isinstance(one, m.ExecuteReduce) for _, one in sends)
        return dict(sends)  # type: ignore[arg-type]


def owned(plan: m.ExecuteReduce) -> dict[int, int]:
    widths: dict[int, int] = {}
    for stripe in plan.stripes:
        width = stripe.end_share - stripe.begin_share
        widths[stripe.owner] = widths.get(stripe.owner, 0) + width
    return widths


def test_slow_owner_relieved_others_take_its_stripe() -> None:
    running = Running()
    assert running.report(now=1.0) == []
    assert running.planner.tick(1.0).wake_at == 1.0 + SLOW_GATHER_S
    plans = running.planned(1.0 + SLOW_GATHER_S)
    assert sorted(plans) == list(range(NODES))
    (plan,) = {*plans.values()}
    assert plan.epoch == 2
    assert sorted(owned(plan)) == [0, 1, 3]
    kept = [one for one in running.plan.stripes if one.owner != SLOW_NODE]
    assert {*kept} <= {*plan.stripes}
    named = plan.members, plan.order, plan.holders, plan.destinations
    first = running.plan
    assert named == (first.members, first.order, first.holders, first.destinations)
    # The operation ends when all have carried out this plan.
    for node in range(NODES):
        assert running.say(m.StripesComplete(OPERATION, 1, node), 2.0) == []
    for node in range(NODES):
        sends = running.say(m.StripesComplete(OPERATION, 2, node), 3.0)
    assert {one for _, one in sends} == {m.Commit(OPERATION, 2, (0, 1, 2, 3), (0, 1, 2, 3))}
    assert running.planner.tick(9.0).wake_at is None


def test_slow_owner_is_relieved_once() -> None:
    running = Running()
    running.report(now=1.0)
    assert running.planned(2.0 - FRESH_S)
    running.report(node=3, now=2.0, epoch=2)
    assert not running.planned(2.0 + SLOW_GATHER_S)


@pytest.mark.parametrize(
    ("made", "report"),
    [
        pytest.param({"kind": "reduce"}, {}, id="a reduce gains nothing"),
        pytest.param({"measured": SLOW_NODE}, {}, id="its link has never been measured"),
        pytest.param({}, {"epoch": 2}, id="of another epoch"),
        pytest.param({}, {"moved": 1.2}, id="nearly over"),
        pytest.param({}, {"up": LINK}, id="fast enough"),
        pytest.param({}, {"node": 9}, id="no member"),
    ],
)
def test_stripes_without_need_for_relief_stay(
    made: dict[str, object], report: dict[str, object]
) -> None:
    running = Running(**made)  # type: ignore[arg-type]
    assert running.report(**report) == []  # type: ignore[arg-type]
    assert not running.planned(1.0 + SLOW_GATHER_S)


def test_two_equally_slow_owners_keep_their_stripes() -> None:
    """They share processors, or a switch, that are busy."""
    running = Running()
    running.report(now=1.0)
    running.report(node=1, now=1.05)
    assert not running.planned(1.0 + SLOW_GATHER_S)
    # Later one of them is fast again, and says nothing more.
    running.report(now=1.2 + FRESH_S)
    assert running.planned(1.2 + FRESH_S + SLOW_GATHER_S)


def test_slow_report_is_forgotten_when_the_link_is_fast_again() -> None:
    running = Running()
    running.report(now=1.0)
    assert not running.planned(1.1 + FRESH_S)  # the manager was stopped


def test_node_lost_before_the_relief_is_left_out() -> None:
    """Its loss has begun an epoch already, for which nobody has reported a slow link."""
    running = Running()
    running.report(now=1.0)
    sends = running.say(m.NodeLost(3, 1), 1.05)
    assert {one.epoch for _, one in sends if isinstance(one, m.ExecuteReduce)} <= {2}
    assert not running.planned(1.0 + SLOW_GATHER_S)


def test_death_after_a_relief_keeps_the_stripes_of_others() -> None:
    """All sources but one are needed, and the slow node owns nothing afterwards either."""
    running = Running()
    running.report(now=1.0)
    (plan,) = {*running.planned(1.0 + SLOW_GATHER_S).values()}
    running.say(m.SourceReady(OPERATION, 3, 0, NBYTES), 1.15)  # another copy of the last source
    sends = running.say(m.NodeLost(3, 1), 1.2)
    after = next(one for _, one in sends if isinstance(one, m.ExecuteReduce))
    assert after.epoch == 3
    assert SLOW_NODE not in owned(after)
    assert {one for one in plan.stripes if one.owner != 3} <= {*after.stripes}


def test_commit_names_a_returned_destination() -> None:
    """It only receives, so its loss has begun no other epoch."""
    running = Running(to=(0, 1, 2, 3, 4), leaving=4)
    running.say(m.NodeLost(4, 1), 0.1)
    running.say(m.NodeJoined(704, 2, 1), 0.2)
    running.say(m.HostMeasured(4, float(LINK), float(LINK)), 0.9)
    running.report(now=1.0)
    plans = running.planned(1.0 + SLOW_GATHER_S)
    assert plans[4].destinations == (0, 1, 2, 3, 4)
    sends: list[tuple[int, m.ManagerToNode]] = []
    for node in range(5):
        sends += running.say(m.StripesComplete(OPERATION, 2, node), 2.0)
    (commit,) = {one for _, one in sends}
    assert isinstance(commit, m.Commit)
    assert commit.destinations == (0, 1, 2, 3, 4)


def test_finished_operation_ignores_slow_reports() -> None:
    running = Running()
    running.report(now=1.0)
    for node in range(NODES):
        running.say(m.StripesComplete(OPERATION, 1, node), 1.05)
    assert not running.planned(1.0 + SLOW_GATHER_S)
    assert running.report(now=2.0) == []
