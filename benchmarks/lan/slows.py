"""`python -m benchmarks.lan.slows [-n 4] [--results]`: a host whose link slows down to a quarter.

Needs root. Ranks make allreduces of 64 MiB in a row; with `--results` one program does, on results
of tasks of all hosts. After the start of call `SLOW_CALL` the last host's link gets a quarter of
its rate, and at the start of `FAST_CALL` its full rate. Prints the seconds of each call, and the
lower bound for the links of that call. `--tree CHECKOUT`: another build, measured in the same
way."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.lan.hosts import ENV, PATIENCE_S, bound_s, cluster, link_rate
from tests.lan import Lan, why_not

NBYTES = 64 << 20
CALLS = 9
SLOW_CALL, FAST_CALL = 3, 7
PART = 4  # of its rate the slow link has one of so many parts

MEMBER = """
import sys, time
import numpy as np
import hoplite_mp
address, *numbers, pause = sys.argv[1:]
size, rank, calls, nbytes, slow, fast = map(int, numbers)
with hoplite_mp.Cluster(address=address, tls=False, memory="1500MiB") as c:
    g = c.group("slows", size, rank)
    mine = np.full(nbytes // 4, rank + 1, np.float32)
    for call in range(calls):
        time.sleep(float(pause))
        g.barrier()
        if rank == 0 and call in (slow, fast):
            print("now", call, flush=True)
        begun = time.perf_counter()
        total = g.allreduce(mine)
        print("took", call, time.perf_counter() - begun, flush=True)
        assert (total == size * (size + 1) / 2).all()
    g.close()
"""
DRIVER = """
import sys, time
import numpy as np
import hoplite_mp

def make(rank, count):
    return np.full(count, rank + 1, np.float32)

address, *numbers, pause = sys.argv[1:]
size, _, calls, nbytes, slow, fast = map(int, numbers)
with hoplite_mp.Cluster(address=address, tls=False) as c:
    while sum(node.workers for node in c.nodes) < size:
        time.sleep(0.05)
    nodes = [node for node in c.nodes if node.workers]
    for call in range(calls):
        refs = [c.options(node=n).submit(make, i, nbytes // 4).ref for i, n in enumerate(nodes)]
        c.wait(refs)
        time.sleep(float(pause))
        if call in (slow, fast):
            print("now", call, flush=True)
        begun = time.perf_counter()
        total = c.allreduce(refs, to=nodes)
        c.wait([total], timeout=60)
        print("took", call, time.perf_counter() - begun, flush=True)
        assert (c.get(total) == size * (size + 1) / 2).all()
        del refs, total
"""


def turn(lan: Lan, tree: Path, after_s: float, pause_s: float, results: bool) -> list[float]:
    """Seconds of each call, of the slowest rank. after_s: how long after the beginning of the call
    the link becomes slow. results: of tasks, not what members of a Group give."""
    size, slow = len(list(lan)), list(lan)[-1]
    seconds = [0.0] * CALLS
    lock = threading.Lock()

    def listen(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            word, call, *took = line.split()
            if word == "took":
                with lock:
                    seconds[int(call)] = max(seconds[int(call)], float(took[0]))
            elif int(call) == SLOW_CALL:
                threading.Timer(after_s, slow.shape, ("250mbit", "250mbit")).start()
            else:
                slow.shape("1gbit", "1gbit")

    with cluster(lan, False, int(results), "1500MiB", tree=tree) as address:
        ranks = []
        for rank, host in enumerate([lan[0]] if results else lan):
            about = [size, rank, CALLS, NBYTES, SLOW_CALL, FAST_CALL, pause_s]
            ranks.append(
                host.popen(
                    [
                        sys.executable,
                        "-c",
                        DRIVER if results else MEMBER,
                        address,
                        *map(str, about),
                    ],
                    env={**ENV, "PYTHONPATH": str(tree)},
                    cwd=tree,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        listeners = [threading.Thread(target=listen, args=(process,)) for process in ranks]
        for one in listeners:
            one.start()
        for one in listeners:
            one.join(PATIENCE_S)
        codes = [process.wait(PATIENCE_S) for process in ranks]
        if any(codes):
            raise RuntimeError(f"ranks ended with exit codes {codes}")
    return seconds


def main() -> int:
    """Exit code 0 unless a rank fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lan.slows", description=__doc__)
    parser.add_argument("-n", type=int, default=4, help="hosts (%(default)s)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--after", type=float, default=0.0, help="seconds into the call")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each call")
    parser.add_argument("--results", action="store_true", help="of tasks, in place of a Group's")
    parser.add_argument("--tree", type=Path, default=ROOT)
    options = parser.parse_args()
    why = why_not()
    if why is not None:
        print(why, file=sys.stderr)
        return 1
    found = []
    for _ in range(options.turns):
        with Lan(options.n, "1gbit") as lan:
            link = link_rate(lan[0], lan[1])
            found.append(
                turn(lan, options.tree.resolve(), options.after, options.pause, options.results)
            )
    usual = bound_s("allreduce", NBYTES, options.n, link)
    print(f"links of {link / 1e6:.1f} MB/s, medians of {options.turns}; {options.tree}")
    for call, taken in enumerate(zip(*found, strict=True)):
        slow = SLOW_CALL <= call < FAST_CALL
        bound = PART * NBYTES / link if slow else usual
        middle = statistics.median(taken)
        words = f"{middle:.2f} s, bound {bound:.2f} s, ratio {middle / bound:.2f}"
        print(f"call {call}{', slow' if slow else ''}: {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
