"""A client of Dask's on the first host: broadcast and reduce, Dask's own way and ours.

Dask's own way, as its users write it. broadcast: `client.scatter(value, broadcast=True)`. reduce:
a tree of sums of Futures, each pair added by a task. `inside broadcast` and `inside reduce` are the
calls that benchmarks/lan/driver.py times without Dask. Arguments: bytes, rounds, hosts. Prints one
JSON line.
"""

from __future__ import annotations

import json
import operator
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Client, wait

import hoplite_mp
from benchmarks.engines.arrays import Array, made, mark, timed, total
from hoplite_mp.integrations import dask as hoplite_dask

if TYPE_CHECKING:
    from collections.abc import Sequence

ADDRESS = "10.77.0.1"


def put(rank: int, turn: int, nbytes: int) -> Any:
    return hoplite_mp.current().put(made(rank, turn, nbytes))


def node() -> int:
    return int(hoplite_mp.current()._runtime.tasks.node_number)


class Driver:
    def __init__(self, client: Client, nbytes: int, size: int) -> None:
        self.client, self.nbytes, self.size = client, nbytes, size
        client.wait_for_workers(size, timeout=300)
        self.workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
        self.c = hoplite_dask.init(client, memory="1GiB", tls=False)
        numbers = client.run(node)
        nodes = {int(one.id[1:]): one for one in self.c.nodes}
        self.nodes = [nodes[numbers[worker]] for worker in self.workers]
        assert len(set(numbers.values())) == size

    def _checks_marks(self, turn: int, future: Any) -> None:
        wanted = mark(made(0, turn, self.nbytes))
        found = self.client.gather(
            [self.client.submit(mark, future, workers=[w], pure=False) for w in self.workers]
        )
        assert found == [wanted] * self.size

    def _checks_total(self, turn: int, found: Array, refs: Sequence[Any] = ()) -> None:
        """refs: those that the engine has carried; else each round would meet a fuller store."""
        assert np.array_equal(found, total(self.size, turn, self.nbytes))
        self.c.delete(refs)

    def _on_each(self, function: Any, turn: int) -> list[Any]:
        """Futures of what it makes on each host, ready."""
        futures = [
            self.client.submit(function, rank, turn, self.nbytes, workers=[worker], pure=False)
            for rank, worker in enumerate(self.workers)
        ]
        wait(futures)
        return futures

    # -- Dask's own --------------------------------------------------------------------------------

    def dasks_broadcast(self, turn: int) -> Any:
        x = made(0, turn, self.nbytes)

        def call() -> Any:
            future = self.client.scatter(x, broadcast=True, hash=False)
            return lambda: self._checks_marks(turn, future)

        return call

    def dasks_tree(self, turn: int) -> Any:
        futures = self._on_each(made, turn)

        def call() -> Any:
            left = list(futures)
            while len(left) > 1:
                pairs = zip(left[::2], left[1::2], strict=False)
                odd = left[len(left) // 2 * 2 :]
                left = [self.client.submit(operator.add, x, y, pure=False) for x, y in pairs] + odd
            found = left[0].result()
            return lambda: self._checks_total(turn, found)

        return call

    # -- ours inside Dask --------------------------------------------------------------------------

    def broadcast(self, turn: int) -> Any:
        x = made(0, turn, self.nbytes)

        def call() -> Any:
            future = hoplite_dask.broadcast(self.client, x)
            return lambda: self._checks_marks(turn, future)

        return call

    def reduce(self, turn: int) -> Any:
        futures = self._on_each(made, turn)

        def call() -> Any:
            found = hoplite_dask.reduce(self.client, futures).result()
            return lambda: self._checks_total(turn, found)

        return call

    def reduce_refs(self, turn: int) -> Any:
        """Of what tasks have put themselves."""
        futures = self._on_each(put, turn)

        def call() -> Any:
            found = hoplite_dask.reduce(self.client, futures).result()
            return lambda: self._checks_total(turn, found, self.client.gather(futures))

        return call

    def inside_broadcast(self, turn: int) -> Any:
        refs = self.client.gather(self._on_each(put, turn))

        def call() -> Any:
            self.c.broadcast(refs[0], to=self.nodes).result(60)
            return lambda: self.c.delete(refs)

        return call

    def inside_reduce(self, turn: int) -> Any:
        refs = self.client.gather(self._on_each(put, turn))

        def call() -> Any:
            done = self.c.reduce(refs, to=self.nodes[0])
            self.c.wait(done, timeout=60)
            return lambda: self._checks_total(turn, self.c.get(done), refs)

        return call


def main() -> None:
    nbytes, rounds, size = map(int, sys.argv[1:])
    driver = Driver(Client(f"tcp://{ADDRESS}:8786", timeout=120), nbytes, size)
    calls = {
        "Dask's broadcast": driver.dasks_broadcast,
        "broadcast": driver.broadcast,
        "Dask's reduce": driver.dasks_tree,
        "reduce": driver.reduce,
        "reduce of refs": driver.reduce_refs,
        "inside broadcast": driver.inside_broadcast,
        "inside reduce": driver.inside_reduce,
    }
    print(json.dumps(timed(calls, rounds)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
