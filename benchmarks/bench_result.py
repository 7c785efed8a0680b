"""The cost of returning a large array from a task."""

from __future__ import annotations

import itertools
import time

import pytest

from benchmarks import tasks
from benchmarks.common import BLOCK, Row, cold_cluster, measure, median

values = itertools.count(1)


def checked(array, value):
    """Seconds that the task took for itself; the rest of the array must be what was asked for."""
    assert (array[2:] == value).all()
    return tasks.own_seconds(array)


def net(call, value):
    """Seconds of a call less the task's own."""
    began = time.perf_counter()
    array = call(tasks.make, BLOCK, value)
    taken = time.perf_counter() - began
    return taken - checked(array, value)


def bench_result_cold(benchmark, rounds, record, memcpy):
    """The first large thing in a cluster."""
    times = []

    def call():
        with cold_cluster() as cluster:
            times.append(net(lambda *args: cluster.submit(*args).result(), next(values)))
            memcpy.sample()

    benchmark.pedantic(call, rounds=rounds(5, 2))
    ours, reference = median(times), memcpy.median
    record(Row("64 MiB result, cold", ours, "s", "memcpy", reference, ours / reference))


@pytest.mark.parametrize("make", [tasks.make, tasks.make_in_store])
def bench_result_warm(make, benchmark, peer_pools, cluster, rounds, record, memcpy):
    """Less the task's own time; the second one makes the array in the store."""
    in_store = make is tasks.make_in_store
    theirs = {} if in_store else {peer.name: [] for peer in peer_pools}
    own = []
    value = 0

    def prepare():
        nonlocal value
        for peer in peer_pools:
            if peer.name in theirs:
                theirs[peer.name].append(net(peer.call, next(values)))
        memcpy.sample()
        value = next(values)
        return (value,)

    times = measure(
        benchmark,
        rounds=rounds(11, 3),
        prepare=prepare,
        call=lambda value: cluster.submit(make, BLOCK, value).result(),
        check=lambda array: own.append(checked(array, value)),
        warm_up=3,
    )
    ours = median([taken - spent for taken, spent in zip(times, own[3:], strict=True)])
    if in_store:
        record(Row("64 MiB result made in c.empty, warm", ours, "s", wanted=1e-3))
        return
    title, reference = "64 MiB result, warm", memcpy.median
    record(Row(title, ours, "s", "memcpy", reference, ours / reference, wanted=3))
    for name, taken in theirs.items():
        record(Row(title, ours, "s", name, median(taken), ours / median(taken)))
