"""Newton's method for many logistic regressions at once, each for the rows of one group.

The rows are on several hosts. Each host sums the loss, the gradient and the Hessian of every model
over its rows (`sums`). The hosts' sums are added up, and `NewtonFits` takes one step for all
models.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

__all__ = ["GroupedRows", "NewtonFits", "length_of_sums", "sums"]

HALVINGS_MAX = 40  # maximum number of times that a step is halved
SUFFICIENT_DECREASE = 1e-4  # Armijo's constant
DAMPING = 1e-12  # relative to the largest second derivative; does not move the optimum


@dataclasses.dataclass(frozen=True)
class GroupedRows:
    """Rows sorted by group. x: float64, (rows, p); y: 0.0 or 1.0, (rows,); bounds: group g has the
    rows bounds[g]:bounds[g + 1]."""

    x: Any
    y: Any
    bounds: Any


def length_of_sums(p: int) -> int:
    """The number of values that `sums` returns for one model with p coefficients."""
    return 1 + p + p * (p + 1) // 2


def sums(part: GroupedRows, groups: Any, coefficients: Any) -> Any:
    """The loss, gradient and upper triangle of the Hessian of each model, summed over the rows.

    groups: the group of each model, in ascending order. coefficients: (models, p). Returns float64
    of shape (models, 1 + p + p * (p + 1) / 2). The loss is the negative log-likelihood in nats."""
    p = coefficients.shape[1]
    upper = np.triu_indices(p)
    found = np.zeros((len(groups), length_of_sums(p)))
    numbers, starts = np.unique(groups, return_index=True)
    for number, first, last in zip(numbers, starts, [*starts[1:], len(groups)], strict=True):
        begin, end = part.bounds[number], part.bounds[number + 1]
        if begin == end:
            continue
        x, y = part.x[begin:end], part.y[begin:end]
        scores = x @ coefficients[first:last].T
        chances = np.exp(-np.logaddexp(0.0, -scores))
        found[first:last, 0] = np.logaddexp(0.0, scores).sum(axis=0) - y @ scores
        found[first:last, 1 : 1 + p] = (chances - y[:, np.newaxis]).T @ x
        curvature = chances * (1.0 - chances)
        for at in range(last - first):
            hessian = (x * curvature[:, at, np.newaxis]).T @ x
            found[first + at, 1 + p :] = hessian[upper]
    return found


class NewtonFits:
    """The models' coefficients, which are improved by damped steps of Newton's method.

    groups: (models,), in ascending order. penalties: (models,), the factor 1/C of half the squared
    norm. intercept: whether the last coefficient is an intercept, which is not penalised. tol: a
    model is done when the next step would lower its objective by less than `tol` nats."""

    def __init__(
        self, groups: Any, penalties: Any, p: int, intercept: bool, tol: float, max_iter: int
    ) -> None:
        models = len(groups)
        self.groups, self.tol, self.max_iter = np.asarray(groups), tol, max_iter
        self.penalties = np.repeat(np.asarray(penalties, float)[:, np.newaxis], p, axis=1)
        if intercept:
            self.penalties[:, -1] = 0.0
        self.coefficients = np.zeros((models, p))
        self.steps = np.zeros((models, p))
        self.scales = np.ones(models)
        self.slopes = np.zeros(models)  # expected decrease of the objective by a full step
        self.objectives = np.full(models, np.inf)
        self.iterations = np.zeros(models, int)
        self.halvings = np.zeros(models, int)
        self.converged = np.zeros(models, bool)
        self.active = np.ones(models, bool)

    def candidates(self) -> tuple[Any, Any]:
        """The groups and coefficients of the models for which `advance` needs sums."""
        on = self.active
        return self.groups[on], self.coefficients[on] - self.scales[on, None] * self.steps[on]

    def advance(self, found: Any) -> None:
        """Accepts or shortens the steps. found: the sums for `candidates`, over all rows."""
        on = np.flatnonzero(self.active)
        _, tried = self.candidates()
        p = tried.shape[1]
        penalties = self.penalties[on]
        objectives = found[:, 0] + 0.5 * (penalties * tried**2).sum(axis=1)
        slack = 1e-12 * np.abs(objectives)  # allows for rounding errors of the sums
        enough = self.objectives[on] - SUFFICIENT_DECREASE * self.scales[on] * self.slopes[on]
        better = objectives <= enough + slack
        self._shorten(on[~better])
        kept = on[better]
        if not len(kept):
            return
        gradients = found[better, 1 : 1 + p] + penalties[better] * tried[better]
        hessians = np.zeros((len(kept), p, p))
        rows, columns = np.triu_indices(p)
        hessians[:, rows, columns] = hessians[:, columns, rows] = found[better, 1 + p :]
        diagonal = np.arange(p)
        hessians[:, diagonal, diagonal] += penalties[better]
        largest = np.maximum(hessians[:, diagonal, diagonal].max(axis=1), np.finfo(float).tiny)
        hessians[:, diagonal, diagonal] += DAMPING * largest[:, np.newaxis]
        steps = np.linalg.solve(hessians, gradients[..., np.newaxis])[..., 0]
        self.coefficients[kept], self.objectives[kept] = tried[better], objectives[better]
        self.steps[kept], self.scales[kept], self.halvings[kept] = steps, 1.0, 0
        self.slopes[kept] = (steps * gradients).sum(axis=1)
        self.iterations[kept] += 1
        self._end(kept)

    def _shorten(self, models: Any) -> None:
        """Halves the steps of these models: they were too long, or rounding hides any progress."""
        self.scales[models] /= 2
        self.halvings[models] += 1
        self.active[models[self.halvings[models] > HALVINGS_MAX]] = False

    def _end(self, models: Any) -> None:
        """Ends models whose next step would gain little, after this last step, and models that have
        reached `max_iter`."""
        small = models[self.slopes[models] / 2 <= self.tol]
        self.coefficients[small] -= self.steps[small]
        self.converged[small] = True
        self.active[small] = False
        self.active[models[self.iterations[models] >= self.max_iter]] = False
