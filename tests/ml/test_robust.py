"""Robust reductions: operators against numpy, and Groups whose ranks die and are replaced."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import hoplite_mp
from hoplite_mp import ReduceError, ml
from hoplite_mp._common.slice_operators import fold_whole
from tests.support.group_members import in_threads
from tests.support.waiting import Gate, eventually

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hoplite_mp import Cluster, Group
    from hoplite_mp._common.slice_operators import Array, Fold


@st.composite
def inputs(draw: st.DrawFn, least: int = 1, special: bool = True) -> Array:
    """Rows of equal length: the inputs of a reduction."""
    dtype = np.dtype(draw(st.sampled_from([np.float32, np.float64])))
    shape = draw(st.integers(least, 11)), draw(st.integers(0, 150))
    bound = None if special else 1000.0
    values = st.floats(
        width=8 * dtype.itemsize,  # type: ignore[arg-type]
        allow_nan=special,
        allow_infinity=special,
        min_value=None if bound is None else -bound,
        max_value=bound,
    )
    return draw(hnp.arrays(dtype, shape, elements=values))


def sorted_mean(rows: Array, low: int, high: int) -> Array:
    """The mean of sorted values, NaN last, added up in float64."""
    chosen = np.sort(rows, axis=0)[low:high].astype(np.float64)
    total = chosen[0]
    with np.errstate(all="ignore"):
        for row in chosen[1:]:
            total = total + row
        return (total / (high - low)).astype(rows.dtype)


@settings(max_examples=60)
@given(inputs())
def test_median_equals_the_middle_of_the_sorted_values(rows: Array) -> None:
    count = len(rows)
    found, accepted = fold_whole(ml.Median(), list(rows))
    np.testing.assert_array_equal(found, sorted_mean(rows, (count - 1) // 2, count // 2 + 1))
    assert accepted == tuple(range(count))


@settings(max_examples=60)
@given(inputs(), st.integers(0, 4))
def test_trimmed_mean_equals_the_mean_without_the_extremes(rows: Array, f: int) -> None:
    op = ml.TrimmedMean(f)
    if len(rows) < 2 * f + 1:
        with pytest.raises(ValueError, match=f"at least {2 * f + 1} inputs, not {len(rows)}"):
            fold_whole(op, list(rows))
        return
    found, _ = fold_whole(op, list(rows))
    np.testing.assert_array_equal(found, sorted_mean(rows, f, len(rows) - f))


def reference_krum(rows: Array, f: int, m: int) -> list[int]:
    """The accepted inputs, by the definition of Blanchard et al."""
    wide = rows.astype(np.float64)
    scores = []
    for i, row in enumerate(wide):
        others = [other for j, other in enumerate(wide) if j != i]
        squared = sorted(float(((row - other) ** 2).sum()) for other in others)
        scores.append(sum(squared[: len(rows) - f - 2]))
    return sorted(sorted(range(len(rows)), key=lambda i: (scores[i], i))[:m])


@pytest.mark.parametrize(("f", "m"), [(0, 1), (2, 1), (2, 3), (2, 4)])
def test_krum_accepts_the_inputs_closest_to_their_neighbours(f: int, m: int) -> None:
    rng = np.random.default_rng(10 * f + m)
    rows = (rng.standard_normal((8, 1000)) + 1).astype(np.float32)
    rows[3] *= -5
    rows[6] = np.nan if f else rows[6]
    found, accepted = fold_whole(ml.Krum(f, m), list(rows))
    assert list(accepted) == reference_krum(np.where(np.isnan(rows), 1e9, rows), f, m)
    np.testing.assert_allclose(found, rows[list(accepted)].mean(axis=0), rtol=1e-6, atol=1e-6)


def sum_of_distances(rows: Array, point: Array) -> float:
    wide = rows.astype(np.float64)
    return float(np.sqrt(((wide - point.astype(np.float64)) ** 2).sum(axis=1)).sum())


@settings(max_examples=40)
@given(inputs(least=3, special=False))
def test_geometric_median_is_no_farther_from_the_inputs_than_the_median(rows: Array) -> None:
    found, _ = fold_whole(ml.GeometricMedian(), list(rows))
    start, _ = fold_whole(ml.Median(), list(rows))
    assert sum_of_distances(rows, found) <= sum_of_distances(rows, start) * (1 + 1e-5) + 0.05


def test_geometric_median_of_a_triangle_is_its_fermat_point() -> None:
    """The coordinate median, from which the iteration starts, is a corner."""
    rows = np.array([[1, 0], [0, 1], [0, 0]], np.float64)
    found, _ = fold_whole(ml.GeometricMedian(60), list(rows))
    np.testing.assert_allclose(found, [(3 - 3**0.5) / 6] * 2, atol=1e-6)
    outlier = np.vstack([rows, [[1e9, np.nan]]])
    found, _ = fold_whole(ml.GeometricMedian(60), list(outlier))
    np.testing.assert_allclose(found, [(3 - 3**0.5) / 6] * 2, atol=1e-6)


def test_score_accepts_the_gradients_that_agree_with_v() -> None:
    rng = np.random.default_rng(5)
    v = rng.standard_normal(500).astype(np.float32)
    rows = v + 0.5 * rng.standard_normal((6, 500)).astype(np.float32)
    rows[1] *= -5
    rows[4] = np.nan
    found, accepted = fold_whole(ml.Score(v, lr=0.1), list(rows))
    assert accepted == (0, 2, 3, 5)
    scaled = [row * (np.linalg.norm(v) / np.linalg.norm(row)) for row in rows[list(accepted)]]
    np.testing.assert_allclose(found, np.mean(scaled, axis=0), rtol=1e-4, atol=1e-5)
    with pytest.raises(ReduceError, match="none of 6 gradients is accepted"):
        fold_whole(ml.Score(v, lr=0.1), [-abs(rows[0]) * np.sign(v)] * 6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ml.TrimmedMean(-1), "f=-1 must be an integer of 0 or more"),
        (lambda: ml.Krum(1, m=0), "m=0 must be an integer of 1 or more"),
        (lambda: ml.GeometricMedian(0), "iterations=0 must be an integer of 1 or more"),
        (lambda: ml.Score(np.ones(2), lr=0.0), "lr must be positive"),
        (lambda: ml.Score(np.ones(2), lr=1.0, rho=-1.0), "rho 0 or more"),
    ],
)
def test_wrong_arguments_of_operators_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


OPERATORS = {
    "median": ml.Median(),
    "trimmed": ml.TrimmedMean(1),
    "krum": ml.Krum(1, m=2),
    "geometric": ml.GeometricMedian(),
    "score": ml.Score(np.ones(1001, np.float32), lr=0.1),
}


def row_of(rank: int) -> Array:
    """A rank's input: that of rank 3 is faulty."""
    x = (np.random.default_rng(rank).standard_normal(1001) + 1).astype(np.float32)
    return -5 * x if rank == 3 else x


