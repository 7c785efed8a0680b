"""options(retry_delay=): a pause before each retry, in which the task occupies nothing."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import textwrap
import time
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp._cli.dump import collect, lines
from hoplite_mp._node.tasks.worker_pools import STUCK_PATIENCE_S
from tests.lan import forked
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hoplite_mp import Cluster

DELAY = 0.2, 2.0, 0.3
PAUSES = 0.2, 0.3, 0.3  # as the delay says: 0.2, 0.2 * 2 but at most 0.3, and so on
LONG_S = 1000.0  # no test waits for it


def begins(path: Path) -> list[float]:
    """When each try has begun."""
    return [float(line) for line in path.read_text().split()] if path.exists() else []


def fails(path: Path, failures: int, how: str = "raises") -> int:
    """Fails so many times, then returns how often it has."""
    done = len(begins(path))
    with path.open("a") as file:
        file.write(f"{time.monotonic()}\n")
    if done < failures:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionError(f"try {done}")
    return done


async def fails_async(path: Path, failures: int, how: str) -> int:
    await asyncio.sleep(0)
    return fails(path, failures)


def pauses_at_least(path: Path, *expected: float) -> None:
    found = [after - before for before, after in itertools.pairwise(begins(path))]
    assert len(found) == len(expected)
    assert all(pause >= least for pause, least in zip(found, expected, strict=True)), found


def view_of(cluster: Cluster, delay: Any = DELAY, **options: Any) -> Any:
    return cluster.options(retry_exceptions=(OSError,), retry_delay=delay, **options)


@pytest.fixture(name="one")
def fixture_one() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(1, memory="128MiB", resources={"gpu": 1}) as made:
        yield made


@pytest.mark.parametrize("how", ["raises", "dies", "async", "priority", "resources", "executor"])
def test_each_retry_begins_after_its_delay(one: Cluster, tmp_path: Path, how: str) -> None:
    path = tmp_path / "a"
    options: dict[str, Any] = {"priority": {"priority": 3}, "resources": {"resources": {"gpu": 1}}}
    view = view_of(one, **options.get(how, {}))
    if how == "executor":
        view = one.executor(1, retry_exceptions=OSError, retry_delay=DELAY)
    function: Callable[..., Any] = fails_async if how == "async" else fails
    future = view.submit(function, path, 3, "dies" if how == "dies" else "raises")
    assert future.result(PATIENCE_S) == 3
    pauses_at_least(path, *PAUSES)


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_worker_and_resources_are_free_during_the_delay(
    one: Cluster, tmp_path: Path, how: str
) -> None:
    path = tmp_path / "a"
    view = view_of(one, LONG_S, resources={"gpu": 1})
    delayed = view.submit(fails, path, 1, how)
    eventually(lambda: one.stats()["tasks_retried"] == 1)
    assert one.submit(abs, -3).result(PATIENCE_S) == 3
    assert view.submit(abs, -4).result(PATIENCE_S) == 4
    assert not delayed.done()
    assert len(begins(path)) == 1
    assert delayed.cancel()


@pytest.mark.parametrize("force", [False, True])
def test_cancel_during_the_delay_takes_effect_at_once(
    one: Cluster, tmp_path: Path, force: bool
) -> None:
    future = view_of(one, LONG_S).submit(fails, tmp_path / "a", 1)
    dependent = one.submit(abs, future)
    eventually(lambda: one.stats()["tasks_retried"] == 1)
    assert future.cancel(force=force) if force else future.cancel()
    for cancelled in (future, dependent):
        with pytest.raises(CancelledError):
            cancelled.result(PATIENCE_S)


def test_task_that_waits_for_its_next_try_counts_as_queued(one: Cluster, tmp_path: Path) -> None:
    futures = [view_of(one, LONG_S).submit(fails, tmp_path / str(i), 1) for i in range(2)]
    eventually(lambda: one.stats()["tasks_retried"] == 2)
    found = collect(one)
    (node,) = found["nodes"]
    assert (node["queued"]["count"], node["waiting"]["count"]) == (2, 0)
    assert sum("task fails()" in line and "is retried in" in line for line in lines(found)) == 2
    for future in futures:
        future.cancel()
    eventually(lambda: collect(one)["nodes"][0]["queued"]["count"] == 0)


def test_retries_that_are_used_up_fail_without_a_further_delay(
    one: Cluster, tmp_path: Path
) -> None:
    view = view_of(one, (0.05, 1e6, LONG_S), retries=1)
    with pytest.raises(ConnectionError, match="try 1"):
        view.submit(fails, tmp_path / "a", 9).result(PATIENCE_S)
    with pytest.raises(ConnectionError, match="try 0"):
        view_of(one, LONG_S, retries=0).submit(fails, tmp_path / "b", 9).result(PATIENCE_S)
    with pytest.raises(hoplite_mp.WorkerLostError, match="tried 2 times"):
        view.submit(fails, tmp_path / "c", 9, "dies").result(PATIENCE_S)
    with pytest.raises(KeyError):
        view_of(one, LONG_S).submit({}.__getitem__, 1).result(PATIENCE_S)


@pytest.mark.parametrize("delay", [0.1, 2 * STUCK_PATIENCE_S])
@pytest.mark.parametrize("blocked", [0, 8])
def test_nested_task_is_tried_again_while_its_parent_waits(
    tmp_path: Path, blocked: int, delay: float
) -> None:
    """Also where no stand-in may run it, so that the waiting worker itself has to, and after a
    longer time than that for which all workers of a pool may wait."""

    failures = 2 if delay < 1.0 else 1

    def outer(path: Path) -> int:
        view = hoplite_mp.current().options(retry_exceptions=(OSError,), retry_delay=delay)
        found: int = view.submit(fails, path, failures).result()
        return found

    config = hoplite_mp.Config(blocked_workers_max=blocked)
    with hoplite_mp.Cluster(1, memory="128MiB", config=config) as cluster:
        assert cluster.submit(outer, tmp_path / "a").result(PATIENCE_S) == failures
    pauses_at_least(tmp_path / "a", *[delay] * failures)


def broken_after(folder: Path) -> None:
    """An initializer that works once."""
    (folder / "started").mkdir()


def test_task_in_its_delay_fails_at_once_when_its_pool_breaks(one: Cluster, tmp_path: Path) -> None:
    pool = one.executor(
        1, initializer=broken_after, initargs=(tmp_path,), retry_exceptions=OSError,
        retry_delay=LONG_S,
    )  # fmt: skip
    delayed = pool.submit(fails, tmp_path / "a", 1)
    eventually(lambda: one.stats()["tasks_retried"] == 1)
    dead = pool.submit(fails, tmp_path / "b", 1, "dies")
    for future in (delayed, dead):
        assert isinstance(future.exception(PATIENCE_S), BrokenProcessPool)


def test_map_delays_only_the_item_that_has_failed(one: Cluster, tmp_path: Path) -> None:
    failures = [1, 0, 0, 1, 0, 0]
    waits = [tmp_path / f"long {i}" for i in range(6)]
    results = view_of(one, LONG_S).map(fails, waits, failures, ordered=False)
    assert [next(results) for _ in range(4)] == [0] * 4, "the others have not waited for it"
    results.close()  # type: ignore[attr-defined]
    paths = [tmp_path / str(i) for i in range(6)]
    assert list(view_of(one, 0.1).map(fails, paths, failures)) == failures
    pauses_at_least(paths[0], 0.1)
    pauses_at_least(paths[3], 0.1)
    with pytest.raises(ValueError, match="chunksize=2 with options"):
        view_of(one).map(fails, paths, failures, chunksize=2)
    assert list(one.options(retry_delay=0.1).map(abs, range(4), chunksize=2)) == [0, 1, 2, 3]


@pytest.mark.parametrize("wait", [False, True])
def test_shutdown_waits_for_tasks_in_their_delay(one: Cluster, tmp_path: Path, wait: bool) -> None:
    pool = one.executor(1, retry_exceptions=OSError, retry_delay=0.2)
    future = pool.submit(fails, tmp_path / "a", 1)
    pool.shutdown(wait=wait)
    assert future.done() or not wait
    assert future.result(PATIENCE_S) == 1


@pytest.mark.parametrize("what", ["executor", "cluster"])
def test_end_by_an_exception_cancels_tasks_in_their_delay(
    one: Cluster, tmp_path: Path, what: str
) -> None:
    ends = one.executor(1) if what == "executor" else one
    future = view_of(ends, LONG_S).submit(fails, tmp_path / "a", 1)
    eventually(lambda: one.stats()["tasks_retried"] == 1)
    ends.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert future.cancelled()


def test_program_that_ends_by_an_exception_does_not_wait_for_the_delay(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import hoplite_mp
        def fails(): raise OSError
        with hoplite_mp.Cluster(1, memory="128MiB") as c:
            c.options(retry_exceptions=OSError, retry_delay={LONG_S}).submit(fails)
            while not c.stats()["tasks_retried"]: pass
            raise SystemExit(7)
    """)
    done = forked.run([sys.executable, "-c", program], timeout=PATIENCE_S)
    assert done.returncode == 7


