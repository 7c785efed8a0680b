"""A live cluster over emulated hosts under random deaths, against a plain model.

The driver lives on the manager's host, which stays; of the other hosts some are killed with all
their processes, stopped, cut off and come again, new ones join, workers and the manager are killed.
What the driver puts is with it, and what tasks have made is made again when the host that had it
dies: so nothing may be lost, and everything is what the model says. Arrays hold small whole
numbers, so any order of adding gives the same bits. When a host is killed nothing of it is left by
its end; what the others leave is looked at by tests/conftest.py.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lan import Lan
from tests.support.clusters import Driver, UpCluster
from tests.support.lan_faults import (
    FEW,
    HAPPENS,
    HOSTS,
    LAN_PROGRAM,
    LAN_STEPS,
    RATE,
    FaultyLan,
    chaos_settings,
)


def play(steps: list[tuple[Any, ...]]) -> None:
    with Lan(HOSTS, RATE) as lan:
        world = FaultyLan(lan, UpCluster(lan, tls=False))
        with Driver(world.cluster, lan[0], LAN_PROGRAM) as driver:
            try:
                for step in [*steps, ("heal",), ("end",)]:
                    if step[0] in HAPPENS:
                        world.happen(*step)
                        continue
                    if step[0] == "end":
                        step = ("end", len(lan.hosts))
                    driver.say(json.dumps(step))
                    said = driver.hear()
                    assert said == "ok", (said, step, steps)
            finally:
                world.heal()
            assert driver.process.stdin is not None
            driver.process.stdin.close()
        assert world.cluster.end()[0] == 0


@pytest.mark.timeout(300)
@chaos_settings(FEW)
@given(st.lists(LAN_STEPS, min_size=15, max_size=15))
def test_chaos(lan_permitted: None, steps: list[tuple[Any, ...]]) -> None:
    play(steps)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@chaos_settings(int(os.environ.get("HOPLITE_MP_CHAOS", "200")))
@given(st.lists(LAN_STEPS, min_size=20, max_size=40))
def test_much_chaos(lan_permitted: None, steps: list[tuple[Any, ...]]) -> None:
    begun = time.monotonic()
    play(steps)
    print(f"{len(steps)} steps in {time.monotonic() - begun:.1f} s", flush=True)
