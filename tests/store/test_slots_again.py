"""A process slot that is used again: what its last process has written stays what it is."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

import hoplite_mp
from tests.support.waiting import eventually

COUNT = 300_000


def make(i: int) -> np.ndarray:
    return np.full(COUNT, i, np.int64)


def wait_elsewhere(seconds: float) -> None:
    """Counts as blocked: the node starts a worker in its place, which goes again afterwards."""
    hoplite_mp.current().submit(time.sleep, seconds).result(timeout=30)


def test_each_worker_makes_one_result() -> None:
    with (
        hoplite_mp.Cluster(workers=1, memory="256MiB") as c,
        c.executor(1, max_tasks_per_child=1) as one,
    ):
        futures = [one.submit(make, i) for i in range(6)]
        assert [f.exception() for f in futures] == [None] * 6  # all are made before one is read
        assert [set(c.get(f.ref).tolist()) for f in futures] == [{i} for i in range(6)]


def test_an_array_in_use_outlives_its_workers() -> None:
    with hoplite_mp.Cluster(workers=1, memory="256MiB") as c:
        futures = [c.submit(make, 0)]
        arrays = [futures[0].result()]
        for i in range(1, 5):
            pid = c.submit(os.getpid).result()
            os.kill(pid, signal.SIGKILL)
            futures.append(c.submit(make, i))
            arrays.append(futures[-1].result())
            assert [int(a[0]) for a in arrays] == list(range(i + 1))
        assert int(c.get(c.reduce(futures))[-1]) == sum(range(5))


def test_results_of_workers_that_stood_in() -> None:
    with hoplite_mp.Cluster(workers=1, memory="256MiB") as c:
        futures = []
        for turn in range(3):
            waiting = c.submit(wait_elsewhere, 0.3)
            futures += [c.submit(make, 10 * turn + i) for i in range(4)]
            waiting.result()
            c.wait(futures)
            # Whoever stood in is not needed any more, and goes.
            eventually(lambda: c.nodes[0].workers == 1)
        wanted = [10 * turn + i for turn in range(3) for i in range(4)]
        assert int(c.get(c.reduce(futures))[0]) == sum(wanted)
        assert [int(c.get(f.ref)[0]) for f in futures] == wanted
