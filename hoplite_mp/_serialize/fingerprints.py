"""Fingerprints: has a value changed since its sender last sent it?

What tasks have made of a global variable is to stay until the sender changes that variable, so a
sender sends each value with a fingerprint that differs from those of its earlier states. The
fingerprint of a small immutable value is its pickle, that of any other value a digest of its
pickle. In that pickle a function by value is written as a number, which stands for its identity,
with what it carries except globals, because those have fingerprints of their own. Two fingerprints
can only be compared if the same process has made them.
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
PLAIN_BYTES_MAX = 32  # A pickle up to this length is as good a fingerprint as its digest.
PLAIN_ITEMS_MAX = 64  # Longer ones go to the pickler, because looking at each item costs more.
_CONTAINERS = frozenset({list, tuple, dict, set, frozenset})
ATOMS = frozenset({int, float, complex, bool, type(None), str, bytes})

_numbers = itertools.count()
# The numbers of each function: one for each code that it had, by the code's id.
_functions: weakref.WeakKeyDictionary[types.FunctionType, dict[int, tuple[int, types.CodeType]]] = (
    weakref.WeakKeyDictionary()
)


class TooLarge(Exception):
    """Internal: the pickle was longer than the caller allowed for a fingerprint."""


class _Sink:
    """The file of the pickler, which keeps nothing but the digest."""

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
    """Sixteen bytes that stand for `data`."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def fingerprint(
    value: Any, nbytes_max: int | None = None, keeper: ArrayKeeper | None = None
) -> tuple[bytes, bool]:
    """The fingerprint, never empty; and whether the value holds refs. A large array that is kept as
    an object counts by that object's mark, so its bytes are not read if it has not changed.

    Raises what pickling raises, or TooLarge for pickles of more than `nbytes_max` bytes.
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
    """Stands for a function or an array in pickles that are never loaded."""


def _number(function: types.FunctionType) -> int:
    """Each step gives all threads the same result."""
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
