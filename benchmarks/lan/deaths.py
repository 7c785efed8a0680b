"""`python -m benchmarks.lan.deaths [-n 8] [--rounds 3]`: the cost of a death during a call.

Needs root. Each measurement has its own cluster over emulated hosts of 1 Gbit/s. The call is made
twice undisturbed (the first one is cold), then once while a host, or the manager's process, dies
after half of that time. A host dies with its connections (killed) or silently (cut, stopped); then
the time until detection is part of the time, but not of the ratio. Results are checked completely,
outside the timed part. The median of the rounds is printed."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.common import MIB, ROOT, Row
from benchmarks.lan.hosts import bound_s, link_rate
from benchmarks.report import table as drawn
from tests.lan import Lan, why_not
from tests.support.clusters import UpCluster, signal_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.lan import Host

RATE = "1gbit"
NOTICED_S = 1.6  # a silent host, median of 20 (tests/lan/test_silence.py)
SILENT = ("cut", "stopped")
PATIENCE_S = 120.0

PROGRAM = """
import pathlib
COUNT, KIND, FOLDER, NBYTES = {count}, {kind!r}, pathlib.Path({folder!r}), {nbytes}
deadline = time.monotonic() + 60
while len(at := sorted((n for n in c.nodes if n.workers), key=lambda n: int(n.host[1:]))) < COUNT:
    assert time.monotonic() < deadline, c.nodes
    time.sleep(0.01)
def make(i):
    return np.random.default_rng(i).integers(-1000, 1000, NBYTES // 4).astype(np.float32)
def total(ranks):
    return sum(make(i) for i in ranks)
def same(array, ranks):
    return np.array_equal(array, total(ranks))
def member(rank):
    mine, times = make(rank), []
    with hoplite_mp.current().group("bench", COUNT, rank, timeout=60) as g:
        for call in range(3):
            g.barrier()
            if call == 2 and rank == 0:
                (FOLDER / "begun").touch()
            begun = time.monotonic()
            got = g.allreduce(mine)
            times.append((begun, time.monotonic()))
            assert len(g.contributors) >= COUNT - (call == 2)
            assert same(got, g.contributors)
    return times
def timed(call, check, last):
    if last:
        (FOLDER / "begun").touch()
    begun = time.monotonic()
    got = call()
    took = time.monotonic() - begun
    check(got)
    return took
if KIND == "allreduce":
    pools = [c.executor(1, node=n) for n in at]
    tasks = [pool.options(retries=0).submit(member, rank) for rank, pool in enumerate(pools)]
    found = []
    for task in tasks:
        try:
            found.append(task.result(100))
        except hoplite_mp.WorkerLostError:
            pass
    took = [max(t[i][1] for t in found) - max(t[i][0] for t in found) for i in range(3)]
else:
    took = []
    for turn in range(3):
        if KIND == "broadcast":
            ref = c.put(make(turn))
            def check(_):
                for n in [n for n in c.nodes if n.workers]:
                    try:
                        assert c.options(node=n).submit(same, ref, (turn,)).result(60)
                    except (hoplite_mp.NodeLostError, ValueError):
                        pass
            took.append(timed(lambda: c.broadcast(ref).result(60), check, turn == 2))
            del ref
        else:
            refs = [c.options(node=n, retries=0).submit(make, i).ref for i, n in enumerate(at)]
            c.wait(refs)
            def reduce():
                made = c.reduce(refs, num=COUNT - 2)
                return made, c.get(made, timeout=60)
            def check(found):
                ranks = found[0].contributors
                assert len(ranks) == COUNT - 2 and same(found[1], ranks)
            took.append(timed(reduce, check, turn == 2))
            del refs
print(*took, flush=True)
"""


@dataclass(frozen=True)
class Case:
    """One row: a call, and what dies half way."""

    title: str
    kind: str
    how: str
    nbytes: int
    wanted: float


CASES = (
    Case("allreduce, one host killed half way", "allreduce", "killed", 64 * MIB, 1.25),
    Case("allreduce, one host silent half way", "allreduce", "cut", 64 * MIB, 1.25),
    Case("broadcast, a relaying host killed", "broadcast", "killed", 64 * MIB, 1.2),
    Case("reduce num=n-2, one of the first killed", "reduce", "killed", 64 * MIB, 1.65),
    Case("allreduce, one host stopped half way", "allreduce", "stopped", 64 * MIB, 1.25),
    Case("reduce num=n-2, one of the first stopped", "reduce", "stopped", 64 * MIB, 1.65),
    Case("broadcast, the manager killed", "broadcast", "manager", 256 * MIB, 1.05),
)


def kill(lan: Lan, how: str) -> None:
    """The third host, or the manager's process on the first one."""
    victim: Host = lan[2]
    if how == "killed":
        victim.kill()
    elif how == "cut":
        victim.cut()
    elif how == "stopped":
        signal_all(victim, signal.SIGSTOP)
    else:
        lan[0].run(["pkill", "-KILL", "-x", "hoplite manager"])


def once(case: Case, hosts: int, how: str, after_s: float) -> tuple[float, float]:
    """(undisturbed, disturbed) seconds, in a new cluster."""
    with Lan(hosts, RATE) as lan:
        cluster = UpCluster(lan, tls=False, memory="1GiB")
        folder: Path = lan.root
        program = PROGRAM.format(
            count=hosts, kind=case.kind, folder=str(folder), nbytes=case.nbytes
        )
        driver = lan[0].popen(
            cluster.program(program),
            env=cluster.driver_env(lan[0]),
            stdout=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "begun").exists():
            if time.monotonic() > deadline or driver.poll() is not None:
                raise TimeoutError(f"{case.title}: the program does not come to its last call")
            time.sleep(0.0005)
        if how != "none":
            time.sleep(after_s)
            kill(lan, how)
        said, _ = driver.communicate(timeout=PATIENCE_S)
        if how == "stopped":
            signal_all(lan[2], signal.SIGCONT)  # else its processes are never buried
        _, usual, disturbed = map(float, said.split())
        if cluster.up.stdout is not None:
            cluster.up.stdout.close()
        return usual, disturbed


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, whether targets are met or not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lan.deaths", description=__doc__)
    parser.add_argument("-n", type=int, default=8, help="hosts (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", type=int, default=range(len(CASES)))
    options = parser.parse_args(arguments)
    why = why_not()
    if why is not None:
        print(why, file=sys.stderr)
        return 1
    with Lan(2, RATE) as lan:
        link = link_rate(lan[0], lan[1])
    table: list[Row] = []
    for number in options.cases:
        case = CASES[number]
        plain = [once(case, options.n, "none", 0.0) for _ in range(options.rounds)]
        usual = statistics.median(seconds for both in plain for seconds in both)
        found = [once(case, options.n, case.how, usual / 2)[1] for _ in range(options.rounds)]
        seconds = statistics.median(found)
        noticed = NOTICED_S if case.how in SILENT else 0.0
        ratio = (seconds - noticed) / usual
        title = f"{case.title}, {options.n} hosts"
        table.append(
            Row(title, seconds, "s", "undisturbed", usual, ratio=ratio, wanted=case.wanted)
        )
        bound = bound_s(case.kind, case.nbytes, options.n, link)
        table.append(Row(title, seconds, "s", "bound", bound, ratio=seconds / bound))
        print(title, f"{seconds:.3f} s, undisturbed {usual:.3f} s, {ratio:.2f}", flush=True)
    print(drawn([row.as_dict() for row in table]))
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    rows = [row.as_dict() for row in table]
    (results / f"deaths-{options.n}.json").write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
