"""Exact decision trees by columns, beside scikit-learn and LightGBM.

One tree of depth 10 over 60 000 pictures of Fashion-MNIST, and a number of random trees, on four
emulated hosts with one worker each, which share the processors of this machine.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from typing import Any

from benchmarks.applications.beds import Bed
from benchmarks.applications.running import run
from benchmarks.learning.experiment import Experiment, Measure, Outcome

PROGRAM = "benchmarks.learning.programs.trees"
HOSTS, RATE = 4, "1gbit"
CORES = len(os.sched_getaffinity(0))
VICTIM = 3
FULL = {"rows": 60_000, "depth": 10, "leaf": 50, "subtree_rows": 10_000}
QUICK = {"rows": 3000, "depth": 6, "leaf": 50, "subtree_rows": 800}
TREES, TREES_QUICK = 20, 4


def measured(quick: bool) -> Outcome:
    """All systems, one after the other, in the same run."""
    given = QUICK if quick else FULL
    trees = TREES_QUICK if quick else TREES
    with Bed("ours", HOSTS, rate=RATE) as bed:
        ours = _run(bed, given | {"system": "ours"})
        many = _run(bed, given | {"system": "ours", "trees": trees, "replicas": HOSTS})
        theirs = _run(bed, given | {"system": "sklearn"})
        theirs_many = _run(bed, given | {"system": "sklearn", "trees": trees})
        half = ours["usage"]["seconds"] / 2
        killed = _run(bed, given | {"system": "ours"}, lambda bed, at: _kill(bed, at, half))
    leaves = sum(left < 0 for left in theirs["tree"]["children_left"])
    peers = _lightgbm(given | {"leaves": leaves})
    same, ties, different = compare(ours["tree"], theirs["tree"])
    measures = [
        Measure("nodes with a unique best split that are scikit-learn's",
                same / max(1, same + different), "share", 1.0),
        Measure("the tree with a host killed is the same", float(killed["tree"] == ours["tree"]),
                "share", 1.0),
        Measure("cores used, one tree", _cores(ours), "share", 0.8),
        Measure(f"cores used, {trees} random trees", _cores(many), "share", 0.8),
        Measure("one tree: scikit-learn on one core ÷ ours on four hosts",
                _seconds(theirs) / _seconds(ours), "ratio of times"),
        Measure(f"{trees} random trees: scikit-learn on one core ÷ ours",
                _seconds(theirs_many) / _seconds(many), "ratio of times"),
        Measure(f"accuracy of {trees} random trees minus scikit-learn's",
                many["accuracy"] - theirs_many["accuracy"], "accuracy"),
    ]  # fmt: skip
    for learner, peer in peers.items():
        sent, other = ours["usage"]["bytes_sent"], peer["usage"]["bytes_sent"]
        measures += [
            Measure(f"bytes on the links, ours ÷ LightGBM `{learner}`", sent / max(1, other),
                    "ratio of bytes"),
            Measure(f"one tree: LightGBM `{learner}` ÷ ours", _seconds(peer) / _seconds(ours),
                    "ratio of times"),
            Measure(f"accuracy, ours minus LightGBM `{learner}`",
                    ours["accuracy"] - peer["accuracy"], "accuracy"),
        ]  # fmt: skip
    setup = {
        "hosts": HOSTS, "links": RATE, "cores of the machine": CORES, "workers of a host": 1,
        **given, "columns": 196, "nodes": len(ours["tree"]["feature"]),
        "ties between splits": ties, "seed": 0,
        "seconds, ours": _seconds(ours), "compute seconds, ours": ours["usage"]["cpu_s"],
        "seconds, random trees": _seconds(many), "seconds, scikit-learn": _seconds(theirs),
        "seconds, killed": _seconds(killed), "MB sent, ours": ours["usage"]["bytes_sent"] / 1e6,
        "MB of the table": given["rows"] * 196 * 4 / 1e6,
        "bytes, LightGBM": {name: peer["usage"]["bytes_sent"] for name, peer in peers.items()},
    }  # fmt: skip
    limits = [
        f"The table fits one host here. On one core scikit-learn takes {_seconds(theirs):.1f} s "
        f"for the tree, and four hosts on {CORES} shared cores {_seconds(ours):.1f} s.",
        *_limits(ours, peers),
    ]
    return Outcome(measures, {name: _short(value) for name, value in setup.items()}, limits)


def _run(bed: Bed, given: dict[str, Any], incidents: Any = None) -> dict[str, Any]:
    return run(bed, PROGRAM, given, patience_s=900.0, incidents=incidents)


def _kill(bed: Bed, begun: float, after: float) -> dict[str, float]:
    threading.Event().wait(max(0.0, begun + after - time.monotonic()))
    return {"killed": bed.kill(VICTIM) - begun}


def _lightgbm(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """LightGBM's distributed learners; none if it is not installed."""
    if importlib.util.find_spec("lightgbm") is None:
        return {}
    found = {}
    names = ("system", "rows", "depth", "leaf", "leaves")
    for learner in ("data", "voting"):
        with Bed("none", HOSTS, rate=RATE) as bed:
            machines = [host.address for host in bed.lan]
            told = {name: (given | {"system": "lightgbm"})[name] for name in names}
            told |= {"learner": learner, "machines": machines}
            found[learner] = run(bed, PROGRAM, told, patience_s=600.0, everywhere=True)
    return found


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[int, int, int]:
    """Counts nodes: equal ones, ones with another split of equal gain, and different ones. The
    nodes below a split of equal gain are not compared."""
    same = ties = different = 0
    pairs = [(0, 0)]
    while pairs:
        a, b = pairs.pop()
        if all(ours[name][a] == theirs[name][b] for name in ("feature", "threshold")):
            same += 1
            if ours["children_left"][a] >= 0:
                pairs.append((ours["children_left"][a], theirs["children_left"][b]))
                pairs.append((ours["children_right"][a], theirs["children_right"][b]))
        elif abs(_gain(ours, a) - _gain(theirs, b)) <= 1e-9 * abs(_gain(theirs, b)) + 1e-9:
            ties += 1
        else:
            different += 1
    return same, ties, different


def _gain(tree: dict[str, Any], node: int) -> float:
    left, right = tree["children_left"][node], tree["children_right"][node]
    if left < 0:
        return 0.0
    parts = [tree["weighted_n_node_samples"][at] * tree["impurity"][at]
             for at in (node, left, right)]  # fmt: skip
    return float(parts[0] - parts[1] - parts[2])


def _seconds(result: dict[str, Any]) -> float:
    return float(result["usage"]["seconds"])


def _cores(result: dict[str, Any]) -> float:
    """Compute seconds of all hosts in a second of a core."""
    return float(result["usage"]["cpu_s"]) / (CORES * _seconds(result))


def _short(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value


def _limits(ours: dict[str, Any], peers: dict[str, Any]) -> list[str]:
    times = ", ".join(f"`{name}` {_seconds(peer):.1f} s" for name, peer in peers.items())
    found = [
        f"LightGBM is faster ({times}; ours {_seconds(ours):.1f} s): it looks at 255 bins of each "
        "column, so its splits are approximate.",
        "Random trees differ from scikit-learn's trees, because the random numbers differ.",
    ]
    if not peers:
        found[0] = "LightGBM is not installed here (pip install lightgbm): no such row."
    return found


EXPERIMENT = Experiment(
    "trees",
    "Exact trees by columns",
    "TreeServer, ICDE 2022: up to 10× over Spark MLlib",
    measured,
)

__all__ = ["EXPERIMENT", "compare"]
