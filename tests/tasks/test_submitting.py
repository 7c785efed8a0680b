"""Arguments, dependencies, nesting, map, options, executors."""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ObjectRef, by_ref
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster

PATIENCE_S = 30.0


def kinds(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def add(a: int, b: int) -> int:
    return a + b


def fibonacci(n: int) -> int:
    if n < 2:
        return n
    cluster = hoplite_mp.current()
    a, b = cluster.submit(fibonacci, n - 1), cluster.submit(fibonacci, n - 2)
    return a.result() + b.result()


def boom() -> int:
    raise ArithmeticError("the first one")


def pid_after(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def test_refs_become_values_where_arguments_are(cluster: Cluster) -> None:
    ref, future = cluster.put(7), cluster.submit(abs, -8)
    args, kwargs = cluster.submit(
        kinds, ref, [future, (ref, {"k": ref})], {ref}, x=future, y=by_ref([ref])
    ).result()
    assert args == (7, [8, (7, {"k": 7})], {7})
    assert kwargs["x"] == 8
    assert kwargs["y"] == [ref]
    assert isinstance(kwargs["y"][0], ObjectRef)

    class Holder:
        def __init__(self, inside: Any) -> None:
            self.inside = inside

    held = cluster.submit(lambda holder: holder.inside, Holder(ref)).result()
    assert held == ref


def test_a_chain_of_dependent_tasks(cluster: Cluster) -> None:
    future: Any = 0
    for _ in range(50):
        future = cluster.submit(add, future, 1)
    assert future.result(PATIENCE_S) == 50


def test_a_failed_argument_is_the_failure(cluster: Cluster) -> None:
    end = cluster.submit(add, cluster.submit(add, cluster.submit(boom), 1), 1)
    with pytest.raises(ArithmeticError, match="the first one"):
        end.result(PATIENCE_S)


def test_a_dependency_that_another_process_makes(cluster: Cluster) -> None:
    def start(seconds: float) -> Any:
        return hoplite_mp.current().submit(pid_after, seconds).ref

    inner = cluster.submit(start, 0.2).result()
    assert cluster.submit(add, inner, 0).result(PATIENCE_S) > 0


def test_nesting_deeper_and_wider_than_the_workers(cluster: Cluster) -> None:
    assert cluster.submit(fibonacci, 11).result(PATIENCE_S) == 89


def test_map_as_the_builtin(cluster: Cluster) -> None:
    assert list(cluster.map(add, range(100), range(100))) == [2 * n for n in range(100)]
    assert list(cluster.map(abs, range(7), chunksize=3)) == list(range(7))
    assert sorted(cluster.map(abs, range(50), ordered=False)) == list(range(50))
    assert list(cluster.map(abs, [])) == []
    assert list(itertools.islice(cluster.map(abs, itertools.count(), buffersize=4), 10)) == list(
        range(10)
    )
    with pytest.raises(ValueError, match="chunksize"):
        cluster.map(abs, [1], chunksize=0)
    with pytest.raises(ArithmeticError):
        list(cluster.map(lambda n: boom(), range(3)))


def test_map_reads_no_further_than_buffersize(cluster: Cluster) -> None:
    read: list[int] = []

    def source() -> Any:
        for n in range(100):
            read.append(n)
            yield n

    results = cluster.map(abs, source(), buffersize=3)
    assert next(results) == 0
    assert len(read) <= 4
    results.close()  # type: ignore[attr-defined]


def test_map_times_out(cluster: Cluster, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with pytest.raises(hoplite_mp.HopliteTimeoutError):
        list(cluster.map(lambda i: i and wait_for(go), range(2), timeout=0.2, chunksize=1))
    go.touch()


def test_options(cluster: Cluster) -> None:
    with pytest.raises(TypeError, match="colour"):
        cluster.options(colour="red")
    with pytest.raises(ValueError, match="retries"):
        cluster.options(retries=-1)
    with pytest.raises(ValueError, match="timeout"):
        cluster.options(timeout=0)
    with pytest.raises(ValueError, match="no node"):
        cluster.options(node="h9")
    with pytest.raises(TypeError, match="detached=1: it must be True or False"):
        cluster.options(detached=1)
    with pytest.raises(ValueError, match="restarts=None"):
        cluster.options(restarts=None)
    with pytest.raises(ValueError, match=r"num=1\.5"):
        cluster.wait([cluster.put(1)], num=1.5)
    with pytest.raises(TypeError):
        cluster.empty(2.7)  # type: ignore[arg-type]
    view = cluster.options(node=cluster.nodes[0]).options(node="h0", name="mine")
    assert view.submit(add, 1, 2).result() == 3


def test_an_executor_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    def prepare(text: str) -> None:
        os.environ["HOPLITE_TEST_SETUP"] = text

    def look(_: int) -> tuple[str, int]:
        return os.environ["HOPLITE_TEST_SETUP"], os.getpid()

    with cluster.executor(
        2, initializer=prepare, initargs=("ready",), max_tasks_per_child=2
    ) as own:
        found = list(own.map(look, range(8), chunksize=1))
    assert {text for text, _ in found} == {"ready"}
    assert len({pid for _, pid in found}) >= 4
    with pytest.raises(hoplite_mp.ClosedError):
        own.submit(abs, 1)
    assert cluster.submit(abs, -1).result() == 1


def test_a_failing_initializer_breaks_its_pool_only(cluster: Cluster) -> None:
    from concurrent.futures import BrokenExecutor

    with cluster.executor(1, initializer=boom) as own:
        futures = [own.submit(abs, n) for n in range(3)]
        for future in futures:
            with pytest.raises(BrokenExecutor, match="initializer"):
                future.result(PATIENCE_S)
    assert cluster.submit(abs, -1).result() == 1


def test_spmd_gives_every_peer_a_rank(cluster: Cluster) -> None:
    def peer(rank: int, word: str) -> str:
        return f"{word}{rank}"

    assert [f.result(PATIENCE_S) for f in cluster.spmd(peer, 5, "r")] == [f"r{n}" for n in range(5)]
    with pytest.raises(ValueError, match="size"):
        cluster.spmd(peer, 0)


def test_current_is_found_in_tasks_and_threads_and_nowhere_else(cluster: Cluster) -> None:
    def inside() -> int:
        found: list[int] = []
        thread = threading.Thread(
            target=lambda: found.append(hoplite_mp.current().submit(add, 1, 2).result())
        )
        thread.start()
        thread.join()
        return found[0]

    assert cluster.submit(inside).result(PATIENCE_S) == 3
    assert hoplite_mp.current()._runtime is cluster._runtime


def test_many_threads_submit(cluster: Cluster) -> None:
    results: list[int] = []

    def work(base: int) -> None:
        for n in range(50):
            results.append(cluster.submit(add, base, n).result(PATIENCE_S))

    threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(results) == sorted(1000 * k + n for k in range(4) for n in range(50))


def test_more_tasks_than_the_ring_holds(cluster: Cluster) -> None:
    futures = [cluster.submit(add, n, 1) for n in range(10_000)]
    assert [future.result(PATIENCE_S) for future in futures] == [n + 1 for n in range(10_000)]


def test_large_arguments_and_results(cluster: Cluster) -> None:
    array = np.random.default_rng(0).random(500_000)
    result = cluster.submit(lambda a, k: a[::-1] * k, array, k=2).result()
    assert np.array_equal(result, array[::-1] * 2)


def test_the_number_of_a_closed_pool_is_given_to_another_one_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first one is just being closed, the other one has tasks already."""
    channel = cluster._runtime.channel
    first = cluster.executor(1)
    others: list[Any] = []
    futures: list[Any] = []

    def tell(ask: Any) -> None:
        channel_tell(ask)
        if type(ask).__name__ == "ClosePool" and not futures:
            futures.append(None)
            deadline = time.monotonic() + PATIENCE_S
            while not (others and others[-1]._pool == first._pool):
                assert time.monotonic() < deadline
                if others:
                    others.pop().shutdown()
                try:
                    others.append(cluster.executor(1))
                except ValueError:  # every number is that of a pool that is just ending
                    time.sleep(0.01)
            futures[:] = [others[-1].submit(time.sleep, 0.3), others[-1].submit(add, 1, 2)]

    channel_tell = channel.tell
    monkeypatch.setattr(channel, "tell", tell)
    first.shutdown()
    assert futures[1].result(PATIENCE_S) == 3
    for one in others:
        one.shutdown()
