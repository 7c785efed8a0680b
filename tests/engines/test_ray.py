"""Ray on this host with a node of ours beside it: refs, current(), and the collectives' face."""

from __future__ import annotations

import operator
import os
import pickle
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pytest

import hoplite_mp
from hoplite_mp.errors import ClosedError

ray = pytest.importorskip("ray")

import hoplite_mp.integrations.ray as front  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
cloudpickle.register_pickle_by_value(sys.modules[__name__])
STORE_BYTES = 100_000_000
PATIENCE_S = 60.0
SIZE = 3


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """Ray, without the cluster beside it."""
    ray.init(
        num_cpus=SIZE,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def c(engine: Any) -> Iterator[hoplite_mp.Cluster]:
    yield front.init(memory="200MiB")
    front.shutdown()
    with pytest.raises(ClosedError):
        hoplite_mp.current()


def until(done: Callable[[], object], why_not: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end, why_not
        time.sleep(0.05)


def remote(function: Any, *args: Any) -> Any:
    """What it returns in a task of Ray's."""
    return ray.get(ray.remote(function).remote(*args))


def test_without_ray_and_without_init(engine: Any) -> None:
    """Before the cluster is there; this test stands first."""
    with pytest.raises(ClosedError, match=r"call hoplite_mp\.integrations\.ray\.init"):
        front.reduce([ray.put(1.0)])
    with pytest.raises(ClosedError, match=r"call hoplite_mp\.integrations\.ray\.init"):
        front.broadcast(1.0)

    def look() -> str:
        try:
            hoplite_mp.current()
        except ClosedError:
            return "closed"
        return "open"

    assert remote(look) == "closed"


def test_refs_are_arguments_and_results_in_any_nesting(c: hoplite_mp.Cluster) -> None:
    ref = c.put(np.arange(100_000.0))

    def doubled(nest: Any) -> Any:
        c = hoplite_mp.current()
        x = c.get(nest["refs"][0])
        return {"sum": float(x.sum()), "writable": x.flags.writeable, "refs": [c.put(x * 2)]}

    answer = remote(doubled, {"refs": [ref]})
    assert answer["sum"] == 4999950000.0
    assert not answer["writable"]
    assert (c.get(answer["refs"][0]) == 2 * c.get(ref)).all()
    assert [node.workers for node in c.nodes] == [0]


def test_an_actor_holds_what_it_was_given(c: hoplite_mp.Cluster) -> None:
    class Keeper:
        def keep(self, refs: Any) -> int:
            self.refs = refs
            return len(refs)

        def total(self) -> float:
            return float(sum(x.sum() for x in hoplite_mp.current().get(self.refs)))

    keeper = ray.remote(Keeper).remote()
    refs = [c.put(np.full(50_000, float(i))) for i in range(4)]
    assert ray.get(keeper.keep.remote(refs)) == 4
    del refs
    assert ray.get(keeper.total.remote()) == 300_000.0
    ray.kill(keeper)


def test_tasks_are_rays(c: hoplite_mp.Cluster) -> None:
    with pytest.raises(RuntimeError, match="the workers of Ray or Dask"):
        c.submit(pow, 2, 3)


def test_a_second_init_is_the_same_cluster(c: hoplite_mp.Cluster) -> None:
    assert front.init() is c


def test_the_place_is_a_secret(c: hoplite_mp.Cluster) -> None:
    from hoplite_mp.integrations.ray._actors import LEADER, NAMESPACE

    place = ray.get(ray.get_actor(LEADER, namespace=NAMESPACE).place.remote())
    assert place.token not in repr(place)
    assert pickle.loads(pickle.dumps(place)) == place


def full(value: float, gate: str = "") -> Any:
    """An array, once the file `gate` exists."""
    while gate and not os.path.exists(gate):
        time.sleep(0.02)
    return np.full((1000, 100), value)


def test_reduce_of_rays_refs_is_a_ref_of_the_sum(c: hoplite_mp.Cluster) -> None:
    total = front.reduce([ray.remote(full).remote(float(i)) for i in range(9)])
    assert isinstance(total, ray.ObjectRef)
    assert (ray.get(total, timeout=PATIENCE_S) == np.full((1000, 100), 36.0)).all()
    assert total.contributors == tuple(range(9))
    assert remote(lambda x: float(x.sum()), total) == 3_600_000.0
    assert remote(lambda nest: float(ray.get(nest["total"])[0, 0]), {"total": total}) == 36.0
    largest = front.reduce([ray.put(np.float64(i)) for i in range(4)], np.maximum)
    assert float(ray.get(largest, timeout=PATIENCE_S)) == 3.0


def test_reduce_by_a_function_folds_any_values_in_their_order(c: hoplite_mp.Cluster) -> None:
    joined = front.reduce([ray.put([i]) for i in range(4)], lambda a, b: a + b)
    assert ray.get(joined, timeout=PATIENCE_S) == [0, 1, 2, 3]
    assert joined.contributors == (0, 1, 2, 3)
    total = front.reduce([ray.put(full(float(i))) for i in range(3)], operator.iadd)
    assert float(ray.get(total, timeout=PATIENCE_S)[0, 0]) == 3.0


def test_reduce_of_refs_of_both_kinds_is_their_mean(c: hoplite_mp.Cluster) -> None:
    made = [
        ray.remote(lambda i: hoplite_mp.current().put(full(i))).remote(float(i)) for i in range(2)
    ]
    mean = front.reduce([*made, ray.put(full(5.0))], "mean")
    assert float(ray.get(mean, timeout=PATIENCE_S)[7, 7]) == 2.0


def test_reduce_in_a_task_takes_the_refs_that_the_task_has(c: hoplite_mp.Cluster) -> None:
    def inner(refs: Any) -> Any:
        return ray.get(front.reduce(refs))[0, 0]

    assert remote(inner, [ray.put(full(1.0)), ray.put(full(2.0))]) == 3.0


def test_reduce_with_num_takes_the_first_and_skips_the_failed(
    c: hoplite_mp.Cluster, tmp_path: Path
) -> None:
    def fail() -> None:
        raise KeyError("broken")

    gate = tmp_path / "gate"
    make = ray.remote(full).options(num_cpus=0)
    refs = [make.remote(float(i), str(gate) if i == 1 else "") for i in range(5)]
    refs[2] = ray.remote(fail).remote()
    first = front.reduce(refs, num=3)
    assert float(ray.get(first, timeout=PATIENCE_S)[0, 0]) == 7.0
    assert first.contributors == (0, 3, 4)
    gate.touch()


def test_reduce_of_what_cannot_be_reduced_gives_one_clear_error(c: hoplite_mp.Cluster) -> None:
    def fail() -> None:
        raise KeyError("broken")

    failed = front.reduce([ray.remote(fail).remote(), ray.put(full(1.0))])
    with pytest.raises(hoplite_mp.ReduceError, match="source 0: KeyError: 'broken'") as caught:
        ray.get(failed, timeout=PATIENCE_S)
    assert "cannot be met" in str(caught.value)
    assert failed.contributors is None
    with pytest.raises(ValueError, match="shape"):
        ray.get(front.reduce([ray.put(np.ones(n)) for n in (3, 4)]), timeout=PATIENCE_S)
    with pytest.raises(ValueError, match=r"source 0 .* is neither an array nor a number"):
        ray.get(front.reduce([ray.put({"a": 1}), ray.put({"a": 2})]), timeout=PATIENCE_S)
    ones = [ray.put(np.ones(3))] * 2
    with pytest.raises(ValueError, match="no refs"):
        front.reduce([])
    with pytest.raises(ValueError, match="num=3"):
        front.reduce(ones, num=3)
    with pytest.raises(ValueError, match="unknown op"):
        front.reduce(ones, "plus")
    with pytest.raises(TypeError, match=r"Ray refs .*, not int"):
        front.reduce([1])


def test_reduce_survives_the_worker_that_has_made_an_input(c: hoplite_mp.Cluster) -> None:
    """Also the one that has put it: the store has the objects of all of a host's processes."""

    class Maker:
        def make(self) -> Any:
            return hoplite_mp.current().put(full(2.0)), ray.put(full(3.0))

        def value(self) -> Any:
            return full(4.0)

        def pid(self) -> int:
            return os.getpid()

    maker = ray.remote(Maker).remote()
    ours, _ = ray.get(maker.make.remote())
    value = maker.value.remote()
    ray.wait([value])
    pid = ray.get(maker.pid.remote())
    os.kill(pid, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the worker does not end")
    total = front.reduce([ray.put(ours), value])
    assert float(ray.get(total, timeout=PATIENCE_S)[0, 0]) == 6.0


def test_reduce_of_an_object_whose_owner_is_dead_is_an_error(c: hoplite_mp.Cluster) -> None:
    class Owner:
        def own(self) -> Any:
            return [ray.put(full(3.0))]

        def pid(self) -> int:
            return os.getpid()

    owner = ray.remote(Owner).remote()
    (lost,) = ray.get(owner.own.remote())
    pid = ray.get(owner.pid.remote())
    os.kill(pid, signal.SIGKILL)

    def is_lost() -> bool:
        try:
            ray.get(lost, timeout=1)
        except ray.exceptions.OwnerDiedError:
            return True
        except ray.exceptions.GetTimeoutError:
            pass
        return False

    until(is_lost, "Ray does not notice that the owner is dead")
    with pytest.raises(hoplite_mp.ReduceError, match="source 1: OwnerDiedError"):
        ray.get(front.reduce([ray.put(full(1.0)), lost]), timeout=PATIENCE_S)
    skipped = front.reduce([ray.put(full(1.0)), lost], num=1)
    assert float(ray.get(skipped, timeout=PATIENCE_S)[0, 0]) == 1.0


def test_memory_of_reductions_returns_when_they_are_over(c: hoplite_mp.Cluster) -> None:
    def used() -> int:
        return int(c.stats()["bytes_used"])

    before = used()
    parts = [ray.put(np.full(1_000_000, float(i))) for i in range(4)]
    total = front.reduce(parts)
    assert float(ray.get(total, timeout=PATIENCE_S)[3]) == 6.0
    until(lambda: used() < before + 2_000_000, "the memory does not return")


def test_broadcast_gives_tasks_the_value_without_a_copy(c: hoplite_mp.Cluster) -> None:
    def look(ref: Any) -> tuple[float, bool]:
        x = hoplite_mp.current().get(ref)
        return float(x.sum()), bool(x.flags.writeable)

    shared = front.broadcast(ray.remote(full).remote(2.0))
    assert isinstance(shared, hoplite_mp.ObjectRef)
    assert remote(look, shared) == (200_000.0, False)
    assert remote(look, front.broadcast(np.ones(9))) == (9.0, False)
    assert front.broadcast(shared) is shared
    nested = front.broadcast(ray.put({"weights": np.ones(1000), "name": "x"}))
    assert c.get(nested)["name"] == "x"


def test_broadcast_of_a_failed_task_raises_its_error(c: hoplite_mp.Cluster) -> None:
    def fail() -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        front.broadcast(ray.remote(fail).remote())


class Rank:
    """One rank, as programs for Ray's own collectives are written."""

    def __init__(self, rank: int, size: int, name: str, declared: bool) -> None:
        from hoplite_mp.integrations.ray import collective as col

        self.rank, self.size, self.name, self.col = rank, size, name, col
        if not declared:
            col.init_collective_group(size, rank, "gloo", name)

    def calls(self, tensors: bool) -> dict[str, Any]:
        """All of them, in place."""
        col, name, size = self.col, self.name, self.size

        def full(count: int, value: float) -> Any:
            if tensors:
                import torch

                return torch.full((count,), value, dtype=torch.float32)
            return np.full(count, value, np.float32)

        def done(x: Any) -> list[float]:
            return [float(one) for one in x]

        found: dict[str, Any] = {}
        for op in col.ReduceOp:
            x = full(5, self.rank + 2)
            col.allreduce(x, name, op)
            found[op.name] = done(x)
        x = full(2, self.rank)
        col.broadcast(x, 1, name)
        found["broadcast"] = done(x)
        parts = [full(2, -1) for _ in range(size)]
        col.allgather(parts, full(2, self.rank), name)
        found["allgather"] = [done(part) for part in parts]
        x = full(2, -1)
        col.reducescatter(x, [full(2, i) for i in range(size)], name)
        found["reducescatter"] = done(x)
        x = full(2, self.rank)
        col.reduce(x, 2, name)
        found["reduce"] = done(x)
        if self.rank == 0:
            col.send(full(3, 7), 1, name)
        elif self.rank == 1:
            x = full(3, 0)
            col.recv(x, 0, name)
            found["recv"] = done(x)
        fixed = np.ones(2)
        fixed.flags.writeable = False  # as arguments of actors are
        try:
            col.allreduce(fixed, name)
        except ValueError as error:
            found["read-only"] = "x.copy()" in str(error)
        col.barrier(name)
        found["about"] = (
            col.get_rank(name),
            col.get_collective_group_size(name),
            col.is_group_initialized(name),
        )
        return found

    def end(self) -> bool:
        self.col.destroy_collective_group(self.name)
        return bool(self.col.is_group_initialized(self.name))

    def wrong(self) -> list[str]:
        """What is refused, on every rank."""
        errors = []
        for call in (
            lambda: self.col.allreduce([1.0], self.name),
            lambda: self.col.broadcast(np.zeros(3), 9, self.name),
            lambda: self.col.allreduce(np.zeros(3), "another"),
        ):
            try:
                call()
            except Exception as error:
                errors.append(type(error).__name__)
        return errors


def expected(rank: int) -> dict[str, Any]:
    """As Ray's own groups give it."""
    found: dict[str, Any] = {
        "SUM": [9.0] * 5,
        "PRODUCT": [24.0] * 5,
        "MIN": [2.0] * 5,
        "MAX": [4.0] * 5,
        "broadcast": [1.0] * 2,
        "allgather": [[float(i)] * 2 for i in range(SIZE)],
        "reducescatter": [float(SIZE * rank)] * 2,
        "reduce": [3.0 if rank == 2 else float(rank)] * 2,
        "read-only": True,
        "about": (rank, SIZE, True),
    }
    if rank == 1:
        found["recv"] = [7.0] * 3
    return found


@pytest.mark.parametrize("declared", [False, True], ids=["init", "create"])
def test_collectives(c: hoplite_mp.Cluster, declared: bool) -> None:
    from hoplite_mp.integrations.ray import collective as col

    name = f"declared {declared}"
    made = ray.remote(Rank).options(num_cpus=0)
    ranks = [made.remote(i, SIZE, name, declared) for i in range(SIZE)]
    if declared:
        col.create_collective_group(ranks, SIZE, list(range(SIZE)), "gloo", name)
    for tensors in (False, True):
        answers = ray.get([one.calls.remote(tensors) for one in ranks])
        assert answers == [expected(i) for i in range(SIZE)]
    assert (
        ray.get([one.wrong.remote() for one in ranks])
        == [["RuntimeError", "ValueError", "RuntimeError"]] * SIZE
    )
    assert ray.get([one.end.remote() for one in ranks]) == [False] * SIZE
    for one in ranks:
        ray.kill(one)


def test_the_backend_has_rays_own_name_too(c: hoplite_mp.Cluster) -> None:
    class Plain:
        def __init__(self, rank: int) -> None:
            from ray.util import collective

            import hoplite_mp.integrations.ray.collective  # noqa: F401 - registers the backend

            self.col = collective
            collective.init_collective_group(2, rank, backend="HOPLITE", group_name="plain")

        def total(self) -> float:
            x = np.ones(3)
            self.col.allreduce(x, "plain")
            return float(x[0])

    ranks = [ray.remote(Plain).options(num_cpus=0).remote(i) for i in range(2)]
    assert ray.get([one.total.remote() for one in ranks]) == [2.0, 2.0]
