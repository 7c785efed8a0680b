"""Reduction operators, such as medians, that need the same slice of all inputs in one process.

Each slice has an owner, which receives this slice of all inputs. If the owner needs sums over all
slices, for example for the distance between two inputs, `fold` requests them with `yield`.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hoplite_mp import _reduce
from hoplite_mp.errors import ReduceError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

__all__ = ["Array", "Fold", "SliceOperator", "fold_whole", "is_finite", "slice_array"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
# Yields statistics for this slice (float64), receives their sums over all slices, and returns the
# reduced slice and the indices of the accepted inputs.
Fold: TypeAlias = "Generator[Array, Array, tuple[Array, tuple[int, ...]]]"
DTYPES = "float32", "float64"


class SliceOperator(abc.ABC):
    """The base class of the operators. Subclasses are frozen dataclasses, and must be equal on all
    ranks."""

    @abc.abstractmethod
    def check(self, inputs: int, shape: tuple[int, ...]) -> None:
        """Raises ValueError if the operator cannot reduce this number of inputs with this shape."""

    @abc.abstractmethod
    def fold(self, slices: Sequence[Array], begin: int) -> Fold:
        """Reduces flat slices of all inputs, in order. begin: the index of the slices' first
        element in the flat input."""

    def text(self) -> str:
        """The operator and its arguments as text, which must be equal on all ranks."""
        return repr(self)


def slice_array(x: Any, name: str) -> Array:
    """The input as a contiguous array. Raises TypeError if the input is not an array of float32 or
    float64."""
    array = np.asarray(x)
    if array.dtype.name not in DTYPES or not array.dtype.isnative:
        raise TypeError(f"{name} reduces arrays of float32 or float64, not of {array.dtype.name}")
    return np.ascontiguousarray(array).reshape(array.shape)


def is_finite(array: Array) -> bool:
    """Whether no element is NaN or infinite."""
    if array.dtype.kind not in "fcV":
        return True
    if array.dtype.name in DTYPES and array.dtype.isnative and array.flags.c_contiguous:
        address = array.__array_interface__["data"][0]
        return _reduce.all_finite(array.dtype.name, address, array.size)
    return bool(np.isfinite(array).all())


def fold_whole(op: SliceOperator, arrays: Sequence[Any]) -> tuple[Array, tuple[int, ...]]:
    """The reduction of whole arrays, and the indices of the accepted arrays. Raises ValueError if
    shapes or dtypes differ, or `op` cannot reduce this number of inputs."""
    inputs = [slice_array(array, type(op).__name__) for array in arrays]
    first = inputs[0]
    for number, other in enumerate(inputs):
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise ValueError(
                f"input 0 is {first.dtype.name} {first.shape}, input {number} is "
                f"{other.dtype.name} {other.shape}"
            )
    op.check(len(inputs), first.shape)
    fold = op.fold([array.reshape(-1) for array in inputs], 0)
    try:
        total = next(fold)
        while True:
            total = fold.send(total)
    except StopIteration as end:
        result, accepted = end.value
    return result.reshape(first.shape), accepted


def no_finite_input(inputs: int) -> ReduceError:
    return ReduceError(f"all {inputs} inputs have NaN or infinite values")
