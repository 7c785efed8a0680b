"""atheris on every decoder, a while each; `make soak` installs it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS, Target

ROOT = Path(__file__).resolve().parents[2]
EACH_S = 20

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        importlib.util.find_spec("atheris") is None,
        reason='needs atheris: pip install "hoplite-mp[soak]"',
    ),
]


def run(name: str, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz.coverage_guided", name,
         f"-artifact_prefix={tmp_path}/", *options],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=EACH_S + 60,
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_nothing_is_found(target: Target, tmp_path: Path) -> None:
    done = run(target.name, tmp_path, f"-max_total_time={EACH_S}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
