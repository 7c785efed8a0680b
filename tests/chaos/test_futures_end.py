"""Every Future ends when its host is gone, whoever waits for it and by whatever means.

Five threads send tasks before, while and after the node or the supervisor is killed, or the cluster
is closed by another thread. Each Future is waited for in every way that there is.
"""

from __future__ import annotations

import concurrent.futures
import os
import random
import time
from typing import Any

import psutil
import pytest

import hoplite_mp
from tests.support.functions import add
from tests.support.future_threads import ENDED_S, THREADS, WAYS, SendingThread, WaitingThread
from tests.support.processes import descriptors, processes_named
from tests.support.waiting import eventually

ROUNDS = int(os.environ.get("HOPLITE_MP_KILLS", "200"))
SEED = int(os.environ.get("HOPLITE_MP_SEED", str(random.randrange(1 << 30))))
DELAY_S_MAX = 0.2
FATAL = ("hoplite node", "supervisor")


def never(c: Any) -> list[Any]:
    """Futures that nothing but the end ends."""
    sleeps = c.submit(time.sleep, 600)
    return [
        sleeps,
        c.submit(time.sleep, 600),
        c.submit(add, sleeps, 1),
        c.broadcast(sleeps),
        c.gather([sleeps]),
        *c.spmd(sleep_rank, 2),
        c.group("alone", 2, 0).barrier_async(),
        c.executor(1).submit(time.sleep, 600),
    ]


def sleep_rank(rank: int) -> None:
    time.sleep(600)


def kill(c: Any, name: str) -> None:
    supervisor = psutil.Process(c._host.process.pid)
    while True:
        found = [supervisor] if name == "supervisor" else processes_named(name)
        if found:
            found[0].kill()
            return
        time.sleep(0.001)


@pytest.mark.parametrize("name", FATAL)
def test_every_way_to_wait_ends(name: str) -> None:
    c = hoplite_mp.Cluster(1)
    assert c.submit(abs, -1).result() == 1
    before = never(c)
    waits = [WaitingThread(c, future, way) for future in before[:-2] for way in WAYS]
    waits += [
        WaitingThread(c, before[-2], way) for way in ("wait", "callback", "result", "exception")
    ]
    waits += [WaitingThread(c, before[-1], way) for way in WAYS]
    sends = [SendingThread(c, seed, 20) for seed in range(THREADS)]
    time.sleep(0.1)
    kill(c, name)
    deadline = time.monotonic() + ENDED_S
    for one in [*waits, *sends]:
        one.check(deadline)
    for future in before:
        with pytest.raises(hoplite_mp.NodeLostError):
            future.result(0)
    pool = c.options(name="later")
    for call in (c.submit, pool.submit):
        with pytest.raises(hoplite_mp.NodeLostError, match="has ended"):
            call(abs, -1)
    with pytest.raises(hoplite_mp.NodeLostError):
        c.broadcast(before[0])
    with pytest.raises(hoplite_mp.NodeLostError):
        list(c.map(abs, range(3)))
    assert c._runtime.submitter.pending == {}
    c.shutdown()


def test_what_was_done_keeps_its_result() -> None:
    """Also what nobody has looked at before the end."""
    c = hoplite_mp.Cluster(1)
    done = [c.submit(abs, -i) for i in range(20)]
    c.wait(done)
    sleeps = c.submit(time.sleep, 600)
    kill(c, "hoplite node")
    concurrent.futures.wait([sleeps], ENDED_S)
    assert [future.result(0) for future in done] == list(range(20))
    assert sleeps.done()
    c.shutdown()


def test_a_callback_that_raises_leaves_nobody_waiting() -> None:
    def leave(_: Any) -> None:
        raise SystemExit

    c = hoplite_mp.Cluster(1)
    futures = [c.submit(time.sleep, 600) for _ in range(20)]
    for future in futures:
        future.add_done_callback(leave)
    kill(c, "hoplite node")
    done, left = concurrent.futures.wait(futures, ENDED_S)
    assert (len(done), len(left)) == (20, 0)
    assert c._host is not None
    assert c._host.ended.wait(ENDED_S)
    with pytest.raises(hoplite_mp.NodeLostError):
        c.put(1)
    c.shutdown()


@pytest.mark.parametrize("how", ["shutdown", "cancel", "abort"])
def test_closed_by_another_thread(how: str) -> None:
    # As in the standard library, who cancels calls the callbacks: they must not wait for what the
    # same thread is to cancel next. Nor may a task sleep for ever that shutdown waits for.
    ways = [way for way in WAYS if way != "callback that waits"]
    for at in range(8):
        c = hoplite_mp.Cluster(1)
        sends = [SendingThread(c, seed, 10, ways) for seed in range(at, at + THREADS)]
        time.sleep(random.random() * 0.2)
        if how == "abort":
            c._abort()
        else:
            c.shutdown(wait=True, cancel_futures=how == "cancel")
        deadline = time.monotonic() + ENDED_S
        for one in sends:
            one.check(deadline)


def kills(rounds: int) -> None:
    dice = random.Random(SEED)
    before = 0
    for at in range(rounds):
        c = hoplite_mp.Cluster(2)
        if at < 2:
            before = descriptors()
        sends = [SendingThread(c, dice.randrange(1 << 30), 10) for _ in range(THREADS)]
        time.sleep(dice.random() * DELAY_S_MAX)
        kill(c, dice.choice(FATAL))
        deadline = time.monotonic() + ENDED_S
        try:
            for one in sends:
                one.check(deadline)
        except BaseException:
            print(f"round {at} of seed {SEED}")
            raise
        c.shutdown()
    eventually(lambda: descriptors() <= before, "no descriptor is left")


def test_kills_under_load() -> None:
    kills(8)


@pytest.mark.soak
@pytest.mark.timeout(5 * ROUNDS + 60)
def test_many_kills_under_load() -> None:
    kills(ROUNDS)
