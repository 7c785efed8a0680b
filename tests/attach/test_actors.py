"""Actors of a driver that leaves, in order or by an exception, while others hold some of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from hoplite_mp import Actor
from tests.support.clusters import ROOT
from tests.support.functions import Counter
from tests.support.timeline import Timeline
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.clusters import LoopbackCluster

QUICK_S = 20.0

# Three actors: one of this driver alone, one that another driver finds, one that is detached.
PROGRAM = """
class Counter:
    def __init__(self):
        self.value = 0
    def add(self):
        self.value += 1
        return self.value
    def pid(self):
        return os.getpid()
    def work(self, seconds, path):
        time.sleep(seconds)
        with open(path, "a") as file:
            file.write("done")
mine = c.actor(Counter)
shared = c.options(name="shared").actor(Counter)
free = c.options(name="free", detached=True).actor(Counter)
print(mine.pid().result(), shared.pid().result(), free.pid().result(), flush=True)
path, seconds = sys.stdin.readline().strip(), float(sys.stdin.readline())
running = mine.work(seconds, path)
waiting = [mine.work(0, path) for _ in range(2)]
while not running.running():
    time.sleep(0.01)
"""


def gone(pid: int) -> bool:
    deadline = time.monotonic() + QUICK_S
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_leaving_in_order_finishes_the_calls_made(up: LoopbackCluster) -> None:
    path = up.folder.parent / "in order"
    with up.attach() as c:
        driver = up.driver(PROGRAM)
        assert driver.stdout is not None
        assert driver.stdin is not None
        mine, shared, free = map(int, driver.stdout.readline().split())
        held = c.get_actor("shared")
        driver.stdin.write(f"{path}\n0.3\n")
        driver.stdin.flush()
        assert driver.wait(QUICK_S) == 0
        assert path.read_text() == "done" * 3
        assert gone(mine)
        assert held.add().result(20) == 1
        assert c.get_actor("free").add().result(20) == 1
        del held
        assert gone(shared)
        assert c.get_actor("free").pid().result(20) == free
        type(c.get_actor("free")).kill(c.get_actor("free"))
        assert gone(free)


def test_an_exception_kills_those_that_nobody_else_holds(up: LoopbackCluster) -> None:
    path = up.folder.parent / "by an exception"
    with up.attach() as c:
        driver = up.driver(PROGRAM + "\nraise SystemExit(3)\n")
        assert driver.stdout is not None
        assert driver.stdin is not None
        mine, shared, free = map(int, driver.stdout.readline().split())
        held = c.get_actor("shared")
        began = time.monotonic()
        driver.stdin.write(f"{path}\n600\n")
        driver.stdin.flush()
        assert driver.wait(QUICK_S) == 3
        assert gone(mine)
        assert time.monotonic() - began < QUICK_S
        assert not path.exists()
        assert held.add().result(20) == 1
        assert held.pid().result(20) == shared
        assert c.get_actor("free").pid().result(20) == free
        type(held).kill(held)
        type(held).kill(c.get_actor("free"))
        assert gone(free)


def command(up: LoopbackCluster, *words: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "hoplite_mp", words[0], up.address, *words[1:]],
        env=env,
        capture_output=True,
        text=True,
        timeout=QUICK_S,
        check=True,
    )
    return done.stdout


def test_people_see_them(up: LoopbackCluster, tmp_path: Path) -> None:
    """Name or class, host, calls that wait, run and are done, restarts: in all that shows a
    cluster."""
    with up.attach() as c:
        with c.trace(tmp_path / "trace.json"):
            ps = c.options(name="ps", restarts=3).actor(Counter)
            other = c.actor(Counter)
            assert other.add().result(20) == 1
            pid = ps.pid().result(20)
            eventually(lambda: command(up, "dump").count("1 are done") == 2)  # each is counted
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: Actor.restarts(ps) == 1)
            for _ in range(4):
                ps.add().result(20)
        running = ps.wait(600)
        waiting = [ps.add() for _ in range(7)]
        eventually(running.running)
        for words in (("status",), ("top", "--count", "1", "--interval", "0.1")):
            lines = [line.split() for line in command(up, *words).splitlines()]
            head = ["actor", "class", "node", "state", "waiting", "running", "done", "restarts"]
            assert head in lines, words
            assert ["ps", "Counter", "h0", "lives", "7", "1", "5", "1", "of", "3"] in lines, words
            assert ["-", "Counter", "h0", "lives", "0", "0", "1", "0", "of", "0"] in lines, words
        dump = command(up, "dump")
        assert "actor 'ps' (Counter)" in dump
        assert "7 calls wait, 1 run, 5 are done; 1 restarts, 2 left" in dump
        Actor.kill(ps)
        assert all(future.exception(20) for future in (running, *waiting))

    timeline = Timeline(tmp_path / "trace.json")
    tracks = {timeline.tracks[event["tid"]]: 0 for event in timeline.of("task")}
    for event in timeline.of("task"):
        tracks[timeline.tracks[event["tid"]]] += 1
    assert tracks["actor ps (Counter)"] == 5
    assert any(name.startswith("actor Counter, pool ") for name in tracks)
