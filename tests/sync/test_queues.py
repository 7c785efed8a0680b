"""Queues on one host."""

from __future__ import annotations

import asyncio
import gc
import queue
import random
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hoplite_mp
from hoplite_mp import ActorLostError, ClosedError
from hoplite_mp._api.actor import Actor
from hoplite_mp._sync.handles import Read
from tests.support.waiting import PATIENCE_S, eventually, waiters_are

if TYPE_CHECKING:
    from hoplite_mp import Cluster, Queue


def test_first_in_first_out(c: Cluster) -> None:
    q: Queue[Any] = hoplite_mp.Queue()
    items = [1, "two", None, {"three": [3]}, b"4" * 100_000, (5, c.put("ref"))]
    for item in items:
        q.put(item)
    assert q.qsize() == len(items)
    assert not q.empty()
    assert not q.full()
    assert [q.get() for _ in items] == items
    assert q.empty()
    with pytest.raises(queue.Empty):
        q.get_nowait()
    with pytest.raises(queue.Empty):
        q.get(timeout=0.01)


def test_a_full_one(c: Cluster) -> None:
    q: Queue[int] = hoplite_mp.Queue(maxsize=2)
    assert q.maxsize == 2
    q.put(1)
    q.put_nowait(2)
    assert q.full()
    for call in (lambda: q.put_nowait(3), lambda: q.put(3, timeout=0.01), lambda: q.put(3, False)):
        with pytest.raises(queue.Full):
            call()
    putting = c.submit(q.put, 3)
    waiters_are(q, 1)
    assert [q.get(), q.get(), q.get()] == [1, 2, 3]
    assert putting.result(PATIENCE_S) is None


@pytest.mark.parametrize("count", [10, 1_000_000])
def test_arrays_are_read_only_unless_copy(c: Cluster, count: int) -> None:
    q: Queue[Any] = hoplite_mp.Queue(copy=True)
    mine = np.arange(count)
    q.put(mine)
    mine[:] = 0
    got = q.get()
    assert np.array_equal(got, np.arange(count))
    got[0] = 7  # its own
    other: Queue[Any] = hoplite_mp.Queue()
    other.put(got)
    assert not other.get().flags.writeable
    assert c.submit(_get_writeable, q).result(PATIENCE_S)  # the option travels with the handle


class DoesNotLoad:
    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return _refuse, (self.kind,)


class Quits(BaseException):
    """No Exception, and none that ends programs."""


def _refuse(kind: type[BaseException]) -> None:
    raise kind("why")


@pytest.mark.parametrize("kind", [LookupError, SystemExit, Quits])
@pytest.mark.parametrize("padding", [0, 1 << 20])
def test_item_that_does_not_load_is_taken_and_raises_once(
    c: Cluster, kind: type[BaseException], padding: int
) -> None:
    q: Queue[Any] = hoplite_mp.Queue()
    raised = hoplite_mp.TaskError if kind is SystemExit else kind
    for get in (q.get, lambda: asyncio.run(q.get_async())):
        q.put((DoesNotLoad(kind), bytes(padding)))
        q.put("next")
        with pytest.raises(raised) as caught:
            get()
        text = "".join((str(caught.value), *getattr(caught.value, "__notes__", ())))
        assert f"could not be loaded: {kind.__name__}: why" in text
        assert q.get(timeout=PATIENCE_S) == "next"


def _get_writeable(q: Queue[Any]) -> bool:
    q.put(np.arange(10))
    return bool(q.get().flags.writeable)


def test_large_items_pass_through_the_store(c: Cluster) -> None:
    """Neither pickled by the actor nor copied, and gone when they were got."""
    q: Queue[Any] = hoplite_mp.Queue()
    before = c.stats()["bytes_used"]
    made = c.empty(1 << 20, np.uint8)
    made[:] = 5
    q.put(made)
    got = q.get()
    assert got.__array_interface__["data"][0] == made.__array_interface__["data"][0]
    q.put(got)
    assert c.submit(_sum_of_next, q).result(PATIENCE_S) == 5 << 20
    del made, got
    gc.collect()
    eventually(lambda: c.stats()["bytes_used"] <= before)


def _sum_of_next(q: Queue[Any]) -> int:
    return int(q.get().sum())


def test_a_local_class_passes_through(c: Cluster) -> None:
    class Local:
        def __init__(self, x: int) -> None:
            self.x = x

    q: Queue[Local] = hoplite_mp.Queue()
    q.put(Local(3))
    assert q.get().x == 3


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_who_is_interrupted_while_reading_takes_nothing(
    c: Cluster, interrupt: type[BaseException]
) -> None:
    """A large item is read after the actor has given it out: it goes back to its place."""
    q: Queue[Any] = hoplite_mp.Queue(copy=True)
    for number in range(2):
        q.put(np.full(1_000_000, number))
    steps = q._getting(True, None)
    asked = next(steps)
    assert isinstance(steps.send(asked.result()), Read)  # type: ignore[union-attr]
    with pytest.raises(interrupt):
        steps.throw(interrupt())
    assert [int(q.get(timeout=PATIENCE_S)[0]) for _ in range(2)] == [0, 1]
    for _ in range(2):
        q.task_done()
    q.join()


