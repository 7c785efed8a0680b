"""A host, or the manager, dies at a random byte of a collective: the others end it, and what they
have is exact. A host that becomes slow is not lost: nothing may be missing.

One program starts an operation again and again, the same one, on all hosts; here a host is killed,
stopped, cut off or slowed down after a random part of the time that the operation takes
undisturbed. Arrays hold small whole numbers, so that any order of adding gives the same bits. A
host that has died comes again before the next turn.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._cli.up_join import REJOINS_MAX
from hoplite_mp._supervisor.manager_process import STARTS_MAX, STARTS_S
from tests.lan import Lan
from tests.support.clusters import Driver, UpCluster, kill_manager, signal_all
from tests.support.lan_programs import HOST_DEATHS_PROGRAM, SEED

if TYPE_CHECKING:
    from collections.abc import Iterator


TURNS = int(os.environ.get("HOPLITE_MP_DEATHS", "50"))
RATE, SLOW = "1gbit", "100mbit"
MANAGER_LIFE_S = 1.2 * STARTS_S / STARTS_MAX
LOST_NOBODY = ("slowed", "manager")


KINDS = ["broadcast", "reduce", "allreduce", "gather"]
GROUP_KINDS = ["group allreduce", "group broadcast", "group reduce", "group small", "group large"]
# Of all whom nothing but time was taken from.
FROM_ALL = ("gather", "group allreduce", "group reduce", "group small", "group large")
ELEMENTS = {
    "gather": 1 << 21,
    "group small": 1 << 16,
    "group large": 1 << 19,
}  # all of gather's are to fit on one host


@pytest.fixture(params=[4, pytest.param(8, marks=pytest.mark.soak)])
def cluster(lan_permitted: None, request: pytest.FixtureRequest) -> Iterator[UpCluster]:
    with Lan(request.param, RATE) as lan:
        made = UpCluster(lan, tls=False)
        yield made
        assert made.end()[0] == 0


def turns(cluster: UpCluster, kind: str, how: str, count: int, elements: int) -> list[float]:
    """Runs `count` disturbed turns; returns how long they took, in undisturbed ones."""
    lan = cluster.lan
    dice = random.Random(SEED)
    names = {"count": len(lan.hosts), "kind": kind, "elements": elements, "source": 0}
    program = HOST_DEATHS_PROGRAM.format(**names, address=cluster.address)
    found = []
    with Driver(cluster, lan[0], program) as driver:
        usual = []
        for _ in range(2):  # the first one is cold
            assert driver.hear() == "ready"
            driver.say()
            seconds, *ranks = driver.hear().split()
            assert ranks, "the program has ended"
            driver.say("nobody")
            assert driver.hear() == "gone"
            usual.append(float(seconds))
        killed_at = -MANAGER_LIFE_S
        times: dict[int, int] = {}  # by number of a host
        for _ in range(count):
            assert driver.hear() == "ready"
            if how == "manager":  # one that dies too often is not started again
                time.sleep(max(0.0, killed_at + MANAGER_LIFE_S - time.monotonic()))
            victim = dice.choice(list(lan)[1:])
            driver.say()
            time.sleep(dice.random() * usual[-1])
            if how == "manager":
                kill_manager(lan[0])
                killed_at = time.monotonic()
            elif how == "killed":
                victim.kill()
            elif how == "cut":
                victim.cut()
            elif how == "slowed":
                victim.shape(SLOW, SLOW)
            else:
                signal_all(victim, signal.SIGSTOP)
            seconds, *ranks = driver.hear().split() or [""]
            assert ranks, f"seed {SEED}: the program has ended"
            if how in LOST_NOBODY and kind in FROM_ALL:
                assert len(ranks) == len(lan.hosts), f"seed {SEED}: only {ranks}"
            driver.say("nobody" if how in LOST_NOBODY else victim.name)
            assert driver.hear() == "gone"
            found.append(float(seconds) / usual[-1])
            times[victim.number] = times.get(victim.number, 0) + 1
            if how == "cut":
                victim.mend()
            elif how == "slowed":
                victim.shape(RATE, RATE)
            elif how == "stopped":
                signal_all(victim, signal.SIGCONT)
            if how in ("stopped", "cut") and times[victim.number] % REJOINS_MAX == 0:
                victim.kill()  # it would not come again so often
            if victim not in lan.hosts:
                again = lan.add(victim.number)
                cluster.joined.append(cluster.join(again, 1))
        assert driver.hear() == "ready"
        driver.say("over")
    return found


@pytest.mark.parametrize("kind", ["broadcast"])
def test_a_host_is_killed(cluster: UpCluster, kind: str) -> None:
    turns(cluster, kind, "killed", 1, 1 << 22)


@pytest.mark.parametrize("kind", ["reduce"])
def test_the_manager_is_killed(cluster: UpCluster, kind: str) -> None:
    turns(cluster, kind, "manager", 2, 1 << 22)


@pytest.mark.soak
@pytest.mark.usefixtures("usual_heartbeats")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["killed", "stopped", "cut", "slowed", "manager"])
@pytest.mark.parametrize("kind", [*KINDS, *GROUP_KINDS])
def test_a_host_is_lost_at_a_random_byte(cluster: UpCluster, kind: str, how: str) -> None:
    found = turns(cluster, kind, how, TURNS, ELEMENTS.get(kind, 1 << 24))
    print(f"{kind}, one {how}: {len(found)} turns, the longest took {max(found):.1f} usual ones")
