"""Campaigns on emulated hosts, which are killed, stopped, cut off, leave and come again."""

from __future__ import annotations

import pytest

from tests.campaign.hosts import run
from tests.campaign.seeds import HOSTS
from tests.campaign.soaking import LONG_S, MINUTES, soak


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", HOSTS)
def test_a_program_that_is_known(lan_permitted: None, seed: int) -> None:
    run(seed, LONG_S)


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 300)
def test_many_programs(lan_permitted: None) -> None:
    soak(lambda seed, _: run(seed, LONG_S))
