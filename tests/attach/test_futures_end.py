"""Every Future of a driver ends when the node that it takes part through is gone: killed, ended in
order, or asked to leave by another driver."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp._api.cluster import ApartCluster
from tests.support.functions import add
from tests.support.future_threads import ENDED_S, THREADS, WAYS, SendingThread, WaitingThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.clusters import LoopbackCluster

LOST = (hoplite_mp.NodeLostError, hoplite_mp.ManagerLostError)


def waits_for_all(c: Any) -> list[Any]:
    sleeps = c.submit(time.sleep, 600)
    futures = [sleeps, c.submit(time.sleep, 600), c.submit(add, sleeps, 1), c.broadcast(sleeps)]
    return [WaitingThread(c, future, way) for future in futures for way in WAYS]


def check(c: Any, waits: list[Any]) -> None:
    deadline = time.monotonic() + ENDED_S
    for one in waits:
        one.check(deadline)
    for call in (c.submit, c.options(name="x").submit):
        with pytest.raises(LOST):
            call(abs, -1)
    c.shutdown()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_node_ends(make_up: Callable[..., LoopbackCluster], number: int) -> None:
    up = make_up()
    c = up.attach()
    waits = waits_for_all(c)
    waits += [SendingThread(c, seed, 10) for seed in range(THREADS)]
    time.sleep(0.1)
    up.end(number)
    check(c, waits)


def test_another_driver_lets_the_node_leave(own_up: LoopbackCluster) -> None:
    c = ApartCluster(address=own_up.address)
    with own_up.attach() as other:
        here = other.nodes[-1]
        # It waits for tasks that this driver has sent, so there are moments without any.
        waits: list[Any] = [
            SendingThread(c, seed, 10, ("wait", "callback"), 0.1) for seed in range(2)
        ]
        barrier = c.group("alone", 2, 0).barrier_async()
        waits += [WaitingThread(c, barrier, way) for way in ("wait", "callback", "result")]
        leaving = threading.Thread(target=other.remove_node, args=(here,))
        leaving.start()
        leaving.join(ENDED_S)
        assert not leaving.is_alive()
        check(c, waits)
        assert other.submit(abs, -1).result(ENDED_S) == 1
