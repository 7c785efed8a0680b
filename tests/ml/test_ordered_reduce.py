"""ordered_reduce: the largest norms are summed, as many as the rule asks for, and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hoplite_mp
from hoplite_mp import ml

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=1, memory="256MiB") as made:
        yield made


def chosen(arrays: list[Array], xi: float) -> tuple[int, ...]:
    """The rule by numpy."""
    norms = [float(np.linalg.norm(one)) for one in arrays]
    order = sorted(range(len(arrays)), key=lambda at: -norms[at])
    for count in range(1, len(order) + 1):
        left = sum(norms[at] for at in order[count:])
        if left <= xi * np.linalg.norm(sum(arrays[at] for at in order[:count])):
            break
    return tuple(sorted(order[:count]))


@settings(max_examples=12)
@given(
    count=st.integers(1, 8),
    xi=st.sampled_from([0.0, 0.1, 0.25, 0.5, 2.0]),
    cancels=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_arrays_sent_are_those_of_the_rule(
    cluster: Cluster, count: int, xi: float, cancels: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=(3, 4)) + (0 if cancels else 2) for _ in range(count)]
    arrays = [one * 2.0 ** rng.integers(-6, 6) for one in arrays]
    norms = [float(np.linalg.norm(one)) for one in arrays]
    total = ml.ordered_reduce([cluster.put(one) for one in arrays], norms, xi=xi)
    value = cluster.get(total)
    assert total.contributors == chosen(arrays, xi)
    np.testing.assert_allclose(value, sum(arrays[at] for at in total.contributors), rtol=1e-12)


def test_arrays_and_norms_that_are_futures(cluster: Cluster) -> None:
    def gradient(at: int) -> Array:
        return np.full(4, [0.01, 3, 0.02][at], np.float32)

    grads = [cluster.submit(gradient, at) for at in range(3)]
    norms = [cluster.submit(np.linalg.norm, grad) for grad in grads]
    total = ml.ordered_reduce(grads, norms, to=cluster.here)
    assert cluster.get(total).tolist() == [3.0] * 4
    assert cluster.get(total).dtype == np.float32
    assert total.contributors == (1,)


def test_a_failed_array_raises_its_exception(cluster: Cluster) -> None:
    def fails() -> Array:
        raise RuntimeError("no gradient")

    with pytest.raises(RuntimeError, match="no gradient"):
        ml.ordered_reduce([cluster.submit(fails)], [cluster.submit(np.linalg.norm, np.ones(1))])
    failed = cluster.submit(fails)
    with pytest.raises(RuntimeError, match="no gradient"):
        ml.ordered_reduce([failed], [cluster.submit(np.linalg.norm, failed)])


@pytest.mark.parametrize(
    ("count", "norms", "options", "match"),
    [
        (0, [], {}, "0 refs and 0 norms"),
        (2, [1.0], {}, "2 refs and 1 norms"),
        (1, [-1.0], {}, "norms must be finite"),
        (1, [float("nan")], {}, "norms must be finite"),
        (1, [1.0], {"xi": -1}, "xi=-1"),
        (1, [1.0], {"to": [0]}, "one node"),
    ],
)
def test_wrong_arguments_are_a_value_error(
    cluster: Cluster, count: int, norms: list[float], options: Any, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        ml.ordered_reduce([cluster.put(np.ones(2))] * count, norms, **options)