def test_a_reader_whose_calls_are_cancelled_reads_in_order(c: Cluster) -> None:
    """An item that a cancelled call has taken comes back before the next call takes one."""
    chance = random.Random(1)
    queues: list[hoplite_mp.Queue[int]] = [hoplite_mp.Queue() for _ in range(20)]

    async def read(items: hoplite_mp.Queue[int], count: int) -> list[int]:
        got: list[int] = []
        while len(got) < count:
            call = asyncio.ensure_future(items.get_async())
            await asyncio.sleep(chance.random() * 0.002)
            if chance.random() < 0.5:
                call.cancel()
            try:
                got.append(await call)
            except asyncio.CancelledError:
                continue
        return got

    for items in queues:
        for item in range(20):
            items.put(item)
        assert asyncio.run(asyncio.wait_for(read(items, 20), PATIENCE_S)) == list(range(20))


def test_getters_are_served_in_their_order(c: Cluster) -> None:
    q: Queue[int] = hoplite_mp.Queue()
    first = c.submit(q.get)
    waiters_are(q, 1)
    second = c.submit(q.get)
    waiters_are(q, 2)
    q.put(1)
    assert first.result(PATIENCE_S) == 1
    assert not second.done()
    q.put(2)  # not before: of two that are woken, who comes first has the older item
    assert second.result(PATIENCE_S) == 2


def test_waiting_workers_are_stood_in_for(c: Cluster) -> None:
    """More getters than workers, and the putter is a task, too."""
    q: Queue[int] = hoplite_mp.Queue()
    getting = [c.submit(q.get) for _ in range(6)]
    waiters_are(q, 6)
    putting = c.submit(_put_range, q, 6)
    assert sorted(f.result(PATIENCE_S) for f in getting) == list(range(6))
    putting.result(PATIENCE_S)


def _put_range(q: Queue[int], count: int) -> None:
    for number in range(count):
        q.put(number)


def test_join(c: Cluster) -> None:
    q: Queue[int] = hoplite_mp.Queue()
    q.join()
    with pytest.raises(ValueError, match="too many times"):
        q.task_done()
    q.put(1)
    q.put(2)
    joining = c.submit(q.join)
    waiters_are(q, 1)
    q.get()
    q.task_done()
    assert not joining.done()
    q.task_done()
    joining.result(PATIENCE_S)


@pytest.mark.parametrize("immediate", [False, True])
def test_shutdown(c: Cluster, immediate: bool) -> None:
    q: Queue[int] = hoplite_mp.Queue(1)
    q.put(1)
    putting = c.submit(q.put, 2)
    waiters_are(q, 1)
    q.shutdown(immediate)
    with pytest.raises(hoplite_mp.Queue.ShutDown):
        putting.result(PATIENCE_S)
    with pytest.raises(hoplite_mp.Queue.ShutDown, match="no more items can be put"):
        q.put(3)
    if not immediate:
        assert q.get() == 1
        q.task_done()
    with pytest.raises(ClosedError):
        q.get()
    q.join()


def test_shutdown_while_one_waits(c: Cluster) -> None:
    q: Queue[int] = hoplite_mp.Queue()
    getting = c.submit(q.get)
    waiters_are(q, 1)
    q.shutdown()
    with pytest.raises(hoplite_mp.Queue.ShutDown):
        getting.result(PATIENCE_S)


def test_names(c: Cluster) -> None:
    q: Queue[int] = hoplite_mp.Queue(3, name="jobs")
    same: Queue[int] = hoplite_mp.Queue(name="jobs")
    assert q == same
    assert same.maxsize == 3
    assert "'jobs'" in repr(same)
    q.put(1)
    assert c.submit(_get_named, "jobs").result(PATIENCE_S) == 1
    with pytest.raises(ValueError, match="'jobs', of class Queue"):
        hoplite_mp.Lock(name="jobs")
    assert len({q, same}) == 1


def _get_named(name: str) -> int:
    q: Queue[int] = hoplite_mp.Queue(name=name)
    return q.get()


def test_detached(c: Cluster) -> None:
    c.submit(_make_detached).result(PATIENCE_S)
    q: Queue[int] = hoplite_mp.Queue(name="stays")
    assert q.get() == 5
    Actor.close(q.actor)
    with pytest.raises(ActorLostError, match="closed"):
        q.put(1)


def _make_detached() -> None:
    q: Queue[int] = hoplite_mp.Queue(name="stays", detached=True)
    q.put(5)


def test_wrong_arguments(c: Cluster) -> None:
    for make in (lambda: hoplite_mp.Queue("3"), lambda: hoplite_mp.Queue(True)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="maxsize="):
            make()
    q: Queue[int] = hoplite_mp.Queue(-1)  # as in the standard library
    assert q.maxsize == 0
    with pytest.raises(TypeError, match="timeout="):
        q.get(timeout="1")  # type: ignore[arg-type]
    with pytest.raises(queue.Empty):
        q.get(timeout=-1)


