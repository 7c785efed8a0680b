"""The eight calls of a Group against numpy, for many sizes, in workers and in threads."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from tests.support.group_members import in_threads
from tests.support.values import bits

if TYPE_CHECKING:
    from hoplite_mp import Cluster, Group


def value(rank: int, shape: Any = (5, 3)) -> Any:
    return np.random.default_rng(rank).normal(size=shape).astype(np.float32)


def every_call(rank: int, name: str, size: int, leaves: bool = False) -> dict[str, Any]:
    """A member: each call once; what it got. A task need not close its group."""
    group = hoplite_mp.current().group(name, size, rank)
    x, root = value(rank), size - 1
    got: dict[str, Any] = {
        "allreduce": group.allreduce(x),
        "mean": group.allreduce(x, op="mean"),
        "fmin": group.allreduce(x, np.fmin),
        "reduce": group.reduce(x, "max", root=root),
        "broadcast": group.broadcast(x if rank == root else "ignored", root=root),
        "gather": group.gather(x, root=root),
        "allgather": group.allgather(np.arange(rank)),
        "reduce_scatter": group.reduce_scatter(x, "sum"),
        "alltoall": group.alltoall([np.array([rank, to]) for to in range(size)]),
        "alive": group.alive,  # after the last call others may have left
        "barrier": group.barrier(),
    }
    got["state"] = (group.rank, group.size, got["alive"], group.contributors, group.calls)
    got["writable"] = all(
        array.flags.writeable for array in (got["allreduce"], got["broadcast"], got["alltoall"][0])
    )
    if leaves:
        group.close()
    return got


def check_every_call(found: list[dict[str, Any]]) -> None:
    size = len(found)
    xs, root = [value(rank) for rank in range(size)], size - 1
    total = functools.reduce(np.add, xs)
    everybody = tuple(range(size))
    for rank, got in enumerate(found):
        assert bits(got["allreduce"]) == bits(total)
        assert bits(got["mean"]) == bits(total / np.float32(size))
        assert bits(got["fmin"]) == bits(functools.reduce(np.fmin, xs))
        assert bits(got["broadcast"]) == bits(xs[root])
        assert bits(got["reduce_scatter"]) == bits(np.array_split(total, size)[rank])
        assert [bits(a) for a in got["allgather"]] == [bits(np.arange(r)) for r in everybody]
        assert [bits(a) for a in got["alltoall"]] == [bits(np.array([r, rank])) for r in everybody]
        assert got["barrier"] is None
        assert got["state"] == (rank, size, everybody, everybody, 10)
        assert got["writable"]
        if rank == root:
            assert bits(got["reduce"]) == bits(np.max(xs, axis=0))
            assert [bits(a) for a in got["gather"]] == [bits(x) for x in xs]
        else:
            assert got["reduce"] is None
            assert got["gather"] is None


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_call_in_tasks_on_fewer_workers(cluster: Cluster, size: int) -> None:
    tasks = [cluster.submit(every_call, rank, f"tasks-{size}", size) for rank in range(size)]
    check_every_call([task.result(timeout=60) for task in tasks])


@pytest.mark.parametrize("size", [2, 3])
def test_every_call_in_threads(cluster: Cluster, size: int) -> None:
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        found[rank] = every_call(rank, f"threads-{size}", size, True)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    check_every_call(found)


def test_sixty_four_members_on_two_workers(cluster: Cluster) -> None:
    def member(rank: int) -> Any:
        with hoplite_mp.current().group("many", 64, rank) as group:
            return group.allreduce(np.array([1, rank])).tolist(), len(group.contributors)

    tasks = [cluster.submit(member, rank) for rank in range(64)]
    assert {str(task.result(timeout=60)) for task in tasks} == {"([64, 2016], 64)"}


def test_members_in_the_driver_and_in_workers(cluster: Cluster) -> None:
    tasks = [cluster.submit(every_call, rank, "mixed", 3) for rank in (0, 2)]
    mine = every_call(1, "mixed", 3, True)
    check_every_call([tasks[0].result(timeout=60), mine, tasks[1].result(timeout=60)])


def test_out_takes_the_result(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        x = np.full(6, group.rank, np.int32)
        out, part = np.empty(6, np.int32), np.empty(3, np.int32)
        checks = [
            group.allreduce(x, out=out) is out and out.tolist() == [1] * 6,
            group.broadcast(x, root=1, out=x) is x and x.tolist() == [1] * 6,
            group.reduce_scatter(x, out=part) is part and part.tolist() == [2] * 3,
            group.reduce(x, "prod", root=0, out=out) is (out if group.rank == 0 else None),
        ]
        for wrong in (np.empty(5, np.int32), np.empty(6, np.int64)):
            with pytest.raises(ValueError, match="out"):
                group.allreduce(x, out=wrong)
        return [*checks, group.allreduce(x).tolist() == [2] * 6]

    assert in_threads(cluster, "out", 2, body) == [[True] * 5] * 2


def test_out_takes_results_that_are_lists(cluster: Cluster) -> None:
    def body(group: Group) -> None:
        x, outs = np.full(6, group.rank, np.int32), [np.full(6, 9, np.int32) for _ in range(2)]
        for call in (group.allgather, group.alltoall):
            got = call(x if call == group.allgather else [x, x], out=outs)
            assert [one is out for one, out in zip(got, outs, strict=True)] == [True, True]
            assert [out.tolist() for out in outs] == [[0] * 6, [1] * 6]
            for out in outs:
                out[:] = 9
        got_at_root = group.gather(x, root=1, out=outs if group.rank == 1 else None)
        assert (got_at_root is None) == (group.rank == 0)
        assert outs[0].tolist() == [9 * (group.rank == 0)] * 6
        with pytest.raises(ValueError, match="a list of 2 arrays"):
            group.allgather(x, out=outs[:1])

    assert in_threads(cluster, "outs", 2, body) == [None] * 2


def test_x_may_be_used_again_and_results_are_ones_own(cluster: Cluster) -> None:
    def body(group: Group) -> list[float]:
        x, seen = np.ones(50_000), []
        for step in range(20):
            x[:] = step
            got = group.allreduce(x)
            seen.append(float(got.max()))
            assert got.min() == got.max()
            got[:] = -1  # nobody else may see this
        return seen

    assert in_threads(cluster, "reuse", 3, body) == [[3.0 * step for step in range(20)]] * 3


def test_async_calls_keep_their_order(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        futures = [group.allreduce_async(np.array([k]), op="sum") for k in range(20)]
        between = group.allreduce(np.array([100]))
        late = group.gather_async(np.array(group.rank), root=1)
        waits = group.barrier_async()
        group.broadcast_async(np.zeros(2), root=0).result(20)
        gathered = late.result(20)
        assert waits.result(20) is None
        return (
            [int(future.result(20)[0]) for future in futures],
            int(between[0]),
            None if gathered is None else [int(g) for g in gathered],
            group.calls,
        )

    numbers = [2 * k for k in range(20)]
    found = in_threads(cluster, "async", 2, body)
    assert found == [(numbers, 200, None, 24), (numbers, 200, [0, 1], 24)]


def test_a_failure_of_an_async_call_is_its_futures(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        wrong = group.allreduce_async(np.zeros(2 + group.rank))
        good = group.allreduce_async(np.ones(1))
        return type(wrong.exception(20)), good.result(20).tolist()

    assert in_threads(cluster, "async-error", 2, body) == [(ValueError, [2.0])] * 2


def test_large_and_tiny_and_empty_arrays(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        big = group.allreduce(np.full(1 << 20, group.rank + 1.0))
        tiny = group.allreduce(np.int8(5))
        none = group.allreduce(np.empty((0, 3)))
        number = group.allreduce(True)
        moved = group.allgather(np.full(1 << 20, group.rank, np.float64))
        return (
            (big.min(), big.max(), big.nbytes), (tiny.shape, tiny.dtype.name, int(tiny)),
            none.shape, (bool(number), number.dtype.name), [float(m.mean()) for m in moved],
        )  # fmt: skip

    wanted = ((3.0, 3.0, 8 << 20), ((), "int8", 10), (0, 3), (True, "bool"), [0.0, 1.0])
    assert in_threads(cluster, "sizes", 2, body) == [wanted] * 2


@pytest.mark.parametrize("order", ["F", "strided", "mixed", "big-endian"])
def test_memory_orders(cluster: Cluster, order: str) -> None:
    def body(group: Group) -> Any:
        x = value(group.rank, (4, 6))
        if order == "strided":
            x = value(group.rank, (8, 12))[::2, ::2]
        elif order == "big-endian":
            x = x.astype(">f4")
        elif order == "F" or group.rank == 0:
            x = np.asfortranarray(x)
        return x, group.allreduce(x), group.broadcast(x, root=1)

    (a, first, copy), (b, second, again) = in_threads(cluster, f"order-{order}", 2, body)
    assert bits(first) == bits(second)
    assert (first == a + b).all()
    assert bits(copy) == bits(again) == bits(b)


def test_narrow_floats_are_rounded_once(cluster: Cluster) -> None:
    def body(group: Group) -> float:
        return float(group.allreduce(np.array([(2048, 1, 1)[group.rank]], np.float16))[0])

    assert in_threads(cluster, "half", 3, body) == [2050.0] * 3


def test_two_groups_at_once_and_groups_in_nested_tasks(cluster: Cluster) -> None:
    def inner(rank: int, name: str) -> int:
        with hoplite_mp.current().group(name, 3, rank) as group:
            return int(group.allreduce(np.array(rank)))

    def outer(rank: int) -> Any:
        here = hoplite_mp.current()
        rows, columns = here.group("rows", 3, rank), here.group("columns", 3, 2 - rank)
        tasks = [here.submit(inner, k, f"nested-{rank}") for k in range(3)]
        a = [int(rows.allreduce(np.array(rank)))]
        b = [int(columns.broadcast(np.array(rank), root=0))]
        return a, b, [task.result() for task in tasks], columns.rank

    found = [task.result(timeout=60) for task in [cluster.submit(outer, k) for k in range(3)]]
    assert found == [([3], [2], [3, 3, 3], 2 - rank) for rank in range(3)]
