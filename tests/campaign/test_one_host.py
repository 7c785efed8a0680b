"""Campaigns on one host: drivers that use everything at once, while everything happens to them.

HOPLITE_MP_SEED plays one program again; HOPLITE_MP_CAMPAIGN_MIN is how long `make soak` plays.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest

from tests.campaign.hand import CALLS
from tests.campaign.program import KINDS, run
from tests.campaign.seeds import ONE_HOST

SEED = int(os.environ.get("HOPLITE_MP_SEED", str(random.randrange(1 << 30))))
MINUTES = float(os.environ.get("HOPLITE_MP_CAMPAIGN_MIN", "60"))
SHORT_S, LONG_S = 5.0, 20.0


def may_run(kind: str) -> bool:
    """A small disk is one that is mounted."""
    return kind != "full" or os.geteuid() == 0


@pytest.mark.parametrize(("seed", "kind"), [(1, "spilling"), *ONE_HOST])
def test_a_program_that_is_known(seed: int, kind: str) -> None:
    if not may_run(kind):
        pytest.skip("a small disk is mounted by root")
    calls, faults = run(seed, SHORT_S, kind)
    assert sum(calls.values()) > len(CALLS)
    assert faults


def test_a_program_that_is_new() -> None:
    kind = random.Random(SEED).choice([kind for kind in KINDS if may_run(kind)])
    print(f"seed {SEED}, {kind}")
    run(SEED, SHORT_S, kind)


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 300)
def test_many_programs() -> None:
    dice, kinds = random.Random(SEED), [kind for kind in KINDS if may_run(kind)]
    end = time.monotonic() + 60 * MINUTES
    calls: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    programs = 0
    while time.monotonic() < end:
        made, happened = run(dice.randrange(1 << 30), LONG_S, kinds[programs % len(kinds)])
        calls.update(made)
        faults.update(happened)
        programs += 1
    print(f"{programs} programs, {sum(calls.values())} calls, {sum(faults.values())} faults")
    print(dict(calls), dict(faults))
