"""One suite of behaviour for the standard library's pool and for what replaces it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import threading
from concurrent.futures import (
    FIRST_COMPLETED,
    FIRST_EXCEPTION,
    BrokenExecutor,
    CancelledError,
    Executor,
    ProcessPoolExecutor,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from tests.support.functions import add, fail
from tests.support.waiting import PATIENCE_S, eventually, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONTEXT = multiprocessing.get_context("spawn")
STANDARD = functools.partial(ProcessPoolExecutor, mp_context=CONTEXT)


@pytest.fixture(params=["standard", "Executor", "executor"], scope="module")
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Executor]]:
    if request.param == "executor":
        with hoplite_mp.Cluster(workers=1, memory="128MiB") as cluster:
            yield cluster.executor
    else:
        yield STANDARD if request.param == "standard" else hoplite_mp.Executor


@pytest.fixture(scope="module")
def pool(
    make: Callable[..., Executor], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Executor]:
    folder = tmp_path_factory.mktemp("pool")
    with make(2) as made:
        for name in "ab":  # the standard pool starts its workers when they are needed
            made.submit(announce_and_wait, str(folder / name), str(folder / "go"))
        eventually(lambda: len(list(folder.iterdir())) == 2)
        (folder / "go").touch()
        yield made


def announce_and_wait(path: str, go: str) -> None:
    Path(path).touch()
    wait_for(go)


def double_in_place(array: Any) -> Any:
    array *= 2
    return array


def raise_odd() -> None:
    raise ValueError("odd", {"more": [1, 2]})


def set_up(name: str, value: str) -> None:
    os.environ[name] = value


def look_up(name: str) -> str:
    return os.environ[name]


def refuse() -> None:
    raise RuntimeError("not today")


def pid_of(_: Any = None) -> int:
    return os.getpid()


def test_results(pool: Executor) -> None:
    assert pool.submit(pow, 2, 8).result(PATIENCE_S) == 256
    assert pool.submit(int, "ff", base=16).result(PATIENCE_S) == 255
    assert pool.submit(pid_of).result(PATIENCE_S) != os.getpid()
    array = np.arange(100_000.0)
    doubled = pool.submit(double_in_place, array).result(PATIENCE_S)
    assert (doubled == np.arange(100_000.0) * 2).all()
    assert array[1] == 1


def test_exceptions(pool: Executor) -> None:
    future = pool.submit(raise_odd)
    error = future.exception(PATIENCE_S)
    assert type(error) is ValueError
    assert error.args == ("odd", {"more": [1, 2]})
    assert "raise_odd" in str(error.__cause__)
    with pytest.raises(ValueError, match="odd"):
        future.result()
    assert pool.submit(abs, -1).exception(PATIENCE_S) is None


def test_waiting(pool: Executor, tmp_path: Path) -> None:
    go = tmp_path / "go"
    slow = pool.submit(wait_for, str(go))
    quick = pool.submit(abs, -1)
    done, not_done = concurrent.futures.wait([slow, quick], PATIENCE_S, FIRST_COMPLETED)
    assert (done, not_done) == ({quick}, {slow})
    failing = pool.submit(fail)
    done, not_done = concurrent.futures.wait([slow, failing], PATIENCE_S, FIRST_EXCEPTION)
    assert (done, not_done) == ({failing}, {slow})
    done, not_done = concurrent.futures.wait([slow, quick], timeout=0)
    assert (done, not_done) == ({quick}, {slow})
    with pytest.raises(TimeoutError):
        slow.result(0)
    with pytest.raises(TimeoutError):
        slow.exception(0.01)
    iterator = concurrent.futures.as_completed([slow, quick, failing], 0.05)
    assert {next(iterator), next(iterator)} == {quick, failing}
    with pytest.raises(TimeoutError):
        next(iterator)
    go.touch()
    done, not_done = concurrent.futures.wait([slow, quick, failing], PATIENCE_S)
    assert (len(done), not_done) == (3, set())


def test_states(pool: Executor, tmp_path: Path) -> None:
    go = tmp_path / "go"
    future = pool.submit(wait_for, str(go))
    eventually(future.running)
    assert not future.done()
    assert not future.cancelled()
    assert not future.cancel()
    go.touch()
    assert future.result(PATIENCE_S)
    assert (future.running(), future.done(), future.cancelled()) == (False, True, False)
    assert not future.cancel()


def test_callbacks(pool: Executor, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    came = threading.Semaphore(0)

    def note(future: Any) -> None:
        seen.append(future)
        came.release()

    def wrong(future: Any) -> None:
        raise KeyError("in a callback")

    future = pool.submit(abs, -1)
    future.add_done_callback(wrong)
    future.add_done_callback(note)
    assert came.acquire(timeout=PATIENCE_S)
    future.add_done_callback(note)
    assert came.acquire(timeout=PATIENCE_S)
    assert seen == [future, future]
    assert "in a callback" in caplog.text
    chained = threading.Event()
    pool.submit(abs, -1).add_done_callback(
        lambda f: pool.submit(add, f.result(), 1).add_done_callback(
            lambda g: chained.set() if g.result() == 2 else None
        )
    )
    assert chained.wait(PATIENCE_S)


def test_asyncio(pool: Executor) -> None:
    async def several() -> list[Any]:
        loop = asyncio.get_running_loop()
        found: list[Any] = await asyncio.gather(
            loop.run_in_executor(pool, abs, -1),
            asyncio.wrap_future(pool.submit(abs, -2)),
            loop.run_in_executor(pool, fail, "seen"),
            return_exceptions=True,
        )
        return found

    one, two, error = asyncio.run(several())
    assert (one, two) == (1, 2)
    assert isinstance(error, LookupError)


def test_maps(pool: Executor) -> None:
    assert list(pool.map(add, range(50), range(50))) == list(range(0, 100, 2))
    assert list(pool.map(add, range(50), range(9), chunksize=4)) == list(range(0, 18, 2))
    with pytest.raises(LookupError):
        list(pool.map(fail, ["a"]))
    with pytest.raises(ValueError, match="chunksize"):
        pool.map(abs, [1], chunksize=-1)


def test_results_after_the_end(make: Callable[..., Executor]) -> None:
    """What was done when the executor ended can still be asked for."""
    with make(1) as own:
        small, large = own.submit(abs, -1), own.submit(np.ones, 200_000)
        bad, mapped = own.submit(raise_odd), own.map(abs, range(-3, 0))
    assert small.result() == 1
    assert large.result().sum() == 200_000
    assert bad.exception().args[0] == "odd"  # type: ignore[union-attr]
    assert list(mapped) == [3, 2, 1]
    assert concurrent.futures.wait([small, large, bad], 5).not_done == set()
    with pytest.raises(RuntimeError):
        own.submit(abs, 1)
    with pytest.raises(RuntimeError):
        own.map(abs, [1])
    own.shutdown()


def test_shutting_down_cancels_what_waits(make: Callable[..., Executor], tmp_path: Path) -> None:
    go = tmp_path / "go"
    own = make(1)
    running = own.submit(wait_for, str(go))
    eventually(running.running)
    queued = [own.submit(abs, -n) for n in range(20)]
    own.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(RuntimeError):
        own.submit(abs, 1)
    assert not running.done()
    go.touch()
    assert running.result(PATIENCE_S)
    own.shutdown(wait=True)
    assert queued[-1].cancelled()
    with pytest.raises(CancelledError):
        queued[-1].result(PATIENCE_S)


def test_not_waiting_for_the_end_loses_nothing(
    make: Callable[..., Executor], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    own = make(1)
    futures = [own.submit(wait_for, str(go)), own.submit(add, 1, 1)]
    own.shutdown(wait=False)
    assert not futures[1].done()
    go.touch()
    assert futures[1].result(PATIENCE_S) == 2
    own.shutdown()
    assert futures[0].done()


def test_an_initializer(make: Callable[..., Executor]) -> None:
    with make(1, initializer=set_up, initargs=("PREPARED", "yes")) as own:
        assert own.submit(look_up, "PREPARED").result(PATIENCE_S) == "yes"
    with pytest.raises(TypeError):
        make(1, initializer=3)
    with pytest.raises(ValueError, match="max_workers"):
        make(0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_initializer_that_fails_breaks_the_executor(make: Callable[..., Executor]) -> None:
    with make(2, initializer=refuse) as own:
        futures = []
        with contextlib.suppress(BrokenExecutor):  # the standard library refuses at once
            futures += [own.submit(abs, -n) for n in range(4)]
        for future in futures:
            with pytest.raises(BrokenExecutor):
                future.result(PATIENCE_S)
        with pytest.raises(BrokenExecutor):
            own.submit(abs, 1).result(PATIENCE_S)


def test_workers_that_end_after_some_tasks(make: Callable[..., Executor]) -> None:
    with make(1, max_tasks_per_child=2) as own:
        pids = [own.submit(pid_of).result(PATIENCE_S) for _ in range(6)]
    assert len(set(pids)) == 3
    assert pids[0] == pids[1]
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="max_tasks_per_child"):
            make(1, max_tasks_per_child=wrong)
