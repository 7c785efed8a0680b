"""What users of the standard library's pool expect where things go wrong, or have just ended."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import pickle
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from tests.support.functions import add
from tests.support.processes import run_program
from tests.support.waiting import PATIENCE_S, eventually, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp import Cluster


class Refusal(Exception):
    """With arguments that no text can take the place of."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(code, words)


class PicklingFails:
    def __reduce__(self) -> Any:
        raise pickle.PicklingError("not this one")


class RefusesInItsWords:
    def __reduce__(self) -> Any:
        raise Refusal(7, "of its own")


class ExitsWhenRead:
    def __reduce__(self) -> Any:
        return sys.exit, (3,)


class TouchesAFile:
    """When it goes: one for each process that had it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.weight = np.ones(100_000)

    def __del__(self) -> None:
        Path(f"{self.path}-{os.getpid()}").touch()

    def method(self) -> int:
        return 1


UNPICKLABLE: list[tuple[Callable[[], Any], type[BaseException]]] = [
    (PicklingFails, pickle.PicklingError),
    (RefusesInItsWords, Refusal),
    (threading.Lock, TypeError),
]


@pytest.fixture(scope="module")
def executor() -> Iterator[hoplite_mp.Executor]:
    with hoplite_mp.Executor(2) as made:
        yield made


def call(function: Callable[[], Any]) -> Any:
    return function()


def carried(value: Any) -> Callable[[], Any]:
    return lambda: value


# -- what does not pickle ----------------------------------------------------------------------


@pytest.mark.parametrize(("make", "kind"), UNPICKLABLE)
def test_arguments_that_do_not_pickle_fail_the_future(
    executor: hoplite_mp.Executor, make: Callable[[], Any], kind: type[BaseException]
) -> None:
    called: list[Any] = []
    for future in (executor.submit(id, make()), executor.submit(carried(make()))):
        future.add_done_callback(called.append)
        assert future.done()
        assert not future.cancelled()
        assert not future.cancel()
        error = future.exception(PATIENCE_S)
        assert type(error) is kind
        with pytest.raises(kind):
            future.result(PATIENCE_S)
        assert concurrent.futures.wait([future], 0).done == {future}
        with pytest.raises(kind):
            asyncio.run(_awaited(future))
        assert type(executor.submit(abs, future).exception(PATIENCE_S)) is kind
    assert len(called) == 2
    with pytest.raises(kind):
        list(executor.map(id, [make() for _ in range(9)], chunksize=3))
    assert executor.submit(add, 1, 2).result(PATIENCE_S) == 3


async def _awaited(future: Any) -> Any:
    return await future


def test_a_cluster_says_so_at_the_call(cluster: Cluster) -> None:
    with pytest.raises(TypeError, match="cannot pickle argument 0 of type 'PicklingFails'"):
        cluster.submit(id, PicklingFails())
    with pytest.raises(TypeError, match="cannot pickle the function"):
        cluster.submit(carried(PicklingFails()))


@pytest.mark.parametrize(("make", "kind"), UNPICKLABLE)
def test_results_that_do_not_pickle_raise_what_pickle_raised(
    executor: hoplite_mp.Executor,
    cluster: Cluster,
    make: Callable[[], Any],
    kind: type[BaseException],
) -> None:
    for pool in (executor, cluster):
        future = pool.submit(call, make)
        with pytest.raises(kind, match=r"the result of call\(\), a .*, does not pickle"):
            future.result(PATIENCE_S)
        assert type(future.exception()) is kind


# -- the end of a task -------------------------------------------------------------------------


def test_a_task_that_exits_is_an_exception_like_others(executor: hoplite_mp.Executor) -> None:
    for future in (executor.submit(sys.exit, 3), executor.submit(call, ExitsWhenRead)):
        for _ in range(2):
            error = future.exception(PATIENCE_S)
            assert type(error) is SystemExit
            assert error.code == 3
        with pytest.raises(SystemExit):
            future.result()


def test_what_a_function_is_bound_to_goes_with_its_owner(cluster: Cluster, tmp_path: Path) -> None:
    bound = TouchesAFile(str(tmp_path / "gone"))
    watched = weakref.ref(bound)
    cluster.submit(bound.method)  # nobody keeps the Future, nobody submits again
    del bound
    gc.collect()
    assert watched() is None


def test_the_last_function_and_what_it_holds_go_soon(tmp_path: Path) -> None:
    """In the worker and in the store, although nobody asks for anything any more."""

    def of_kind(number: int, bound: TouchesAFile) -> Callable[[], int]:
        if number == 0:
            return bound.method
        if number == 1:
            return lambda: bound.method()
        return lambda given=bound: given.method()  # type: ignore[misc]

    with hoplite_mp.Cluster(workers=1, memory="64MiB") as cluster:
        for number in range(3):
            cluster.submit(of_kind(number, TouchesAFile(str(tmp_path / str(number)))))
            gc.collect()
            eventually(lambda n=number: len(list(tmp_path.glob(f"{n}-*"))) == 2)
        eventually(lambda: cluster.stats()["objects"] == 0)


# -- cancelling --------------------------------------------------------------------------------


def test_what_needs_a_cancelled_task_is_cancelled_for_everybody(
    cluster: Cluster, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    busy = [cluster.submit(wait_for, str(go)) for _ in range(2)]
    eventually(lambda: all(one.running() for one in busy))
    first = cluster.submit(abs, -1)
    second = cluster.submit(abs, first)
    third = cluster.submit(add, 1, second.ref)
    told: list[Any] = []
    second.add_done_callback(told.append)
    assert first.cancel()
    done, _ = concurrent.futures.wait([second, third], PATIENCE_S)
    assert done == {second, third}
    for future in (second, third):
        assert future.cancelled()
        assert future.done()
        assert not future.running()
        assert future.cancel()
        for ask in (future.result, future.exception):
            with pytest.raises(CancelledError):
                ask(PATIENCE_S)
        with pytest.raises(CancelledError):
            cluster.get(future.ref)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(_awaited(future))
        assert future in list(concurrent.futures.as_completed([future], PATIENCE_S))
    assert told == [second]
    late = cluster.submit(abs, first.ref)  # it has been cancelled before
    assert concurrent.futures.wait([late], PATIENCE_S).done
    assert late.cancelled()
    go.touch()
    assert [one.result(PATIENCE_S) for one in busy] == [str(go)] * 2


def test_what_needs_a_running_task_that_is_cancelled(cluster: Cluster) -> None:
    running = cluster.submit(time.sleep, 60)
    eventually(running.running)
    needs = cluster.submit(abs, running)
    assert running.cancel(force=True)
    with pytest.raises(CancelledError):
        needs.result(PATIENCE_S)
    assert needs.cancelled()


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("kind", ["Executor", "executor", "with an initializer"])
def test_a_second_shutdown_cancels_what_waits(
    cluster: Cluster, tmp_path: Path, kind: str, wait: bool
) -> None:
    make: dict[str, Callable[[], Any]] = {
        "Executor": lambda: hoplite_mp.Executor(1),
        "executor": lambda: cluster.executor(1),
        "with an initializer": lambda: hoplite_mp.Executor(1, abs, (1,)),
    }
    own, go = make[kind](), tmp_path / "go"
    running = own.submit(wait_for, str(go))
    eventually(running.running)
    queued = [own.submit(time.sleep, 60) for _ in range(3)]
    own.shutdown(wait=False)
    own.shutdown(wait=False, cancel_futures=True)
    assert all(future.cancelled() for future in queued)
    assert not running.done()
    go.touch()
    own.shutdown(wait=wait, cancel_futures=True)
    assert running.result(PATIENCE_S) == str(go)
    own.shutdown()


# -- pools -------------------------------------------------------------------------------------


def refuse() -> None:
    raise ValueError("not with me")


@pytest.mark.parametrize("own", [True, False])
def test_a_pool_whose_initializer_failed_refuses_at_once(cluster: Cluster, own: bool) -> None:
    made = hoplite_mp.Executor(2, refuse) if own else cluster.executor(2, initializer=refuse)
    with made:
        try:
            first = made.submit(abs, -1)
        except BrokenProcessPool:
            pass  # it was quicker
        else:
            with pytest.raises(BrokenProcessPool, match="initializer raised ValueError: not with"):
                first.result(PATIENCE_S)
        for _ in range(2):
            with pytest.raises(BrokenProcessPool, match="initializer raised ValueError") as caught:
                made.submit(add, 1, 2)
            assert "refuse" in str(caught.value.__cause__)
        with pytest.raises(BrokenProcessPool):
            made.map(abs, [1])


@pytest.mark.parametrize("number", [0, -1, 201, 1.5])
def test_numbers_of_workers_are_refused_in_the_standard_library_s_words(
    cluster: Cluster, number: Any
) -> None:
    for make in (hoplite_mp.Executor, cluster.executor):
        with pytest.raises(ValueError, match=r"^max_workers must be greater than 0 .*, not "):
            make(number)


def test_an_executor_that_was_shut_down_refuses_in_the_standard_library_s_words() -> None:
    own = hoplite_mp.Executor(1)
    own.shutdown()
    with pytest.raises(RuntimeError, match=r"^cannot schedule new futures after shutdown"):
        own.submit(abs, 1)


def test_current_with_an_executor_open_stays_the_users_cluster() -> None:
    with hoplite_mp.Cluster(workers=1) as cluster, hoplite_mp.Executor(1) as pool:
        assert hoplite_mp.current() is cluster
        assert pool.submit(abs, -1).result(PATIENCE_S) == 1
        queue: hoplite_mp.Queue[int] = hoplite_mp.Queue()
        cluster.submit(queue.put, 7).result(PATIENCE_S)
        assert queue.get(timeout=PATIENCE_S) == 7
        assert pickle.loads(pickle.dumps(cluster)) is cluster


def own_and_current() -> tuple[bool, int]:
    here = hoplite_mp.current()
    with hoplite_mp.Executor(1) as pool:
        pool.submit(abs, -1).result(PATIENCE_S)
        return hoplite_mp.current() is here, here.submit(abs, -2).result(PATIENCE_S)


def test_current_with_an_executor_open_in_a_task_stays_the_tasks_cluster() -> None:
    with hoplite_mp.Cluster(workers=1) as cluster:
        assert cluster.submit(own_and_current).result(PATIENCE_S) == (True, 2)


def test_current_with_only_an_executor_open_is_a_closed_error() -> None:
    out = run_program(
        """
        with hoplite_mp.Executor(1) as pool:
            try:
                hoplite_mp.current()
            except hoplite_mp.ClosedError as error:
                print(error)
            print(pool.submit(lambda: len(hoplite_mp.current().nodes)).result(30))
        """
    )
    assert out.startswith("no cluster is open")
    assert out.endswith("\n1\n")
