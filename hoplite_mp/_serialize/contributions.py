"""Rules for the contributions to Group calls and their results, and errors about both.

An array is sent to the other ranks as its bytes, any other value as a pickled object. This module
decides which values are sent as bytes, which values a reduction refuses, and which values `out=`
accepts. The same rules apply on one host and on several hosts.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _serialize, _shm
from hoplite_mp._common.ref import NotAnArray

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "LOST_SHARE",
    "NOTHING",
    "PREFIXES",
    "REDUCTIONS",
    "STEP_ROOT",
    "TARGETED",
    "contribution",
    "contributors_of",
    "into",
    "is_plain_array",
    "mask_of",
    "outs_of",
    "section_bounds",
    "shortened",
]

Array = np.ndarray[Any, np.dtype[Any]]
REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
PREFIXES = ("scan", "exscan")  # rank r gets the reduction of the ranks up to r, or below r
TARGETED = ("alltoall", "scatter")  # a contributing rank passes a value for each rank
# The end of the texts of errors about values that are not arrays.
BY_FUNCTION = "; op=callable, a function of two values, reduces any values"
# Part of the error of a rank whose part of a result was lost with the host that decided the call.
LOST_SHARE = "was lost before it sent this host's result"
# The root of an allgather or alltoall that is a step of a reduction by slices; otherwise it is 0.
STEP_ROOT = 1
NUMBERS = (bool, int, float, complex)
_EXACT_NUMBERS = frozenset(NUMBERS)
_NUMBERS = frozenset(np.dtype(c).num for c in "?bBhHiIlLqQefdFD")  # by `dtype.num`


class Nothing:
    """The default of an argument for which None is a regular value."""

    def __repr__(self) -> str:
        return "<nothing>"


NOTHING = Nothing()


def section_bounds(kind: str, size: int, nbytes: int) -> list[int]:
    """The offsets at which hosts may begin to read a rank's value in a large call, and `nbytes`.

    Each host that owns a stripe begins at the start of its stripe. The last host in an allreduce
    owns no stripe if the call has begun without it, or if its link is slow.
    """
    without_one = max(1, size - 1)
    counts = {"broadcast": {without_one}, "reduce": {without_one}, "allreduce": {size, without_one}}
    bounds = {0, nbytes}
    for owners in counts.get(kind, {size}):
        bounds.update(nbytes * i // owners for i in range(owners))
    return sorted(bounds)


def contribution(kind: str, x: Any, size: int, *, gives: bool) -> list[Any]:
    """The values that a rank contributes: one value, one value for each rank, or none. `gives`:
    whether x is used (broadcast and scatter ignore x except at the root). Raises ValueError or
    TypeError if x does not suit this kind of call."""
    if kind == "barrier" or not gives:
        return []
    if x is NOTHING:
        raise ValueError(f"the root of a {kind} must pass x")
    if kind in TARGETED:
        return _one_for_each(kind, x, size)
    return [reducible(kind, x) if kind in REDUCTIONS or kind in PREFIXES else x]


def _one_for_each(kind: str, x: Any, size: int) -> list[Any]:
    try:
        parts = list(x)
    except TypeError:
        raise TypeError(f"{kind} needs a list of {size} parts, not {type_name(x)}") from None
    if len(parts) != size:
        raise ValueError(f"{kind} needs {size} parts, one for each rank: {len(parts)}")
    return parts


def outs_of(kind: str, out: Any, size: int) -> list[Any]:
    """The `out` of a call whose result is a list, as a list with an array or None for each
    rank."""
    if out is None:
        return [None] * size
    outs = list(out) if isinstance(out, (list, tuple)) else []
    if len(outs) != size:
        raise ValueError(f"out of {kind} must be a list of {size} arrays, one for each rank")
    return outs


def reducible(kind: str, x: Any) -> Array:
    """An array, number or bool as a plain array. Raises TypeError for everything else, because a
    conversion would silently lose a mask or a unit, or turn numbers into text."""
    cls = type(x)
    if cls is np.ndarray and x.dtype.num in _NUMBERS and x.dtype.metadata is None:
        return x  # type: ignore[no-any-return]  # the usual case, without further checks
    scalar = isinstance(x, np.generic) and x.dtype.type is cls
    if not (cls is np.ndarray or cls in _EXACT_NUMBERS or scalar):
        hint = BY_FUNCTION
        if isinstance(x, NotAnArray):
            hint = f": use {x.HOW}"
        elif _is_like_an_array(x):
            hint = f"; np.asarray(x) makes a plain array of it{BY_FUNCTION}"
        raise TypeError(f"{kind} takes arrays, numbers and bools, not {type_name(x)}{hint}")
    array = np.asarray(x)
    if _serialize.dtype_name(array.dtype) is None or array.dtype.kind in "SU":
        what = "an int beyond 64 bits" if cls is int else f"{type_name(x)} of dtype {array.dtype}"
        raise TypeError(f"{kind} takes arrays, numbers and bools, not {what}{BY_FUNCTION}")
    return array


def _is_like_an_array(x: Any) -> bool:
    return isinstance(x, (list, tuple)) or hasattr(x, "__array__")


def is_plain_array(x: Any) -> bool:
    """Whether the value is an array whose bytes can be sent without pickle: no subclass, no
    records, no objects."""
    return type(x) is np.ndarray and _serialize.dtype_name(x.dtype) is not None


def into(value: Any, out: Array | None) -> Any:
    """Returns the result of a call: `out`, filled with the value, if it is given; otherwise a
    writable copy of an array, and any other value unchanged."""
    if out is None:
        return np.array(value) if type(value) is np.ndarray else value
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy array, not {type_name(out)}")
    array = np.asarray(value) if isinstance(value, (*NUMBERS, np.generic)) else value
    if type(array) is not np.ndarray:
        raise TypeError(f"out takes an array or a number, but the result is {type_name(value)}")
    if out.shape != array.shape or out.dtype != array.dtype:
        raise ValueError(
            f"out has shape {out.shape} and dtype {out.dtype}, but the result has shape "
            f"{array.shape} and dtype {array.dtype}"
        )
    if out is not array and not _is_same_memory(out, array):
        if not out.flags.writeable:
            raise ValueError("out is read-only: it must be an array that may be written")
        np.copyto(out, array)
    return out


def _is_same_memory(a: Array, b: Array) -> bool:
    """Whether these are two views of the same elements, in the same order."""
    one, other = a.__array_interface__["data"][0], b.__array_interface__["data"][0]
    return bool(one == other) and a.strides == b.strides


def type_name(x: Any) -> str:
    """The type of a value for error messages."""
    cls = type(x)
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    return f"{module}{cls.__qualname__}"


def shortened(values: tuple[Any, ...], place: int) -> _serialize.Encoded:
    """Encodes plain values, with the text at `place` cut so that they fit into an object's
    header."""
    text = values[place].encode(errors="replace")
    without = _serialize.encode((*values[:place], "", *values[place + 1 :])).nbytes
    fits = text[: max(0, _shm.INLINE_BYTES_MAX - without)].decode(errors="ignore")
    return _serialize.encode((*values[:place], fits, *values[place + 1 :]))


def mask_of(ranks: Iterable[int]) -> int:
    """Ranks as bits of one integer, which fits into every message, unlike a list."""
    mask = 0
    for rank in ranks:
        mask |= 1 << operator.index(rank)
    return mask


def contributors_of(mask: int) -> tuple[int, ...]:
    """The ranks of a mask, sorted."""
    return tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)
