"""Out-of-band arrays: objects beside a stream, for captured arrays and for a task's arguments.

A stream names the object and describes the array, and the reader fetches the object. Functions by
value get copies (`by_value`). `submit`, too, gives a task its own copy of each array that is passed
by value. joblib's large arrays are read-only arguments: they need no such copy, and the same array
in a hundred tasks is stored once. An array over a file is sent as the name of the file, because the
workers of the same host can map this file, too.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hoplite_mp._common.reduction import dtype_name, named_dtype, raw_bytes
from hoplite_mp._serialize.reading import now

if TYPE_CHECKING:
    import types
    from collections.abc import Callable

    from hoplite_mp._common.reduction import Array
    from hoplite_mp._common.ref import ObjectRef
    from hoplite_mp._serialize.code import Reduced
    from hoplite_mp._serialize.layout import PickleStream


class Fetching:
    """Holds the function that fetches an array by its object's id. The client sets the function."""

    fetch: Callable[[bytes], Any]

    def __init__(self) -> None:
        self.fetch = _nowhere


def _nowhere(object_id: bytes) -> Any:
    raise LookupError("no cluster is open in this process")


fetching = Fetching()


class KeptArray(Protocol):
    """An object with the bytes of an array at the time of the call."""

    mark: bytes
    ref: ObjectRef[Any]


class ArrayKeeper(Protocol):
    """Stores large arrays as objects."""

    def takes(self, array: Array) -> bool:
        """Whether the array is large enough to be stored as an object."""

    def copy_of(self, array: Array) -> tuple[KeptArray, Any]:
        """The object that contains the array."""


def described(array: Array) -> tuple[Any, ...]:
    """The description of an array: all its data except the bytes."""
    dtype, flags = array.dtype, array.flags
    order = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
    cls = type(array)
    shown = dtype_name(dtype) or dtype, array.shape, order
    return shown if cls is np.ndarray else (*shown, cls)


def own_array(
    stored: Array, dtype: Any, shape: tuple[int, ...], order: Any, cls: type[Array] = np.ndarray
) -> Array:
    """A writable copy of the array, in private memory."""
    flat = np.frombuffer(raw_bytes(stored).raw(), np.uint8).copy()
    array: Array = np.ndarray.__new__(cls, shape, named_or_given(dtype), flat, 0, None, order)
    return array


class ArrayStore(Protocol):
    """Stores the large arrays of functions by value as objects, each value once."""

    nbytes_min: int

    def copy_of(self, array: Array) -> tuple[KeptArray, Any]:
        """The object that contains the array, and the array's state, which keeps the object
        up to date as long as it is held."""

    def hold(self, fn: Any, known: list[Any]) -> None:
        """Holds the states of arrays as long as that function lives."""

    def bound(self, module: types.ModuleType, name: str, value: Any, known: list[Any]) -> None:
        """Holds the states of a variable's arrays as long as the variable has this value, so that
        the arrays keep their marks."""

    def warn(self, module: str, name: str, array: Array) -> None:
        """Warns that the value of a global variable is a large array."""


class GlobalArray:
    """An array as the value of a global variable in a stream.

    A reader fetches the array only if it writes the variable, and copies it, because globals belong
    to the worker and must not pin an object. All variables of a stream with this array share one
    copy.
    """

    __slots__ = ("_described", "_id", "array")

    def __init__(
        self, array: Array | None, object_id: bytes = b"", described: tuple[Any, ...] = ()
    ) -> None:
        self.array = array  # None: not fetched yet
        self._id = object_id
        self._described = described

    def value(self) -> Array:
        """The array."""
        if self.array is None:
            self.array = own_array(fetching.fetch(self._id), *self._described)
        return self.array


def named_or_given(dtype: Any) -> np.dtype[Any]:
    return named_dtype(dtype) if isinstance(dtype, str) else dtype


# -- lent arrays ----------------------------------------------------------------------------------


class Lender:
    """A special argument: the large arrays of all later arguments are lent.

    The task receives None in its place. `keep` stores the arrays. `maps`: the readers are on this
    host, so they can map the file of an array again. `writable`: each task gets a private copy
    nevertheless.
    """

    __slots__ = ("keep", "maps", "writable")

    def __init__(self, keep: ArrayKeeper, maps: bool, writable: bool = False) -> None:
        self.keep = keep
        self.maps = maps
        self.writable = writable

    def beside(self, stream: PickleStream) -> Borrowed:
        """The Borrowed of this stream, which lends its arrays."""
        return Borrowed(self, stream)


class Borrowed:
    """The arrays of one stream that are lent."""

    __slots__ = ("_lender", "_stream")

    def __init__(self, lender: Lender, stream: PickleStream) -> None:
        self._lender = lender
        self._stream = stream

    def takes(self, array: Array) -> bool:
        """Whether the array is lent: a large array, or any array over a file, because a task may
        write its results there."""
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
    """The mapping of a file of which this array is a contiguous part. None for a private mapping,
    because its changes do not reach the file."""
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
    reading = now()
    stored: Array = fetching.fetch(reading.ids[index])
    reading.nbytes += stored.nbytes
    return stored


def load_lent(
    index: int, dtype: Any, shape: tuple[int, ...], order: Any, cls: type[Array] = np.ndarray
) -> Array:
    """Used in streams: a lent array, as a read-only view of the store."""
    return np.ndarray.__new__(cls, shape, named_or_given(dtype), _stored(index), 0, None, order)


def load_private_copy(index: int, *described: Any) -> Array:
    """Used in streams: an array of a function by value, or a lent array, as a writable copy."""
    return own_array(_stored(index), *described)


def load_global_array(index: int, nbytes: int, *described: Any) -> GlobalArray:
    """Used in streams: an array that is the value of a global variable."""
    reading = now()
    reading.nbytes += nbytes
    return GlobalArray(None, reading.ids[index], described)


def load_mapped(
    path: str, dtype: Any, mode: Any, offset: int, shape: tuple[int, ...], order: Any
) -> Array:
    """Used in streams: a part of a file, mapped again."""
    return np.memmap(path, dtype, mode, offset, shape, order)
