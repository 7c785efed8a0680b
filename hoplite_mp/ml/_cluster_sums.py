"""The sums over rows for KMeans and GaussianMixture, and the updates computed from them.

Tasks import this module, so it needs only numpy.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = [
    "Mixture",
    "MixtureUpdate",
    "covariances",
    "kmeans_sums",
    "kmeans_update",
    "log_densities",
    "log_sum",
    "mixture_sums",
    "squared_distances",
]

Array = np.ndarray[Any, np.dtype[Any]]
Mixture = tuple[Array, Array, Array]  # weights, means, Cholesky factors of the precisions


def squared_distances(x: Array, centres: Array) -> Array:
    """The squared distance of each row to each centre: an array of shape (rows, centres), in the
    dtype of `x`, never below zero."""
    found = -2.0 * (x @ centres.T)
    found += (x * x).sum(axis=1)[:, None]
    found += (centres * centres).sum(axis=1)[None, :]
    return np.maximum(found, 0.0, out=found)


def kmeans_sums(centres: Array, x: Array) -> tuple[float, tuple[Array, Array]]:
    """The `partial` of KMeans: the inertia, and the number and the sum of the rows in each
    cluster."""
    distances = squared_distances(x, centres)
    labels = distances.argmin(axis=1)
    members = np.zeros((len(centres), len(x)), x.dtype)
    members[labels, np.arange(len(x))] = 1
    loss = float(distances[np.arange(len(x)), labels].sum(dtype=np.float64))
    return loss, (members.sum(axis=1), members @ x)


def kmeans_update(centres: Array, sums: tuple[Array, Array], rows: int) -> Array:
    """The `update` of KMeans. A cluster without rows keeps its centre."""
    counts, totals = sums
    filled = counts > 0.5
    means = totals / np.maximum(counts, 1)[:, None]
    return np.where(filled[:, None], means, centres).astype(centres.dtype)


def log_densities(mixture: Mixture, x: Array) -> Array:
    """The logarithm of weight times density, for each row and component: shape (rows,
    components)."""
    weights, means, factors = mixture
    found = np.empty((len(x), len(weights)))
    constant = -0.5 * x.shape[1] * math.log(2 * math.pi)
    for number, (weight, mean, factor) in enumerate(zip(weights, means, factors, strict=True)):
        if factor.ndim == 1:
            scaled, volume = (x - mean) * factor, np.log(factor).sum()
        else:
            scaled, volume = (x - mean) @ factor, np.log(np.diag(factor)).sum()
        found[:, number] = constant + volume - 0.5 * (scaled * scaled).sum(axis=1)
        found[:, number] += math.log(weight)
    return found


def log_sum(logs: Array) -> Array:
    """log(sum(exp(logs))) for each row: shape (rows, 1)."""
    top = logs.max(axis=1, keepdims=True)
    return np.asarray(top + np.log(np.exp(logs - top).sum(axis=1, keepdims=True)))


def mixture_sums(mixture: Mixture, x: Array) -> tuple[float, tuple[Array, Array, Array]]:
    """The `partial` of GaussianMixture: the negative log-likelihood, and three sums for each
    component: the responsibilities, the rows weighted by them, and the weighted squares (or outer
    products) of the rows."""
    logs = log_densities(mixture, x)
    total = log_sum(logs)
    shares = np.exp(logs - total)
    if mixture[2].ndim == 2:
        squares = shares.T @ (x * x)
    else:
        squares = np.stack([(x * share[:, None]).T @ x for share in shares.T])
    return -float(total.sum()), (shares.sum(axis=0), shares.T @ x, squares)


class MixtureUpdate:
    """The `update` of GaussianMixture."""

    def __init__(self, reg_covar: float) -> None:
        self.reg_covar = reg_covar

    def __call__(
        self, mixture: Mixture | None, sums: tuple[Array, Array, Array], rows: int
    ) -> Mixture:
        counts, totals, squares = sums
        counts = counts + 10 * np.finfo(np.float64).eps
        means = totals / counts[:, None]
        spread = self.covariances(means, counts, squares)
        if squares.ndim == 2:
            return counts / counts.sum(), means, 1.0 / np.sqrt(spread)
        lower = np.linalg.cholesky(spread)
        factors = np.linalg.solve(lower, np.broadcast_to(np.eye(means.shape[1]), lower.shape))
        return counts / counts.sum(), means, np.ascontiguousarray(factors.swapaxes(1, 2))

    def covariances(self, means: Array, counts: Array, squares: Array) -> Array:
        if squares.ndim == 2:
            found = squares / counts[:, None] - means * means
            return np.asarray(np.maximum(found, 0.0) + self.reg_covar)
        outer = means[:, :, None] * means[:, None, :]
        return np.asarray(
            squares / counts[:, None, None] - outer + self.reg_covar * np.eye(means.shape[1])
        )


def covariances(factors: Array) -> Array:
    """The covariances, computed from the Cholesky factors of the precisions."""
    if factors.ndim == 2:
        return np.asarray(1.0 / factors**2)
    inverse = np.linalg.inv(factors)
    return np.asarray(inverse.swapaxes(1, 2) @ inverse)