@pytest.mark.parametrize("what", OPERATORS)
def test_group_gives_all_ranks_the_bits_of_one_reduction(cluster: Cluster, what: str) -> None:
    op = OPERATORS[what]

    def body(g: Group) -> Any:
        x, out = row_of(g.rank), np.empty(1001, np.float32)
        bits = g.allreduce(x, op=op).tobytes()
        assert g.allreduce_async(x, op=op, out=out).result(20) is out
        assert out.tobytes() == bits
        at_root = g.reduce(x, op=op, root=2)
        assert (at_root is not None) == (g.rank == 2)
        assert at_root is None or at_root.tobytes() == bits
        np.testing.assert_array_equal(x, row_of(g.rank))
        return bits, g.contributors

    found = in_threads(cluster, f"robust {what}", 5, body)
    assert len(set(found)) == 1, found
    expected, accepted = fold_whole(op, [row_of(rank) for rank in range(5)])
    assert found[0][1] == accepted
    bits = np.frombuffer(found[0][0], np.float32)
    np.testing.assert_allclose(bits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["sum", "mean", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.complex128])
def test_finite_leaves_out_ranks_with_nan(cluster: Cluster, op: str, dtype: Any) -> None:
    if dtype is np.complex128 and op in ("min", "max"):
        pytest.skip("complex numbers have no order")

    def body(g: Group) -> Any:
        x = np.array([g.rank + 1, 2], dtype)
        if g.rank in (1, 2):
            x[g.rank - 1] = np.nan if g.rank == 1 else np.inf
        found = g.allreduce(x, op=op, finite=True)
        accepted = g.contributors
        whole = g.allreduce(np.array([g.rank], dtype), op=op, finite=True)
        return found, accepted, whole, g.contributors

    functions = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "min": np.min, "max": np.max}
    expected = functions[op](np.array([[1, 2], [4, 2]], dtype), axis=0)
    whole = functions[op](np.arange(4).astype(dtype))
    for found in in_threads(cluster, f"finite {op} {dtype.__name__}", 4, body):
        np.testing.assert_array_equal(found[0], expected)
        np.testing.assert_array_equal(found[2], [whole])
        assert (found[1], found[3]) == ((0, 3), (0, 1, 2, 3))


