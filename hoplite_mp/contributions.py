"""What a rank gives to a Group's call, what it gets, and what kind of error a mistake is.

Why it exists: an array goes to the others as its bytes, everything else as the object that it is;
which of the two, what a reduction refuses, and what `out=` takes is the same on one host and on
several.
It must never know: boards, nodes, how a contribution is stored or sent.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _shm, serial

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "NOTHING",
    "PREFIXES",
    "REDUCTIONS",
    "ROOTED",
    "TARGETED",
    "contribution",
    "contributors_of",
    "into",
    "is_plain_array",
    "mask_of",
    "outs_of",
    "shortened",
]

Array = np.ndarray[Any, np.dtype[Any]]
REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
PREFIXES = ("scan", "exscan")  # rank r gets the reduction of ranks up to r, or below r
TARGETED = ("alltoall", "scatter")  # who gives, gives a value for each rank
ROOTED = ("broadcast", "reduce", "gather", "scatter")  # nothing without the root
NUMBERS = (bool, int, float, complex)
_EXACT_NUMBERS = frozenset(NUMBERS)


class Nothing:
    """The default of an argument for which None is a value like any other."""

    def __repr__(self) -> str:
        return "<nothing>"


NOTHING = Nothing()


def contribution(kind: str, x: Any, size: int, *, gives: bool) -> list[Any]:
    """The values that a rank gives: one, one for each rank, or none. `gives`: x counts (broadcast
    and scatter ignore it except at the root). ValueError, TypeError: it is none for this kind of
    call."""
    if kind == "barrier" or not gives:
        return []
    if x is NOTHING:
        raise ValueError(f"the root of a {kind} must give x")
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
    """The `out` of a call whose result is a list: an array for each rank, or nothing for each."""
    if out is None:
        return [None] * size
    outs = list(out) if isinstance(out, (list, tuple)) else []
    if len(outs) != size:
        raise ValueError(f"out of {kind} must be a list of {size} arrays, one for each rank")
    return outs


def reducible(kind: str, x: Any) -> Array:
    """An array, number or bool as a plain array. TypeError for everything else: a conversion would
    lose a mask or a unit, or make text of numbers, without a word."""
    cls = type(x)
    scalar = isinstance(x, np.generic) and x.dtype.type is cls
    if not (cls is np.ndarray or cls in _EXACT_NUMBERS or scalar):
        hint = "; np.asarray(x) makes a plain array of it" if _is_like_an_array(x) else ""
        raise TypeError(f"{kind} takes arrays, numbers and bools, not {type_name(x)}{hint}")
    array = np.asarray(x)
    if serial.dtype_name(array.dtype) is None or array.dtype.kind in "SU":
        what = "an int beyond 64 bits" if cls is int else f"{type_name(x)} of dtype {array.dtype}"
        raise TypeError(f"{kind} takes arrays, numbers and bools, not {what}")
    return array


def _is_like_an_array(x: Any) -> bool:
    return isinstance(x, (list, tuple)) or hasattr(x, "__array__")


def is_plain_array(x: Any) -> bool:
    """Can its bytes travel without pickle? Not those of a subclass, of records, of objects."""
    return type(x) is np.ndarray and serial.dtype_name(x.dtype) is not None


def into(value: Any, out: Array | None) -> Any:
    """A writable copy of an array, any other value as it is; or `out` filled."""
    if out is None:
        return np.array(value) if type(value) is np.ndarray else value
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy array, not {type_name(out)}")
    array = np.asarray(value) if isinstance(value, (*NUMBERS, np.generic)) else value
    if type(array) is not np.ndarray:
        raise TypeError(f"out takes an array or a number, the result is {type_name(value)}")
    if out.shape != array.shape or out.dtype != array.dtype:
        raise ValueError(
            f"out has shape {out.shape} and dtype {out.dtype}, the result {array.shape} and "
            f"{array.dtype}"
        )
    np.copyto(out, array)
    return out


def type_name(x: Any) -> str:
    """As an error names it."""
    cls = type(x)
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    return f"{module}{cls.__qualname__}"


def shortened(values: tuple[Any, ...], place: int) -> serial.Encoded:
    """Plain values with as much of the text at `place` as fits into an object's header."""
    text = values[place].encode(errors="replace")
    without = serial.encode((*values[:place], "", *values[place + 1 :])).nbytes
    fits = text[: max(0, _shm.INLINE_BYTES_MAX - without)].decode(errors="ignore")
    return serial.encode((*values[:place], fits, *values[place + 1 :]))


def mask_of(ranks: Iterable[int]) -> int:
    """Ranks as bits: that is what always finds room."""
    mask = 0
    for rank in ranks:
        mask |= 1 << operator.index(rank)
    return mask


def contributors_of(mask: int) -> tuple[int, ...]:
    """The ranks of a mask, sorted."""
    return tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)
