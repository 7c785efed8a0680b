"""Repairs a plan after the loss of a node, or for an owner with a slow link.

An owner of a stripe keeps every contribution to it in a separate slot until the commit. After the
death of a node, the other owners repeat their folds without the dead node's contributions. Only the
dead node's own stripes are divided among the other owners and sent again. A stripe with the same
owner and bounds is the same stripe in both epochs, and its slots are kept if their contributors
still have the same members. With n owners, a death halfway costs about 1/n of the operation. The
stripes of a node whose link has become slow are cut in the same way (`relieved`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from hoplite_mp._protocol.fields import SHARES
from hoplite_mp._protocol.messages import ExecuteReduce, Stripe

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hoplite_mp._planner.link_speeds import HostRates
    from hoplite_mp._protocol.group_calls import Plan

__all__ = [
    "FRESH_S",
    "SLOW_GATHER_S",
    "SlowLinks",
    "is_slow",
    "owners_without",
    "relieved",
    "slow_one",
    "stays_slow",
]


# A repaired stripe plan is used unless its busiest owner has more than this multiple of the shares
# of the busiest owner in the best new plan. In that case sending everything again is faster.
KEPT_WIDTH_MAX = 2


def kept_cut(
    before: Sequence[Stripe], able: Collection[int], fresh: Sequence[Stripe]
) -> tuple[Stripe, ...] | None:
    """Repairs the previous plan's stripes. Returns None if the `fresh` stripes are much better."""
    kept = repaired(before, able)
    if kept is None or widest(kept) > KEPT_WIDTH_MAX * widest(fresh):
        return None
    return kept


def widest(stripes: Sequence[Stripe]) -> int:
    """The number of shares of the busiest owner."""
    widths: dict[int, int] = {}
    for stripe in stripes:
        width = stripe.end_share - stripe.begin_share
        widths[stripe.owner] = widths.get(stripe.owner, 0) + width
    return max(widths.values())


def repaired(stripes: Sequence[Stripe], able: Collection[int]) -> tuple[Stripe, ...] | None:
    """Divides the stripes of nodes that are not in `able` among the remaining owners, in proportion
    to their shares. Returns None if no owner is left."""
    widths: dict[int, int] = {}
    for stripe in stripes:
        if stripe.owner in able:
            width = stripe.end_share - stripe.begin_share
            widths[stripe.owner] = widths.get(stripe.owner, 0) + width
    if not widths:
        return None
    total = sum(widths.values())
    result: list[Stripe] = []
    for stripe in stripes:
        if stripe.owner in able:
            result.append(stripe)
            continue
        begin, length = stripe.begin_share, stripe.end_share - stripe.begin_share
        reached = 0
        for owner, width in widths.items():
            reached += width
            end = stripe.begin_share + length * reached // total
            if end > begin:
                result.append(Stripe(owner, begin, end))
                begin = end
    return tuple(result)


# New owners for the stripes of an allreduce in which one owner's link becomes slow.
#
# Each of n hosts contributes one array and receives the result. The owner of the share w sends and
# receives (1 - w) of the array for other stripes, and (n - 1) w for its own stripe: contributions
# first, and then results of folds. A host without a stripe sends and receives the array once. If an
# owner's link becomes slow early enough, the call ends earlier when other hosts take over its
# stripe. The contributions that the owner has sent for other stripes are kept
# (_node/execution/plan_state.py), but the contributions to its own stripe are sent again, to the
# new owners. Reduces and broadcasts gain nothing, because each host sends or receives the whole
# array anyway.


# How long to wait for more reports after the first report of a slow link, to find the slow host.
# Higher: stripes are moved later. Lower: stripes are moved without a gain.
SLOW_GATHER_S = 0.1
# A slow link is reported every SAY_AGAIN_S (_node/peers/path_estimator.py) or a little later. After
# this time without a report, a link no longer counts as slow for a running allreduce. Lower: late
# reports from a busy host are missed.
FRESH_S = 0.6

# Minimum number of remaining owners. With fewer owners, each would have to send as many additional
# bytes as the slow owner saves.
OWNERS_LEFT_MIN = 2
# Stripes are moved if the rest of the call then takes less than this fraction of its present time.
# Higher: stripes are moved for little gain, and incorrectly measured rates cost time.
WORTHWHILE = 0.9
# A link is slow if it carries less than this fraction of its needed rate, which follows from the
# expected duration of the call. (A fast host sends at less than its capacity, because the other
# hosts accept no more.) Higher: busy processors count as slow links.
EXPECTED = 0.6
# If several hosts have slow links, the slow host is the one that sends at less than this fraction
# of the rate of each other host. Equally slow hosts share busy processors or a busy switch. Higher:
# one of several equally slow hosts counts as the slow host by chance.
SLOWEST = 0.7


class SlowReport(Protocol):
    """A node's report about its link during an allreduce. `up`, `down`: the present rates in bytes
    per second. `sent`, `received`: the bytes since the start of the call."""

    @property
    def up(self) -> int: ...
    @property
    def down(self) -> int: ...
    @property
    def sent(self) -> int: ...
    @property
    def received(self) -> int: ...


Report = TypeVar("Report", bound=SlowReport)


