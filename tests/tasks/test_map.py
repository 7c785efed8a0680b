"""map: the builtin's results, the standard library's laziness, and nothing left running."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from tests.support.functions import add, fail
from tests.support.waiting import PATIENCE_S, eventually, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster


# On a busy machine not everything that can run has run within the first ones.
TIMEOUTS_S = (1.0, 4.0, 15.0)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class Counting:
    """An endless iterable that knows how far it has been read."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.read += 1
            yield self.read - 1


def note_after_first(path: str, n: int) -> int:
    (Path(path).parent / str(n)).touch()
    if n > 1:
        wait_for(path)
    return n


def first_waits(path: str, n: int) -> int:
    if n == 0:
        wait_for(path)
    return n


def test_several_iterables_end_with_the_shortest(cluster: Cluster) -> None:
    for chunksize in (None, 1, 2, 100):
        found = cluster.map(add, range(9), itertools.count(), [10] * 7, chunksize=chunksize)
        assert list(found) == [2 * n + 10 for n in range(7)]
    assert list(cluster.map(add)) == []
    assert list(cluster.map(add, [], itertools.count())) == []


def test_refs_futures_and_arrays_as_items(cluster: Cluster) -> None:
    refs = [cluster.put(n) for n in range(6)]
    futures = [cluster.submit(abs, -n) for n in range(6)]
    for chunksize in (1, 4):
        found = cluster.map(add, refs, futures, chunksize=chunksize)
        assert list(found) == [0, 2, 4, 6, 8, 10]
    arrays = list(cluster.map(np.sqrt, [np.full(50_000, n * n, float) for n in range(4)]))
    assert [array[-1] for array in arrays] == [0, 1, 2, 3]
    assert not any(array.flags.writeable for array in arrays)
    (writable,) = cluster.options(copy=True).map(np.sqrt, [np.ones(50_000)])
    assert writable.flags.writeable


def test_the_order_is_that_of_the_items_or_of_the_results(cluster: Cluster, tmp_path: Path) -> None:
    go = tmp_path / "go"
    results = cluster.map(first_waits, [str(go)] * 5, range(5), chunksize=1, ordered=False)
    assert sorted(next(results) for _ in range(4)) == [1, 2, 3, 4]
    go.touch()
    assert list(results) == [0]
    ordered = cluster.map(first_waits, [str(go)] * 5, range(5), chunksize=1)
    assert list(ordered) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ordered", [True, False])
def test_an_endless_iterable_is_read_no_further_than_buffersize(
    cluster: Cluster, ordered: bool
) -> None:
    source = Counting()
    results = cluster.map(abs, source, buffersize=4, ordered=ordered)
    assert source.read == 4
    taken = [next(results) for _ in range(20)]
    assert source.read <= 25
    assert sorted(taken) == list(range(20)) if ordered else len(set(taken)) == 20
    results.close()  # type: ignore[attr-defined]
    assert source.read <= 25


def test_a_buffer_in_chunks(cluster: Cluster) -> None:
    source = Counting()
    results = cluster.map(abs, source, buffersize=6, chunksize=3)
    assert source.read <= 7
    assert [next(results) for _ in range(10)] == list(range(10))
    assert source.read <= 21
    results.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("chunksize", [2, None])
def test_closed_early_the_rest_never_runs(tmp_path: Path, chunksize: int | None) -> None:
    go = tmp_path / "go"
    with hoplite_mp.Cluster(workers=1) as one:
        paths = [str(go)] * 40
        results = one.map(note_after_first, paths, range(40), chunksize=chunksize)
        assert next(results) == 0
        eventually(lambda: (tmp_path / "2").exists())  # the second chunk waits now
        results.close()  # type: ignore[attr-defined]
        go.touch()
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2", "3", "go"}


