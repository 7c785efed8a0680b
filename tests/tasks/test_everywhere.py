"""Cluster.run: once in every worker, between two of its tasks."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import HopliteTimeoutError
from tests.support.waiting import eventually, wait_for

if TYPE_CHECKING:
    from hoplite_mp import Cluster


def note(folder: str, value: Any = None) -> Any:
    """Leaves one file more at each call in a process."""
    made = len(list(Path(folder).glob(f"{os.getpid()}-*")))
    Path(folder, f"{os.getpid()}-{made}").touch()
    return value


def calls_in(folder: Path) -> dict[str, int]:
    names = [one.name.partition("-")[0] for one in folder.iterdir()]
    return {name: names.count(name) for name in names}


def test_every_worker_runs_it_once_and_is_named(cluster: Cluster, tmp_path: Path) -> None:
    pids = cluster.run(os.getpid)
    assert len(pids) == len(set(pids.values())) == 2
    assert all(name.endswith("@h0") and name[:-3].isdecimal() for name in pids)
    assert cluster.run(note, str(tmp_path), 7) == dict.fromkeys(pids, 7)
    assert calls_in(tmp_path) == {str(pid): 1 for pid in pids.values()}


def test_arguments_are_those_of_submit(cluster: Cluster) -> None:
    ref = cluster.put(np.arange(1 << 16))
    slow = cluster.submit(lambda: time.sleep(0.05) or 3)

    def total(array: Any, number: int, kept: Any) -> tuple[float, int, bool]:
        return float(array.sum()), number, isinstance(kept, hoplite_mp.ObjectRef)

    found = cluster.run(total, ref, slow, hoplite_mp.by_ref(ref))
    assert list(found.values()) == [(float(sum(range(1 << 16))), 3, True)] * 2


def test_a_busy_worker_runs_it_after_its_task(cluster: Cluster, tmp_path: Path) -> None:
    busy = cluster.submit(wait_for, tmp_path / "go")
    eventually(busy.running)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(cluster.run(note, str(tmp_path / "log"))))
    (tmp_path / "log").mkdir()
    thread.start()
    eventually(lambda: len(calls_in(tmp_path / "log")) == 1)  # the idle one
    assert not found
    (tmp_path / "go").touch()
    thread.join()
    assert len(found[0]) == 2
    assert set(calls_in(tmp_path / "log").values()) == {1}


def test_after_a_timeout_it_does_not_run_any_more(cluster: Cluster, tmp_path: Path) -> None:
    busy = cluster.submit(wait_for, tmp_path / "go")
    eventually(busy.running)
    for timeout in (0.2, 1.0, 5.0, 12.0):
        log = tmp_path / f"log of {timeout}"
        log.mkdir()
        with pytest.raises(HopliteTimeoutError, match=r"workers have not run note\(\)") as caught:
            cluster.run(note, str(log), timeout=timeout)
        if "1 of 2 workers have not run note() within" in str(caught.value):
            break  # on a busy machine the idle worker may need longer
    else:
        pytest.fail("the idle worker has not run it")
    (tmp_path / "go").touch()
    busy.result()
    assert len(cluster.run(os.getpid)) == 2  # after whatever would have come before
    assert list(calls_in(log).values()) == [1]


def test_the_exception_comes_after_all_have_run(cluster: Cluster, tmp_path: Path) -> None:
    def fail(folder: str) -> None:
        note(folder)
        raise LookupError("the reason")

    with pytest.raises(LookupError, match="the reason") as caught:
        cluster.run(fail, str(tmp_path))
    assert "in worker " in str(caught.value.__cause__)
    assert list(calls_in(tmp_path).values()) == [1, 1]


def test_workers_that_die_are_left_out() -> None:
    with hoplite_mp.Cluster(2) as cluster:
        before = cluster.run(os.getpid)
        first = next(iter(before.values()))

        def end(pid: int) -> int:
            if os.getpid() == pid:
                os._exit(3)
            return os.getpid()

        found = cluster.run(end, first)
        assert list(found.values()) == [pid for pid in before.values() if pid != first]
        eventually(lambda: len(cluster.run(os.getpid)) == 2)  # the next one has come


def test_a_worker_that_dies_before_its_turn_is_left_out(tmp_path: Path) -> None:
    def end_when(path: str) -> None:
        wait_for(path)
        os._exit(3)

    with hoplite_mp.Cluster(2) as cluster:
        busy = cluster.options(retries=0).submit(end_when, str(tmp_path / "go"))
        eventually(busy.running)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(cluster.run(os.getpid)))
        thread.start()
        time.sleep(0.05)  # it may begin before or after: both must come to the same end
        (tmp_path / "go").touch()
        thread.join()
        assert len(found[0]) in (1, 2)
        assert isinstance(busy.exception(), hoplite_mp.WorkerLostError)


def test_a_function_that_raises_what_a_loss_raises_is_no_loss(cluster: Cluster) -> None:
    def fail() -> None:
        raise hoplite_mp.WorkerLostError("of another cluster")

    with pytest.raises(hoplite_mp.WorkerLostError, match="of another cluster"):
        cluster.run(fail)


def test_called_inside_a_task(cluster: Cluster) -> None:
    def inside() -> tuple[int, dict[str, int]]:
        return os.getpid(), hoplite_mp.current().run(os.getpid)

    pid, found = cluster.submit(inside).result()
    assert pid in found.values()
    assert len(set(found.values())) == len(found) >= 2


def test_tasks_that_call_it_at_the_same_time_take_part_in_each_others(
    cluster: Cluster, tmp_path: Path
) -> None:
    def inside(folder: str, number: int) -> int:
        Path(folder, str(number)).touch()
        eventually(lambda: len(list(Path(folder).iterdir())) == 2)  # both have begun
        return len(hoplite_mp.current().run(os.getpid))

    counts = [cluster.submit(inside, str(tmp_path), number) for number in range(2)]
    assert all(one.result() >= 2 for one in counts)


def test_where_its_worker_could_not_take_part_it_is_an_error(cluster: Cluster) -> None:
    async def in_loop() -> None:
        hoplite_mp.current().run(os.getpid)

    def in_thread() -> None:
        caught: list[BaseException] = []

        def call() -> None:
            try:
                hoplite_mp.current().run(os.getpid)
            except RuntimeError as error:
                caught.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        raise caught[0]

    for fn in (in_loop, in_thread):
        with pytest.raises(RuntimeError, match="in a plain task's own thread"):
            cluster.submit(fn).result()


def test_async_functions_and_calls_beside_async_tasks(cluster: Cluster, tmp_path: Path) -> None:
    async def both() -> int:
        await asyncio.sleep(0)
        return os.getpid()

    async def wait(path: str) -> None:
        while not os.path.exists(path):
            await asyncio.sleep(0.01)

    pids = cluster.run(os.getpid)
    assert set(pids.items()) <= set(cluster.run(both).items())
    waiting = [
        cluster.options(concurrency=4).submit(wait, str(tmp_path / f"go{i}")) for i in range(4)
    ]
    eventually(lambda: all(one.running() for one in waiting))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(cluster.run(os.getpid)))
    thread.start()
    for i in range(4):  # each makes room for another one, and none is taken before the call
        (tmp_path / f"go{i}").touch()
    thread.join()
    assert len(found[0]) >= 2


def test_mistakes(cluster: Cluster) -> None:
    def numbers() -> Any:
        yield 1

    with pytest.raises(TypeError, match="a function, not "):
        cluster.run(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="generator"):
        cluster.run(numbers)
    with pytest.raises(ValueError, match="no node 'h9'"):
        cluster.run(os.getpid, node="h9")
    with pytest.raises(TypeError, match="pickle"):
        cluster.run(print, threading.Lock())
    with hoplite_mp.Cluster(0) as none:
        assert none.run(os.getpid) == {}
    with pytest.raises(hoplite_mp.ClosedError):
        none.run(os.getpid)


def test_it_leaves_nothing_behind(cluster: Cluster) -> None:
    for _ in range(300):  # more than there are pools
        cluster.run(abs, -1)
    assert cluster.submit(abs, -1).result() == 1
