"""Who owns the stripes of an allreduce when the link of one owner becomes slow in the middle of it.

Why it exists: of n hosts, one that owns the share w of the array sends and receives (1 - w) of it
for the others' stripes and (n - 1) w for its own: parts of stripes, then results of folds. Without
a stripe it does so with the array once. So if its link becomes slow early enough, the call is over
earlier when the others take its stripe. What it has sent to other owners counts as before
(node/collectives/carryover.py), but parts of its own stripe that it has received are sent once
more, to others. Reduces and broadcasts gain nothing by this: there each host sends or receives the
whole array anyway.
It must never know: how messages travel, clocks, how bytes move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.protocol.fields import SHARES
from hoplite_mp.protocol.messages import ExecuteReduce

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hoplite_mp.planner.topology import Host
    from hoplite_mp.protocol.group_calls import GroupSlow, Plan

__all__ = ["is_slow", "owners_without", "slow_one", "stays_slow"]

# With fewer owners left, each would send as much more as the slow one sends less.
OWNERS_LEFT_MIN = 2
# The rest of the call must take less than this part of the time that it would take as it is.
# Higher: stripes are changed for little; a rate that was measured wrongly then costs time.
WORTHWHILE = 0.9
# A link is slow if it carries less than this part of what it has to, for the call to take as long
# as the slowest link needs by the rates that are known. A host that is faster than the others sends
# less than it can because they take no more. Higher: busy processors count as slow links.
EXPECTED = 0.6
# One of several hosts that are slow at the same time is the slow one if it sends at less than this
# part of the rate of each other. If they are equally slow, they share processors, or a switch, that
# are busy. Higher: such hosts are taken for slow ones by chance.
SLOWEST = 0.7


def is_slow(node: int, report: GroupSlow, plan: Plan | None, rates: Mapping[int, Host]) -> bool:
    """Does that node, which has reported a slow link, send less than the plan needs? rates: bytes
    per second of the links, by node."""
    if not isinstance(plan, ExecuteReduce) or plan.kind != "allreduce":
        return False
    owned = _owned(plan)
    if any(one not in rates for one in owned) or node not in owned:
        return False
    moves = {one: _moved(plan, share) for one, share in owned.items()}
    call_s = max(nbytes / max(1.0, min(rates[one])) for one, nbytes in moves.items())
    return report.up * call_s < EXPECTED * moves[node]


def slow_one(reports: Mapping[int, GroupSlow]) -> int | None:
    """The node whose link is slow, by the reports of nodes by number; None: no single one."""
    if not reports:
        return None
    node, *others = sorted(reports, key=lambda one: reports[one].up)
    if others and reports[node].up >= SLOWEST * reports[others[0]].up:
        return None
    return node


def stays_slow(report: GroupSlow | None, believed: Host | None, up: float) -> bool:
    """Is a link still as slow as it is believed to be, although its own node remembers `up`?"""
    if report is None or believed is None or believed.up > EXPECTED * up:
        return False
    return report.up < believed.up / EXPECTED


def owners_without(reports: Mapping[int, GroupSlow], plan: Plan | None) -> set[int]:
    """The owners that the stripes of that plan should have from now on; none: those that they have.
    reports: of the nodes whose links are slow."""
    node = slow_one(reports)
    if node is None or not isinstance(plan, ExecuteReduce) or plan.kind != "allreduce":
        return set()
    owned = _owned(plan)
    left = {one for one, share in owned.items() if share} - {node}
    if not owned.get(node) or len(left) < OWNERS_LEFT_MIN:
        return set()
    report, share = reports[node], owned[node]
    return (
        left
        if _without_s(report, plan, share) < WORTHWHILE * _with_s(report, plan, share)
        else set()
    )


def _owned(plan: ExecuteReduce) -> dict[int, float]:
    """The part of the array that each node owns; 0 for nodes that own nothing."""
    owned = dict.fromkeys((*plan.holders, *plan.destinations), 0.0)
    for stripe in plan.stripes:
        width = (stripe.end_share - stripe.begin_share) / SHARES
        owned[stripe.owner] = owned.get(stripe.owner, 0.0) + width
    return owned


def _moved(plan: ExecuteReduce, share: float) -> float:
    """The bytes that a node sends, and receives, which owns that share of the array."""
    count = len({*plan.holders, *plan.destinations})
    return plan.nbytes * (1 - share + (count - 1) * share)


def _with_s(report: GroupSlow, plan: ExecuteReduce, share: float) -> float:
    """Seconds until the slow host has sent and received everything, if it keeps its stripe."""
    moves = _moved(plan, share)
    sending = (moves - report.sent) / max(1, report.up)
    return max(sending, (moves - report.received) / max(1, report.down))


def _without_s(report: GroupSlow, plan: ExecuteReduce, share: float) -> float:
    """Likewise without a stripe. Owners send results of folds after all parts, so what it has
    received were parts of its own stripe; results are sent again in any case."""
    sending = (plan.nbytes - min(plan.nbytes * (1 - share), report.sent)) / max(1, report.up)
    return max(sending, plan.nbytes / max(1, report.down))
