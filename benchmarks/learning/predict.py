"""Steps per second predicted from a trace of one worker, beside those measured on more hosts."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
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
HOSTS, QUICK_HOSTS = (2, 4, 8), (2,)
# Bandwidth -> the largest error that is wanted, in percent.
RATES = {"100mbit": 10.0, "1gbit": 15.0}
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
    copies_s = 2 * steps * statistics.median(step[-1].service_s for step in recording.steps)
    used_s = found["usage"]["cpu_s"] + found["interrupts_s"] - copies_s
    return max(0.0, used_s) / found["usage"]["bytes_sent"] * 1e9  # type: ignore[no-any-return]


def predicted(file: Path, rate: str, hosts: tuple[int, ...], gb_s: float) -> list[dict[str, Any]]:
    """The rows of `hoplite-mp predict`."""
    rows = file.with_suffix(".rows")
    cores = os.cpu_count()
    options = [
        *("--hosts", ",".join(map(str, hosts)), "--bandwidth", SPELLED[rate]),
        *("--cores", f"{cores}", "--cores-per-host", f"{cores}", "--cpu-per-gb", f"{gb_s}"),
    ]
    command = [python(), "-m", "hoplite_mp", "predict", str(file), *options, "--json", str(rows)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE_S)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: list[dict[str, Any]] = json.loads(rows.read_text())["rows"]
    return found


def measured(rate: str, hosts: int, quick: bool) -> dict[str, float]:
    """Steps per second of each mode."""
    steps = QUICK_STEPS if quick else STEPS[rate]
    with bed(hosts, rate) as many:
        return {
            mode: run(many, PROGRAM, {"mode": mode, "steps": steps}, PATIENCE_S)["rate"]
            for mode in MODES
        }


def experiment(quick: bool) -> Outcome:
    counts = QUICK_HOSTS if quick else HOSTS
    rates = ("1gbit",) if quick else tuple(RATES)
    load = [os.getloadavg()[0]]
    measures, lines = [], []
    with tempfile.TemporaryDirectory() as folder:
        files = traced(Path(folder), QUICK_STEPS if quick else TRACED_STEPS)
        recordings = {mode: read(file) for mode, file in files.items()}
        gb_s = cpu_per_gb(recordings["synchronous"], QUICK_STEPS if quick else TRACED_STEPS)
        for rate in rates:
            real = {hosts: measured(rate, hosts, quick) for hosts in counts}
            for mode, file in files.items():
                rows = predicted(file, rate, counts, gb_s)
                for row in rows:
                    hosts, found = row["hosts"], real[row["hosts"]][mode]
                    error = 100 * abs(row["steps_per_s"] - found) / found
                    what = (
                        f"{mode}, {hosts} hosts, {SPELLED[rate]}/s: predicted "
                        f"{row['steps_per_s']:.3g} steps/s, measured {found:.3g}, bottleneck "
                        f"{row['bottleneck']}"
                    )
                    print(what, file=sys.stderr, flush=True)
                    measures.append(Measure(what, error, "error in %", RATES[rate], at_least=False))
                points = [(row["hosts"], row["steps_per_s"]) for row in rows]
                lines.append(Line(f"{mode}, {SPELLED[rate]}/s, predicted", points))
                points = [(hosts, found[mode]) for hosts, found in real.items()]
                lines.append(Line(f"{mode}, {SPELLED[rate]}/s, measured", points))
    load.append(os.getloadavg()[0])
    setup = {
        "model": "784-1000-450-10, 5 MB of float32",
        "images of a worker in a step": 128,
        "steps of the trace": len(recordings["synchronous"].steps),
        "s of a step of one worker": {
            mode: round(one.step_s, 4) for mode, one in recordings.items()
        },
        "CPU s per GB, measured on two hosts": round(gb_s, 2),
        "cores of all hosts": os.cpu_count(),
        "load before and after": [round(one, 1) for one in load],
    }
    limits = ["All hosts share the processors of one machine, and the model has those, too."]
    return Outcome(measures, setup, limits, lines, "hosts", "steps/s")


EXPERIMENT = Experiment(
    "predict",
    "Prediction of training throughput",
    "Li, Yan, Paolieri, Golubchik (ICPE 2020): asynchronous SGD predicted from one node's trace",
    experiment,
)
