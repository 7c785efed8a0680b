"""One seed replays a run exactly: in this process, and in one that hashes in another order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hoplite_mp.simulation.runs import run_seed

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (7, 25, 36, 50)
CODE = f"""
from hoplite_mp.simulation.runs import run_seed
print(*(run_seed(seed).digest for seed in {SEEDS}))
"""


def elsewhere(hash_seed: str) -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True
    )
    return ended.stdout.split()


def test_one_seed_is_one_log() -> None:
    here = [run_seed(seed).digest for seed in SEEDS]
    assert here == [run_seed(seed).digest for seed in SEEDS]
    assert len(set(here)) == len(SEEDS)
    assert elsewhere("1") == here
    assert elsewhere("2") == here


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_change_the_log(seed: int) -> None:
    assert run_seed(seed).faults
    assert run_seed(seed).digest != run_seed(seed, faults=False).digest
