"""Begins a large allreduce of a Group before its last members have called.

Why it exists: the parts of members that have called can move while the last one still computes.
Stripes are owned by nodes whose members have called, so a late node only has to send its part and
receive the result, which takes about one transfer instead of two. Its part is assumed to be like
the others; if it turns out to differ, the attempt is given up and the call is decided again.
It must never know: messages, clocks, how bytes move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hoplite_mp.contributions import OWNERS_WIDTH_MAX
from hoplite_mp.node.groups.group_decisions import NO_OBJECT, Outcome, decide
from hoplite_mp.planner.topology import BYTES_PER_S_DEFAULT
from hoplite_mp.protocol.group_calls import GroupPart, Piece
from hoplite_mp.protocol.messages import ExecuteReduce

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hoplite_mp.node.groups.group_state import InProgress, State
    from hoplite_mp.planner.topology import Host
    from hoplite_mp.protocol.group_calls import GroupGo, Plan
    from hoplite_mp.protocol.messages import GroupMembers

__all__ = ["decide_speculatively", "fill_in", "is_other", "lacks", "wait_s"]

BYTES_MIN = 4 << 20  # smaller calls are over before a member can be late
# A member is late if it calls later than this share of the time that one transfer takes. Lower:
# calls whose members arrive nearly together begin without the last ones, and take longer.
WAIT_SHARE = 0.03


def wait_s(part: GroupPart, rates: Mapping[int, Host]) -> float | None:
    """How long to wait for the other members before a speculative start; None: there is none, and
    the call begins when all members have called."""
    large = [piece for piece in part.pieces if piece.payload is None]
    if part.kind != "allreduce" or not large or large[0].nbytes < BYTES_MIN:
        return None
    known = [min(host) for host in rates.values()]
    return WAIT_SHARE * large[0].nbytes / (max(known) if known else BYTES_PER_S_DEFAULT)


def decide_speculatively(
    members: GroupMembers,
    call: int,
    attempt: int,
    expected: Sequence[int],
    given: dict[int, GroupPart],
    rates: Mapping[int, Host],
) -> tuple[Outcome, set[int]] | None:
    """(decision, ranks whose parts are assumed); None if it is not worthwhile or not possible."""
    missing = [rank for rank in expected if rank not in given]
    there = {members.nodes[rank] for rank in expected if rank in given}
    nodes = {members.nodes[rank] for rank in expected}
    if not missing or len(there) < 2 or (len(nodes) - 1) / len(there) > OWNERS_WIDTH_MAX:
        return None
    first = next(iter(given.values()))
    if first.kind != "allreduce" or not first.pieces or first.pieces[0].nbytes < BYTES_MIN:
        return None
    if members.joining or there & {members.nodes[rank] for rank in missing}:
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
    owners = {node for node in there if node is not None}
    outcome = decide(members, call, attempt, expected, {**given, **assumed}, rates, owners)
    if outcome.error or not outcome.plans or outcome.pieces:
        return None
    (plan,) = outcome.plans
    if not isinstance(plan, ExecuteReduce) or plan.kind != "allreduce":
        return None
    return outcome, set(missing)


def fits(part: GroupPart, plan: Plan) -> bool:
    """Is this part what the plan assumed?"""
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


def is_other(state: State, in_progress: InProgress) -> bool:
    """Has a late member given something else than was assumed? If so, this gives the attempt up."""
    for part in state.parts.values():
        if part.call == in_progress.call and not in_progress.missing.isdisjoint(part.ranks):
            if not fits(part, in_progress.outcome.plans[0]):
                state.in_progress = None
                return True
            in_progress.missing.difference_update(part.ranks)
    return False


def lacks(message: GroupGo, ranks: Collection[int]) -> bool:
    """Was the part of one of these ranks only assumed when the attempt was decided?"""
    return any(
        rank in ranks and known == NO_OBJECT
        for plan in message.plans
        if isinstance(plan, ExecuteReduce)
        for rank, known in zip(plan.members, plan.objects, strict=True)
    )


def fill_in(message: GroupGo, part: GroupPart) -> GroupGo | None:
    """The attempt with the parts of this node's members filled in; None if they are not as
    assumed."""
    (plan,) = message.plans
    if not isinstance(plan, ExecuteReduce) or not fits(part, plan):
        return None
    given = {piece.source: piece.object for piece in part.pieces}
    objects = tuple(
        given.get(rank, known) for rank, known in zip(plan.members, plan.objects, strict=True)
    )
    return msgspec.structs.replace(message, plans=(msgspec.structs.replace(plan, objects=objects),))
