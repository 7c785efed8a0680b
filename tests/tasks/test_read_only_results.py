"""What docs/howto/read_only_results.md says: each way to an array, read-only and as a copy."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import Cluster

SIZE = 1 << 16


class Makes:
    def make(self) -> Any:
        return np.zeros(SIZE)


async def awaited(c: Cluster) -> Any:
    return await c.submit(np.zeros, SIZE)


def from_queue(copy: bool) -> Any:
    queue: Any = hoplite_mp.Queue(copy=copy)
    queue.put(np.zeros(SIZE))
    return queue.get()


def write(array: Any) -> str:
    try:
        array[0] = 1
    except ValueError as error:
        return str(error)
    return "written"


WAYS: dict[str, Callable[[Cluster, bool], Any]] = {
    "result": lambda c, copy: c.options(copy=copy).submit(np.zeros, SIZE).result(),
    "await": lambda c, copy: asyncio.run(awaited(c.options(copy=copy))),
    "get": lambda c, copy: c.get(c.put(np.zeros(SIZE)), copy=copy),
    "map": lambda c, copy: next(c.options(copy=copy).map(np.zeros, [SIZE])),
    "stream": lambda c, copy: c.get(next(c.stream(iter, [np.zeros(SIZE)])), copy=copy),
    "actor": lambda c, copy: c.options(copy=copy).actor(Makes).make().result(),
    "queue": lambda c, copy: from_queue(copy),
}


@pytest.mark.parametrize("way", WAYS)
def test_results_are_read_only_unless_copy(cluster: Cluster, way: str) -> None:
    assert write(WAYS[way](cluster, False)) == "assignment destination is read-only"
    assert write(WAYS[way](cluster, True)) == "written"


def test_values_of_refs_are_read_only_unless_copy(cluster: Cluster) -> None:
    ref = cluster.put(np.zeros(SIZE))
    assert cluster.submit(write, ref).result() == "assignment destination is read-only"
    assert cluster.options(copy=True).submit(write, ref).result() == "written"
    assert cluster.submit(write, np.zeros(SIZE)).result() == "written"
    assert cluster.get(ref)[0] == 0


def test_executor_gives_writable_results() -> None:
    with hoplite_mp.Executor(max_workers=1) as pool:
        assert write(pool.submit(np.zeros, SIZE).result()) == "written"