STEPS = st.lists(
    st.sampled_from(["put", "put", "get", "get", "done", "look", "poll", "join"]), max_size=40
)


@given(st.integers(0, 3), STEPS)
@settings(
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_one_process_sees_a_queue_of_the_standard_library(
    c: Cluster, size: int, steps: list[str]
) -> None:
    model: queue.Queue[int] = queue.Queue(size)
    q: Queue[int] = hoplite_mp.Queue(size)

    def both(call: str, *args: Any) -> None:
        outcomes = []
        for one in (model, q):
            try:
                outcomes.append(getattr(one, call)(*args))
            except (queue.Empty, queue.Full, ValueError) as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1], (call, outcomes)

    for number, step in enumerate(steps):
        if step == "put":
            both("put", number, False)
        elif step == "get":
            both("get_nowait")
        elif step == "done":
            both("task_done")
        elif step == "poll":
            both("get", True, 0.0)
        elif step == "join" and not model.unfinished_tasks:
            both("join")
        for look in ("qsize", "empty", "full"):
            both(look)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 9))]
)
def test_many_threads_and_tasks(c: Cluster, seed: int) -> None:
    """Nothing is lost or doubled, and what one has put comes in its order, though getters and
    putters give up all the time."""
    chance = random.Random(seed)
    q: Queue[tuple[int, int]] = hoplite_mp.Queue(chance.choice([0, 1, 3]))
    putters, each = 3, 25
    tasks = [c.submit(_put_all, q, who, each, seed) for who in range(putters)]
    got: list[list[tuple[int, int]]] = [[], []]

    def get_all(into: list[tuple[int, int]], chance: random.Random) -> None:
        while True:
            try:
                item = q.get(timeout=chance.choice([0.0, 0.0005, 0.002, 0.02]))
            except queue.Empty:
                continue
            if item[0] < 0:
                return
            into.append(item)

    threads = [
        threading.Thread(target=get_all, args=(into, random.Random(seed + n)))
        for n, into in enumerate(got)
    ]
    for thread in threads:
        thread.start()
    c.wait(tasks)
    for task in tasks:
        task.result()
    for _ in threads:
        q.put((-1, 0))
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    everything = [item for into in got for item in into]
    assert sorted(everything) == [(who, n) for who in range(putters) for n in range(each)]
    for into in got:
        for who in range(putters):
            mine = [n for one, n in into if one == who]
            assert mine == sorted(mine)


def _put_all(q: Queue[tuple[int, int]], who: int, count: int, seed: int) -> None:
    chance = random.Random((seed + 1) * 100 + who)
    for number in range(count):
        while True:
            try:
                q.put((who, number), timeout=chance.choice([0.0, 0.0005, 0.002, 0.02]))
                break
            except queue.Full:
                continue


def put_all(q: Queue[int | None], count: int) -> None:
    for number in range(count):
        q.put(number)


async def get_impatiently(q: Queue[int | None], seed: int) -> list[int]:
    """Gets until None comes; most calls are cancelled if they take long."""
    found: list[int] = []
    chance = random.Random(seed)
    while True:
        patience = chance.choice([0.0005, 0.002, 0.01, 10])
        try:
            item = await asyncio.wait_for(q.get_async(), patience)
        except TimeoutError:
            continue
        if item is None:
            return found
        found.append(item)


def get_in_a_loop(q: Queue[int | None], seed: int, consumers: int) -> list[list[int]]:
    async def main() -> list[list[int]]:
        return await asyncio.gather(*(get_impatiently(q, seed + n) for n in range(consumers)))

    return asyncio.run(main())


@pytest.mark.parametrize(("processes", "consumers"), [(2, 1), (1, 3), (2, 2)])
def test_items_stay_in_order_although_gets_are_cancelled(
    c: Cluster, processes: int, consumers: int
) -> None:
    q: Queue[int | None] = hoplite_mp.Queue(maxsize=20)
    getting = [c.submit(get_in_a_loop, q, 10 * n, consumers) for n in range(processes)]
    count = 200
    c.submit(put_all, q, count).result(60)
    for _ in range(processes * consumers):
        q.put(None)
    found = [items for future in getting for items in future.result(60)]
    assert sorted(item for items in found for item in items) == list(range(count))
    for items in found:
        assert items == sorted(items)


async def hold_up(q: Queue[int], path: str) -> int:
    """Its loop is busy when the item comes."""
    getting = asyncio.ensure_future(q.get_async())
    await asyncio.sleep(0)
    while not Path(path).exists():
        time.sleep(0.01)
    return await getting


def test_event_loop_that_is_busy_does_not_hold_up_other_consumers(
    c: Cluster, tmp_path: Path
) -> None:
    q: Queue[int] = hoplite_mp.Queue()
    q.put(0)
    path = tmp_path / "go"
    slow = c.submit(hold_up, q, str(path))
    eventually(lambda: q.qsize() == 0)
    q.put(1)
    assert q.get(timeout=20) == 1
    q.put(2)
    assert q.get_nowait() == 2
    path.touch()
    assert slow.result(20) == 0
