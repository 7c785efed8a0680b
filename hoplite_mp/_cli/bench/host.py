"""Benchmarks of one host: this library, ProcessPoolExecutor, memcpy and numpy, in turns.

The ratios can be compared between machines, because the reference software is available
everywhere. All results are checked, so that no benchmark is fast because it skips work.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import multiprocessing
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._api.cluster import ApartCluster, Cluster
from hoplite_mp._cli.bench import tasks
from hoplite_mp._cli.bench.lan import cluster_rows
from hoplite_mp._cli.bench.tasks import BenchRow, Effort, in_turns, percentile
from hoplite_mp._cli.table import table
from hoplite_mp._common.machine_limits import cpu_count, format_seconds, three_digits
from hoplite_mp._common.ref import by_ref
from hoplite_mp._version import __version__
from hoplite_mp.config import MIB
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from hoplite_mp._cli.bench.tasks import Floats

__all__ = ["bench", "host_rows", "show", "workers_of"]


BLOCK_BYTES = 64 * MIB
SOURCES, SOURCE_BYTES = 8, 16 * MIB
WORKERS_MIN = 2
# More workers do not speed up single calls, and take a long time to start.
WORKERS_MAX = 16
CALLS = 50  # number of consecutive calls by one contestant
QUEUED = 1000
# Timeout of one wait. On a healthy host, waits take less than a hundredth of this.
WAIT_S_MAX = 60.0
POOL = "ProcessPoolExecutor"
# The share of the total time that each benchmark gets. "arguments" gets the largest share, because
# the pool is slow with arguments by value.
SHARES = {"call": 0.2, "queue": 0.2, "objects": 0.2, "arguments": 0.25, "reduce": 0.15}


def workers_of(requested: int | None) -> int:
    """The number of workers in the cluster and in the pool."""
    return min(max(cpu_count(), WORKERS_MIN), WORKERS_MAX) if requested is None else requested


def host_rows(effort: Effort, workers: int) -> Iterator[BenchRow]:
    """Yields each row as soon as it is measured. Raises HopliteError, or TimeoutError if a wait
    takes too long."""
    context = multiprocessing.get_context("spawn")  # a process with threads must not be forked
    with Cluster(workers=workers) as cluster, ProcessPoolExecutor(workers, context) as pool:
        for executor in (cluster, pool):
            _warm_up(executor, workers)
        yield from _calls(effort.part(SHARES["call"]), cluster, pool)
        yield _queue(effort.part(SHARES["queue"]), cluster, pool)
        fresh = _Fresh()
        yield from _objects(effort.part(SHARES["objects"]), cluster, fresh)
        yield from _arguments(effort.part(SHARES["arguments"]), cluster, pool, fresh)
        yield _reduce(effort.part(SHARES["reduce"]), cluster)


def _warm_up(executor: Any, workers: int) -> None:
    """Waits until all workers have run a task, so that they have imported their modules."""
    pids: set[int] = set()
    deadline = time.monotonic() + WAIT_S_MAX
    while len(pids) < workers:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"only {len(pids)} of {workers} workers have started within {WAIT_S_MAX:g} s"
            )
        calls = [executor.submit(tasks.pid_after, 0.01) for _ in range(2 * workers)]
        pids.update(call.result(WAIT_S_MAX) for call in calls)


class _Fresh:
    """An array with new contents for each use, always in the same memory, which stays mapped."""

    def __init__(self) -> None:
        size = BLOCK_BYTES // 4
        self._base = (np.arange(size) % 1009).astype(np.float32)
        self.array = np.empty(size, np.float32)
        self.copy = np.zeros(size, np.float32)
        self._count = 0

    def next(self) -> Floats:
        self._count += 1
        np.add(self._base, np.float32(self._count % 4096), out=self.array)
        return self.array

    def check(self, probe: Floats) -> None:
        """Checks elements that were read from the current array."""
        _same(probe, tasks.probe(self.array))

    def memcpy(self) -> float:
        """The time to copy the block into warm memory, in seconds."""
        began = time.perf_counter()
        ctypes.memmove(self.copy.ctypes.data, self.array.ctypes.data, BLOCK_BYTES)
        return time.perf_counter() - began


def _same(found: Floats, wanted: Floats) -> None:
    if not np.array_equal(found, wanted):
        raise RuntimeError("the bytes received differ from those sent: please report it")


def _calls(effort: Effort, *executors: Any) -> list[BenchRow]:
    numbers = itertools.count()
    single: list[list[float]] = [[] for _ in executors]

    def block(executor: Any, into: list[float]) -> float:
        began = time.perf_counter()
        for number in itertools.islice(numbers, CALLS):
            start = time.perf_counter()
            result = executor.submit(tasks.echo, number).result(WAIT_S_MAX)
            into.append(time.perf_counter() - start)
            if result != number:
                raise AssertionError(f"task {number} returned {result!r}")
        return time.perf_counter() - began

    def contestant(executor: Any, into: list[float]) -> Callable[[], float]:
        return lambda: block(executor, into)

    in_turns(effort, *map(contestant, executors, single))
    ours, theirs = (values[CALLS:] for values in single)  # the first block was the warm-up
    return [
        BenchRow(f"no-op, submit().result(), p{share * 100:.0f}", percentile(ours, share), "s",
            POOL, percentile(theirs, share))
        for share in (0.5, 0.99)
    ]  # fmt: skip


def _queue(effort: Effort, *executors: Any) -> BenchRow:
    def contestant(executor: Any) -> Callable[[], float]:
        def queue() -> float:
            began = time.perf_counter()
            calls = [executor.submit(tasks.echo, number) for number in range(QUEUED)]
            results = [call.result(WAIT_S_MAX) for call in calls]
            seconds = time.perf_counter() - began
            if results != list(range(QUEUED)):
                raise AssertionError("the queued tasks returned wrong values")
            return seconds

        return queue

    ours, theirs = in_turns(effort, *map(contestant, executors))
    rates = QUEUED / median(ours), QUEUED / median(theirs)
    return BenchRow(f"no-ops, {QUEUED} queued", rates[0], "1/s", POOL, rates[1])


def _objects(effort: Effort, cluster: Cluster, fresh: _Fresh) -> list[BenchRow]:
    held: list[Any] = [None]
    gets: list[float] = []

    def put() -> float:
        array = fresh.next()
        held[0] = None  # so that `put` can reuse the memory
        began = time.perf_counter()
        held[0] = cluster.put(array)
        return time.perf_counter() - began

    def copied() -> float:
        began = time.perf_counter()
        array = cluster.get(held[0], WAIT_S_MAX, copy=True)
        seconds = time.perf_counter() - began
        fresh.check(tasks.probe(array))
        return seconds

    def in_worker() -> float:
        seconds, probe = cluster.submit(tasks.get_and_probe, by_ref(held[0])).result(WAIT_S_MAX)
        fresh.check(probe)
        gets.append(seconds)
        return seconds

    puts, copies, _, memcpys = in_turns(effort, put, copied, in_worker, fresh.memcpy)
    memcpy = median(memcpys)
    return [
        BenchRow("put of 64 MiB", median(puts), "s", "memcpy", memcpy),
        BenchRow("get of 64 MiB in another process", median(gets[1:]), "s", "memcpy", memcpy),
        BenchRow("get of 64 MiB, copy=True", median(copies), "s", "memcpy", memcpy),
    ]


def _arguments(effort: Effort, cluster: Cluster, pool: Any, fresh: _Fresh) -> list[BenchRow]:
    def sent(submit: Callable[..., Any], argument: Any) -> float:
        began = time.perf_counter()
        probe = submit(tasks.probe, argument).result(WAIT_S_MAX)
        seconds = time.perf_counter() - began
        fresh.check(probe)
        return seconds

    def by_value() -> float:
        return sent(cluster.submit, fresh.next())

    def by_value_to_pool() -> float:
        return sent(pool.submit, fresh.next())

    def by_reference() -> float:
        return sent(cluster.submit, cluster.put(fresh.next()))

    ours, refs, theirs = in_turns(effort, by_value, by_reference, by_value_to_pool)
    reference = median(theirs)
    return [
        BenchRow("argument of 64 MiB by value", median(ours), "s", POOL, reference),
        BenchRow("argument of 64 MiB by ref", median(refs), "s", f"{POOL}, by value", reference),
    ]


def _reduce(effort: Effort, cluster: Cluster) -> BenchRow:
    size = SOURCE_BYTES // 4
    refs = [cluster.submit(tasks.make, size, number).ref for number in range(SOURCES)]
    arrays = cluster.get(refs, WAIT_S_MAX)
    total = np.empty(size, np.float32)

    def plain() -> float:
        began = time.perf_counter()
        np.add(arrays[0], arrays[1], out=total)
        for array in arrays[2:]:
            np.add(total, array, out=total)
        return time.perf_counter() - began

    def reduce() -> float:
        began = time.perf_counter()
        ref = cluster.reduce(refs)
        value = cluster.get(ref, WAIT_S_MAX)
        seconds = time.perf_counter() - began
        _same(value, total)
        return seconds

    theirs, ours = in_turns(effort, plain, reduce)
    title = f"reduce of {SOURCES} x {SOURCE_BYTES // MIB} MiB"
    return BenchRow(title, median(ours), "s", "numpy, one process", median(theirs))


# -- the command `hoplite-mp bench` ----------------------------------------------------------------

# The times exclude the start and the warm-up. The minimum number of rounds may take longer.
WHOLE, QUICK = Effort(15.0, 3), Effort(1.0, 1)
INTERRUPTED = 130  # the exit code that shells use


def bench(arguments: argparse.Namespace) -> int:
    """Runs the benchmarks, and prints a table. Returns the exit code."""
    conditions: dict[str, Any] = {"quick": arguments.quick, "cluster": arguments.address}
    effort = QUICK if arguments.quick else WHOLE
    rows: list[BenchRow] = []
    try:
        if arguments.json is not None:
            arguments.json.touch()  # fails before the measurements if the file cannot be written
        for row in _measure(arguments, effort, conditions):
            rows.append(row)
            print(f"measured: {row.title}", file=sys.stderr)
        print(show(rows))
        if arguments.json is not None:
            _write(arguments.json, rows, conditions)
    except KeyboardInterrupt:
        print("hoplite-mp bench: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (HopliteError, OSError, ValueError) as error:  # TimeoutError is an OSError
        print(f"hoplite-mp bench: {error}", file=sys.stderr)
        return 1
    return 0


def _measure(
    arguments: argparse.Namespace, effort: Effort, conditions: dict[str, Any]
) -> Iterator[BenchRow]:
    if arguments.address is None:
        conditions["workers"] = workers_of(arguments.workers)
        yield from host_rows(effort, conditions["workers"])
        return
    tls = False if arguments.no_tls else None
    with ApartCluster(
        workers=0, address=arguments.address, token=arguments.token_file, tls=tls
    ) as cluster:
        conditions["nodes"] = len(cluster.nodes) - 1
        yield from cluster_rows(cluster, effort)


def show(rows: Sequence[BenchRow]) -> str:
    """The rows as a table."""
    head = ("", "hoplite_mp", "", "reference", "times as fast")
    cells: list[tuple[str, ...]] = [head]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        other = "" if row.reference_value is None else _shown(row.reference_value, row.unit)
        cells.append((row.title, _shown(row.value, row.unit), other, row.reference, ratio))
    if all(row.reference_value is None for row in rows):
        cells = [line[:2] for line in cells]
    return "\n".join(table(cells, right=(1, 2, 4)))


def _shown(value: float, unit: str) -> str:
    if unit == "1/s":
        return f"{value:,.0f} /s".replace(",", " ")
    return f"{three_digits(value / 1e6)} MB/s" if unit == "B/s" else format_seconds(value)


def _write(path: Path, rows: Sequence[BenchRow], conditions: Mapping[str, Any]) -> None:
    """Writes a JSON file with the rows, and with the machine and the software versions that were
    measured."""
    content = {
        "hoplite_mp": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpus": cpu_count(),
        **conditions,
        "rows": [row.as_dict() for row in rows],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
