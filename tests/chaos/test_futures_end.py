"""Every Future ends when its host is gone, whoever waits for it and by whatever means.

Five threads send tasks before, while and after the node or the supervisor is killed, or the cluster
is closed by another thread. Each Future is waited for in every way that there is.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

import hoplite_mp
from tests.support.functions import add
from tests.support.processes import descriptors, processes_named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp import Cluster

ROUNDS = int(os.environ.get("HOPLITE_MP_KILLS", "200"))
SEED = int(os.environ.get("HOPLITE_MP_SEED", str(random.randrange(1 << 30))))
THREADS = 5
ENDED_S = 60.0
"""For all that waits to end once the host is gone, on a loaded machine."""
DELAY_S_MAX = 0.2
GONE = (
    hoplite_mp.NodeLostError,
    hoplite_mp.ManagerLostError,
    hoplite_mp.ClosedError,
    hoplite_mp.ObjectLostError,
)
FATAL = ("hoplite node", "supervisor")


def by_callback(c: Cluster, future: Any) -> None:
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    called.wait()


def by_await(c: Cluster, future: Any) -> None:
    async def awaits() -> None:
        await future

    asyncio.run(awaits())


def by_callback_that_waits(c: Cluster, future: Any) -> None:
    """For another Future: whoever calls the callbacks has ended both before."""
    other, called = c.submit(time.sleep, 600), threading.Event()

    def callback(_: Any) -> None:
        concurrent.futures.wait([other])
        called.set()

    future.add_done_callback(callback)
    called.wait()


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "wait": lambda c, future: concurrent.futures.wait([future]),
    "as_completed": lambda c, future: list(hoplite_mp.as_completed([future])),
    "callback": by_callback,
    "callback that waits": by_callback_that_waits,
    "await": by_await,
    "result": lambda c, future: future.result(),
    "exception": lambda c, future: future.exception(),
    "c.wait": lambda c, future: c.wait([future]),
    "c.get": lambda c, future: c.get(future),
}


class Waits(threading.Thread):
    """One way to wait for one Future."""

    def __init__(self, c: Cluster, future: Any, way: str) -> None:
        super().__init__(daemon=True)
        self.c, self.future, self.way = c, future, way
        self.problem: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            WAYS[self.way](self.c, self.future)
        except (*GONE, concurrent.futures.CancelledError, asyncio.CancelledError):
            pass
        except BaseException as error:
            self.problem = error

    def check(self, deadline: float) -> None:
        self.join(max(0.0, deadline - time.monotonic()))
        assert not self.is_alive(), f"{self.way} still waits for {self.future!r}"
        assert self.problem is None, (self.way, self.problem)
        # A call of the waiter's own may have shown it first that the cluster is gone.
        concurrent.futures.wait([self.future], max(0.0, deadline - time.monotonic()))
        assert self.future.done(), self.way


class Sends(threading.Thread):
    """Sends one thing after another until that raises, and leaves somebody waiting for each."""

    def __init__(
        self, c: Cluster, seed: int, most: int, ways: Sequence[str] = (), pause_s: float = 0.0
    ) -> None:
        super().__init__(daemon=True)
        self.pause_s = pause_s
        self.c, self.most, self.ways = c, most, ways or list(WAYS)
        self.dice = random.Random(seed)
        self.waits: list[Waits] = []
        self.problem: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            while True:
                time.sleep(self.pause_s)
                future = self.dice.choice(KINDS)(self.c, self.dice)
                if len(self.waits) < self.most:
                    self.waits.append(Waits(self.c, future, self.dice.choice(self.ways)))
                elif self.dice.random() < 0.5:
                    future.result()
                else:
                    concurrent.futures.wait([future])
        except (*GONE, concurrent.futures.CancelledError):
            pass
        except BaseException as error:
            self.problem = error

    def check(self, deadline: float) -> None:
        self.join(max(0.0, deadline - time.monotonic()))
        assert not self.is_alive(), "a thread that sends still waits"
        assert self.problem is None, self.problem
        for one in self.waits:
            one.check(deadline)


def short(c: Any, dice: random.Random) -> Any:
    return c.options(retries=20).submit(abs, -1)


def with_arguments(c: Any, dice: random.Random) -> Any:
    return c.submit(np.sum, c.put(np.ones(dice.choice((10, 30_000)))))


def chain(c: Any, dice: random.Random) -> Any:
    return c.submit(add, c.submit(add, 1), 1)


def copies(c: Any, dice: random.Random) -> Any:
    return c.broadcast(c.submit(abs, -1))


def gathered(c: Any, dice: random.Random) -> Any:
    return c.gather([c.submit(abs, -1), c.put(np.ones(30_000))])


KINDS = (short, with_arguments, chain, copies, gathered)


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
    waits = [Waits(c, future, way) for future in before[:-2] for way in WAYS]
    waits += [Waits(c, before[-2], way) for way in ("wait", "callback", "result", "exception")]
    waits += [Waits(c, before[-1], way) for way in WAYS]
    sends = [Sends(c, seed, 20) for seed in range(THREADS)]
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
        sends = [Sends(c, seed, 10, ways) for seed in range(at, at + THREADS)]
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
        sends = [Sends(c, dice.randrange(1 << 30), 10) for _ in range(THREADS)]
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
    assert descriptors() <= before


def test_kills_under_load() -> None:
    kills(8)


@pytest.mark.soak
@pytest.mark.timeout(5 * ROUNDS + 60)
def test_many_kills_under_load() -> None:
    kills(ROUNDS)
