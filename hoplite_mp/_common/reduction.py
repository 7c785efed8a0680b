"""Reduces arrays on one host: by a compiled kernel if there is one, otherwise by numpy's function.

The node (collectives on refs) and the leader of a Group's call make the same reductions, and must
get the same bits. The result is defined as that of functools.reduce(np.add, arrays) with the dtype
kept, except that float16 and bfloat16 are folded as float32 and rounded once; "mean" is the sum
divided by the count, float64 for integers.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _reduce
from hoplite_mp._common.dtypes import dtype_name, named_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["fold", "has_kernel", "kernel_dtype", "prefix", "reduce_arrays", "result_dtype"]

Array = np.ndarray[Any, np.dtype[Any]]
_FUNCTIONS = {
    "sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum", "mean": "add",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
}  # fmt: skip


@functools.cache
def kernel_dtype(name: str) -> str | None:
    """The kernel's name for a payload's dtype; None if only numpy knows it."""
    if name == "bfloat16":
        return name
    try:
        dtype = np.dtype(name)
    except TypeError:
        return None
    return dtype.name if dtype.isnative and dtype.kind in "biufc" else None


def has_kernel(op: str, name: str) -> str | None:
    """The kernel's dtype name if there is a kernel for that operation, otherwise None."""
    kernel = kernel_dtype(name)
    return kernel if kernel is not None and _reduce.supported(op, kernel) else None


@np.errstate(all="ignore")  # the kernels do not warn of overflows either
def fold(op: str, arrays: Sequence[Array]) -> Array:
    """Left fold with numpy; TypeError where numpy has no such operation."""
    dtype = arrays[0].dtype
    wide: np.dtype[Any] | None = None  # half precision is rounded once, at the end
    if op == "mean" and dtype.kind in "biu":
        wide = dtype = np.dtype(np.float64)
    elif dtype.newbyteorder("=") == np.float16 or dtype.name == "bfloat16":
        wide = np.dtype(np.float32)
    if wide is not None:
        arrays = [array.astype(wide) for array in arrays]
    total = np.asarray(functools.reduce(getattr(np, _FUNCTIONS.get(op, op)), arrays))
    if op == "mean":
        total = np.asarray(total / len(arrays))
    if op == "mean" or (wide is not None and total.dtype == wide):
        total = total.astype(dtype.newbyteorder("="))
    return total


@functools.cache
def result_dtype(op: str, name: str) -> str:
    """The payload name of the result's dtype; TypeError if numpy has no such operation."""
    kernel = has_kernel(op, name)
    if kernel is not None:
        other = _reduce.result_dtype(op, kernel)
        return name if other == kernel else np.dtype(other).str
    one = named_dtype(name)
    if one.kind in "SU":
        raise TypeError("text is joined, not reduced")
    found = dtype_name(fold(op, [np.zeros(1, one), np.zeros(1, one)]).dtype)
    if found is None:
        raise TypeError(f"the result of {op!r} on {name} has no plain dtype")
    return found


def reduce_arrays(op: str, arrays: Sequence[Array], out: Array, threads: int) -> None:
    """Fills `out` with the reduction of arrays of one shape and dtype, all C-contiguous."""
    name = dtype_name(arrays[0].dtype)
    kernel = None if name is None else has_kernel(op, name)
    if kernel is None:
        out[...] = fold(op, arrays)
        return
    sources = [array.__array_interface__["data"][0] for array in arrays]
    destination = out.__array_interface__["data"][0]
    _reduce.reduce_addresses(op, kernel, sources, destination, arrays[0].size, threads)


def prefix(op: str, arrays: Sequence[Array], threads: int) -> Array:
    """A new array: the reduction, from left to right, of arrays of one shape and dtype."""
    name = dtype_name(arrays[0].dtype)
    assert name is not None, "others are refused where they are given"
    total = np.empty(arrays[0].shape, named_dtype(result_dtype(op, name)))
    reduce_arrays(op, [np.ascontiguousarray(array) for array in arrays], total, threads)
    return total
