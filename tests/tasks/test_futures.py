"""A Future is the standard library's, whoever looks at it; cancel and timeouts do what they say."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp._client.futures import Future
from tests.support.waiting import PATIENCE_S, eventually, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import Cluster


def announce_and_sleep(path: str, seconds: float) -> None:
    Path(path).touch()
    time.sleep(seconds)


def announce_and_block(path: str) -> None:
    """Nothing interrupts it, as if it were blocked in C: only a kill ends it."""
    import signal

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # blocked here, another thread would be given it
    Path(path).touch()
    time.sleep(60)


def fail() -> None:
    raise KeyError("the reason")


def test_result_and_exception(cluster: Cluster) -> None:
    assert cluster.submit(pow, 2, 10).result() == 1024
    future = cluster.submit(fail)
    with pytest.raises(KeyError, match="the reason") as caught:
        future.result()
    assert "in fail" in str(caught.value.__cause__)
    assert future.exception() is caught.value
    assert isinstance(future, concurrent.futures.Future)
    assert future.done()
    assert not future.cancelled()


def test_timeouts_poll_and_end(cluster: Cluster, tmp_path: Path) -> None:
    future = cluster.submit(wait_for, str(tmp_path / "go"))
    for timeout in (0, 0.02):
        with pytest.raises(hoplite_mp.HopliteTimeoutError):
            future.result(timeout)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0)
    (tmp_path / "go").touch()
    assert future.result(PATIENCE_S).endswith("go")


def test_the_standard_functions(cluster: Cluster) -> None:
    futures = [cluster.submit(abs, -n) for n in range(20)]
    done, pending = concurrent.futures.wait(futures, timeout=PATIENCE_S)
    assert len(done) == 20
    assert not pending
    more = {cluster.submit(abs, -n): n for n in range(20)}
    seen = [more[future] for future in concurrent.futures.as_completed(more, PATIENCE_S)]
    assert sorted(seen) == list(range(20))
    again = [cluster.submit(abs, -n) for n in range(5)]
    assert sorted(f.result() for f in hoplite_mp.as_completed(again, PATIENCE_S)) == [0, 1, 2, 3, 4]


def test_as_completed_times_out(cluster: Cluster, tmp_path: Path) -> None:
    future = cluster.submit(wait_for, str(tmp_path / "go"))
    with pytest.raises(hoplite_mp.HopliteTimeoutError):
        list(hoplite_mp.as_completed([future], 0.05))
    (tmp_path / "go").touch()
    future.result(PATIENCE_S)


def test_callbacks_and_asyncio(cluster: Cluster) -> None:
    called = threading.Event()
    cluster.submit(abs, -1).add_done_callback(lambda future: called.set())
    assert called.wait(PATIENCE_S)
    late: list[int] = []
    future = cluster.submit(abs, -2)
    future.result()
    eventually(future.done)
    future.add_done_callback(lambda f: late.append(f.result()))
    eventually(lambda: late == [2])

    async def several() -> list[int]:
        first = await cluster.submit(abs, -3)
        rest = await asyncio.gather(*(asyncio.wrap_future(cluster.submit(abs, -n)) for n in (4, 5)))
        return [first, *rest]

    assert asyncio.run(several()) == [3, 4, 5]


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, ValueError])
def test_callback_that_raises_does_not_stop_the_others(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    def exits(_: object) -> None:
        raise kind("why")

    async def awaited() -> Any:
        future = cluster.submit(wait_for, str(tmp_path / "go"))
        future.add_done_callback(exits)
        waits = asyncio.wrap_future(future)
        (tmp_path / "go").touch()
        return await asyncio.wait_for(waits, PATIENCE_S)

    assert asyncio.run(awaited()).endswith("go")
    assert "exception calling callback for" in caplog.text
    assert kind.__name__ in caplog.text


def test_cancel_before_it_runs_and_not_after(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1) as cluster:
        running = cluster.submit(wait_for, str(tmp_path / "go"))
        queued = cluster.submit(abs, -1)
        needs = cluster.submit(abs, queued)
        eventually(running.running)
        assert queued.cancel()
        assert queued.cancelled()
        assert not running.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            queued.result()
        with pytest.raises(concurrent.futures.CancelledError):
            cluster.get(queued.ref)
        with pytest.raises(concurrent.futures.CancelledError):
            needs.result(PATIENCE_S)
        (tmp_path / "go").touch()
        assert running.result(PATIENCE_S)
        assert cluster.submit(abs, -7).result(PATIENCE_S) == 7


def test_force_interrupts_a_running_task(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(1, config=hoplite_mp.Config(cancel_grace_s=PATIENCE_S)) as cluster:
        future = cluster.submit(announce_and_sleep, str(tmp_path / "runs"), 60)
        eventually((tmp_path / "runs").exists)
        assert future.cancel(force=True)
        assert future.cancelled()
        with pytest.raises(concurrent.futures.CancelledError):
            future.result()
        done = [cluster.submit(abs, -n) for n in range(8)]
        assert [f.result(PATIENCE_S) for f in done] == list(range(8))
        assert cluster.stats()["workers_lost"] == 0  # it was interrupted, not killed


def test_force_kills_what_does_not_listen(tmp_path: Path) -> None:
    config = hoplite_mp.Config(cancel_grace_s=0.2)
    with hoplite_mp.Cluster(workers=1, config=config) as cluster:
        future = cluster.submit(announce_and_block, str(tmp_path / "runs"))
        eventually((tmp_path / "runs").exists)
        assert future.cancel(force=True)
        assert cluster.submit(abs, -3).result(PATIENCE_S) == 3
        eventually(lambda: cluster.stats()["workers_lost"] == 1)


def test_a_task_that_runs_too_long_fails_and_its_worker_is_replaced(cluster: Cluster) -> None:
    limited = cluster.options(timeout=1.0)
    pid = cluster.submit(os.getpid).result()
    assert pid != os.getpid()
    with pytest.raises(hoplite_mp.HopliteTimeoutError, match="sleep"):
        limited.submit(time.sleep, 60).result(PATIENCE_S)
    assert cluster.options(timeout=PATIENCE_S).submit(abs, -1).result(PATIENCE_S) == 1


def test_read_only_results_and_writable_arguments(cluster: Cluster) -> None:
    def double_in_place(array: Any) -> Any:
        array *= 2
        return array

    mine = np.ones(300_000)
    result = cluster.submit(double_in_place, mine).result()
    assert (result == 2).all()
    assert (mine == 1).all()
    assert not result.flags.writeable
    ref = cluster.put(mine)
    with pytest.raises(ValueError, match="read-only"):
        cluster.submit(double_in_place, ref).result()
    assert cluster.options(copy=True).submit(double_in_place, mine).result().flags.writeable
    with hoplite_mp.Executor(1) as executor:
        first = executor.submit(double_in_place, mine)
        assert first.result().flags.writeable
        assert (executor.submit(double_in_place, first).result() == 4).all()
        assert (first.result() == 2).all()


def in_time(action: Callable[[], object]) -> None:
    """In a thread: what never ends is to fail the test, not to stop it."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"


