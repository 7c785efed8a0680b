"""Short runs of both trainings, and of the command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hoplite_mp._cli.demo import ours, pool, training
from hoplite_mp._cli.demo.training import TrainingPlan

DEMO = [sys.executable, "-m", "hoplite_mp", "demo"]


@pytest.mark.parametrize("train", [ours.train, pool.train], ids=["ours", "pool"])
@pytest.mark.parametrize("kill", [True, False])
def test_short_training(train, kill):
    plan = TrainingPlan(workers=2, steps=24, kill=kill, hidden=300, rate=5e-3, snapshots=4)
    seen: list[int] = []
    run = train(plan, training.load_digits(1), seen.append)
    assert seen == list(range(1, 25))
    assert len(run.step_seconds) == 24
    assert sum(run.contributors) == 48
    assert len(run.staleness) == 48
    assert run.accuracies[-1] > run.accuracies[0]
    assert (run.killed_pid is not None) == kill
    assert (run.lost_seconds is not None) == kill


@pytest.mark.soak
def test_the_demo_from_end_to_end(tmp_path):
    command = [*DEMO, "--workers=3", "--steps=60", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (tmp_path / "accuracy.png").stat().st_size > 0
    assert result["accuracy"] > 0.85, done.stderr
    assert done.returncode == (0 if result["accuracy"] >= 0.95 else 1), done.stderr
    assert "test accuracy" in done.stdout
    assert result["killed_pid"] > 0
    assert result["pool"]["killed_pid"] > 0
    assert sum(result["contributors"]) == 120
    assert result["lost_tasks"] == 0
    assert result["pool"]["lost_tasks"] > 0


def trains(process):
    """Are there workers? Before that it may still be importing."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        return any(one.name() == "hoplite worker" for one in family)
    return False


@pytest.mark.parametrize("seconds", [1.0])
def test_an_interrupt_ends_the_demo_and_all_its_processes(seconds):
    process = subprocess.Popen(
        [*DEMO, "--steps=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    children: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 60
        while not trains(process) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(seconds)
        assert process.poll() is None, process.stderr
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 130
        assert errors == "hoplite-mp demo: interrupted\n"
        assert psutil.wait_procs(children, timeout=30)[1] == []
    finally:
        for left in [process, *children]:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
