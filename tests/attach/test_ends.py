"""Ends: of a driver, orderly or not, and of the node that it is attached to."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

import hoplite_mp
from tests.support.functions import after
from tests.support.waiting import Gate, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.clusters import LoopbackCluster

QUICK_S = 60.0  # far less than what the tasks sleep here

VICTIM = """
held = [c.put(np.full(300_000, float(i))) for i in range(5)]
small = [c.put(list(range(i))) for i in range(500)]
views = [c.get(ref) for ref in held]
room = c.empty(400_000)
running = [c.submit(time.sleep, 600) for _ in range(2)]
while not all(future.running() for future in running):
    time.sleep(0.01)
queued = [c.submit(abs, i) for i in range(200)]
needs = c.submit(np.sum, running[0])
pool = c.executor(1)
print(pool.submit(os.getpid).result(), flush=True)
"""
FORKED = """
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
"""


def counts(c: hoplite_mp.Cluster) -> tuple[int, int]:
    """(objects, bytes in use) of the cluster."""
    found = c.stats()
    return found["objects"], found["bytes_used"]


def no_more(now: tuple[int, int], before: tuple[int, int]) -> bool:
    return all(a <= b for a, b in zip(now, before, strict=True))


@pytest.mark.parametrize("more", ["", FORKED], ids=["alone", "with a forked child"])
def test_a_driver_is_killed(own_up: LoopbackCluster, more: str) -> None:
    """The child has its sockets, too, and lives on."""
    with own_up.attach() as c:
        mine = c.put(np.arange(100_000.0))
        view = c.get(mine)
        assert c.submit(abs, -1).result() == 1
        before = counts(c)
        victim = own_up.driver(VICTIM + more + "\ntime.sleep(600)")
        assert victim.stdout is not None
        pid = int(victim.stdout.readline())
        assert counts(c)[0] > before[0] + 500
        assert counts(c)[1] > before[1] + 5 * 300_000 * 8
        victim.kill()
        # Its tasks held both workers.
        assert c.submit(abs, -2).result(QUICK_S) == 2
        eventually(
            lambda: no_more(counts(c), before), f"{counts(c)} objects and bytes, not {before}"
        )
        eventually(lambda: not alive(pid), "the worker of its executor has not ended")
        assert np.array_equal(view, np.arange(100_000.0))
        assert list(c.map(abs, range(-50, 0))) == list(range(50, 0, -1))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_arrays_are_read_after_the_end(own_up: LoopbackCluster) -> None:
    """Their memory is not another's as long as they are there, and comes back when they go."""
    with own_up.attach() as other:
        assert other.submit(abs, -1).result() == 1
        before = counts(other)[1]
        with own_up.attach() as c:
            views = [c.get(c.put(np.full(1_000_000, float(i)))) for i in range(4)]
            views += [c.submit(np.full, 1_000_000, 4.0).result(), c.empty(1_000_000)]
            views[-1][:] = 5.0
            unread = c.submit(np.full, 1_000_000, 6.0)
        views.append(unread.result())
        del unread, c
        for _ in range(20):  # of a store of 256 MiB
            other.get(other.put(np.full(2_000_000, -1.0)))
        for i, view in enumerate(views):
            assert view[0] == i
            assert (view == i).all()
        assert counts(other)[1] >= before + 7 * 8_000_000
        del view, views
        gc.collect()
        eventually(lambda: counts(other)[1] <= before + (1 << 21), "the memory has not come back")


def test_an_exception_ends_the_own_tasks_only(own_up: LoopbackCluster) -> None:
    with own_up.attach() as other:
        gate = Gate(own_up.folder.parent)
        theirs = other.submit(after, gate, "theirs")
        mine = []
        try:
            with own_up.attach() as c:
                mine = [c.submit(time.sleep, 600) for _ in range(4)]
                eventually(lambda: any(future.running() for future in mine), "no task runs")
                raise KeyError("mine")
        except KeyError:
            pass
        assert all(future.cancelled() for future in mine)
        gate.open()
        assert theirs.result(QUICK_S) == "theirs"
        assert other.submit(abs, -1).result(QUICK_S) == 1


