"""Campaigns on one host: drivers that use everything at once, while everything happens to them."""

from __future__ import annotations

import os
import random

import pytest

from tests.campaign import doomed
from tests.campaign.hand import CALLS
from tests.campaign.program import KINDS, run
from tests.campaign.seeds import ONE_HOST, SOAKED
from tests.campaign.soaking import LONG_S, MINUTES, SEED, soak

SHORT_S = 2.0
# A small disk is one that is mounted.
POSSIBLE = [kind for kind in KINDS if kind != "full" or os.geteuid() == 0]


@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        pytest.param(*one, marks=pytest.mark.soak if why == SOAKED else ())
        for one, why in ONE_HOST.items()
    ],
)
def test_a_program_that_is_known(seed: int, kind: str) -> None:
    if kind not in POSSIBLE:
        pytest.skip("a small disk is mounted by root")
    calls, faults = run(seed, SHORT_S, kind)
    assert sum(calls.values()) > len(CALLS)
    assert faults


@pytest.mark.soak
def test_a_program_that_is_new() -> None:
    kind = random.Random(SEED).choice(POSSIBLE)
    print(f"seed {SEED}, {kind}")
    run(SEED, SHORT_S, kind)


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 300)
def test_many_programs() -> None:
    soak(lambda seed, at: run(seed, LONG_S, POSSIBLE[at % len(POSSIBLE)]))


DOOMED = int(os.environ.get("HOPLITE_MP_KILLS", "50"))


@pytest.mark.soak
@pytest.mark.timeout(60 * DOOMED + 60)
def test_many_programs_whose_host_dies() -> None:
    dice = random.Random(SEED)
    died = [doomed.run(dice.randrange(1 << 30)) for _ in range(DOOMED)]
    print({name: died.count(name) for name in sorted(set(died))})
