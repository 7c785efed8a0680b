"""A counter with checkpoint=1 that several drivers raise while its host dies again and again.

It never shows a number twice, and never goes back: nobody's next number is lower than one that was
given out before the call, to whomever.
"""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import PATIENCE_S, Driver, UpCluster

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lan import Host

TURNS = int(os.environ.get("HOPLITE_MP_DEATHS", "30"))
SEED = int(os.environ.get("HOPLITE_MP_SEED", str(random.randrange(1 << 30))))

MAKE = """
import functools
print = functools.partial(print, flush=True)
class Counter:
    def __init__(self):
        self.value = 0
    def add(self):
        self.value += 1
        return self.value
    def where(self):
        return os.uname().nodename
def make():
    c = hoplite_mp.current().options(
        restarts=10_000, checkpoint=1, retries=100, name="counter", detached=True
    )
    c.actor(Counter).add().result(60)
while not (at := [n for n in c.nodes if n.workers and n.host == "h3"]):
    time.sleep(0.01)
c.options(node=at[0]).submit(make).result(60)
print("made")
input()
"""
RAISE = """
counter = c.get_actor("counter")
with open(sys.argv[1], "a", buffering=1) as log:
    while not os.path.exists(sys.argv[2]):
        began = time.monotonic_ns()
        try:
            value = counter.add().result(60)
        except hoplite_mp.ActorLostError as error:
            print("lost", error, file=sys.stderr)
            continue
        print(began, time.monotonic_ns(), value, file=log)
"""
WHERE = """
print(c.get_actor("counter").where().result(60))
"""


def read(logs: list[Path]) -> list[tuple[int, int, int]]:
    rows = [
        (int(began), int(ended), int(value))
        for log in logs
        for began, ended, value in (line.split() for line in log.read_text().splitlines())
    ]
    return sorted(rows, key=lambda row: row[1])


def check(rows: list[tuple[int, int, int]]) -> None:
    values = [value for _, _, value in rows]
    assert len(set(values)) == len(values), "a number was shown twice"
    # By the end of a call; what had ended before another one began is lower than its number.
    for began, _, value in rows:
        before = [other for _, ended, other in rows if ended < began]
        assert not before or max(before) < value, "it went back"


@pytest.mark.parametrize("turns", [2, pytest.param(TURNS, marks=pytest.mark.soak)])
def test_a_counter_never_goes_back(lan_permitted: None, tmp_path: Path, turns: int) -> None:
    chance = random.Random(SEED)
    print("HOPLITE_MP_SEED", SEED)
    stop = tmp_path / "stop"
    with Lan(4) as lan:
        cluster = UpCluster(lan, tls=False)
        with Driver(cluster, lan[0], MAKE) as maker:
            assert maker.hear() == "made"
            maker.say()
        logs = [tmp_path / f"log{i}" for i in range(3)]
        drivers = []
        for log in logs:  # on the host that does not die, each a driver of its own
            command = [*cluster.program(RAISE), str(log), str(stop)]
            drivers.append(lan[0].popen(command, env=cluster.driver_env(lan[0]), text=True))
            log.touch()
        for _ in range(turns):
            seen = len(read(logs))
            until_more(logs, seen + chance.randrange(1, 200))
            name = cluster.run(lan[0], WHERE).strip()
            victim: Host = next(host for host in lan if f"h{host.number}" == name)
            if victim.number == 1:
                break  # it would take the manager and the drivers along
            victim.kill()
            time.sleep(chance.random())
            cluster.joined.append(cluster.join(lan.add(victim.number), 1))
        until_more(logs, len(read(logs)) + 100)
        stop.touch()
        assert [driver.wait(PATIENCE_S) for driver in drivers] == [0] * len(drivers)
        check(read(logs))
        cluster.joined = []
        lan[0].signal(cluster.up, 15)
        assert cluster.up.stdout is not None
        cluster.up.stdout.close()
        assert cluster.up.wait(PATIENCE_S) == 0


def until_more(logs: list[Path], count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(read(logs)) < count:
        assert time.monotonic() < deadline, "the counter stands still"
        time.sleep(0.02)
