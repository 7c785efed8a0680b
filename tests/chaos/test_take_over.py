"""Chaos on emulated hosts, as in test_lan.py, and in the middle of it the manager's host dies.

The standby is on the second host, the driver on the third; anything may happen to the others, and
to the processes of managers, before and after. All hosts are there when the first one dies, so that
most of them are left.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lan import Lan
from tests.support.clusters import Driver, StandbyCluster, pids_named
from tests.support.lan_faults import (
    HAPPENS,
    LAN_PROGRAM,
    LAN_STEPS,
    RATE,
    FaultyLan,
    chaos_settings,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from tests.lan import Host

HOSTS, HOSTS_MAX = 5, 6
KEPT = 3  # the manager's, the standby's, the driver's
MANAGER_DEATHS_MAX = 6


class TakeOver(FaultyLan):
    """The manager is on the first host, or on the second one when the first has died."""

    kept = KEPT
    most = HOSTS_MAX
    cluster: StandbyCluster

    @property
    def first(self) -> Host:
        return next(iter(self.lan))

    def kill_manager(self) -> None:
        self.manager_deaths += 1
        name = "hoplite manager" if self.first.number == 1 else "hoplite standby"
        if self.manager_deaths <= MANAGER_DEATHS_MAX:
            eventually(lambda: pids_named(self.first, name), "there is no manager", pause_s=0.05)
            self.first.run(["kill", "-KILL", *map(str, pids_named(self.first, name))])

    def take_over(self) -> None:
        """The first host dies; returns when another one leads."""
        self.first.kill()
        assert "manager of the cluster" in self.cluster.command(self.first, "promote").stdout
        self.cluster.address = self.cluster.standby


def play(steps: list[tuple[Any, ...]], at: int) -> None:
    with Lan(HOSTS, RATE) as lan:
        cluster = StandbyCluster(lan)
        cluster.wait_for_standby()
        world = TakeOver(lan, cluster)
        end = [("heal",), ("end",)]
        script = [*steps[:at], ("heal",), ("there",), ("take_over",), *steps[at:], *end]
        with Driver(cluster, list(lan)[KEPT - 1], LAN_PROGRAM) as driver:
            try:
                for step in script:
                    if step[0] in (*HAPPENS, "take_over"):
                        world.happen(*step)
                        continue
                    if step[0] in ("there", "end"):
                        step = (step[0], len(lan.hosts))
                    driver.say(json.dumps(step))
                    said = driver.hear()
                    assert said == "ok", (said, step, script)
            finally:
                world.heal()
            assert driver.process.stdin is not None
            driver.process.stdin.close()
        assert cluster.end_standby()[0] == 0


@pytest.mark.soak
@pytest.mark.timeout(7200)
@chaos_settings(int(os.environ.get("HOPLITE_MP_CHAOS", "50")))
@given(st.lists(LAN_STEPS, min_size=15, max_size=30), st.integers(0, 15))
def test_much_chaos(lan_permitted: None, steps: list[tuple[Any, ...]], at: int) -> None:
    print(f"{len(steps)} steps, the first host dies after {at}")
    play(steps, at)
