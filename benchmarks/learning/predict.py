"""Steps per second predicted from a trace of one worker, beside those measured on more hosts."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.applications.beds import Bed, python
from benchmarks.applications.running import run
from benchmarks.common import MIB, ROOT
from benchmarks.learning.experiment import Experiment, Line, Measure, Outcome
from hoplite_mp._simulation.prediction.recording import RecordedTraining, read

__all__ = ["EXPERIMENT"]

PROGRAM = "benchmarks.learning.programs.predict"
MODES = ("synchronous", "asynchronous")
# Bandwidth -> the largest error that is wanted, in percent.
RATES = {"100mbit": 10.0, "1gbit": 15.0}
# In the order in which they are measured.
ALL = [(rate, hosts) for rate in RATES for hosts in (8, 4, 2)]
SPELLED = {"100mbit": "100Mbit", "1gbit": "1Gbit"}  # for the command line
# Steps of the trace, and measured steps of each worker by bandwidth. Workers of asynchronous
# training begin together, and take some steps to spread over both directions of the server's link.
TRACED_STEPS = 60
STEPS = {"100mbit": 10, "1gbit": 40}
QUICK_STEPS = 8
PATIENCE_S = 300.0


def bed(hosts: int, rate: str) -> Bed:
    return Bed("ours", hosts, memory=256 * MIB, rate=rate)


def traced(folder: Path, steps: int) -> dict[str, Path]:
    """The traces of one worker on a host of its own."""
    files = {mode: folder / f"{mode}.json" for mode in MODES}
    with bed(1, "1gbit") as alone:
        for mode, file in files.items():
            run(alone, PROGRAM, {"mode": mode, "steps": steps, "trace": str(file)}, PATIENCE_S)
    return files


def cpu_per_gb(recording: RecordedTraining, steps: int) -> float:
    """CPU seconds of a transfer of 1 GB, without copies within hosts, which are in the trace."""
    with bed(2, "1gbit") as pair:
        found = run(pair, PROGRAM, {"mode": "exchange", "steps": steps}, PATIENCE_S)
    copies_s = 2 * steps * min(step[-1].service_s for step in recording.steps)
    used_s = found["usage"]["cpu_s"] + found["interrupts_s"] - copies_s
    return max(0.0, used_s) / found["usage"]["bytes_sent"] * 1e9  # type: ignore[no-any-return]


def predicted(file: Path, rate: str, hosts: int, gb_s: float) -> dict[str, Any]:
    """The row of `hoplite-mp predict`."""
    rows, cores = file.with_suffix(".rows"), os.cpu_count()
    options = [
        *("--hosts", f"{hosts}", "--bandwidth", SPELLED[rate], "--cpu-per-gb", f"{gb_s}"),
        *("--cores", f"{cores}", "--cores-per-host", f"{cores}"),
    ]
    command = [python(), "-m", "hoplite_mp", "predict", str(file), *options, "--json", str(rows)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE_S)
    if done.returncode:
        raise RuntimeError(done.stderr)
    (row,) = json.loads(rows.read_text())["rows"]
    return row  # type: ignore[no-any-return]


def others(result: dict[str, Any]) -> float:
    """The cores of this machine that other programs have used during a run."""
    others_s = result["machine_s"] - result["interrupts_s"] - result["usage"]["cpu_s"]
    return max(0.0, float(others_s / result["seconds"]))


def compared(mode: str, rate: str, hosts: int, result: dict[str, Any], found: float) -> Measure:
    """The error of one prediction."""
    what = (
        f"{mode}, {hosts} hosts, {SPELLED[rate]}/s: predicted {found:.3g} steps/s, measured "
        f"{result['rate']:.3g}"
    )
    error = 100 * abs(found / result["rate"] - 1)
    return Measure(what, error, "error in %", RATES[rate], at_least=False)


def experiment(quick: bool) -> Outcome:
    measures, used = [], []
    points: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    traced_steps = QUICK_STEPS if quick else TRACED_STEPS
    with tempfile.TemporaryDirectory() as folder:
        files = traced(Path(folder), traced_steps)
        trainings = {mode: read(file) for mode, file in files.items()}
        gb_s = cpu_per_gb(trainings["synchronous"], traced_steps)
        for rate, hosts in ALL[-1:] if quick else ALL:
            given = {"steps": QUICK_STEPS if quick else STEPS[rate]}
            with bed(hosts, rate) as many:
                results = {
                    mode: run(many, PROGRAM, given | {"mode": mode}, PATIENCE_S) for mode in MODES
                }
            for mode, result in results.items():
                used.append(others(result))
                row = predicted(files[mode], rate, hosts, gb_s)
                found = row["steps_per_s"]
                measures.append(compared(mode, rate, hosts, result, found))
                print(
                    f"  {measures[-1].what}, others used {used[-1]:.2f} cores, busy: "
                    + ", ".join(f"{name} {share:.2f}" for name, share in row["busy"].items()),
                    flush=True,
                )
                for kind, value in (("predicted", found), ("measured", result["rate"])):
                    points.setdefault((mode, SPELLED[rate], kind), []).append((hosts, value))
    setup = {
        "model": "784-1000-450-10, 5 MB of float32",
        "images of a worker in a step": 128,
        "steps of the trace": len(trainings["synchronous"].steps),
        "s of a step of one worker": {
            mode: round(one.step_s, 4) for mode, one in trainings.items()
        },
        "CPU s per GB, measured on two hosts": round(gb_s, 2),
        "cores that other programs used": f"{max(used):.1f} of {os.cpu_count()}",
    }
    limits = [
        "Asynchronous training of seven workers at 100 Mbit/s varies: nine runs on a loaded "
        "machine had 1.2 to 2.0 steps/s, where 1.7 to 1.8 were predicted. In a simulation of links "
        "that are shared evenly, workers stay in step and have 1.2.",
        "All hosts share the processors of one machine. The model has these, but not what other "
        "programs use of them.",
    ]
    lines = [Line(f"{a}, {b}/s, {kind}", one) for (a, b, kind), one in points.items()]
    return Outcome(measures, setup, limits, lines, "hosts", "steps/s")


EXPERIMENT = Experiment(
    "predict",
    "Prediction of training throughput",
    "Li, Yan, Paolieri, Golubchik (ICPE 2020): asynchronous SGD predicted from one node's trace",
    experiment,
)
