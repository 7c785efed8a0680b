"""Threads of one program that use tasks, executors and actors at the same time never wait for each
other in a circle. Each program runs in a process of its own, which ends itself if nothing has moved
for HANGS_S seconds."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 4
HANGS_S = 20
FRAME = """
import faulthandler, os, sys, threading, time
import hoplite_mp

sys.setswitchinterval(1e-4)  # more turns of the threads in a second
END = time.monotonic() + {seconds}
moved = {{}}


def turns(name):
    while time.monotonic() < END:
        moved[name, threading.get_ident()] = time.monotonic()
        yield


def run(*threads):
    started = [threading.Thread(target=one, daemon=True) for one in threads]
    for one in started:
        one.start()
    while any(one.is_alive() for one in started):
        time.sleep(0.1)
        if moved and time.monotonic() - min(moved.values()) > {hangs}:
            faulthandler.dump_traceback(all_threads=True)
            os._exit(3)
    print("over")
"""
RESOURCES = """
c = hoplite_mp.Cluster(workers=2, resources={"gpu": 2})
view = c.options(resources={"gpu": 1})


def submits():
    for _ in turns("submits"):
        for future in [view.submit(abs, -1) for _ in range(20)]:
            future.result()


def opens():
    for _ in turns("opens"):
        with c.executor(1) as ex:
            ex.submit(abs, -2).result()


run(submits, submits, opens, opens)
c.shutdown()
"""
ONE_THREAD = """
c = hoplite_mp.Cluster(workers=2, resources={"gpu": 2})
view = c.options(resources={"gpu": 1})


def main():
    for _ in turns("main"):
        for _ in range(10):
            c.submit(time.sleep, 0.001)
        waiting = [view.submit(abs, c.submit(int, -one)) for one in range(10)]
        with c.executor(1) as ex:
            ex.submit(abs, -2)
        assert [future.result() for future in waiting] == list(range(10))


run(main)
c.shutdown()
"""
DYING_ACTORS = """
c = hoplite_mp.Cluster(workers=2)


class Dies:
    def give(self, x):
        return x

    def die(self):
        os._exit(3)


def acts():
    for _ in turns("acts"):
        actor = c.actor(Dies)
        actor.die()
        for future in [actor.give(c.submit(int, one)) for one in range(40)]:
            try:
                future.result()
            except hoplite_mp.ActorLostError:
                pass


def opens():
    for _ in turns("opens"):
        with c.executor(1) as ex:
            ex.submit(abs, -2).result()


run(acts, acts, opens, opens)
c.shutdown()
"""


def run_program(tmp_path: Path, body: str, seconds: float = SECONDS) -> None:
    """Runs the program; fails with the stacks of its threads if they hang."""
    program = tmp_path / "program.py"
    program.write_text(FRAME.format(seconds=seconds, hangs=HANGS_S) + body)
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=seconds + 10 * HANGS_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "over" in done.stdout, said


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(RESOURCES, id="tasks-with-resources"),
        pytest.param(ONE_THREAD, id="arguments-that-become-ready"),
        pytest.param(DYING_ACTORS, id="actors-that-die"),
    ],
)
def test_executors_opened_beside_other_calls_do_not_hang(tmp_path: Path, body: str) -> None:
    run_program(tmp_path, body)
