"""The cost of a large global array of a script at each submit of a function that uses it."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.common import Row, median

NBYTES = 100_000_000
ADDED_S_MAX = 60e-6


def _functions():
    """Two functions of a script, which travel by value; only one of them names the array."""
    scope = {"__name__": "a script", "big": np.ones(NBYTES // 8)}
    exec("def with_it(i): return float(big[i])", scope)
    exec("def without(i): return float(i)", scope)
    return scope["big"], scope["with_it"], scope["without"]


def bench_unchanged_global(benchmark, cluster, rounds, record):
    """The submit alone, with the array and without, in turns; and to the result, beside it."""
    _, with_it, without = _functions()
    for function in (with_it, without):
        assert cluster.submit(function, 1).result() == 1.0
    times = {with_it: ([], []), without: ([], [])}

    def call():
        for function, (submits, whole) in times.items():
            begin = time.perf_counter()
            future = cluster.submit(function, 1)
            submits.append(time.perf_counter() - begin)
            future.result()
            whole.append(time.perf_counter() - begin)

    benchmark.pedantic(call, rounds=rounds(1000, 100), warmup_rounds=20)
    (ours, ours_whole), (bare, bare_whole) = times[with_it], times[without]
    added = median(ours) - median(bare)
    record(
        Row(
            "what an unchanged global of 100 MB adds to a submit",
            added,
            "s",
            "the submit without it",
            median(bare),
            added / median(bare),
        ),
        Row("the same, as a limit", added, "s", wanted=ADDED_S_MAX),
        Row(
            "submit to result with that global",
            median(ours_whole),
            "s",
            "without it",
            median(bare_whole),
            median(ours_whole) / median(bare_whole),
        ),
    )


def bench_changed_global(benchmark, cluster, rounds, record, memcpy):
    """One page is written: the array is copied into the store once, and once by the worker."""
    big, with_it, _ = _functions()
    assert cluster.submit(with_it, 1).result() == 1.0
    times, submits = [], []

    def call():
        big[len(times)] += 1
        memcpy.sample()
        begin = time.perf_counter()
        future = cluster.submit(with_it, len(times))
        submits.append(time.perf_counter() - begin)
        assert future.result() == 2.0
        times.append(time.perf_counter() - begin)

    benchmark.pedantic(call, rounds=rounds(9, 3))
    record(
        Row(
            "submit of a global of 100 MB that has changed",
            median(submits),
            "s",
            "memcpy",
            memcpy.median,
            median(submits) / memcpy.median,
        ),
        Row(
            "the same, to the result",
            median(times),
            "s",
            "memcpy",
            memcpy.median,
            median(times) / memcpy.median,
        ),
    )
