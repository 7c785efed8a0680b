"""Training over 100 Mbit/s with compressed gradients: steps per second, and accuracy."""

from __future__ import annotations

from typing import Any

from benchmarks.applications.beds import Bed
from benchmarks.applications.running import run
from benchmarks.common import MIB
from benchmarks.learning.experiment import Experiment, Line, Measure, Outcome

__all__ = ["EXPERIMENT", "curve", "measured", "measured_torch"]

PROGRAM = "benchmarks.learning.programs.gradients"
TORCH_PROGRAM = "benchmarks.learning.programs.torch_powersgd"
HOSTS, RATE = 8, "100mbit"
PATIENCE_S = 900.0
STEPS, QUICK_STEPS = 200, 8
METHODS = ("dense", "threshold", "eight bits", "float16", "powersgd", "topk alone")
NAMES = {
    "dense": "dense allreduce",
    "threshold": "Threshold(0.001)",
    "eight bits": "Quantise(8)",
    "float16": "Float16()",
    "powersgd": "PowerSGD(4)",
    "topk alone": "top 0.1 % without feedback",
    "torch": "torch's PowerSGD hook, rank 4, over Gloo",
}


def measured(method: str, quick: bool, **arguments: Any) -> dict[str, Any]:
    """One run of the program on hosts of its own."""
    if quick:
        arguments |= {"steps": QUICK_STEPS, "every": 4, "images": 500}
    with Bed("ours", 2 if quick else HOSTS, memory=128 * MIB, rate=RATE) as bed:
        return run(bed, PROGRAM, {"method": method, **arguments}, PATIENCE_S)


def measured_torch(quick: bool, **arguments: Any) -> dict[str, Any]:
    """torch's PowerSGD over Gloo on the same hosts."""
    if quick:
        arguments |= {"steps": QUICK_STEPS, "every": 4, "images": 500}
    with Bed("none", 2 if quick else HOSTS, memory=128 * MIB, rate=RATE) as bed:
        return run(bed, TORCH_PROGRAM, arguments, PATIENCE_S, everywhere=True)


def curve(result: dict[str, Any]) -> list[tuple[float, float]]:
    """Accuracy over the seconds of training."""
    return [(result["times"][number], one) for number, one in result["accuracy"]]


def steps_per_s(result: dict[str, Any]) -> float:
    return (len(result["times"]) - 1) / result["times"][-1]


def experiment(quick: bool) -> Outcome:
    found = {one: measured(one, quick, steps=STEPS, every=20) for one in METHODS}
    found["torch"] = measured_torch(quick, steps=STEPS, every=20)
    dense = found["dense"]
    accuracy = {name: 100 * result["accuracy"][-1][1] for name, result in found.items()}
    measures = []
    for name, target in [
        ("threshold", 8.0),
        ("eight bits", 3.0),
        ("float16", None),
        ("powersgd", None),
        ("torch", None),
    ]:
        ratio = steps_per_s(found[name]) / steps_per_s(dense)
        measures.append(Measure(f"{NAMES[name]}, steps/s ÷ dense", ratio, "ratio of rates", target))
    for name in ("threshold", "eight bits", "powersgd", "torch", "topk alone"):
        target = -0.5 if name in ("threshold", "eight bits") else None
        measures.append(
            Measure(
                f"{NAMES[name]}, accuracy − dense, after equal steps",
                accuracy[name] - accuracy["dense"], "percentage points", target,
            )
        )  # fmt: skip
    for name in ("threshold", "eight bits", "powersgd"):
        fewer = dense["usage"]["bytes_sent"] / found[name]["usage"]["bytes_sent"]
        measures.append(
            Measure(f"{NAMES[name]}, bytes on the links, dense ÷", fewer, "ratio of bytes")
        )
    setup = {
        "hosts": HOSTS,
        "bandwidth": RATE,
        "images of a host in a step": 32,
        "steps": STEPS,
        "lr": 0.05,
        "momentum": 0.9,
        "parameters": dense["parameters"],
        "threads of a host": 1,
        "compute s of a step": round(dense["compute_s"], 4),
        "dense s of a step": round(1 / steps_per_s(dense), 3),
        "accuracy of dense": round(accuracy["dense"], 2),
        "seeds": "0 (parameters), rank (batches)",
    }
    limits: list[str] = []
    lines = [Line(NAMES[name], curve(result)) for name, result in found.items()]
    return Outcome(measures, setup, limits, lines, "s", "accuracy")


EXPERIMENT = Experiment(
    "compression",
    "Compressed gradients with error feedback",
    "DCT (KDD 2021): ≥ 100 times fewer bytes in data parallelism",
    experiment,
)
