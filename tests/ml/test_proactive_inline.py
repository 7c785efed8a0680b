"""`proactive` in the calling process, where no Cluster is open."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hoplite_mp
from hoplite_mp import ml

ROWS = np.random.default_rng(0).integers(-8, 9, size=(240, 3)).astype(float)


@pytest.fixture(autouse=True)
def no_cluster() -> None:
    with pytest.raises(hoplite_mp.ClosedError):
        hoplite_mp.current()


def squares(mean: Any, rows: Any) -> tuple[float, Any]:
    return float(((rows - mean) ** 2).sum()), rows.sum(axis=0)


def mean_of(mean: Any, sums: Any, rows: int) -> Any:
    return sums / rows


@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(1, 70), st.booleans())
@settings(max_examples=60)
def test_without_a_cluster_the_result_is_the_same(
    sizes: list[int], block: int, whole: bool
) -> None:
    ends = np.cumsum([0, *sizes])
    shards = [ROWS[a:b] for a, b in itertools.pairwise(ends)]
    period = None if whole else "auto"
    found = ml.proactive(
        squares, shards, mean_of, np.zeros(3), period, block=block, passes=2, tol=0
    )
    np.testing.assert_allclose(found.state, ROWS[: ends[-1]].mean(axis=0), atol=1e-12)
    assert found.rows == 2 * ends[-1]
    assert found.period == (None if whole else 0.0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shards": []}, "at least one shard"),
        ({"shards": [np.zeros((0, 3))]}, "at least one, not"),
        ({"shards": [(ROWS, ROWS[:5])]}, "the same number of rows"),
        ({"period": -1}, "period"),
        ({"period": float("nan")}, "period"),
        ({"block": 0}, "block"),
        ({"passes": 0}, "passes"),
    ],
)
def test_bad_arguments_are_value_errors(change: dict[str, Any], text: str) -> None:
    given = {"shards": [ROWS], "period": "auto"} | change
    with pytest.raises(ValueError, match=text):
        ml.proactive(squares, update=mean_of, state=np.zeros(3), **given)


def test_sums_of_other_shapes_are_refused() -> None:
    def grows(mean: Any, rows: Any) -> tuple[float, Any]:
        return 0.0, np.zeros(len(rows))

    with pytest.raises(ValueError, match="all blocks must have the same"):
        ml.proactive(grows, [ROWS[:239]], mean_of, np.zeros(3), block=100)
