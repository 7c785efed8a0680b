"""Prints the seconds from the creation of a cluster to its first two results."""

import json
import time

import numpy as np

import hoplite_mp


def work(number):
    return float(np.arange(number).sum())


if __name__ == "__main__":
    began = time.perf_counter()
    with hoplite_mp.Cluster(workers=2) as cluster:
        futures = [cluster.submit(work, number) for number in (10, 100)]
        results = [future.result() for future in futures]
        seconds = time.perf_counter() - began
    assert results == [45.0, 4950.0]
    print(json.dumps({"seconds": seconds}))
