"""One model for each group of rows, fitted for all groups together.

The idea is that of Kingpin (Li and Kumar, PVLDB 2021): one pass over the rows computes the
gradients of the models of all groups, before a single communication (gradient accumulation
parallelism).
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._client.futures import Future
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp.ml._group_by_parts import Parts, split_rows
from hoplite_mp.ml._group_by_strategies import STRATEGIES, Problem, estimate, fit
from hoplite_mp.ml._host_tasks import ClusterTasks, host_tasks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["GroupBy", "Logistic", "LogisticModel"]


@dataclasses.dataclass(frozen=True)
class Logistic:
    """Logistic regression for two classes with an L2 penalty, like scikit-learn's.

    Parameters
    ----------
    C : float, default=1.0
        The inverse of the penalty's strength. The objective is C times the sum of the losses, plus
        half the squared norm of the coefficients.
    fit_intercept : bool, default=True
        Whether there is an intercept, which is not penalised.
    tol : float, default=1e-8
        A model is done when the next step of Newton's method would lower its objective by less than
        `tol` nats.
    max_iter : int, default=50
        Maximum number of steps of Newton's method. A pass sends `(p + 1) * (p + 2) / 2` float64
        for each model with p coefficients, so the method suits tens of columns.
    """

    C: float = 1.0
    fit_intercept: bool = True
    tol: float = 1e-8
    max_iter: int = 50

    def __post_init__(self) -> None:
        if not self.C > 0 or not self.tol > 0 or self.max_iter < 1:
            raise ValueError(
                f"C and tol must be above 0, and max_iter at least 1: they are {self.C}, "
                f"{self.tol} and {self.max_iter}"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class LogisticModel:
    """A fitted model for one group.

    Attributes
    ----------
    params : dict
        The values from `param_grid` with which the model was fitted.
    classes_ : ndarray
        The classes in the group, sorted. If there is only one class, the model is constant.
    coef_, intercept_ : ndarray of shape (1, columns) and (1,)
        As in scikit-learn; zeros if the model is constant.
    n_iter_ : int
        The number of steps of Newton's method.
    n_rows_ : int
        The number of rows in the group.
    """

    params: dict[str, Any]
    classes_: Any
    coef_: Any
    intercept_: Any
    n_iter_: int
    n_rows_: int

    def decision_function(self, X: Any) -> Any:
        """The score of each row of X, which is above 0 for the second class: float64, (rows,)."""
        x = np.asarray(X, float)
        if x.ndim != 2 or x.shape[1] != self.coef_.shape[1]:
            raise ValueError(f"X must be (rows, {self.coef_.shape[1]}): it is {x.shape}")
        scores: Any = x @ self.coef_[0] + self.intercept_[0]
        return scores

    def predict_proba(self, X: Any) -> Any:
        """The probabilities of `classes_` for each row: float64, (rows, classes)."""
        scores = self.decision_function(X)
        if len(self.classes_) == 1:
            return np.ones((len(scores), 1))
        second = np.exp(-np.logaddexp(0.0, -scores))
        return np.stack([1.0 - second, second], axis=1)

    def predict(self, X: Any) -> Any:
        """The more probable class for each row."""
        scores = self.decision_function(X)
        if len(self.classes_) == 1:
            return np.repeat(self.classes_, len(scores))
        return self.classes_[(scores > 0).astype(int)]


class GroupBy:
    """Fits a model for each group of rows and each combination of hyper-parameters.

    Rows stay on the hosts where they are, except with "task". There are three strategies:
    "accumulate" computes the sums for the models of all groups in one pass, and communicates once
    for each pass; "data" fits one group after another on all hosts; "task" sends each group's rows
    to one worker. "auto" estimates the time of each strategy, and uses the fastest. All strategies
    fit the same models, up to rounding. Without an open cluster, the calling process fits the
    models. The loss of a host does not change the result if the rows can be read from another host.

    Parameters
    ----------
    model : Logistic
        The kind of model, and its hyper-parameters.
    param_grid : mapping of str to sequence, optional
        Values of hyper-parameters; only `C` may vary. Each group gets a model for each
        combination.
    strategy : {"auto", "accumulate", "data", "task"}, default="auto"
        How the models are fitted.

    Attributes
    ----------
    models_ : dict
        The `LogisticModel` of each group; with `param_grid` a list, in the order of `params_`. A
        group whose rows are all of one class has a constant model.
    params_ : list of dict
        The combinations of hyper-parameters.
    strategy_ : str
        The strategy that was used.
    cost_ : dict or None
        With "auto": the estimated seconds of each strategy.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> X, y = [[0.0], [1.0], [0.0], [1.0]], [0, 1, 1, 0]
    >>> models = ml.GroupBy(ml.Logistic()).fit(X, y, ["a", "a", "b", "b"]).models_
    >>> models["a"].predict([[2.0]]).tolist(), models["b"].predict([[2.0]]).tolist()
    ([1], [0])
    """

    def __init__(
        self,
        model: Logistic,
        param_grid: Mapping[str, Sequence[Any]] | None = None,
        strategy: str = "auto",
    ) -> None:
        if not isinstance(model, Logistic):
            raise TypeError(f"model must be a Logistic, not {type(model).__name__}")
        if strategy not in ("auto", *STRATEGIES):
            known = ", ".join(("auto", *STRATEGIES))
            raise ValueError(f"no strategy {strategy!r}: there are {known}")
        unknown = [name for name in param_grid or () if name != "C"]
        if unknown:
            raise ValueError(f"param_grid may vary C only, not {unknown[0]!r}")
        self.model = model
        self.param_grid = param_grid
        self.strategy = strategy

    def fit(self, X: Any, y: Any, groups: Any) -> GroupBy:
        """Fits all models.

        Parameters
        ----------
        X : array-like of shape (rows, columns), or a list of refs or Futures of such arrays
            The table, without NaN and infinity. With refs, each part is processed on the host that
            holds it.
        y : array-like of shape (rows,), or a list like X
            The classes; at most two in all.
        groups : array-like of shape (rows,), or a list like X
            The group of each row, as numbers or text.

        Raises
        ------
        ValueError
            Shapes do not match, a value is not finite, or there are more than two classes.
        NodeLostError, ObjectLostError
            Rows were lost with a host, and no other host has them.
        """
        tasks = host_tasks()
        raw, hosts = _parts_of(tasks, X, y, groups)
        parts = Parts(tasks, raw, hosts, self.model.fit_intercept)
        parts.describe()
        self.params_ = _combinations(self.param_grid)
        varied = [dataclasses.replace(self.model, **params) for params in self.params_]
        both = np.flatnonzero((parts.counts > 0).all(axis=1))
        problem = Problem(
            groups=np.repeat(both, len(varied)),
            penalties=np.tile([1.0 / one.C for one in varied], len(both)),
            p=parts.p,
            intercept=self.model.fit_intercept,
            tol=self.model.tol,
            max_iter=self.model.max_iter,
        )
        self.cost_ = estimate(parts, problem) if self.strategy == "auto" else None
        if self.cost_ is None:
            self.strategy_ = self.strategy
        else:
            self.strategy_ = min(self.cost_, key=self.cost_.__getitem__)
        fitted = fit(self.strategy_, parts, problem)
        models = self._models(parts, problem, fitted)
        single = self.param_grid is None
        self.models_ = {group: found[0] if single else found for group, found in models.items()}
        return self

    def _models(self, parts: Parts, problem: Problem, fitted: Any) -> dict[Any, Any]:
        coefficients, iterations, converged = fitted
        if not converged.all():
            count = int((~converged).sum())
            warnings.warn(
                f"{count} of {len(converged)} models have not converged after "
                f"{self.model.max_iter} steps: scale the columns, or raise max_iter",
                RuntimeWarning,
                stacklevel=3,
            )
        width, many = parts.n_features, len(self.params_)
        found = {}
        for number, group in enumerate(parts.groups.tolist()):
            seen = parts.classes if len(parts.classes) == 2 else np.repeat(parts.classes, 2)
            rows = int(parts.counts[number].sum())
            first = int(np.searchsorted(problem.groups, number))
            constant = not (parts.counts[number] > 0).all()
            if constant:
                classes = seen[[int(parts.counts[number].argmax())]]
                zeros = np.zeros((1, width)), np.zeros(1)
                found[group] = [
                    LogisticModel(params, classes, *zeros, 0, rows) for params in self.params_
                ]
                continue
            found[group] = [
                LogisticModel(
                    params,
                    parts.classes,
                    coefficients[at, np.newaxis, :width],
                    coefficients[at, width:] if parts.intercept else np.zeros(1),
                    int(iterations[at]),
                    rows,
                )
                for params, at in zip(self.params_, range(first, first + many), strict=True)
            ]
        return found


def _combinations(grid: Mapping[str, Sequence[Any]] | None) -> list[dict[str, Any]]:
    if not grid:
        return [{}]
    values = itertools.product(*grid.values())
    return [dict(zip(grid, one, strict=True)) for one in values]


def _parts_of(tasks: Any, x: Any, y: Any, groups: Any) -> tuple[list[Any], list[str]]:
    """The parts of (X, y, groups), and the host of each part."""
    if not _is_refs(x):
        arrays = [np.asarray(one) for one in (x, y, groups)]
        lengths = [len(one) if one.ndim else -1 for one in arrays]
        if len(set(lengths)) > 1 or lengths[0] < 1:
            raise ValueError(f"X, y and groups need the same number of rows: {lengths}")
        return split_rows(tasks, *arrays)
    if not _is_refs(y) or not _is_refs(groups) or not len(x) == len(y) == len(groups):
        raise ValueError("X, y and groups must all be lists of refs, of the same length")
    if not isinstance(tasks, ClusterTasks):
        raise ValueError("refs need their cluster, which is not open")
    return list(zip(x, y, groups, strict=True)), [
        tasks.host_of(ref, at) for at, ref in enumerate(x)
    ]


def _is_refs(value: Any) -> bool:
    kinds = ObjectRef, Future
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], kinds)