def test_threads_are_in_calls_while_it_leaves(own_up: LoopbackCluster) -> None:
    """Their calls end, with an error, and what others have is not written to."""

    def busy(c: hoplite_mp.Cluster, ended: list[Exception]) -> None:
        try:
            while True:
                ref = c.put(np.full(200_000, -1.0))
                c.get([c.put(b"-" * 5000), ref, c.submit(abs, -1).ref])
        except (hoplite_mp.HopliteError, RuntimeError, CancelledError) as error:
            ended.append(error)

    with own_up.attach() as other:
        for i in range(15):
            c = own_up.attach()
            ended: list[Exception] = []
            threads = [threading.Thread(target=busy, args=(c, ended)) for _ in range(3)]
            for thread in threads:
                thread.start()
            mine = [other.put(np.full(100_000, float(k))) for k in range(10)]
            small = [other.put(bytes([k]) * 5000) for k in range(100)]
            c.shutdown(cancel_futures=True)
            mine += [other.put(np.full(100_000, float(k))) for k in range(10, 20)]
            small += [other.put(bytes([k]) * 5000) for k in range(100, 200)]
            for thread in threads:
                thread.join(QUICK_S)
                assert not thread.is_alive()
            assert len(ended) == 3
            del c, ended
            assert all((other.get(ref) == k).all() for k, ref in enumerate(mine)), i
            assert all(other.get(ref) == bytes([k]) * 5000 for k, ref in enumerate(small)), i
            assert other.submit(np.sum, mine[3]).result(QUICK_S) == 300_000


def test_many_drivers_come_and_go(own_up: LoopbackCluster) -> None:
    """More than there are slots for clients."""
    with own_up.attach() as other:
        assert other.submit(abs, -1).result() == 1
        before = counts(other)
        for i in range(260):
            c = own_up.attach()
            ref = c.put(np.full(20_000, float(i)))
            if i % 10 == 0:
                assert c.submit(np.sum, ref).result() == 20_000 * i
            c.shutdown()
            del c, ref
        eventually(lambda: counts(other)[0] <= before[0] + 1, "objects stay")
        eventually(lambda: counts(other)[1] <= before[1] + (1 << 21), "memory stays")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_node_ends(make_up: Callable[..., LoopbackCluster], number: int) -> None:
    up = make_up()
    c = up.attach()
    view = c.get(c.put(np.arange(500_000.0)))
    futures = [c.submit(time.sleep, 600) for _ in range(3)]
    while not any(future.running() for future in futures):
        time.sleep(0.01)
    code = up.end(number)
    for future in futures:
        with pytest.raises(hoplite_mp.NodeLostError):
            future.result(QUICK_S)
    for call in (
        lambda: c.put(np.zeros(1_000_000)),
        lambda: c.submit(abs, -1).result(QUICK_S),
        lambda: c.nodes,
    ):
        with pytest.raises((hoplite_mp.NodeLostError, hoplite_mp.ClosedError)):
            call()
    c.shutdown()
    assert np.array_equal(view, np.arange(500_000.0))
    assert code == (0 if number == signal.SIGTERM else -9)
    assert len(up.names()) <= (number == signal.SIGKILL)  # it may have had time to tidy up


def test_a_program_that_listens_ends_first(make_up: Callable[..., LoopbackCluster]) -> None:
    """It gives the memory back that it needs no more, but others may be reading it."""
    make_up(1)
    with hoplite_mp.Cluster(1, listen="127.0.0.1:0", memory="64MiB") as c:
        again = hoplite_mp.Cluster(address=c.address)
        view = again.get(again.put(np.arange(500_000.0)))
        own = again.empty(500_000)
        own[:] = 7.0
    assert np.array_equal(view, np.arange(500_000.0))
    assert (own == 7.0).all()
    with pytest.raises((hoplite_mp.NodeLostError, hoplite_mp.ClosedError)):
        again.nodes  # noqa: B018
    again.shutdown()
    assert np.array_equal(view, np.arange(500_000.0))


def test_a_dead_ones_name(make_up: Callable[..., LoopbackCluster]) -> None:
    """Killed, it leaves its name behind; the next node removes it."""
    first = make_up(1)
    (stale,) = first.names()
    (node,) = [
        one
        for one in psutil.Process(first.process.pid).children(recursive=True)
        if one.name() == "hoplite node"
    ]
    node.kill()
    first.end(signal.SIGKILL)
    assert first.names() == [stale]
    second = make_up(1)
    assert stale not in second.names()
    with second.attach() as c:
        assert c.submit(abs, -1).result() == 1
    assert second.end() == 0
    assert second.names() == []
