"""Broadcasts over eight random link matrices between emulated hosts, beside Gloo.

A cluster measures the paths in its first broadcasts, which use stripes. After that they use packed
trees. Each matrix has a cluster of its own.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.applications.beds import Bed
from benchmarks.applications.running import run
from benchmarks.lan.hosts import link_rate
from benchmarks.learning.experiment import Experiment, Line, Measure, Outcome
from benchmarks.learning.packed import RATE, SEEDS, SEEDS_QUICK, SIXTEENTHS, bound, matrix
from benchmarks.peers.gloo import Gloo

HOSTS, LINK_MBIT = 5, 200
NBYTES = 16 << 20
ROUNDS, LAST, GLOO_ROUNDS = 12, 4, 3
PATIENCE_S = 240.0
PROGRAM = "benchmarks.learning.programs.broadcasts"


@dataclass(frozen=True)
class Found:
    """Bytes a second over one matrix. stripes: the first broadcast by stripes over known hosts;
    packed: the median of the last rounds. gloo: None if Gloo is not installed."""

    packed: float
    stripes: float
    bound: float
    shapes: tuple[str, ...]
    gloo: float | None


def over(seed: int, gloo: Gloo) -> Found:
    """One matrix."""
    with Bed("ours", HOSTS, rate=f"{LINK_MBIT}mbit") as bed:
        hosts = list(bed.lan)
        link = link_rate(hosts[0], hosts[1], NBYTES)
        paths = matrix(seed, HOSTS)
        for (one, other), sixteenths in paths.items():
            if sixteenths < max(SIXTEENTHS):
                rate = LINK_MBIT * 1000 * sixteenths // max(SIXTEENTHS)
                hosts[other].narrow(hosts[one], f"{rate}kbit")
        given = {"nbytes": NBYTES, "rounds": ROUNDS}
        rounds = run(bed, PROGRAM, given, PATIENCE_S)["rounds"]
        row = f"broadcast:{NBYTES}:{GLOO_ROUNDS}"
        gloo_s = gloo.rows(bed.lan, [row]).get(row)
    striped = [seconds for shape, seconds, _ in rounds if shape == "stripes"]
    return Found(
        packed=NBYTES / statistics.median(seconds for _, seconds, _ in rounds[-LAST:]),
        stripes=NBYTES / min(striped),
        bound=bound(paths, HOSTS) / RATE * link,
        shapes=tuple(shape for shape, _, _ in rounds),
        gloo=None if gloo_s is None else NBYTES / gloo_s,
    )


def measured(quick: bool) -> Outcome:
    """The medians over the matrices."""
    gloo = Gloo()
    seeds = SEEDS_QUICK if quick else SEEDS
    found = [over(seed, gloo) for seed in seeds]
    for seed, one in zip(seeds, found, strict=True):
        print(f"seed {seed}: {one}", flush=True)
    kind = "ratio of rates, median"
    measures = [
        Measure(
            "emulated hosts: packed trees ÷ stripes",
            statistics.median(one.packed / one.stripes for one in found), kind, 1.5,
        ),
        Measure(
            "emulated hosts: packed trees ÷ bound",
            statistics.median(one.packed / one.bound for one in found), kind, 0.9,
        ),
    ]  # fmt: skip
    beside = [one.packed / one.gloo for one in found if one.gloo is not None]
    if beside:
        measures.append(Measure("packed trees ÷ Gloo", statistics.median(beside), kind))
    setup = {
        "hosts": HOSTS, "bandwidth": f"{LINK_MBIT} Mbit/s each way",
        "paths": "1, 1/2, 1/4, 1/8 or 1/16 of that, equally likely, for each direction of a pair",
        "MiB": NBYTES >> 20, "seeds": ", ".join(map(str, seeds)),
        "Gloo": "in the table" if beside else "left out: not installed (`make peers`)",
    }  # fmt: skip
    limits = [
        "The first broadcasts measure the paths and use stripes.",
        "All emulated hosts share the processors of one machine.",
    ]
    rows = {name: [(s, getattr(one, name) / 1e6) for s, one in zip(seeds, found, strict=True)]
            for name in ("bound", "packed", "stripes")}  # fmt: skip
    lines = [Line(name, points) for name, points in rows.items()]
    return Outcome(measures, setup, limits, lines, x="seed of the link matrix", y="MB/s, broadcast")


EXPERIMENT = Experiment(
    "packed-hosts",
    "Packed trees over random links, emulated hosts",
    "Blink (MLSys 2020): up to 8× faster model synchronization than NCCL",
    measured,
)
