"""What one rank of a benchmark does, whoever moves the bytes: fresh data, one timed call, a check.

Why it exists: ours and a peer are measured by the same lines, on the same numbers. It runs in a
peer's environment too, so it needs nothing but numpy.
It must never know: who makes the calls, links, bounds, what the table looks like.
"""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["APART_S", "Array", "Rank", "measured"]

APART_S = 0.3
Array = np.ndarray[Any, np.dtype[np.float32]]
RECEIVER = {"reduce": 0, "gather": 0, "send": 1}
"""The one rank that gets a result; of all other kinds everybody gets one."""


class Rank(Protocol):
    """One of `size` ranks that call together."""

    size: int
    rank: int

    def barrier(self) -> None:
        """Returns when all are here."""

    def prepared(self, kind: str, mine: Array) -> Callable[[], Any]:
        """The call that is timed; it returns this rank's result, None if it gets none."""


def measured(ranks: Rank, rows: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of each round of each row "kind:bytes:rounds" on this rank."""
    found: dict[str, list[float]] = {}
    for row in rows:
        kind, nbytes, rounds = row.split(":")
        times = [timed(ranks, kind, int(nbytes), turn) for turn in range(int(rounds) + 1)]
        found[row] = times[1:]  # the first one warms up
    return found


def timed(ranks: Rank, kind: str, nbytes: int, turn: int) -> float:
    """Seconds of one call on this rank; AssertionError if an element is wrong."""
    call = ranks.prepared(kind, part(kind, ranks.rank, nbytes, turn))
    ranks.barrier()
    begun = time.perf_counter()
    if kind == "apart":
        time.sleep(ranks.rank * APART_S)
        begun += (ranks.size - 1) * APART_S  # when the last one arrives
    got = call()
    seconds = time.perf_counter() - begun
    ranks.barrier()  # all hosts share this machine's cores: a check would be in a late rank's time
    check(ranks, kind, nbytes, turn, got)
    return seconds


def part(kind: str, rank: int, nbytes: int, turn: int) -> Array:
    """Random numbers that every rank can make again; whole ones, so that any order of adding is
    exact."""
    seed = zlib.crc32(f"{kind} {nbytes} {turn} {rank}".encode())
    return np.random.default_rng(seed).integers(-1000, 1000, nbytes // 4).astype(np.float32)


def check(ranks: Rank, kind: str, nbytes: int, turn: int, got: Any) -> None:
    """AssertionError if an element is wrong, or if a result is where none should be."""
    size, rank = ranks.size, ranks.rank
    if RECEIVER.get(kind, rank) != rank:
        assert got is None, f"{kind}: rank {rank} got a result"
        return
    assert got is not None, f"{kind}: rank {rank} got no result"
    parts = (part(kind, r, nbytes, turn) for r in range(size))
    if kind in ("broadcast", "send"):
        right = np.array_equal(got, next(parts))
    elif kind in ("gather", "allgather"):
        right = all(np.array_equal(a, b) for a, b in zip(got, parts, strict=True))
    else:
        total = next(parts)
        for other in parts:
            total += other
        if kind == "reduce_scatter":
            total = np.array_split(total, size)[rank]
        right = np.array_equal(got, total)
    assert right, f"{kind} of {nbytes} bytes: an element on rank {rank} is wrong"
