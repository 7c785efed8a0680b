"""How fast the links are, as far as anybody has measured.

Each node reports latencies from probes when it joins, and rates from transfers that were
backlogged: nobody else knows what a link can do. Reports are smoothed with a half life of
HALF_LIFE_REPORTS, so that one bad second does not turn all plans over and a changed cable is
believed after a few transfers. What nobody has measured is taken to be like the median of what was
measured, and a gigabit Ethernet before that: a wrong guess costs time, never correctness.

Rates are kept per host and direction (a switched LAN is a star), and per pair only where a pair
was reported: pairs that are much slower than both their ends say that the LAN is no star.

This module must never know what is sent over a link.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

LATENCY_S_DEFAULT = 100e-6  # one way, within a LAN
BYTES_PER_S_DEFAULT = 125e6  # gigabit Ethernet
# After so many reports the first of them counts half. Higher: calmer, and later to notice.
HALF_LIFE_REPORTS = 4
# A pair below this part of what its ends can do shares a narrower link with somebody.
STAR_TOLERANCE = 0.7
# Who reports at least this part of the fastest rate counts as that: links are mostly alike, and a
# small error of measurement would become a large one of shares. Higher: links that differ little
# are told apart, and so are accidents.
ALIKE = 0.7

_WEIGHT = 1.0 - 0.5 ** (1.0 / HALF_LIFE_REPORTS)


class Host(NamedTuple):
    """Bytes a second that a host can send and receive, both at once."""

    up: float
    down: float


def levelled(rate: float, fastest: float) -> float:
    """A rate as plans take it: that of the fastest, if it is nearly that."""
    return rate if rate < ALIKE * fastest else fastest


def _smooth(before: float | None, report: float) -> float:
    return report if before is None else before + _WEIGHT * (report - before)


class _Rates:
    """Smoothed rates by node, and their median."""

    def __init__(self) -> None:
        self.by_node: dict[int, float] = {}
        self._sorted: list[float] = []

    def report(self, node: int, value: float) -> None:
        before = self.by_node.get(node)
        self.drop(node)
        self.by_node[node] = after = _smooth(before, value)
        insort(self._sorted, after)

    def drop(self, node: int) -> None:
        before = self.by_node.pop(node, None)
        if before is not None:
            del self._sorted[bisect_left(self._sorted, before)]

    @property
    def guess(self) -> float:
        """What a host that has reported nothing is taken for."""
        known = self._sorted
        return known[len(known) // 2] if known else BYTES_PER_S_DEFAULT


class Topology:
    """Latency and rates of living nodes."""

    def __init__(self) -> None:
        self._up = _Rates()
        self._down = _Rates()
        self._hosts: tuple[dict[int, Host], Host] | None = None  # of all; None: something is new
        self._latency: dict[int, float] = {}  # node -> smoothed over all its peers
        self._pairs: dict[int, dict[int, tuple[float, float | None]]] = {}  # node -> peer -> both

    def measure_link(self, node: int, peer: int, latency_s: float, rate: float | None) -> None:
        """A report about the link from `node` to `peer`."""
        row = self._pairs.setdefault(node, {})
        latency_before, rate_before = row.get(peer, (None, None))
        rate_after = rate_before if rate is None else _smooth(rate_before, rate)
        row[peer] = (_smooth(latency_before, latency_s), rate_after)
        for one in (node, peer):
            self._latency[one] = _smooth(self._latency.get(one), latency_s)

    def measure_host(self, node: int, up: float | None, down: float | None) -> None:
        """A report about all links of a host together."""
        self._hosts = None
        if up is not None:
            self._up.report(node, up)
        if down is not None:
            self._down.report(node, down)

    def lose(self, node: int) -> None:
        """The node is gone: its next life may be on another host's cable."""
        self._hosts = None
        self._up.drop(node)
        self._down.drop(node)
        self._latency.pop(node, None)
        self._pairs.pop(node, None)
        for row in self._pairs.values():
            row.pop(node, None)

    def hosts(self, nodes: Iterable[int]) -> list[Host]:
        """The rates of these nodes, in their order."""
        if self._hosts is None:
            ups, downs = self._up.by_node, self._down.by_node
            unknown = Host(self._up.guess, self._down.guess)
            up, down = (max(rates.values(), default=0.0) for rates in (ups, downs))
            known = {
                n: Host(
                    levelled(ups[n], up) if n in ups else unknown.up,
                    levelled(downs[n], down) if n in downs else unknown.down,
                )
                for n in (*ups, *downs)
            }
            self._hosts = known, unknown
        known, unknown = self._hosts
        return [known.get(node, unknown) for node in nodes]

    def latency_s(self, nodes: Iterable[int]) -> float:
        """Seconds one way between any two of these nodes: the longest that is known."""
        known = self._latency
        return max((known[n] for n in nodes if n in known), default=LATENCY_S_DEFAULT)

    def pair_rate(self, node: int, peer: int) -> float | None:
        """Bytes a second from `node` to `peer`, if that pair was measured."""
        return self._pairs.get(node, {}).get(peer, (0.0, None))[1]

    def pair_latency_s(self, node: int, peer: int) -> float:
        """Seconds one way, as measured by either of the two, or the default."""
        ours = self._pairs.get(node, {}).get(peer)
        measured = ours or self._pairs.get(peer, {}).get(node)
        return LATENCY_S_DEFAULT if measured is None else measured[0]

    def is_star(self, nodes: Iterable[int]) -> bool:
        """Do the ends alone explain what was measured between these nodes?"""
        some = list(nodes)
        rates = dict(zip(some, self.hosts(some), strict=True))
        for node in some:
            for peer, (_, rate) in self._pairs.get(node, {}).items():
                if rate is None or peer not in rates:
                    continue
                if rate < STAR_TOLERANCE * min(rates[node].up, rates[peer].down):
                    return False
        return True
