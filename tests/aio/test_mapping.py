"""`map` in an event loop: `async for` over its results."""

from __future__ import annotations

import asyncio
import functools
import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp import Cluster, HopliteTimeoutError
from tests.support.functions import echo
from tests.support.waiting import Gate, eventually, file_exists_in_time

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.waiting import Run


def fail_at(i: int) -> int:
    if i == 5:
        raise KeyError(i)
    return i


def first_after(gate: Gate, i: int) -> int:
    if i == 0:
        gate.wait()
    return i


@pytest.mark.parametrize(
    ("chunksize", "ordered", "buffersize"),
    [
        (None, True, None), (1, False, None), (7, True, 10),
        (None, False, 10), (1, True, 10), (7, False, None),
    ],
)  # fmt: skip
def test_results(
    cluster: Cluster, run: Run, chunksize: int | None, ordered: bool, buffersize: int | None
) -> None:
    async def main() -> None:
        results = cluster.map(
            echo, range(100), chunksize=chunksize, ordered=ordered, buffersize=buffersize
        )
        found = [value async for value in results]
        assert (found if ordered else sorted(found)) == list(range(100))
        assert [value async for value in cluster.map(echo, [])] == []

    run(main())


def test_unordered_gives_what_is_ready(cluster: Cluster, run: Run, tmp_path: Path) -> None:
    gate = Gate(tmp_path)

    async def main() -> None:
        task = functools.partial(first_after, gate)
        results = aiter(cluster.map(task, range(10), chunksize=1, ordered=False))
        found = {await anext(results) for _ in range(9)}
        assert found == set(range(1, 10))
        gate.open()
        assert [value async for value in results] == [0]

    run(main())


@pytest.mark.parametrize("progress", [False, True])
def test_errors_end_it(
    cluster: Cluster, run: Run, progress: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        results = aiter(cluster.map(fail_at, range(50), chunksize=1, progress=progress))
        for i in range(5):
            assert await anext(results) == i
        with pytest.raises(KeyError):
            await anext(results)
        with pytest.raises(StopAsyncIteration):
            await anext(results)

    run(main())
    assert ("it/s" in capsys.readouterr().err) is progress


def test_a_cancelled_step_loses_nothing(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        for ordered in (True, False):
            results = aiter(cluster.map(slowly, range(12), chunksize=1, ordered=ordered))
            found: list[int] = []
            while len(found) < 12:
                try:
                    found.append(await asyncio.wait_for(anext(results), 0.005))
                except TimeoutError:
                    continue
            assert sorted(found) == list(range(12))
            with pytest.raises(StopAsyncIteration):
                await anext(results)

    run(main())


def slowly(i: int) -> int:
    return echo(i, 0.02)


def test_early_exit_cancels_what_has_not_begun(cluster: Cluster, run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        task = functools.partial(begun_and_held, tmp_path, gate := Gate(tmp_path, f"{id(run)}"))
        results = cluster.map(task, range(200), chunksize=1)
        async for _ in results:
            break
        del results, _
        gc.collect()
        gate.open()
        assert await cluster.submit(echo, 1) == 1  # it waits behind those that are not cancelled
        assert len(list(tmp_path.glob("begun-*"))) < 100
        for path in tmp_path.iterdir():
            path.unlink()

    run(main())


def begun_and_held(folder: Path, gate: Gate, i: int) -> None:
    (folder / f"begun-{i}").touch()
    if i:
        gate.wait()


def test_timeout(cluster: Cluster, run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        for ordered in (True, False):
            path = tmp_path / f"{ordered}{id(run)}"
            with pytest.raises(HopliteTimeoutError, match=r"within the .* s of map"):  # noqa: PT012
                async for _ in cluster.map(
                    file_exists_in_time, [path], timeout=0.05, ordered=ordered
                ):
                    raise AssertionError
            path.touch()

    run(main())


def test_one_task_at_a_time(cluster: Cluster, run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        paths = [tmp_path / f"{i}{id(run)}" for i in range(2)]
        results = aiter(cluster.map(file_exists_in_time, paths, chunksize=1))
        first = asyncio.ensure_future(anext(results))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task is already waiting"):
            await anext(results)
        for path in paths:
            path.touch()
        assert await first is True
        assert [value async for value in results] == [True]

    run(main())


def test_large_results_are_the_readers_alone(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        held: Any = None
        async for value in cluster.map(np.zeros, [1 << 18] * 40, chunksize=1, buffersize=3):
            held = value
        assert held.sum() == 0
        del value
        eventually(lambda: cluster.stats()["bytes_used"] < 40 << 20, "only the last one is held")

    run(main())


def raise_some(number: int) -> int:
    if number == 1:
        raise StopAsyncIteration(number)
    if number == 2:
        raise StopIteration(number)
    return number


@pytest.mark.parametrize("chunksize", [1, 2])
@pytest.mark.parametrize("ordered", [True, False])
def test_exceptions_that_end_iterations_do_not_end_an_async_map(
    cluster: Cluster, run: Run, chunksize: int, ordered: bool
) -> None:
    async def read(number: int) -> None:
        async for _ in cluster.map(raise_some, [number] * 2, chunksize=chunksize, ordered=ordered):
            pass

    async def main() -> None:
        for number, kind in (1, StopAsyncIteration), (2, StopIteration):
            with pytest.raises(RuntimeError, match=kind.__name__) as caught:
                await read(number)
            assert type(caught.value.__cause__) is kind
        results = cluster.map(
            raise_some, range(4), chunksize=chunksize, ordered=ordered, return_exceptions=True
        )
        kinds = [type(one) async for one in results]
        wanted = [int, int, StopAsyncIteration, StopIteration]
        assert sorted(kinds, key=wanted.index) == wanted

    run(main())
