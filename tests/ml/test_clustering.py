"""KMeans and GaussianMixture: estimators of scikit-learn, and equal to its results."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sklearn.cluster
import sklearn.mixture
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import parametrize_with_checks

import hoplite_mp
from hoplite_mp import ml

if TYPE_CHECKING:
    from collections.abc import Iterator

CENTRES = np.array([[0.0, 0.0, 0.0], [4.0, 0.0, 1.0], [0.0, 5.0, -1.0]])


@pytest.fixture(scope="module")
def cluster() -> Iterator[hoplite_mp.Cluster]:
    with hoplite_mp.Cluster(workers=3, memory="128MiB") as made:
        yield made


def rows_around(rows: int, seed: int, dtype: Any = np.float64) -> Any:
    """Rows around CENTRES, sorted by centre: the shards have different ones."""
    rng = np.random.default_rng(seed)
    labels = np.sort(rng.integers(3, size=rows))
    return (CENTRES[labels] + rng.normal(size=(rows, 3))).astype(dtype)


def distances(x: Any, centres: Any) -> Any:
    return ((x[:, None].astype(float) - centres) ** 2).sum(axis=2)


def precision(rows: Any, kind: str) -> Any:
    if kind == "diag":
        return 1 / (rows.var(axis=0) + 1e-6)
    return np.linalg.inv(np.cov(rows.T, bias=True) + 1e-6 * np.eye(3))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([ml.KMeans(3), ml.GaussianMixture()])
def test_estimators_pass_the_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


@given(st.integers(3, 400), st.integers(0, 9), st.sampled_from(["f4", "f8"]))
@settings(max_examples=25)
def test_full_passes_equal_lloyds_algorithm(rows: int, seed: int, dtype: str) -> None:
    x = rows_around(rows, seed, dtype)
    first = x[np.random.default_rng(seed).choice(rows, 3, replace=False)]
    ours = ml.KMeans(3, init=first, max_iter=5, tol=-np.inf, period=None, block=64).fit(x)
    centres = first.astype(float)
    for _ in range(5):
        labels = distances(x, centres).argmin(axis=1)
        there = np.unique(labels)
        centres[there] = [x[labels == one].astype(float).mean(axis=0) for one in there]
    assert ours.cluster_centers_.dtype == x.dtype
    assert ours.inertia_ == pytest.approx(
        distances(x, centres).min(axis=1).sum(), rel=1e-3, abs=1e-6
    )
    np.testing.assert_array_equal(ours.labels_, ours.predict(x))
    np.testing.assert_allclose(
        ours.transform(x) ** 2, distances(x, ours.cluster_centers_), atol=1e-3
    )
    assert ours.score(x) == pytest.approx(-ours.inertia_, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("period", ["auto", None, 0.001])
def test_kmeans_finds_the_centres_of_scikit_learn(cluster: hoplite_mp.Cluster, period: Any) -> None:
    x = rows_around(2000, 0)
    theirs = sklearn.cluster.KMeans(3, n_init=1, random_state=0).fit(x)
    ours = ml.KMeans(3, period=period, tol=1e-9, block=100, random_state=0).fit(x)
    assert ours.inertia_ == pytest.approx(theirs.inertia_, rel=1e-3)
    assert ours.labels_.dtype == np.int32
    assert ours.get_feature_names_out().tolist() == ["kmeans0", "kmeans1", "kmeans2"]


def test_centres_without_rows_stay() -> None:
    x = np.array([[0.0], [1.0], [2.0]])
    far = np.array([[1.0], [99.0]])
    assert ml.KMeans(2, init=far).fit(x).cluster_centers_.tolist() == far.tolist()


@pytest.mark.parametrize("kind", ["full", "diag"])
@pytest.mark.parametrize("seed", range(3))
def test_full_passes_equal_em_of_scikit_learn(kind: Any, seed: int) -> None:
    x = rows_around(500, seed) + 1e3  # far from zero
    first = x[[0, 250, 499]]
    ours = ml.GaussianMixture(
        3, covariance_type=kind, means_init=first, max_iter=4, tol=-np.inf, period=None, block=64
    ).fit(x)
    labels = ((x[:, None] - first) ** 2).sum(axis=2).argmin(axis=1)
    theirs = sklearn.mixture.GaussianMixture(
        3, covariance_type=kind, max_iter=4, tol=0.0, random_state=0,
        weights_init=np.bincount(labels) / 500,
        means_init=[x[labels == k].mean(axis=0) for k in range(3)],
        precisions_init=[precision(x[labels == k], kind) for k in range(3)],
    )  # fmt: skip
    with pytest.warns(ConvergenceWarning):
        theirs.fit(x)
    np.testing.assert_allclose(ours.means_, theirs.means_, rtol=1e-6)
    np.testing.assert_allclose(ours.covariances_, theirs.covariances_, atol=1e-5)
    np.testing.assert_allclose(ours.weights_, theirs.weights_, atol=1e-6)
    np.testing.assert_allclose(ours.score_samples(x), theirs.score_samples(x), atol=1e-4)
    np.testing.assert_allclose(ours.predict_proba(x), theirs.predict_proba(x), atol=1e-5)
    np.testing.assert_array_equal(ours.predict(x), theirs.predict(x))


@pytest.mark.parametrize("kind", ["full", "diag"])
@pytest.mark.parametrize("period", ["auto", None])
def test_mixture_reaches_the_likelihood_of_scikit_learn(
    cluster: hoplite_mp.Cluster, kind: Any, period: Any
) -> None:
    x = rows_around(2000, 1)
    theirs = sklearn.mixture.GaussianMixture(3, covariance_type=kind, random_state=0).fit(x)
    ours = ml.GaussianMixture(
        3, covariance_type=kind, period=period, tol=1e-6, block=100, random_state=0
    ).fit(x)
    assert ours.score(x) == pytest.approx(theirs.score(x), abs=5e-3)
    assert ours.lower_bound_ == pytest.approx(ours.score(x), abs=5e-3)


@pytest.mark.parametrize(
    "bad",
    [
        ml.KMeans(0), ml.KMeans(6), ml.KMeans(2, init="k"), ml.KMeans(2, init=np.zeros((3, 1))),
        ml.KMeans(2, period=-1), ml.GaussianMixture(6), ml.GaussianMixture(covariance_type="tied"),
        ml.GaussianMixture(2, means_init=np.zeros((3, 1))),
    ],
    ids=repr,
)  # fmt: skip
def test_bad_parameters_are_value_errors_of_fit(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"n_clusters|n_components|init|period|covariance_type"):
        bad.fit(np.arange(5.0)[:, None])


def test_estimators_name_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "hoplite_mp.ml._clustering", raising=False)
    monkeypatch.delitem(vars(ml), "KMeans", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hoplite-mp\[ml\]'"):
        _ = ml.KMeans
