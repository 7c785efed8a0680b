"""Payloads of one number, or None: the head itself holds the bytes, beside the name of their dtype.

They are made and read without pickle (except ints beyond 64 bits), because many results are just
one number.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._common.dtypes import dtype_name, named_dtype
from hoplite_mp._serialize.layout import (
    ARRAY_META,
    HEAD,
    NUMBER,
    NUMBER_ALIGN,
    NUMPY_SCALAR,
    PY_BOOL,
    PY_COMPLEX,
    PY_FLOAT,
    PY_INT,
    PY_NONE,
    Encoded,
    align,
    malformed,
    pack_head,
)
from hoplite_mp._serialize.streams import encode_plain

if TYPE_CHECKING:
    from collections.abc import Callable


@functools.lru_cache(256)
def _number_head(flags: int, name: str) -> bytes:
    itemsize = named_dtype(name).itemsize
    start = align(HEAD.size + ARRAY_META.size + len(name), NUMBER_ALIGN)
    head = pack_head(NUMBER, flags, 0, 0, 0, start + itemsize - HEAD.size)
    return (head + ARRAY_META.pack(0, 0, len(name), 0) + name.encode()).ljust(start, b"\0")


_INT_HEAD = _number_head(PY_INT, "<i8")
_FLOAT_HEAD = _number_head(PY_FLOAT, "<f8")
_COMPLEX_HEAD = _number_head(PY_COMPLEX, "<c16")
_BOOL_HEAD = _number_head(PY_BOOL, "|b1")
_NONE_HEAD = pack_head(NUMBER, PY_NONE, 0, 0, 0, 0)
_INT, _FLOAT, _COMPLEX = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<dd")


def _in_head(head: bytes) -> Encoded:
    return Encoded(head, [], [], len(head), [])


def _encode_int(value: int) -> Encoded | None:
    try:
        return _in_head(_INT_HEAD + _INT.pack(value))
    except struct.error:  # Beyond int64.
        return encode_plain(value)


def encode_scalar(value: np.generic) -> Encoded | None:
    """The payload of a numpy scalar; None for texts, and for scalars that only pickle describes."""
    dtype = value.dtype
    name = dtype_name(dtype)
    if name is None or dtype.kind in "SU" or dtype.type is not type(value):
        return None
    return _in_head(_number_head(NUMPY_SCALAR, name) + value.tobytes())


# The encoder for each exact type.
NUMBER_ENCODERS: dict[type, Callable[[Any], Encoded | None]] = {
    int: _encode_int,
    float: lambda value: _in_head(_FLOAT_HEAD + _FLOAT.pack(value)),
    complex: lambda value: _in_head(_COMPLEX_HEAD + _COMPLEX.pack(value.real, value.imag)),
    bool: lambda value: _in_head(_BOOL_HEAD + (b"\1" if value else b"\0")),
    type(None): lambda value: _in_head(_NONE_HEAD),
}


def number_at(mem: memoryview) -> tuple[str, int]:
    """The name of a number's dtype, and the offset of its bytes."""
    end = HEAD.size + ARRAY_META.size
    if end > len(mem):
        raise malformed(mem)
    name_len = ARRAY_META.unpack_from(mem, HEAD.size)[2]
    end += name_len
    if not name_len or end > len(mem):
        raise malformed(mem)
    return str(mem[end - name_len : end], "ascii"), align(end, NUMBER_ALIGN)


def decode_number(mem: memoryview, flags: int) -> Any:
    """The value of a NUMBER payload."""
    if flags == PY_INT:
        return _INT.unpack_from(mem, len(_INT_HEAD))[0]
    if flags == PY_FLOAT:
        return _FLOAT.unpack_from(mem, len(_FLOAT_HEAD))[0]
    if flags == PY_NONE:
        return None
    if flags == PY_BOOL:
        return mem[len(_BOOL_HEAD)] != 0
    if flags == PY_COMPLEX:
        return complex(*_COMPLEX.unpack_from(mem, len(_COMPLEX_HEAD)))
    name, offset = number_at(mem)
    return np.frombuffer(mem, named_dtype(name), 1, offset)[0]
