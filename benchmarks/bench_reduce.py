"""The rate of a reduction compared with the memory bandwidth."""

from __future__ import annotations

import numpy as np

from benchmarks.common import BLOCK, BLOCK_BYTES, Row, beside, measure, median, seconds

SOURCES = 8


def bench_reduce_of_8_blocks(benchmark, cluster, rounds, record, memcpy, fresh):
    """The bound: n blocks are read and one is written, at the speed at which memcpy does both."""
    refs = []
    expected = np.zeros(BLOCK, np.float32)
    scratch = np.zeros(BLOCK, np.float32)
    plain = []

    def one_process():
        """The same sum by numpy, from the same memory."""
        arrays = cluster.get(refs)
        np.add(arrays[0], arrays[1], out=scratch)
        for array in arrays[2:]:
            np.add(scratch, array, out=scratch)

    def prepare():
        refs.clear()
        expected.fill(0)
        for _ in range(SOURCES):
            array = fresh.next()
            np.add(expected, array, out=expected)
            refs.append(cluster.put(array))
        plain.append(seconds(one_process))
        memcpy.sample()
        return ()

    def reduce():
        ref = cluster.reduce(refs, op="sum")
        cluster.wait(ref)
        return ref

    def check(ref):
        assert ref.contributors == tuple(range(SOURCES))
        assert np.array_equal(cluster.get(ref), expected)

    times = measure(
        benchmark, rounds=rounds(9, 2), prepare=prepare, call=reduce, check=check, warm_up=2
    )
    ours = median(times)
    bound = (SOURCES + 1) * BLOCK_BYTES / (2 * memcpy.bytes_per_s)
    title = "reduce of 8 x 64 MiB, warm"
    record(
        Row(
            f"{title}: speed",
            ours,
            "s",
            "bound",
            bound,
            ratio=bound / ours,
            wanted=0.6,
            direction=">=",
        ),
        beside(title, ours, "s", "numpy, one process", median(plain[2:])),
    )
