"""Actors of a driver that leaves, in order or by an exception, while others hold some of them."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from hoplite_mp import Actor
from hoplite_mp._cli import main
from tests.support.functions import Counter
from tests.support.timeline import Timeline
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.support.clusters import LoopbackCluster

QUICK_S = 60.0  # far less than what an actor works here

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
        driver.stdin.write(f"{path}\n600\n")
        driver.stdin.flush()
        assert driver.wait(QUICK_S) == 3
        assert gone(mine)
        assert not path.exists()
        assert held.add().result(20) == 1
        assert held.pid().result(20) == shared
        assert c.get_actor("free").pid().result(20) == free
        type(held).kill(held)
        type(held).kill(c.get_actor("free"))
        assert gone(free)


def test_people_see_them(
    own_up: LoopbackCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Name or class, host, calls that wait, run and are done, restarts: in all that shows a
    cluster."""

    def command(word: str, *words: str) -> str:
        assert main.main([word, own_up.address, *words]) == 0
        return capsys.readouterr().out

    with own_up.attach() as c:
        with c.trace(tmp_path / "trace.json"):
            ps = c.options(name="ps", restarts=3).actor(Counter)
            other = c.actor(Counter)
            assert other.add().result(20) == 1
            pid = ps.pid().result(20)
            eventually(lambda: command("dump").count(" 1 done") == 2)  # each is counted
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: Actor.restarts(ps) == 1)
            for _ in range(4):
                ps.add().result(20)
        running = ps.wait(600)
        waiting = [ps.add() for _ in range(7)]
        eventually(running.running)
        counts = "7 calls waiting, 1 running, 5 done; 1 restarts, 2 left"
        eventually(lambda: counts in command("dump"), "each call is counted")
        assert "actor 'ps' (Counter)" in command("dump")
        for words in (("status",), ("top", "--count", "1", "--interval", "0.1")):
            lines = [line.split() for line in command(*words).splitlines()]
            head = ["actor", "class", "node", "state", "waiting", "running", "done", "restarts"]
            assert head in lines, words
            assert ["ps", "Counter", "h0", "lives", "7", "1", "5", "1", "of", "3"] in lines, words
            assert ["-", "Counter", "h0", "lives", "0", "0", "1", "0", "of", "0"] in lines, words
        Actor.kill(ps)
        assert all(future.exception(20) for future in (running, *waiting))

    timeline = Timeline(tmp_path / "trace.json")
    tracks = {timeline.tracks[event["tid"]]: 0 for event in timeline.of("task")}
    for event in timeline.of("task"):
        tracks[timeline.tracks[event["tid"]]] += 1
    assert tracks["actor ps (Counter)"] == 5
    assert any(name.startswith("actor Counter, pool ") for name in tracks)
