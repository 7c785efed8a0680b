"""Prints the seconds from the creation of a spawned pool to its first two results."""

import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np


def work(number):
    return float(np.arange(number).sum())


if __name__ == "__main__":
    began = time.perf_counter()
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(work, number) for number in (10, 100)]
        results = [future.result() for future in futures]
        seconds = time.perf_counter() - began
    assert results == [45.0, 4950.0]
    print(json.dumps({"seconds": seconds}))
