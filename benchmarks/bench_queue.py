"""The rate of small tasks when many are queued."""

from __future__ import annotations

import itertools

from benchmarks import tasks
from benchmarks.common import beside, measure, median, seconds


def bench_queued_no_ops(benchmark, peer_pools, cluster, rounds, record):
    """10 000 are submitted, then all results are awaited."""
    count = rounds(10_000, 2_000)
    starts = itertools.count(0, count)
    theirs = {peer.name: [] for peer in peer_pools}

    def items():
        start = next(starts)
        return list(range(start, start + count))

    def our_queue(numbers):
        futures = [cluster.submit(tasks.echo, number) for number in numbers]
        return numbers, [future.result() for future in futures]

    def prepare():
        for peer in peer_pools:
            numbers, results = items(), []
            theirs[peer.name].append(
                seconds(lambda: results.extend(peer.queue(tasks.echo, numbers)))  # noqa: B023
            )
            assert results == numbers
        return (items(),)

    def check(pair):
        numbers, results = pair
        assert results == numbers

    ours = measure(
        benchmark,
        rounds=rounds(5, 2),
        prepare=prepare,
        call=our_queue,
        check=check,
        warm_up=1,
    )
    rate = count / median(ours)
    title = f"{count:,} no-ops queued".replace(",", " ")
    rates = {name: count / median(values[1:]) for name, values in theirs.items()}
    best = max(
        (name for name in rates if name.startswith("ProcessPoolExecutor")), key=rates.__getitem__
    )
    for name, value in rates.items():
        row = beside(title, rate, "1/s", name, value)
        if name == best:
            row.wanted, row.direction = 4, ">="
        record(row)
