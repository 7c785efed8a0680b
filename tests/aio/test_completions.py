"""`as_completed`: Futures and refs, more of them while it runs, in threads and event loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp import Cluster, HopliteTimeoutError, as_completed
from tests.support.functions import after, echo, raise_error
from tests.support.waiting import PATIENCE_S, Gate, Run, eventually, file_exists_in_time

if TYPE_CHECKING:
    from pathlib import Path


def test_futures_and_refs_in_the_order_of_their_ends(cluster: Cluster, tmp_path: Path) -> None:
    gates = [tmp_path / f"{i}" for i in range(2)]
    ready, failed = cluster.put(1), cluster.submit(raise_error, KeyError())
    assert isinstance(failed.exception(), KeyError)
    late = [cluster.submit(file_exists_in_time, gate) for gate in gates]
    seen: list[Any] = []
    items = [late[0], late[1].ref, ready, failed, ready]
    for item in as_completed(items, PATIENCE_S):
        seen.append(item)
        if len(seen) == 2:
            gates[1].touch()
        if len(seen) == 3:
            gates[0].touch()
    assert set(seen[:2]) == {ready, failed}
    assert seen[2:] == [late[1].ref, late[0]]


def test_more_from_other_threads(cluster: Cluster, tmp_path: Path) -> None:
    first = cluster.submit(echo, 0, 0.05)
    running = as_completed(first, PATIENCE_S)
    seen: list[int] = []

    def add() -> None:
        running.add(cluster.submit(echo, 1))
        running.add([cluster.submit(echo, i, 0.001).ref for i in range(2, 50)])

    threads = [threading.Thread(target=add) for _ in range(3)]
    gate = Gate(tmp_path)
    running.add(last := cluster.submit(after, gate, -1))

    def open_when_all_are_added() -> None:
        for thread in threads:
            thread.join()
        gate.open()

    for thread in threads:
        thread.start()
    opening = threading.Thread(target=open_when_all_are_added)
    opening.start()
    for item in running:
        seen.append(cluster.get(item))
    opening.join()
    assert last.done()
    assert sorted(seen) == sorted([-1, 0, *(3 * list(range(1, 50)))])
    running.add(cluster.put(5))  # it goes on, as a queue would
    assert [cluster.get(one) for one in running] == [5]


def test_growing_from_its_own_results(cluster: Cluster) -> None:
    running = as_completed([cluster.submit(echo, 5)], PATIENCE_S)
    total = 0
    for future in running:
        left = future.result()
        total += 1
        if left:
            running.add([cluster.submit(echo, left - 1) for _ in range(2)])
    assert total == 63


def test_each_goes_to_one_of_several_threads(cluster: Cluster) -> None:
    running = as_completed([cluster.submit(echo, i, 0.001) for i in range(100)])
    seen: list[int] = []

    def take() -> None:
        seen.extend(future.result() for future in running)

    threads = [threading.Thread(target=take, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "it waits although nothing is left"
    assert sorted(seen) == list(range(100))


def test_async_for(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        running = as_completed([cluster.submit(echo, i, 0.002) for i in range(20)])
        seen = []
        async for item in running:
            seen.append(await item)
            if len(seen) == 5:
                running.add(cluster.submit(echo, 100, 0.05).ref)
        assert sorted(seen) == [*range(20), 100]
        async for _ in as_completed([]):
            raise AssertionError
        mixed = as_completed([cluster.submit(echo, i, 0.01) for i in range(40)])
        found: list[int] = []

        async def take() -> None:
            async for item in mixed:
                found.append(item.result())

        await asyncio.gather(take(), take(), take())
        assert sorted(found) == list(range(40))

    run(main())


def test_a_cancelled_step_loses_nothing(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        running = as_completed([cluster.submit(echo, i, 0.03) for i in range(6)])
        seen: list[int] = []
        while len(seen) < 6:
            try:
                seen.append((await asyncio.wait_for(anext(running), 0.01)).result())
            except TimeoutError:
                continue
        assert sorted(seen) == list(range(6))

    run(main())


def test_deadlines(cluster: Cluster, run: Run, tmp_path: Path) -> None:
    never = cluster.submit(file_exists_in_time, tmp_path / "go")
    ready = cluster.put(1)
    running = as_completed([never, ready], 0.1)
    assert next(running) == ready
    with pytest.raises(HopliteTimeoutError, match=r"^1 \(of 2\) futures unfinished"):
        next(running)
    polled = as_completed([never, ready], 0)
    assert next(polled) == ready
    with pytest.raises(HopliteTimeoutError):
        next(polled)

    async def main() -> None:
        later = as_completed([never, ready], 0.1)
        assert await anext(later) == ready
        with pytest.raises(HopliteTimeoutError, match=r"^1 \(of 2\) futures unfinished"):
            await anext(later)

    run(main())
    (tmp_path / "go").touch()
    never.result()


@pytest.mark.parametrize("wrong", [3, "abc", [3], [None]])
def test_what_is_neither(cluster: Cluster, wrong: Any) -> None:
    with pytest.raises(TypeError, match="expected a Future or a ref"):
        as_completed(wrong)
    with pytest.raises(TypeError, match="expected a Future or a ref"):
        as_completed([]).add(wrong)
    with pytest.raises(TypeError, match="timeout"):
        as_completed([], "1")  # type: ignore[arg-type]


def test_futures_of_other_executors(cluster: Cluster) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        items = [
            threads.submit(echo, 1, 0.05),
            cluster.submit(echo, 2, 0.02),
            cluster.put(3),
        ]
        assert set(as_completed(items, PATIENCE_S)) == set(items)


def test_dropped_it_keeps_nothing(cluster: Cluster, tmp_path: Path) -> None:
    future: Any = cluster.submit(file_exists_in_time, tmp_path / "go")
    running = as_completed([future, cluster.put(1)])
    weak = weakref.ref(running)
    next(running)
    del running
    gc.collect()
    assert weak() is None
    (tmp_path / "go").touch()
    assert future.result()


def gather(n: int) -> list[int]:
    """In a worker."""
    cluster = hoplite_mp.current()
    futures = [cluster.submit(echo, i) for i in range(n)]
    return sorted(future.result() for future in as_completed(futures, PATIENCE_S))


def test_a_worker_that_iterates_is_stood_in_for() -> None:
    with hoplite_mp.Cluster(1) as cluster:
        assert cluster.submit(gather, 5).result(PATIENCE_S) == list(range(5))


def test_what_others_own(cluster: Cluster) -> None:
    """Refs whose results another process of the cluster writes are announced, too."""
    refs = cluster.submit(sent, 10).result(PATIENCE_S)
    done = list(as_completed(refs, PATIENCE_S))
    assert sorted(cluster.get(done)) == list(range(10))


def sent(n: int) -> list[Any]:
    cluster = hoplite_mp.current()
    return [cluster.submit(echo, i, 0.02).ref for i in range(n)]


def test_the_end_of_the_cluster_ends_it() -> None:
    cluster = hoplite_mp.Cluster(1)
    futures = [cluster.submit(time.sleep, 60) for _ in range(3)]
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.extend(as_completed(futures)))
    thread.start()
    eventually(lambda: len(cluster._runtime.submitter.waits) == 3, "the thread waits")
    cluster._abort()
    thread.join(PATIENCE_S)
    assert set(seen) == set(futures)


def test_in_a_forked_child(cluster: Cluster, tmp_path: Path) -> None:
    future = cluster.submit(file_exists_in_time, tmp_path / "go")
    running = as_completed([future])
    child = os.fork()
    if not child:
        code = 1
        try:
            next(running)
        except hoplite_mp.ClosedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    (tmp_path / "go").touch()
    assert next(running) is future
