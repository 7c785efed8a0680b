"""Threads of the driver and workers use the store at the same time."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

import hoplite_mp
from hoplite_mp import Config, ObjectLostError
from tests.support.functions import checksum
from tests.support.store import objects, warm
from tests.support.values import MIB
from tests.support.waiting import falls_to

if TYPE_CHECKING:
    from hoplite_mp import Cluster

SIZES = [0, 20, 150, 180, 1000, 30_000, 65_000, 70_000, 500_000, 2 * MIB]


def churn(seed: int, rounds: int) -> int:
    """Puts, gets, drops and deletes at random, with every value checked."""
    c = hoplite_mp.current()
    dice = random.Random(seed)
    mine: list[tuple[Any, int, int]] = []
    checked = 0
    for _ in range(rounds):
        move = dice.random()
        if move < 0.45 or not mine:
            size, fill = dice.choice(SIZES), dice.randrange(256)
            mine.append((put(c, size, fill, dice.random() < 0.2), size, fill))
        elif move < 0.8:
            ref, size, fill = dice.choice(mine)
            array = c.get(ref)
            assert array.size == size
            assert not size or (array[0] == fill and (array == fill).all())
            checked += 1
        elif move < 0.9:
            mine.pop(dice.randrange(len(mine)))
        else:
            ref, _, _ = mine.pop(dice.randrange(len(mine)))
            c.delete(ref)
            try:
                c.get(ref)
            except ObjectLostError:
                continue
            raise AssertionError("a deleted object was read")
    return checked


def put(c: Cluster, size: int, fill: int, in_place: bool) -> Any:
    if in_place:
        array = c.empty(size, np.uint8)
        array[:] = fill
        return c.put(array)
    return c.put(np.full(size, fill, np.uint8))


def test_threads_and_workers_at_once() -> None:
    config = Config(populate_ahead_bytes=0)
    with hoplite_mp.Cluster(workers=2, memory="64MiB", config=config) as c:
        warm(c, checksum)
        c.submit(churn, 0, 1).result()
        before = objects(c)
        futures = [c.submit(churn, seed, 150) for seed in range(4)]
        with ThreadPoolExecutor(4) as threads:
            counts = list(threads.map(churn, range(10, 14), [300] * 4))
        assert sum(counts) > 200
        assert sum(future.result() for future in futures) > 100
        del futures
        falls_to(lambda: objects(c), before)
        falls_to(lambda: c.stats()["bytes_used"] % MIB, 0)


def test_one_object_read_by_all_while_others_come_and_go(cluster: Cluster) -> None:
    ref = cluster.put(np.ones(300_000, np.uint8))
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                assert checksum(cluster.get(ref)) == 300_000
                cluster.put([ref, 1])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    results = [cluster.submit(checksum, ref) for _ in range(300)]
    assert {future.result() for future in results} == {300_000}
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    private = cluster._runtime.client.private_counts(cluster._runtime.memory.local_id(ref))
    assert private[1] == 0, "a pin was lost or kept by racing threads"
