"""A host dies while tasks and a collective use the same results."""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.lan import Lan
from tests.support.clusters import Driver, UpCluster

ROUNDS = int(os.environ.get("HOPLITE_MP_DEATHS", "15"))
SEED = int(os.environ.get("HOPLITE_MP_SEED", str(random.randrange(1 << 30))))

PROGRAM = """
def make(i):
    return np.full(2_500_000, float(i))
def add(a, b):
    return a + b
while True:
    while len([n for n in c.nodes if n.workers]) < 3:
        time.sleep(0.02)
    print("ready", flush=True)
    kind = input()
    if kind == "over":
        break
    made = [c.submit(make, i) for i in range(6)]
    sums = [c.submit(add, made[i], made[(i + 1) % 6]) for i in range(6)]
    total = getattr(c, kind)(made)
    print("begun", flush=True)
    assert (c.get(total, timeout=60) == 15).all()
    for i in range(6):
        assert (sums[i].result(60) == i + (i + 1) % 6).all()
        assert (made[i].result(60) == i).all()
    print("right", flush=True)
"""


def play(rounds: int) -> None:
    """Tasks that read the results fetch copies, and let go of them again."""
    dice = random.Random(SEED)
    with Lan(3, "400mbit") as lan:
        cluster = UpCluster(lan, tls=False, workers=2)
        victim = lan[1]
        with Driver(cluster, lan[0], PROGRAM) as driver:
            for number in range(rounds):
                assert driver.hear() == "ready"
                driver.say(("allreduce", "reduce")[(SEED + number) % 2])
                assert driver.hear() == "begun"
                time.sleep(dice.uniform(0.2, 1.2))
                victim.kill()
                assert driver.hear() == "right", f"seed {SEED}, round {number}"
                victim = lan.add(victim.number)
                cluster.joined.append(cluster.join(victim, 2))
            assert driver.hear() == "ready"
            driver.say("over")
        assert cluster.end()[0] == 0


def test_they_are_made_again_for_both(lan_permitted: None) -> None:
    play(1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_they_are_made_again_for_both_often(lan_permitted: None) -> None:
    play(ROUNDS)
