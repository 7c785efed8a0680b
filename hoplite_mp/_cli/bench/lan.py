"""Benchmarks of ordinary calls between this host and the other hosts of a running cluster."""

from __future__ import annotations

import itertools
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._api.nodes import node_id
from hoplite_mp._cli.bench import tasks
from hoplite_mp._cli.bench.tasks import BenchRow, in_turns, percentile
from hoplite_mp.config import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp._api.nodes import Node
    from hoplite_mp._cli.bench.tasks import Effort, Floats

__all__ = ["cluster_rows"]

BLOCK_BYTES = 64 * MIB
CALLS = 20  # number of consecutive calls on one node
WAIT_S_MAX = 120.0  # timeout of one wait; 64 MiB take 5.4 s at 100 Mbit/s
SHARES = {"call": 0.2, "move": 0.4, "allreduce": 0.4}


def cluster_rows(cluster: Cluster, effort: Effort) -> Iterator[BenchRow]:
    """Yields each row as soon as it is measured. Raises HopliteError, or TimeoutError if a wait
    takes too long."""
    own = node_id(cluster._runtime.tasks.node_number)
    nodes = [node for node in cluster.nodes if node.id != own]
    working = [node for node in nodes if node.workers]
    if not working:
        raise ValueError("no node of this cluster has workers")
    yield from _calls(effort.part(SHARES["call"]), cluster, working)
    yield from _moves(effort.part(SHARES["move"]), cluster, nodes)
    if len(working) > 1:
        yield from _allreduce(effort.part(SHARES["allreduce"]), cluster, working)


def _name(node: Node) -> str:
    return f"{node.id} ({node.host})"


def _calls(effort: Effort, cluster: Cluster, nodes: list[Node]) -> list[BenchRow]:
    numbers = itertools.count()
    single: list[list[float]] = [[] for _ in nodes]

    def contestant(node: Node, into: list[float]) -> Callable[[], float]:
        view = cluster.options(node=node)

        def block() -> float:
            began = time.perf_counter()
            for number in itertools.islice(numbers, CALLS):
                start = time.perf_counter()
                result = view.submit(tasks.echo, number).result(WAIT_S_MAX)
                into.append(time.perf_counter() - start)
                if result != number:
                    raise AssertionError(f"task {number} returned {result!r}")
            return time.perf_counter() - began

        return block

    in_turns(effort, *map(contestant, nodes, single))
    return [
        BenchRow(f"no-op on {_name(node)}, p50", percentile(values[CALLS:], 0.5), "s")
        for node, values in zip(nodes, single, strict=True)
    ]


def _moves(effort: Effort, cluster: Cluster, nodes: list[Node]) -> list[BenchRow]:
    """Sends new objects. If the node has workers, a task on it checks each object."""
    size = BLOCK_BYTES // 4
    base = (np.arange(size) % 1009).astype(np.float32)
    counter = itertools.count()

    def contestant(node: Node) -> Callable[[], float]:
        def move() -> float:
            array = base + np.float32(next(counter) % 4096)
            ref = cluster.put(array)
            began = time.perf_counter()
            cluster.broadcast(ref, to=node).result(WAIT_S_MAX)
            seconds = time.perf_counter() - began
            if node.workers:
                probe = cluster.options(node=node).submit(tasks.probe, ref).result(WAIT_S_MAX)
                _same(probe, tasks.probe(array))
            return seconds

        return move

    times = in_turns(effort, *map(contestant, nodes))
    return [
        BenchRow(f"64 MiB to {_name(node)}", BLOCK_BYTES / median(values), "B/s")
        for node, values in zip(nodes, times, strict=True)
    ]


def _allreduce(effort: Effort, cluster: Cluster, nodes: list[Node]) -> list[BenchRow]:
    """Each node has one array; each round creates new arrays before its timed part."""
    size = BLOCK_BYTES // 4
    wanted = sum(tasks.probe(_made(size, number)) for number in range(len(nodes)))

    def allreduce() -> float:
        refs = [
            cluster.options(node=node).submit(tasks.make, size, number).ref
            for number, node in enumerate(nodes)
        ]
        _ready(cluster, refs)
        began = time.perf_counter()
        total = cluster.allreduce(refs, to=nodes)
        _ready(cluster, [total])
        seconds = time.perf_counter() - began
        last = cluster.options(node=nodes[-1])
        _same(last.submit(tasks.probe, total).result(WAIT_S_MAX), np.asarray(wanted))
        return seconds

    (times,) = in_turns(effort, allreduce)
    # On each link, at least 2 (n - 1) / n of the array's bytes must be sent in each direction.
    moved = 2 * (len(nodes) - 1) / len(nodes) * BLOCK_BYTES
    title = f"allreduce of 64 MiB over {len(nodes)} nodes"
    return [
        BenchRow(title, median(times), "s"),
        BenchRow(f"{title}: each link", moved / median(times), "B/s"),
    ]


def _made(size: int, number: int) -> Floats:
    return (np.arange(size, dtype=np.int64) % 1009 + number).astype(np.float32)


def _ready(cluster: Cluster, refs: list[Any]) -> None:
    """Waits until all refs are done. Raises TimeoutError after WAIT_S_MAX."""
    _, missing = cluster.wait(refs, timeout=WAIT_S_MAX)
    if missing:
        raise TimeoutError(f"{len(missing)} of {len(refs)} refs not ready after {WAIT_S_MAX:g} s")


def _same(found: Floats, wanted: Floats) -> None:
    if not np.array_equal(found, wanted):
        raise RuntimeError("the bytes received differ from those sent: please report it")
