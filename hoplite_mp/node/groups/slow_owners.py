"""Who owns the stripes of an allreduce when the link of one owner becomes slow in the middle of it.

Why it exists: of n hosts an owner sends and receives 2 (n - 1) / n of the array: parts of stripes,
then results of folds. Without a stripe it does so with the array once. So if its link becomes slow
early enough, the call is over earlier when the others take its stripe. What it has sent to other
owners counts as before (node/collectives/carryover.py), but parts of its own stripe that it has
received are sent once more, to others. Reduces and broadcasts gain nothing by this: there each host
sends or receives the whole array anyway.
It must never know: messages' ways, clocks, how bytes move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.protocol.messages import ExecuteReduce

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hoplite_mp.protocol.group_calls import GroupSlow, Plan

__all__ = ["owners_without", "slow_one"]

# With fewer owners left, each would send as much more as the slow one sends less.
OWNERS_LEFT_MIN = 2
# The rest of the call must take less than this part of the time that it would take as it is.
# Higher: stripes are changed for little; a rate that was measured wrongly then costs time.
WORTHWHILE = 0.9
# One of several hosts that are slow at the same time is the slow one if it sends at less than this
# part of the rate of each other. If they are equally slow, they share processors, or a switch, that
# are busy. Higher: such hosts are taken for slow ones by chance.
SLOWEST = 0.7


def slow_one(reports: Mapping[int, GroupSlow]) -> int | None:
    """The node whose link is slow, by the reports of nodes by number; None: no single one."""
    if not reports:
        return None
    node, *others = sorted(reports, key=lambda one: reports[one].up)
    if others and reports[node].up >= SLOWEST * reports[others[0]].up:
        return None
    return node


def owners_without(slow: Mapping[int, GroupSlow], plan: Plan | None) -> set[int]:
    """The owners that the stripes of that plan should have from now on; none: those that they have.
    slow: the reports of nodes whose links have become slow."""
    node = slow_one(slow)
    if node is None or not isinstance(plan, ExecuteReduce) or plan.kind != "allreduce":
        return set()
    owners = {stripe.owner for stripe in plan.stripes}
    left = owners - {node}
    if left == owners or len(left) < OWNERS_LEFT_MIN:
        return set()
    report = slow[node]
    return left if _with_none(report, plan) < WORTHWHILE * _with_its_own(report, plan) else set()


def _with_its_own(report: GroupSlow, plan: ExecuteReduce) -> float:
    """Seconds until the slow host has sent and received everything, if it keeps its stripe."""
    count = len({*plan.holders, *plan.destinations})
    total = 2 * (count - 1) / count * plan.nbytes
    sending = (total - report.sent) / max(1, report.up)
    return max(sending, (total - report.received) / max(1, report.down))


def _with_none(report: GroupSlow, plan: ExecuteReduce) -> float:
    """Likewise without a stripe. Owners send results of folds after all parts, so what it has
    received were parts of its own stripe; results are sent again in any case."""
    parts = plan.nbytes * (1 - 1 / len({*plan.holders, *plan.destinations}))
    sending = (plan.nbytes - min(parts, report.sent)) / max(1, report.up)
    return max(sending, plan.nbytes / max(1, report.down))
