"""The driver of the benchmarks on refs: arrays made by tasks, one on each host.

It runs on an emulated host, like a program of a user. Every round has new random data. Every
element of a result is compared, outside the timed part. Prints one line of JSON: for each kind the
seconds of each round except the first."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import hoplite_mp

if TYPE_CHECKING:
    from collections.abc import Callable

REST_S = 0.4  # until what a round has left is gone
LATE_S = 0.2  # after the broadcast that the late receiver joins


def make(rank: int, turn: int, count: int) -> np.ndarray[Any, Any]:
    """Random whole numbers that every process can make again: any order of adding is exact."""
    return np.random.default_rng(1000 * rank + turn).integers(-99, 99, count).astype(np.float32)


def read(array: np.ndarray[Any, Any]) -> float:
    """In a task: when it has come, by this host's clock, which is that of all emulated hosts."""
    assert array.shape
    return time.monotonic()


class Driver:
    """Arrays on all hosts, and what is done with them."""

    def __init__(self, c: hoplite_mp.Cluster, size: int, nbytes: int) -> None:
        while sum(node.workers for node in c.nodes) < size:
            time.sleep(0.05)
        self.c = c
        self.count = nbytes // 4
        self.nodes = [node for node in c.nodes if node.workers]
        self.there = [c.options(node=node) for node in self.nodes]
        self.sent: list[float] = []

    def refs(self, turn: int) -> list[Any]:
        """One array on each host, ready."""
        found = [view.submit(make, i, turn, self.count) for i, view in enumerate(self.there)]
        self.c.wait(found)
        return found

    def round(self, kind: str, turn: int) -> float:
        """Seconds."""
        refs = self.refs(turn)
        if kind == "late":
            return self.late(refs[0])
        first, c = self.nodes[0], self.c
        call: Callable[[], Any] = {
            "reduce": lambda: c.reduce(refs, to=first),
            "reduce_num": lambda: c.reduce(refs, num=len(refs) - 1, to=first),
            "allreduce": lambda: c.allreduce(refs, to=self.nodes),
            "broadcast": lambda: c.broadcast(refs[0], to=self.nodes),
            "gather": lambda: c.gather(refs, to=first),
        }[kind]
        before = self._bytes_sent() if kind == "broadcast" else 0
        begun = time.perf_counter()
        done = call()
        if kind in ("broadcast", "gather"):
            done.result(60)
        else:
            c.wait(done, timeout=60)
        seconds = time.perf_counter() - begun
        if kind == "broadcast":
            self.sent.append((self._bytes_sent() - before) / (4 * self.count))
        self.check(kind, turn, done, refs)
        return seconds

    def _bytes_sent(self) -> int:
        return int(self.c.stats()["nodes"][self.nodes[0].id]["bytes_sent"])

    def late(self, ref: Any) -> float:
        """Of a receiver that comes when the broadcast to the others is on its way."""
        last = self.there[-1]
        done = self.c.broadcast(ref, to=self.nodes[:-1])
        time.sleep(LATE_S)
        begun = time.monotonic()
        seconds = last.submit(read, ref).result(60) - begun
        done.result(60)
        return float(seconds)

    def check(self, kind: str, turn: int, done: Any, refs: list[Any]) -> None:
        """AssertionError if an element is wrong."""
        if kind in ("broadcast", "gather"):
            held = [set(self.c.locations(ref)) for ref in refs]
            if kind == "broadcast":
                assert held[0] >= {node.id for node in self.nodes}
            else:
                assert all(self.nodes[0].id in one for one in held)
            same = self.there[0].submit(np.array_equal, refs[0], make(0, turn, self.count))
            assert same.result(60)
            return
        total = np.zeros(self.count, np.float32)
        for rank in done.contributors:
            total += make(rank, turn, self.count)
        assert self.there[0].submit(np.array_equal, done, total).result(60)


def main() -> None:
    """Arguments: address, tls (0, 1), bytes, rounds, hosts, kinds."""
    address, tls, nbytes, rounds, size, *kinds = sys.argv[1:]
    found: dict[str, list[float]] = {}
    with hoplite_mp.Cluster(address=address, tls=None if tls == "1" else False, memory="1GiB") as c:
        driver = Driver(c, int(size), int(nbytes))
        for kind in kinds:
            times = []
            for turn in range(int(rounds) + 1):
                times.append(driver.round(kind, turn))
                time.sleep(REST_S)
            found[kind] = times[1:]
        if driver.sent:
            found["sent"] = driver.sent
    print(json.dumps(found))


if __name__ == "__main__":
    main()
