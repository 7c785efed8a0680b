"""Nobody waits for ever: pools full of waiting tasks, full rings and stores, sudden ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from concurrent.futures import as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import _tasks
from hoplite_mp._client import launch
from tests.support.functions import add
from tests.support.waiting import PATIENCE_S, eventually, wait_for

if TYPE_CHECKING:
    from hoplite_mp import Cluster


def touch(path: str) -> None:
    Path(path).touch()


def chain(n: int) -> int:
    """Waits for a task that waits for another one."""
    cluster = hoplite_mp.current()
    first = cluster.submit(add, n, 1)
    return int(cluster.submit(add, first, 1).result())


def test_more_waiting_tasks_than_stand_ins() -> None:
    config = hoplite_mp.Config(blocked_workers_max=3)
    with hoplite_mp.Cluster(workers=1, config=config) as cluster:
        futures = [cluster.submit(chain, n) for n in range(40)]
        assert [future.result(PATIENCE_S) for future in futures] == [n + 2 for n in range(40)]


def test_a_tree_deeper_than_the_stand_ins() -> None:
    def tree(depth: int) -> int:
        if depth == 0:
            return 1
        cluster = hoplite_mp.current()
        parts = [cluster.submit(tree, depth - 1) for _ in range(2)]
        return int(cluster.submit(add, *parts).result())

    config = hoplite_mp.Config(blocked_workers_max=2)
    with hoplite_mp.Cluster(workers=1, config=config) as cluster:
        assert cluster.submit(tree, 5).result(PATIENCE_S) == 32


def test_no_more_stand_ins_is_an_error() -> None:
    """Tasks with a timeout need a worker of their own: they cannot run inside the waiting one."""

    def nest(depth: int) -> int:
        if depth == 0:
            return 0
        view = hoplite_mp.current().options(timeout=PATIENCE_S)
        return 1 + int(view.submit(nest, depth - 1).result())

    config = hoplite_mp.Config(blocked_workers_max=3)
    with hoplite_mp.Cluster(workers=1, config=config) as cluster:
        assert cluster.submit(nest, 3).result(PATIENCE_S) == 3
        with pytest.raises(hoplite_mp.WorkerLostError, match="blocked_workers_max=3"):
            cluster.submit(nest, 6).result(PATIENCE_S)
        assert cluster.submit(nest, 2).result(PATIENCE_S) == 2


def test_a_full_ring_of_one_pool_does_not_hold_back_another(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1) as cluster, cluster.executor(1) as other:
        first = cluster.submit(wait_for, str(tmp_path / "go"))
        rest = [cluster.submit(add, 1, 2) for _ in range(_tasks.QUEUED_HINTS_MAX + 200)]
        other.submit(touch, str(tmp_path / "go")).result(PATIENCE_S)
        first.result(PATIENCE_S)
        assert {future.result(PATIENCE_S) for future in rest} == {3}


def test_leaving_a_pool_by_an_exception_with_a_full_ring(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1) as cluster:
        with pytest.raises(ZeroDivisionError), cluster.executor(1) as pool:  # noqa: PT012
            pool.submit(wait_for, str(tmp_path / "go"))
            rest = [pool.submit(add, 1, 2) for _ in range(_tasks.QUEUED_HINTS_MAX + 200)]
            1 / 0  # noqa: B018
        # the first one may be cancelled before it runs: then the worker races with the rest
        assert all(task.cancelled() or task.result(PATIENCE_S) == 3 for task in rest)
        with cluster.executor(1) as pool:
            assert pool.submit(add, 1, 2).result(PATIENCE_S) == 3


def test_an_error_of_an_argument_finds_no_room() -> None:
    def fails() -> None:
        raise ValueError("x" * 400)

    config = hoplite_mp.Config(put_wait_s=0.2, span_bytes=1 << 20)
    with hoplite_mp.Cluster(workers=1, memory="8MiB", config=config) as cluster:
        failed = cluster.submit(fails)
        failed.exception(PATIENCE_S)
        hoard = []
        with contextlib.suppress(hoplite_mp.StoreFullError):
            while True:
                hoard.append(cluster.empty(60_000, "u1"))
        dependent = cluster.submit(add, failed, 1)
        called = threading.Event()
        dependent.add_done_callback(lambda _: called.set())
        with pytest.raises((ValueError, hoplite_mp.HopliteError)):
            dependent.result(PATIENCE_S)
        assert called.wait(PATIENCE_S)
        later = cluster.submit(add, 1, 2)
        assert list(as_completed([later], PATIENCE_S)) == [later]  # the collector lives


def test_callbacks_that_end_their_thread_end_nothing(cluster: Cluster) -> None:
    def ends(_: Any) -> None:
        raise SystemExit

    futures = [cluster.submit(add, n, 0) for n in range(4)]
    for future in futures:
        future.add_done_callback(ends)
    again = [cluster.submit(add, n, 0) for n in range(20)]
    assert {future.result() for future in as_completed(again, PATIENCE_S)} == set(range(20))


def test_what_an_interrupt_lost_is_found_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitter = cluster._runtime.submitter

    def interrupted(pending: object) -> None:
        raise KeyboardInterrupt

    was_interrupted = False
    while not was_interrupted:  # otherwise the collector has finished the task before
        future = cluster.submit(add, 1, 2)
        eventually(lambda oid=future._oid: submitter.tasks.done(oid))
        with monkeypatch.context() as patch:
            patch.setattr(submitter, "_finish", interrupted)
            try:
                submitter.drain()
            except KeyboardInterrupt:
                was_interrupted = True
    assert list(as_completed([future], PATIENCE_S)) == [future]


def test_cancel_while_arguments_arrive(cluster: Cluster) -> None:
    for _ in range(300):
        first = cluster.submit(add, 1, 2)
        second = cluster.submit(add, first, 1)
        second.add_done_callback(lambda _: None)
        second.cancel()
    last = cluster.submit(add, cluster.submit(add, 1, 2), 3)
    assert list(as_completed([last], PATIENCE_S)) == [last]


def test_a_thread_in_get_learns_that_the_cluster_has_closed(tmp_path: Path) -> None:
    def nested(go: str) -> Any:
        return hoplite_mp.current().submit(wait_for, go).ref

    cluster = hoplite_mp.Cluster(workers=2)
    inner = cluster.submit(nested, str(tmp_path / "go")).result()
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            cluster.get(inner)
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)  # most probably it waits by now; if not, it learns at once
    cluster.shutdown()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert isinstance(seen[0], (hoplite_mp.HopliteError, LookupError))


def test_results_after_the_end_when_some_are_on_disk(tmp_path: Path) -> None:
    config = hoplite_mp.Config(spill_bytes_max=26_000_000)
    with hoplite_mp.Cluster(1, memory="16MiB", spill_dir=tmp_path, config=config) as cluster:
        futures = [cluster.submit(np.full, 250_000, float(n)) for n in range(16)]
    read = 0
    for n, future in enumerate(futures):
        try:
            assert future.result().tolist() == [float(n)] * 250_000
            read += 1
        except hoplite_mp.ClosedError:
            pass
    assert read > 0


def test_a_result_with_refs_that_nobody_takes_does_not_hold_its_worker() -> None:
    def returns(ref: Any) -> Any:
        return [ref, b"x" * 100]

    with hoplite_mp.Cluster(workers=1) as cluster:
        ref = cluster.put(7)
        with cluster.executor(1, max_tasks_per_child=1) as pool:
            kept = [pool.submit(returns, hoplite_mp.by_ref(ref)) for _ in range(3)]
            eventually(lambda: all(future.done() for future in kept))
            cluster.delete(kept[0])
            assert pool.submit(add, 1, 2).result(PATIENCE_S) == 3
            assert cluster.get(kept[1].result()[0]) == 7


def test_a_task_is_blocked_while_any_of_its_threads_waits() -> None:
    def waits() -> list[bool]:
        runtime = hoplite_mp.current()._runtime
        words = []
        for change in (1, 1, -1, -1):
            runtime.submitter.waiting.count_blocked(change)
            words.append(runtime.tasks.is_blocked)
        return words

    with hoplite_mp.Cluster(workers=1) as cluster:
        assert cluster.submit(waits).result(PATIENCE_S) == [True, True, True, False]


def test_a_worker_that_leaves_finishes_what_it_has_sent(tmp_path: Path) -> None:
    def sends(go: str) -> Any:
        return hoplite_mp.current().submit(wait_for, go).ref

    with hoplite_mp.Cluster(1) as cluster, cluster.executor(1, max_tasks_per_child=1) as pool:
        ref = pool.submit(sends, str(tmp_path / "go")).result(PATIENCE_S)
        (tmp_path / "go").touch()
        assert pool.submit(add, 1, 2).result(PATIENCE_S) == 3
        assert cluster.get(ref, PATIENCE_S) == str(tmp_path / "go")


def test_a_forked_child_touches_nothing_through_a_future(cluster: Cluster) -> None:
    future = cluster.submit(np.ones, 100_000)
    eventually(future.done)
    child = os.fork()
    if child == 0:
        try:
            future.result()
        except hoplite_mp.ClosedError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert cluster._runtime.client.inspect(future._oid)["pins"] == []


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.options(name=5), TypeError),
        (lambda c: c.options(timeout="1"), TypeError),
        (lambda c: c.options(timeout=True), TypeError),
        (lambda c: c.empty(1 << 62), hoplite_mp.StoreFullError),
        (lambda c: c.empty((1 << 40, 1 << 40)), hoplite_mp.StoreFullError),
    ],
)
def test_mistakes_have_names(cluster: Cluster, call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call(cluster)


@pytest.mark.parametrize("timeout", [float("inf"), 1e12, 1e300])
def test_a_timeout_beyond_all_time_is_none(cluster: Cluster, timeout: float) -> None:
    assert cluster.options(timeout=timeout).submit(add, 1, 2).result(PATIENCE_S) == 3


def test_a_poll_in_a_worker_does_not_run_the_task() -> None:
    def polls() -> str:
        future = hoplite_mp.current().submit(time.sleep, 0.2)
        try:
            future.result(timeout=0)
        except TimeoutError:
            return "polled"
        return "ran"

    with hoplite_mp.Cluster(workers=1) as alone:
        assert alone.submit(polls).result(PATIENCE_S) == "polled"


def test_a_host_that_does_not_start_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's process stops before its first step: a host that had joined would not be given up
    for standing still, because there is no other one that could take its tasks."""

    def stopped(command: list[str], fds: list[int]) -> subprocess.Popen[bytes]:
        stops = ["sh", "-c", 'kill -STOP $$; exec "$@"', "stops", *command]
        return subprocess.Popen(stops, pass_fds=fds, stdin=subprocess.DEVNULL)

    monkeypatch.setattr(launch, "run_boot", stopped)
    cluster = hoplite_mp.Cluster(1, config=hoplite_mp.Config(start_timeout_s=1.0))
    try:
        with pytest.raises(hoplite_mp.NodeLostError):
            cluster.submit(add, 1, 2).result(PATIENCE_S)
    finally:
        cluster.shutdown(wait=False, cancel_futures=True)


def test_groups_in_the_driver_leave_no_thread() -> None:
    before = threading.active_count()
    with hoplite_mp.Cluster(workers=0) as cluster:
        group = cluster.group("alone", 2, 0)
        waiting = group.allreduce_async(1.0)
    with pytest.raises(hoplite_mp.HopliteError):
        waiting.result(PATIENCE_S)
    eventually(lambda: threading.active_count() <= before)
