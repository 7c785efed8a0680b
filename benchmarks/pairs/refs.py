"""The driver of one build on the first emulated host: a timed collective for each input line.

The counterpart of rank.py for results of tasks on all hosts. benchmarks/lan/driver.py defines the
timing and the checks."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import hoplite_mp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # after the build's own package

from benchmarks.lan.driver import REST_S, Driver


def main() -> None:
    """Arguments: address, tls (0, 1), size. Lines: kind, bytes, turn."""
    address, tls, size = sys.argv[1:]
    secured = None if tls == "1" else False
    with hoplite_mp.Cluster(address=address, tls=secured, memory="1GiB") as c:
        driver = Driver(c, int(size), 0)
        for line in sys.stdin:
            kind, nbytes, turn = line.split()
            driver.count = int(nbytes) // 4
            print(driver.round(kind, int(turn)), flush=True)
            time.sleep(REST_S)


if __name__ == "__main__":
    main()
