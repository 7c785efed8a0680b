"""Planners and registries of several nodes, and short calls for their messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp._planner.broadcast import Copies
from hoplite_mp._planner.link_speeds import LinkSpeeds
from hoplite_mp._planner.membership import ClusterMembership
from hoplite_mp._planner.plan_log import PlanLog
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol import membership as r
from hoplite_mp._protocol import messages as m
from tests.support.planner_scenarios import letter_id

if TYPE_CHECKING:
    from collections.abc import Iterable


A, B, C = map(letter_id, "abc")
NBYTES = 64 << 20
NODES = 3


def planner_members(*nodes: int) -> tuple[m.Member, ...]:
    return tuple(m.Member(node, 1, 700 + node, 1) for node in nodes)


class RestartedPlanner:
    """A planner before and one after, and all that was said to nodes."""

    def __init__(self) -> None:
        self.planner = Planner()
        self.told: list[Any] = []
        for node in range(NODES):
            self.say(m.NodeJoined(700 + node, 1, 1))

    def say(self, message: Any, now: float = 0.0) -> list[tuple[int, Any]]:
        sends = list(self.planner.step(message, now).sends)
        self.told += [one for _, one in sends]
        return sends

    def latest(self, kind: type) -> Any:
        return next(one for one in reversed(self.told) if isinstance(one, kind))

    def die(self) -> None:
        """The planner; nothing has come back yet."""
        self.planner = Planner(again=True)

    def back(
        self, reports: dict[int, Iterable[Any]], known: Iterable[int] = range(NODES)
    ) -> list[tuple[int, Any]]:
        """All of these nodes come and report; returns what is said, but for who is there."""
        sends = []
        for node, facts in reports.items():
            returned = r.NodeReturned(node, 1, NODES, planner_members(*known))
            for message in (returned, *facts, r.ReportComplete(node)):
                sends += self.say(message)
        admitted = [node for node, one in sends if isinstance(one, m.NodeAdmitted)]
        assert admitted == list(reports)
        return [send for send in sends if not isinstance(send[1], m.NodeAdmitted)]

    def group(self) -> m.GroupMembers:
        """Formed, of one member on each of the nodes 0 and 1."""
        for node in (0, 1):
            self.say(m.GroupJoinRequested(1, node, 5, 1, "g", 2, node))
        shown = self.latest(m.GroupMembers)
        assert isinstance(shown, m.GroupMembers)
        return shown


def empty_reports() -> dict[int, tuple[Any, ...]]:
    return {node: () for node in range(NODES)}


def start_fold(cluster: RestartedPlanner) -> tuple[m.ReduceRequested, m.ExecuteReduce]:
    request = m.ReduceRequested(
        7, 0, 1, (A, B, C), "sum", 3, kind="allreduce", ready=(0, 1, 2),
        ready_nbytes=(NBYTES,) * 3, ready_layouts=(b"x",) * 3, ready_holders=((0,), (1,), (2,)),
    )  # fmt: skip
    cluster.say(request)
    plan = cluster.latest(m.ExecuteReduce)
    assert isinstance(plan, m.ExecuteReduce)
    return request, plan


class CopyCluster:
    """Copies between so many nodes, of which node 0, or whoever is named, holds everything."""

    def __init__(self, nodes: int) -> None:
        self.speeds = LinkSpeeds()
        self.membership = ClusterMembership()
        for node in range(nodes):
            self.membership.join(m.NodeJoined(700 + node, 1, 1))
        self.copies = Copies(self.membership, self.speeds, PlanLog())

    def fetch(
        self,
        node: int,
        nbytes: int = NBYTES,
        holders: tuple[int, ...] = (0,),
        object_id: bytes = A,
    ) -> m.Distribute:
        sends = self.copies.fetch(m.FetchRequested(node, object_id, nbytes, holders), 0.0)
        (plan,) = {one for _, one in sends if isinstance(one, m.Distribute)}
        return plan

    def spread(self, *nodes: int) -> m.Distribute:
        sends, _ = self.copies.spread(A, NBYTES, (0,), nodes, 0.0)
        (plan,) = {one for _, one in sends if isinstance(one, m.Distribute)}
        return plan


class PlannedCluster:
    """A planner with some nodes, and short words for what they say."""

    def __init__(self, nodes: int) -> None:
        self.planner = Planner()
        for node in range(nodes):
            self.say(m.NodeJoined(700 + node, 1, 1))

    def say(self, message: m.NodeToManager) -> list[tuple[int, Any]]:
        return list(self.planner.step(message, 0.0).sends)

    def plan(self, message: m.NodeToManager) -> Any:
        """The one plan that follows."""
        kinds = (m.Distribute, m.ExecuteReduce)
        plans = [one for _, one in self.say(message) if isinstance(one, kinds)]
        assert plans
        assert all(one == plans[0] for one in plans)
        return plans[0]

    def fetch(self, node: int, *holders: int, object_id: bytes = A) -> m.Distribute:
        plan = self.plan(m.FetchRequested(node, object_id, NBYTES, holders))
        assert isinstance(plan, m.Distribute)
        return plan

    def ask(self, number: int, *refs: bytes, kind: str = "reduce", **more: Any) -> None:
        self.say(m.ReduceRequested(number, 0, 1, refs, "sum", len(refs), kind=kind, **more))


def task_at(at: int) -> bytes:
    return (701).to_bytes(8, "little") + at.to_bytes(8, "little")


def shown_by(cluster: RestartedPlanner) -> Any:
    """The version of the members that was sent last."""
    return cluster.latest(m.GroupMembers)


def join_request(
    request: int, node: int, client: int, name: str, size: int, rank: int | None, **more: Any
) -> m.GroupJoinRequested:
    return m.GroupJoinRequested(request, node, client, 1, name, size, rank, **more)


def answer_to(sends: list[tuple[int, Any]], to: int) -> Any:
    (one,) = [one for node, one in sends if node == to and isinstance(one, m.GroupJoined)]
    return one


def versions_to(sends: list[tuple[int, Any]], to: int) -> list[Any]:
    return [one for node, one in sends if node == to and isinstance(one, m.GroupMembers)]
