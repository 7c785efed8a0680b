"""How fast are large arrays stored?"""

from __future__ import annotations

import numpy as np

from benchmarks.common import Row, cold_cluster, measure, median, seconds


def bench_put_cold(benchmark, rounds, record, memcpy, fresh):
    """The first put of a cluster."""
    times = []

    def call():
        with cold_cluster() as cluster:
            array, refs = fresh.next(), []
            times.append(seconds(lambda: refs.append(cluster.put(array))))
            assert np.array_equal(cluster.get(refs[0]), array)
            memcpy.sample()

    benchmark.pedantic(call, rounds=rounds(5, 2))
    record(
        Row(
            "put of 64 MiB, cold: speed",
            median(times),
            "s",
            "memcpy",
            memcpy.median,
            ratio=memcpy.median / median(times),
        )
    )


def bench_put_warm(benchmark, cluster, rounds, record, memcpy, fresh):
    """Over and over; the ref of the last round is dropped."""

    def prepare():
        memcpy.sample()
        return (fresh.next(),)

    def check(ref):
        assert np.array_equal(cluster.get(ref), fresh.array)

    ours = measure(
        benchmark, rounds=rounds(21, 5), prepare=prepare, call=cluster.put, check=check, warm_up=3
    )
    record(
        Row(
            "put of 64 MiB, warm: speed",
            median(ours),
            "s",
            "memcpy",
            memcpy.median,
            ratio=memcpy.median / median(ours),
            wanted=0.7,
            direction=">=",
        )
    )
