"""Ways to obtain the plan of a Group call, one class each, tried in the order of PLAN_SOURCES.

- *Inline*: all contributions are small, so messages carry them and no plan is needed.
- *Repeated*: all nodes have begun with the plan of an earlier call (`repeated_plans.py`).
- *Fresh*: the leading node makes a plan when all members have called.
- *Speculative*: the leading node makes a plan before the members on the last host have called.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from hoplite_mp._node.groups.group_decisions import Decision, decide
from hoplite_mp._node.groups.repeated_plans import PART_BYTES_MAX, named_by_all, repeat
from hoplite_mp._planner.link_speeds import BYTES_PER_S_DEFAULT
from hoplite_mp._protocol.fields import NO_OBJECT, shorten
from hoplite_mp._protocol.group_calls import Piece, error_kind
from hoplite_mp._protocol.messages import ExecuteReduce

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from hoplite_mp._node.groups.group_decisions import UndecidedCall
    from hoplite_mp._planner.link_speeds import HostRates
    from hoplite_mp._protocol.group_calls import GroupAttempt, GroupPart, Plan

__all__ = [
    "WAIT_SHARE",
    "PlannedCall",
    "Speculative",
    "decide_or_fail",
    "fill_in",
    "fits",
    "lacks",
    "planned",
    "transfer_s",
]

_log = logging.getLogger("hoplite_mp")


class PlannedCall(NamedTuple):
    """A decision and the state of its plan."""

    outcome: Decision
    missing: Collection[int] = ()  # ranks whose contributions are assumed
    begun: bool = False  # all nodes have begun to move the bytes


class PlanSource(Protocol):
    """One source of plans."""

    def plan(self, undecided: UndecidedCall) -> PlannedCall | None:
        """The decision on a call, or None if this source does not apply."""


class Inline:
    """Messages carry the contributions."""

    def plan(self, undecided: UndecidedCall) -> PlannedCall | None:
        parts = undecided.given.values()
        if any(piece.payload is None for part in parts for piece in part.pieces):
            return None
        return PlannedCall(decide_or_fail(undecided)) if undecided.is_complete else None


class Repeated:
    """All nodes have begun with the plan of an earlier call."""

    def plan(self, undecided: UndecidedCall) -> PlannedCall | None:
        begun, parts = undecided.begun, undecided.given.values()
        if begun is None or not undecided.is_complete or not named_by_all(undecided.members, parts):
            return None
        outcome = decide_or_fail(undecided)
        return PlannedCall(outcome, begun=True) if repeat(outcome, begun) else None


class Fresh:
    """All members have called, and the leading node makes a plan."""

    def plan(self, undecided: UndecidedCall) -> PlannedCall | None:
        if not undecided.is_complete:
            return None
        return PlannedCall(decide_or_fail(undecided, before=undecided.before))


class Speculative:
    """The members on the last host have not called. Their contributions are assumed to have the
    same size and type as the first contribution that has arrived.

    The contributions of the other hosts move while the members on the last host are still
    computing. The last host owns no stripe, so it only sends its contributions and receives the
    result, which takes about one transfer instead of two. If its contributions differ, the attempt
    is given up and the call is decided again.
    """

    def plan(self, undecided: UndecidedCall) -> PlannedCall | None:
        members, expected, given = undecided.members, undecided.ranks, undecided.given
        missing = [rank for rank in expected if rank not in given]
        there = list(dict.fromkeys(members.nodes[rank] for rank in given if rank in expected))
        nodes = {members.nodes[rank] for rank in expected}
        if not missing or len(there) < 2 or len(there) != len(nodes) - 1:
            return None
        first = next(iter(given.values()))
        if first.kind != "allreduce" or not first.pieces or first.pieces[0].nbytes < BYTES_MIN:
            return None
        if members.joining or any(members.nodes[rank] in there for rank in missing):
            return None
        like = first.pieces[0]
        assumed = {
            rank: msgspec.structs.replace(
                first,
                ranks=(rank,),
                pieces=(Piece(rank, -1, like.nbytes, None, NO_OBJECT, like.layout),),
            )
            for rank in missing
        }
        owners = [node for node in there if node is not None]
        outcome = decide(dataclasses.replace(undecided, given={**given, **assumed}), owners)
        if outcome.error or not outcome.plans or outcome.pieces:
            return None
        (plan,) = outcome.plans
        if not isinstance(plan, ExecuteReduce) or plan.kind != "allreduce":
            return None
        return PlannedCall(outcome, set(missing))


PLAN_SOURCES: tuple[PlanSource, ...] = (Inline(), Repeated(), Fresh(), Speculative())


def planned(undecided: UndecidedCall) -> PlannedCall | None:
    """The decision of the first source that applies, or None if the call has to wait."""
    return next(filter(None, (source.plan(undecided) for source in PLAN_SOURCES)), None)


def decide_or_fail(
    undecided: UndecidedCall, owners: Collection[int] = (), before: Plan | None = None
) -> Decision:
    """Decides a call. If `decide` raises an error, the decision is that every rank raises this
    error. Otherwise all members would wait indefinitely."""
    try:
        return decide(undecided, owners, before)
    except Exception as error:
        name, call, ranks = undecided.members.name, undecided.call, undecided.ranks
        _log.exception("group %s: call %d cannot be decided", name, call)
        first = undecided.given[ranks[0]]
        text = f"group {name!r}: call {call} cannot be decided: {error!r}"
        outcome = Decision(tuple(ranks), first.kind, first.op, first.root)
        return outcome.fail(error_kind(error), shorten(text))


# The minimum size of a contribution for an early start. A smaller call is too short to gain from
# one. Invariant: no node repeats the plan of a call that may begin early, because the node would
# begin the call with another attempt.
BYTES_MIN = PART_BYTES_MAX
# How long the leading node waits for the last host, as a share of the time of one transfer. Higher:
# a call with a late member begins later. Lower: calls whose members arrive nearly together begin
# without the last one, and take up to a ninth longer, because one fewer host owns a stripe.
WAIT_SHARE = 0.1


def transfer_s(part: GroupPart, rates: Mapping[int, HostRates]) -> float | None:
    """The seconds needed for one transfer of the contribution, or None if the call cannot begin
    early."""
    large = [piece for piece in part.pieces if piece.payload is None]
    if part.kind != "allreduce" or not large or large[0].nbytes < BYTES_MIN:
        return None
    known = [min(host) for host in rates.values()]
    return large[0].nbytes / (max(known) if known else BYTES_PER_S_DEFAULT)


def fits(part: GroupPart, plan: Plan) -> bool:
    """Whether the contributions are as the plan assumed."""
    return (
        isinstance(plan, ExecuteReduce)
        and not part.mistake
        and (part.kind, part.op) == (plan.kind, plan.op)
        and len(part.pieces) == len(part.ranks)
        and all(
            piece.payload is None and piece.layout == plan.layout and piece.nbytes == plan.nbytes
            for piece in part.pieces
        )
    )


def lacks(message: GroupAttempt, ranks: Collection[int]) -> bool:
    """Whether the contribution of one of these ranks was only assumed when the attempt was
    decided."""
    return any(
        rank in ranks and known == NO_OBJECT
        for plan in message.plans
        if isinstance(plan, ExecuteReduce)
        for rank, known in zip(plan.members, plan.objects, strict=True)
    )


def fill_in(message: GroupAttempt, part: GroupPart) -> GroupAttempt | None:
    """Returns the attempt with the contributions of this node's members filled in, or None if the
    contributions are not as assumed."""
    (plan,) = message.plans
    if not isinstance(plan, ExecuteReduce) or not fits(part, plan):
        return None
    given = {piece.source: piece.object for piece in part.pieces}
    objects = tuple(
        given.get(rank, known) for rank, known in zip(plan.members, plan.objects, strict=True)
    )
    return msgspec.structs.replace(message, plans=(msgspec.structs.replace(plan, objects=objects),))
