"""`await future` and `await ref`: values, errors, cancellation, many at once, several loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

import hoplite_mp
from hoplite_mp import Cluster, ObjectLostError
from hoplite_mp._client.thread_futures import ThreadFuture
from tests.support.functions import echo, raise_error
from tests.support.waiting import PATIENCE_S, Run, file_exists_in_time, longest_pause

if TYPE_CHECKING:
    from pathlib import Path


def test_values_and_errors(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        assert await cluster.submit(echo, 1) == 1
        slow = cluster.submit(echo, [2], 0.1)
        assert await slow == [2]
        assert await slow == [2]
        assert await slow.ref == [2]
        ref = cluster.put(np.arange(1000))
        value: Any = await ref
        assert value.sum() == 499500
        assert not value.flags.writeable
        with pytest.raises(KeyError) as caught:
            await cluster.submit(raise_error, KeyError("x"))
        assert "in raise_error" in str(caught.value.__cause__)
        with pytest.raises(ValueError, match="y"):
            await cluster.submit(raise_error, ValueError("y")).ref
        cluster.delete(ref)
        with pytest.raises(ObjectLostError, match="deleted"):
            await ref
        total = await cluster.reduce([cluster.submit(echo, np.ones(3), 0.05) for _ in range(3)])
        assert total.tolist() == [3, 3, 3]
        assert await cluster.broadcast(cluster.put(1)) is None

    run(main())


@pytest.mark.parametrize("kind", ["at hand", "large", "of a thread"])
def test_its_error_does_not_keep_the_future(cluster: Cluster, run: Run, kind: str) -> None:
    """A reference cycle through the traceback would keep its objects until the next collection."""
    nbytes = 2 * cluster._runtime.config.await_read_bytes_max if kind == "large" else 1

    async def main() -> Any:
        future: Any = cluster.submit(raise_error, ValueError("z" * nbytes))
        if kind == "of a thread":
            future = ThreadFuture()
            future.set_exception(ValueError("z"))
        kept = weakref.ref(future)
        try:
            await future
        except ValueError:
            del future
        return kept

    gc.disable()
    try:
        kept = run(main())
        until = time.monotonic() + PATIENCE_S
        while kept() is not None:  # the thread that has settled it may not have let go of it yet
            assert time.monotonic() < until, gc.get_referrers(kept())
            time.sleep(0.001)
    finally:
        gc.enable()


def test_a_cancelled_await_cancels_nothing_else(cluster: Cluster, run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        for awaited in ("future", "ref"):
            path = tmp_path / f"{awaited}{id(run)}"
            future = cluster.submit(file_exists_in_time, path)
            others = [asyncio.ensure_future(future), asyncio.ensure_future(future.ref)]
            target: Any = future if awaited == "future" else future.ref
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(target, 0.05)
            waiting = asyncio.ensure_future(target)
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not future.cancelled()
            assert not future.done()
            path.touch()
            assert await asyncio.gather(*others) == [True, True]
            assert await future is True
        assert not cluster._runtime.submitter.waits

    run(main())


def test_who_awaits_a_cancelled_task(cluster: Cluster, run: Run, tmp_path: Path) -> None:
    """As asyncio.wrap_future: CancelledError of asyncio."""

    async def main() -> None:
        future = cluster.submit(file_exists_in_time, tmp_path / "never")
        waits = [asyncio.ensure_future(one) for one in (future, future.ref)]
        await asyncio.sleep(0.01)
        assert future.cancel(force=True)
        for one in waits:
            with pytest.raises(asyncio.CancelledError):
                await one
        for one in (future, future.ref):
            with pytest.raises(asyncio.CancelledError):
                await one  # type: ignore[misc]
        with pytest.raises(concurrent.futures.CancelledError):
            await cluster.submit(raise_error, concurrent.futures.CancelledError())

    run(main())


def test_asyncio_keeps_its_rule(cluster: Cluster, run: Run, tmp_path: Path) -> None:
    """What run_in_executor and wrap_future return hands its cancellation on."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(cluster, echo, 7) == 7
        with hoplite_mp.Executor(1) as executor:
            busy = loop.run_in_executor(executor, file_exists_in_time, tmp_path / f"go{id(run)}")
            queued = executor.submit(echo, 1)
            wrapped = asyncio.wrap_future(queued)
            await asyncio.sleep(0.05)
            wrapped.cancel()
            with pytest.raises(asyncio.CancelledError):
                await wrapped
            await asyncio.sleep(0)
            assert queued.cancelled()
            (tmp_path / f"go{id(run)}").touch()
            assert await busy is True

    run(main())


