"""The cost of large and small calls of a Group on one host."""

from __future__ import annotations

import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import BLOCK, BLOCK_BYTES, Memcpy, Row, seconds

if TYPE_CHECKING:
    import hoplite_mp

MEMBERS = 4
SMALL = 256
"""Elements of 1 KiB float32."""
BATCH = 50
UNTIMED = 3


def bench_allreduce_of_4_blocks(benchmark, rounds, record, memcpy):
    """The bound: each member's block is copied once in and once out, at the speed at which this
    machine's cores copy together. So a call that copies less may be below it."""
    import hoplite_mp

    count = rounds(12, 2)
    found: dict[str, list[float]] = {}
    gains = []

    def run() -> None:
        with hoplite_mp.Cluster(workers=MEMBERS) as cluster:
            for how in ("store", "out", "plain"):
                gains.append(gain(memcpy))
                found[how] = calls(cluster, MEMBERS, BLOCK, UNTIMED + count, how)

    benchmark.pedantic(run, rounds=1)
    cores = max(1.0, statistics.median(gains))
    bound = 2 * MEMBERS * BLOCK_BYTES / memcpy.bytes_per_s / cores
    title = "allreduce of 4 x 64 MiB"
    for how, name, wanted in (
        ("store", "parts and out= in the store", 1.3),
        ("out", "plain arrays, out=", 2.3),
        ("plain", "plain arrays", 2.3),
    ):
        ours = statistics.median(found[how])
        beside = f"bound, two cores copy {cores:.2f} times one"
        row = Row(f"{title}, {name}", ours, "s", beside, bound, ratio=ours / bound, wanted=wanted)
        record(row)


def bench_allreduce_of_1_kib(benchmark, rounds, record):
    """Two members, one call after the other, with and without the bounded spin before they sleep:
    of each BATCH calls their mean."""
    import hoplite_mp

    count = rounds(200, 10)
    found: dict[int, float] = {}

    def run() -> None:
        for spin_us in (50, 0):
            config = hoplite_mp.Config(spin_us_max=spin_us)
            with hoplite_mp.Cluster(workers=2, config=config) as cluster:
                times = calls(cluster, 2, SMALL, UNTIMED + count, "plain", BATCH)
                found[spin_us] = statistics.median(times) / BATCH

    benchmark.pedantic(run, rounds=1)
    title = "allreduce of 1 KiB, 2 members"
    record(
        Row(f"{title}, spin_us_max=50", found[50], "s", wanted=15e-6),
        Row(f"{title}, without spin", found[0], "s"),
    )


def gain(memcpy: Memcpy) -> float:
    """How much faster two cores copy than one."""
    memcpy.sample()
    two = [Memcpy(), Memcpy()]

    def both() -> None:
        threads = [threading.Thread(target=one.sample) for one in two]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    both()
    memcpy.sample()
    return (
        2
        * statistics.median(memcpy.seconds[-2:])
        / statistics.median(seconds(both) for _ in range(5))
    )


def calls(
    cluster: hoplite_mp.Cluster, size: int, length: int, count: int, how: str, batch: int = 1
) -> list[float]:
    """Seconds of each call, from when all members are there until the last one has its result; or
    of so many calls after each other."""
    args = f"bench {size} {length} {how}", size, length, count, how, batch
    tasks = [cluster.submit(member, rank, *args) for rank in range(size)]
    return [max(times) for times in zip(*cluster.get(tasks), strict=True)][UNTIMED:]


def member(
    rank: int, name: str, size: int, length: int, count: int, how: str, batch: int
) -> list[float]:
    """One member: what its calls took."""
    import hoplite_mp

    group = hoplite_mp.current().group(name, size, rank)
    make: Any = group.empty if how == "store" else np.empty
    x = make(length, np.float32)
    out = None if how == "plain" else make(length, np.float32)
    if out is not None:
        out.fill(0)
    times = []
    for number in range(count):
        x.fill(rank + number)
        group.barrier()
        begun = time.perf_counter()
        for _ in range(batch):
            total = group.allreduce(x, out=out)
        times.append(time.perf_counter() - begun)
        assert total[0] == total[-1] == size * number + size * (size - 1) // 2
    group.close()
    return times
