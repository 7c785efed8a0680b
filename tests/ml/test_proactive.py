"""`proactive`: full passes are exact, other periods reach the same end, ranks may die."""

from __future__ import annotations

import math
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ml

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = np.random.default_rng(0).integers(-8, 9, size=(400, 3)).astype(float)


@pytest.fixture(scope="module")
def cluster() -> Iterator[hoplite_mp.Cluster]:
    with hoplite_mp.Cluster(workers=3, memory="128MiB") as made:
        yield made


def squares(mean: Any, rows: Any) -> tuple[float, Any]:
    return float(((rows - mean) ** 2).sum()), rows.sum(axis=0)


def mean_of(mean: Any, sums: Any, rows: int) -> Any:
    return sums / rows


def regression(weights: Any, rows: Any) -> tuple[float, tuple[Any, Any]]:
    """Two sums of different shapes, from a pair of arrays."""
    x, y = rows
    error = x @ weights - y
    return float(error @ error), (x.T @ x, x.T @ y)


def solve(weights: Any, sums: Any, rows: int) -> Any:
    return np.linalg.solve(sums[0], sums[1])


class DiesOnce:
    """The rank that has row `marked` is killed in the visit number `visit` of that row."""

    def __init__(self, folder: Path, visit: int) -> None:
        self.folder, self.visit, self.seen = folder, visit, 0

    def __call__(self, mean: Any, rows: Any) -> tuple[float, Any]:
        if (rows == ROWS[-1]).all(axis=1).any() and len(rows) <= 20:
            self.seen += 1
            marker = self.folder / "died"
            if self.seen == self.visit and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return squares(mean, rows)


def test_full_passes_equal_the_totals_of_numpy(cluster: hoplite_mp.Cluster) -> None:
    shards = [ROWS[:30], ROWS[30:300], cluster.put(ROWS[300:])]
    found = ml.proactive(
        squares, shards, mean_of, np.zeros(3), None, block=20, passes=3, tol=0, states=True
    )
    np.testing.assert_array_equal(found.state, ROWS.mean(axis=0))
    assert (found.rounds, found.rows, found.passes) == (3, 1200, pytest.approx(3))
    losses = [loss for _, loss, _ in found.history]
    assert losses[0] == pytest.approx((ROWS**2).sum(axis=1).mean())
    assert losses[1] == pytest.approx(((ROWS - ROWS.mean(axis=0)) ** 2).sum(axis=1).mean())
    assert all((state == found.state).all() for _, _, state in found.history)


@pytest.mark.parametrize("period", ["auto", 0.0, 0.002])
def test_any_period_reaches_the_same_end(cluster: hoplite_mp.Cluster, period: Any) -> None:
    found = ml.proactive(
        squares, np.array_split(ROWS, 3), mean_of, np.zeros(3), period, block=20, tol=1e-12
    )
    assert found.converged
    np.testing.assert_allclose(found.state, ROWS.mean(axis=0), atol=1e-12)


def test_tuples_of_arrays_give_tuples_of_sums(cluster: hoplite_mp.Cluster) -> None:
    y = ROWS @ np.array([1.0, -2.0, 3.0])
    shards = [(ROWS[:150], y[:150]), (ROWS[150:], y[150:])]
    found = ml.proactive(regression, shards, solve, np.zeros(3), block=50)
    np.testing.assert_allclose(found.state, [1.0, -2.0, 3.0], atol=1e-9)


@pytest.mark.parametrize(("period", "visit"), [(None, 2), (None, 4), (0.0, 1)])
def test_a_killed_rank_is_replaced_and_no_row_is_missing_at_the_end(
    cluster: hoplite_mp.Cluster, tmp_path: Path, period: Any, visit: int
) -> None:
    partial = DiesOnce(tmp_path, visit)
    found = ml.proactive(
        partial, np.array_split(ROWS, 3), mean_of, np.zeros(3), period,
        block=20, tol=0 if period is None else 1e-12, passes=6,
    )  # fmt: skip
    assert (tmp_path / "died").exists()
    np.testing.assert_allclose(found.state, ROWS.mean(axis=0), atol=1e-12)


def test_an_exception_of_one_rank_is_raised(cluster: hoplite_mp.Cluster) -> None:
    def fails(mean: Any, rows: Any) -> tuple[float, Any]:
        if (rows == ROWS[-1]).all(axis=1).any():
            raise ArithmeticError("in the last shard")
        return squares(mean, rows)

    with pytest.raises(ArithmeticError, match="in the last shard"):
        ml.proactive(fails, np.array_split(ROWS, 3), mean_of, np.zeros(3), block=400)


@pytest.mark.parametrize("period", ["often", -1, math.inf, [1]])
def test_unsuitable_period_is_refused(period: Any) -> None:
    with pytest.raises(ValueError, match=r'period must be "auto", None or a number of seconds'):
        ml.proactive(lambda state, rows: (0.0, 1), [ROWS], mean_of, 0.0, period=period)
