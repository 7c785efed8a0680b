"""The cost of actor calls compared with tasks, and of a Queue compared with multiprocessing."""

from __future__ import annotations

import multiprocessing
import time

from benchmarks import tasks
from benchmarks.common import Row, beside, measure, median

BLOCK = 200
"""Calls of one contestant before the next one has its turn."""


class Echo:
    """The least that an actor can do."""

    def echo(self, value):
        """Its argument."""
        return value


def bench_actor_call(benchmark, cluster, rounds, record):
    """The median of single calls, one after the other, and of tasks in turns with them. The ratio
    is the median of those of neighbouring blocks: waking a process costs this machine 5 us for some
    seconds and 30 us for others."""
    actor = cluster.actor(Echo)
    theirs: list[float] = []  # the median of each block
    ours: list[float] = []

    def block(call, into):
        times = []
        for number in range(BLOCK):
            began = time.perf_counter()
            result = call(number)
            times.append(time.perf_counter() - began)
            assert result == number
        into.append(median(times))

    def prepare():
        block(lambda number: cluster.submit(tasks.echo, number).result(), theirs)
        return ()

    measure(
        benchmark,
        rounds=rounds(40, 4),
        prepare=prepare,
        call=lambda: block(lambda number: actor.echo(number).result(), ours),
        check=lambda _: None,
        warm_up=1,
    )
    row = beside("call of an actor, p50", median(ours[1:]), "s", "no-op task", median(theirs[1:]))
    row.ratio = median([one / other for one, other in zip(ours[1:], theirs[1:], strict=True)])
    row.wanted = 1.1
    record(row)


def bench_actor_calls_queued(benchmark, cluster, rounds, record):
    """10 000 are made, then all results are awaited."""
    actor = cluster.actor(Echo)
    count = rounds(10_000, 2_000)

    def call():
        return [future.result() for future in [actor.echo(number) for number in range(count)]]

    def check(results):
        assert results == list(range(count))

    times = measure(
        benchmark, rounds=rounds(7, 2), prepare=tuple, call=call, check=check, warm_up=1
    )
    title = f"{count:,} calls of an actor queued".replace(",", " ")
    record(Row(title, count / median(times), "1/s", wanted=50_000, direction=">="))


def bench_actor_queue(benchmark, cluster, rounds, record):
    """An item is put and got by one process, again and again; then by turns, in the other kind."""
    import hoplite_mp

    count = rounds(500, 50)
    ours = hoplite_mp.Queue()
    theirs: list[float] = []

    def there_and_back(queue):
        for number in range(count):
            queue.put(number)
            assert queue.get() == number

    with multiprocessing.get_context("spawn").Manager() as manager:
        other = manager.Queue()

        def prepare():
            began = time.perf_counter()
            there_and_back(other)
            theirs.append(time.perf_counter() - began)
            return ()

        times = measure(
            benchmark,
            rounds=rounds(9, 2),
            prepare=prepare,
            call=lambda: there_and_back(ours),
            check=lambda _: None,
            warm_up=1,
        )
    rate, other_rate = count / median(times), count / median(theirs[1:])
    title = "items put into a Queue and got from it"
    record(beside(title, rate, "1/s", "multiprocessing.Manager().Queue()", other_rate))
