"""The rounds of one rank of a benchmark: new data, one timed call, a check.

This library and a peer are measured by the same code, on the same values. It also runs in the
environment of a peer, so it needs only numpy."""

from __future__ import annotations

import os
import time
import zlib
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["APART_S", "STREAK", "Array", "Rank", "idle_rate", "measured"]

APART_S = 0.3
STREAK = (
    "streak-"  # before a kind: so many calls, one right after the other, as training makes them
)
STREAK_CALLS = 200
IDLE_S = 2.0  # for how long it is looked what the machine does when nobody calls
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


def measured(
    ranks: Rank, rows: Sequence[str], idle: Callable[[Rank], float] = lambda ranks: 0.0
) -> dict[str, list[float]]:
    """Seconds of each round of each row "kind:bytes:rounds" on this rank; and on rank 0, under
    "row cpu", processor seconds of the whole machine, without `idle` of each second."""
    found: dict[str, list[float]] = {}
    idle_s = idle(ranks)  # of each second
    for row in rows:
        kind, nbytes, rounds = row.split(":")
        turns = [timed(ranks, kind, int(nbytes), turn) for turn in range(int(rounds) + 1)][1:]
        found[row] = [seconds for seconds, _ in turns]  # the first one, left out, warms up
        if ranks.rank == 0:
            found[f"{row} cpu"] = [used - idle_s * seconds for seconds, used in turns]
    return found


def idle_rate(ranks: Rank) -> float:
    """Processor seconds of the whole machine in a second in which nobody calls."""
    ranks.barrier()
    used, begun = processor_s(), time.perf_counter()
    time.sleep(IDLE_S)
    return (processor_s() - used) / (time.perf_counter() - begun)


def processor_s() -> float:
    """Of all cores of the machine, since it was started, in ticks of 10 ms."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def timed(ranks: Rank, kind: str, nbytes: int, turn: int) -> tuple[float, float]:
    """Seconds of one call on this rank, and processor seconds of the whole machine until all ranks
    have made it; AssertionError if an element is wrong."""
    if kind.startswith(STREAK):
        return streak(ranks, kind.removeprefix(STREAK), nbytes, turn), 0.0
    call = ranks.prepared(kind, part(kind, ranks.rank, nbytes, turn))
    ranks.barrier()  # others may still make their data, which would count as the call's
    # Before another barrier, because it takes as long as a small call, and a rank is late by that.
    used = processor_s() if ranks.rank == 0 else 0.0
    ranks.barrier()
    begun = time.perf_counter()
    if kind == "apart":
        time.sleep(ranks.rank * APART_S)
        begun += (ranks.size - 1) * APART_S  # when the last one arrives
    got = call()
    seconds = time.perf_counter() - begun
    ranks.barrier()  # all hosts share this machine's cores: a check would be in a late rank's time
    used = processor_s() - used if ranks.rank == 0 else 0.0
    check(ranks, kind, nbytes, turn, got)
    return seconds, used


def streak(ranks: Rank, kind: str, nbytes: int, turn: int) -> float:
    """Seconds for each of many calls in a row, as the OSU micro-benchmarks count them: a rank that
    leaves one of them late begins the next one late, and nobody's time has it twice. What they give
    is checked where they are timed one by one."""
    call = ranks.prepared(kind, part(kind, ranks.rank, nbytes, turn))
    ranks.barrier()
    begun = time.perf_counter()
    for _ in range(STREAK_CALLS):
        call()
    return (time.perf_counter() - begun) / STREAK_CALLS


def part(kind: str, rank: int, nbytes: int, turn: int) -> Array:
    """What a rank gives: whole numbers, so that any order of adding them is exact."""
    return numbers(kind, rank, nbytes, turn).astype(np.float32)


def numbers(kind: str, rank: int, nbytes: int, turn: int) -> np.ndarray[Any, np.dtype[np.int8]]:
    """The same, in a quarter of the bytes. Random, and every rank can make those of each other one
    again; at eight hosts this is most of what a benchmark computes, so it has to be cheap."""
    seed = zlib.crc32(f"{kind} {nbytes} {turn} {rank}".encode())
    words = np.random.PCG64(seed).random_raw(-(-nbytes // 32))  # 64 bits each
    return words.view(np.int8)[: nbytes // 4]


def check(ranks: Rank, kind: str, nbytes: int, turn: int, got: Any) -> None:
    """AssertionError if an element is wrong, or if a result is where none should be."""
    size, rank = ranks.size, ranks.rank
    if kind == "barrier":
        return
    if RECEIVER.get(kind, rank) != rank:
        assert got is None, f"{kind}: rank {rank} got a result"
        return
    assert got is not None, f"{kind}: rank {rank} got no result"
    parts = (numbers(kind, r, nbytes, turn) for r in range(size))
    if kind in ("broadcast", "send"):
        right = np.array_equal(got, next(parts))
    elif kind in ("gather", "allgather"):
        right = all(np.array_equal(a, b) for a, b in zip(got, parts, strict=True))
    else:
        total = next(parts).astype(np.float32)
        for other in parts:
            total += other
        if kind == "reduce_scatter":
            total = np.array_split(total, size)[rank]
        right = np.array_equal(got, total)
    assert right, f"{kind} of {nbytes} bytes: an element on rank {rank} is wrong"