def test_debug_cluster_pauses_between_tries(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(0, memory="128MiB", debug=True) as cluster:
        assert view_of(cluster).submit(fails, tmp_path / "a", 3).result() == 3
    pauses_at_least(tmp_path / "a", *PAUSES)


def test_mistakes_are_refused_with_what_is_allowed(cluster: Cluster) -> None:
    wrong: Any
    for wrong in (
        -1,
        float("nan"),
        float("inf"),
        1e7,
        (1, 2),
        (1, 0.5, 2),
        (1, 1e7, 2),
        (2, 1, 1),
        (-1, 1, 1),
    ):
        with pytest.raises(ValueError, match=r"retry_delay=.*seconds, or \(first, factor, max\)"):
            cluster.options(retry_delay=wrong)
    for wrong in ("1", "", True, (1, "2", 3), object(), [1, 2, None]):
        with pytest.raises(TypeError, match=r"retry_delay=.*seconds"):
            cluster.options(retry_delay=wrong)
    for none in (0, 0.0, None, (0, 1, 0)):
        assert cluster.options(retry_delay=none).submit(abs, -1).result() == 1
    assert cluster.options(retry_delay=np.float32(1)).submit(abs, -1).result() == 1
    view = cluster.options(retry_delay=1)
    for call in (
        lambda: view.stream(iter, [1]),
        lambda: view.actor(Plain),
        lambda: view.spmd(abs, 1),
        lambda: view.run(abs, 1),
    ):
        with pytest.raises(ValueError, match="retry_delay"):
            call()


class Plain:
    pass
