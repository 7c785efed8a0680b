"""Threads of one program that use tasks, executors and actors at the same time never wait for each
other in a circle. Each program runs in a process of its own, which ends itself if nothing has moved
for HANGS_S seconds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.lan import forked

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 1.5
HANGS_S = 60
SOAK_S = 240
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

LOCK_OF_THE_USER = """
c = hoplite_mp.Cluster(workers=4)
lock = threading.Lock()
seen = []


def note(future):
    with lock:
        seen.append(future.result())


def main():
    sent = 0
    for _ in turns("main"):
        for one in range(6):
            c.submit(time.sleep, 0.005 * one).add_done_callback(note)
            sent += 1
        with lock:
            c.submit(time.sleep, 0.05).result()
    while len(seen) < sent:
        time.sleep(0.01)


run(main)
c.shutdown()
"""

MIXED = """
import numpy as np

c = hoplite_mp.Cluster(workers=2, memory="256MiB", resources={"gpu": 2})
gpu = c.options(resources={"gpu": 1})
big = np.ones(1 << 18)


class Dies:
    def give(self, x):
        return x

    def die(self):
        os._exit(3)


def uses_big(x):
    return float(big[0]) + x


def count(n):
    yield from range(n)


def peer(rank):
    g = hoplite_mp.current().group("mixed", 2, rank)
    g.send(rank, 1 - rank)
    return g.recv() + float(g.allreduce(np.float64(rank)))


def resources():
    for _ in turns("resources"):
        after = [gpu.submit(abs, c.submit(int, -one)) for one in range(10)]
        assert [future.result() for future in after] == list(range(10))


def executors():
    for _ in turns("executors"):
        with c.executor(1) as ex:
            assert ex.submit(uses_big, 1).result() == 2.0


def peers():
    for _ in turns("peers"):
        assert [future.result() for future in c.spmd(peer, 2)] == [2.0, 1.0]


def actors():
    for _ in turns("actors"):
        actor = c.actor(Dies)
        actor.die()
        for future in [actor.give(c.submit(int, one)) for one in range(20)]:
            try:
                future.result()
            except hoplite_mp.ActorLostError:
                pass


def numbered():
    actor = c.options(checkpoint=5, restarts=1).actor(Dies)
    for _ in turns("numbered"):
        called = []
        future = actor.give(np.ones(1 << 16))
        future.add_done_callback(called.append)
        assert future.result().sum() == 1 << 16


def streams():
    for _ in turns("streams"):
        assert [c.get(ref) for ref in c.stream(count, 5)] == list(range(5))
        dropped = c.map(abs, range(20))
        del dropped


def completed():
    for _ in turns("completed"):
        futures = [c.submit(uses_big, one) for one in range(10)]
        assert sorted(one.result() for one in hoplite_mp.as_completed(futures))[-1] == 10.0


def queues():
    queue = hoplite_mp.Queue()
    for _ in turns("queues"):
        for one in range(5):
            queue.put(c.put(np.full(1 << 14, one)))
        assert [c.get(queue.get())[0] for _ in range(5)] == list(range(5))


run(resources, executors, peers, actors, numbered, streams, completed, queues)
c.shutdown()
"""
LOST_NODE = """
import queue
import signal
from hoplite_mp._client.launch import NODE_SLOT

c = hoplite_mp.Cluster(workers=2, resources={{"gpu": 2}})
gpu = c.options(resources={{"gpu": 1}})
raised = {{}}


class Gives:
    def give(self, x):
        return x


def executors():
    with c.executor(1) as ex:
        ex.submit(abs, -1).result()


def resources():
    for future in [gpu.submit(abs, -1) for _ in range(50)]:
        future.result()


def many():
    for future in [gpu.submit(abs, -1) for _ in range(1000)]:
        future.result()


def after_others():
    gpu.submit(abs, c.submit(abs, -1)).result()


def actors():
    actor = c.actor(Gives)
    for future in [actor.give(c.submit(int, one)) for one in range(20)]:
        future.result()


def peers():
    for future in c.spmd(abs, 2):
        future.result()


def puts():
    c.get(c.put(bytes(4 << 20)))


def queues():
    hoplite_mp.Queue().get(timeout=0.01)


def until_it_raises(work):
    while True:
        moved[work.__name__] = time.monotonic()
        try:
            work()
        except queue.Empty:
            pass
        except hoplite_mp.HopliteError as error:
            raised[work.__name__] = error
            return


def kill():
    while not (node := c._runtime.tasks.pid(NODE_SLOT)):
        time.sleep(0.1)
    time.sleep(1.0)
    if {stopped_s}:
        os.kill(node, signal.SIGSTOP)
        time.sleep({stopped_s})
    os.kill(node, signal.SIGKILL)


works = (executors, resources, many, after_others, actors, peers, puts, queues)
run(kill, *[lambda work=work: until_it_raises(work) for work in works])
assert len(raised) == len(works), raised
print(raised)
"""


def run_program(tmp_path: Path, body: str, seconds: float = SECONDS) -> None:
    """Runs the program; fails with the stacks of its threads if they hang."""
    program = tmp_path / "program.py"
    program.write_text(FRAME.format(seconds=seconds, hangs=HANGS_S) + body)
    done = forked.run([sys.executable, str(program)], timeout=seconds + 10 * HANGS_S)
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


def test_a_callback_takes_a_lock_that_a_waiting_thread_holds_and_does_not_hang(
    tmp_path: Path,
) -> None:
    run_program(tmp_path, LOCK_OF_THE_USER, 1.5)


def test_threads_that_use_everything_at_once_do_not_hang(tmp_path: Path) -> None:
    run_program(tmp_path, MIXED, 3)


@pytest.mark.soak
def test_threads_that_use_everything_for_minutes_do_not_hang(tmp_path: Path) -> None:
    run_program(tmp_path, MIXED, SOAK_S)


@pytest.mark.parametrize("stopped_s", [0, 2])
def test_the_death_of_the_node_ends_the_calls_of_all_threads(
    tmp_path: Path, stopped_s: int
) -> None:
    """stopped_s: how long the node reads nothing before, so that lines to it fill up."""
    run_program(tmp_path, LOST_NODE.format(stopped_s=stopped_s))