def test_errors_reach_every_rank_and_the_group_goes_on(cluster: Cluster) -> None:
    def body(g: Group) -> Any:
        x, texts = row_of(g.rank), []
        differs = ml.Score(np.full(1001, 1.0 + (g.rank == 1)), lr=0.1)
        opposed = ml.Score(np.full(1001, -1.0), lr=0.1)
        calls: list[Any] = [
            lambda: g.allreduce(x if g.rank else x[:5], op=ml.Median()),
            lambda: g.allreduce(x, op=ml.Krum(2)),
            lambda: g.allreduce(x, op=ml.TrimmedMean(0) if g.rank else ml.TrimmedMean(1)),
            lambda: g.allreduce(x, op="sum" if g.rank else ml.Median()),
            lambda: g.allreduce(x.astype(int) if g.rank == 1 else x, op=ml.Median()),
            lambda: g.allreduce(x, op=differs),
            lambda: g.allreduce(x * np.nan, finite=True),
            lambda: g.allreduce(x, op="xor", finite=True),
            lambda: g.allreduce(x if g.rank else np.zeros(2, "f4,i4"), finite=True),
            lambda: g.scan(x, op=ml.Median()),
            lambda: g.allreduce(x, op=opposed),
            lambda: g.allreduce(x, op=ml.Krum),
        ]
        for call in calls:
            with pytest.raises((ValueError, TypeError, ReduceError)) as caught:
                call()
            texts.append(f"{type(caught.value).__name__}: {caught.value}")
        return texts, int(g.allreduce(1)), g.contributors

    words = (
        "ranks 0 and 1 of allreduce differ: float32 (5,) and float32 (1001,)",
        "Krum with f=2 needs at least 7 inputs, not 3",
        "ranks 0 and 1 of allreduce differ: TrimmedMean(f=1)",
        "made different calls",
        "TypeError: rank 1: Median reduces arrays of float32 or float64, not of int64",
        "digest",
        "all 3 inputs have NaN or infinite values",
        "finite=True needs an op of",
        "TypeError: rank 0: sum reduces arrays and numbers",
        "scan takes no Median",
        "none of 3 gradients is accepted",
        "rank 0: op=ml.Krum is a class: write op=ml.Krum(f)",
    )
    for found in in_threads(cluster, "robust errors", 3, body):
        assert found[1:] == (3, (0, 1, 2)), found
        for text, word in zip(found[0], words, strict=True):
            assert word in text


class DiesWhileFolding(ml.Median):
    """Kills the process of the rank that owns the elements from `begin` on, once."""

    folder: Path
    begin: int

    def __init__(self, folder: Path, begin: int) -> None:
        object.__setattr__(self, "folder", folder)
        object.__setattr__(self, "begin", begin)

    def fold(self, slices: Sequence[Array], begin: int) -> Fold:
        if begin == self.begin and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fold(slices, begin)


