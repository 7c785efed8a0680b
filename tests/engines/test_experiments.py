"""Every experiment of `python -m benchmarks.learning` runs to its end with little data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.learning.experiment import experiments
from tests.support.applications import needs_data, needs_hosts

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 300

pytestmark = [
    needs_data, needs_hosts, pytest.mark.long, pytest.mark.timeout(SECONDS_MAX + 20),
]  # fmt: skip


@pytest.mark.parametrize("name", experiments())
def test_experiment_with_little_data_succeeds(name: str) -> None:
    command = [sys.executable, "-m", "benchmarks.learning", name, "--quick"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
