"""Prints the CPU time of this process for many Futures: `many_futures.py COUNT`."""

import concurrent.futures
import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import hoplite_mp

POLL_S = 0.05


def same(x):
    return x


def second(_, x):
    return x


def opened(gate):
    while not os.path.exists(gate):
        time.sleep(POLL_S)


def broken(gate):
    opened(gate)
    raise ValueError(gate)


def cpu_us(call, count):
    began = time.process_time()
    call()
    return (time.process_time() - began) / count * 1e6


def all_of(waited):
    def call():
        for _ in waited():
            pass

    return call


def of_done_futures(cluster, count):
    """µs for each Future, all of which are done."""
    found = {}
    for name, wait in {
        "as_completed": hoplite_mp.as_completed,
        "concurrent.futures.as_completed": concurrent.futures.as_completed,
        "concurrent.futures.wait": lambda futures: concurrent.futures.wait(futures)[0],
    }.items():
        futures = [cluster.submit(same, n) for n in range(count)]
        cluster.wait(futures)
        found[f"{name}, done"] = cpu_us(all_of(lambda wait=wait, given=futures: wait(given)), count)
    found["wait(num=1), all done, ms a call"] = cpu_us(lambda: cluster.wait(futures, num=1), 1000)
    return found


def behind_a_gate(cluster, count, folder):
    """µs for each task that waits for one Future: to send it, and to wait for it until all are
    done."""
    found = {}
    for name, wait in {
        "as_completed": lambda futures: all_of(lambda: hoplite_mp.as_completed(futures)),
        "concurrent.futures.wait": lambda futures: lambda: concurrent.futures.wait(futures),
    }.items():
        for task in (opened, broken):
            gate = Path(folder) / f"{name} {task.__name__}"
            first = cluster.submit(task, str(gate))
            futures = []

            def send(first=first, futures=futures):
                futures.extend(cluster.submit(second, first, n) for n in range(count))

            found["submit, argument pending"] = cpu_us(send, count)
            gate.touch()
            found[f"{name}, {task.__name__}"] = cpu_us(wait(futures), count)
            if task is broken:
                futures.clear()
                found["submit, argument failed"] = cpu_us(send, count)
                cluster.wait(futures)
    return found


def main():
    count = int(sys.argv[1])
    with TemporaryDirectory() as folder, hoplite_mp.Cluster(workers=2) as cluster:
        found = of_done_futures(cluster, count) | behind_a_gate(cluster, count, folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
