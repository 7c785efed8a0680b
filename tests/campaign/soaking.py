"""Programs of a campaign one after the other, for minutes, and what they were made of.

HOPLITE_MP_CAMPAIGN_MIN: how many minutes; HOPLITE_MP_SEED: the first of the same programs again.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LONG_S", "MINUTES", "SEED", "soak"]

SEED = int(os.environ.get("HOPLITE_MP_SEED", str(random.randrange(1 << 30))))
MINUTES = float(os.environ.get("HOPLITE_MP_CAMPAIGN_MIN", "60"))
LONG_S = 20.0  # of one program


def soak(play: Callable[[int, int], tuple[Counter[str], dict[str, int]]]) -> None:
    """play: of a seed and the number of the program."""
    dice = random.Random(SEED)
    end = time.monotonic() + 60 * MINUTES
    calls: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    programs = 0
    while time.monotonic() < end:
        made, happened = play(dice.randrange(1 << 30), programs)
        calls.update(made)
        faults.update(happened)
        programs += 1
        print(f"{programs} programs, {sum(calls.values())} calls, {sum(faults.values())} faults")
    print(dict(calls), dict(faults))
