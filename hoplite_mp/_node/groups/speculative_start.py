"""Begins a large allreduce of a Group before its last host has called.

The other hosts' parts can move while the members of the last host still compute. The last host owns
no stripe, so it only sends its part and receives the result, which takes about one transfer instead
of two. A missing part is assumed to be like the others; if it differs, the attempt is given up and
the call is decided again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hoplite_mp._node.groups.group_decisions import decide
from hoplite_mp._node.groups.repeated_plans import PART_BYTES_MAX
from hoplite_mp._planner.topology import BYTES_PER_S_DEFAULT
from hoplite_mp._protocol.fields import NO_OBJECT
from hoplite_mp._protocol.group_calls import GroupPart, Piece
from hoplite_mp._protocol.messages import ExecuteReduce

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hoplite_mp._node.groups.group_decisions import Decision
    from hoplite_mp._node.groups.group_state import GroupState, InProgress
    from hoplite_mp._planner.topology import HostRates
    from hoplite_mp._protocol.group_calls import GroupGo, Plan
    from hoplite_mp._protocol.messages import GroupMembers

__all__ = [
    "WAIT_SHARE",
    "decide_speculatively",
    "fill_in",
    "is_other",
    "lacks",
    "transfer_s",
]

# Smaller calls are over before a member can be late. Invariant: no call that begins early is one
# whose plan nodes repeat, because these would begin it in another attempt.
BYTES_MIN = PART_BYTES_MAX
# How long the last host is waited for, as a part of the time that one transfer takes. Higher: a
# call with a late member begins later. Lower: calls whose members arrive nearly together begin
# without the last one, and take up to a ninth longer, because one host fewer owns a stripe.
WAIT_SHARE = 0.1


def transfer_s(part: GroupPart, rates: Mapping[int, HostRates]) -> float | None:
    """Seconds that one transfer of such a part takes; None: the call begins when all members have
    called."""
    large = [piece for piece in part.pieces if piece.payload is None]
    if part.kind != "allreduce" or not large or large[0].nbytes < BYTES_MIN:
        return None
    known = [min(host) for host in rates.values()]
    return large[0].nbytes / (max(known) if known else BYTES_PER_S_DEFAULT)


def decide_speculatively(
    members: GroupMembers,
    call: int,
    attempt: int,
    expected: Sequence[int],
    given: dict[int, GroupPart],
    rates: Mapping[int, HostRates],
) -> tuple[Decision, set[int]] | None:
    """(the decision, the ranks whose parts are assumed); None if it is not worthwhile or not
    possible. given: parts by rank, in the order in which they have come."""
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


def is_other(state: GroupState, in_progress: InProgress) -> bool:
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
