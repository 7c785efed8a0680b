"""Arrays that lie in the store are given where they lie: nothing depends on it but copies."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hoplite_mp
from hoplite_mp._common.clock import deadline_ns
from tests.support.group_members import (
    Trio,
    check_survivors,
    part_of_call,
    pid_of_rank,
    wait_for_call,
)
from tests.support.shm_host import POOL, STATE, ShmHost
from tests.support.values import bits
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hoplite_mp import Cluster, Group

pytestmark = pytest.mark.usefixtures("no_call_buffers")
SIZE = 3
LENGTH = 30_000  # of float32: more than lies on a board, and than a small object
KINDS: dict[str, Callable[[Group, Any], Any]] = {
    "allreduce": lambda g, x: g.allreduce(x),
    "mean": lambda g, x: g.allreduce(x, "mean"),
    "reduce": lambda g, x: g.reduce(x, np.fmax, root=1),
    "reduce_scatter": lambda g, x: g.reduce_scatter(x),
    "broadcast": lambda g, x: g.broadcast(x, root=1),
    "gather": lambda g, x: g.gather(x, root=2),
    "allgather": lambda g, x: g.allgather(x),
    "alltoall": lambda g, x: g.alltoall([x] * g.size),
    "scatter": lambda g, x: g.scatter([x] * g.size, root=0),
    "scan": lambda g, x: g.scan(x),
    "exscan": lambda g, x: g.exscan(x),
}


def copied(cluster: Cluster, group: Group, x: Any) -> Any:
    return x


def made(cluster: Cluster, group: Group, x: Any) -> Any:
    array = group.empty(x.shape, x.dtype)
    array[...] = x
    return array


def made_in_columns(cluster: Cluster, group: Group, x: Any) -> Any:
    array = cluster.empty(x.shape, x.dtype, order="F")
    array[...] = x
    return array


def a_part_of_one(cluster: Cluster, group: Group, x: Any) -> Any:
    array = group.empty((x.shape[0] + 2, *x.shape[1:]), x.dtype)
    array[:2], array[2:] = -1, x
    return array[2:]


def got(cluster: Cluster, group: Group, x: Any) -> Any:
    return cluster.get(cluster.put(x))


def published(cluster: Cluster, group: Group, x: Any) -> Any:
    array = made(cluster, group, x)
    array_of[id(array)] = cluster.put(array)
    return array


array_of: dict[int, Any] = {}
PLACES = [copied, made, made_in_columns, a_part_of_one, got, published]


@pytest.fixture(scope="module")
def trio(cluster: Cluster) -> Iterator[Trio]:
    found = Trio(cluster)
    yield found
    for group in found.groups:
        group.close()
    array_of.clear()


def shown(found: Any) -> Any:
    """Bit for bit, of any kind of result."""
    if isinstance(found, Exception):
        return type(found), str(found)
    if isinstance(found, list):
        return [shown(one) for one in found]
    return None if found is None else bits(found)


@given(
    kind=st.sampled_from(list(KINDS)),
    places=st.lists(st.sampled_from(PLACES), min_size=SIZE, max_size=SIZE),
    shape=st.sampled_from([(LENGTH,), (300, 100), (LENGTH // 8,), (0,)]),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_where_an_array_lies_changes_nothing(
    cluster: Cluster, trio: Trio, kind: str, places: list[Any], shape: Any, seed: int
) -> None:
    def given_(group: Group) -> Any:
        rng = np.random.default_rng([seed, group.rank])
        return rng.normal(size=shape).astype(np.float32) * 10.0**group.rank

    def body(group: Group) -> Any:
        array = places[group.rank](cluster, group, given_(group))
        mine = array.flags.writeable
        result = KINDS[kind](group, array)
        assert array.flags.writeable == mine
        assert not group._calls._in_place.lends
        if mine:
            array[...] = -7  # nobody reads it any more
        for one in result if isinstance(result, list) else [result]:
            if one is not None:
                assert one.flags.writeable
                assert not np.shares_memory(one, array)
        return result

    plain = trio.call(lambda g: KINDS[kind](g, given_(g)))
    for one, other in zip(trio.call(body), plain, strict=True):
        if isinstance(one, Exception) or isinstance(other, Exception):
            raise AssertionError((one, other))
        assert shown(one[0]) == shown(other[0])


def test_what_is_recognised(cluster: Cluster) -> None:
    with cluster.group("alone", 1) as group:
        group.barrier()

        def ref(array: Any, may_lend: bool = True) -> Any:
            return group._calls._in_place.ref(array, may_lend)

        x = np.arange(LENGTH, dtype=np.float32)
        sealed = got(cluster, group, x)
        result = group.allgather(made(cluster, group, np.zeros(1 << 18)))[0]
        for array in (made(cluster, group, x), sealed, published(cluster, group, x), result):
            assert ref(array.reshape(array.shape)) is not None
        for array in (x, made(cluster, group, x)[1:], sealed[1:], made(cluster, group, x)[::2]):
            assert ref(array) is None
        assert ref(made(cluster, group, x), False) is None
        assert ref(sealed, False) is not None
        assert ref(sealed.view(np.int32)) is None  # its object says float32
        assert ref(made(cluster, group, x[:10])) is None  # too small to be worth it
        assert group._calls._in_place.take_back()
        again = cluster.put(result)
        result[0] += 1  # it is its owner's to write, so what was put is a copy
        assert cluster.get(again)[0] == result[0] - 1


@pytest.mark.parametrize("background", [False, True])
def test_whoever_holds_a_part_after_the_deadline_takes_no_result(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """All parts have been read by then: the call is over for everybody, the giver included."""
    with cluster.group("held", 1, timeout=60) as group:
        x = made(cluster, group, np.arange(LENGTH, dtype=np.float32))
        take_back = group._calls._take_back
        with monkeypatch.context() as patch:
            patch.setattr(group._calls._in_place, "take_back", lambda: False)
            patch.setattr(group._calls, "_take_back", lambda _: take_back(deadline_ns(0.1)))
            if background:
                assert np.array_equal(group.allreduce_async(x).result(60), x)
            else:
                assert np.array_equal(group.allreduce(x), x)
        assert group._calls._in_place.lends
        x += 1
        assert np.array_equal(group.allreduce(x), x)
        assert not group._calls._in_place.lends


def member_without_room(rank: int) -> Any:
    group = hoplite_mp.current().group("room", 2, rank, timeout=20)
    x = group.empty(6 << 20, np.float32)
    x[:] = rank + 1
    for _ in range(3):
        x[0] = 1
        assert group.allreduce(x, out=x) is x
    return float(x[0]), float(x[-1])


def test_nothing_is_copied() -> None:
    """Two parts of 24 MiB, and the sum: copies of the parts would find no room."""
    with hoplite_mp.Cluster(workers=2, memory="80MiB") as cluster:
        found = [cluster.submit(member_without_room, rank) for rank in range(2)]
        assert [one.result(30) for one in found] == [(2.0, 12.0)] * 2


def writer(rank: int, size: int, count: int) -> list[str]:
    """Gives the same array to call after call, and writes to it as soon as it may."""
    group = hoplite_mp.current().group("writers", size, rank, timeout=60)
    x = group.empty(LENGTH, np.float32)
    rng = random.Random(rank)
    wrong = []
    for number in range(count):
        root = number % size
        x[:] = 100 * rank + number
        if number % 3 == 0:
            result = group.broadcast(x if rank == root else None, root=root)
            right = [result] if (result == 100 * root + number).all() else []
        elif number % 3 == 1:
            result = group.allgather(x)
            right = [r for r, one in enumerate(result) if (one == 100 * r + number).all()]
            right = right if len(right) == size else []
        else:
            result = group.scan(x)
            total = sum(100 * r + number for r in range(rank + 1))
            right = [result] if (result == total).all() else []
        x[:] = -1
        if not right:
            wrong.append(f"call {number}")
        if rng.random() < 0.05:
            time.sleep(rng.random() * 0.002)  # another rank waits for this one's reading
    return wrong


def test_who_has_its_array_back_may_write_to_it() -> None:
    with hoplite_mp.Cluster(workers=3, memory="128MiB") as cluster:
        tasks = [cluster.submit(writer, rank, 3, 300) for rank in range(3)]
        assert [task.result(60) for task in tasks] == [[]] * 3


def test_what_is_written_during_a_call_is_the_same_for_all_ranks(cluster: Cluster) -> None:
    with (
        cluster.group("during", 2, 0, timeout=20) as first,
        cluster.group("during", 2, 1, timeout=20) as second,
    ):
        x, y = first.empty(1 << 20, np.float32), second.empty(1 << 20, np.float32)
        x[:], y[:] = 1, 10
        for number in range(2, 12):
            future = first.allreduce_async(x)
            other = second.allreduce_async(y)
            x[:] = number
            one, two = future.result(20), other.result(20)
            assert np.array_equal(one, two)
            assert set(np.unique(one)) <= {10.0 + number - 1, 10.0 + number}


def steps(
    rank: int, name: str, size: int, count: int, length: int, folder: Path, wait_for: int = 0
) -> dict[int, Any]:
    """As in test_group_deaths, from an array in the store and into another one."""
    group = hoplite_mp.current().group(name, size, rank)
    (folder / f"{name}-{rank}.pid").write_text(str(os.getpid()))
    x, out = group.empty(length, np.float32), group.empty(length, np.float32)
    found: dict[int, Any] = {}
    while group.calls is None or group.calls < count:
        x[:] = part_of_call(rank, group.calls or 0, length)
        group.allreduce(x, out=out)
        x[:] = 1e30
        assert group.calls is not None
        found[group.calls - 1] = (group.contributors, hashlib.sha256(out.tobytes()).hexdigest())
        (folder / f"{name}-{rank}.at").write_text(str(group.calls))
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2))])
def test_givers_are_killed_in_the_middle(tmp_path: Path, seed: int) -> None:
    """What a dead one gave stays as it was while others read it, and is freed then."""
    random_ = random.Random(seed)
    with hoplite_mp.Cluster(workers=5, memory="256MiB") as cluster:
        run = cluster.options(retries=0)
        for number in range(2):
            name, size = f"givers-{number}", random_.choice([2, 3, 4, 5])
            args = size, 40, 300_000, tmp_path
            tasks = [run.submit(steps, rank, name, *args) for rank in range(size)]
            victims = random_.sample(range(size), random_.randint(1, size - 1))
            pids = [pid_of_rank(tmp_path, name, rank) for rank in victims]
            wait_for_call(tmp_path, name, victims[0], random_.randint(0, 5))
            for pid in pids:
                end = time.monotonic() + random_.random() * 0.004
                while time.monotonic() < end:
                    pass
                os.kill(pid, signal.SIGKILL)
            found = {r: tasks[r].result(timeout=30) for r in range(size) if r not in victims}
            check_survivors(found, set(victims), size, 300_000)
            del tasks

        def used() -> int:
            return int(cluster.stats()["bytes_used"])

        eventually(lambda: used() < 16 << 20, "the memory of the dead")


def reads_slowly(rank: int, folder: Path, dies: bool) -> Any:
    """Rank 1 is stopped, and perhaps killed, before it reads what rank 0 has given, and goes on
    writing."""
    group = hoplite_mp.current().group("slow", 2, rank, timeout=20)
    x = group.empty(LENGTH, np.float32)
    x[:] = 5
    group.barrier()
    if rank:
        read = group._calls._take

        def later(*args: Any) -> Any:
            (folder / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            return read(*args)

        group._calls._take = later  # type: ignore[method-assign, assignment]
        return group.broadcast(root=0).tolist() == [5.0] * LENGTH
    group.broadcast(x, root=0)
    x[:] = 6
    return True


@pytest.mark.parametrize("dies", [False, True])
def test_only_reductions_wait_for_their_readers(tmp_path: Path, dies: bool) -> None:
    with hoplite_mp.Cluster(workers=2, memory="64MiB") as cluster:
        run = cluster.options(retries=0)
        giver, reader = (run.submit(reads_slowly, rank, tmp_path, dies) for rank in range(2))
        path = tmp_path / "pid"
        pid = int(eventually(lambda: path.exists() and path.read_text()))
        # SIGCONT would be lost if it came before the reader has stopped itself.
        eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        assert giver.result(20)  # its array was copied, so it waits for no reader
        os.kill(pid, signal.SIGKILL if dies else signal.SIGCONT)
        if dies:
            assert isinstance(reader.exception(20), hoplite_mp.WorkerLostError)
        else:
            assert reader.result(20) is True


@pytest.fixture
def host() -> Iterator[ShmHost]:
    found = ShmHost()
    yield found
    found.close()


def test_a_block_is_recalled_when_nobody_reads_it(host: ShmHost) -> None:
    from hoplite_mp import _tasks

    owner = host.with_span(host.node.register(0, 2, POOL))
    reader = host.client(host.node.register(0, 2, POOL))
    tasks = _tasks.Tasks(owner)
    block = owner.block(owner.allocate(500), 500)
    memoryview(block)[:] = b"a" * 500
    hold = block.lend()
    held, seen = reader.hold(hold.oid), reader.view(hold.oid)
    assert bytes(memoryview(seen)) == b"a" * 500  # type: ignore[arg-type]
    event = tasks.event()
    assert not block.recall()
    assert block.published == hold.oid
    del seen
    assert tasks.event() != event  # it is woken
    assert block.recall()
    assert block.recall()  # nothing is lent
    assert not block.published
    assert reader.view(hold.oid) == STATE["DELETED"]
    memoryview(block)[:] = b"b" * 500
    second = block.lend()
    assert bytes(memoryview(reader.view(second.oid))) == b"b" * 500  # type: ignore[arg-type]
    assert reader.view(hold.oid) == STATE["DELETED"]
    del held, hold
    owner.collect()
    assert block.recall()
    del block, second
    owner.collect()
    assert not [one for one in host.node.scan() if one["owner"] == owner.slot]
    assert owner.take_empty_spans()
