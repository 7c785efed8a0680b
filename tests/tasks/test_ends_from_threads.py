"""Ends that two threads make, or that Ctrl-C interrupts; results that many threads take in."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import hoplite_mp
from hoplite_mp._client import closing
from tests.support.interruptions import no_collection
from tests.support.processes import at_rest, host_of
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from hoplite_mp import Cluster


def wait_for(path: str) -> str:
    from pathlib import Path

    while not Path(path).exists():
        time.sleep(0.01)
    return "done"


def test_unread_futures_of_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sorts out those that were read while the other adds some."""
    monkeypatch.setattr(closing, "UNREAD_MIN", 8)

    class Settled:
        _is_unread = True

    unread, kept = closing.Unread(), [[Settled() for _ in range(3000)] for _ in range(2)]

    def add(futures: list[Any]) -> None:
        for future in futures:
            unread.append(weakref.ref(future))
            if len(unread) > unread.limit:
                unread.sort_out()

    threads = [threading.Thread(target=add, args=(futures,)) for futures in kept]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(unread.futures()) == 6000
    for future in kept[0]:
        future._is_unread = False
    add([Settled()])
    unread.sort_out()
    assert len(unread.futures()) == 3000


@pytest.mark.parametrize("kind", ["cluster", "executor"])
def test_both_threads_wait_for_the_end(kind: str, tmp_path: Any) -> None:
    """A second `shutdown(wait=True)` returned while the first one was waiting for the tasks."""
    path = tmp_path / "go"
    c = hoplite_mp.Cluster(workers=1)
    executor = c.executor(1) if kind == "executor" else c
    future = executor.submit(wait_for, str(path))
    threads = [threading.Thread(target=executor.shutdown) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join(0.3)
    threads[1].join(0.3)
    assert [thread.is_alive() for thread in threads] == [True, True]
    assert not future.done()
    path.touch()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert future.result() == "done"
    c.shutdown()


def shut_down_interrupted(executor: Any) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    executor.shutdown()


def test_an_executor_whose_end_is_interrupted_leaves_no_process(
    cluster: Cluster, tmp_path: Any
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def workers() -> int:
        found = 0
        for one in host_of(cluster).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += one.name() == "hoplite worker"
        return found

    at_rest(cluster)
    before = workers()
    executor = cluster.executor(2)
    executor.submit(wait_for, str(tmp_path / "go"))
    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        with no_collection(), pytest.raises(KeyboardInterrupt):
            shut_down_interrupted(executor)
    finally:
        signal.signal(signal.SIGALRM, old)
    executor.shutdown()
    eventually(lambda: workers() == before)


def test_a_pool_that_is_shut_down_while_a_task_is_submitted() -> None:
    """Its hint queue may be another pool's by then, and the task would run there."""
    with hoplite_mp.Cluster(2, memory="64MiB") as cluster:
        first = cluster.executor(1)
        assert first.submit(abs, -1).result(PATIENCE_S) == 1
        submitter = cluster._runtime.submitter
        looked_up, others = submitter.queue, []

        def look_up(pool: int) -> int:
            queue = looked_up(pool)
            submitter.queue = looked_up
            thread = threading.Thread(target=first.shutdown)
            thread.start()
            thread.join(PATIENCE_S)
            others.append(cluster.executor(1, env={"OTHER": "1"}))
            assert others[0].submit(abs, -2).result(PATIENCE_S) == 2
            return queue

        submitter.queue = look_up
        with pytest.raises(hoplite_mp.ClosedError, match="after shutdown"):
            first.submit(os.environ.get, "OTHER")
        assert others[0].submit(abs, -3).result(PATIENCE_S) == 3
        eventually(lambda: submitter.drain() or not submitter.pending)
