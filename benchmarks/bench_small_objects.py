"""The rate at which small objects are stored, and read by other processes."""

from __future__ import annotations

import itertools

import numpy as np

import hoplite_mp
from benchmarks import tasks
from benchmarks.common import Row, measure, median

FLOATS = 256
"""1 KiB of float32."""

numbers = itertools.count()


def arrays(count):
    """Small arrays with content never used before."""
    return [np.full(FLOATS, next(numbers) % 2**20, np.float32) for _ in range(count)]


def bench_put_and_get_of_1_kb(benchmark, cluster, rounds, record):
    """A put here plus a get of the sealed object in a worker; medians of both, added."""
    count = 1000
    gets: list[float] = []
    sources: list[np.ndarray] = []

    def prepare():
        sources[:] = arrays(count)
        return (sources,)

    def check(refs):
        taken, values = cluster.submit(tasks.get_each, hoplite_mp.by_ref(refs)).result()
        assert values == [source[0] for source in sources]
        gets.append(median(taken))

    times = measure(
        benchmark,
        rounds=rounds(11, 3),
        prepare=prepare,
        call=lambda sources: [cluster.put(source) for source in sources],
        check=check,
        warm_up=2,
    )
    put, get = median(times) / count, median(gets[2:])
    record(
        Row("put of 1 KB + get in another process, warm", put + get, "s", wanted=30e-6),
        Row("  of this the put", put, "s"),
        Row("  of this the get", get, "s"),
    )


def bench_puts_of_1_kb(benchmark, cluster, rounds, record):
    """One process, one after the other, all kept."""
    count = 10_000
    sources: list[np.ndarray] = []

    def prepare():
        sources[:] = arrays(count)
        return (sources,)

    def check(refs):
        for ref, source in zip(refs, sources, strict=True):
            assert np.array_equal(cluster.get(ref), source)

    times = measure(
        benchmark,
        rounds=rounds(5, 2),
        prepare=prepare,
        call=lambda sources: [cluster.put(source) for source in sources],
        check=check,
        warm_up=1,
    )
    rate = count / median(times)
    record(Row("puts of 1 KB from one process", rate, "1/s", wanted=40_000, direction=">="))
