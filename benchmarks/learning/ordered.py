"""Which share of the gradients is sent if they are sent in falling order of norm."""

from __future__ import annotations

from typing import Any

from benchmarks.applications.beds import Bed
from benchmarks.applications.running import run
from benchmarks.common import MIB
from benchmarks.learning.experiment import Experiment, Measure, Outcome

__all__ = ["EXPERIMENT"]

PROGRAM = "benchmarks.learning.programs.ordered"
HOSTS, RATE, STEPS, XI = 8, "1gbit", 100, 0.25
SHARDS = {
    "equal": "equal shards",
    "skewed": "shards ∝ 1/rank²",
    "sorted": "shards sorted by label",
}


def experiment(quick: bool) -> Outcome:
    hosts = 3 if quick else HOSTS
    found: dict[tuple[str, float], dict[str, Any]] = {}
    with Bed("ours", hosts, memory=128 * MIB, rate=RATE) as bed:
        for shards in SHARDS:
            for xi in (XI, -1.0):
                arguments = {"shards": shards, "xi": xi, "steps": 5 if quick else STEPS}
                found[shards, xi] = run(bed, PROGRAM, arguments, 600.0)
    measures = []
    for shards, text in SHARDS.items():
        one, plain = found[shards, XI], found[shards, -1.0]
        measures.append(Measure(f"{text}, share of the gradients sent", one["share"], "share"))
        difference = 100 * (one["accuracy"] - plain["accuracy"])
        measures.append(Measure(f"{text}, accuracy − all sent", difference, "percentage points"))
    setup = {
        "hosts": hosts,
        "bandwidth": RATE,
        "batch": "a quarter of each shard of digits",
        "steps": STEPS,
        "xi": XI,
        "threads of a host": 1,
        "seconds, ordered and all": {
            text: (round(found[name, XI]["seconds"], 1), round(found[name, -1.0]["seconds"], 1))
            for name, text in SHARDS.items()
        },
        "seeds": "0 (shards), 1 (parameters), step (batches)",
    }
    slower = found["equal", XI]["seconds"] / found["equal", -1.0]["seconds"]
    limits = [
        f"It saves bytes, not time: with equal shards a step takes {slower:.2f} times as long, "
        "because norms come first, and gradients follow one another.",
        "With shards sorted by label nearly all gradients are sent: their norms are alike.",
    ]
    return Outcome(measures, setup, limits)


EXPERIMENT = Experiment(
    "ordered",
    "Gradients in falling order of norm",
    "Chen, Sadler, Blum 2020: fewer transmissions than sending all gradients",
    experiment,
)
