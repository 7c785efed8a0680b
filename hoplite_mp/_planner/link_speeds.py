"""The speeds of the links, as measured by the nodes.

Each node reports latencies and rates. Latencies are measured by probes when the node joins. Rates
are measured in backlogged transfers, because only these show the capacity of a link. Latencies are
smoothed with a half life of HALF_LIFE_REPORTS. Rates are smoothed by the nodes that measure them
(_node/peers/link_estimator.py), so that one bad second does not change all plans. Nodes report a
rate only when it has changed, so a second smoothing here would never reach a new steady value. If
the rate of a host has not been measured, it is assumed to be the median of the measured rates, or
that of gigabit Ethernet if there are none. A wrong guess costs time, never correctness.

Rates are kept per host and direction, because a switched LAN is a star. A pair of hosts whose path
is much slower than the links of both hosts shows that the LAN is not a star. The rates of such
pairs are reported and kept, too. Plans avoid slow pairs, so a pair that has become fast would never
be measured again. Therefore the rate of a pair is ignored if no report has confirmed it for PAIR_S.
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
# If the rate of a pair is below this fraction of the capacity of its hosts' links, the LAN is not a
# star.
STAR_TOLERANCE = 0.7
# How long the reported rate of a pair is used. Lower: the slow pair is tried and measured again
# more often. Higher: a path that has become faster stays unused for longer.
PAIR_S = 300.0
# A host with at least this fraction of the fastest rate counts as equally fast. Most links are
# alike, and a small measurement error would cause a large error in the shares. Higher: plans follow
# small differences between links, but also measurement errors.
ALIKE = 0.7

_WEIGHT = 1.0 - 0.5 ** (1.0 / HALF_LIFE_REPORTS)


class HostRates(NamedTuple):
    """The bytes per second that a host can send and receive at the same time."""

    up: float
    down: float


def levelled(rate: float, fastest: float) -> float:
    """The rate to use in plans: the fastest rate if the measured rate is nearly as fast, otherwise
    the measured rate."""
    return rate if rate < ALIKE * fastest else fastest


def _smooth(previous: float | None, report: float) -> float:
    return report if previous is None else previous + _WEIGHT * (report - previous)


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
        previous = self.by_node.pop(node, None)
        if previous is not None:
            del self._sorted[bisect_left(self._sorted, previous)]

    @property
    def guess(self) -> float:
        """The rate that is assumed for a host that has reported none."""
        known = self._sorted
        return known[len(known) // 2] if known else BYTES_PER_S_DEFAULT


class LinkSpeeds:
    """Latency and rates of living nodes."""

    def __init__(self) -> None:
        self._up = _Rates()
        self._down = _Rates()
        # (rates by node, rates of hosts that have reported none). None: must be computed again.
        self._hosts: tuple[dict[int, HostRates], HostRates] | None = None
        # Number of changes that affect stripe plans. Reports of pairs' rates are not counted.
        self.changes = 0
        self._latency: dict[int, float] = {}  # node -> smoothed latency to all its peers
        self._pairs: dict[int, dict[int, float]] = {}  # node -> peer -> latency
        # Node -> peer -> (rate, time of the report).
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
        for end in (node, peer):
            self._latency[end] = _smooth(self._latency.get(end), latency_s)

    def measure_host(self, node: int, up: float | None, down: float | None) -> None:
        """Records a report about the total rates of a host."""
        self._hosts = None
        self.changes += 1
        if up is not None:
            self._up.report(node, up)
        if down is not None:
            self._down.report(node, down)

    def lose(self, node: int) -> None:
        """Forgets a lost node's links, which may be different when its host joins again."""
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
        """The rates of those nodes that have reported both an up rate and a down rate."""
        some = [n for n in nodes if n in self._up.by_node and n in self._down.by_node]
        return dict(zip(some, self.hosts(some), strict=True))

    def described(self, nodes: Iterable[int]) -> tuple[tuple[int, float, float, bool], ...]:
        """Returns (node, up, down, whether the node has reported a rate) for the first
        NODES_REPORTED_MAX of these nodes."""
        some = list(islice(nodes, NODES_REPORTED_MAX))
        ups, downs = self._up.by_node, self._down.by_node
        return tuple(
            (node, rates.up, rates.down, node in ups or node in downs)
            for node, rates in zip(some, self.hosts(some), strict=True)
        )

    def latency_s(self, nodes: Iterable[int]) -> float:
        """The one-way latency in seconds between any two of these nodes: the largest known average
        of a node."""
        known = self._latency
        return max((known[n] for n in nodes if n in known), default=LATENCY_S_DEFAULT)

    def pair_rates(self, nodes: Iterable[int], now: float) -> dict[tuple[int, int], float]:
        """The bytes per second from one of these nodes to another. Contains only pairs whose rate
        was reported within PAIR_S and is below the capacity of the links of both nodes."""
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
        """The one-way latency in seconds, as measured by either node, or the default."""
        own = self._pairs.get(node, {}).get(peer)
        measured = self._pairs.get(peer, {}).get(node) if own is None else own
        return LATENCY_S_DEFAULT if measured is None else measured

    def is_star(self, nodes: Iterable[int], now: float) -> bool:
        """Whether no path between these nodes is much slower than the links of both its hosts."""
        some = list(nodes)
        pairs = self.pair_rates(some, now)
        if not pairs:
            return True
        rates = dict(zip(some, self.hosts(some), strict=True))
        return all(
            rate >= STAR_TOLERANCE * min(rates[node].up, rates[peer].down)
            for (node, peer), rate in pairs.items()
        )