def test_the_timeout_counts_from_the_call_and_cancels(tmp_path: Path) -> None:
    for timeout in TIMEOUTS_S:
        folder = tmp_path / str(timeout)
        folder.mkdir()
        go, found = folder / "go", []
        with hoplite_mp.Cluster(workers=1) as one:
            assert one.submit(abs, -1).result(PATIENCE_S) == 1
            results = one.map(
                note_after_first, [str(go)] * 9, range(9), timeout=timeout, chunksize=1
            )
            with pytest.raises(hoplite_mp.HopliteTimeoutError):
                found.extend(results)
            go.touch()
        if len(names_in(folder)) == 4:
            break
    assert names_in(folder) == {"0", "1", "2", "go"}


def test_a_timeout_of_results_in_any_order(cluster: Cluster, tmp_path: Path) -> None:
    for timeout in TIMEOUTS_S:
        go, found = tmp_path / str(timeout), []
        results = cluster.map(
            first_waits, [str(go)] * 3, range(3), timeout=timeout, chunksize=1, ordered=False
        )
        with pytest.raises(hoplite_mp.HopliteTimeoutError):
            found.extend(results)
        go.touch()
        if len(found) == 2:
            break
    assert sorted(found) == [1, 2]


@pytest.mark.parametrize("chunksize", [1, 3])
def test_an_exception_ends_the_results(cluster: Cluster, chunksize: int) -> None:
    results = cluster.map(divmod, [6, 6, 6, 6], [1, 2, 0, 3], chunksize=chunksize)
    if chunksize == 1:
        assert [next(results), next(results)] == [(6, 0), (3, 0)]
    with pytest.raises(ZeroDivisionError) as caught:
        next(results)
    assert "worker" in str(caught.value.__cause__)
    assert list(results) == []


def test_refusals_come_at_the_call(cluster: Cluster) -> None:
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="chunksize"):
            cluster.map(abs, [1], chunksize=wrong)
        with pytest.raises(ValueError, match="buffersize"):
            cluster.map(abs, [1], buffersize=wrong)
    with pytest.raises(TypeError, match="buffersize"):
        cluster.map(abs, [1], buffersize="2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"chunksize={2**70}: it must be from 1 to"):
        cluster.map(abs, [1], chunksize=2**70)
    with pytest.raises(TypeError, match=r"chunksize=2\.5: it must be an integer"):
        cluster.map(abs, [1], chunksize=2.5)  # type: ignore[arg-type]
    assert list(cluster.map(abs, [-1, -2], chunksize=np.int64(2**62))) == [1, 2]  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="iter"):
        cluster.map(abs, 5)  # type: ignore[arg-type]


def test_the_standard_library_agrees(cluster: Cluster) -> None:
    """What a thread pool gives for the same calls."""
    calls: list[tuple[Any, ...]] = [
        (abs, range(-5, 5)),
        (add, range(4), range(9)),
        (fail, ["x"]),
        (divmod, [1, 1], [1, 0]),
        (str, []),
    ]

    def outcome(executor: Any, call: tuple[Any, ...]) -> list[Any]:
        found: list[Any] = []
        try:
            for value in executor.map(*call, chunksize=1):
                found.append(value)
        except Exception as error:
            found.append((type(error), error.args))
        return found

    with ThreadPoolExecutor(2) as threads:
        for call in calls:
            assert outcome(cluster, call) == outcome(threads, call)


