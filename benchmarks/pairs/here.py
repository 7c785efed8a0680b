"""The rows of one build on one host: one cluster, and one timed call for each input line.

Two of these run at the same time, one with each build, and take turns. It runs as a file with the
build's folder as PYTHONPATH, because nothing of another build may be imported."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np

import hoplite_mp

MIB = 2**20
WORKERS = 2
CALLS = 300
QUEUED = 3000
SMALL_CALLS = 300
WARM_S = 1.0  # calls are slower for up to 0.1 s after a start, whatever the build


class Counter:
    """An actor with one method."""

    def add(self, number: int) -> int:
        """Gives its argument back."""
        return number


def echo(value: Any) -> Any:
    return value


def length(value: Any) -> int:
    return len(value)


def fresh(nbytes: int) -> Any:
    return np.ones(nbytes // 4, np.float32)


def grouped(name: str, rank: int, nbytes: int, calls: int) -> float:
    g = hoplite_mp.current().group(name, WORKERS, rank)
    mine = np.full(nbytes // 4, rank + 1, np.float32)
    for _ in range(3):
        g.allreduce(mine)
    g.barrier()
    begun = time.perf_counter()
    for _ in range(calls):
        total = g.allreduce(mine)
    seconds = (time.perf_counter() - begun) / calls
    assert total[0] == WORKERS * (WORKERS + 1) / 2
    g.close()
    return seconds


class Rows:
    """One method for each row; each returns seconds."""

    def __init__(self, cluster: Any) -> None:
        self.c = cluster
        self.block = np.ones(16 * MIB, np.float32)
        self.kept = cluster.put(self.block)
        self.parts = [cluster.put(self.block[: 4 * MIB] * i) for i in range(8)]
        self.actor = cluster.actor(Counter)
        self.groups = 0

    def call(self) -> float:
        """A small task, there and back: the median."""
        times = []
        for number in range(CALLS):
            begun = time.perf_counter()
            assert self.c.submit(echo, number).result() == number
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    def queued(self) -> float:
        """Many small tasks at once."""
        begun = time.perf_counter()
        futures = [self.c.submit(echo, number) for number in range(QUEUED)]
        assert sum(future.result() for future in futures) == QUEUED * (QUEUED - 1) // 2
        return time.perf_counter() - begun

    def mapped(self) -> float:
        """100 000 small items."""
        begun = time.perf_counter()
        assert sum(self.c.map(echo, range(100_000))) == 100_000 * 99_999 // 2
        return time.perf_counter() - begun

    def argument(self) -> float:
        """64 MiB by value."""
        begun = time.perf_counter()
        assert self.c.submit(length, self.block).result() == len(self.block)
        return time.perf_counter() - begun

    def result(self) -> float:
        """A result of 64 MiB."""
        begun = time.perf_counter()
        assert self.c.submit(fresh, 64 * MIB).result()[-1] == 1
        return time.perf_counter() - begun

    def put(self) -> float:
        """64 MiB."""
        begun = time.perf_counter()
        self.c.put(self.block)
        return time.perf_counter() - begun

    def get(self) -> float:
        """1 000 times an object of 64 MiB."""
        begun = time.perf_counter()
        for _ in range(1000):
            self.c.get(self.kept)
        return time.perf_counter() - begun

    def reduced(self) -> float:
        """Eight arrays of 16 MiB."""
        begun = time.perf_counter()
        assert self.c.get(self.c.reduce(self.parts, op="sum"))[0] == 28
        return time.perf_counter() - begun

    def actor_call(self) -> float:
        """There and back: the median."""
        times = []
        for number in range(CALLS):
            begun = time.perf_counter()
            assert self.actor.add(number).result() == number
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    def _group(self, nbytes: int, calls: int) -> float:
        self.groups += 1
        name = f"group {self.groups}"
        ranks = [self.c.submit(grouped, name, rank, nbytes, calls) for rank in range(WORKERS)]
        return max(rank.result() for rank in ranks)

    def group_small(self) -> float:
        """An allreduce of 1 KiB among two."""
        return self._group(1024, SMALL_CALLS)

    def group_large(self) -> float:
        """An allreduce of 16 MiB among two."""
        return self._group(16 * MIB, 3)

    def start(self) -> float:
        """A second cluster, from its start to its end."""
        begun = time.perf_counter()
        with hoplite_mp.Cluster(workers=WORKERS) as other:
            assert other.submit(echo, 1).result() == 1
        return time.perf_counter() - begun


def main() -> None:
    with hoplite_mp.Cluster(workers=WORKERS + 1) as cluster:  # the actor has a worker of its own
        rows = Rows(cluster)
        begun = time.perf_counter()
        while time.perf_counter() - begun < WARM_S:
            cluster.submit(echo, 0).result()
        for line in sys.stdin:
            print(getattr(rows, line.strip())(), flush=True)


if __name__ == "__main__":
    main()
