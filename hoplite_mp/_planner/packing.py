"""Packs spanning trees for links that do not form a star, and divides an object among the trees.

Blink (Wang et al., MLSys 2020) packs trees fractionally by multiplicative weights. Every limit (a
pair's rate, a host's up rate, a host's down rate) has a price that grows with its use; the cheapest
tree is added repeatedly until the prices show that no further tree fits. The method is due to Garg
and Könemann (FOCS 1998). The cheapest tree from a root to all other nodes is a minimum
arborescence, found by the algorithm of Chu-Liu and Edmonds. The result is within about EPSILON of
the best possible rate. Afterwards only the heaviest trees are kept, namely the fewest that reach
the fraction KEEP_RATE of this rate.

Packing takes 0.1 s for 8 nodes and 1.4 s for 16. Therefore the planner only requests trees, in a
field of StepResult. The manager's loop calls `pack` in the background, and passes the answer to the
planner's `step`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hoplite_mp._planner.link_speeds import LinkSpeeds

    Edge = tuple[int, int]  # (sender, receiver), both as indices into `nodes`

# The largest relative gap between the rate of the packing and the best rate. Lower: more rounds, in
# proportion to 1/EPSILON².
EPSILON = 0.12
# Trees are removed as long as this fraction of the rate remains.
KEEP_RATE = 0.99
# The number of streams into which the whole rate is divided. An engine alternates between the
# streams of a link after each block. Nearly equal streams therefore share each link in proportion
# to the weights of their trees. Higher: a better proportion, more streams and shorter blocks.
STREAMS = 64
# Rates are rounded to powers of this number, so that small changes in a rate need no new packing.
RATE_STEP = 2**0.25


@dataclass(frozen=True, slots=True)
class PackingWanted:
    """A request to pack trees from nodes[0] to all other nodes. Equal requests have equal answers,
    so requests also serve as keys.

    `up`, `down`: the rate of each node in bytes per second. `pairs`: (sender, receiver, bytes per
    second) for the pairs that are slower than both their ends, with indices into `nodes`.
    """

    nodes: tuple[int, ...]
    up: tuple[float, ...]
    down: tuple[float, ...]
    pairs: tuple[tuple[int, int, float], ...]

    @classmethod
    def between(cls, nodes: Sequence[int], speeds: LinkSpeeds, now: float) -> PackingWanted:
        """Returns the request for these nodes, with the measured rates in rounded form."""
        hosts = speeds.hosts(nodes)
        places = {node: place for place, node in enumerate(nodes)}
        pairs = sorted(
            (places[sender], places[receiver], _rounded(rate))
            for (sender, receiver), rate in speeds.pair_rates(nodes, now).items()
        )
        return cls(
            tuple(nodes),
            tuple(_rounded(host.up) for host in hosts),
            tuple(_rounded(host.down) for host in hosts),
            tuple(pairs),
        )


@dataclass(frozen=True, slots=True)
class TreesPacked:
    """The answer to a request. `trees`: (weight, parents) for each tree, the heaviest first;
    parents[i] is the parent of nodes[i + 1]."""

    wanted: PackingWanted
    rate: float  # bytes per second of all trees together
    trees: tuple[tuple[float, tuple[int, ...]], ...]

    def streams(self) -> list[tuple[float, tuple[int, ...]]]:
        """Divides the trees into nearly equal streams. Returns (weight, parents) for each."""
        found: list[tuple[float, tuple[int, ...]]] = []
        for weight, parents in self.trees:
            count = max(1, round(weight / self.rate * STREAMS))
            found += [(weight / count, parents)] * count
        return found

    def rate_over(self, links: PackingWanted) -> float:
        """The bytes per second that these trees carry if the links have the rates of `links`, which
        is a request for the same nodes."""
        places = {node: place for place, node in enumerate(links.nodes)}
        weights = {
            tuple(places[parent] for parent in parents): weight for weight, parents in self.trees
        }
        pairs = {(i, j): rate for i, j, rate in links.pairs}
        return sum(weights.values()) / _Prices(links, pairs).overuse(weights)


def _rounded(rate: float) -> float:
    return math.exp(math.log(RATE_STEP) * round(math.log(rate, RATE_STEP)))


def pack(wanted: PackingWanted) -> TreesPacked:
    """Finds trees that together nearly reach the capacity of the links."""
    count = len(wanted.nodes)
    pair_rates = {(i, j): rate for i, j, rate in wanted.pairs}
    edges = [(i, j) for i in range(count) for j in range(1, count) if i != j]
    prices = _Prices(wanted, pair_rates)
    weights: dict[tuple[int, ...], float] = {}
    while not prices.all_sold():
        parents = arborescence(count, {edge: prices.of(edge) for edge in edges})
        amount = prices.largest(parents)
        # Use this tree again, without a search, while it is nearly the cheapest (Fleischer 2000).
        price_max = prices.of_tree(parents) * (1 + EPSILON)
        while prices.of_tree(parents) <= price_max and not prices.all_sold():
            weights[parents] = weights.get(parents, 0.0) + amount
            prices.buy(parents, amount)
    # Scale by the actual overuse of the limits, which never exceeds the upper bound that the method
    # guarantees.
    scale = prices.overuse(weights)
    scaled = {parents: weight / scale for parents, weight in weights.items()}
    kept = _few(scaled, prices)
    rate = sum(weight for _, weight in kept)
    trees = tuple(
        (weight, tuple(wanted.nodes[parent] for parent in parents)) for parents, weight in kept
    )
    return TreesPacked(wanted, rate, trees)


def _few(
    weights: dict[tuple[int, ...], float], prices: _Prices
) -> list[tuple[tuple[int, ...], float]]:
    """The fewest and heaviest trees that reach KEEP_RATE of the rate, scaled up to the limits."""
    ranked = sorted(weights.items(), key=lambda item: (-item[1], item[0]))
    full = sum(weights.values())
    for kept in range(1, len(ranked) + 1):
        few = dict(ranked[:kept])
        scale = prices.overuse(few)
        if sum(few.values()) / scale >= KEEP_RATE * full:
            return [(parents, weight / scale) for parents, weight in few.items()]
    return ranked


class _Prices:
    """The limits and their prices. A limit is the rate of a pair, or a host's up or down rate.

    Because each host receives once in each tree, only the lowest down rate limits the trees.
    """

    def __init__(
        self,
        wanted: PackingWanted,
        pair_rates: Mapping[Edge, float],
    ) -> None:
        self._up = wanted.up
        self._pairs = pair_rates
        self._down = min(wanted.down[1:])
        limits = len(wanted.up) + len(pair_rates) + 1
        self._delta: float = (1 + EPSILON) * ((1 + EPSILON) * limits) ** (-1.0 / EPSILON)
        self._up_price: list[float] = [self._delta / rate for rate in wanted.up]
        self._pair_price: dict[Edge, float] = {
            edge: self._delta / rate for edge, rate in pair_rates.items()
        }
        self._down_price: float = self._delta / self._down

    def all_sold(self) -> bool:
        total: float = self._down_price * self._down
        total += sum(p * r for p, r in zip(self._up_price, self._up, strict=True))
        total += sum(p * self._pairs[e] for e, p in self._pair_price.items())
        return total >= 1

    def of(self, edge: Edge) -> float:
        """The price of one byte per second over this edge, without the down rate, whose price is
        the same for all trees."""
        return self._up_price[edge[0]] + self._pair_price.get(edge, 0.0)

    def of_tree(self, parents: tuple[int, ...]) -> float:
        """The price of one byte per second along this tree, including the down rate."""
        edges = sum(self.of((parent, child)) for child, parent in enumerate(parents, 1))
        return edges + self._down_price

    def _uses(self, parents: tuple[int, ...]) -> list[int]:
        uses = [0] * len(self._up)
        for parent in parents:
            uses[parent] += 1
        return uses

    def largest(self, parents: tuple[int, ...]) -> float:
        """The maximum rate along this tree."""
        amount = self._down
        for rate, uses in zip(self._up, self._uses(parents), strict=True):
            if uses:
                amount = min(amount, rate / uses)
        for child, parent in enumerate(parents, 1):
            amount = min(amount, self._pairs.get((parent, child), amount))
        return amount

    def buy(self, parents: tuple[int, ...], amount: float) -> None:
        for i, uses in enumerate(self._uses(parents)):
            if uses:
                self._up_price[i] *= 1 + EPSILON * amount * uses / self._up[i]
        for child, parent in enumerate(parents, 1):
            edge = (parent, child)
            if edge in self._pair_price:
                self._pair_price[edge] *= 1 + EPSILON * amount / self._pairs[edge]
        self._down_price *= 1 + EPSILON * amount / self._down

    def overuse(self, weights: Mapping[tuple[int, ...], float]) -> float:
        """The largest use of a limit, as a multiple of that limit."""
        up = [0.0] * len(self._up)
        pairs: dict[Edge, float] = {}
        for parents, weight in weights.items():
            for child, parent in enumerate(parents, 1):
                up[parent] += weight
                pairs[(parent, child)] = pairs.get((parent, child), 0.0) + weight
        worst = sum(weights.values()) / self._down
        for used, rate in zip(up, self._up, strict=True):
            worst = max(worst, used / rate)
        for edge, rate in self._pairs.items():
            worst = max(worst, pairs.get(edge, 0.0) / rate)
        return worst


def arborescence(count: int, lengths: Mapping[Edge, float]) -> tuple[int, ...]:
    """Finds the shortest tree from vertex 0 to all others. Returns the parents of vertices 1 to
    count - 1. Raises ValueError if a vertex cannot be reached.

    The algorithm (Chu-Liu 1965, Edmonds 1967) chooses the shortest edge that enters each vertex. If
    these edges form a cycle, the cycle is contracted to one vertex. The length of an edge into the
    cycle is then reduced by the length of the edge that it replaces. The contracted graph is solved
    in the same way, and its solution shows where to open the cycle.
    """
    best: dict[int, Edge] = {}
    for edge, length in lengths.items():
        sender, receiver = edge
        if receiver == 0 or sender == receiver:
            continue
        if receiver not in best or (length, edge) < (lengths[best[receiver]], best[receiver]):
            best[receiver] = edge
    if len(best) < count - 1:
        raise ValueError(f"{count - 1 - len(best)} vertices have no edge that enters them")
    cycle = _find_cycle({receiver: edge[0] for receiver, edge in best.items()})
    if cycle is None:
        return tuple(best[vertex][0] for vertex in range(1, count))
    # The cycle becomes the last vertex of a smaller graph.
    rest = [vertex for vertex in range(count) if vertex not in cycle]
    place = {vertex: index for index, vertex in enumerate(rest)}
    merged = len(rest)
    smaller: dict[Edge, float] = {}
    original: dict[Edge, Edge] = {}  # edge of the smaller graph -> edge of this graph
    for edge, length in lengths.items():
        sender, receiver = edge
        if receiver == 0 or (sender in cycle and receiver in cycle):
            continue
        saved = lengths[best[receiver]] if receiver in cycle else 0.0
        new = (place.get(sender, merged), place.get(receiver, merged))
        if new not in smaller or length - saved < smaller[new]:
            smaller[new] = length - saved
            original[new] = edge
    parents = arborescence(merged + 1, smaller)
    chosen = dict(best)
    for child, parent in enumerate(parents, 1):
        sender, receiver = original[(parent, child)]
        chosen[receiver] = (sender, receiver)
    return tuple(chosen[vertex][0] for vertex in range(1, count))


def _find_cycle(parent_of: Mapping[int, int]) -> set[int] | None:
    """Returns the vertices of a cycle of parents, or None if there is no cycle."""
    seen: set[int] = {0}
    for start in parent_of:
        trail: list[int] = []
        vertex = start
        while vertex not in seen:
            seen.add(vertex)
            trail.append(vertex)
            vertex = parent_of[vertex]
        if vertex in trail:
            return set(trail[trail.index(vertex) :])
    return None