def test_a_map_inside_a_task_and_in_threads(cluster: Cluster) -> None:
    def inside(n: int) -> int:
        return sum(hoplite_mp.current().map(abs, range(n), chunksize=2))

    assert list(cluster.map(inside, [3, 4, 5], chunksize=1)) == [3, 6, 10]
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.append(list(cluster.map(abs, range(100)))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == [list(range(100))] * 3


def test_thousands_of_items(cluster: Cluster) -> None:
    assert sum(cluster.map(abs, range(-20_000, 0))) == 20_000 * 20_001 // 2


def stops(n: int) -> int:
    if n == 3:
        raise StopIteration(n)
    return n


def test_a_stop_iteration_of_the_function_loses_nothing(cluster: Cluster) -> None:
    """In place of results it would look like their end."""
    for call in (
        lambda: list(cluster.map(stops, range(6), chunksize=6)),
        lambda: list(cluster.map(lambda n, _: stops(n), range(6), range(6), chunksize=6)),
    ):
        with pytest.raises((RuntimeError, StopIteration)) as caught:
            assert not call()
        text = str(caught.value.__cause__) + str(caught.value)
        assert "StopIteration" in text


def test_after_close_nothing_comes_of_a_chunk_that_was_read(cluster: Cluster) -> None:
    results = cluster.map(abs, range(20), chunksize=10)
    items = iter(results)
    assert [next(items), next(items)] == [0, 1]
    results.close()  # type: ignore[attr-defined]
    assert list(items) == []
    assert list(results) == []


def test_an_item_of_a_chunk_belongs_to_the_reader_alone(cluster: Cluster) -> None:
    """Large ones would otherwise stay as long as their chunk is read."""
    results = cluster.map(np.full, [50_000] * 4, range(4), chunksize=4)
    first = next(results)
    kept = weakref.ref(first)
    del first
    assert kept() is None
    assert [int(array[0]) for array in results] == [1, 2, 3]


def test_a_loop_that_is_left_cancels_the_rest(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with hoplite_mp.Cluster(workers=1) as one:
        for n in one.map(note_after_first, [str(go)] * 40, range(40), chunksize=2):
            assert n == 0
            eventually(lambda: (tmp_path / "2").exists())
            break
        go.touch()
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2", "3", "go"}


# -- return_exceptions ------------------------------------------------------------------------


class Refused(Exception):
    """Its class does not take its own args, nor attributes."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        object.__setattr__(self, "number", number)

    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError(name)


def odd_ones(number: int) -> Any:
    if number % 10 == 1:
        raise Refused(number, "why")
    if number % 10 == 2:
        return threading.Lock()
    if number % 10 == 3:
        raise SystemExit(number)
    if number % 10 == 4:
        raise StopIteration(number)
    if number % 10 == 5:
        raise ValueError(threading.Lock())
    return number


async def odd_ones_later(number: int) -> Any:
    return odd_ones(number) if number % 10 != 4 else number


@pytest.mark.parametrize("chunksize", [None, 1, 4, 100])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("fn", [odd_ones, odd_ones_later])
@pytest.mark.parametrize("buffersize", [None, 9])
def test_return_exceptions_puts_each_in_the_place_of_its_result(
    cluster: Cluster, chunksize: int | None, ordered: bool, fn: Any, buffersize: int | None
) -> None:
    found: list[Any] = list(
        cluster.map(
            fn,
            range(60),
            chunksize=chunksize,
            ordered=ordered,
            buffersize=buffersize,
            timeout=PATIENCE_S,
            return_exceptions=True,
        )
    )
    assert len(found) == 60
    if not ordered:
        numbers = sorted(one for one in found if isinstance(one, int))
        stops = [] if fn is odd_ones_later else [4]
        assert numbers == [n for n in range(60) if n % 10 not in (1, 2, 3, 5, *stops)]
        return
    for number, one in enumerate(found):
        match number % 10:
            case 1:
                assert (type(one), one.number, one.args) == (Refused, number, ("why",))
                assert "odd_ones" in str(one.__cause__)
            case 2:
                assert isinstance(one, TypeError)
                assert "does not pickle" in str(one)
            case 3:
                assert type(one) is hoplite_mp.TaskError
                assert (type(one.__cause__), one.__cause__.code) == (SystemExit, number)
            case 4 if fn is odd_ones:
                assert (type(one), one.value) == (StopIteration, number)
            case 5:
                assert type(one) is hoplite_mp.TaskError
                assert "ValueError" in str(one)
            case _:
                assert one == number


def fail_until(path: str, number: int) -> int:
    seen = Path(path) / str(number)
    if number == 1 or (number == 2 and not seen.exists()):
        seen.touch()
        raise OSError(number)
    return number


def interrupt(number: int) -> int:
    if number == 1:
        raise KeyboardInterrupt("of the item")
    return number


async def interrupt_later(number: int) -> int:
    return interrupt(number)


async def cancel_later(number: int) -> int:
    if number == 1:
        raise asyncio.CancelledError("of the item")
    return number


@pytest.mark.parametrize("chunksize", [1, 4])
@pytest.mark.parametrize("fn", [interrupt, interrupt_later, cancel_later])
def test_return_exceptions_of_an_item_that_raises_an_interrupt_keeps_the_others(
    cluster: Cluster, fn: Any, chunksize: int
) -> None:
    found: list[Any] = list(
        cluster.map(fn, range(4), chunksize=chunksize, return_exceptions=True, timeout=PATIENCE_S)
    )
    assert found[:1] + found[2:] == [0, 2, 3]
    assert isinstance(found[1], BaseException)
    if fn is not cancel_later:
        assert type(found[1]) is hoplite_mp.TaskError
        assert "KeyboardInterrupt: of the item" in str(found[1])


@pytest.mark.parametrize("chunksize", [1, 3])
def test_return_exceptions_come_after_the_last_try(
    cluster: Cluster, tmp_path: Path, chunksize: int
) -> None:
    view = cluster.options(retry_exceptions=OSError, retries=1)
    call = functools.partial(fail_until, str(tmp_path))
    found: list[Any] = list(view.map(call, range(4), chunksize=chunksize, return_exceptions=True))
    assert (found[0], type(found[1]), found[2:]) == (0, OSError, [2, 3])


@pytest.mark.parametrize("fn", [odd_ones, odd_ones_later])
def test_map_of_a_result_that_does_not_pickle_raises_also_with_retry_exceptions(
    cluster: Cluster, fn: Any
) -> None:
    view = cluster.options(retry_exceptions=OSError)
    with pytest.raises(TypeError, match="does not pickle"):
        list(view.map(fn, [0, 2], chunksize=2))


def die_of(number: int) -> int:
    if number == 5:
        os._exit(3)
    return number


def test_return_exceptions_of_a_chunk_whose_worker_dies(cluster: Cluster) -> None:
    view = cluster.options(retries=0)
    found: list[Any] = list(view.map(die_of, range(9), chunksize=3, return_exceptions=True))
    assert found[:3] + found[6:] == [0, 1, 2, 6, 7, 8]
    assert [type(one) for one in found[3:6]] == [hoplite_mp.WorkerLostError] * 3


def unending(number: int) -> Any:
    yield from range(number)
    raise ValueError("of the iterable")


def test_return_exceptions_raises_errors_that_belong_to_no_item(
    cluster: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="of the iterable"):
        list(cluster.map(abs, unending(3), return_exceptions=True))
    with pytest.raises(ValueError, match="of the iterable"):
        list(cluster.map(abs, unending(3), return_exceptions=True, buffersize=1))
    go = tmp_path / "go"
    for chunksize in (1, 2):
        results = cluster.map(
            wait_for, [str(go)] * 2, timeout=0.1, return_exceptions=True, chunksize=chunksize
        )
        with pytest.raises(hoplite_mp.HopliteTimeoutError, match=r"map\(\)"):
            list(results)
    go.touch()
    with hoplite_mp.Executor(max_workers=1) as pool:
        found: list[Any] = list(pool.map(odd_ones, [3, 6], chunksize=2, return_exceptions=True))
        assert (type(found[0]), found[1]) == (SystemExit, 6)


def test_map_ends_at_the_first_exception(cluster: Cluster) -> None:
    results = cluster.map(odd_ones, [0, 5, 6], chunksize=1)
    assert next(results) == 0
    with pytest.raises(hoplite_mp.TaskError):
        next(results)
    assert list(results) == []
