"""What the tests of code share: functions there and back, and a `__main__` of one's own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from hoplite_mp import _serialize

ROOT = Path(_serialize.__file__).parents[2]


def function_trip(function: Any) -> Any:
    return _serialize.decode_function(_serialize.encode_function(function))


def run_python(source: str, *args: Any) -> str:
    """Run `source` as a `__main__` of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), *map(str, args)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
