"""Applications of examples/ that run on this host, and what they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.applications import fashion_mnist
from tests.lan import why_not

ROOT = Path(__file__).resolve().parents[2]


needs_data = pytest.mark.skipif(
    not fashion_mnist.FOLDER.exists(), reason="no Fashion-MNIST: apt install dataset-fashion-mnist"
)
needs_hosts = pytest.mark.skipif(why_not() is not None, reason="no emulated hosts")


def result_of(module: str, **arguments: Any) -> dict[str, Any]:
    """The program's result, on this host; an argument that is None is not given."""
    told = {"hosts": 2, "seconds": 1.0} | arguments
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"examples.applications.{module}",
         json.dumps({name: value for name, value in told.items() if value is not None})],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["event"] for line in lines] == ["begun", "ended", "result"]
    found: dict[str, Any] = lines[-1]
    return found
