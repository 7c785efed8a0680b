"""Arrays that stand as objects beside a stream, and how a task reads those of its arguments there.

A stream names the object and describes the array; its reader fetches the object. Functions by value
get copies (`by_value`). `submit`, too, gives a task its own copy of each array that is passed by
value. Callers that promise read-only arguments (joblib's large arrays) save that copy, and the same
array in a hundred tasks is stored once. An array over a file travels as the name of its file,
because the workers of the same host can map that too.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hoplite_mp._common.reduction import dtype_name, named_dtype, raw_bytes
from hoplite_mp._serialize.reading import id_in_payload

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._common.reduction import Array
    from hoplite_mp._common.ref import ObjectRef
    from hoplite_mp._serialize.code import Reduced
    from hoplite_mp._serialize.layout import PickleStream


class Fetching:
    """Holds the function that fetches an array by its object's id; the client room sets it."""

    fetch: Callable[[bytes], Any]

    def __init__(self) -> None:
        self.fetch = _nowhere


def _nowhere(object_id: bytes) -> Any:
    raise LookupError("no cluster is open in this process")


fetching = Fetching()


class KeptArray(Protocol):
    """An object that holds the bytes of an array as it was at the call."""

    mark: bytes
    ref: ObjectRef[Any]


class ArrayKeeper(Protocol):
    """Keeps large arrays as objects."""

    def takes(self, array: Array) -> bool:
        """Whether the array is large enough."""

    def copy_of(self, array: Array) -> tuple[KeptArray, Any]:
        """The object that keeps the array."""


class SharedArray:
    """Stands in streams for an array that is the value of a global variable."""

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array


def described(array: Array) -> tuple[Any, ...]:
    """Everything about an array except its bytes."""
    dtype, flags = array.dtype, array.flags
    order = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
    cls = type(array)
    shown = dtype_name(dtype) or dtype, array.shape, order
    return shown if cls is np.ndarray else (*shown, cls)


def own_array(
    stored: Array, dtype: Any, shape: tuple[int, ...], order: Any, cls: type[Array] = np.ndarray
) -> Array:
    """A writable copy of the array, in memory of its own."""
    flat = np.frombuffer(raw_bytes(stored).raw(), np.uint8).copy()
    array: Array = np.ndarray.__new__(cls, shape, named_or_given(dtype), flat, 0, None, order)
    return array


def named_or_given(dtype: Any) -> np.dtype[Any]:
    return named_dtype(dtype) if isinstance(dtype, str) else dtype


# -- lent arrays ----------------------------------------------------------------------------------


class Lender:
    """An argument which means that the large arrays of all arguments after it are lent.

    It arrives as None. `keep` stores the arrays. `maps`: the readers are on this host, so that an
    array over a file can be mapped there again. `writable`: each task has a private copy after all.
    """

    __slots__ = ("keep", "maps", "writable")

    def __init__(self, keep: ArrayKeeper, maps: bool, writable: bool = False) -> None:
        self.keep = keep
        self.maps = maps
        self.writable = writable

    def beside(self, stream: PickleStream) -> Borrowed:
        """What lends the arrays of this stream."""
        return Borrowed(self, stream)


class Borrowed:
    """The arrays that are lent beside one stream."""

    __slots__ = ("_lender", "_stream")

    def __init__(self, lender: Lender, stream: PickleStream) -> None:
        self._lender = lender
        self._stream = stream

    def takes(self, array: Array) -> bool:
        """Large arrays; and small ones over a file, because a task may write its results there."""
        lender = self._lender
        return lender.keep.takes(array) or (lender.maps and _file_below(array) is not None)

    def reduce(self, array: Array) -> Reduced:
        lender = self._lender
        file = _file_below(array) if lender.maps else None
        if file is not None:
            return load_mapped, _place_in_file(array, file)
        kept, _ = lender.keep.copy_of(array)
        load = load_private_copy if lender.writable else load_lent
        return load, (self._stream.index_of(kept.ref), *described(array))


def _file_below(array: Array) -> np.memmap[Any, Any] | None:
    """The mapping of a file that this array is a contiguous part of. None for a private mapping,
    whose changes the file does not show."""
    flags = array.flags
    if not ((flags.c_contiguous or flags.f_contiguous) and array.nbytes):
        return None
    base: Any = array
    found: Any = None
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            found = base
        base = base.base
    if found is None or getattr(found, "mode", "c") == "c" or found.filename is None:
        return None
    return found  # type: ignore[no-any-return]


def _place_in_file(array: Array, file: np.memmap[Any, Any]) -> tuple[Any, ...]:
    start = array.__array_interface__["data"][0] - file.__array_interface__["data"][0]
    mode = "r" if file.mode == "r" or not array.flags.writeable else "r+"
    order = "C" if array.flags.c_contiguous else "F"
    path = os.path.abspath(str(file.filename))
    return path, array.dtype, mode, file.offset + start, array.shape, order


# -- reading -----------------------------------------------------------------------------------


def _stored(index: int) -> Array:
    object_id = id_in_payload(index)
    if object_id is None:
        raise LookupError("this stream names arrays of a task's arguments, and it came alone")
    stored: Array = fetching.fetch(object_id)
    return stored


def load_lent(
    index: int, dtype: Any, shape: tuple[int, ...], order: Any, cls: type[Array] = np.ndarray
) -> Array:
    """Named in streams: an array where it lies in the store, read-only."""
    return np.ndarray.__new__(cls, shape, named_or_given(dtype), _stored(index), 0, None, order)


def load_private_copy(index: int, *described: Any) -> Array:
    """Named in streams: the same, as a writable copy."""
    return own_array(_stored(index), *described)


def load_mapped(
    path: str, dtype: Any, mode: Any, offset: int, shape: tuple[int, ...], order: Any
) -> Array:
    """Named in streams: a part of a file, mapped again."""
    return np.memmap(path, dtype, mode, offset, shape, order)
