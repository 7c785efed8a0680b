"""One rank of the benchmarks, on one emulated host: the calls of a Group, timed one by one.

Why it exists: every rank runs this file; rank 0's host only differs by its number. Every timed call
has fresh random data, every element of what it returns is compared outside the timed part. Prints
one JSON line: for each row the seconds of each round, so that the slowest rank of a round counts.
It must never know: links, bounds, what the table looks like.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from typing import Any

import numpy as np

import hoplite_mp

APART_S = 0.3
Array = np.ndarray[Any, np.dtype[np.float32]]


def part(kind: str, rank: int, nbytes: int, turn: int) -> Array:
    """Random numbers that every rank can make again; whole ones, so that any order of adding is
    exact."""
    seed = zlib.crc32(f"{kind} {nbytes} {turn} {rank}".encode())
    return np.random.default_rng(seed).integers(-1000, 1000, nbytes // 4).astype(np.float32)


def timed(g: Any, kind: str, nbytes: int, turn: int) -> float:
    """Seconds of one call on this rank; AssertionError if an element is wrong."""
    size, rank = g.size, g.rank
    mine = part(kind, rank, nbytes, turn)
    call = {
        "allreduce": lambda: g.allreduce(mine),
        "reduce": lambda: g.reduce(mine),
        "broadcast": lambda: g.broadcast(mine if rank == 0 else None),
        "gather": lambda: g.gather(mine),
        "allgather": lambda: g.allgather(mine),
        "reduce_scatter": lambda: g.reduce_scatter(mine),
        "apart": lambda: g.allreduce(mine),
    }[kind]
    g.barrier()
    begun = time.perf_counter()
    if kind == "apart":
        time.sleep(rank * APART_S)
        begun += (size - 1) * APART_S  # when the last one arrives
    got = call()
    seconds = time.perf_counter() - begun
    parts = (part(kind, r, nbytes, turn) for r in range(size))
    if kind == "broadcast":
        assert np.array_equal(got, next(parts))
    elif kind in ("gather", "allgather"):
        if got is not None:
            assert all(np.array_equal(a, b) for a, b in zip(got, parts, strict=True))
    elif got is not None:
        total = next(parts).copy()
        for other in parts:
            total += other
        if kind == "reduce_scatter":
            total = np.array_split(total, size)[rank]
        assert np.array_equal(got, total)
    return seconds


def main() -> None:
    """Arguments: address, size, rank, tls (0, 1), rows as kind:bytes:rounds."""
    address, size, rank, tls, *rows = sys.argv[1:]
    found: dict[str, list[float]] = {}
    with hoplite_mp.Cluster(
        address=address, tls=None if tls == "1" else False, memory="1500MiB"
    ) as c:
        g = c.group("bench", int(size), int(rank))
        for row in rows:
            kind, nbytes, rounds = row.split(":")
            times = [timed(g, kind, int(nbytes), turn) for turn in range(int(rounds) + 1)]
            found[row] = times[1:]  # the first one warms up
        g.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