def test_many_at_once_need_no_threads(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        await cluster.submit(echo, 0, 0.01)  # the collector's thread is there from now on
        before = set(threading.enumerate())
        futures = [cluster.submit(echo, i, 0.001) for i in range(300)]
        tasks = [asyncio.ensure_future(f) for f in futures]
        tasks += [asyncio.ensure_future(f.ref) for f in futures]
        await asyncio.sleep(0)
        assert set(threading.enumerate()) <= before
        assert await asyncio.gather(*tasks) == [*range(300), *range(300)]
        assert set(threading.enumerate()) <= before

    run(main())


def test_the_loop_is_woken_once_for_what_ends_together(
    cluster: Cluster, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "gate"

    async def main() -> None:
        loop = asyncio.get_running_loop()
        submitter = cluster._runtime.submitter
        gate = cluster.submit(file_exists_in_time, path)
        many = [cluster.submit(raise_error, gate) for _ in range(200)]  # cancelled with the gate
        tasks = [asyncio.ensure_future(f) for f in many]
        await asyncio.sleep(0.05)
        wakes = 0
        real = loop.call_soon_threadsafe

        class Counted:
            def __getattr__(self, name: str) -> Any:
                return getattr(loop, name)

            def call_soon_threadsafe(self, *args: Any) -> Any:
                nonlocal wakes
                wakes += 1
                return real(*args)

        from hoplite_mp._client import awaiting

        inbox = awaiting.inbox_here()
        inbox.loop = Counted()  # type: ignore[assignment]
        for future in many:
            submitter.tasks.cancel(future._oid, False)  # nobody looks after them yet
        submitter.drain()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in found)
        assert 1 <= wakes <= 5
        path.touch()
        await gate

    run(main())


def test_task_group(cluster: Cluster, run: Run, tmp_path: Path) -> None:
    """One that fails cancels the other awaits, and those cancel nothing."""

    async def value(future: Any) -> Any:
        return await future

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(value(cluster.submit(echo, i))) for i in range(10)]
        assert [task.result() for task in tasks] == list(range(10))
        path = tmp_path / f"go{id(run)}"
        slow = cluster.submit(file_exists_in_time, path)
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
            async with asyncio.TaskGroup() as group:
                group.create_task(value(slow))
                group.create_task(value(cluster.submit(raise_error, OSError("z"))))
        assert caught.group_contains(OSError, match="z")
        assert not slow.done()
        path.touch()
        assert await slow is True

    run(main())


def test_loops_in_several_threads(cluster: Cluster, run: Run) -> None:
    futures = [cluster.submit(echo, i, 0.01) for i in range(50)]
    found: list[Any] = []

    def loop() -> None:
        async def all_of_them() -> list[Any]:
            return list(await asyncio.gather(*futures, *(f.ref for f in futures)))

        found.append(run(all_of_them()))

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[*range(50), *range(50)]] * 4


def test_a_loop_that_is_closed_meanwhile(
    cluster: Cluster, run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "go"
    future = cluster.submit(file_exists_in_time, path)

    async def begin() -> None:
        for one in (future, future.ref):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(one), 0.05)

    run(begin())  # what the shields left waits in a loop that is closed
    gc.collect()
    path.touch()
    assert future.result(PATIENCE_S) is True
    run(asyncio.wait_for(future.ref, PATIENCE_S))
    assert not cluster._runtime.submitter.waits
    assert capfd.readouterr() == ("", "")


def test_without_a_loop_that_ends_in_order(cluster: Cluster, tmp_path: Path) -> None:
    """Closed while a waiter stands there: nobody is disturbed, nothing is kept."""
    path = tmp_path / "go"
    future = cluster.submit(file_exists_in_time, path)
    loop = asyncio.new_event_loop()
    coroutine = future.__await__()
    loop.call_soon(lambda: next(coroutine))
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    path.touch()
    assert future.result(PATIENCE_S) is True
    coroutine.close()
    assert cluster.submit(echo, 3).result() == 3


