"""Robust reductions: operators that bound the effect of faulty inputs.

An input is faulty if its data or its computation is faulty: flipped bits, NaN, a bad shard, wrong
code. The process that folds a slice is trusted. Pass an operator as `op` to `allreduce` or `reduce`
of a Group or a Cluster, with float32 or float64 arrays.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _reduce
from hoplite_mp._common.slice_operators import Array, SliceOperator, slice_array
from hoplite_mp.errors import ReduceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hoplite_mp._common.slice_operators import Fold

__all__ = ["GeometricMedian", "Krum", "Median", "Score", "TrimmedMean"]

# Maximum number of inputs of an order statistic: the kernel's work area grows with their number.
INPUTS_MAX = 1024
CHUNK = 1 << 15  # number of elements whose float32 products are added up before a float64 sum


def _order_mean(slices: Sequence[Array], low: int, high: int) -> Array:
    """For each coordinate, the mean of the sorted values from low to high - 1. NaN sorts last."""
    result = np.empty(slices[0].shape, slices[0].dtype)
    addresses = [one.__array_interface__["data"][0] for one in slices]
    destination = result.__array_interface__["data"][0]
    _reduce.order_mean(result.dtype.name, addresses, destination, result.size, low, high)
    return result


def _dot(a: Array, b: Array) -> float:
    """The inner product. The products in each chunk are added up first, and then the chunks in
    float64."""
    return sum(float(a[at : at + CHUNK] @ b[at : at + CHUNK]) for at in range(0, len(a), CHUNK))


def _mean(slices: Sequence[Array], weights: Sequence[float]) -> Array:
    """The weighted mean. Inputs with weight 0 are not read. The sum of the weights is positive."""
    total = np.zeros(slices[0].shape, np.float64)
    for one, weight in zip(slices, weights, strict=True):
        if weight:
            total += weight * one.astype(np.float64)
    return (total / math.fsum(weights)).astype(slices[0].dtype)


def _check_order(name: str, inputs: int) -> None:
    if inputs > INPUTS_MAX:
        raise ValueError(f"{name} reduces at most {INPUTS_MAX} inputs, not {inputs}")


@dataclasses.dataclass(frozen=True)
class Median(SliceOperator):
    """The median of each coordinate (Yin et al., ICML 2018).

    If the number of inputs is even, this is the mean of the two middle values. NaN sorts after
    every number, so the result is not NaN if fewer than half of the inputs are NaN. All inputs are
    contributors.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> refs = [c.put(np.array([1.0, n])) for n in (2.0, 3.0, 1e9)]
    >>> c.get(c.reduce(refs, op=ml.Median()))
    array([1., 3.])
    """

    def check(self, inputs: int, shape: tuple[int, ...]) -> None:
        _check_order("Median", inputs)

    def fold(self, slices: Sequence[Array], begin: int) -> Fold:
        count = len(slices)
        yield from ()  # this operator needs no sums
        return _order_mean(slices, (count - 1) // 2, count // 2 + 1), tuple(range(count))


@dataclasses.dataclass(frozen=True)
class TrimmedMean(SliceOperator):
    """The mean of each coordinate without its f smallest and f largest values (Yin et al., 2018).

    NaN counts as the largest value. All inputs are contributors.

    Parameters
    ----------
    f : int
        The number of values that are left out on each side, at least 0. At least 2 f + 1 inputs
        are needed.

    Raises
    ------
    ValueError
        f is negative, or, from the reduction, there are fewer than 2 f + 1 inputs.
    """

    f: int

    def __post_init__(self) -> None:
        _check_f("TrimmedMean", self.f)

    def check(self, inputs: int, shape: tuple[int, ...]) -> None:
        _check_order("TrimmedMean", inputs)
        _need("TrimmedMean", self.f, 2 * self.f + 1, inputs)

    def fold(self, slices: Sequence[Array], begin: int) -> Fold:
        count = len(slices)
        yield from ()
        return _order_mean(slices, self.f, count - self.f), tuple(range(count))


@dataclasses.dataclass(frozen=True)
class Krum(SliceOperator):
    """The mean of the m inputs that are closest to their neighbours (Blanchard et al., NIPS 2017).

    The score of an input is the sum of its n - f - 2 smallest squared distances to other inputs.
    The m inputs with the smallest scores are accepted; among equal scores, the first. The accepted
    inputs are the contributors.

    Parameters
    ----------
    f : int
        The number of inputs that may be faulty. At least 2 f + 3 inputs are needed.
    m : int, optional
        The number of inputs that are accepted, from 1 to n - f - 2. Default: 1.

    Raises
    ------
    ValueError
        f is negative, m below 1, or, from the reduction, there are too few inputs.
    ReduceError
        From the reduction: fewer than m inputs have finite distances.
    """

    f: int
    m: int = 1

    def __post_init__(self) -> None:
        _check_f("Krum", self.f)
        if type(self.m) is not int or self.m < 1:
            raise ValueError(f"Krum: m={self.m!r} must be an integer of 1 or more")

    def check(self, inputs: int, shape: tuple[int, ...]) -> None:
        _need("Krum", self.f, max(2 * self.f + 3, self.m + self.f + 2), inputs)

    def fold(self, slices: Sequence[Array], begin: int) -> Fold:
        count = len(slices)
        partial = np.zeros((count, count))
        with np.errstate(all="ignore"):
            for i in range(count):
                for j in range(i):
                    difference = slices[i] - slices[j]
                    partial[i, j] = partial[j, i] = _dot(difference, difference)
        squared = yield partial
        accepted = self._accepted(np.where(np.isfinite(squared), squared, np.inf))
        if self.m == 1:
            return slices[accepted[0]].copy(), accepted
        return _mean([slices[i] for i in accepted], [1.0] * len(accepted)), accepted

    def _accepted(self, squared: Array) -> tuple[int, ...]:
        """The accepted inputs in their order, from the matrix of squared distances."""
        count = len(squared)
        others = squared[~np.eye(count, dtype=bool)].reshape(count, count - 1)
        scores = np.sort(others, axis=1)[:, : count - self.f - 2].sum(axis=1)
        best = np.argsort(scores, kind="stable")[: self.m]
        if not np.isfinite(scores[best]).all():
            raise ReduceError(
                f"Krum: {int(np.isfinite(scores).sum())} of {count} inputs have finite distances "
                f"to {count - self.f - 2} others, but m={self.m}"
            )
        return tuple(int(i) for i in np.sort(best))


@dataclasses.dataclass(frozen=True)
class GeometricMedian(SliceOperator):
    """The point with the smallest sum of distances to the inputs (Pillutla et al., RFA, 2022).

    Computed with Weiszfeld's iteration, which starts at the coordinate median; each iteration
    costs one small exchange. Inputs with NaN or infinite values get weight 0. All inputs are
    contributors.

    Parameters
    ----------
    iterations : int, optional
        The number of iterations, at least 1. Default: 8.

    Raises
    ------
    ValueError
        `iterations` is below 1.
    ReduceError
        From the reduction: no input is finite.
    """

    iterations: int = 8

    def __post_init__(self) -> None:
        if type(self.iterations) is not int or self.iterations < 1:
            raise ValueError(
                f"GeometricMedian: iterations={self.iterations!r} must be an integer of 1 or more"
            )

    def check(self, inputs: int, shape: tuple[int, ...]) -> None:
        _check_order("GeometricMedian", inputs)

    def fold(self, slices: Sequence[Array], begin: int) -> Fold:
        count = len(slices)
        # An input is finite if this sum is finite, because NaN and infinite values times 0 are
        # NaN.
        with np.errstate(all="ignore"):
            sums = yield np.array([float((one * 0).sum()) for one in slices])
        usable = np.flatnonzero(np.isfinite(sums))
        if not len(usable):
            raise ReduceError(f"GeometricMedian: none of {count} inputs is finite")
        chosen = [slices[int(i)] for i in usable]
        point = _order_mean(chosen, (len(chosen) - 1) // 2, len(chosen) // 2 + 1)
        for _ in range(self.iterations):
            with np.errstate(all="ignore"):
                differences = (one.astype(np.float64) - point for one in chosen)
                squared = yield np.array([_dot(one, one) for one in differences])
            distances = np.sqrt(squared)
            apart = distances > distances.max() * 1e-9
            if not apart.any():
                break  # all inputs are equal
            weights = [
                1 / float(d) if far else 0.0 for d, far in zip(distances, apart, strict=True)
            ]
            moved = _mean(chosen, weights)
            here = len(chosen) - int(apart.sum())
            if here:
                # The point coincides with inputs, which pull it back (Vardi and Zhang, PNAS 2000).
                pull = (moved.astype(np.float64) - point) * math.fsum(weights)
                (norm,) = yield np.array([_dot(pull, pull)])
                back = min(1.0, here / math.sqrt(norm)) if norm else 1.0
                moved = ((1 - back) * moved.astype(np.float64) + back * point).astype(moved.dtype)
            point = moved
        return point, tuple(range(count))


@dataclasses.dataclass(frozen=True)
class Score(SliceOperator):
    """The mean of the gradients that agree with a gradient on held-out samples (Zeno++, ICML 2020).

    A gradient g is scaled to the norm of v. The scaled gradient is accepted if
    ``lr <v, g> - rho |g|^2 + lr eps >= 0``. The accepted inputs are the contributors.

    Parameters
    ----------
    v : numpy.ndarray
        The gradient on held-out samples, which must be the same on all ranks. It has the shape and
        dtype of the inputs.
    lr : float
        The learning rate, positive.
    rho : float, optional
        The weight of the norm, at least 0. Default: 0.001.
    eps : float, optional
        The tolerated loss of progress. Default: 0.0.

    Raises
    ------
    ValueError
        `lr` or `rho` is not allowed. From the reduction: v differs between ranks, or its shape or
        dtype differs from that of the inputs.
    ReduceError
        From the reduction: no gradient is accepted.
    """

    v: Array = dataclasses.field(repr=False)
    lr: float
    rho: float = 1e-3
    eps: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "v", slice_array(self.v, "Score"))
        if not (self.lr > 0 and self.rho >= 0 and math.isfinite(self.lr + self.rho + self.eps)):
            raise ValueError(f"{self!r}: lr must be positive, rho 0 or more, and eps finite")

    def __hash__(self) -> int:
        return hash(self.text())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Score) and self.text() == other.text()

    def text(self) -> str:
        digest = hashlib.blake2b(self.v.tobytes(), digest_size=8).hexdigest()
        return f"{self!r} of v {self.v.dtype.name} {self.v.shape} with digest {digest}"

    def check(self, inputs: int, shape: tuple[int, ...]) -> None:
        if self.v.shape != shape:
            raise ValueError(f"Score: v has shape {self.v.shape}, but the inputs have {shape}")

    def fold(self, slices: Sequence[Array], begin: int) -> Fold:
        v = self.v.reshape(-1)[begin : begin + len(slices[0])].astype(slices[0].dtype, copy=False)
        with np.errstate(all="ignore"):
            partial = np.array([(_dot(v, one), _dot(one, one)) for one in slices])
            sums = yield partial.reshape(-1, 2)
            norm = math.sqrt(_dot(self.v.reshape(-1), self.v.reshape(-1)))
            scale = norm / np.sqrt(sums[:, 1])
            scores = self.lr * scale * sums[:, 0] - self.rho * norm**2 + self.lr * self.eps
        accepted = tuple(int(i) for i in np.flatnonzero(np.isfinite(scale) & (scores >= 0)))
        if not accepted:
            raise ReduceError(f"Score: none of {len(slices)} gradients is accepted by v")
        scaled = [slices[i] * slices[i].dtype.type(scale[i]) for i in accepted]
        return _mean(scaled, [1.0] * len(scaled)), accepted


def _check_f(name: str, f: Any) -> None:
    if type(f) is not int or f < 0:
        raise ValueError(f"{name}: f={f!r} must be an integer of 0 or more")


def _need(name: str, f: int, least: int, inputs: int) -> None:
    if inputs < least:
        raise ValueError(f"{name} with f={f} needs at least {least} inputs, not {inputs}")
