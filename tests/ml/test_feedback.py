"""Feedback: nothing is lost, nothing is applied twice, and all ranks get the same bits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hoplite_mp
from hoplite_mp import ml
from tests.support.group_members import in_threads
from tests.support.ml_members import DyingGroup
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster, Group

Array = np.ndarray[Any, np.dtype[Any]]
COMPRESSORS = [
    ml.TopK(0.1),
    ml.Threshold(0.1, refresh=3),
    ml.RandomBlocks(4, seed=3, block=7),
    ml.Quantise(8, block=16),
    ml.Quantise(2, block=16),
    ml.Float16(),
    ml.PowerSGD(2),
]
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
names = iter(range(10_000))


def in_group(cluster: Cluster, size: int, body: Any) -> list[Any]:
    return in_threads(cluster, f"feedback {next(names)}", size, body)


def gradients(seed: int, rank: int, steps: int, shape: tuple[int, ...]) -> Array:
    rng = np.random.default_rng([seed, rank])
    return rng.normal(size=(steps, *shape)).astype(np.float32) * np.float32(
        2.0 ** rng.integers(-3, 3)
    )


@every_compressor
@settings(max_examples=4)
@given(
    seed=st.integers(0, 1000),
    size=st.integers(1, 3),
    steps=st.integers(1, 6),
    shape=st.sampled_from([(7,), (100,), (12, 9), (2, 3, 11), (1,), (0,)]),
    op=st.sampled_from(["sum", "mean"]),
)
def test_results_and_residuals_together_are_all_that_was_given(
    cluster: Cluster, compressor: Any, seed: int, size: int, steps: int, shape: Any, op: str
) -> None:
    def body(group: Group) -> Any:
        feedback = ml.Feedback(group, compressor)
        grads = gradients(seed, group.rank, steps, shape)
        results = [feedback.allreduce("w", grad, op) for grad in grads]
        owned = feedback._streams["w"].owned
        where = np.array_split(np.arange(grads[0].size), size)[group.rank]
        kept = np.zeros(grads[0].size)
        if owned is not None:
            kept[where] += owned * (size if op == "mean" else 1)
        return results, kept + feedback.residual("w")

    found = in_group(cluster, size, body)
    for results, _ in found:
        assert [one.tobytes() for one in results] == [one.tobytes() for one in found[0][0]]
        assert all(one.shape == shape and one.dtype == np.float32 for one in results)
    scale = size if op == "mean" else 1
    total = scale * np.sum(found[0][0], axis=0, dtype=float).reshape(-1)
    total += np.sum([kept for _, kept in found], axis=0)
    expected = sum(gradients(seed, rank, steps, shape).sum(0, float) for rank in range(size))
    np.testing.assert_allclose(total, np.reshape(expected, -1), atol=2e-4)


def test_topk_of_everything_is_the_plain_mean(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        grad = np.arange(10.0).reshape(2, 5) * (group.rank + 1)
        return ml.Feedback(group, ml.TopK(1)).allreduce("w", grad)

    for found in in_group(cluster, 2, body):
        assert found.dtype == np.float64
        assert (found == 1.5 * np.arange(10.0).reshape(2, 5)).all()


def test_names_have_residuals_of_their_own(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        feedback = ml.Feedback(group, ml.TopK(0.5))
        first = feedback.allreduce("a", np.array([2.0, 1.0], np.float32), "sum").tolist()
        other = feedback.allreduce("b", np.zeros(2, np.float32), "sum").tolist()
        second = feedback.allreduce("a", np.zeros(2, np.float32), "sum").tolist()
        return first, other, second

    assert in_group(cluster, 1, body) == [([2.0, 0.0], [0.0, 0.0], [0.0, 1.0])]


def test_sent_and_received_are_the_bytes_of_the_codes(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        feedback = ml.Feedback(group, ml.TopK(0.01))
        feedback.allreduce("w", np.ones(6000, np.float32))
        return feedback.sent, feedback.received

    # 20 pairs of a stripe to each of two owners, after a head of 18 bytes; 20 pairs back.
    assert in_group(cluster, 3, body) == [(2 * (160 + 18) + 2 * 160,) * 2] * 3


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda f, g: f.allreduce("v", np.ones(4)), "names, shapes, dtypes, ops or compressors"),
        (lambda f, g: f.allreduce("w", np.ones(5)), "rank 1 and rank 0 differ"),
        (lambda f, g: f.allreduce("w", np.ones(4, np.float32)), "dtypes"),
        (lambda f, g: f.allreduce("w", np.ones(4), "sum"), "differ"),
        (lambda f, g: f.allreduce("w", np.array([1, np.nan, 1, 1])), "rank 1: 'w' has values that"),
        (lambda f, g: f.allreduce("w", np.ones(4, int)), "rank 1: 'w' has dtype int64"),
        (lambda f, g: f.allreduce("w", np.ones(4), "max"), "rank 1: op='max': it must be"),
        (lambda f, g: ml.Feedback(g, ml.TopK(0.2)).allreduce("w", np.ones(4)), "differ"),
    ],
)
@pytest.mark.parametrize("compressor", [ml.Float16(), ml.PowerSGD(1)], ids=repr)
def test_a_different_call_of_one_rank_raises_on_every_rank_and_changes_nothing(
    cluster: Cluster, compressor: Any, wrong: Any, match: str
) -> None:
    def body(group: Group) -> Any:
        feedback = ml.Feedback(group, compressor)
        feedback.allreduce("first", np.ones(1))
        try:
            if group.rank == 1:
                wrong(feedback, group)
            else:
                feedback.allreduce("w", np.ones(4))
        except ValueError as error:
            return str(error), feedback.residual("w"), feedback.allreduce("w", np.ones(4)).tolist()

    texts = in_group(cluster, 2, body)
    if isinstance(compressor, ml.PowerSGD) and match == "differ":
        texts = texts[:1]
    for text, residual, after in texts:
        assert match in text
        assert residual is None
        assert after == [1.0] * 4


def test_wrong_arguments_raise_at_the_call(cluster: Cluster) -> None:
    def body(group: Group) -> None:
        with pytest.raises(TypeError, match="is not a compressor"):
            ml.Feedback(group, "topk")  # type: ignore[arg-type]
        feedback = ml.Feedback(group, ml.Float16())
        with pytest.raises(ValueError, match="op='max'"):
            feedback.allreduce("w", np.ones(2), op="max")
        with pytest.raises(ValueError, match="dtype int64"):
            feedback.allreduce("w", np.ones(2, np.int64))
        feedback.allreduce("w", np.ones(2))
        with pytest.raises(ValueError, match="had 2 elements"):
            feedback.allreduce("w", np.ones(3))

    assert in_group(cluster, 1, body) == [None]


# -- deaths ----------------------------------------------------------------------------------

DEATHS = [(ml.TopK(0.1), "alltoall"), (ml.TopK(0.1), "allgather"), (ml.PowerSGD(1), "allreduce")]


@pytest.mark.parametrize(("compressor", "kind"), DEATHS, ids=["slices", "results", "powersgd"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_inside_a_call_counts_in_no_result(
    cluster: Cluster, compressor: Any, kind: str, victim: int
) -> None:
    """And the survivors' results, residuals and owners' residuals are all that they have given
    since then."""
    shape, steps = (3, 30), 6

    def member(rank: int, name: str) -> Any:
        group: Any = hoplite_mp.current().group(name, 3, rank)
        if rank == victim:
            group = DyingGroup(group, kind, 6 if kind == "allreduce" else 4)
        feedback = ml.Feedback(group, compressor)
        found = []
        for grad in gradients(5, rank, steps, shape):
            total = feedback.allreduce("w", grad, "sum")
            owned = feedback._streams["w"].owned
            found.append((total, feedback.contributors, owned, feedback.residual("w")))
        return found

    name = f"killed {kind} {victim}"
    run = cluster.options(retries=0)
    tasks = [run.submit(member, rank, name) for rank in range(3)]
    survivors = [rank for rank in range(3) if rank != victim]
    found = {rank: tasks[rank].result(timeout=60) for rank in survivors}
    assert isinstance(tasks[victim].exception(timeout=60), hoplite_mp.WorkerLostError)
    first, second = (found[rank] for rank in survivors)
    assert [one[0].tobytes() for one in first] == [one[0].tobytes() for one in second]
    contributors = [one[1] for one in first]
    died_at = contributors.index(tuple(survivors))
    assert contributors == [(0, 1, 2)] * died_at + [tuple(survivors)] * (steps - died_at)
    assert 1 <= died_at < steps
    total = np.sum([one[0] for one in first[died_at:]], axis=0, dtype=float).reshape(-1)
    for at, rank in enumerate(survivors):
        _, _, owned, residual = found[rank][-1]
        total += residual.astype(float) - found[rank][died_at - 1][3]
        if owned is not None:
            total[np.array_split(np.arange(90), 2)[at]] += owned
    expected = sum(gradients(5, rank, steps, shape)[died_at:].sum(0, float) for rank in survivors)
    np.testing.assert_allclose(total, np.reshape(expected, -1), atol=1e-4)


@pytest.mark.parametrize(
    ("compressor", "kind"), [*DEATHS, (ml.RandomBlocks(2, block=1), "alltoall")],
    ids=["slices", "results", "powersgd", "blocks"],
)  # fmt: skip
def test_a_replaced_rank_begins_with_zeros_and_takes_part(
    cluster: Cluster, tmp_path: Path, compressor: Any, kind: str
) -> None:
    def member(rank: int, name: str, folder: Path) -> Any:
        group: Any = hoplite_mp.current().group(name, 3, rank)
        if rank == 1 and not (folder / "died").exists():
            (folder / "died").write_text(str(os.getpid()))
            group = DyingGroup(group, kind, 4)
        feedback = ml.Feedback(group, compressor)
        (folder / f"joined {os.getpid()}").touch()
        results = []
        while True:
            total = feedback.allreduce("w", np.ones((3, 8), np.float32), "sum")
            step = feedback._streams["w"].step
            results.append((step, feedback.contributors, total.tobytes()))
            if rank == 1 and len(results) == 1 and step > 1:
                (folder / "last.new").write_text(str(step + 3))
                (folder / "last.new").rename(folder / "last")
            last = (folder / "last").exists() and int((folder / "last").read_text())
            if last and step >= last:
                return results
            if rank != 1 and feedback.contributors == (0, 2):
                eventually(lambda: len(list(folder.glob("joined *"))) == 4, "the replacement")

    name = f"replaced {compressor} {kind}"
    tasks = [cluster.submit(member, rank, name, tmp_path) for rank in range(3)]
    found = [task.result(timeout=60) for task in tasks]
    by_step: dict[int, set[Any]] = {}
    for results in found:
        for step, contributors, total in results:
            by_step.setdefault(step, set()).add((contributors, total))
    assert all(len(one) == 1 for one in by_step.values())
    contributors = [next(iter(by_step[step]))[0] for step in sorted(by_step)]
    assert contributors[0] == contributors[-1] == (0, 1, 2)
    # It may be back before the call that it had not made has returned.
    assert (0, 2) in contributors or found[1][0][0] <= 4
    assert found[1][0][0] > 1, "the replacement has the others' step"


def test_a_call_that_raises_peer_lost_leaves_the_residuals(cluster: Cluster) -> None:
    def member(rank: int, name: str) -> Any:
        group: Any = hoplite_mp.current().group(name, 2, rank, strict=True)
        if rank == 1:
            group = DyingGroup(group, "alltoall", 3)
        feedback = ml.Feedback(group, ml.TopK(0.5))
        for _ in range(2):
            feedback.allreduce("w", np.array([4.0, 3.0, 2.0, 1.0]))
        before = feedback.residual("w")
        with pytest.raises(hoplite_mp.PeerLostError):
            feedback.allreduce("w", np.ones(4))
        return before, feedback.residual("w")

    run = cluster.options(retries=0)
    tasks = [run.submit(member, rank, "strict") for rank in range(2)]
    before, after = tasks[0].result(timeout=60)
    assert before is not None
    assert (before == after).all()
    assert isinstance(tasks[1].exception(timeout=60), hoplite_mp.WorkerLostError)
