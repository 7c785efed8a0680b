"""The rate at which large arrays are stored."""

from __future__ import annotations

import mmap

import numpy as np

from benchmarks.common import Row, beside, cold_cluster, measure, median, run_script, seconds


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


LARGE_BYTES = 500 << 20
MADV_NOHUGEPAGE = 15


def bench_put_large_cold(benchmark, rounds, record):
    """The first put of 500 MB, beside a copy into fresh anonymous pages in one thread, as put."""
    array = np.ones(LARGE_BYTES, np.uint8)
    ours, copies = [], []

    def call():
        with mmap.mmap(-1, LARGE_BYTES) as memory:
            memory.madvise(MADV_NOHUGEPAGE)
            copies.append(seconds(lambda: np.copyto(np.frombuffer(memory, np.uint8), array)))
        with cold_cluster() as cluster:
            ours.append(seconds(lambda: cluster.put(array)))

    benchmark.pedantic(call, rounds=rounds(5, 2))
    record(
        Row(
            "put of 500 MB, cold",
            median(ours),
            "s",
            "copy into fresh pages",
            median(copies),
            ratio=median(ours) / median(copies),
            wanted=1.15,
        )
    )


def bench_ensemble_over_a_large_array(benchmark, rounds, record):
    """Processes started, 500 MB shared, eight members computed, all ended; beside a forked pool."""
    found = {"ours": [], "fork": []}

    def call():
        for kind, taken in found.items():
            taken.append(run_script("ensemble.py", kind, str(LARGE_BYTES), "8")["seconds"])

    benchmark.pedantic(call, rounds=rounds(5, 1), warmup_rounds=1)
    ours, forked = (median(found[kind][1:]) for kind in ("ours", "fork"))
    record(beside("ensemble of 8 over 500 MB, start to end", ours, "s", "forked pool", forked))