def test_values_that_take_long_to_read_do_not_block_the_loop(run: Run) -> None:
    """What was moved to disk is read in a thread, and what is large."""

    async def main(c: Cluster) -> None:
        futures = [
            c.options(copy=True).submit(np.full, 2 << 20, i) for i in range(6)
        ]  # 16 MiB each
        done = asyncio.Event()
        pause = asyncio.ensure_future(longest_pause(done))
        for i, future in enumerate(futures):
            found = await future
            assert found[0] == i
            assert found.flags.writeable
            assert (await future.ref)[-1] == i
        done.set()
        reading = [t for t in threading.enumerate() if t.name.startswith("hoplite_mp await")]
        assert 1 <= len(reading) <= c._runtime.config.await_threads_max
        await pause

    with hoplite_mp.Cluster(workers=1, memory="64MiB") as c:
        run(main(c))


def nested(n: int) -> int:
    """Awaits tasks of its own, in a worker."""
    cluster = hoplite_mp.current()

    async def main() -> int:
        found = await asyncio.gather(*(cluster.submit(echo, i) for i in range(n)))
        return sum(found) + await cluster.submit(echo, 1).ref

    return asyncio.run(main())


def test_a_worker_that_awaits_is_stood_in_for(run: Run) -> None:
    async def main() -> None:
        async with hoplite_mp.connect(1) as c:
            assert await c.submit(nested, 4) == 7

    run(main())


def kill_node_of(c: Cluster) -> None:
    host: Any = c._host
    for child in psutil.Process(host.process.pid).children():
        if child.name() == "hoplite node":
            child.kill()
            return
    raise AssertionError("there is no node")


def test_the_end_of_the_cluster_ends_every_await(run: Run) -> None:
    async def main() -> None:
        c = await hoplite_mp.connect(1)
        assert await c.submit(echo, 4) == 4
        pending = c.submit(echo, 1, 60)
        waits = [asyncio.ensure_future(one) for one in (pending, pending.ref)]
        await asyncio.sleep(0.05)
        kill_node_of(c)
        for one in waits:
            with pytest.raises(hoplite_mp.NodeLostError):
                await one
        with pytest.raises(hoplite_mp.NodeLostError):
            await pending.ref
        await asyncio.to_thread(c.shutdown)
        with pytest.raises(hoplite_mp.ClosedError):
            await c.put(1)  # type: ignore[misc]

    async def closed() -> None:
        c = await hoplite_mp.connect(1)
        future, ref = c.submit(echo, 5), c.put(1)
        await asyncio.to_thread(c.shutdown)
        assert await future == 5
        with pytest.raises(hoplite_mp.ClosedError):
            await ref

    run(closed())
    logging.getLogger("hoplite_mp").disabled = True  # it says that the node was lost
    try:
        run(main())
    finally:
        logging.getLogger("hoplite_mp").disabled = False


def test_importing_brings_no_event_loop() -> None:
    code = "import sys, hoplite_mp; print({'asyncio', 'tqdm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def stop(value: int) -> None:
    raise StopIteration(value)


def test_stop_iteration_of_a_task_is_a_runtime_error_where_it_is_awaited(
    cluster: Cluster, run: Run
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        local: ThreadFuture[None] = ThreadFuture()
        local.set_running_or_notify_cancel()
        threading.Thread(target=local.fill, args=(stop, (3,), {})).start()
        for awaited in (
            cluster.submit(stop, 3),
            cluster.submit(stop, 3).ref,
            asyncio.wrap_future(cluster.submit(stop, 3)),
            loop.run_in_executor(cluster, stop, 3),
            local,
            asyncio.wrap_future(local),
        ):
            with pytest.raises(RuntimeError, match="StopIteration") as caught:
                async with asyncio.timeout(PATIENCE_S):
                    await awaited
            stopped: Any = caught.value.__cause__
            assert (type(stopped), stopped.value) == (StopIteration, 3)
        with pytest.raises(StopIteration):
            cluster.submit(stop, 3).result()
        # Values, errors and cancellation go through as before.
        assert await asyncio.wrap_future(cluster.submit(echo, 1)) == 1
        with pytest.raises(KeyError):
            await asyncio.wrap_future(cluster.submit(raise_error, KeyError(1)))

    run(main())
