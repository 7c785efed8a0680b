"""KMeans and GaussianMixture with proactive updates: EM that does not wait for whole passes.

Both are scikit-learn estimators. They run on the current Cluster, with one rank for each worker.
If no Cluster is open, they run in the calling process and start no other process.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from sklearn.base import (
    BaseEstimator,
    ClassNamePrefixFeaturesOutMixin,
    ClusterMixin,
    DensityMixin,
    TransformerMixin,
)
from sklearn.cluster import kmeans_plusplus
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from hoplite_mp._api.cluster import current
from hoplite_mp.errors import ClosedError
from hoplite_mp.ml._cluster_sums import (
    Mixture,
    MixtureUpdate,
    covariances,
    kmeans_sums,
    kmeans_update,
    log_densities,
    log_sum,
    mixture_sums,
    squared_distances,
)
from hoplite_mp.ml._proactive import ProactiveResult, proactive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

__all__ = ["GaussianMixture", "KMeans"]

Array = np.ndarray[Any, np.dtype[Any]]
SAMPLE = 10_000  # number of rows from which the first centres are chosen
FIRST_PASSES = 10  # passes of KMeans over the sample, for the first state of a mixture
PREDICT_ROWS = 4096  # number of rows whose distances are in memory at a time


def _shards(x: Array) -> list[Any]:
    """The rows, split into one part for each worker of the current Cluster, in the Cluster's
    store."""
    try:
        cluster = current()
    except ClosedError:
        return [x]
    workers = sum(node.workers for node in cluster.nodes)
    count = max(1, min(workers, len(x)))
    return [cluster.put(part) for part in np.array_split(x, count)]


def _chunks(x: Array) -> Iterator[Array]:
    for begin in range(0, len(x), PREDICT_ROWS):
        yield x[begin : begin + PREDICT_ROWS]


def _check_rows(x: Array, needed: int, name: str) -> None:
    if not (isinstance(needed, int | np.integer) and needed >= 1):
        raise ValueError(f"{name} must be an integer of at least 1, not {needed!r}")
    if len(x) < needed:
        raise ValueError(f"n_samples={len(x)} should be >= {name}={needed}")


class KMeans(
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
    ClusterMixin,
    BaseEstimator,
):
    """K-means clustering with centres that move many times in each pass over the rows.

    Runs on the current Cluster; without one, in this process.

    Parameters
    ----------
    n_clusters : int
        Number of clusters.
    init : "k-means++", "random" or ndarray of shape (n_clusters, n_features)
        How the first centres are chosen from at most 10 000 rows, or the first centres themselves.
    max_iter : int
        Maximum number of passes over all rows.
    tol : float
        Stops when a pass lowers the mean squared distance per row by less than `tol` times the mean
        variance of the features.
    period : "auto", float or None
        Seconds between updates of the centres: see `proactive`. None: an update after each pass
        (Lloyd's algorithm). On a Cluster, the results depend on timing unless `period` is None.
    block : int
        The number of rows that are processed between two checks of the time; without a Cluster,
        between two updates.
    random_state : int, RandomState or None
        The seed for choosing the first centres.

    Attributes
    ----------
    cluster_centers_ : ndarray of shape (n_clusters, n_features)
    labels_ : ndarray of shape (n_samples,), int32
    inertia_ : float
        The sum of the squared distances of the rows to their centres.
    n_iter_ : int
        The number of passes over all rows, rounded up.
    result_ : ProactiveResult
        The result of `proactive`.

    Notes
    -----
    For the source, see `proactive`. The sums of each block are those of incremental EM with hard
    assignments. A cluster that loses all its rows keeps its centre.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> x = np.array([[0.0, 0.0], [0.0, 2.0], [9.0, 0.0], [9.0, 2.0]])
    >>> ml.KMeans(2, init=x[[0, 2]]).fit(x).cluster_centers_
    array([[0., 1.],
           [9., 1.]])
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means++",
        max_iter: int = 300,
        tol: float = 1e-4,
        period: float | Literal["auto"] | None = "auto",
        block: int = 1024,
        random_state: Any = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.init = init
        self.max_iter = max_iter
        self.tol = tol
        self.period = period
        self.block = block
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Finds centres for the rows of `X`, which has the shape (n_samples, n_features)."""
        x = validate_data(self, X, dtype=[np.float64, np.float32], order="C")
        _check_rows(x, self.n_clusters, "n_clusters")
        shift = x.mean(axis=0)  # avoids cancellation in `squared_distances`
        x = x - shift
        first = self._first(x, shift, check_random_state(self.random_state))
        tol = self.tol * float(x.var(axis=0).mean())
        self.result_: ProactiveResult = proactive(
            kmeans_sums, _shards(x), kmeans_update, first, self.period,
            block=self.block, tol=tol, passes=self.max_iter,
        )  # fmt: skip
        self.cluster_centers_: Array = self.result_.state + shift
        self.n_iter_ = max(1, math.ceil(self.result_.passes - 1e-9))
        self.labels_, self.inertia_ = self._assign(x, self.result_.state)
        return self

    def _first(self, x: Array, shift: Array, rng: Any) -> Array:
        if not isinstance(self.init, str):
            given = np.asarray(self.init, x.dtype)
            if given.shape != (self.n_clusters, x.shape[1]):
                raise ValueError(
                    f"init has shape {given.shape}, not (n_clusters, n_features) = "
                    f"{(self.n_clusters, x.shape[1])}"
                )
            return np.asarray(given - shift)
        if self.init not in ("k-means++", "random"):
            raise ValueError(f'init must be "k-means++", "random" or an array, not {self.init!r}')
        rows = x
        if len(x) > max(SAMPLE, self.n_clusters):
            rows = x[rng.choice(len(x), max(SAMPLE, self.n_clusters), replace=False)]
        if self.init == "random":
            return np.array(rows[rng.choice(len(rows), self.n_clusters, replace=False)])
        return np.asarray(kmeans_plusplus(rows, self.n_clusters, random_state=rng)[0])

    @staticmethod
    def _assign(x: Array, centres: Array) -> tuple[Array, float]:
        labels, inertia = [], 0.0
        for rows in _chunks(x):
            nearest = squared_distances(rows, centres).argmin(axis=1).astype(np.int32)
            labels.append(nearest)
            inertia += float(((rows - centres[nearest]) ** 2).sum(dtype=np.float64))
        return np.concatenate(labels), inertia

    def _check_predict(self, X: Any) -> tuple[Array, Array]:
        """The rows and the centres, both shifted to the mean of the centres."""
        check_is_fitted(self)
        x = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        shift = self.cluster_centers_.mean(axis=0)
        return x - shift, self.cluster_centers_ - shift

    def predict(self, X: Any) -> Array:
        """The index of the nearest centre for each row."""
        labels, _ = self._assign(*self._check_predict(X))
        return labels

    def transform(self, X: Any) -> Array:
        """The distances of each row to the centres: shape (n_samples, n_clusters)."""
        x, centres = self._check_predict(X)
        found = [np.sqrt(squared_distances(rows, centres)) for rows in _chunks(x)]
        return np.concatenate(found)

    def score(self, X: Any, y: Any = None) -> float:
        """The negative sum of the rows' squared distances to their nearest centres."""
        return -self._assign(*self._check_predict(X))[1]

    @property
    def _n_features_out(self) -> int:
        return len(self.cluster_centers_)


class GaussianMixture(DensityMixin, BaseEstimator):
    """A mixture of Gaussians, fitted by EM with M steps that do not wait for a pass over the rows.

    Runs on the current Cluster; without one, in this process.

    Parameters
    ----------
    n_components : int
        Number of components.
    covariance_type : "full" or "diag"
        Whether covariances are full matrices, or only variances.
    tol : float
        Stops when a pass raises the mean log-likelihood per row by less than this.
    reg_covar : float
        A value that is added to the variances.
    max_iter : int
        Maximum number of passes over all rows.
    means_init : ndarray of shape (n_components, n_features) or None
        The first means. None: centres found by KMeans on at most 10 000 rows.
    period, block, random_state
        As for `KMeans`.

    Attributes
    ----------
    weights_ : ndarray of shape (n_components,)
    means_ : ndarray of shape (n_components, n_features)
    covariances_ : ndarray of shape (n_components, n_features[, n_features])
    converged_ : bool
    n_iter_ : int
        The number of passes over all rows, rounded up.
    lower_bound_ : float
        The mean log-likelihood per row. Each row counts with the value computed at its last visit.
    result_ : ProactiveResult
        The result of `proactive`. The means in its state are relative to the mean of the rows.

    Notes
    -----
    All computation is in float64. For the source, see `proactive`.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> x = np.random.default_rng(0).normal([[0.0], [9.0]], size=(2, 500)).reshape(-1, 1)
    >>> ml.GaussianMixture(2, random_state=0).fit(x).weights_
    array([0.5, 0.5])
    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        covariance_type: Literal["full", "diag"] = "full",
        tol: float = 1e-3,
        reg_covar: float = 1e-6,
        max_iter: int = 100,
        means_init: Any = None,
        period: float | Literal["auto"] | None = "auto",
        block: int = 1024,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.covariance_type = covariance_type
        self.tol = tol
        self.reg_covar = reg_covar
        self.max_iter = max_iter
        self.means_init = means_init
        self.period = period
        self.block = block
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fits the mixture to the rows of `X`, of shape (n_samples, n_features)."""
        if self.covariance_type not in ("full", "diag"):
            raise ValueError(
                f'covariance_type must be "full" or "diag", not {self.covariance_type!r}'
            )
        x = validate_data(self, X, dtype=np.float64, order="C", ensure_min_samples=2)
        _check_rows(x, self.n_components, "n_components")
        shift = x.mean(axis=0)
        x = x - shift
        update = MixtureUpdate(self.reg_covar)
        self.result_: ProactiveResult = proactive(
            mixture_sums, _shards(x), update, self._first(x, shift, update), self.period,
            block=self.block, tol=self.tol, passes=self.max_iter,
        )  # fmt: skip
        self.weights_, means, self.precisions_cholesky_ = self.result_.state
        self.means_: Array = means + shift
        self.covariances_ = covariances(self.precisions_cholesky_)
        self.converged_ = self.result_.converged
        self.lower_bound_ = -self.result_.loss
        self.n_iter_ = max(1, math.ceil(self.result_.passes - 1e-9))
        return self

    def _first(self, x: Array, shift: Array, update: MixtureUpdate) -> Mixture:
        """The first state: an M step after a hard assignment of a sample of the rows to the first
        means."""
        rng = check_random_state(self.random_state)
        rows = x if len(x) <= SAMPLE else x[rng.choice(len(x), SAMPLE, replace=False)]
        if self.means_init is None:
            first = np.asarray(kmeans_plusplus(rows, self.n_components, random_state=rng)[0])
            for _ in range(FIRST_PASSES):
                first = kmeans_update(first, kmeans_sums(first, rows)[1], len(rows))
        else:
            first = np.asarray(self.means_init, np.float64) - shift
            if first.shape != (self.n_components, x.shape[1]):
                raise ValueError(
                    f"means_init has shape {first.shape}, not (n_components, n_features) = "
                    f"{(self.n_components, x.shape[1])}"
                )
        shares = np.zeros((len(rows), self.n_components))
        labels = squared_distances(rows, first).argmin(axis=1)
        shares[np.arange(len(rows)), labels] = 1.0
        if self.covariance_type == "diag":
            squares = shares.T @ (rows * rows)
        else:
            squares = np.stack([(rows * share[:, None]).T @ rows for share in shares.T])
        return update(None, (shares.sum(axis=0), shares.T @ rows, squares), len(rows))

    def _logs(self, X: Any) -> Array:
        check_is_fitted(self)
        x = validate_data(self, X, dtype=np.float64, reset=False)
        mixture = (self.weights_, self.means_, self.precisions_cholesky_)
        return np.concatenate([log_densities(mixture, rows) for rows in _chunks(x)])

    def score_samples(self, X: Any) -> Array:
        """The log-likelihood of each row."""
        return log_sum(self._logs(X))[:, 0]

    def score(self, X: Any, y: Any = None) -> float:
        """The mean log-likelihood per row."""
        return float(self.score_samples(X).mean())

    def predict_proba(self, X: Any) -> Array:
        """The probability of each component for each row."""
        logs = self._logs(X)
        return np.asarray(np.exp(logs - log_sum(logs)))

    def predict(self, X: Any) -> Array:
        """The index of the most probable component for each row."""
        return np.asarray(self._logs(X).argmax(axis=1))

    def fit_predict(self, X: Any, y: Any = None) -> Array:
        """Calls `fit`, and then `predict` for the same rows."""
        return self.fit(X).predict(X)
