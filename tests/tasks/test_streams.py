"""stream: refs to what a generator yields in a worker, while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import errors
from tests.support.functions import add, read_into
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from hoplite_mp import Cluster

MIB = 1 << 20


def count(n: int, ended: str = "", log: str = "") -> Iterator[int]:
    try:
        for i in range(n):
            if log:
                Path(log).write_text(str(i))
            yield i
    finally:
        if ended:
            Path(ended).touch()


async def count_async(n: int, ended: str = "") -> AsyncIterator[int]:
    try:
        for i in range(n):
            await asyncio.sleep(0)
            yield i
    finally:
        if ended:
            Path(ended).touch()


def arrays(n: int, nbytes: int, in_place: bool = False) -> Iterator[Any]:
    for i in range(n):
        if in_place:
            made = hoplite_mp.current().empty(nbytes, np.uint8)
            made[:] = i
        else:
            made = np.full(nbytes, i, np.uint8)
        yield made


def then_raises(n: int, error: BaseException) -> Iterator[int]:
    yield from range(n)
    raise error


def read(c: Cluster, stream: Any) -> list[Any]:
    return [c.get(ref) for ref in stream]


@pytest.mark.parametrize("fn", [count, count_async])
@pytest.mark.parametrize("buffersize", [1, 2, None])
def test_items_in_order(cluster: Cluster, fn: Any, buffersize: Any) -> None:
    stream = cluster.options(buffersize=buffersize).stream(fn, 50)
    assert read(cluster, stream) == list(range(50))
    assert list(stream) == []
    assert read(cluster, cluster.stream(fn, 0)) == []


@pytest.mark.parametrize("fn", [count, count_async])
def test_async_for(cluster: Cluster, fn: Any, tmp_path: Path) -> None:
    async def main() -> list[Any]:
        """The items come only after the loop has run other things while it waits for them."""

        async def tick() -> None:
            for _ in range(5):
                await asyncio.sleep(0.001)
            (tmp_path / "go").touch()

        stream = cluster.stream(when_there, str(tmp_path / "go"), 5)
        beside = asyncio.create_task(tick())
        async with contextlib.aclosing(stream):
            found = [cluster.get(ref) async for ref in stream]
        await beside
        return found + [cluster.get(ref) async for ref in cluster.stream(fn, 20)]

    assert asyncio.run(main()) == [*range(5), *range(20)]


def when_there(path: str, n: int) -> Iterator[int]:
    while not os.path.exists(path):
        time.sleep(0.002)
    yield from range(n)


def test_a_cancelled_read_takes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    def waits() -> Iterator[int]:
        yield 0
        eventually((tmp_path / "go").exists)
        yield 1

    async def main() -> None:
        stream = cluster.stream(waits)
        assert cluster.get(await anext(stream)) == 0
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)
        (tmp_path / "go").touch()
        assert cluster.get(await anext(stream)) == 1
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(main())


def test_items_come_while_it_runs(cluster: Cluster, tmp_path: Path) -> None:
    def waits(go: str) -> Iterator[str]:
        yield "first"
        eventually(Path(go).exists)
        yield "second"

    stream = cluster.stream(waits, str(tmp_path / "go"))
    assert cluster.get(next(stream)) == "first"
    (tmp_path / "go").touch()
    assert read(cluster, stream) == ["second"]


@pytest.mark.parametrize("buffersize", [1, 3])
def test_it_pauses_when_so_many_are_not_taken(
    cluster: Cluster, tmp_path: Path, buffersize: int
) -> None:
    log = tmp_path / "log"
    stream = cluster.options(buffersize=buffersize).stream(count, 1000, "", str(log))
    for taken in range(1, 20):
        assert cluster.get(next(stream)) == taken - 1
        eventually(lambda reach=taken + buffersize - 1: log.read_text() == str(reach))
    time.sleep(0.05)
    assert int(log.read_text()) == 19 + buffersize - 1
    stream.close()


def test_it_pauses_when_so_many_bytes_are_not_taken(tmp_path: Path) -> None:
    config = hoplite_mp.Config(stream_bytes_max=4 * MIB)
    with hoplite_mp.Cluster(workers=1, config=config) as c:
        stream = c.stream(arrays, 100, MIB)
        eventually(lambda: c.stats()["bytes_used"] >= 4 * MIB)
        time.sleep(0.05)
        assert c.stats()["bytes_used"] < 6 * MIB
        assert [int(c.get(ref)[7]) for ref in stream] == list(range(100))


def test_while_it_pauses_another_worker_stands_in() -> None:
    """The reader needs the only worker for each item."""
    with hoplite_mp.Cluster(workers=1) as c:
        stream = c.options(buffersize=1).stream(count, 10)
        assert [c.submit(add, ref, 1).result(30) for ref in stream] == list(range(1, 11))


def test_an_exception_comes_after_the_last_item(cluster: Cluster) -> None:
    for error in (ValueError("its own"), errors.WorkerLostError("not really"), KeyError(3)):
        stream = cluster.stream(then_raises, 3, error)
        found: list[Any] = []
        with pytest.raises(type(error)) as caught:
            read_into(cluster, found, stream)
        assert found == [0, 1, 2]
        assert "then_raises" in str(caught.value.__cause__)
        assert list(stream) == []


def test_what_does_not_pickle_ends_it(cluster: Cluster, tmp_path: Path) -> None:
    def gives(ended: str) -> Iterator[Any]:
        try:
            yield 1
            yield threading.Lock()
        finally:
            Path(ended).touch()

    stream = cluster.stream(gives, str(tmp_path / "ended"))
    assert cluster.get(next(stream)) == 1
    with pytest.raises(TypeError, match=r"an item of gives\(\), a lock, does not pickle"):
        next(stream)
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize("fn", [count, count_async])
@pytest.mark.parametrize("how", ["close", "drop", "break", "unread"])
def test_closing_or_dropping_it_closes_the_generator(
    cluster: Cluster, tmp_path: Path, fn: Any, how: str
) -> None:
    ended = tmp_path / "ended"
    stream = cluster.options(buffersize=2).stream(fn, 1 << 40, str(ended))
    if how == "close":
        kept = [next(stream), next(stream)]
        stream.close()
        assert list(stream) == []
        assert [cluster.get(ref) for ref in kept] == [0, 1]
    elif how == "drop":
        next(stream)
        del stream
    elif how == "break":
        for _ in stream:
            break
        del stream
    else:
        eventually(lambda: stream._task.done())
        del stream
    gc.collect()
    eventually(ended.exists)
    assert cluster.submit(add, 1, 2).result(30) == 3


def test_one_that_has_not_begun_never_does(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1) as c:
        busy = c.submit(eventually, (tmp_path / "go").exists)
        stream = c.stream(count, 3, str(tmp_path / "ended"), str(tmp_path / "log"))
        stream.close()
        (tmp_path / "go").touch()
        busy.result(30)
        assert c.submit(add, 1).result(30) == 1
        assert not (tmp_path / "log").exists()


def test_nothing_is_left() -> None:
    with hoplite_mp.Cluster(workers=2) as c:
        for _ in range(3):
            for ref in c.stream(arrays, 20, 100_000):
                del ref
            with contextlib.suppress(ValueError):
                list(c.stream(then_raises, 30, ValueError()))
            c.options(buffersize=1).stream(count, 5).close()
            gc.collect()
        eventually(lambda: c.stats()["objects"] <= 3)  # the functions that were sent


def test_arrays_made_in_the_store_are_not_copied(cluster: Cluster) -> None:
    def made() -> Iterator[Any]:
        array = hoplite_mp.current().empty(4 * MIB, np.uint8)
        array[:] = 7
        yield array
        assert not array.flags.writeable
        yield (
            array.__array_interface__["data"][0]
            - hoplite_mp.current()._runtime.client.store_address
        )

    array, at = read(cluster, cluster.stream(made))
    assert int(array[-1]) == 7
    own = cluster._runtime.client.store_address
    assert array.__array_interface__["data"][0] - own == at


def test_items_are_what_they_were_when_they_were_yielded(cluster: Cluster) -> None:
    def same() -> Iterator[Any]:
        array = np.zeros(1000)
        for i in range(5):
            array[:] = i
            yield array

    assert [float(cluster.get(ref)[3]) for ref in cluster.stream(same)] == [0, 1, 2, 3, 4]


def test_items_travel_and_outlive_it(cluster: Cluster) -> None:
    refs = list(cluster.stream(arrays, 8, 1000))
    assert float(cluster.get(cluster.reduce(refs))[0]) == sum(range(8))
    total = cluster.submit(lambda values: sum(int(v[0]) for v in values), refs)
    assert total.result(30) == sum(range(8))


def test_inside_tasks(cluster: Cluster) -> None:
    def outer(n: int) -> int:
        c = hoplite_mp.current()
        return sum(c.get(ref) for ref in c.options(buffersize=1).stream(count, n))

    def chained(n: int) -> Iterator[int]:
        c = hoplite_mp.current()
        for ref in c.stream(count, n):
            yield c.get(ref) * 2

    async def awaits(n: int) -> int:
        c = hoplite_mp.current()
        return sum([c.get(ref) async for ref in c.stream(count, n)])

    assert cluster.submit(outer, 10).result(30) == 45
    assert read(cluster, cluster.stream(chained, 5)) == [0, 2, 4, 6, 8]
    with hoplite_mp.Cluster(workers=1) as one:
        assert one.submit(outer, 10).result(30) == 45
        assert one.submit(awaits, 10).result(30) == 45
        assert read(one, one.stream(chained, 5)) == [0, 2, 4, 6, 8]


def dies_once(n: int, at: int, path: str) -> Iterator[tuple[int, int]]:
    """Dies when it has yielded so many, the first time."""
    for i in range(n):
        if i == at:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
        yield i, os.getpid()


@pytest.mark.parametrize("at", [0, 1, 7])
@pytest.mark.parametrize("buffersize", [1, 4, None])
def test_after_a_death_it_runs_again(
    cluster: Cluster, tmp_path: Path, at: int, buffersize: Any
) -> None:
    view = cluster.options(buffersize=buffersize)
    found = read(cluster, view.stream(dies_once, 10, at, str(tmp_path / "died")))
    assert [i for i, _ in found] == list(range(10))
    assert (tmp_path / "died").exists()
    assert len({pid for i, pid in found if i >= at}) == 1


def test_killed_while_it_pauses(cluster: Cluster) -> None:
    stream = cluster.options(buffersize=3).stream(dies_once, 10, 99, "")
    first, pid = cluster.get(next(stream))
    time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    found = [(first, pid), *read(cluster, stream)]
    assert [i for i, _ in found] == list(range(10))
    assert len({pid for _, pid in found}) == 2


def test_without_retries_it_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    stream = cluster.options(retries=0).stream(dies_once, 10, 2, str(tmp_path / "a"))
    found: list[Any] = []
    with pytest.raises(errors.WorkerLostError, match=r"SIGKILL.*dies_once\(\); tried 1 time"):
        read_into(cluster, found, stream)
    assert [i for i, _ in found] == [0, 1]

    def always() -> Iterator[int]:
        yield 0
        os.kill(os.getpid(), signal.SIGKILL)

    stream = cluster.options(retries=2).stream(always)
    assert cluster.get(next(stream)) == 0
    with pytest.raises(errors.WorkerLostError, match="tried 3 times"):
        next(stream)


def test_a_timeout_counts_while_it_runs(cluster: Cluster) -> None:
    def naps(n: int, seconds: float) -> Iterator[int]:
        for i in range(n):
            time.sleep(seconds)
            yield i

    for timeout in (0.3, 3.0, 12.0):  # a worker that stands still for so long has run too long
        stream = cluster.options(timeout=timeout, buffersize=1).stream(naps, 3, 0.01)
        found: list[int] = []
        with contextlib.suppress(hoplite_mp.HopliteTimeoutError):
            found.append(cluster.get(next(stream)))
            time.sleep(1.2 * timeout)  # it pauses meanwhile
            read_into(cluster, found, stream)
            break
    assert found == [0, 1, 2]
    stream = cluster.options(timeout=0.3, buffersize=1).stream(naps, 100, 0.05)
    with pytest.raises(hoplite_mp.HopliteTimeoutError, match=r"naps\(\) ran longer.*0.3 s"):
        list(stream)


def test_its_reader_dies(cluster: Cluster, tmp_path: Path) -> None:
    def reads(ended: str) -> None:
        stream = hoplite_mp.current().options(buffersize=1).stream(count, 1 << 40, ended)
        next(stream)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(errors.WorkerLostError):
        cluster.options(retries=0).submit(reads, str(tmp_path / "ended")).result(30)
    eventually((tmp_path / "ended").exists)


def test_wrong_functions(cluster: Cluster) -> None:
    async def one() -> int:
        return 1

    with pytest.raises(TypeError, match=r"submit\(one"):
        cluster.stream(one)
    with pytest.raises(TypeError, match=r"add\(\) returned a int, which is not iterable"):
        list(cluster.stream(add, 1))
    assert read(cluster, cluster.stream(range, 3)) == [0, 1, 2]
    stream = cluster.stream(count, 3)
    with pytest.raises(TypeError, match="does not pickle; send its refs"):
        pickle.dumps(stream)
    assert repr(stream) == "<Stream of count(): 0 taken>"
    stream.close()


def test_two_threads_cannot_read_at_once(cluster: Cluster, tmp_path: Path) -> None:
    def waits(go: str) -> Iterator[int]:
        eventually(Path(go).exists)
        yield 1

    stream = cluster.stream(waits, str(tmp_path / "go"))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(next(stream)))
    thread.start()
    eventually(stream._lock.locked)
    with pytest.raises(ValueError, match="already reading"):
        next(stream)
    (tmp_path / "go").touch()
    thread.join()
    assert cluster.get(found[0]) == 1


def test_the_cluster_ends_meanwhile(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1) as c:
        stream = c.options(buffersize=2).stream(count, 1 << 40)
        assert c.get(next(stream)) == 0
    with pytest.raises(hoplite_mp.ClosedError):
        next(stream)


def not_iterable() -> int:
    return 3


def test_a_stream_that_fails_before_its_first_item_leaves_nothing(cluster: Cluster) -> None:
    """Neither its first link, nor its error by a cycle of references that only the garbage
    collector ends: a host has room for a limited number of objects."""

    def fail() -> None:
        for function in (not_iterable, count):  # the second one lacks an argument
            with contextlib.suppress(TypeError):
                list(cluster.stream(function))

    gc.collect()
    gc.disable()
    try:
        fail()
        before = cluster.stats()["objects"]
        for _ in range(20):
            fail()
        eventually(lambda: cluster.stats()["objects"] < before + 5)  # of 40 links
    finally:
        gc.enable()
