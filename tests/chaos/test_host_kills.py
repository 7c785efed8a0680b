"""The node, the supervisor, the manager or a worker is killed at a random instant of a program.

Several threads work with one cluster: whatever they are doing, each call ends, with a right value
or with an error that says what is gone. What had been read stays readable. Afterwards no process
and no descriptor is left, and the next cluster begins.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest

import hoplite_mp
from tests.support.functions import double, integers
from tests.support.processes import descriptors, processes_named

ROUNDS = int(os.environ.get("HOPLITE_MP_KILLS", "2000"))
SEED = int(os.environ.get("HOPLITE_MP_SEED", str(random.randrange(1 << 30))))
THREADS = 2
ENDED_S = 60.0
"""For the calls of a thread to end once the host is gone, on a loaded machine."""
DELAY_S_MAX = 0.15  # about what one thread's turn over all that there is to do takes
HARMLESS = ("hoplite manager", "hoplite worker")
# What a call may end with when its host is gone.
GONE = (hoplite_mp.NodeLostError, hoplite_mp.ClosedError, hoplite_mp.ObjectLostError)


class Work(threading.Thread):
    """Does one thing after another until the host is gone; keeps what it has read."""

    def __init__(self, c: Any, seed: int) -> None:
        super().__init__(daemon=True)
        self.c = c
        self.dice = random.Random(seed)
        self.read: list[tuple[Any, Any]] = []
        self.turns = 0
        self.end: BaseException | None = None
        self.over = threading.Event()

    def run(self) -> None:
        try:
            while not self.over.is_set():
                self.dice.choice((self.put, self.compute, self.reduce, self.drop, self.fail))()
                self.turns += 1
        except BaseException as error:
            self.end = error

    def keep(self, found: Any, wanted: Any) -> None:
        assert np.array_equal(found, wanted)
        self.read = [*self.read[-3:], (found, wanted)]

    def array(self) -> Any:
        return integers(self.dice.randrange(1 << 16), self.dice.choice((10, 1000, 30_000, 300_000)))

    def put(self) -> None:
        value = self.array()
        self.keep(self.c.get(self.c.put(value)), value)

    def compute(self) -> None:
        values = [self.array() for _ in range(3)]
        futures = [self.c.options(retries=20).submit(double, self.c.put(one)) for one in values]
        for future, value in zip(futures, values, strict=True):
            self.keep(future.result(), value * 2)

    def reduce(self) -> None:
        count = self.dice.choice((10, 30_000))
        values = [integers(i, count) for i in range(3)]
        made = self.c.reduce([self.c.put(one) for one in values])
        self.keep(self.c.get(made), sum(values))

    def drop(self) -> None:
        """Refs of what runs and of what is stored; an array of the store that is never put."""
        refs = [self.c.submit(double, np.ones(30_000)).ref, self.c.put(np.ones(30_000))]
        self.c.empty(100_000).fill(1.0)
        del refs

    def fail(self) -> None:
        with pytest.raises(ZeroDivisionError):
            self.c.options(retries=20).submit(divmod, 1, 0).result()


def kill_one(c: Any, dice: random.Random, fatal: bool) -> str:
    """Returns its name. fatal: with it the host ends."""
    supervisor = psutil.Process(c._host.process.pid)
    while True:
        if fatal:
            found = [supervisor, *processes_named("hoplite node")]
        else:
            found = [one for name in HARMLESS for one in processes_named(name)]
        if found:  # the host is just beginning, perhaps
            victim = dice.choice(found)
            with contextlib.suppress(psutil.NoSuchProcess):  # one that stood in has just gone
                name = victim.name()
                victim.kill()
                return name
        time.sleep(0.001)


def one_round(dice: random.Random) -> str:
    c = hoplite_mp.Cluster(2)
    supervisor = psutil.Process(c._host.process.pid)
    processes = [supervisor, *supervisor.children(recursive=True)]
    threads = [Work(c, dice.randrange(1 << 30)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for fatal in [*[False] * dice.randrange(3), True]:
        time.sleep(dice.random() * DELAY_S_MAX)
        name = kill_one(c, dice, fatal)
    for thread in threads:
        thread.join(ENDED_S)
        assert not thread.is_alive(), "a call does not end"
        assert isinstance(thread.end, GONE), thread.end
        for found_array, wanted in thread.read:
            assert np.array_equal(found_array, wanted)
        thread.read = []
    c.shutdown()
    _, living = psutil.wait_procs(processes, ENDED_S)
    assert not living, living
    return name


def kill(rounds: int) -> None:
    dice = random.Random(SEED)
    one_round(dice)  # what is imported and opened once
    before = descriptors()
    died: dict[str, int] = {}
    for at in range(rounds):
        try:
            name = one_round(dice)
        except BaseException:
            print(f"round {at} of seed {SEED}")
            raise
        died[name] = died.get(name, 0) + 1
    deadline = time.monotonic() + ENDED_S
    while descriptors() > before:
        assert time.monotonic() < deadline, "descriptors are left"
        time.sleep(0.01)
    print(f"{rounds} rounds: {died}")
    assert rounds < 20 or len(died) == 2


def test_shutdown_waits_for_a_task_when_the_host_is_killed() -> None:
    """It returns: there is nothing left to wait for, and whoever wants the result is told."""
    c = hoplite_mp.Cluster(1)
    future = c.submit(time.sleep, 600)
    while not future.running():
        time.sleep(0.001)
    with ThreadPoolExecutor(1) as threads:
        ending = threads.submit(c.shutdown)
        while True:
            with pytest.raises((hoplite_mp.ClosedError, hoplite_mp.HopliteTimeoutError)) as caught:
                c.get(c.submit(abs, -1), timeout=0.01)
            if caught.type is hoplite_mp.ClosedError:
                break  # it has begun
        kill_one(c, random.Random(0), fatal=True)
        assert ending.result(ENDED_S) is None
    with pytest.raises(hoplite_mp.NodeLostError):
        future.result(ENDED_S)


def test_a_host_is_killed() -> None:
    kill(10)


@pytest.mark.soak
@pytest.mark.timeout(3 * ROUNDS + 60)
def test_many_hosts_are_killed() -> None:
    kill(ROUNDS)
