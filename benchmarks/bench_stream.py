"""The cost of one item of a stream."""

from __future__ import annotations

import time

import pytest

from benchmarks import tasks
from benchmarks.common import BLOCK, Row, median

AHEAD = 4  # items before the clock starts: pages of the store are touched for the first time


def seconds_each(cluster, make, size, count):
    """Of an item, in a stream that is read as fast as it comes."""
    stream = cluster.stream(make, size, AHEAD + count)
    for number in range(AHEAD):
        assert cluster.get(next(stream))[0] == number
    began = time.perf_counter()
    for number, ref in enumerate(stream, AHEAD):
        array = cluster.get(ref)
        assert array[0] == number
        del ref, array
    return (time.perf_counter() - began) / count


@pytest.mark.parametrize("make", [tasks.stream_of, tasks.stream_in_store])
def bench_stream_of_large_arrays(make, benchmark, cluster, rounds, record, memcpy):
    """64 MiB each; the second kind is published where it was made."""
    times = []

    def call():
        memcpy.sample()
        times.append(seconds_each(cluster, make, BLOCK, 12))
        memcpy.sample()

    benchmark.pedantic(call, rounds=rounds(9, 2), warmup_rounds=1)
    ours, reference = median(times[1:]), memcpy.median
    if make is tasks.stream_in_store:
        record(Row("64 MiB item of a stream, made in c.empty", ours, "s", wanted=1e-3))
        return
    title = "64 MiB item of a stream"
    record(Row(title, ours, "s", "memcpy", reference, ours / reference, wanted=1.3))


def bench_stream_of_small_items(benchmark, cluster, rounds, record):
    """Ten elements each."""
    times = []
    benchmark.pedantic(
        lambda: times.append(seconds_each(cluster, tasks.stream_of, 10, 2000)),
        rounds=rounds(5, 2),
        warmup_rounds=1,
    )
    record(Row("small item of a stream", median(times[1:]), "s"))