def peer_that_may_die(rank: int, folder: Path) -> Any:
    g = hoplite_mp.current().group("dies while folding", 4, rank)
    op = DiesWhileFolding(folder, 1001 * 2 // 4)  # rank 2 owns that slice
    first = g.allreduce(row_of(rank), op=op).tobytes(), g.contributors
    return first, (g.allreduce(row_of(rank), op=op).tobytes(), g.contributors)


def test_death_of_an_owner_leaves_its_rank_out_everywhere(cluster: Cluster, tmp_path: Path) -> None:
    futures = cluster.options(retries=0).spmd(peer_that_may_die, 4, tmp_path)
    with pytest.raises(hoplite_mp.WorkerLostError):
        futures[2].result(60)
    expected, _ = fold_whole(ml.Median(), [row_of(rank) for rank in (0, 1, 3)])
    for rank in (0, 1, 3):
        assert futures[rank].result(60) == ((expected.tobytes(), (0, 1, 3)),) * 2


class WaitsWhileFolding(ml.Median):
    """Folds when the gate is open."""

    gate: Gate
    entered: Path

    def __init__(self, gate: Gate, entered: Path) -> None:
        object.__setattr__(self, "gate", gate)
        object.__setattr__(self, "entered", entered)

    def fold(self, slices: Sequence[Array], begin: int) -> Fold:
        self.entered.touch()
        self.gate.wait()
        return super().fold(slices, begin)


def test_replacement_that_joins_during_a_reduction_takes_part(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The new rank's first call meets one in the middle of the others' reduction."""
    gate = Gate(tmp_path)
    op = WaitsWhileFolding(gate, tmp_path / "entered")
    groups = [cluster.group("replaced", 3, rank) for rank in range(3)]
    for future in [g.barrier_async() for g in groups]:
        future.result(30)
    groups[2].close()
    running = [g.allreduce_async(row_of(g.rank), op=op) for g in groups[:2]]
    eventually((tmp_path / "entered").exists)
    new = cluster.group("replaced", 3, 2)
    late = new.allreduce_async(row_of(2), op=op)
    eventually(lambda: new._member.calls is not None)  # its first call is fixed
    gate.open()
    bits = {future.result(60).tobytes() for future in [*running, late]}
    whole, _ = fold_whole(ml.Median(), [row_of(rank) for rank in range(3)])
    assert bits == {whole.tobytes()}
    for g in (*groups[:2], new):
        assert g.contributors == (0, 1, 2)
        g.close()


def test_replacement_that_makes_another_call_gets_an_error_and_no_value(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Its allgather meets the allgather of statistics or of slices, and must not match it."""
    gate = Gate(tmp_path)
    op = WaitsWhileFolding(gate, tmp_path / "entered")
    groups = [cluster.group("another call", 3, rank) for rank in range(3)]
    for future in [g.barrier_async() for g in groups]:
        future.result(30)
    groups[2].close()
    running = [g.allreduce_async(row_of(g.rank), op=op) for g in groups[:2]]
    eventually((tmp_path / "entered").exists)
    new = cluster.group("another call", 3, 2)
    late = new.allgather_async("another call")
    eventually(lambda: new._member.calls is not None)  # its first call is fixed
    gate.open()
    with pytest.raises(ValueError, match="made different calls"):
        late.result(60)
    bits = {new.allreduce(row_of(2), op=op).tobytes(), *(f.result(60).tobytes() for f in running)}
    assert bits == {fold_whole(ml.Median(), [row_of(rank) for rank in range(3)])[0].tobytes()}
    for g in (*groups[:2], new):
        g.close()


def test_refs_are_reduced_by_robust_operators(cluster: Cluster) -> None:
    rows = [row_of(rank) for rank in range(5)]
    refs = [cluster.put(row) for row in rows]
    krum = cluster.reduce(refs, op=ml.Krum(1, m=2))
    expected, accepted = fold_whole(ml.Krum(1, m=2), rows)
    np.testing.assert_array_equal(cluster.get(krum), expected)
    assert krum.contributors == accepted
    refs.append(cluster.put(np.full(1001, np.nan, np.float32)))
    median = cluster.allreduce(refs, op=ml.Median(), num=5, finite=True)
    np.testing.assert_array_equal(cluster.get(median), fold_whole(ml.Median(), rows)[0])
    mean = cluster.reduce(refs, op="mean", num=5, finite=True)
    np.testing.assert_allclose(cluster.get(mean), np.mean(rows, axis=0), rtol=1e-4, atol=1e-5)
    assert median.contributors == mean.contributors == (0, 1, 2, 3, 4)
    with pytest.raises(ReduceError, match="5 of 6 sources are left, and 6 are needed"):
        cluster.get(cluster.reduce(refs, finite=True))
    with pytest.raises(ValueError, match="unknown op 'no'"):
        cluster.reduce(refs, op="no", finite=True)


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize(("op", "instance"), [(ml.Median, "Median()"), (ml.Score, "Score(v, lr)")])
def test_a_class_in_place_of_an_operator_is_refused_at_the_call(
    cluster: Cluster, op: Any, instance: str, finite: bool
) -> None:
    refs = [cluster.put(row_of(0))]
    for reduce in (cluster.reduce, cluster.allreduce):
        with pytest.raises(ValueError, match=re.escape(f"write op=ml.{instance}")):
            reduce(refs, op=op, finite=finite)
