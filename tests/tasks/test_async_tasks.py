"""`async def` tasks: one event loop for each worker, several at a time, cancelled at an await."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp import errors
from tests.support.functions import add
from tests.support.waiting import PATIENCE_S, eventually, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster

_kept: dict[str, Any] = {}


async def told(value: Any, seconds: float = 0.0) -> Any:
    await asyncio.sleep(seconds)
    return value


async def leave_behind() -> int:
    """Something that goes on in the loop."""
    _kept["ticks"] = 0

    async def tick() -> None:
        while True:
            _kept["ticks"] += 1
            await asyncio.sleep(0.001)

    _kept["task"] = asyncio.get_running_loop().create_task(tick())
    return id(asyncio.get_running_loop())


async def look_at_it(more_than: int) -> tuple[int, int]:
    while _kept["ticks"] <= more_than:
        await asyncio.sleep(0.001)
    _kept["task"].cancel()
    return id(asyncio.get_running_loop()), _kept["ticks"]


async def meet(folder: str, name: str, others: int) -> int:
    """Waits until so many are here, all at the same time."""
    (Path(folder) / name).touch()
    try:
        while len(list(Path(folder).iterdir())) < others:
            await asyncio.sleep(0.002)
    finally:
        await asyncio.sleep(0.01)
    return os.getpid()


async def most_at_a_time(seconds: float) -> int:
    now = _kept["now"] = _kept.get("now", 0) + 1
    _kept["most"] = max(_kept.get("most", 0), now)
    await asyncio.sleep(seconds)
    _kept["now"] -= 1
    return int(_kept["most"])


async def asleep(started: str, ended: str) -> None:
    Path(started).touch()
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        Path(ended).write_text(str(os.getpid()))
        raise


async def asleep_twice(started: str, ended: str) -> None:
    Path(started).touch()
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.5)
        Path(ended).touch()


async def hangs_once(path: str) -> str:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "again"
    await asyncio.sleep(600)
    return "never"


async def stubborn(started: str) -> None:
    Path(started).touch()
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


async def nested(depth: int) -> int:
    if not depth:
        return os.getpid()
    return int(await hoplite_mp.current().submit(nested, depth - 1))


async def die_once(path: str) -> str:
    await asyncio.sleep(0)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "second time"
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


class Callable:
    async def __call__(self, x: int) -> int:
        return 2 * x

    async def method(self, x: int) -> int:
        return 3 * x


def gives(n: int) -> Any:
    yield from range(n)


async def gives_slowly(n: int) -> Any:
    for i in range(n):
        yield i


def test_results_errors_and_every_kind_of_function(cluster: Cluster) -> None:
    async def local(x: int) -> int:
        return await told(x)

    assert cluster.submit(told, 3).result() == 3
    assert cluster.submit(local, 4).result() == 4
    assert cluster.submit(functools.partial(told, 5)).result() == 5
    assert cluster.submit(Callable(), 6).result() == 12
    assert cluster.submit(Callable().method, 7).result() == 21
    assert cluster.submit(told, cluster.put(8)).result() == 8
    assert list(cluster.map(told, range(20))) == list(range(20))
    assert list(cluster.map(told, range(20), chunksize=3)) == list(range(20))

    async def wrong() -> None:
        raise KeyError("its own")

    async def leaves() -> None:
        raise SystemExit(3)

    with pytest.raises(KeyError, match="its own") as caught:
        cluster.submit(wrong).result()
    assert "in wrong" in str(caught.value.__cause__)
    assert "concurrent_tasks.py" not in str(caught.value.__cause__)
    error = cluster.submit(leaves).exception()
    assert isinstance(error, hoplite_mp.TaskError)
    assert isinstance(error.__cause__, SystemExit)
    with pytest.raises(TypeError, match="lock"):
        cluster.submit(gives_lock).result()


async def gives_lock() -> Any:
    return threading.Lock()


def test_the_loop_lives_as_long_as_its_worker() -> None:
    with hoplite_mp.Cluster(workers=1) as c:
        loop = c.submit(leave_behind).result()
        assert c.submit(add, 1, 2).result() == 3
        assert c.submit(look_at_it, 20).result()[0] == loop


def test_up_to_so_many_at_once_in_a_worker(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1) as c:
        view = c.options(concurrency=12)
        futures = [view.submit(meet, str(tmp_path), str(i), 12) for i in range(12)]
        assert len({future.result(30) for future in futures}) == 1
        view = c.options(concurrency=3)
        assert max(f.result() for f in [view.submit(most_at_a_time, 0.01) for _ in range(20)]) == 3


def test_one_at_a_time_unless_it_is_said() -> None:
    with hoplite_mp.Cluster(workers=1) as c:
        assert {f.result() for f in [c.submit(most_at_a_time, 0.005) for _ in range(6)]} == {1}


def test_plain_tasks_go_to_others_meanwhile(cluster: Cluster, tmp_path: Path) -> None:
    """A worker with room for more async tasks takes no plain one, and keeps none from others."""
    view = cluster.options(concurrency=100)
    long = view.submit(asleep, str(tmp_path / "started"), str(tmp_path / "ended"))
    eventually((tmp_path / "started").exists)
    for i in range(20):
        assert cluster.submit(add, i, 1).result(PATIENCE_S) == i + 1
        assert view.submit(told, i).result(PATIENCE_S) == i
    assert not long.done()
    assert long.cancel(force=True)


@pytest.fixture(scope="module")
def patient() -> Iterator[Cluster]:
    """One worker that has time to end what was cancelled, however busy the machine is."""
    with hoplite_mp.Cluster(1, config=hoplite_mp.Config(cancel_grace_s=PATIENCE_S)) as made:
        yield made


def test_cancelled_by_force_at_an_await(patient: Cluster, tmp_path: Path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    future = patient.submit(asleep, str(started), str(ended))
    eventually(started.exists)
    assert not future.cancel()
    assert future.cancel(force=True)
    assert future.cancelled()
    eventually(lambda: ended.exists() and ended.read_text())
    os.kill(int(ended.read_text()), 0)  # its worker lives


def test_what_cleans_up_is_cancelled_once(patient: Cluster, tmp_path: Path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    future = patient.submit(asleep_twice, str(started), str(ended))
    eventually(started.exists)
    assert future.cancel(force=True)
    eventually(ended.exists)


def test_cancelled_at_any_moment_it_ends(patient: Cluster, tmp_path: Path) -> None:
    """Also before its first step."""
    view = patient.options(concurrency=4)
    for i in range(100):
        future = view.submit(asleep, str(tmp_path / f"s{i}"), str(tmp_path / "e"))
        time.sleep(i % 10 * 1e-4)
        assert future.cancel(force=True)
    assert [f.result(PATIENCE_S / 2) for f in [view.submit(told, i) for i in range(8)]]
    assert patient.stats()["workers_lost"] == 0


def test_the_others_of_its_worker_go_on(patient: Cluster, tmp_path: Path) -> None:
    view = patient.options(concurrency=4)
    paths = [(tmp_path / f"s{i}", tmp_path / f"e{i}") for i in range(3)]
    futures = [view.submit(asleep, str(s), str(e)) for s, e in paths]
    for started, _ in paths:
        eventually(started.exists)
    assert futures[1].cancel(force=True)
    eventually(lambda: paths[1][1].exists() and paths[1][1].read_text())
    assert view.submit(told, 1).result(PATIENCE_S) == 1
    assert not paths[0][1].exists()
    assert not paths[2][1].exists()
    for future in futures:
        future.cancel(force=True)


def test_who_ignores_that_is_killed(tmp_path: Path) -> None:
    config = hoplite_mp.Config(cancel_grace_s=0.1)
    with hoplite_mp.Cluster(workers=1, config=config) as c:
        future = c.submit(stubborn, str(tmp_path / "started"))
        eventually((tmp_path / "started").exists)
        assert future.cancel(force=True)
        assert c.submit(add, 1, 2).result(30) == 3
        assert c.stats()["workers_lost"] == 1


def test_a_timeout_kills_and_the_others_are_tried_again(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1) as c:
        view = c.options(concurrency=4)
        other = view.submit(hangs_once, str(tmp_path / "other"))
        wait_for(tmp_path / "other")
        late = view.options(timeout=0.2).submit(asleep, str(tmp_path / "a"), str(tmp_path / "b"))
        with pytest.raises(hoplite_mp.HopliteTimeoutError, match=r"asleep\(\).*0.2 s"):
            late.result(30)
        assert other.result(30) == "again"
        assert c.options(timeout=20).submit(told, 1).result(30) == 1
        assert c.stats()["tasks_retried"] == 1


def test_its_worker_is_killed(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1) as c:
        assert c.submit(die_once, str(tmp_path / "one")).result(30) == "second time"
        with pytest.raises(errors.WorkerLostError, match=r"SIGKILL.*die_once\(\)"):
            c.options(retries=0).submit(die_once, str(tmp_path / "two")).result(30)


def test_who_awaits_other_tasks_is_stood_in_for() -> None:
    """With one worker, each of them would wait for ever for the next one."""
    with hoplite_mp.Cluster(workers=1) as c:
        assert c.submit(nested, 3).result(30)
        view = c.options(concurrency=4)
        assert len([f.result(30) for f in [view.submit(nested, 2) for _ in range(4)]]) == 4


def test_a_plain_task_waits_for_an_async_one_in_place() -> None:
    def outer() -> Any:
        return hoplite_mp.current().submit(told, 9).result()

    with hoplite_mp.Cluster(workers=1) as c:
        assert c.submit(outer).result(30) == 9


@pytest.mark.parametrize("fn", [gives, gives_slowly, functools.partial(gives, 3)])
def test_generators_are_for_stream(cluster: Cluster, fn: Any) -> None:
    with pytest.raises(TypeError, match=r"generator.*stream\("):
        cluster.submit(fn, 3)
    with pytest.raises(TypeError, match=r"generator.*stream\("):
        cluster.map(fn, [3])
    with pytest.raises(TypeError, match=r"generator.*stream\("):
        cluster.spmd(fn, 1)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2", 1 << 20])
def test_wrong_numbers(cluster: Cluster, wrong: Any) -> None:
    with pytest.raises(ValueError, match="concurrency="):
        cluster.options(concurrency=wrong)
    if wrong != 1 << 20:
        with pytest.raises(ValueError, match="buffersize="):
            cluster.options(buffersize=wrong)


def test_executors_of_ones_own() -> None:
    with hoplite_mp.Executor(max_workers=1) as pool:
        assert pool.submit(told, 4).result() == 4

        async def main() -> Any:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(pool, functools.partial(told, 5))

        assert asyncio.run(main()) == 5


def test_a_trace_has_each_of_them(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1) as c:
        view = c.options(concurrency=8)
        with c.trace(tmp_path / "trace.json"):
            assert [f.result() for f in [view.submit(told, i, 0.02) for i in range(8)]]
        assert (tmp_path / "trace.json").read_text().count('"told"') == 8
