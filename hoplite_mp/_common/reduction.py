"""Reductions of arrays on one host: operators, dtypes, and the kernel or NumPy function used.

Group calls and collectives on refs use the same reductions, so their results are identical bit for
bit. The result is the same as that of functools.reduce(np.add, arrays) in the arrays' dtype, except
that float16 and bfloat16 are folded as float32 and rounded once. "mean" is the sum divided by the
count, in float64 for integers.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _reduce
from hoplite_mp._common.slice_operators import SliceOperator
from hoplite_mp._reduce import DTYPES, OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "DTYPES",
    "OPS",
    "fold",
    "function_name",
    "has_kernel",
    "is_function",
    "kernel_dtype",
    "operation_name",
    "prefix",
    "reduce_arrays",
    "result_dtype",
]

# Names of dtypes in messages, which the node reads without pickle, and the plain bytes of arrays.


Array = np.ndarray[Any, np.dtype[Any]]

CACHE_ENTRIES_MAX = 4096
NAME_CHARS_MAX = 64  # maximum length of a wrong name in an error message

# Matches all names that `dtype_name` returns for NumPy's dtypes. np.dtype accepts many more
# strings, and evaluates parts of some.
_NUMPY_NAME = re.compile(
    r"[<>|](?:[biufcSU][1-9][0-9]{0,9}|[mM]8(?:\[[0-9]{0,10}(?:[YMWDhms]|[munpfa]s)\])?)"
)

_dtype_names: dict[np.dtype[Any], str | None] = {}


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """The name from which `named_dtype` restores `dtype`; None if only pickle can describe the
    dtype."""
    if dtype.metadata is not None:  # it compares equal to the dtype without metadata
        return None
    try:
        return _dtype_names[dtype]
    except KeyError:
        pass
    name: str | None = None
    if dtype.type.__module__ == "ml_dtypes":
        name = dtype.name
    elif dtype.kind in "biufcmMSU" and dtype.itemsize and dtype.isbuiltin != 2:
        name = dtype.str
    if len(_dtype_names) >= CACHE_ENTRIES_MAX:
        _dtype_names.clear()
    _dtype_names[dtype] = name
    return name


@functools.lru_cache(CACHE_ENTRIES_MAX)
def named_dtype(name: str) -> np.dtype[Any]:
    """The dtype with this name, which may have been sent by another host. Raises ValueError for a
    name that `dtype_name` never returns, and ImportError if ml_dtypes is needed but not
    installed."""
    try:
        if _NUMPY_NAME.fullmatch(name):
            dtype: np.dtype[Any] | None = np.dtype(name)
        else:
            import ml_dtypes  # may not be installed

            dtype = np.dtype(getattr(ml_dtypes, name))
    except (TypeError, AttributeError):
        dtype = None
    if dtype is None or dtype_name(dtype) != name:
        raise ValueError(f"{name[:NAME_CHARS_MAX]!r} is not the name of a dtype")
    return dtype


def raw_bytes(array: Array) -> pickle.PickleBuffer:
    """A contiguous array's memory as a buffer, for any dtype and subclass."""
    if type(array) is not np.ndarray:
        array = np.ndarray.view(array, np.ndarray)
    dtype = array.dtype
    if dtype.kind not in "biufcSU" or dtype.isbuiltin == 2:
        # The buffer protocol has no format for dates, records and foreign dtypes, so their bytes
        # are declared as void.
        array = array.view(np.dtype((np.void, dtype.itemsize)))
    buffer: Any = array  # NumPy's stubs declare the buffer protocol only for Python 3.12 and later
    return pickle.PickleBuffer(buffer)


# Operators of reductions: the names, NumPy ufuncs and functions that are allowed as `op`.


FUNCTION_NAME_CHARS_MAX = 200  # the name and the kind of call must fit into OP_CHARS_MAX
_KERNELS = {
    "add": "sum", "multiply": "prod", "minimum": "min", "maximum": "max",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
}  # fmt: skip
# These ufuncs are associative and commutative, up to rounding.
_UFUNCS = frozenset(
    {
        "fmax", "fmin", "gcd", "lcm", "hypot", "logaddexp", "logaddexp2", "logical_and",
        "logical_or", "logical_xor",
    }
)  # fmt: skip


