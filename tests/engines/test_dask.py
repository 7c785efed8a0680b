"""Dask on one host: what tasks see of the cluster beside them, and what a client is given."""

from __future__ import annotations

import asyncio
import operator
import os
import pickle
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

import hoplite_mp
from hoplite_mp.integrations import dask as hoplite_dask
from hoplite_mp.integrations._sidecar import sidecar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(240)]
PATIENCE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For names of nodes, and what Dask spills."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("places")
        (folder / "runtime").mkdir(mode=0o700)
        patch.setenv("XDG_RUNTIME_DIR", str(folder / "runtime"))
        patch.setenv("TMPDIR", str(folder))
        yield


@pytest.fixture(scope="module")
def client(places: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Two workers in processes of their own; the scheduler is in this one."""
    folder: Path = tmp_path_factory.mktemp("scratch")
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=2,
            dashboard_address=None,
            local_directory=str(folder),
            memory_limit=0,
        ) as cluster,
        Client(cluster) as made,
    ):
        hoplite_dask.init(made)
        yield made


def until(reached: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def addresses(client: Client) -> list[str]:
    return list(client.scheduler_info(n_workers=-1)["workers"])


def put(i: int) -> hoplite_mp.ObjectRef[Any]:
    return hoplite_mp.current().put(np.full(100_000, float(i)))


def total_of(ref: Any) -> float:
    return float(hoplite_mp.current().get(ref).sum())


def look(x: Any) -> tuple[Any, ...]:
    """Whether an array lies in memory that this process shares with others."""
    base = x
    while getattr(base, "base", None) is not None:
        base = base.base
    return type(x).__name__, x.flags.writeable, type(base).__name__, os.getpid()


def test_init_again_changes_nothing(client: Client) -> None:
    c = hoplite_dask.init(client)
    assert hoplite_dask.init(client) is c
    assert len(c.nodes) == 1  # of this host, whatever the number of workers
    assert hoplite_mp.current() is c
    with Client(client.scheduler.address) as other:  # another client in this process
        assert hoplite_dask.init(other) is c


def test_the_token_is_in_no_arguments_and_no_repr(client: Client) -> None:
    (member,) = sidecar._members.values()
    token = member.place.token
    assert token not in repr(member.place)
    assert pickle.loads(pickle.dumps(member.place)) == member.place
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    assert token.encode() not in file.read()
            except OSError:  # it has just ended
                continue


def test_tasks_are_attached_and_share_memory(client: Client) -> None:
    c = hoplite_dask.init(client)
    ref = c.put(np.arange(200_000.0))
    found = [
        client.submit(lambda r: look(hoplite_mp.current().get(r)), ref, workers=[w], pure=False)
        for w in addresses(client)
    ]
    kinds = {one[:3] for one in client.gather(found)}
    assert kinds == {look(c.get(ref))[:3]}
    assert not c.get(ref).flags.writeable


def test_broadcast_gives_tasks_the_value(client: Client) -> None:
    big = hoplite_dask.broadcast(client, np.arange(500_000.0))
    assert big.status == "finished"
    assert len(client.who_has(big)[big.key]) == 2
    found = client.gather(
        [client.submit(look, big, workers=[w], pure=False) for w in addresses(client)]
    )
    assert {one[:2] for one in found} == {("ndarray", False)}
    assert len({one[3] for one in found}) == 2
    assert client.submit(np.sum, big).result() == np.arange(500_000.0).sum()
    nested = hoplite_dask.broadcast(client, {"weights": np.ones(100_000), "name": "x"})
    assert client.submit(lambda x: x["name"] + str(x["weights"].sum()), nested).result()
    assert nested.result()["name"] == "x"


def test_memory_returns_with_the_futures(client: Client) -> None:
    """Of broadcasts and reductions; at once, because no bytes of theirs are left with Dask."""
    c = hoplite_dask.init(client)

    def used() -> int:
        return int(c.stats()["bytes_used"])

    # Dask's scheduler forgets what earlier tests held some time after they let go of it.
    until(lambda: used() < 4_000_000, "the memory of earlier tests does not return")
    before = used()
    big = hoplite_dask.broadcast(client, np.ones(1_000_000))
    parts = client.map(lambda i: np.full(500_000, float(i)), range(4), pure=False)
    total = hoplite_dask.reduce(client, parts)
    assert total.result()[3] == 6.0
    assert used() >= before + 12_000_000
    del big, parts, total
    until(lambda: used() < before + 2_000_000, "the memory does not return")


def test_refs_go_in_and_out(client: Client) -> None:
    c = hoplite_dask.init(client)
    refs = client.map(put, range(4), pure=False)
    assert client.gather(client.map(total_of, refs)) == [i * 100_000.0 for i in range(4)]
    mine = [ref.result() for ref in refs]
    del refs
    assert [float(x[0]) for x in c.get(mine)] == [0.0, 1.0, 2.0, 3.0]
    given = c.put(np.ones(7))
    nested = client.submit(lambda d: total_of(d["a"][0]), {"a": [given]})
    assert nested.result() == 7.0
    # A ref names the same task each time: Dask computes it once.
    assert client.submit(total_of, given).key == client.submit(total_of, given).key
    data = client.scatter(given)
    assert client.submit(total_of, data).result() == 7.0


def test_a_ref_that_its_sender_drops_at_once(client: Client) -> None:
    """It is held while Dask carries it."""
    c = hoplite_dask.init(client)
    made = [client.submit(total_of, c.put(np.full(50_000, float(i)))) for i in range(5)]
    assert client.gather(made) == [i * 50_000.0 for i in range(5)]


def test_a_lost_ref_fails_its_task_alone(client: Client) -> None:
    c = hoplite_dask.init(client)
    good, bad = c.put(np.ones(100)), c.put(np.ones(100))
    c.delete(bad)
    both = [client.submit(total_of, good), client.submit(total_of, bad)]
    assert both[0].result() == 100.0
    with pytest.raises(hoplite_mp.ObjectLostError):
        both[1].result()


def test_reduce_is_a_sum_of_futures(client: Client) -> None:
    parts = client.map(lambda i: np.full((1000, 100), float(i)), range(9), pure=False)
    total = hoplite_dask.reduce(client, parts)
    assert total.result().shape == (1000, 100)
    assert (total.result() == 36.0).all()
    assert total.contributors == tuple(range(9))
    assert client.submit(np.sum, total).result() == 36.0 * 100_000
    mean = hoplite_dask.reduce(client, client.map(put, range(3), pure=False), "mean")
    assert float(mean.result()[5]) == 1.0
    largest = hoplite_dask.reduce(client, client.map(float, range(4)), np.maximum)
    assert float(largest.result()) == 3.0


def test_reduce_by_a_function_folds_any_values_in_their_order(client: Client) -> None:
    sets = client.map(lambda i: {i}, range(4), pure=False)
    assert hoplite_dask.reduce(client, sets, lambda a, b: a | b).result(PATIENCE_S) == {0, 1, 2, 3}
    words = client.map(str, range(4), pure=False)
    joined = hoplite_dask.reduce(client, words, lambda a, b: a + b)
    assert joined.result(PATIENCE_S) == "0123"
    assert joined.contributors == (0, 1, 2, 3)
    arrays = client.map(put, range(3), pure=False)
    total = hoplite_dask.reduce(client, arrays, operator.iadd)  # changes its left argument
    assert float(total.result(PATIENCE_S)[5]) == 3.0


def test_reduce_of_the_first_to_be_ready(client: Client, tmp_path: Path) -> None:
    """The last one waits for a file that comes when the result is there."""
    gate = tmp_path / "gate"

    def make(i: int) -> Any:
        while i == 1 and not gate.exists():
            time.sleep(0.02)
        if i == 2:
            raise KeyError(i)
        return np.full(1000, float(i))

    first = hoplite_dask.reduce(client, client.map(make, range(5), pure=False), num=3)
    assert float(first.result(PATIENCE_S)[0]) == 7.0
    assert first.contributors == (0, 3, 4)
    gate.touch()


def test_reduce_says_why_it_cannot(client: Client) -> None:
    def fail(i: int) -> Any:
        raise KeyError(f"number {i}")

    sources = [client.submit(fail, 1), client.submit(np.ones, 3)]
    with pytest.raises(hoplite_mp.ReduceError, match="number 1") as caught:
        hoplite_dask.reduce(client, sources).result(PATIENCE_S)
    assert isinstance(caught.value.__cause__, KeyError)
    shapes = [client.submit(np.ones, n) for n in (3, 4)]
    with pytest.raises(ValueError, match="shape"):
        hoplite_dask.reduce(client, shapes).result(PATIENCE_S)
    with pytest.raises(ValueError, match="no futures"):
        hoplite_dask.reduce(client, [])
    with pytest.raises(ValueError, match="num=3"):
        hoplite_dask.reduce(client, shapes, num=3)
    with pytest.raises(ValueError, match="unknown op"):
        hoplite_dask.reduce(client, shapes, "plus")
    with pytest.raises(TypeError, match="Dask Futures, not int"):
        hoplite_dask.reduce(client, [1])  # type: ignore[list-item]


def test_tasks_are_the_engines(client: Client) -> None:
    """The nodes have no workers; an executor brings its own."""
    c = hoplite_dask.init(client)
    with pytest.raises(RuntimeError, match="the workers of Ray or Dask"):
        c.submit(abs, -1)
    with c.executor(1) as executor:
        assert executor.submit(abs, -1).result() == 1


def test_groups_of_tasks(client: Client) -> None:
    def member(rank: int) -> float:
        with hoplite_mp.current().group("tasks", size=3, rank=rank) as group:
            return float(group.allreduce(np.full(5, rank + 1.0))[0])

    assert client.gather(client.map(member, range(3), pure=False)) == [6.0] * 3


def test_with_an_asynchronous_client(client: Client) -> None:
    async def main() -> tuple[float, float]:
        async with Client(client.scheduler.address, asynchronous=True) as own:
            await hoplite_dask.init(own)  # type: ignore[misc]
            x = await hoplite_dask.broadcast(own, np.ones(1000))
            total = hoplite_dask.reduce(own, [x, x])
            return float((await total)[0]), float(await own.submit(np.sum, x))

    assert asyncio.run(main()) == (2.0, 1000.0)


def test_workers_that_are_threads(tmp_path: Path) -> None:
    """All of Dask is in this process; when it has closed, so has the cluster beside it."""
    with (
        LocalCluster(
            n_workers=2,
            processes=False,
            dashboard_address=None,
            memory_limit=0,
            local_directory=str(tmp_path),
        ) as cluster,
        Client(cluster) as made,
    ):
        c = hoplite_dask.init(made)
        assert made.submit(total_of, c.put(np.ones(10))).result() == 10.0
        x = hoplite_dask.broadcast(made, np.ones(10))
        assert float(hoplite_dask.reduce(made, [x, x, x]).result()[0]) == 3.0
    with pytest.raises(hoplite_mp.ClosedError):
        c.put(1)
