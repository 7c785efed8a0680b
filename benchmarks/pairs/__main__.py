"""`python -m benchmarks.pairs BEFORE [-n 4] [--pairs 20] [--rows ...]`: compare two builds.

BEFORE is the folder of another checkout whose modules are compiled. Both builds run at the same
time on the same machine, and make each call in turn (the order changes from pair to pair), because
the machine's speed varies more from minute to minute than the builds differ. Each row has the
median of after ÷ before over all pairs, and its interval of 95 % by bootstrap. Without -n: the rows
of one host; with -n: calls of a Group over that many emulated hosts of 1 Gbit/s, which needs
root."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import ROOT
from benchmarks.lan.hosts import ENV, cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.lan import Host

HERE = (
    "call", "queued", "mapped", "argument", "result", "put", "get", "reduced", "actor_call",
    "group_small", "group_large", "start",
)  # fmt: skip
LARGE = ("broadcast", "reduce", "allreduce", "gather", "allgather", "reduce_scatter")
OVER = (
    *(f"{kind}:{64 << 20}" for kind in LARGE),
    *(f"{kind}:{1 << 20}" for kind in LARGE[:3]),
    *(f"{kind}:1024" for kind in ("barrier", "broadcast", "allreduce")),
)
REFS = "refs-"
SMALL_TIMES = 20  # calls of 1 KiB, and four of 1 MiB, count once, as their median
RESAMPLES = 4000
ANSWER_S = 120.0  # for one reading; then a build hangs, and the figures would be of something else
PORTS = {"before": 7000, "after": 7100}
REFS_PORTS = {"before": 7200, "after": 7300}
MEMORY = "1500MiB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 if a row's whole interval lies above `--limit`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs", description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("-n", type=int, default=0, help="emulated hosts; 0: one host, no network")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--rows", nargs="*")
    parser.add_argument("--limit", type=float, default=1.02)
    options = parser.parse_args(arguments)
    trees = {"before": options.before.resolve(), "after": ROOT}
    rows = options.rows or (OVER if options.n else HERE)
    with contextlib.ExitStack() as stack:
        if options.n:
            groups = any(not row.startswith(REFS) for row in rows)
            refs = any(row.startswith(REFS) for row in rows)
            timed = stack.enter_context(over(trees, options.n, options.tls, groups, refs))
        else:
            timed = stack.enter_context(here(trees))
        ratios = measured(timed, rows, options.pairs)
    worse = 0
    for row, found in ratios.items():
        low, high = interval(found)
        worse += low > options.limit
        print(f"{row:26} {statistics.median(found):6.3f} [{low:.3f}, {high:.3f}]", flush=True)
    return int(worse > 0)


def measured(
    timed: Callable[[str, str, int], float], rows: Sequence[str], pairs: int
) -> dict[str, list[float]]:
    """after ÷ before of each row, pair by pair; the first pair warms up and is left out."""
    ratios: dict[str, list[float]] = {row: [] for row in rows}
    for turn in range(pairs + 1):
        for row in rows:
            order = ("before", "after") if turn % 2 else ("after", "before")
            seconds = {build: timed(build, row, turn) for build in order}
            if turn:
                ratios[row].append(seconds["after"] / seconds["before"])
        print(json.dumps({row: found[-1:] for row, found in ratios.items()}), file=sys.stderr)
    return ratios


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Of 95 %, of the median."""
    chance = random.Random(0)
    medians = sorted(
        statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    return medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def asked(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def answered(process: subprocess.Popen[str]) -> float:
    """The seconds that it has taken, as it writes them."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], ANSWER_S)[0]:  # it writes one line at a time
        process.kill()
        raise RuntimeError(f"{process.args} has not answered for {ANSWER_S:.0f} s")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended with exit code {process.wait()}")
    return float(line)


def end(process: subprocess.Popen[str]) -> None:
    """Ends a process, which ends by itself at the end of its input unless it hangs."""
    try:
        process.communicate(timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def here(trees: dict[str, Path]) -> Iterator[Callable[[str, str, int], float]]:
    """Times a row with one of the builds, on this host."""
    script = str(ROOT / "benchmarks" / "pairs" / "here.py")
    processes = {
        build: subprocess.Popen(
            [sys.executable, "-P", script], env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for build, tree in trees.items()
    }  # fmt: skip

    def timed(build: str, row: str, turn: int) -> float:
        asked(processes[build], row)
        return answered(processes[build])

    try:
        yield timed
    finally:
        for process in processes.values():
            end(process)


@contextlib.contextmanager
def over(
    trees: dict[str, Path], size: int, tls: bool, groups: bool, refs: bool
) -> Iterator[Callable[[str, str, int], float]]:
    """Times a call with one of the builds, whose clusters lie on the same emulated hosts. groups,
    refs: which calls there will be."""
    from tests.lan import Lan

    folder = ROOT / "benchmarks" / "pairs"
    with contextlib.ExitStack() as stack:
        lan = stack.enter_context(Lan(size, "1gbit"))

        def started(
            host: Host, build: str, script: str, address: str, *more: int
        ) -> subprocess.Popen[str]:
            arguments = map(str, (int(tls), size, *more))
            process = host.popen(
                [sys.executable, "-P", str(folder / script), address, *arguments],
                env={**ENV, "PYTHONPATH": str(trees[build])}, cwd=trees[build],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.callback(end, process)
            return process

        def up(build: str, workers: int, port: int) -> str:
            made = cluster(lan, tls, workers, MEMORY, tree=trees[build], port=port)
            return stack.enter_context(made)

        ranks: dict[str, list[subprocess.Popen[str]]] = {}
        drivers: dict[str, subprocess.Popen[str]] = {}
        for build in trees:
            if groups:
                address = up(build, 0, PORTS[build])
                ranks[build] = [
                    started(host, build, "rank.py", address, rank) for rank, host in enumerate(lan)
                ]
            if refs:
                address = up(build, 1, REFS_PORTS[build])
                drivers[build] = started(lan[0], build, "refs.py", address)

        def once(build: str, kind: str, nbytes: int, turn: int) -> float:
            of_refs = kind.startswith(REFS)
            asking = [drivers[build]] if of_refs else ranks[build]
            for process in asking:
                asked(process, f"{kind.removeprefix(REFS)} {nbytes} {turn}")
            return max([answered(process) for process in asking])

        def timed(build: str, row: str, turn: int) -> float:
            kind, size_ = row.split(":")
            nbytes = int(size_)
            times = 1 if nbytes > 1 << 20 else 4 if nbytes > 1024 else SMALL_TIMES
            return statistics.median(once(build, kind, nbytes, turn) for _ in range(times))

        yield timed


if __name__ == "__main__":
    sys.exit(main())
