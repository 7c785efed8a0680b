"""The strategies that fit the models of all groups, and the cost model that chooses one of them."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import errors
from hoplite_mp.ml._group_by_parts import merge, select
from hoplite_mp.ml._newton import GroupedRows, NewtonFits, length_of_sums, sums

if TYPE_CHECKING:
    from hoplite_mp.ml._group_by_parts import Parts

__all__ = ["STRATEGIES", "Problem", "estimate", "fit"]

STRATEGIES = ("accumulate", "data", "task")
PASSES = 8  # number of passes that the cost model assumes; Newton's method usually needs 6 to 12
PROBE_ROWS, PROBE_BYTES = 2000, 1 << 20


@dataclasses.dataclass(frozen=True)
class Problem:
    """The models to fit. groups: the group of each model, in ascending order; penalties: 1/C for
    each model."""

    groups: Any
    penalties: Any
    p: int
    intercept: bool
    tol: float
    max_iter: int

    def of(self, chosen: Any) -> Problem:
        """The same problem with only the chosen models."""
        return dataclasses.replace(
            self, groups=self.groups[chosen], penalties=self.penalties[chosen]
        )

    def begin(self) -> NewtonFits:
        return NewtonFits(
            self.groups, self.penalties, self.p, self.intercept, self.tol, self.max_iter
        )


Fitted = tuple[Any, Any, Any]  # for each model: coefficients, iterations, whether it has converged


def fit(strategy: str, parts: Parts, problem: Problem) -> Fitted:
    """Fits all models with one strategy."""
    if strategy == "accumulate":
        return _accumulate(parts, problem)
    if strategy == "data":
        return _by_data(parts, problem)
    for _ in range(len(parts.hosts)):
        try:
            return _by_tasks(parts, problem)
        except (errors.NodeLostError, errors.ObjectLostError):
            if not parts.move():
                raise
    return _by_tasks(parts, problem)


def _accumulate(parts: Parts, problem: Problem) -> Fitted:
    """Fits all models together, with one communication for each pass over the rows of all
    groups."""
    fits = problem.begin()
    while fits.active.any():
        fits.advance(parts.sum(sums, *fits.candidates()))
    return fits.coefficients, fits.iterations, fits.converged


def _by_data(parts: Parts, problem: Problem) -> Fitted:
    """Fits the models of one group after another, each on all hosts."""
    found = [
        _accumulate(parts, problem.of(problem.groups == group))
        for group in np.unique(problem.groups)
    ]
    return _joined(found, problem)


def _by_tasks(parts: Parts, problem: Problem) -> Fitted:
    """Sends each group's rows to one worker, which fits the group's models."""
    tasks = parts.tasks
    places = [host for host, workers in tasks.hosts().items() for _ in range(workers)]
    futures, orders = [], []
    for host, groups in zip(places, assign(parts, problem, len(places)), strict=True):
        if len(groups):
            pairs = zip(parts.hosts, parts.prepared, strict=True)
            rows = [tasks.submit(other, select, part, groups) for other, part in pairs]
            chosen = np.flatnonzero(np.isin(problem.groups, groups))
            own = dataclasses.replace(
                problem.of(chosen), groups=np.searchsorted(groups, problem.groups[chosen])
            )
            futures.append(tasks.submit(host, _fit_here, rows, own))
            orders.append(chosen)
    found = tasks.results(futures)
    order = np.argsort(np.concatenate(orders)) if orders else np.zeros(0, int)
    return tuple(one[order] for one in _joined(found, problem))


def _joined(found: list[Fitted], problem: Problem) -> Fitted:
    if not found:
        return np.zeros((0, problem.p)), np.zeros(0, int), np.zeros(0, bool)
    coefficients, iterations, converged = zip(*found, strict=True)
    return np.concatenate(coefficients), np.concatenate(iterations), np.concatenate(converged)


def _fit_here(rows: list[Any], problem: Problem) -> Fitted:
    """Fits the models of some groups in this worker, which has all rows of these groups."""
    part = merge(rows)
    fits = problem.begin()
    while fits.active.any():
        fits.advance(sums(part, *fits.candidates()))
    return fits.coefficients, fits.iterations, fits.converged


def assign(parts: Parts, problem: Problem, workers: int) -> list[Any]:
    """The groups for each worker, in ascending order. Groups are assigned in descending order of
    work, each to the worker with the least load."""
    models = np.bincount(problem.groups, minlength=len(parts.groups))
    work = parts.counts.sum(axis=1) * models
    loads, found = np.zeros(workers), [list[int]() for _ in range(workers)]
    for group in np.argsort(-work, kind="stable"):
        if models[group]:
            at = int(loads.argmin())
            loads[at] += work[group]
            found[at].append(int(group))
    return [np.array(sorted(groups), int) for groups in found]


# -- the cost model ------------------------------------------------------------------------------


def estimate(parts: Parts, problem: Problem) -> dict[str, float]:
    """The estimated time of each strategy, in seconds.

    Three times are measured: for one row and one model in a pass, for a communication without data,
    and for each byte sent. The number of passes is assumed."""
    row_s = _row_s(parts, problem)
    round_s, byte_s = _communication(parts)
    workers = sum(parts.tasks.hosts().values())
    models = np.bincount(problem.groups, minlength=len(parts.groups))
    rows = parts.counts.sum(axis=1)
    pass_s = float((rows * models).sum()) * row_s / workers
    sums_s = 8.0 * length_of_sums(problem.p) * len(problem.groups) * byte_s
    largest = max((float((rows * models)[groups].sum()) for groups in
                   assign(parts, problem, workers)), default=0.0)  # fmt: skip
    moved = 8.0 * (problem.p + 1) * float(rows[models > 0].sum()) * (workers - 1) / workers**2
    return {
        "accumulate": PASSES * (round_s + sums_s + pass_s),
        "data": PASSES * (round_s * int((models > 0).sum()) + sums_s + pass_s),
        "task": 2 * round_s + moved * byte_s + PASSES * largest * row_s,
    }


def _row_s(parts: Parts, problem: Problem) -> float:
    """The seconds of a pass for one row and one model, measured in this process with random
    numbers."""
    x = np.random.default_rng(0).normal(size=(PROBE_ROWS, problem.p))
    part = GroupedRows(x, (x[:, 0] > 0).astype(float), np.array([0, PROBE_ROWS]))
    sums(part, np.zeros(1, int), np.zeros((1, problem.p)))
    begun = time.perf_counter()
    sums(part, np.zeros(1, int), np.zeros((1, problem.p)))
    return (time.perf_counter() - begun) / PROBE_ROWS


def _communication(parts: Parts) -> tuple[float, float]:
    """The seconds of a communication between all hosts without data, and the seconds for each
    byte."""
    parts.sum(_zeros, 1)  # the first call also starts workers
    begun = time.perf_counter()
    parts.sum(_zeros, 1)
    small = time.perf_counter() - begun
    begun = time.perf_counter()
    parts.sum(_zeros, PROBE_BYTES // 8)
    return small, max(0.0, time.perf_counter() - begun - small) / PROBE_BYTES


def _zeros(part: Any, length: int) -> Any:
    return np.zeros(length)
