"""The cost of passing a large array to a task."""

from __future__ import annotations

from benchmarks import tasks
from benchmarks.common import STRIDE, Row, cold_cluster, measure, median, seconds


def bench_argument_by_value_cold(benchmark, rounds, record, memcpy, fresh):
    """The first large thing that a cluster sees: its memory is neither resident nor mapped."""
    times = []

    def call():
        with cold_cluster() as cluster:
            array, probes = fresh.next(), []
            times.append(
                seconds(lambda: probes.append(cluster.submit(tasks.probe, array, STRIDE).result()))
            )
            fresh.check_probe(probes[0])
            memcpy.sample()

    benchmark.pedantic(call, rounds=rounds(5, 2))
    ratio = median(times) / memcpy.median
    record(
        Row(
            "64 MiB argument by value, cold",
            median(times),
            "s",
            "memcpy",
            memcpy.median,
            ratio,
            wanted=10,
        )
    )


def bench_argument_by_value_warm(benchmark, peer_pools, cluster, rounds, record, memcpy, fresh):
    """The cluster has seen the like before."""
    theirs = {peer.name: [] for peer in peer_pools}

    def prepare():
        for peer in peer_pools:
            array, probes = fresh.next(), []
            theirs[peer.name].append(
                seconds(
                    lambda: probes.append(peer.call(tasks.probe, array, STRIDE))  # noqa: B023
                )
            )
            fresh.check_probe(probes[0])
        memcpy.sample()
        return (fresh.next(),)

    ours = measure(
        benchmark,
        rounds=rounds(11, 3),
        prepare=prepare,
        call=lambda array: cluster.submit(tasks.probe, array, STRIDE).result(),
        check=fresh.check_probe,
        warm_up=3,
    )
    title, reference = "64 MiB argument by value, warm", memcpy.median
    record(
        Row(
            title,
            median(ours),
            "s",
            "memcpy",
            reference,
            median(ours) / reference,
            wanted=3,
        )
    )
    for name, values in theirs.items():
        record(Row(title, median(ours), "s", name, median(values), median(ours) / median(values)))


def bench_argument_by_ref(benchmark, cluster, rounds, record, memcpy, fresh):
    """The array has been put; the task gets a view."""
    held = []

    def prepare():
        held[:] = [cluster.put(fresh.next())]
        memcpy.sample()
        return (held[0],)

    ours = measure(
        benchmark,
        rounds=rounds(21, 5),
        prepare=prepare,
        call=lambda ref: cluster.submit(tasks.probe, ref, STRIDE).result(),
        check=fresh.check_probe,
        warm_up=3,
    )
    record(Row("64 MiB argument by ref, warm", median(ours), "s", wanted=1e-3))
