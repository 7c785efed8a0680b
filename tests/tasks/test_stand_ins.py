"""Stand-ins for workers that wait inside tasks: a pool of n workers runs no more than n tasks."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

import hoplite_mp
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from pathlib import Path

WORKERS = 2


class Slow:
    def answer(self, seconds: float) -> int:
        time.sleep(seconds)
        return 7


def waits(number: int) -> int:
    """Waits inside a task for something that this worker cannot run itself."""
    slow = hoplite_mp.current().get_actor("slow")
    assert slow.answer(0.2).result() == 7
    return number


def records(path: str) -> int:
    """Writes down when it begins and ends."""
    for sign in ("+", "-"):
        with open(path, "a") as file:
            file.write(f"{time.monotonic()} {sign}1\n")
        time.sleep(0.02 if sign == "+" else 0.0)
    return os.getpid()


def peak(path: str) -> int:
    """How many ran at a time."""
    with open(path) as file:
        events = sorted((float(at), int(change)) for at, change in map(str.split, file))
    running = most = 0
    for _, change in events:
        running += change
        most = max(most, running)
    return most


@pytest.mark.parametrize("kind", ["common", "executor", "map"])
def test_pool_after_nested_waits_runs_no_more_tasks_than_it_has_workers(
    tmp_path: Path, kind: str
) -> None:
    path = str(tmp_path / "events")
    with hoplite_mp.Cluster(WORKERS, memory="128MiB") as cluster:
        slow = cluster.options(name="slow", concurrency=8).actor(Slow)
        assert slow.answer(0.0).result(PATIENCE_S) == 7
        pool = cluster.executor(WORKERS) if kind == "executor" else cluster
        for _ in range(2):
            futures = [pool.submit(waits, number) for number in range(4)]
            assert [one.result(PATIENCE_S) for one in futures] == [0, 1, 2, 3]
            if kind == "map":
                list(pool.map(records, [path] * 30, chunksize=1, timeout=PATIENCE_S))
            else:
                for one in [pool.submit(records, path) for _ in range(30)]:
                    one.result(PATIENCE_S)
            assert peak(path) <= WORKERS
        if kind != "executor":
            assert len(cluster.run(os.getpid)) == WORKERS


def test_stand_in_of_a_worker_that_dies_takes_its_place(tmp_path: Path) -> None:
    """A stand-in that sleeps is one of the pool's own workers from then on, or ends."""
    path = str(tmp_path / "events")
    with hoplite_mp.Cluster(1, memory="128MiB") as cluster:
        slow = cluster.options(name="slow", concurrency=8).actor(Slow)
        assert slow.answer(0.0).result(PATIENCE_S) == 7
        for _ in range(3):
            assert cluster.submit(waits, 1).result(PATIENCE_S) == 1
            died = cluster.options(retries=0).submit(os._exit, 3)
            assert isinstance(died.exception(PATIENCE_S), hoplite_mp.WorkerLostError)
            futures = [cluster.submit(records, path) for _ in range(5)]
            assert len({one.result(PATIENCE_S) for one in futures}) == 1, "one worker runs all"
            assert peak(path) == 1
        eventually(lambda: len(cluster.run(os.getpid)) == 1)
