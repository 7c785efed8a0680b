"""Plays one aimed run, and says what was wrong; without arguments, names all of them."""

from __future__ import annotations

import sys

from tests.aimed import ALL, run_aimed

if len(sys.argv) != 3 or sys.argv[1] not in ALL:
    print(f"usage: python -m tests.aimed NAME SEED; names: {', '.join(sorted(ALL))}")
    sys.exit(2)
outcome = run_aimed(sys.argv[1], int(sys.argv[2]))
print("\n".join([*outcome.tail, outcome.failure or "it holds"]))
sys.exit(bool(outcome.failure))
