"""allreduce, broadcast, gather, allgather, alltoall, reduce_scatter on one host."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError, as_completed, wait
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import HopliteTimeoutError, ObjectLostError, ReduceError
from tests.support.functions import after, failing_after, raise_key_error
from tests.support.values import bits
from tests.support.waiting import Gate, eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hoplite_mp import Cluster

MOVES = ["broadcast", "gather", "allgather", "alltoall"]


def move(cluster: Cluster, name: str, refs: list[Any], to: Any = None) -> Any:
    """The collective of that name over all refs."""
    if name == "broadcast":
        return cluster.broadcast(refs[-1], to)
    if name == "alltoall":
        return cluster.alltoall([refs], ["h0"] * len(refs) if to is None else [to] * len(refs))
    return getattr(cluster, name)(refs, to)


def test_allreduce_is_a_reduce_that_is_everywhere(cluster: Cluster, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    late = cluster.submit(after, gate, np.ones(4))
    refs = [cluster.put(np.full(4, 2.0)), late, cluster.put(np.full(4, 4.0))]
    whole = cluster.allreduce(refs, "max", reproducible=True)
    part = cluster.allreduce(refs, num=2, to="h0")
    mean = cluster.allreduce(refs, "mean", deadline=0, to=cluster.nodes)
    assert cluster.get(part, timeout=20).tolist() == [6.0] * 4
    assert cluster.get(mean, timeout=20).tolist() == [3.0] * 4
    assert (part.contributors, mean.contributors) == ((0, 2), (0, 2))
    assert whole.contributors is None
    gate.open()
    assert cluster.get(whole, timeout=20).tolist() == [4.0] * 4
    assert cluster.locations(whole) == [node.id for node in cluster.nodes]
    bad = cluster.allreduce([refs[0], cluster.submit(raise_key_error, "x")])
    with pytest.raises(ReduceError) as caught:
        cluster.get(bad, timeout=20)
    assert type(caught.value.__cause__) is KeyError


@pytest.mark.parametrize("name", MOVES)
def test_done_when_all_are_there(cluster: Cluster, tmp_path: Path, name: str) -> None:
    gate = Gate(tmp_path)
    late = cluster.submit(after, gate, np.ones(4))
    done = move(cluster, name, [cluster.put(1), late])
    called: list[Any] = []
    done.add_done_callback(called.append)
    assert not done.done()
    with pytest.raises(HopliteTimeoutError):
        done.result(timeout=0)
    gate.open()
    assert done.result(timeout=20) is None
    assert done.done()
    assert done.exception() is None
    eventually(lambda: called == [done], "the callback")
    assert cluster.locations(late) == ["h0"]


@pytest.mark.parametrize("name", MOVES)
def test_a_failed_source_is_the_futures_own_failure(
    cluster: Cluster, tmp_path: Path, name: str
) -> None:
    gate = Gate(tmp_path)
    bad = cluster.submit(failing_after, gate, "boom")
    done = move(cluster, name, [cluster.put(1), bad])
    assert not done.done()
    gate.open()
    with pytest.raises(KeyError, match="boom"):
        done.result(timeout=20)
    assert "failing_after" in str(done.exception().__cause__)
    gone = cluster.put(1)
    cluster.delete(gone)
    with pytest.raises(ObjectLostError):
        move(cluster, name, [cluster.put(1), gone]).result(timeout=20)
    cancelled = cluster.submit(after, Gate(tmp_path, "never"), 1)
    waits = move(cluster, name, [cluster.put(1), cancelled])
    assert cancelled.cancel(force=True)
    with pytest.raises(CancelledError):
        waits.result(timeout=20)


@pytest.mark.parametrize("name", MOVES)
def test_nodes_that_there_are_and_nodes_that_there_are_not(cluster: Cluster, name: str) -> None:
    refs = [cluster.put(1), cluster.put(2)]
    for to in ("h0", cluster.nodes[0]):
        assert move(cluster, name, refs, to).result(timeout=20) is None
    for call in (
        lambda: move(cluster, name, refs, "h7"),
        lambda: cluster.reduce(refs, to="h7"),
        lambda: cluster.allreduce(refs, to=["h0", "h7"]),
        lambda: cluster.reduce_scatter(refs, to=["h0", "h7"]),
        lambda: cluster.options(node="h7"),
    ):
        with pytest.raises(ValueError, match="h7"):
            call()


def test_futures_of_collectives_are_real_ones(cluster: Cluster) -> None:
    futures = [cluster.broadcast(cluster.put(k)) for k in range(50)]
    assert set(as_completed(futures, timeout=20)) == set(futures)
    done, rest = wait([cluster.gather(cluster.put(1)) for _ in range(20)], timeout=20)
    assert (len(done), len(rest)) == (20, 0)
    assert list(hoplite_mp.as_completed([cluster.allgather([cluster.put(1)])], timeout=20))

    async def awaited() -> None:
        await asyncio.gather(*(cluster.gather([cluster.put(k)]) for k in range(10)))

    asyncio.run(awaited())


def test_every_callback_of_a_finished_collective_is_called(cluster: Cluster) -> None:
    """The end may come before the Future is made."""
    called: list[Any] = []
    for _ in range(200):
        cluster.gather(cluster.put(1)).add_done_callback(called.append)
    eventually(lambda: len(called) == 200, "200 callbacks")


@pytest.mark.parametrize("name", ["broadcast", "gather", "allgather"])
def test_nothing_to_move(cluster: Cluster, name: str) -> None:
    with pytest.raises(ValueError, match="no refs"):
        getattr(cluster, name)([])


def test_alltoall_takes_a_matrix(cluster: Cluster, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    matrix: list[list[Any]] = [[cluster.put((i, j)) for j in range(3)] for i in range(2)]
    matrix[1][2] = cluster.submit(after, gate, (1, 2))
    done = cluster.alltoall(matrix, ["h0"] * 3)
    assert not done.done()
    gate.open()
    assert done.result(timeout=20) is None
    assert cluster.get(matrix[1][2]) == (1, 2)
    with pytest.raises(ValueError, match="2 refs"):
        cluster.alltoall(matrix, ["h0"] * 2)


@pytest.mark.parametrize("shape", [(7,), (8, 3), (2, 5), (3, 0), (0, 4), (5, 2, 2)], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("op", ["sum", "mean", np.fmax], ids=str)
def test_reduce_scatter_cuts_as_array_split(
    cluster: Cluster, shape: tuple[int, ...], order: Any, op: Any
) -> None:
    random = np.random.default_rng(1)
    arrays = [np.asarray(random.integers(0, 99, shape), order=order) for _ in range(4)]
    reduced = np.max(arrays, 0) if callable(op) else getattr(np, op)(arrays, axis=0)
    refs = [cluster.put(a) for a in arrays]
    slices = cluster.reduce_scatter(refs, op, to=["h0"] * 4)
    for got, wanted in zip(
        cluster.get(slices, timeout=20), np.array_split(reduced, 4), strict=True
    ):
        assert bits(got) == bits(wanted)
    assert [part.contributors for part in slices] == [(0, 1, 2, 3)] * 4


def test_reduce_scatter_of_tasks_that_are_not_ready(cluster: Cluster, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    refs = [cluster.put(np.arange(5)), cluster.submit(after, gate, np.arange(5))]
    first, second = cluster.reduce_scatter(refs)
    assert first.contributors is None
    gate.open()
    assert cluster.get([first, second], timeout=20)[0].tolist() == [0, 2, 4]
    assert cluster.get(second).tolist() == [6, 8]


def test_a_slice_may_be_deleted_and_the_others_stay(cluster: Cluster, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    refs = [cluster.put(np.arange(4)), cluster.submit(after, gate, np.arange(4))]
    first, second = cluster.reduce_scatter(refs)
    cluster.delete(first)
    gate.open()
    assert cluster.get(second, timeout=20).tolist() == [4, 6]
    with pytest.raises(ObjectLostError):
        cluster.get(first)


@pytest.mark.parametrize(
    "values", [lambda: [1.0, 2.0], lambda: [np.zeros(3), np.zeros(4)], lambda: ["a", "b"]]
)
def test_reduce_scatter_fails_in_every_slice(
    cluster: Cluster, values: Callable[[], list[Any]]
) -> None:
    for part in cluster.reduce_scatter([cluster.put(v) for v in values()]):
        with pytest.raises(ValueError, match=r"source|dimension"):
            cluster.get(part, timeout=20)
    for part in cluster.reduce_scatter(
        [cluster.put(np.ones(2)), cluster.submit(raise_key_error, "x")]
    ):
        with pytest.raises(ReduceError) as caught:
            cluster.get(part, timeout=20)
        assert type(caught.value.__cause__) is KeyError


def test_reduce_scatter_checks_at_the_call(cluster: Cluster) -> None:
    refs = [cluster.put(np.ones(2)), cluster.put(np.ones(2))]
    with pytest.raises(ValueError, match="3 nodes for 2 slices"):
        cluster.reduce_scatter(refs, to=["h0"] * 3)
    with pytest.raises(ValueError, match="unknown op"):
        cluster.reduce_scatter(refs, "plus")
