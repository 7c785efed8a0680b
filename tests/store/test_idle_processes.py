"""Memory that one process has freed is there for others, also while that process is idle."""

import numpy as np

import hoplite_mp
from tests.support.waiting import eventually

MIB = 1 << 20


def _large() -> np.ndarray:  # type: ignore[type-arg]
    return np.ones(40 * MIB, np.uint8)


def test_small_objects_that_are_gone_make_room_for_a_task() -> None:
    with hoplite_mp.Cluster(workers=1, memory="64MiB") as c:
        refs = [c.put(np.ones(50_000, np.uint8)) for _ in range(1000)]
        c.get(refs[0])
        del refs  # from here on this process makes no call that would look after its memory
        assert c.submit(_large).result(60).nbytes == 40 * MIB


def test_idle_memory_goes_back_from_a_process_that_does_nothing() -> None:
    config = hoplite_mp.Config(memory_idle_s=0.2)
    with hoplite_mp.Cluster(workers=1, config=config) as c:
        used = c.stats()["bytes_used"]
        refs = [c.put(np.ones(50_000, np.uint8)) for _ in range(200)]
        kept = refs[100]
        assert c.stats()["bytes_used"] > used + 8 * MIB
        del refs
        eventually(lambda: c.stats()["bytes_used"] <= used + 2 * MIB)
        assert c.get(kept).sum() == 50_000
        again = [c.put(np.full(50_000, i % 256, np.uint8)) for i in range(200)]
        assert [int(x[0]) for x in c.get(again)] == [i % 256 for i in range(200)]
        assert c.get(kept).sum() == 50_000
