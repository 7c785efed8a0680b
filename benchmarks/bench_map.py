"""The cost of `map` over many tiny items, compared with a pool with the best chunksize."""

from __future__ import annotations

import itertools
import time

import pytest

from benchmarks import tasks
from benchmarks.common import WORKERS, Row, measure, median
from benchmarks.peers.process_pool import ForkPool, SpawnPool

PARTS = (8, 16, 32, 64, 128)
"""Chunks that the pool gets: each number of them has its turn, and the best one counts."""


@pytest.mark.parametrize("count", [100_000, 1_000_000])
def bench_map_of_tiny_items(count, benchmark, rounds, record):
    """Ours without any chunksize. The items are new ones in each call."""
    count = rounds(count, count // 10)
    pools = [kind(WORKERS) for kind in (ForkPool, SpawnPool)]
    try:
        for pool in pools:  # both are up before we have threads
            pool.queue(tasks.report_pid, [0.2] * 2 * WORKERS)
        record(*beside_pools(pools, count, benchmark, rounds(5, 2)))
    finally:
        for pool in pools:
            pool.close()


def beside_pools(pools, count, benchmark, turns):
    """A row for each pool."""
    import hoplite_mp

    starts = itertools.count(0, count)
    theirs = {pool.name: {parts: [] for parts in PARTS} for pool in pools}

    def items():
        start = next(starts)
        return list(range(start, start + count))

    def prepare():
        for pool, parts in itertools.product(pools, PARTS):
            numbers = items()
            began = time.perf_counter()
            found = list(pool.map(tasks.echo, numbers, count // parts))
            theirs[pool.name][parts].append(time.perf_counter() - began)
            assert found == numbers
        return (items(),)

    def check(pair):
        assert pair[0] == pair[1]

    with hoplite_mp.Cluster(workers=WORKERS) as cluster:
        ours = measure(
            benchmark,
            rounds=turns,
            prepare=prepare,
            call=lambda numbers: (numbers, list(cluster.map(tasks.echo, numbers))),
            check=check,
            warm_up=1,
        )
    found = []
    for name, by_parts in theirs.items():
        parts, best = min(
            ((parts, median(times[1:])) for parts, times in by_parts.items()),
            key=lambda one: one[1],
        )
        title = f"map of {count:,} tiny items".replace(",", " ")
        beside = f"{name}, chunksize={count // parts}"
        value = median(ours)
        found.append(Row(title, value, "s", beside, best, value / best, 0.9))
    return found
