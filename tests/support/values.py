"""Values of every kind, and comparisons of type, value, and every attribute.

Programs on emulated hosts import this module, so it needs no test runner.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import warnings
from typing import Any

import numpy as np


class Named(np.ndarray[Any, Any]):
    """A user's subclass with an attribute that pickle keeps."""

    def __array_finalize__(self, other: Any) -> None:
        self.label = getattr(other, "label", "")

    def __reduce__(self) -> Any:
        made, args, state = super().__reduce__()  # type: ignore[misc]
        return made, args, (state, self.label)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state[0])
        self.label = state[1]


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


class Plain:
    def __init__(self, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


def named(values: Any, label: str) -> Named:
    made = np.array(values).view(Named)
    made.label = label
    return made


def samples() -> dict[str, Any]:
    """By name; new ones at each call. Left out is what pickle itself changes: the hard mask and the
    byte order of a MaskedArray, zeros at the end of np.str_."""
    masked = np.ma.MaskedArray(np.arange(6.0), mask=[0, 1, 0, 0, 1, 0], fill_value=-7.0)
    with_metadata = np.dtype(np.int32, metadata={"unit": "m"})
    found: dict[str, Any] = {
        "none": None, "true": True, "int": -3, "big int": 1 << 70, "float": 0.1, "complex": 1j,
        "nan": float("nan"), "text": "text\0", "no text": "", "bytes": b"x\0y\0", "no bytes": b"",
        "bytearray": bytearray(b"\0a\0"), "tuple": (1, "a"), "list": [1.5, [2, "b"], None],
        "list of numbers": [1, 2, 3], "dict": {"k": [1], 2: b"\0"}, "set": {1, "a"},
        "frozenset": frozenset({1}), "range": range(3), "ellipsis": ..., "slice": slice(1, 2),
        "enum": Colour.RED, "named tuple": Point(1, "a"), "type": int, "function": len,
        "decimal": decimal.Decimal("1.10"), "fraction": fractions.Fraction(1, 3),
        "date": datetime.date(2020, 1, 2), "exception": KeyError("k", 1),
        "ordered": collections.OrderedDict(a=1), "counter": collections.Counter("aab"),
        "object": Plain(a=np.arange(3), b="text"), "many bytes": bytes(range(256)) * 300 + b"\0",
        "nested": {"a": (np.arange(4), [np.ma.masked_equal([1, 2], 2)]), "b": {"c": b"\0"}},
        "nested large": [np.arange(50_000.0), {"deep": np.ones((300, 70), np.float32, "F")}],
        "array": np.arange(6.0).reshape(2, 3), "columns": np.ones((2, 3), order="F"),
        "large columns": np.asfortranarray(np.arange(60_000).reshape(200, 300)),
        "large": np.arange(100_000, dtype=np.float32), "strided": np.arange(20)[::3],
        "reversed": np.arange(5)[::-1], "big-endian": np.arange(5, dtype=">i4"),
        "empty": np.empty((0, 3), np.int16), "0-d": np.array(2.5), "0-d int": np.array(7, np.int8),
        "half": np.arange(3, dtype=np.float16), "bool array": np.array([True, False]),
        "read-only": np.broadcast_to(np.arange(3), (2, 3)), "complex array": np.array([1j, 2]),
        "dates": np.array(["2020-01-01", "NaT"], "M8[D]"), "spans": np.array([1, 2], "m8[us]"),
        "bytes array": np.array([b"a\0b", b"c"]), "text array": np.array(["a", "bcd"]),
        "records": np.array([(1, 2.5, "x")], [("a", "i4"), ("b", "f8"), ("c", "U3")]),
        "aligned records": np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        "sub-array": np.zeros(2, [("m", "f4", (2, 2))]), "raw": np.zeros(2, "V5"),
        "objects": np.array([1, "a", None, b"\0", [1]], object),
        "metadata": np.zeros(2, with_metadata),
        "np.float32": np.float32(1.5), "np.int8": np.int8(3), "np.bool": np.bool_(True),
        "np.float64": np.float64(2.5), "np.longdouble": np.longdouble(3), "np.str": np.str_("a"),
        "np.bytes": np.bytes_(b"a"), "np.datetime64": np.datetime64("2020-01-01T10:00"),
        "np.void": np.array([(1, 2)], "i4,i4")[0], "dtype": np.dtype(">f4"),
        "masked": masked,
        "masked constant": np.ma.masked, "masked records": np.ma.zeros(2, "i4,f8"),
        "matrix": np.arange(4).reshape(2, 2).view(np.matrix),
        "recarray": np.rec.array([(1, 2.0)], "i4,f8"),
        "subclass": named([1.0, 2.0], "mine"),
        "large subclass": named(np.arange(40_000.0), "large"),
    }  # fmt: skip
    with warnings.catch_warnings(), contextlib.suppress(DeprecationWarning):
        warnings.simplefilter("error")  # numpy 2.5 and later deprecate the class
        found["chararray"] = np.char.array(["a", "b "])
    try:
        import pandas as pd
    except ImportError:
        return found
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", None]}, index=pd.Index([3, 4], name="i"))
    more = {"frame": frame, "series": frame["a"], "categories": frame["b"].astype("category")}
    return {**found, **more, "timestamp": pd.Timestamp("2020-01-01", tz="UTC")}


def same_value(a: Any, b: Any) -> bool:
    """Equal with types, through containers and attributes."""
    if type(a) is not type(b):
        return False
    if a is np.ma.masked or isinstance(a, (type, type(len))):
        return a is b
    if isinstance(a, np.ma.MaskedArray):
        parts = "fill_value", "hardmask"
        return (
            all(same_value(getattr(a, part), getattr(b, part)) for part in parts)
            and same_value(np.ma.getmaskarray(a), np.ma.getmaskarray(b))
            and same_value(np.asarray(a.data), np.asarray(b.data))
        )
    if isinstance(a, np.longdouble):  # of its 16 bytes 6 are padding, which nobody writes
        return bool(a == b)
    if isinstance(a, (np.ndarray, np.generic)):
        return _same_array(a, b)
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    if isinstance(a, complex):
        return same_value(a.real, b.real) and same_value(a.imag, b.imag)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict):
        return [(type(k), k) for k in a] == [(type(k), k) for k in b] and all(
            same_value(a[key], b[key]) for key in a
        )
    if isinstance(a, BaseException):
        return same_value(a.args, b.args)
    if isinstance(a, Plain):
        return same_value(a.__dict__, b.__dict__)
    if hasattr(a, "equals"):
        return bool(a.equals(b)) and repr(a) == repr(b)
    return bool(a == b)


