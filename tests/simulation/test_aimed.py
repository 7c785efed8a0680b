"""Aimed runs hold. Each shows a mistake of the list of mutants (tests/mutants/seen.json), or why an
order of test_peer_loss_order.py matters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.aimed import ALL

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]
SEEDS = pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
PLAY = """
import json, logging
from tests.aimed import run_aimed
logging.disable(logging.CRITICAL)
print(json.dumps([run_aimed(name, {seed}).failure for name in {names}]))
"""
AT_A_TIME = 8


@SEEDS
@pytest.mark.parametrize("first", range(0, len(ALL), AT_A_TIME))
def test_aimed_runs_played_hold(first: int, seed: int) -> None:
    """In a process of their own, as all runs in virtual time."""
    names = [*ALL][first : first + AT_A_TIME]
    ended = subprocess.run(
        [sys.executable, "-c", PLAY.format(names=names, seed=seed)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    told = zip(names, json.loads(ended.stdout), strict=True)
    assert not [one for one in told if one[1]]