class CollectingSubmitter:
    """A submitter with its memory, collector and tasks, none of which ends by itself. Garbage is
    collected when somebody begins to wait."""

    run_in_place = None

    def __init__(self) -> None:
        self.memory = self.collector = self.waiting = self.tasks = self

    def check(self) -> None: ...

    def arm(self) -> None:
        gc.collect()

    def disarm(self) -> None: ...

    def done(self, oid: int) -> bool:
        return False


def test_a_future_that_the_garbage_collector_ends_inside_of_another_one() -> None:
    submitter: Any = CollectingSubmitter()
    watched, dropped = (Future[None](submitter, oid, None, False) for oid in (1, 2))

    class Finalized:
        """As a map is that nobody reads to its end, which cancels what has not begun."""

        def __del__(self) -> None:
            dropped._complete(True)

    def look() -> None:
        cycle: list[Any] = [Finalized()]
        cycle.append(cycle)
        del cycle
        assert isinstance(watched._condition, threading.Condition)

    in_time(look)
    assert dropped._state == "CANCELLED_AND_NOTIFIED"


def test_a_finalizer_that_asks_in_the_middle_of_a_question() -> None:
    with hoplite_mp.Cluster(workers=1) as c:
        channel = c._runtime.channel
        encoder, met = channel._encoder, []

        class Collecting:
            """The garbage collector may run at each allocation, and finalizers in it."""

            def encode(self, message: Any) -> bytes:
                if not met:
                    try:
                        c.stats()
                    except RuntimeError as error:
                        met.append(str(error))
                return encoder.encode(message)

        channel._encoder = Collecting()  # type: ignore[assignment]
        in_time(c.stats)
        assert "finalizer" in met[0]
        assert c.submit(abs, -1).result(20) == 1
