"""Begins a large allreduce of a Group before its last members have called.

The parts of members that have called can move while the last one still computes. The last node owns
no stripe, so it only has to send its part and to receive the result, which takes about one transfer
instead of two. The other nodes own the stripes in the order in which they call. A stripe whose
owner has still to call belongs to a node that is expected to call next; no byte of it moves until
then, so it can pass to another one. A part that is missing is assumed to be like the others; if it
turns out to differ, the attempt is given up and the call is decided again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hoplite_mp._node.groups.group_decisions import Decision, decide, shared
from hoplite_mp._node.groups.repeated_plans import PART_BYTES_MAX
from hoplite_mp._planner.stripe_plan import cut
from hoplite_mp._planner.topology import BYTES_PER_S_DEFAULT
from hoplite_mp._protocol.fields import NO_OBJECT, SHARES
from hoplite_mp._protocol.group_calls import GroupPart, Piece
from hoplite_mp._protocol.messages import ExecuteReduce
from hoplite_mp._serialize.contributions import early_shares

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hoplite_mp._node.groups.group_state import GroupState, InProgress
    from hoplite_mp._planner.topology import HostRates
    from hoplite_mp._protocol.group_calls import GroupGo, Plan
    from hoplite_mp._protocol.messages import GroupMembers, Stripe

__all__ = [
    "FEW_WAIT_SHARE",
    "WAIT_SHARE",
    "Early",
    "decide_speculatively",
    "fill_in",
    "is_better_anew",
    "is_other",
    "lacks",
    "transfer_s",
]

# Smaller calls are over before a member can be late. Invariant: no call that begins early is one
# whose plan nodes repeat, because these would begin it in another attempt.
BYTES_MIN = PART_BYTES_MAX
# These are parts of the time that one transfer takes. A member is late if it calls later than that
# after the others. Lower: calls whose members arrive nearly together begin without the last ones,
# and take longer.
WAIT_SHARE = 0.03
# Likewise if more than one host is late. Higher: the first ones exchange less before the others
# call. Lower: plans are made in vain, because the others call soon after that.
FEW_WAIT_SHARE = 0.1
# If links have different rates, only hosts that have called own stripes. With k of n they send
# (n - 1) / k objects each, and no call begins if that exceeds this. Higher: calls begin with fewer
# members present, and take longer after the last one has called.
OWNERS_WIDTH_MAX = 1.2


class Early(NamedTuple):
    """A decision before all have called."""

    outcome: Decision
    missing: set[int]  # ranks whose parts are assumed
    in_order: bool  # nodes own the stripes in the order in which they call


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
    *,
    few: bool = True,
    likely: Sequence[int | None] = (),
    before: Sequence[Stripe] = (),
) -> Early | None:
    """The decision; None if it is not worthwhile or not possible.

    given: parts by rank, in the order in which they have come. few: the call may begin although
    several hosts have not called. likely: nodes in the order in which they are expected to call.
    before: the stripes of the attempt that this one replaces, if there is one."""
    missing = [rank for rank in expected if rank not in given]
    there = list(dict.fromkeys(members.nodes[rank] for rank in given if rank in expected))
    nodes = list(dict.fromkeys(members.nodes[rank] for rank in expected))
    if not missing or len(there) < 2 or not (few or len(there) == len(nodes) - 1):
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
    owners = {node for node in there if node is not None}
    outcome = decide(members, call, attempt, expected, {**given, **assumed}, rates, owners)
    if outcome.error or not outcome.plans or outcome.pieces:
        return None
    (plan,) = outcome.plans
    if not isinstance(plan, ExecuteReduce) or plan.kind != "allreduce":
        return None
    order = [n for n in dict.fromkeys([*there, *likely, *nodes]) if n is not None and n in nodes]
    if before:
        stripes = _taken_over(before, order, len(there))
    elif _are_alike(shared(members, order, like.nbytes, rates), len(order)):
        stripes = cut(zip(order[:-1], early_shares(len(order)), strict=True))
    elif (len(nodes) - 1) / len(there) <= OWNERS_WIDTH_MAX:
        return Early(outcome, set(missing), in_order=False)
    else:
        return None
    outcome.plans = (msgspec.structs.replace(plan, stripes=stripes),)
    return Early(outcome, set(missing), in_order=True)


def _are_alike(stripes: Sequence[Stripe], hosts: int) -> bool:
    """Would all these hosts own as much, because their links have the same rate?"""
    widths = [stripe.end_share - stripe.begin_share for stripe in stripes]
    return len(widths) == hosts and max(widths) - min(widths) <= 1


def is_better_anew(stripes: Sequence[Stripe], moved: float, lag: float) -> bool:
    """All have called. Is the call over earlier if each owns as much as the others from now on?
    moved, lag: for how much of the time of one transfer bytes have moved, and the last but one has
    been there.

    Each host then sends 2 (n - 1) / n objects. Else the last but one still sends what it has not
    sent of its array, and its result to n - 1 others, and the first one receives n - 1 parts of its
    stripe and the results of the others, of which something has come."""
    hosts = len(stripes) + 1
    first, last = ((one.end_share - one.begin_share) / SHARES for one in (stripes[0], stripes[-1]))
    sends = max(0.0, 1 - last - lag) + (hosts - 1) * last
    receives = 1 + (hosts - 2) * first - moved
    return max(sends, receives) > 2 * (hosts - 1) / hosts


def _taken_over(stripes: Sequence[Stripe], order: Sequence[int], there: int) -> tuple[Stripe, ...]:
    """The same stripes. order: all nodes, of which the first `there` have called, in that order.
    Nodes keep what they owned when they called."""
    owners: list[int] = [stripe.owner for stripe in stripes]
    if there < len(stripes):
        owners = list(order[: len(stripes)])
    elif (last := order[-1]) in owners:  # it owns none; perhaps not all stripes have passed on
        owners[owners.index(last)] = next(node for node in order if node not in owners)
    return tuple(
        msgspec.structs.replace(stripe, owner=owner)
        for stripe, owner in zip(stripes, owners, strict=True)
    )


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
