"""The latency of many concurrent clients, with an event loop and with a thread for each."""

from __future__ import annotations

import asyncio
import threading
import time

from benchmarks import tasks
from benchmarks.common import Row, measure, median

CLIENTS = 200
REQUESTS = 10
"""Of each client in a round, one after the other."""


def percentile(values, percent):
    """Of all requests."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def through_threads(cluster, into):
    """A thread for each client waits in result()."""
    ready = threading.Barrier(CLIENTS)

    def client(number):
        ready.wait()
        for _ in range(REQUESTS):
            began = time.perf_counter()
            result = cluster.submit(tasks.echo, number).result()
            into.append(time.perf_counter() - began)
            assert result == number

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def through_a_loop(cluster, into):
    """One thread; each client awaits."""

    async def client(number):
        for _ in range(REQUESTS):
            began = time.perf_counter()
            result = await cluster.submit(tasks.echo, number)
            into.append(time.perf_counter() - began)
            assert result == number

    async def clients():
        await asyncio.gather(*(client(number) for number in range(CLIENTS)))

    asyncio.run(clients())


def bench_requests_at_a_time(benchmark, cluster, rounds, record):
    """200 clients; each round has its own percentiles, and the medians of those are compared."""
    threads, loop = [], []

    def one(way, into):
        seconds = []
        way(cluster, seconds)
        into.append((percentile(seconds, 50), percentile(seconds, 99)))

    def prepare():
        one(through_threads, threads)
        return ()

    measure(
        benchmark,
        rounds=rounds(15, 2),
        prepare=prepare,
        call=lambda: one(through_a_loop, loop),
        check=lambda _: None,
        warm_up=1,
    )
    for name, which, wanted in (("p50", 0, None), ("p99", 1, 1.1)):
        ours = median([found[which] for found in loop[1:]])
        theirs = median([found[which] for found in threads[1:]])
        row = Row(f"{CLIENTS} requests at a time, asyncio, {name}", ours, "s", "threads", theirs)
        row.ratio, row.wanted = ours / theirs, wanted
        record(row)
