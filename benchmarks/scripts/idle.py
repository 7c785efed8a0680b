"""Prints the CPU time of an idle cluster over some seconds: `idle.py SECONDS`."""

import json
import os
import sys
import time
from pathlib import Path

import psutil

import hoplite_mp


def report(pause):
    import numpy

    time.sleep(pause)
    return os.getpid(), numpy.__name__


def cpu_seconds(process):
    """Of all its threads; from the scheduler in nanoseconds, where the kernel tells them."""
    threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    try:
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
    except (OSError, ValueError, IndexError):
        times = process.cpu_times()
        return times.user + times.system


def main():
    wait = float(sys.argv[1])
    with hoplite_mp.Cluster(workers=2) as cluster:
        workers = {pid for pid, _ in cluster.map(report, [0.1] * 4, chunksize=1)}
        time.sleep(1)
        driver = psutil.Process()
        processes = [driver, *driver.children(recursive=True)]
        before = {process: cpu_seconds(process) for process in processes}
        began = time.perf_counter()
        time.sleep(wait)
        elapsed = time.perf_counter() - began
        spent = sum(cpu_seconds(process) - before[process] for process in processes)
        uss = max(psutil.Process(pid).memory_full_info().uss for pid in workers)
    result = {
        "cpu_percent": 100 * spent / elapsed,
        "uss_mb": uss / 1e6,
        "processes": len(processes),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
