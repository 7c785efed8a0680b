"""Pure functions on the graphs of gossip: matchings, algebraic connectivity, Metropolis weights.

Every rank calls them with the same numbers and must get the same result. So ties are broken by
rank, and values are rounded before they are compared.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "Edge",
    "algebraic_connectivity",
    "choose_matchings",
    "laplacian",
    "matchings",
    "metropolis_weights",
]

Array = np.ndarray[Any, np.dtype[Any]]
Edge = tuple[int, int]  # the lower rank first
DIGITS = 9  # number of digits to which values are rounded before they are compared
EXHAUSTIVE_MAX = 8  # maximum number of matchings whose subsets are all compared


def matchings(quality: Array, ranks: Sequence[int], least: float = 0.0) -> list[list[Edge]]:
    """The pairs of `ranks` whose quality is above `least`, decomposed into matchings, best first.

    quality: symmetric, (size, size). No two edges in a matching share a rank. The edges are
    assigned in descending order of quality, each to the first matching in which both of its ranks
    are free. There are at most 2 Δ - 1 matchings, where Δ is the largest degree."""
    edges = [pair for pair in itertools.combinations(sorted(ranks), 2) if quality[pair] > least]
    edges.sort(key=lambda pair: (-round(float(quality[pair]), DIGITS), _distance(pair, len(ranks))))
    found: list[list[Edge]] = []
    busy: list[set[int]] = []
    for edge in edges:
        for pairs, taken in zip(found, busy, strict=True):
            if taken.isdisjoint(edge):
                pairs.append(edge)
                taken.update(edge)
                break
        else:
            found.append([edge])
            busy.append(set(edge))
    return found


def _distance(pair: Edge, count: int) -> tuple[int, int, int]:
    """A sort key for edges of equal quality. Neighbours on a ring come first, which leads to
    perfect matchings."""
    low, high = pair
    return (min(high - low, count - high + low), low, high)


def laplacian(edges: Iterable[Edge], size: int, weights: Array | None = None) -> Array:
    """The Laplacian of a graph, with weighted edges if `weights` is given."""
    found = np.zeros((size, size))
    for a, b in edges:
        weight = 1.0 if weights is None else float(weights[a, b])
        found[a, b] -= weight
        found[b, a] -= weight
        found[a, a] += weight
        found[b, b] += weight
    return found


def algebraic_connectivity(matrix: Array, ranks: Sequence[int] | None = None) -> float:
    """The second smallest eigenvalue of a Laplacian that is restricted to these ranks; 0 if the
    graph is not connected."""
    if ranks is not None:
        matrix = matrix[np.ix_(ranks, ranks)]
    if len(matrix) < 2:
        return 0.0
    return max(0.0, round(float(np.linalg.eigvalsh(matrix)[1]), DIGITS))


def choose_matchings(
    candidates: Sequence[Sequence[Edge]],
    seconds: Sequence[float],
    budget: float,
    recent: Array,
    ranks: Sequence[int],
    weights: Array | None = None,
) -> list[int]:
    """Chooses the candidates with the highest connectivity within the time budget.

    seconds: the duration of each candidate. recent: the decayed Laplacian of the last rounds, to
    which the Laplacian of the chosen candidates is added. (A single matching connects only pairs of
    ranks; several rounds together connect more.) weights: the probabilities of the edges. Among
    equal choices, the fastest wins. If no candidate fits into the budget, the fastest one is
    chosen. If there are few candidates, all their subsets are compared; otherwise candidates are
    added greedily."""
    size = len(recent)
    parts = [laplacian(one, size, weights) for one in candidates]

    def score(chosen: Iterable[int]) -> tuple[float, float]:
        """The connectivity, and then the trace, which prefers more edges in graphs that are not
        connected."""
        total = recent + sum((parts[number] for number in chosen), np.zeros((size, size)))
        return algebraic_connectivity(total, ranks), round(float(np.trace(total)), DIGITS)

    if not candidates:
        return []
    affordable = [number for number, time in enumerate(seconds) if time <= budget]
    if not affordable:
        return [min(range(len(candidates)), key=lambda number: (seconds[number], number))]
    if len(affordable) <= EXHAUSTIVE_MAX:
        subsets = (
            subset
            for count in range(1, len(affordable) + 1)
            for subset in itertools.combinations(affordable, count)
            if sum(seconds[number] for number in subset) <= budget
        )
        best = max(
            subsets, key=lambda one: (*score(one), -sum(seconds[n] for n in one), [-n for n in one])
        )
        return list(best)
    chosen: list[int] = []
    while True:
        left = budget - sum(seconds[number] for number in chosen)
        more = [n for n in affordable if n not in chosen and seconds[n] <= left]
        if not more:
            return sorted(chosen)
        chosen.append(max(more, key=lambda number: (*score([*chosen, number]), -number)))


def metropolis_weights(edges: Iterable[Edge], size: int) -> Array:
    """The mixing matrix: symmetric and not negative, with rows and columns that sum to 1.

    The weight of an edge is 1 / (1 + the larger degree of its ranks)."""
    found = np.zeros((size, size))
    pairs = set(edges)
    degree = np.zeros(size, int)
    for a, b in pairs:
        degree[a] += 1
        degree[b] += 1
    for a, b in pairs:
        found[a, b] = found[b, a] = 1.0 / (1.0 + max(degree[a], degree[b]))
    found[np.diag_indices(size)] = 1.0 - found.sum(axis=1)
    return found
