"""Training over 100 Mbit/s with compressed gradients: steps per second, and accuracy."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.applications.beds import Bed
from benchmarks.applications.running import run
from benchmarks.common import MIB
from benchmarks.learning.experiment import Experiment, Line, Measure, Outcome
from tests.lan import DEVICE

__all__ = ["EXPERIMENT", "after", "bytes_of_step", "curve", "measured", "measured_torch"]

PROGRAM = "benchmarks.learning.programs.gradients"
TORCH_PROGRAM = "benchmarks.learning.programs.torch_powersgd"
HOSTS, RATE, FAST = 8, "100mbit", "10gbit"
PATIENCE_S = 1200.0
LONG, STEPS, SHORT, QUICK_STEPS = 2000, 300, 60, 8
EVERY, QUICK_EVERY = 25, 4
LAST = 8  # points of a curve whose mean is the accuracy at its end
NAMES = {
    "dense": "dense allreduce",
    "threshold": "Threshold(0.001)",
    "eight bits": "Quantise(8)",
    "float16": "Float16()",
    "powersgd": "PowerSGD(4)",
    "topk alone": "top 0.1 % without feedback",
    "torch": "torch's PowerSGD hook, rank 4, over Gloo",
}
# A dense step takes 0.7 s, so the dense run is short, and its accuracy comes from a run over fast
# links; so does that of the method that sends dense arrays with few entries. float16 is timed only.
RUNS = {
    "dense": SHORT, "threshold": LONG, "eight bits": STEPS, "float16": SHORT, "powersgd": STEPS,
}  # fmt: skip


def measured(method: str, quick: bool, rate: str = RATE, **arguments: Any) -> dict[str, Any]:
    """One run of the program on hosts of its own."""
    with Bed("ours", 2 if quick else HOSTS, memory=128 * MIB, rate=rate) as bed:
        return run(bed, PROGRAM, {"method": method, **_given(quick, arguments)}, PATIENCE_S)


def measured_torch(quick: bool, **arguments: Any) -> dict[str, Any]:
    """torch's PowerSGD over Gloo on the same hosts."""
    # By itself Gloo looks for the host's name, and finds loopback.
    env = {"GLOO_SOCKET_IFNAME": DEVICE}
    with Bed("none", 2 if quick else HOSTS, memory=128 * MIB, rate=RATE, env=env) as bed:
        return run(bed, TORCH_PROGRAM, _given(quick, arguments), PATIENCE_S, everywhere=True)


def _given(quick: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    short = {"steps": QUICK_STEPS, "every": QUICK_EVERY, "images": 500}
    return {"every": EVERY} | arguments | (short if quick else {})


def curve(result: dict[str, Any]) -> list[tuple[float, float]]:
    """Accuracy over the seconds of training."""
    return [(result["times"][number], one) for number, one in result["accuracy"]]


def steps_per_s(result: dict[str, Any]) -> float:
    return (len(result["times"]) - 1) / result["times"][-1]


def after(result: dict[str, Any], steps: int) -> float:
    """The accuracy in percent, as the mean of the last points of the curve up to that step."""
    points = [one for number, one in result["accuracy"] if number <= steps]
    return 100 * statistics.fmean(points[-LAST:])


def experiment(quick: bool) -> Outcome:
    torch = measured_torch(quick, steps=STEPS)
    found = {name: measured(name, quick, steps=steps) for name, steps in RUNS.items()}
    found["torch"] = torch
    exact = measured("dense", quick, rate=FAST, steps=LONG)
    alone = measured("topk alone", quick, rate=FAST, steps=STEPS)
    dense, measures = found["dense"], []
    for name in ("threshold", "eight bits", "float16", "powersgd", "torch"):
        target = {"threshold": 8.0, "eight bits": 3.0}.get(name)
        ratio = steps_per_s(found[name]) / steps_per_s(dense)
        measures.append(Measure(f"{NAMES[name]}, steps/s ÷ dense", ratio, "ratio of rates", target))
    for name in ("threshold", "eight bits", "powersgd", "torch", "topk alone"):
        steps = QUICK_STEPS if quick else RUNS.get(name, STEPS)
        target = -0.5 if name in ("threshold", "eight bits") else None
        measures.append(
            Measure(
                f"{NAMES[name]}, accuracy − dense, after {steps} steps",
                after((found | {"topk alone": alone})[name], steps) - after(exact, steps),
                "percentage points", target,
            )
        )  # fmt: skip
    for name in ("threshold", "eight bits", "powersgd", "torch"):
        fewer = bytes_of_step(dense) / bytes_of_step(found[name])
        measures.append(
            Measure(f"{NAMES[name]}, bytes on the links, dense ÷", fewer, "ratio of bytes")
        )
    early = after(found["threshold"], STEPS) - after(exact, STEPS)
    limits = [
        f"After {STEPS} steps the accuracy with {NAMES['threshold']} is {early:+.1f} points from "
        "that of dense training: most entries of a gradient arrive hundreds of steps late.",
    ]
    step_s = 1 / steps_per_s(dense)
    lines = [
        Line(NAMES["dense"], _scaled(exact, step_s)),
        Line(NAMES["topk alone"], _scaled(alone, step_s)),
    ]
    lines += [Line(NAMES[name], curve(found[name])) for name in found
              if name not in ("dense", "float16")]  # fmt: skip
    return Outcome(measures, _setup(found, exact), limits, lines, "s", "accuracy")


def bytes_of_step(result: dict[str, Any]) -> float:
    return float(result["usage"]["bytes_sent"]) / (len(result["times"]) - 1)


def _scaled(result: dict[str, Any], step_s: float) -> list[tuple[float, float]]:
    return [(number * step_s, one) for number, one in result["accuracy"]]


def _setup(found: dict[str, dict[str, Any]], exact: dict[str, Any]) -> dict[str, Any]:
    return {
        "hosts": HOSTS,
        "bandwidth": RATE,
        "images of a host in a step": 32,
        "steps": RUNS | {"torch": STEPS, "topk alone": STEPS},
        "lr": 0.05,
        "momentum": "0.9, of each rank, before compression; torch: of the optimizer, after it",
        "parameters": exact["parameters"],
        "threads of a host": 1,
        "compute s of a step": round(exact["compute_s"], 4),
        "s of a step": {name: round(1 / steps_per_s(one), 3) for name, one in found.items()},
        "accuracy": f"mean of the last {LAST} points, one each {EVERY} steps",
        "accuracy of dense": f"{after(exact, LONG):.2f} % after {LONG} steps; over {FAST}, drawn "
        "with the seconds of a step at 100 Mbit/s",
        "seeds": "0 (parameters), rank (batches)",
    }


EXPERIMENT = Experiment(
    "compression",
    "Compressed gradients with error feedback",
    "DCT (KDD 2021): ≥ 100 times fewer bytes in data parallelism",
    experiment,
)
