"""Allreduces with a deadline beside plain ones and Gloo, on links that other traffic slows."""

from __future__ import annotations

import random
import statistics
import subprocess
import threading
from typing import TYPE_CHECKING, Any

from benchmarks.applications.beds import Bed, python
from benchmarks.applications.running import run
from benchmarks.learning.experiment import Experiment, Line, Measure, Outcome
from tests.lan import DEVICE

if TYPE_CHECKING:
    from collections.abc import Sequence

HOSTS, RATE = 8, "100mbit"
ITEMS, CALLS, QUICK_CALLS = 1 << 20, 45, 6  # float32: 4 MiB
DEADLINE_S, NUM = 0.65, 6
PAUSE_S = 0.05  # between two calls, in which the program computes
EVERY_S, LAST_S = 6.0, 2.0  # mean time between two slow periods, and their length
# Bandwidth of a host in a slow period, by the ratio P99 / P50 that Gloo has with it.
SLOW = {"1.5": "60mbit", "3": "25mbit"}
PATIENCE_S = 200.0
OURS = "benchmarks.learning.programs.bounded"
GLOO = "benchmarks.learning.programs.bounded_gloo"


class Traffic:
    """Other traffic: one host at a time has less of its link, in both directions, for a while. The
    same seed gives the same hosts and times."""

    def __init__(self, bed: Bed, rate: str) -> None:
        self._bed, self._rate = bed, rate
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        rng = random.Random(0)
        while not self._ended.wait(rng.expovariate(1 / EVERY_S)):
            host = self._bed.lan[rng.randrange(HOSTS)]
            host.shape(up=self._rate, down=self._rate)
            self._ended.wait(LAST_S)
            host.shape(up=RATE, down=RATE)


def has_torch() -> bool:
    """Whether the interpreter of the beds has torch, and so Gloo."""
    found = subprocess.run([python(), "-c", "import torch"], check=False, capture_output=True)
    return found.returncode == 0


def measured(way: str, slow: str, calls: int) -> dict[str, Any]:
    """The result of one run."""
    given: dict[str, Any] = {"items": ITEMS, "calls": calls, "pause": PAUSE_S}
    system = "none" if way == "Gloo" else "ours"
    env = {"GLOO_SOCKET_IFNAME": DEVICE}
    with Bed(system, HOSTS, rate=RATE, env=env) as bed, Traffic(bed, slow):
        if way == "Gloo":
            given["first"] = bed.lan[0].address
            return run(bed, GLOO, given, PATIENCE_S, everywhere=True)
        given |= {"deadline": DEADLINE_S, "num": NUM}
        return run(bed, OURS, given, PATIENCE_S)


def percentile(times: Sequence[Sequence[float]], share: float) -> float:
    """Of the times of all calls of all ranks."""
    flat = sorted(one for of_rank in times for one in of_rank)
    return flat[min(len(flat) - 1, int(len(flat) * share))]


def measure(quick: bool) -> Outcome:
    """P50 and P99 of the calls of all ranks, and the share of parts that are left out."""
    calls = QUICK_CALLS if quick else CALLS
    slower = 0.0  # undisturbed calls, bounded ÷ Gloo
    ways = ["bounded", *(["Gloo"] if has_torch() else [])]
    measures, lines = [], []
    for name, slow in SLOW.items():
        found = {way: measured(way, slow, calls) for way in ways}
        p99 = {way: percentile(one["took"], 0.99) for way, one in found.items()}
        for way, one in found.items():
            p50 = percentile(one["took"], 0.5)
            about = f"traffic {name}, {way}"
            measures.append(Measure(f"{about}: P50", p50, "s"))
            measures.append(Measure(f"{about}: P99", p99[way], "s"))
            measures.append(Measure(f"{about}: P99 ÷ P50", p99[way] / p50, "ratio of times"))
            median = [statistics.median(call) for call in zip(*one["took"], strict=True)]
            lines.append(Line(about, list(enumerate(median))))
        if "Gloo" in found:
            medians = [percentile(found[way]["took"], 0.5) for way in ("bounded", "Gloo")]
            slower = max(slower, medians[0] / medians[1])
            ratio = p99["bounded"] / p99["Gloo"]
            what = f"traffic {name}: P99 of bounded ÷ P99 of Gloo"
            measures.append(Measure(what, ratio, "ratio of times", 0.5, at_least=False))
        left = sum(found["bounded"]["left_out"]) / (calls * HOSTS)
        what = f"traffic {name}: share of parts left out"
        measures.append(Measure(what, left, "share", 0.05, at_least=False))
    return Outcome(
        measures,
        {
            "hosts": HOSTS, "bandwidth": RATE, "bytes": 4 * ITEMS, "calls": calls,
            "deadline": f"{DEADLINE_S:g} s", "num": NUM, "pause": f"{PAUSE_S:g} s", "seed": 0,
            "traffic": f"a host has {' or '.join(SLOW.values())} for {LAST_S:g} s, about every "
            f"{EVERY_S + LAST_S:g} s",
        },
        [
            f"A typical call takes {slower:.2f} times as long as Gloo's: slices travel to their "
            "owners, the leading rank decides, and only then the folded slices travel back. So the "
            "deadline does not help against a host that is late by a few calls' time.",
            "Gloo's undisturbed call is close to what the links allow, so its P99 cannot be halved "
            "where it is 1.5 times its P50.",
        ],
        lines,
        "call",
        "seconds, median of the ranks",
    )  # fmt: skip


EXPERIMENT = Experiment(
    "bounded",
    "Allreduces with a deadline",
    "OptiReduce, NSDI 2025: tail latencies of allreduces in shared networks",
    measure,
)
