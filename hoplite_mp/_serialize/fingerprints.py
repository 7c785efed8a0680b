"""Fingerprints show whether a value has changed since its sender last sent it.

A value that tasks have given to a global variable stays until the sender changes the variable. So a
sender sends each value with a fingerprint that differs from the fingerprints of its earlier states.
The fingerprint of a small immutable value is its pickle; of any other value, a digest of its
pickle. This pickle contains a function by value as a number that identifies the function, with its
captured values except globals, because globals have separate fingerprints. Only fingerprints of the
same process can be compared.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import types
import weakref
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._serialize.classes import cloudpickled
from hoplite_mp._serialize.code import Reduced, cell_contents, importable
from hoplite_mp._serialize.out_of_band import described
from hoplite_mp._serialize.reducers import is_bytes_alone, reducer_override, ref_types

if TYPE_CHECKING:
    from hoplite_mp._serialize.layout import PickleStream
    from hoplite_mp._serialize.out_of_band import ArrayKeeper

DIGEST_BYTES = 16
PLAIN_BYTES_MAX = 32  # A pickle up to this length is used as the fingerprint itself.
PLAIN_ITEMS_MAX = 64  # Longer containers are pickled, because a check of each item costs more.
_CONTAINERS = frozenset({list, tuple, dict, set, frozenset})
ATOMS = frozenset({int, float, complex, bool, type(None), str, bytes})

_numbers = itertools.count()
# The numbers of each function, by the id of its code. A function with a new code gets a new number.
_functions: weakref.WeakKeyDictionary[types.FunctionType, dict[int, tuple[int, types.CodeType]]] = (
    weakref.WeakKeyDictionary()
)


class TooLarge(Exception):
    """Internal: the pickle is longer than the caller allows for a fingerprint."""


class _Sink:
    """The pickler's file, which computes the digest and keeps no bytes."""

    __slots__ = ("hash", "left")

    def __init__(self, nbytes_max: int | None) -> None:
        self.hash = blake2b(digest_size=DIGEST_BYTES)
        self.left = nbytes_max

    def write(self, data: Any) -> None:
        if self.left is not None:
            self.left -= len(data)
            if self.left < 0:
                raise TooLarge
        self.hash.update(data)

    def take(self, buffer: pickle.PickleBuffer) -> None:
        self.write(buffer.raw())


def digest(data: bytes) -> bytes:
    """A digest of `data`, of 16 bytes."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def fingerprint(
    value: Any, nbytes_max: int | None = None, keeper: ArrayKeeper | None = None
) -> tuple[bytes, bool]:
    """The fingerprint, never empty, and whether the value holds refs. A large array that is stored
    as an object is represented by the object's mark, so the bytes of an unchanged array are not
    read.

    Raises the errors of pickling, or TooLarge for pickles of more than `nbytes_max` bytes.
    """
    if type(value) in ATOMS:
        plain = pickle.dumps(value, 5)
        return (plain if len(plain) <= PLAIN_BYTES_MAX else digest(plain)), False
    if type(value) in _CONTAINERS and len(value) <= PLAIN_ITEMS_MAX:
        items = (*value, *value.values()) if type(value) is dict else value
        if ATOMS.issuperset(map(type, items)):
            return digest(pickle.dumps(value, 5)), False
    if type(value) is types.FunctionType and not (any(_carried(value)) or importable(value)):
        return b"function %d" % _number(value), False
    sink = _Sink(nbytes_max)
    pickler: Any = _fingerprinter()(sink, 5, buffer_callback=sink.take)
    pickler.keeper = keeper
    pickler.dump(value)
    return sink.hash.digest(), pickler.holds_refs


@functools.cache
def _fingerprinter() -> type[pickle.Pickler]:
    import cloudpickle

    class Fingerprinter(cloudpickle.Pickler):  # type: ignore[misc,unused-ignore]
        by_value = True
        stream: PickleStream | None = None
        stop_at_refs = False
        holds_refs = False
        scan = None
        out_of_band = None
        keeper: ArrayKeeper | None = None

        def reducer_override(self, obj: Any) -> Reduced:
            if isinstance(obj, ref_types()):
                self.holds_refs = True
            keeper = self.keeper
            if keeper and isinstance(obj, np.ndarray) and keeper.takes(obj) and is_bytes_alone(obj):
                return _stand_in, (keeper.copy_of(obj)[0].mark, *described(obj))
            return reducer_override(self, obj)

        def reduce_by_value(self, obj: Any) -> Reduced:
            if isinstance(obj, types.FunctionType):
                return _stand_in, (_number(obj),), _carried(obj)
            return cloudpickled(self, obj)

    return Fingerprinter


def _stand_in(*what: Any) -> None:
    """A placeholder for a function or an array, in pickles that are never loaded."""


def _number(function: types.FunctionType) -> int:
    """The number of a function with this code. Each step gives the same result in all threads."""
    code = function.__code__
    return _functions.setdefault(function, {}).setdefault(id(code), (next(_numbers), code))[0]


def _carried(function: types.FunctionType) -> tuple[Any, ...]:
    cells = function.__closure__
    return (
        function.__defaults__,
        function.__kwdefaults__,
        cells and [cell_contents(cell) for cell in cells],
        function.__dict__,
    )
