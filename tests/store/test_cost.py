"""What the node does in a turn and for a question does not grow with the number of objects."""

from __future__ import annotations

import time

import numpy as np

import hoplite_mp


def test_a_count_looks_at_no_header() -> None:
    with hoplite_mp.Cluster(workers=1) as cluster:
        cluster.submit(time.sleep, 0).result()  # the function is an object, too
        before = cluster.stats()["objects"]
        refs = [cluster.put(i) for i in range(5000)]
        assert cluster.stats()["objects"] == before + 5000
        del refs[1000:]
        assert cluster.stats()["objects"] == before + 1000
        waiting = cluster.submit(time.sleep, 30)
        assert cluster.stats()["objects"] == before + 1000  # what is not done does not count
        assert waiting.cancel(force=True)
        del waiting


def test_a_large_put_is_whole_whoever_else_puts() -> None:
    """Through the file and through the mapping: the same bytes, at odd lengths too."""
    import threading

    with hoplite_mp.Cluster(workers=1, memory="512MiB") as cluster:
        values = [np.arange((3 << 20) // 8 + 1001 * k, dtype=np.int64) + k for k in range(8)]
        refs: dict[int, hoplite_mp.ObjectRef[np.ndarray]] = {}

        def put(k: int) -> None:
            refs[k] = cluster.put(values[k])

        threads = [threading.Thread(target=put, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for k, value in enumerate(values):
            assert np.array_equal(cluster.get(refs[k]), value)
