"""The cost of reading a large object that another process has put."""

from __future__ import annotations

import numpy as np
import psutil
import pytest

import hoplite_mp
from benchmarks import tasks
from benchmarks.common import MIB, Row, cold_cluster, median

SIZE = 1024 * MIB
PIECE = 8 * MIB


def bench_get_of_1_gib(benchmark, rounds, record):
    """In a worker that has mapped nothing of it; each round in a fresh cluster."""
    if psutil.virtual_memory().available < 4 * SIZE:
        pytest.skip("needs 4 GiB of available memory")
    found = []
    piece = np.arange(PIECE // 8, dtype=np.uint64)

    def call():
        with cold_cluster() as cluster:
            array = cluster.empty(SIZE // 4, np.float32)
            pieces = array.view(np.uint64).reshape(-1, len(piece))
            for number, part in enumerate(pieces):
                np.multiply(piece, np.uint64(2 * number + 2 * len(found) + 1), out=part)
            checksum = int(np.bitwise_xor.reduce(array.view(np.uint64)))
            ref = cluster.put(array)
            *times, seen = cluster.submit(tasks.get_and_read, hoplite_mp.by_ref(ref)).result()
            assert seen == checksum
            found.append(times)

    benchmark.pedantic(call, rounds=rounds(3, 1))
    get, first, warm = (median(column) for column in zip(*found, strict=True))
    record(
        Row("get of 1 GiB in another process, cold", get, "s", wanted=0.2e-3),
        Row(
            "first full read of it",
            first,
            "s",
            "second read",
            warm,
            ratio=first / warm,
            wanted=4,
        ),
    )