def _same_array(a: Any, b: Any) -> bool:
    flags = "c_contiguous", "f_contiguous"
    if a.shape != b.shape or a.dtype != b.dtype or a.dtype.metadata != b.dtype.metadata:
        return False
    orders = [[getattr(one.flags, flag) for flag in flags] for one in (a, b)]
    contiguous = all(map(any, orders))
    if isinstance(a, np.ndarray) and contiguous and a.size and orders[0] != orders[1]:
        return False
    if getattr(a, "label", "") != getattr(b, "label", ""):
        return False
    if a.dtype.hasobject:
        return same_value(a.tolist(), b.tolist())
    return bool(np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes())


def reducible(x: Any) -> bool:
    """What a reduction takes: plain arrays and scalars of numbers, bools and times."""
    if type(x) in (bool, int, float, complex):
        return type(x) is not int or -(1 << 63) <= x < 1 << 64
    plain = type(x) is np.ndarray or (isinstance(x, np.generic) and x.dtype.type is type(x))
    return plain and x.dtype.kind in "biufcmM" and x.dtype.metadata is None


def bits(array: Any) -> tuple[Any, ...]:
    """Equal exactly when shape, dtype and every bit are."""
    array = np.asarray(array)
    return array.shape, array.dtype.str, array.dtype.name, np.ascontiguousarray(array).tobytes()


def same_array(a: Any, b: Any) -> bool:
    """Bit for bit, but any NaN is a NaN and its sign is nobody's promise."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind not in "fcV":
        return bits(a) == bits(b)
    nan = np.isnan(a)
    return bool((nan == np.isnan(b)).all()) and bits(a[~nan]) == bits(b[~nan])


MIB = 1 << 20


def mib(number: float, seed: int = 0) -> np.ndarray[Any, Any]:
    """So many MiB of bytes that tell from which seed they are."""
    return np.random.default_rng(seed).integers(0, 256, int(number * MIB), np.uint8)


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
