"""The speeds of the links, as measured by the nodes.

Each node reports latencies and rates. Latencies are measured by probes when the node joins. Rates
are measured in backlogged transfers, because only these show the capacity of a link. Latencies are
smoothed with a half life of HALF_LIFE_REPORTS. Rates are smoothed by the nodes that measure them
(_node/peers/link_estimator.py), so that one bad second does not change all plans. Nodes report a
rate only when it has changed, so a second smoothing here would never reach a new steady value. A
rate that no node has measured is assumed to be the median of the measured rates, or a gigabit
Ethernet if there are none. A wrong guess costs time, never correctness.

Rates are kept per host and direction, because a switched LAN is a star. A pair that is much slower
than both its ends shows that the LAN is not a star; such pairs are reported, and their rates are
kept, too. Plans avoid slow pairs, so a pair that has become fast would never be measured again.
Therefore the rate of a pair is ignored if no report has confirmed it for PAIR_S.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from hoplite_mp._protocol.plans import NODES_REPORTED_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

LATENCY_S_DEFAULT = 100e-6  # one way, within a LAN
BYTES_PER_S_DEFAULT = 125e6  # gigabit Ethernet
# After this many reports the weight of a report is halved. Higher: smoother, and slower to react.
HALF_LIFE_REPORTS = 4
# A pair with less than this part of its ends' capacity must share a narrower link with other pairs.
STAR_TOLERANCE = 0.7
# How long the reported rate of a pair is used. Lower: plans use the slow pair fully more often, and
# so measure it again. Higher: a path that has become faster stays unused for longer.
PAIR_S = 300.0
# A host that reports at least this part of the fastest rate counts as equally fast: most links are
# alike, and a small measurement error would cause a large error in the shares. Higher: plans follow
# small differences between links, and also measurement errors.
ALIKE = 0.7

_WEIGHT = 1.0 - 0.5 ** (1.0 / HALF_LIFE_REPORTS)


class HostRates(NamedTuple):
    """Bytes a second that a host can send and receive, both at once."""

    up: float
    down: float


def levelled(rate: float, fastest: float) -> float:
    """The rate for plans: the fastest rate, if the measured rate is nearly as fast."""
    return rate if rate < ALIKE * fastest else fastest


def _smooth(before: float | None, report: float) -> float:
    return report if before is None else before + _WEIGHT * (report - before)


class _Rates:
    """Rates by node, and their median."""

    def __init__(self) -> None:
        self.by_node: dict[int, float] = {}
        self._sorted: list[float] = []

    def report(self, node: int, value: float) -> None:
        self.drop(node)
        self.by_node[node] = value
        insort(self._sorted, value)

    def drop(self, node: int) -> None:
        before = self.by_node.pop(node, None)
        if before is not None:
            del self._sorted[bisect_left(self._sorted, before)]

    @property
    def guess(self) -> float:
        """The assumed rate of a host that has reported none."""
        known = self._sorted
        return known[len(known) // 2] if known else BYTES_PER_S_DEFAULT


class LinkSpeeds:
    """Latency and rates of living nodes."""

    def __init__(self) -> None:
        self._up = _Rates()
        self._down = _Rates()
        # (rates by node, rates of hosts that have reported none); None: to be recomputed.
        self._hosts: tuple[dict[int, HostRates], HostRates] | None = None
        self.changes = 0  # number of reports that affect stripe plans; rates of pairs do not
        self._latency: dict[int, float] = {}  # node -> smoothed over all its peers
        self._pairs: dict[int, dict[int, float]] = {}  # node -> peer -> latency
        # Node -> peer -> (rate, when it was reported).
        self._narrow: dict[int, dict[int, tuple[float, float]]] = {}

    def measure_link(
        self, node: int, peer: int, latency_s: float | None, rate: float | None, now: float
    ) -> None:
        """Records a report about the path from `node` to `peer`."""
        if rate is not None:
            self._narrow.setdefault(node, {})[peer] = rate, now
        if latency_s is None:
            return
        self.changes += 1
        row = self._pairs.setdefault(node, {})
        row[peer] = _smooth(row.get(peer), latency_s)
        for one in (node, peer):
            self._latency[one] = _smooth(self._latency.get(one), latency_s)

    def measure_host(self, node: int, up: float | None, down: float | None) -> None:
        """Records a report about all links of a host as a whole."""
        self._hosts = None
        self.changes += 1
        if up is not None:
            self._up.report(node, up)
        if down is not None:
            self._down.report(node, down)

    def lose(self, node: int) -> None:
        """Forgets a lost node's links, which may have changed when its host joins again."""
        self._hosts = None
        self.changes += 1
        self._up.drop(node)
        self._down.drop(node)
        self._latency.pop(node, None)
        for table in (self._pairs, self._narrow):
            table.pop(node, None)
            for row in table.values():
                row.pop(node, None)

    def hosts(self, nodes: Iterable[int]) -> list[HostRates]:
        """The rates of these nodes, in their order."""
        if self._hosts is None:
            ups, downs = self._up.by_node, self._down.by_node
            unknown = HostRates(self._up.guess, self._down.guess)
            up, down = (max(rates.values(), default=0.0) for rates in (ups, downs))
            known = {
                n: HostRates(
                    levelled(ups[n], up) if n in ups else unknown.up,
                    levelled(downs[n], down) if n in downs else unknown.down,
                )
                for n in (*ups, *downs)
            }
            self._hosts = known, unknown
        known, unknown = self._hosts
        return [known.get(node, unknown) for node in nodes]

    def measured(self, nodes: Iterable[int]) -> dict[int, HostRates]:
        """The rates of the nodes that have reported both of their rates."""
        some = [n for n in nodes if n in self._up.by_node and n in self._down.by_node]
        return dict(zip(some, self.hosts(some), strict=True))

    def described(self, nodes: Iterable[int]) -> tuple[tuple[int, float, float, bool], ...]:
        """(node, up, down, whether it has reported a rate) for the first NODES_REPORTED_MAX of
        these nodes."""
        some = list(islice(nodes, NODES_REPORTED_MAX))
        ups, downs = self._up.by_node, self._down.by_node
        return tuple(
            (node, rates.up, rates.down, node in ups or node in downs)
            for node, rates in zip(some, self.hosts(some), strict=True)
        )

    def latency_s(self, nodes: Iterable[int]) -> float:
        """Seconds one way between any two of these nodes: the largest known average of a node."""
        known = self._latency
        return max((known[n] for n in nodes if n in known), default=LATENCY_S_DEFAULT)

    def pair_rates(self, nodes: Iterable[int], now: float) -> dict[tuple[int, int], float]:
        """Bytes a second from one of these nodes to another, for each pair whose rate was reported
        within PAIR_S and is less than the capacity of both ends."""
        some = list(nodes)
        if not self._narrow:
            return {}
        rates = dict(zip(some, self.hosts(some), strict=True))
        return {
            (node, peer): rate
            for node in some
            for peer, (rate, reported_at) in self._narrow.get(node, {}).items()
            if peer in rates
            and peer != node
            and now - reported_at < PAIR_S
            and rate < min(rates[node].up, rates[peer].down)
        }

    def pair_latency_s(self, node: int, peer: int) -> float:
        """Seconds one way, as measured by either of the two, or the default."""
        ours = self._pairs.get(node, {}).get(peer)
        measured = self._pairs.get(peer, {}).get(node) if ours is None else ours
        return LATENCY_S_DEFAULT if measured is None else measured

    def is_star(self, nodes: Iterable[int], now: float) -> bool:
        """Whether the rates of the hosts alone explain the measurements between these nodes."""
        some = list(nodes)
        pairs = self.pair_rates(some, now)
        if not pairs:
            return True
        rates = dict(zip(some, self.hosts(some), strict=True))
        return all(
            rate >= STAR_TOLERANCE * min(rates[node].up, rates[peer].down)
            for (node, peer), rate in pairs.items()
        )
