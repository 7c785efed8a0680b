"""Threads that send tasks, and wait for Futures in every way, until the cluster is gone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import hoplite_mp
from tests.support.functions import add

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp import Cluster


THREADS = 5
ENDED_S = 60.0
"""For all that waits to end once the host is gone, on a loaded machine."""


GONE = (
    hoplite_mp.NodeLostError,
    hoplite_mp.ManagerLostError,
    hoplite_mp.ClosedError,
    hoplite_mp.ObjectLostError,
)


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


class WaitingThread(threading.Thread):
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


class SendingThread(threading.Thread):
    """Sends one thing after another until that raises, and leaves somebody waiting for each."""

    def __init__(
        self, c: Cluster, seed: int, most: int, ways: Sequence[str] = (), pause_s: float = 0.0
    ) -> None:
        super().__init__(daemon=True)
        self.pause_s = pause_s
        self.c, self.most, self.ways = c, most, ways or list(WAYS)
        self.dice = random.Random(seed)
        self.waits: list[WaitingThread] = []
        self.problem: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            while True:
                time.sleep(self.pause_s)
                future = self.dice.choice(KINDS)(self.c, self.dice)
                if len(self.waits) < self.most:
                    self.waits.append(WaitingThread(self.c, future, self.dice.choice(self.ways)))
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
