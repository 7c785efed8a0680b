"""The round-trip time of one small task."""

from __future__ import annotations

import itertools
import time

from benchmarks import tasks
from benchmarks.common import Row, beside, measure, median

BLOCK = 50
"""Calls of one contestant before the next one has its turn."""


def bench_no_op_round_trip(benchmark, peer_pools, cluster, rounds, record):
    """The median of single calls, one after the other."""
    numbers = itertools.count()
    theirs = {peer.name: [] for peer in peer_pools}
    ours: list[float] = []

    def block(call, into):
        for number in itertools.islice(numbers, BLOCK):
            began = time.perf_counter()
            result = call(tasks.echo, number)
            into.append(time.perf_counter() - began)
            assert result == number

    def our_call(fn, number):
        return cluster.submit(fn, number).result()

    def prepare():
        for peer in peer_pools:
            block(peer.call, theirs[peer.name])
        return ()

    measure(
        benchmark,
        rounds=rounds(40, 4),
        prepare=prepare,
        call=lambda: block(our_call, ours),
        check=lambda _: None,
        warm_up=1,
    )
    title = "no-op submit().result(), p50"
    p50 = median(ours[BLOCK:])
    for name, values in theirs.items():
        row = beside(title, p50, "s", name, median(values[BLOCK:]))
        if name == "ProcessPoolExecutor(spawn)":
            row.wanted = 0.5
        record(row)
    if not theirs:
        record(Row(title, p50, "s"))
