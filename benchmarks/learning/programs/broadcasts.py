"""Broadcasts of new arrays to all hosts, one after another, with the plan of each.

`python -m benchmarks.learning.programs.broadcasts '{"address": "10.77.0.1:7000", "hosts": 5}'`.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import hoplite_mp
from examples.applications.running import arguments, say

REST_S = 0.3  # until the last array is dropped everywhere
PATIENCE_S = 60.0


def make(turn: int, nbytes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(turn).integers(0, 256, nbytes, np.uint8)


def right(array: np.ndarray[Any, Any], turn: int) -> bool:
    return np.array_equal(array, make(turn, array.nbytes))


def main() -> None:
    given = arguments(nbytes=16 << 20, rounds=8)
    nbytes = given.nbytes
    rounds = []
    with hoplite_mp.Cluster(address=given.address, tls=False) as c:
        while sum(node.workers for node in c.nodes) < given.hosts:
            time.sleep(0.05)
        nodes = [node for node in c.nodes if node.workers]
        say("begun")
        for turn in range(given.rounds):
            array = c.options(node=nodes[0]).submit(make, turn, nbytes)
            c.wait(array)
            done = c.broadcast(array, to=nodes)
            done.result(PATIENCE_S)
            plan = c.explain(array).plans[-1]
            checks = [c.options(node=node).submit(right, array.ref, turn) for node in nodes]
            if not all(check.result(PATIENCE_S) for check in checks):
                raise ValueError(f"wrong bytes after {plan}")
            rounds.append([plan.shape, plan.elapsed_s, plan.expected_s])
            del array, done, checks
            time.sleep(REST_S)
        say("ended")
    say("result", rounds=rounds)


if __name__ == "__main__":
    main()