@dataclass(slots=True)
class SlowLinks(Generic[Report]):
    """The nodes' reports of slow links during one plan, by node."""

    slow: dict[int, Report] = field(default_factory=dict)  # links that are slow by `is_slow`
    reports: dict[int, Report] = field(default_factory=dict)  # all reported links
    heard_at: dict[int, float] = field(default_factory=dict)  # arrival time of the last report
    looks: bool = False  # an evaluation of the reports is pending

    def hear(
        self,
        node: int,
        report: Report,
        plan: Plan | None,
        rates: Mapping[int, HostRates],
        now: float,
    ) -> bool:
        """Records a report. Returns whether the caller must schedule an evaluation of all reports,
        SLOW_GATHER_S from now."""
        self.reports[node] = report
        self.heard_at[node] = now
        self.slow.pop(node, None)  # the link may have recovered
        if not is_slow(node, report, plan, rates):
            return False
        self.slow[node] = report
        begins, self.looks = not self.looks, True
        return begins

    def forget_old(self, age_s: float, now: float) -> None:
        """Removes reports that have not been repeated, because their links are no longer slow."""
        for node in [node for node, at in self.heard_at.items() if now - at > age_s]:
            del self.heard_at[node]
            self.slow.pop(node, None)
            self.reports.pop(node, None)


def is_slow(
    node: int, report: SlowReport, plan: Plan | None, rates: Mapping[int, HostRates]
) -> bool:
    """Whether a node that has reported a slow link sends at too low a rate for the plan. rates: the
    known rates of the links in bytes per second, by node."""
    if not isinstance(plan, ExecuteReduce) or plan.kind != "allreduce":
        return False
    owned = _owned(plan)
    if any(owner not in rates for owner in owned) or node not in owned:
        return False
    moves = {owner: _moved(plan, owner, share) for owner, share in owned.items()}
    call_s = max(
        nbytes / max(1.0, rate)
        for owner, both in moves.items()
        for nbytes, rate in zip(both, rates[owner], strict=True)
    )
    return report.up * call_s < EXPECTED * moves[node][0]


def slow_one(reports: Mapping[int, SlowReport]) -> int | None:
    """The node that sends much more slowly than all others, according to the reports, or None."""
    if not reports:
        return None
    node, *others = sorted(reports, key=lambda reporter: reports[reporter].up)
    if others and reports[node].up >= SLOWEST * reports[others[0]].up:
        return None
    return node


def stays_slow(report: SlowReport | None, believed: HostRates | None, up: float) -> bool:
    """Whether a link is still slow, even though its node still estimates its rate as `up`."""
    if report is None or believed is None or believed.up > EXPECTED * up:
        return False
    return report.up < believed.up / EXPECTED


def owners_without(reports: Mapping[int, SlowReport], plan: Plan | None) -> set[int]:
    """The owners that remain if the stripes of the node with the slow link are moved. Empty if no
    stripes should be moved. reports: the reports from the nodes with slow links."""
    node = slow_one(reports)
    if node is None or not isinstance(plan, ExecuteReduce) or plan.kind != "allreduce":
        return set()
    owned = _owned(plan)
    left = {owner for owner, share in owned.items() if share} - {node}
    if not owned.get(node) or len(left) < OWNERS_LEFT_MIN:
        return set()
    report, share = reports[node], owned[node]
    with_s = _with_s(report, plan, node, share)
    return left if _without_s(report, plan, node, share) < WORTHWHILE * with_s else set()


def relieved(
    links: SlowLinks[Report], plan: ExecuteReduce, now: float
) -> tuple[int, tuple[Stripe, ...]] | None:
    """Moves the stripes of the node with a slow link to the other owners. Returns (the node, all
    stripes after the move), or None if no stripes should be moved."""
    links.looks = False
    links.forget_old(FRESH_S, now)
    stripes = repaired(plan.stripes, owners_without(links.slow, plan))
    slow = slow_one(links.slow)
    return None if stripes is None or slow is None else (slow, stripes)


def _owned(plan: ExecuteReduce) -> dict[int, float]:
    """The fraction of the array that each node owns. It is 0 for nodes that own nothing."""
    owned = dict.fromkeys((*plan.holders, *plan.destinations), 0.0)
    for stripe in plan.stripes:
        width = (stripe.end_share - stripe.begin_share) / SHARES
        owned[stripe.owner] = owned.get(stripe.owner, 0.0) + width
    return owned


def _moved(plan: ExecuteReduce, node: int, share: float) -> tuple[float, float]:
    """The bytes (sent, received) by a node that owns that share of the array."""
    destinations = {*plan.destinations}
    receives, other_receivers = node in destinations, len(destinations - {node})
    if plan.rule == "fold":  # each member is sent separately
        own = plan.holders.count(node)
        from_others = len(plan.holders) - own
    else:
        own, from_others = int(node in plan.holders), len({*plan.holders} - {node})
    sent = own * (1 - share) + other_receivers * share
    received = from_others * share + receives * (1 - share)
    return plan.nbytes * sent, plan.nbytes * received


def _with_s(report: SlowReport, plan: ExecuteReduce, node: int, share: float) -> float:
    """Seconds until the slow node has sent and received all its bytes, if it keeps its stripe."""
    sends, receives = _moved(plan, node, share)
    sending = (sends - report.sent) / max(1, report.up)
    return max(sending, (receives - report.received) / max(1, report.down))


def _without_s(report: SlowReport, plan: ExecuteReduce, node: int, share: float) -> float:
    """Seconds until the slow node has sent and received all its bytes, if it gives up its stripe.
    The received bytes do not count: they are contributions to its own stripe, because results of
    folds are sent last, and always sent again."""
    sends, receives = _moved(plan, node, 0.0)
    sending = (sends - min(sends * (1 - share), report.sent)) / max(1, report.up)
    return max(sending, receives / max(1, report.down))
