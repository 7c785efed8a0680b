"""A Ray driver on the first host: broadcast and reduce, by Ray and by this library.

Ray, as its users write it. broadcast: `ray.put`, and a call of an actor on each host with that ref.
reduce: results of actors, added pairwise by tasks; and, simpler, fetched and added by the driver.
This library: the same actors, with refs of this library. `inside broadcast` and `inside reduce` are
the calls that benchmarks/lan/driver.py times without Ray. Arguments: bytes, rounds, hosts. Prints
one line of JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import hoplite_mp
import hoplite_mp.integrations.ray as hoplite_ray
from benchmarks.engines.arrays import Array, made, mark, timed, total

if TYPE_CHECKING:
    from collections.abc import Sequence

ADDRESS = "10.77.0.1"
INIT_S = 300.0  # all hosts share this machine's cores while their processes begin


class Holder:
    """On each host."""

    def __init__(self, rank: int, nbytes: int) -> None:
        self.rank = rank
        self.nbytes = nbytes

    def node(self) -> int:
        return int(hoplite_mp.current()._runtime.tasks.node_number)

    def given(self, x: Array) -> tuple[int, int]:
        """Ray has fetched it for this call."""
        self.x = x
        return x.shape

    def got(self, refs: list[Any]) -> tuple[int, int]:
        """This library has it here, or fetches it."""
        self.x = hoplite_mp.current().get(refs[0])
        return self.x.shape

    def mark(self) -> int:
        found = mark(self.x)
        del self.x
        return found

    def part(self, turn: int) -> Array:
        return made(self.rank, turn, self.nbytes)

    def part_put(self, turn: int) -> Any:
        return hoplite_mp.current().put(made(self.rank, turn, self.nbytes))


@ray.remote(num_cpus=1)
def added(x: Array, y: Array) -> Array:
    return np.add(x, y)


class Driver:
    def __init__(self, nbytes: int, size: int) -> None:
        self.nbytes, self.size = nbytes, size
        addresses = {n["NodeManagerAddress"]: n["NodeID"] for n in ray.nodes() if n["Alive"]}
        # One that waits must not keep a CPU from the tasks that add up.
        self.holders = [
            ray.remote(Holder)
            .options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(addresses[one], soft=False),
            )
            .remote(rank, nbytes)
            for rank, one in enumerate(sorted(addresses))
        ]
        self.c = hoplite_ray.init(memory="1GiB", tls=False, timeout=INIT_S)
        numbers = ray.get([one.node.remote() for one in self.holders])
        nodes = {int(node.id[1:]): node for node in self.c.nodes}
        self.nodes = [nodes[number] for number in numbers]
        assert len(set(numbers)) == size

    def _checks_marks(self, turn: int, refs: Sequence[Any] = ()) -> None:
        wanted = mark(made(0, turn, self.nbytes))
        assert ray.get([one.mark.remote() for one in self.holders]) == [wanted] * self.size
        self.c.delete(refs)

    def _checks_total(self, turn: int, found: Array, refs: Sequence[Any] = ()) -> None:
        """refs: those that the engine has carried; else each round would meet a fuller store."""
        assert np.array_equal(found, total(self.size, turn, self.nbytes))
        self.c.delete(refs)

    # -- Ray's own ---------------------------------------------------------------------------------

    def rays_broadcast(self, turn: int) -> Any:
        x = made(0, turn, self.nbytes)

        def call() -> Any:
            ref = ray.put(x)
            ray.get([one.given.remote(ref) for one in self.holders])
            return lambda: self._checks_marks(turn)

        return call

    def _parts(self, turn: int) -> list[Any]:
        refs = [one.part.remote(turn) for one in self.holders]
        ray.wait(refs, num_returns=len(refs), fetch_local=False)
        return refs

    def rays_tree(self, turn: int) -> Any:
        refs = self._parts(turn)

        def call() -> Any:
            left = list(refs)
            while len(left) > 1:
                pairs = zip(left[::2], left[1::2], strict=False)
                odd = left[len(left) // 2 * 2 :]
                left = [added.remote(x, y) for x, y in pairs] + odd
            found = ray.get(left[0])
            return lambda: self._checks_total(turn, found)

        return call

    def rays_driver(self, turn: int) -> Any:
        refs = self._parts(turn)

        def call() -> Any:
            found = np.zeros(self.nbytes // 4, np.float32)
            for x in ray.get(refs):
                found += x
            return lambda: self._checks_total(turn, found)

        return call

    # -- ours inside Ray ---------------------------------------------------------------------------

    def broadcast(self, turn: int) -> Any:
        x = made(0, turn, self.nbytes)

        def call() -> Any:
            ref = self.c.put(x)
            self.c.broadcast(ref)
            ray.get([one.got.remote([ref]) for one in self.holders])
            return lambda: self._checks_marks(turn, [ref])

        return call

    def _parts_put(self, turn: int) -> list[Any]:
        refs = ray.get([one.part_put.remote(turn) for one in self.holders])
        self.c.wait(refs)
        return list(refs)

    def reduce(self, turn: int) -> Any:
        refs = self._parts_put(turn)

        def call() -> Any:
            found = self.c.get(self.c.reduce(refs))
            return lambda: self._checks_total(turn, found, refs)

        return call

    def inside_broadcast(self, turn: int) -> Any:
        refs = self._parts_put(turn)

        def call() -> Any:
            self.c.broadcast(refs[0], to=self.nodes).result(60)
            return lambda: self.c.delete(refs)

        return call

    def inside_reduce(self, turn: int) -> Any:
        refs = self._parts_put(turn)

        def call() -> Any:
            done = self.c.reduce(refs, to=self.nodes[0])
            self.c.wait(done, timeout=60)
            return lambda: self._checks_total(turn, self.c.get(done), refs)

        return call


def main() -> None:
    nbytes, rounds, size = map(int, sys.argv[1:])
    # Ray prints warnings of its own to stdout.
    said, sys.stdout = sys.stdout, sys.stderr
    ray.init(
        address=f"{ADDRESS}:6379",
        _node_ip_address=ADDRESS,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    driver = Driver(nbytes, size)
    calls = {
        "Ray's broadcast": driver.rays_broadcast,
        "broadcast": driver.broadcast,
        "Ray's reduce, tasks": driver.rays_tree,
        "Ray's reduce, driver": driver.rays_driver,
        "reduce": driver.reduce,
        "inside broadcast": driver.inside_broadcast,
        "inside reduce": driver.inside_reduce,
    }
    print(json.dumps(timed(calls, rounds)), file=said, flush=True)
    hoplite_ray.shutdown()
    said.flush()
    os._exit(0)  # Ray takes seconds to leave, of which nobody hears


if __name__ == "__main__":
    main()
