"""Records of the latest plans, for users who ask why an object was moved in a certain way.

A record refers to data that the planner has computed anyway, and is completed by the reports that
end the plan. Records therefore cost no messages, and become text only when a user asks. The records
of PLAN_RECORDS_MAX objects are kept. A new manager begins without records.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from hoplite_mp._protocol.fields import FOLDING, TEXT_CHARS_MAX, shorten
from hoplite_mp._protocol.messages import Distribute, ExecuteReduce
from hoplite_mp._protocol.plans import (
    ESTIMATES_MAX,
    NODES_REPORTED_MAX,
    PLANS_REPORTED_MAX,
    PlanSummary,
)
from hoplite_mp.config import PLAN_RECORDS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Plan: TypeAlias = Distribute | ExecuteReduce
    Estimate: TypeAlias = tuple[str, int, float]  # shape, owners, seconds
    NodeRate: TypeAlias = tuple[int, float, float, bool]

__all__ = ["PlanLog", "PlanRecord", "estimate", "shape_words"]


@dataclass(slots=True)
class PlanRecord:
    """The record of one plan."""

    plan: Plan
    began_at: float
    expected_s: float | None = None
    estimates: Sequence[Estimate] = ()
    rates: Sequence[NodeRate] = ()
    # For a copy to a single receiver, its possible parents: see `Copies._candidates`.
    candidates: Sequence[tuple[bool, float, int, float]] = ()
    why: str = ""
    state: str = "running"
    finished: int = 0
    last_node: int = 0
    last_s: float = 0.0

    def finish(self, node: int, now: float, *, last: bool) -> None:
        """Records that a node has finished. last: whether all other nodes have finished, too."""
        self.finished += 1
        self.last_node, self.last_s = node, max(0.0, now - self.began_at)
        if last:
            self.state = "done"

    def end(self, state: str, now: float, why: str = "") -> None:
        """Records that the whole plan has ended, unless its end is already recorded."""
        if self.state == "running":
            self.state, self.last_s = state, max(0.0, now - self.began_at)
            self.why = why or self.why

    def _compared(self) -> Sequence[Estimate]:
        """The estimates for the alternatives. For a copy to a single receiver, each alternative has
        one candidate as the only parent."""
        return self.estimates or [
            (f"only from h{node}", 1, max(ready_in, self.plan.nbytes / offered))
            for _, ready_in, node, offered in self.candidates
        ]

    def summary(self) -> PlanSummary:
        """Converts the record into the form that is sent to nodes."""
        plan = self.plan
        copies = isinstance(plan, Distribute)
        sources = plan.sources if isinstance(plan, Distribute) else plan.holders
        receivers = plan.receivers if isinstance(plan, Distribute) else plan.destinations
        owners = Counter[int]()
        for stripe in plan.stripes:
            owners[stripe.owner] += stripe.end_share - stripe.begin_share
        if copies and len(receivers) == 1:
            sources = tuple(owners)  # including parents whose own copies are still arriving
        sources = tuple(dict.fromkeys(sources))
        kind = plan.kind if isinstance(plan, ExecuteReduce) else "broadcast"
        return PlanSummary(
            kind="copy" if copies and len(receivers) == 1 else kind,
            shape=shape_words(plan),
            state=self.state,
            nbytes=plan.nbytes,
            sources=sources[:NODES_REPORTED_MAX],
            source_count=len(sources),
            receivers=receivers[:NODES_REPORTED_MAX],
            receiver_count=len(receivers),
            owners=tuple(owners.items())[:NODES_REPORTED_MAX],
            owner_count=len(owners),
            estimates=tuple(sorted(self._compared(), key=lambda one: one[2])[:ESTIMATES_MAX]),
            rates=tuple(self.rates[:NODES_REPORTED_MAX]),
            expected_s=self.expected_s,
            finished=self.finished,
            last_node=self.last_node,
            last_s=self.last_s,
            why=shorten(self.why, TEXT_CHARS_MAX),
        )


class PlanLog:
    """The records by object, or by the result of a collective; the most recent is last."""

    def __init__(self, records_max: int = PLAN_RECORDS_MAX) -> None:
        self._records_max = records_max
        self._records: dict[bytes, list[PlanRecord]] = {}

    def add(self, objects: Iterable[bytes], record: PlanRecord) -> PlanRecord:
        """Adds a record for these objects, and returns it."""
        for _, object_id in zip(range(self._records_max), objects, strict=False):
            rows = self._records.pop(object_id, [])
            rows.append(record)
            del rows[:-PLANS_REPORTED_MAX]
            self._put(object_id, rows)
        return record

    def share(self, result: bytes, object_id: bytes) -> None:
        """Makes all present and future plans of the object count as plans of the result, too."""
        rows = self._records.get(object_id)
        if rows is not None:
            self._records.pop(result, None)
            self._put(result, rows)

    def _put(self, object_id: bytes, rows: list[PlanRecord]) -> None:
        while len(self._records) >= self._records_max:
            del self._records[next(iter(self._records))]
        self._records[object_id] = rows

    def summaries(self, object_id: bytes) -> tuple[PlanSummary, ...]:
        """Summaries of an object's recorded plans, the latest last."""
        return tuple(record.summary() for record in self._records.get(object_id, ()))


def shape_words(plan: Plan) -> str:
    """The shape of a plan, in words for users."""
    owners = {stripe.owner for stripe in plan.stripes}
    if isinstance(plan, ExecuteReduce):
        if plan.kind not in FOLDING:
            return "direct copies"
        if {*owners, *plan.holders, *plan.destinations} == owners and len(owners) == 1:
            return "one node"
        return _shape(plan.shape, len(owners))
    if len(plan.receivers) > 1:
        return _shape("packed trees" if plan.rule == "parents" else plan.rule, len(owners))
    if len(owners) > 1:
        return "stripes"
    return "direct copy" if owners <= set(plan.sources) else "chain"


def _shape(shape: str, owners: int) -> str:
    if shape == "stripes":
        return "stripes" if owners > 1 else "one owner"
    word, _, degree = shape.partition(":")
    if word != "tree":
        return shape
    return "chain" if degree == "1" else f"tree of degree {degree}"


def estimate(shape: str, owners: int, seconds: float) -> Estimate:
    """Returns the estimate for one alternative, with its shape in words for users."""
    return _shape(shape, owners), owners, seconds
