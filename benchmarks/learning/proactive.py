"""Proactive updates beside bulk-synchronous ones, with full passes and with mini-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.applications.beds import Bed
from benchmarks.applications.running import run
from benchmarks.learning.experiment import Experiment, Line, Measure, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

HOSTS, RATE = 8, "1gbit"
BLOCK, BLOCK_S = 500, 0.025
PASSES = {"passes": 40.0, "minibatch": 40.0, "auto": 60.0}
QUICK_PASSES = 2.0
LABELS = {
    "passes": "bulk-synchronous, full passes",
    "minibatch": "bulk-synchronous, mini-batches",
    "auto": "proactive",
}
SLOW = 2.0
PROGRAM = "benchmarks.learning.programs.mixture"


def reached(curve: Sequence[Sequence[float]], level: float) -> float:
    """Seconds until the likelihood is first at that level; inf if it never is."""
    return next((seconds for seconds, value in curve if value >= level), float("inf"))


def measure(quick: bool) -> Outcome:
    """Time to the likelihood that full passes reach at last, with and without a slow host."""
    curves: dict[tuple[float, str], Any] = {}
    with Bed("ours", HOSTS, rate=RATE) as bed:
        for slow in (SLOW,) if quick else (SLOW, 1.0):
            for way, passes in PASSES.items():
                given = {
                    "way": way,
                    "block": BLOCK,
                    "seconds": BLOCK_S,
                    "slow": slow,
                    "passes": QUICK_PASSES if quick else passes,
                }
                curves[slow, way] = run(bed, PROGRAM, given, 300.0)["curve"]
    measures = []
    times: dict[tuple[float, str], float] = {}
    for slow in sorted({slow for slow, _ in curves}, reverse=True):
        level = curves[slow, "passes"][-1][1] - 0.01
        for way in LABELS:
            times[slow, way] = reached(curves[slow, way], level)
        setting = "one host of half the speed" if slow > 1 else "equal hosts"
        ours = times[slow, "auto"]
        measures += [
            Measure(
                f"{setting}: proactive, {name}", times[slow, way] / ours,
                "ratio of times (others / ours)", target if slow > 1 else None,
            )
            for way, name, target in (
                ("passes", "÷ full passes", 5.0), ("minibatch", "÷ mini-batches", None),
            )
        ]  # fmt: skip
        measures.append(Measure(f"{setting}: proactive", ours, "s"))
    limits = []
    if (1.0, "auto") in times:
        even = times[1.0, "minibatch"] / times[1.0, "auto"]
        limits.append(
            f"On equal hosts mini-batches are nearly as fast ({even:.2f}): most of the effect is "
            "that of updates within a pass, which mini-batches make as well."
        )
    return Outcome(
        measures,
        {
            "data": "Fashion-MNIST, 10 principal components",
            "model": "10 Gaussians, full covariances",
            "hosts": HOSTS,
            "bandwidth": RATE,
            "block": f"{BLOCK} rows",
            "compute": f"{1000 * BLOCK_S:.0f} ms a block, the slow host {SLOW:g} times that",
            "level": "0.01 below the last log-likelihood of full passes",
            "seed": 0,
        },
        limits,
        [Line(LABELS[way], curves[SLOW, way]) for way in LABELS],
        "s",
        "log-likelihood of a row",
    )


EXPERIMENT = Experiment(
    "proactive",
    "Proactive updates of a mixture of Gaussians",
    "Zhao, Zhou, Gao 2021: up to 20× over bulk-synchronous with full passes",
    measure,
)
