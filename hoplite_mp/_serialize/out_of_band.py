"""Large arrays beside the stream of a function.

A function by value is bytes, and 100 MB of a global array would be written into them each time.
Such arrays are objects of their own instead; the stream names them by their places in a list. The
value of a global variable is named by a *shared* value: it is fetched when it is written to its
namespace, and functions that name the same variable do not each bring their own. What is fetched is
copied, because globals are the worker's own and must not pin an object.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hoplite_mp._common.reduction import Array, dtype_name, named_dtype, raw_bytes
from hoplite_mp._serialize.reading import id_in_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

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


class Numbered(Protocol):
    """An array of this process."""

    number: int


UNBOUND: Any = object()  # stands for a global variable that has no value
# (id of a dictionary of globals, name) -> value, or UNBOUND; (id of a cell, "") -> its contents, or
# UNBOUND.
Snapshot = dict[tuple[int, str], Any]


class Keep(Protocol):
    """Keeps arrays as objects; there is one for each function that is being sent."""

    nbytes_min: int
    # The globals and closures of the function when its sender looked at them. These values are
    # sent, although other threads may have bound the variables meanwhile.
    snapshot: Snapshot

    def copy_of(self, array: Array) -> tuple[KeptArray, Numbered]:
        """The object that keeps the array; and a number that no other array of this process has."""

    def used_by(self, fn: Any) -> None:
        """Notes that this function carries what has been kept so far."""

    def part(self) -> GlobalArrays:
        """For the arrays of one global variable."""

    def bound(self, module: ModuleType, name: str, value: Any, part: GlobalArrays) -> None:
        """Notes that the variable has this value, with these arrays: their marks stay the same as
        long as it has."""

    def named(self, module: str, name: str, array: Array) -> None:
        """Notes of which global variable of this process the array is the value."""


class GlobalArrays(Protocol):
    """The arrays of one global variable, looked at for its fingerprint."""

    nbytes_min: int

    def copy_of(self, array: Array) -> tuple[KeptArray, Numbered]:
        """As Keep.copy_of."""


class OutOfBand:
    """The arrays that stand beside one stream that is being written."""

    __slots__ = ("index", "keep", "nbytes_min", "refs", "shared", "stream")

    def __init__(self, keep: Keep, stream: PickleStream | None = None) -> None:
        self.keep = keep
        self.nbytes_min = keep.nbytes_min
        self.refs: list[ObjectRef[Any]] = []
        self.index: dict[ObjectRef[Any], int] = {}
        self.stream = stream  # that of a payload, whose own list of refs is used then
        self.shared: dict[int, SharedArray] = {}

    def takes(self, array: Array) -> bool:
        """Does this array go beside the stream?"""
        return array.nbytes >= self.nbytes_min

    def reduce(self, array: Array) -> Reduced:
        kept, _ = self.keep.copy_of(array)
        return load_aside, (self._place(kept.ref), *described(array))

    def reduce_shared(self, marker: SharedArray) -> Reduced:
        array = marker.array
        kept, one = self.keep.copy_of(array)
        key = marker.sender, one.number, kept.mark
        return load_shared, (self._place(kept.ref), key, *described(array))

    def share(self, array: Array, sender: bytes) -> SharedArray:
        """Returns the object that the stream has in the place of the array. It is always the same
        one for the same array, so that pickle's memo finds it."""
        return self.shared.setdefault(id(array), SharedArray(array, sender))

    def _place(self, ref: ObjectRef[Any]) -> int:
        if self.stream is not None:
            return self.stream.index_of(ref)
        place = self.index.setdefault(ref, len(self.refs))
        if place == len(self.refs):
            self.refs.append(ref)
        return place


class Marks:
    """Takes the place of OutOfBand where only a fingerprint is taken."""

    __slots__ = ("keep", "nbytes_min")

    def __init__(self, keep: GlobalArrays) -> None:
        self.keep = keep
        self.nbytes_min = keep.nbytes_min

    def takes(self, array: Array) -> bool:
        return array.nbytes >= self.nbytes_min

    def reduce(self, array: Array) -> Reduced:
        return load_aside, (self.keep.copy_of(array)[0].mark, *described(array))


class SharedArray:
    """Stands in streams for an array that is the value of a global variable."""

    __slots__ = ("array", "sender")

    def __init__(self, array: Array, sender: bytes) -> None:
        self.array = array
        self.sender = sender


def described(array: Array) -> tuple[Any, ...]:
    """Everything about an array except its bytes."""
    dtype, flags = array.dtype, array.flags
    order = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
    cls = type(array)
    shown = dtype_name(dtype) or dtype, array.shape, order
    return shown if cls is np.ndarray else (*shown, cls)


# -- reading -----------------------------------------------------------------------------------


class Shared:
    """The value of a global variable of another process, fetched when it is first needed. All
    functions that bring it share one."""

    __slots__ = ("__weakref__", "_described", "_id", "array")

    def __init__(self, object_id: bytes, described: tuple[Any, ...]) -> None:
        self._id = object_id
        self._described = described
        self.array: Array | None = None

    def value(self) -> Array:
        if self.array is None:
            self.array = own_array(fetching.fetch(self._id), *self._described)
        return self.array


class ArrayFetch:
    """The objects beside the stream that this thread is reading, and how many bytes came from
    them."""

    def __init__(self, ids: Sequence[bytes]) -> None:
        self.ids = ids
        self.nbytes = 0


class _Local(threading.local):
    bringing: ArrayFetch | None = None


_local = _Local()
_shared: weakref.WeakValueDictionary[Any, Shared] = weakref.WeakValueDictionary()


class bringing:
    """`with bringing(ids) as what:` reads a stream that has these objects beside it."""

    def __init__(self, ids: Sequence[bytes]) -> None:
        self._what = ArrayFetch(ids)

    def __enter__(self) -> ArrayFetch:
        self._outer = _local.bringing
        _local.bringing = self._what
        return self._what

    def __exit__(self, *what: object) -> None:
        _local.bringing = self._outer


def _now() -> ArrayFetch:
    if _local.bringing is None:
        raise LookupError("this stream names arrays that travelled beside it, and it came alone")
    return _local.bringing


def load_aside(index: int, *described: Any) -> Array:
    """Named in streams: an array that stands beside it."""
    now = _now()
    array = own_array(fetching.fetch(now.ids[index]), *described)
    now.nbytes += array.nbytes
    return array


def load_shared(index: int, key: tuple[bytes, int, bytes], *described: Any) -> Shared:
    """Named in streams: an array that is the value of a global variable, beside the stream."""
    object_id = id_in_payload(index)  # None: what is being read is no payload
    now = _now() if object_id is None else None
    key = (*key[:2], key[2] + repr(described).encode())
    shared = _shared.get(key)
    if shared is None:
        if now is not None:
            dtype, shape = described[:2]
            object_id = now.ids[index]
            now.nbytes += named_or_given(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        assert object_id is not None
        shared = _shared.setdefault(key, Shared(object_id, described))
    return shared


def own_array(
    stored: Array, dtype: Any, shape: tuple[int, ...], order: Any, cls: type[Array] = np.ndarray
) -> Array:
    """A writable copy of the array, in memory of its own."""
    flat = np.frombuffer(raw_bytes(stored).raw(), np.uint8).copy()
    array: Array = np.ndarray.__new__(cls, shape, named_or_given(dtype), flat, 0, None, order)
    return array


def named_or_given(dtype: Any) -> np.dtype[Any]:
    return named_dtype(dtype) if isinstance(dtype, str) else dtype
