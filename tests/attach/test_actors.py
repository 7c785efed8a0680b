"""Actors of a driver that leaves, in order or by an exception, while others hold some of them."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.attach.conftest import Up

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


def test_leaving_in_order_finishes_the_calls_made(up: Up) -> None:
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


def test_an_exception_kills_those_that_nobody_else_holds(up: Up) -> None:
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
