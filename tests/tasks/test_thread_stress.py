"""Eight threads of one driver use every public call at once: `thread_stress.py`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tests.lan import forked
from tests.support.processes import ROOT

PROGRAM = Path(__file__).with_name("thread_stress.py")
SHORT_S, LONG_S, LONG_RUNS = 1.0, 120.0, 5
SEEDS = 1 << 30


def run(seconds: float) -> None:
    seed = random.randrange(SEEDS)
    done = forked.run([sys.executable, str(PROGRAM), str(seconds), str(seed)], cwd=ROOT)
    said = f"seed {seed}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, said
    assert done.stderr == "", said
    assert done.stdout.splitlines()[-1].startswith("end "), said


def test_values_of_eight_threads_that_use_every_call_at_once_are_right() -> None:
    run(SHORT_S)


@pytest.mark.soak
@pytest.mark.timeout(2 * LONG_RUNS * LONG_S)
def test_values_of_eight_threads_that_run_for_minutes_are_right() -> None:
    for _ in range(LONG_RUNS):
        run(LONG_S)
