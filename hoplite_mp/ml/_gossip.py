"""Gossip: ranks mix their arrays with the arrays of a few partners, over reliable links.

In each call, a rank sends its array to its partners in this round. A pair of ranks is mixed if both
of its arrays have arrived before the deadline. A small allgather at the end of each call
distributes the list of these pairs and the times of their transfers. From this list, all ranks
compute the same mixing matrix, which leaves the mean over the ranks unchanged, and the same plan
for the next round.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hoplite_mp.errors import HopliteTimeoutError, PeerLostError
from hoplite_mp.ml._matchings import (
    choose_matchings,
    laplacian,
    matchings,
    metropolis_weights,
)

if TYPE_CHECKING:
    from hoplite_mp import Group
    from hoplite_mp.ml._matchings import Edge

__all__ = ["Gossip"]

Array = np.ndarray[Any, np.dtype[Any]]
TOPOLOGIES = ("reliable", "ring", "random")
TAG = 1 << 20  # messages of round r have the tag TAG + r % TAG
RELIABLE = 0.5  # edges with a lower probability are not used
SPREAD = 0.5  # standard deviation of the logarithm of a transfer's time
SPREAD_GROWS = 0.1  # increase of this deviation for each second since the edge was last used
FORGET_S = 15.0  # time constant with which a measurement decays towards the median of all edges
SHARE = 0.8  # transfers are planned to take at most this share of the deadline
LATE = 4.0  # a transfer that was late counts as if it had taken this many deadlines
LOOK_S = 0.05  # seconds between two checks for dead partners
DECAY = 0.7  # weight of the previous round in the graph whose connectivity is maximised


class Gossip:
    """Decentralised averaging over the links that meet a deadline.

    Every rank makes the same calls. The first call makes an additional allgather.

    Parameters
    ----------
    group : Group
        The ranks. Between two calls to `mix`, the Group may be used for other calls. `mix` sends
        messages with tags from 2**20 to 2**21; no other receive in the Group may match them.
    deadline : float
        Seconds that a round waits for arrays.
    topology : "reliable", "ring" or "random"
        "reliable": edges are ordered by the measured probability that a transfer arrives in time,
        and decomposed into matchings. Those that fit into the deadline and maximise the algebraic
        connectivity of the graph of this and the last rounds are used. "ring": the living
        neighbours by rank. "random": a new random matching in each round.
    seed : int
        The seed of the random topology, which must be the same on all ranks.

    Attributes
    ----------
    partners_ : tuple of int
        The ranks whose arrays were mixed with this rank's array in the last call.
    planned_ : tuple of int
        The ranks with which the next call will exchange arrays.

    Raises
    ------
    ValueError
        An argument is out of range. From `mix`, on every rank: shapes or dtypes differ.

    Notes
    -----
    Differences from the sources: MATCHA draws matchings at random, with probabilities that
    maximise the connectivity of the expected graph. This class chooses matchings for the graph of
    this and the last rounds, whose weights decay. The small allgather is a barrier, so a rank that
    computes for longer delays the others; late transfers do not.

    Sources: Wang, Sahu, Yang, Joshi, Kar: MATCHA (2019), matchings and connectivity; Xiao, Boyd:
    Fast linear iterations for distributed averaging (2004), Metropolis weights; RoADTrain, links
    by their reliability.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> def average(rank):
    ...     g = hoplite_mp.current().group("gossip", size=2, rank=rank)
    ...     return ml.Gossip(g).mix(np.array([2.0 * rank]))
    >>> c.spmd(average, 2)[0].result()
    array([1.])
    """

    __module__ = "hoplite_mp.ml"

    def __init__(
        self,
        group: Group,
        deadline: float = 1.0,
        topology: Literal["reliable", "ring", "random"] = "reliable",
        *,
        seed: int = 0,
    ) -> None:
        if not 0 < deadline < math.inf:
            raise ValueError(f"deadline must be a positive number of seconds, not {deadline}")
        if topology not in TOPOLOGIES:
            raise ValueError(f"topology is one of {', '.join(TOPOLOGIES)}, not {topology!r}")
        self.group, self.deadline, self.topology, self.seed = group, deadline, topology, seed
        self.partners_: tuple[int, ...] = ()
        self.planned_: tuple[int, ...] = ()
        self._sent = 0
        self._round = -1  # number of the next exchange; -1: this rank has not joined
        self._seconds = np.full(group.size, np.nan)  # duration of the last transfer from each rank
        self._age = np.full(group.size, np.inf)  # seconds since that transfer
        self._recent = np.zeros((group.size, group.size))
        self._last = time.monotonic()
        self._late: list[tuple[int, int]] = []  # (rank, tag) of arrays that missed the deadline

    @property
    def sent(self) -> int:
        """The number of bytes in arrays that this rank has sent so far."""
        return self._sent

    def mix(self, x: Any) -> Array:
        """Returns a weighted mean of this rank's array and its partners' arrays, as a new array.

        x: an array of floats, of the same shape and dtype on all ranks. The sum of the results over
        the participating ranks equals the sum of their arrays, up to rounding."""
        given = np.asarray(x)
        if not np.issubdtype(given.dtype, np.floating):
            raise ValueError(f"mix takes an array of floats, not of {given.dtype}")
        if self._round < 0:
            self._settle(self._gather(given, ()))
        arrived = self._exchange(given)
        rows = self._gather(given, tuple(sorted(arrived)))
        edges = _edges_in_both_directions(rows)
        weights = metropolis_weights(edges, self.group.size)[self.group.rank]
        self._settle(rows, edges)
        mixed = given * given.dtype.type(weights[self.group.rank])
        self.partners_ = tuple(rank for rank in sorted(arrived) if weights[rank] > 0)
        for rank in self.partners_:
            mixed += arrived[rank] * given.dtype.type(weights[rank])
        return np.asarray(mixed)

    # -- a round ---------------------------------------------------------------------------------

    def _exchange(self, given: Array) -> dict[int, Array]:
        """Sends the array to the partners. Returns the arrays that arrive before the deadline, by
        rank."""
        tag = TAG + self._round % TAG
        begun = time.monotonic()
        self._age += begun - self._last
        self._last = begun
        self._drop_late()
        for partner in self.planned_:
            try:
                self.group.send(given, partner, tag)
                self._sent += given.nbytes
            except PeerLostError:
                continue
        arrived: dict[int, Array] = {}
        missing = set(self.planned_)
        while missing:
            left = begun + self.deadline - time.monotonic()
            try:
                # Only the partners in this round have sent messages with this tag.
                found, source = self.group.recv(
                    None, tag, timeout=min(max(left, 0.0), LOOK_S), with_source=True
                )
            except PeerLostError:  # all other ranks have died or left
                break
            except HopliteTimeoutError:
                missing &= set(self.group.alive)
                if left <= LOOK_S:
                    break
                continue
            arrived[source] = found
            missing.discard(source)
            self._seconds[source], self._age[source] = time.monotonic() - begun, 0.0
        for partner in set(self.planned_) - arrived.keys():
            # It is not known how much longer this transfer takes.
            self._seconds[partner], self._age[partner] = LATE * self.deadline, 0.0
            self._late.append((partner, tag))
        return arrived

    def _drop_late(self) -> None:
        """Receives and discards late messages from earlier rounds."""
        for late in list(self._late):
            try:
                self.group.recv(*late, timeout=0)
            except HopliteTimeoutError:
                continue
            except PeerLostError:
                pass
            self._late.remove(late)

    def _gather(self, given: Array, arrived: tuple[int, ...]) -> list[Any]:
        """Exchanges rows, which contain a rank's shape and dtype, its round, the ranks whose arrays
        have arrived, and its measurements. Returns the rows by rank, with None for dead ranks.
        Raises ValueError if shapes or dtypes differ."""
        what = (given.shape, given.dtype.str)
        own = (what, self._round, arrived, self._seconds, self._age, self._recent)
        rows: list[Any] = self.group.allgather(own)
        kinds = {row[0] for row in rows if row is not None}
        if len(kinds) > 1:
            text = ", ".join(f"rank {r}: {row[0]}" for r, row in enumerate(rows) if row is not None)
            raise ValueError(f"mix takes equal shapes and dtypes on all ranks, not {text}")
        return rows

    def _settle(self, rows: list[Any], edges: list[Edge] | None = None) -> None:
        """Plans the next round from the rows of all ranks. edges: the pairs that were mixed; None
        if this rank is joining."""
        present = [rank for rank, row in enumerate(rows) if row is not None]
        newest = max(rows[rank][1] for rank in present)
        leader = next(rank for rank in present if rows[rank][1] == newest)
        mixed = edges if edges is not None else _edges_in_both_directions(rows)
        self._recent = DECAY * (rows[leader][5] + laplacian(mixed, self.group.size))
        self._round = newest + 1
        for rank, row in enumerate(rows):
            if row is None or row[1] < newest:  # the measurements are from an old process
                self._seconds[rank] = np.nan
        pairs = self._plan(rows, present)
        self.planned_ = tuple(
            b if a == self.group.rank else a for a, b in pairs if self.group.rank in (a, b)
        )

    def _plan(self, rows: list[Any], present: list[int]) -> list[Edge]:
        """The edges of the next round."""
        size = self.group.size
        if self.topology == "ring":
            pairs = zip(present, present[1:] + present[:1], strict=True)
            return sorted({(min(a, b), max(a, b)) for a, b in pairs if a != b})
        if self.topology == "random":
            shuffled = np.random.default_rng([self.seed, self._round]).permutation(present).tolist()
            pairs = zip(shuffled[::2], shuffled[1::2], strict=False)
            return [(min(a, b), max(a, b)) for a, b in pairs]
        seconds, age = np.full((size, size), np.nan), np.full((size, size), np.inf)
        for rank in present:
            seconds[rank], age[rank] = rows[rank][3], rows[rank][4]
        expected, chance = reliability(seconds, age, self.deadline)
        candidates = matchings(chance, present, least=RELIABLE)
        times = [max(float(expected[pair]) for pair in one) for one in candidates]
        chosen = choose_matchings(
            candidates, times, SHARE * self.deadline, self._recent, present, chance
        )
        return [pair for number in chosen for pair in candidates[number]]


def reliability(seconds: Array, age: Array, deadline: float) -> tuple[Array, Array]:
    """For each pair, the expected seconds of an exchange, and the probability that it is in time.

    seconds: the duration of the last transfer, nan if there was none; age: the seconds since then;
    both of shape (receiver, sender). The logarithm of the time is assumed to be normal. Its mean
    moves from the last measurement to the median of all as the measurement ages; without one, it is
    the median."""
    known = seconds[np.isfinite(seconds)]
    median = float(np.median(known)) if known.size else 0.5 * deadline
    median = min(median, 0.5 * deadline)  # so that an edge without measurements is always tried
    weight = np.where(np.isfinite(seconds), np.exp(-age / FORGET_S), 0.0)
    logs = np.log(np.maximum(np.where(np.isfinite(seconds), seconds, median), 1e-6))
    mean = weight * logs + (1 - weight) * math.log(max(median, 1e-6))
    spread = SPREAD + SPREAD_GROWS * np.minimum(np.where(np.isfinite(age), age, FORGET_S), FORGET_S)
    mean = np.maximum(mean, mean.T)  # an exchange needs both directions
    spread = np.maximum(spread, spread.T)
    score = (math.log(deadline) - mean) / spread
    return np.exp(mean), np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2.0)))(score)


def _edges_in_both_directions(rows: list[Any]) -> list[Edge]:
    """The pairs of ranks that have received each other's arrays."""
    return [
        (a, b)
        for a, row in enumerate(rows)
        if row is not None
        for b in row[2]
        if a < b and rows[b] is not None and a in rows[b][2]
    ]
