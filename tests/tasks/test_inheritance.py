"""Initializers of executors get locks, queues, pipes and shared values of multiprocessing."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import pytest

import hoplite_mp
from tests.support.processes import at_rest
from tests.support.waiting import PATIENCE_S, eventually

SPAWN = multiprocessing.get_context("spawn")
given: dict[str, Any] = {}


def take(*things: Any) -> None:
    names = ("lock", "value", "array", "queue", "event", "connection", "condition", "barrier")
    given.update(zip(names, things, strict=False))


def count(times: int) -> int:
    for _ in range(times):
        with given["lock"]:
            before = given["value"].value
            given["value"].value = before + 1
            given["array"][0] += 2
    return os.getpid()


def put(number: int) -> None:
    given["queue"].put(number)


def wait_for_event() -> bool:
    return bool(given["event"].wait(PATIENCE_S))


def send(text: str) -> None:
    given["connection"].send((os.getpid(), text))


def test_all_of_them_also_in_workers_that_are_started_later() -> None:
    lock, queue, event = SPAWN.Lock(), SPAWN.Queue(), SPAWN.Event()
    value, array = SPAWN.Value("q", 0), SPAWN.Array("d", 3)
    mine, theirs = SPAWN.Pipe()
    before = len(os.listdir("/proc/self/fd"))
    args = (lock, value, array, queue, event, theirs)
    with hoplite_mp.Executor(2, initializer=take, initargs=args) as pool:
        killed: set[int] = set()
        for turn in range(2):
            pids = set(pool.map(count, [50] * 8, chunksize=1))
            assert not pids & killed, "these are new"
            assert value.value == array[0] / 2 == 400 * (turn + 1)
            list(pool.map(put, range(20)))
            assert sorted(queue.get(timeout=PATIENCE_S) for _ in range(20)) == list(range(20))
            # The thread that has sent the last one may still hold the queue's lock, which would be
            # left locked if its process was killed; all have come, so nobody takes it any more.
            assert queue._wlock.acquire(timeout=PATIENCE_S)
            queue._wlock.release()
            waits = pool.submit(wait_for_event)
            event.set()
            assert waits.result(PATIENCE_S)
            event.clear()
            pool.submit(send, "a text").result(PATIENCE_S)
            pid, text = mine.recv()
            assert (pid != os.getpid(), text) == (True, "a text")
            for one in pids:
                os.kill(one, signal.SIGKILL)
            killed |= pids
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    queue.close()
    queue.join_thread()


def test_what_the_node_holds_for_a_pool_goes_with_it() -> None:
    import psutil

    with hoplite_mp.Cluster(0, memory="64MiB") as cluster:
        host = cluster._host
        assert host is not None
        at_rest(cluster)
        family = psutil.Process(host.process.pid).children()
        (node,) = [one for one in family if one.name() == "hoplite node"]
        supervisor = psutil.Process(host.process.pid)

        def held() -> tuple[int, int]:
            return node.num_fds(), supervisor.num_fds()

        before = held()
        pipes = [SPAWN.Pipe() for _ in range(10)]
        with cluster.executor(2, initializer=take, initargs=(SPAWN.Lock(), pipes)) as pool:
            pool.submit(os.getpid).result(PATIENCE_S)
            assert held()[0] >= before[0] + 20
        eventually(lambda: held() == before)


def test_what_only_a_forked_process_can_use_is_refused() -> None:
    fork = multiprocessing.get_context("fork")
    with pytest.raises(TypeError, match=r"get_context\('spawn'\)"):
        hoplite_mp.Executor(1, initializer=take, initargs=(fork.Lock(),))


def test_too_many() -> None:
    pipes = [SPAWN.Pipe() for _ in range(101)]
    with pytest.raises(ValueError, match="202 file descriptors: at most 200"):
        hoplite_mp.Executor(1, initializer=take, initargs=(pipes,))


def test_elsewhere_they_are_refused() -> None:
    """As an argument of a task: which worker will have it is not known before it runs."""
    cluster = hoplite_mp.Cluster(1, memory="64MiB")
    with cluster, pytest.raises((TypeError, RuntimeError), match="inheritance"):
        cluster.submit(take, SPAWN.Lock()).result(PATIENCE_S)
