"""An ensemble over one large array, from start to end: with a forked pool, or with a cluster.

    python ensemble.py fork|ours BYTES MEMBERS

The forked pool gets the array through its initializer, as such programs are usually written: the
children have it without a copy. The cluster puts the array, and passes the ref to every member."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

WORKERS = 2
STRIDE = 64
_array = np.empty(0)


def keep(array: np.ndarray) -> None:
    """The initializer of the forked pool."""
    global _array
    _array = array


def member(number: int, array: np.ndarray) -> float:
    """One member of the ensemble reads the whole array, a cache line in eight."""
    return float(array[number::STRIDE].sum())


def member_of_pool(number: int) -> float:
    """The same where the array was inherited."""
    return member(number, _array)


def of_pool(array: np.ndarray, members: int) -> list[float]:
    """Fork, compute, end."""
    context = get_context("fork")
    with ProcessPoolExecutor(WORKERS, context, initializer=keep, initargs=(array,)) as pool:
        return list(pool.map(member_of_pool, range(members)))


def of_ours(array: np.ndarray, members: int) -> list[float]:
    """Start, put, compute, end."""
    import hoplite_mp

    with hoplite_mp.Cluster(workers=WORKERS, memory=2 * array.nbytes) as cluster:
        ref = cluster.put(array)
        return [one.result() for one in [cluster.submit(member, n, ref) for n in range(members)]]


def main() -> None:
    """Prints the seconds as one line of JSON."""
    kind, count, members = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    array = np.ones(count // 8)
    began = time.perf_counter()
    found = {"fork": of_pool, "ours": of_ours}[kind](array, members)
    taken = time.perf_counter() - began
    assert found == [float(len(array[n::STRIDE])) for n in range(members)]
    print(json.dumps({"seconds": taken}))


if __name__ == "__main__":
    main()