def operation_name(op: str | Callable[..., Any]) -> str:
    """The name of a reduction's operator. Raises ValueError if the operator is unknown or
    unsuitable."""
    if isinstance(op, str):
        if op not in OPS:
            raise ValueError(f"unknown op {op!r}: use one of {', '.join(OPS)}, or a numpy ufunc")
        return op
    if isinstance(op, np.ufunc):
        name = op.__name__
        if getattr(np, name, None) is op:
            if name in _KERNELS:
                return _KERNELS[name]
            if name in _UFUNCS:
                return name
        raise ValueError(
            f"{op!r} cannot reduce: use an associative and commutative binary numpy ufunc"
        )
    if _is_operator_class(op):
        raise ValueError(f"op=ml.{op.__name__} is a class: write op={_instance(op)}")
    if callable(op):
        raise ValueError(f"op={op!r}: this call takes a name or a numpy ufunc, not a function")
    raise ValueError(f"op must be a name, a numpy ufunc or a function of two values, not {op!r}")


def is_function(op: Any) -> bool:
    """Whether this operator is a user's function, which can fold any values."""
    return callable(op) and not isinstance(op, np.ufunc) and not _is_operator_class(op)


def _is_operator_class(op: Any) -> bool:
    """Whether `op` is a class of robust operators, where an instance is needed."""
    return isinstance(op, type) and issubclass(op, SliceOperator)


def _instance(op: Any) -> str:
    """The expression that creates an instance of a class of robust operators."""
    needed = [one.name for one in dataclasses.fields(op) if one.default is dataclasses.MISSING]
    return f"ml.{op.__name__}({', '.join(needed)})"


def function_name(op: Callable[..., Any]) -> str:
    """The module and qualified name of a user's function. The ranks compare these names."""
    named = op if hasattr(op, "__qualname__") else type(op)
    name = f"{getattr(named, '__module__', None) or 'builtins'}.{named.__qualname__}"
    return name[-FUNCTION_NAME_CHARS_MAX:]


_FUNCTIONS = {
    "sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum", "mean": "add",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
}  # fmt: skip


@functools.cache
def kernel_dtype(name: str) -> str | None:
    """The kernels' name for a dtype; None if they do not support it."""
    if name == "bfloat16":
        return name
    try:
        dtype = np.dtype(name)
    except TypeError:
        return None
    return dtype.name if dtype.isnative and dtype.kind in "biufc" else None


def has_kernel(op: str, name: str) -> str | None:
    """The kernels' name for the dtype; None if no kernel implements the operation."""
    kernel = kernel_dtype(name)
    return kernel if kernel is not None and _reduce.supported(op, kernel) else None


@np.errstate(all="ignore")  # like the kernels
def fold(op: str, arrays: Sequence[Array]) -> Array:
    """A left fold with NumPy. Raises TypeError if NumPy does not support the operation."""
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
    """The name of the result's dtype. Raises TypeError if NumPy does not support the operation."""
    kernel = has_kernel(op, name)
    if kernel is not None:
        other = _reduce.result_dtype(op, kernel)
        return name if other == kernel else np.dtype(other).str
    dtype = named_dtype(name)
    if dtype.kind in "SU":
        raise TypeError("strings cannot be reduced")
    found = dtype_name(fold(op, [np.zeros(1, dtype), np.zeros(1, dtype)]).dtype)
    if found is None:
        raise TypeError(f"the dtype of the result of {op!r} on {name} is not supported")
    return found


def reduce_arrays(op: str, arrays: Sequence[Array], out: Array, threads: int) -> None:
    """Fills `out` with the reduction of C-contiguous arrays with the same shape and dtype."""
    name = dtype_name(arrays[0].dtype)
    kernel = None if name is None else has_kernel(op, name)
    if kernel is None:
        out[...] = fold(op, arrays)
        return
    sources = [array.__array_interface__["data"][0] for array in arrays]
    destination = out.__array_interface__["data"][0]
    _reduce.reduce_addresses(op, kernel, sources, destination, arrays[0].size, threads)


def prefix(op: str, arrays: Sequence[Array], threads: int) -> Array:
    """A new array with the reduction, from left to right, of arrays with the same shape and
    dtype."""
    name = dtype_name(arrays[0].dtype)
    assert name is not None, "callers refuse arrays of other dtypes"
    total = np.empty(arrays[0].shape, named_dtype(result_dtype(op, name)))
    reduce_arrays(op, [np.ascontiguousarray(array) for array in arrays], total, threads)
    return total
