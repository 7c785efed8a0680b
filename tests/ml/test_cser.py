"""CSER: y is the same on all ranks, bit for bit, also when ranks die and are replaced."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hoplite_mp
from hoplite_mp import ml
from hoplite_mp.ml._draws import draw_blocks
from tests.support.group_members import in_threads
from tests.support.ml_members import DyingGroup
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster, Group

Array = np.ndarray[Any, np.dtype[Any]]
names = iter(range(10_000))


def in_group(cluster: Cluster, size: int, body: Any) -> list[Any]:
    return in_threads(cluster, f"cser {next(names)}", size, body)


def grads_of(rank: int, step: int, size: int) -> Array:
    return np.random.default_rng([rank, step]).normal(size=size).astype(np.float32)


def masks(step: int, size: int, block: int, ratios: tuple[float, float]) -> list[Array]:
    """Where a step sends its update, and where it resets the errors."""
    blocks = -(-size // block)
    found = []
    for kind, ratio in enumerate(ratios):
        mask = np.zeros(blocks, bool)
        mask[draw_blocks(3, step, kind, blocks, ratio)] = True
        found.append(mask.repeat(block)[:size])
    return found


def by_numpy(size: int, ranks: int, steps: int, block: int, every: int) -> list[Array]:
    """x of each rank, in float64: learning as the algorithm is written down."""
    y = np.zeros(size)
    e, v = np.zeros((ranks, size)), np.zeros((ranks, size))
    for step in range(steps):
        sent, reset = masks(step, size, block, (3, 2))
        for rank in range(ranks):
            v[rank] = 0.5 * v[rank] + grads_of(rank, step, size)
        p = 0.1 * v
        y[sent] -= p.mean(0)[sent]
        e[:, ~sent] -= p[:, ~sent]
        if (step + 1) % every == 0:
            y[reset] += e.mean(0)[reset]
            e[:, reset] = 0
    return list(y + e)


@settings(max_examples=6)
@given(
    size=st.integers(1, 60),
    ranks=st.integers(1, 3),
    steps=st.integers(1, 9),
    block=st.integers(1, 20),
    every=st.integers(1, 4),
)
def test_steps_are_those_of_the_algorithm_and_y_is_common(
    cluster: Cluster, size: int, ranks: int, steps: int, block: int, every: int
) -> None:
    def body(group: Group) -> Any:
        first, second = np.zeros(size // 2, np.float32), np.zeros((size - size // 2, 1))
        sgd = ml.CSER(
            [first, second], group, 0.1, 0.5, update_ratio=3, reset_ratio=2, reset_every=every,
            block=block, seed=3,
        )  # fmt: skip
        found = []
        for step in range(steps):
            grad = grads_of(group.rank, step, size)
            sgd.step([grad[: size // 2], grad[size // 2 :, None]])
            found.append(sgd.y.tobytes())
        x = np.concatenate([first, second.reshape(-1)])
        sgd.synchronize()
        return found, x, np.concatenate([first, second.reshape(-1)])

    results = in_group(cluster, ranks, body)
    expected = by_numpy(size, ranks, steps, block, every)
    for (found, x, together), one in zip(results, expected, strict=True):
        assert found == results[0][0]
        np.testing.assert_allclose(x, one, atol=1e-5)
        np.testing.assert_array_equal(together, results[0][2])
        np.testing.assert_allclose(together, np.mean(expected, axis=0), atol=1e-5)


def test_ranks_begin_with_the_parameters_of_the_lowest(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        w = np.full(3, group.rank + 5.0)
        ml.CSER([w], group, 0.1)
        return w.tolist()

    assert in_group(cluster, 3, body) == [[5.0] * 3] * 3


def test_bytes_are_one_in_the_ratios_of_a_dense_allreduce(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        w = np.zeros(64 * 8, np.float32)
        sgd = ml.CSER([w], group, 0.1, update_ratio=8, reset_ratio=4, reset_every=2, block=8)
        for _ in range(4):
            sgd.step([w])
        return sgd.sent, sgd.received

    dense = 64 * 8 * 4  # sent by each of two ranks
    assert in_group(cluster, 2, body) == [(dense // 8 * 4 + dense // 4 * 2,) * 2] * 2


def test_ranks_with_different_ratios_raise_on_every_rank_and_nothing_changes(
    cluster: Cluster,
) -> None:
    def body(group: Group) -> Any:
        w = np.zeros(64, np.float32)
        sgd = ml.CSER([w], group, 0.1, update_ratio=2 + group.rank, block=1)
        with pytest.raises(ValueError, match="shape"):
            sgd.step([np.ones(64, np.float32)])
        return w.any() or sgd.y.any()

    assert in_group(cluster, 2, body) == [False, False]


@pytest.mark.parametrize(
    ("params", "options", "match"),
    [
        ([], {}, "params is empty"),
        ([np.zeros(2, np.int64)], {}, "float32 or float64"),
        ([np.zeros((4, 4))[:, 1]], {}, "C-contiguous"),
        ([np.zeros(2)], {"update_ratio": 0.5}, "update_ratio=0.5"),
        ([np.zeros(2)], {"reset_every": 0}, "reset_every=0"),
        ([np.zeros(2)], {"momentum": -1}, "momentum=-1"),
    ],
)
def test_wrong_arguments_raise_before_any_call(params: Any, options: Any, match: str) -> None:
    group: Any = None
    with pytest.raises(ValueError, match=match):
        ml.CSER(params, group, 0.1, **options)


def test_wrong_shapes_of_gradients_raise(cluster: Cluster) -> None:
    def body(group: Group) -> None:
        sgd = ml.CSER([np.zeros((2, 2))], group, 0.1)
        with pytest.raises(ValueError, match=r"shapes \[\(4,\)\]"):
            sgd.step([np.zeros(4)])

    assert in_group(cluster, 1, body) == [None]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_replaced_with_y_and_zeros(
    cluster: Cluster, tmp_path: Path, victim: int
) -> None:
    size = 40

    def member(rank: int, name: str, folder: Path) -> Any:
        group: Any = hoplite_mp.current().group(name, 3, rank)
        (folder / f"joined {os.getpid()}").touch()
        again = rank == victim and (folder / "died").exists()
        if rank == victim and not again:
            (folder / "died").touch()
            group = DyingGroup(group, "allreduce", 4)
        w = np.full(size, rank, np.float32)
        sgd = ml.CSER([w], group, 0.1, update_ratio=4, reset_ratio=2, reset_every=3, block=2)
        start = sgd._t, sgd._e.any(), sgd._v.any(), (w == sgd.y).all()
        found = []
        if again:
            (folder / "last.new").write_text(str(sgd._t + 4))
            (folder / "last.new").rename(folder / "last")
        while True:
            sgd.step([grads_of(rank, sgd._t, size)])
            found.append((sgd._t, sgd.contributors, sgd.y.tobytes()))
            last = (folder / "last").exists() and int((folder / "last").read_text())
            if last and sgd._t >= last:
                return start, found
            if victim not in sgd.contributors:
                eventually(lambda: len(list(folder.glob("joined *"))) == 4, "the replacement")

    tasks = [cluster.submit(member, rank, f"again {victim}", tmp_path) for rank in range(3)]
    results = [task.result(timeout=60) for task in tasks]
    by_step: dict[int, set[Any]] = {}
    for _, found in results:
        for t, contributors, y in found:
            by_step.setdefault(t, set()).add((contributors, y))
    assert all(len(one) == 1 for one in by_step.values())
    t, has_e, has_v, is_y = results[victim][0]
    assert t >= 3
    assert not has_e
    assert not has_v
    assert is_y
    last = max(by_step)
    assert next(iter(by_step[last]))[0] == (0, 1, 2)
    assert last == t + 4
