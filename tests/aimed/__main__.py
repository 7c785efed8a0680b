"""Plays one aimed run, and says what was wrong."""

from __future__ import annotations

import sys

from tests.aimed import run_aimed

outcome = run_aimed(sys.argv[1], int(sys.argv[2]))
print("\n".join([*outcome.tail, outcome.failure or "it holds"]))
sys.exit(bool(outcome.failure))
