"""Payloads of one array or one number: a head, which describes the dtype and shape, and the bytes.

Nodes can read the head, too, so a reduction never unpickles a user's data.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._common.reduction import Array, dtype_name, named_dtype, raw_bytes
from hoplite_mp._serialize.layout import (
    ARRAY,
    ARRAY_META,
    BUFFER,
    BUFFER_ALIGN,
    CONTRIBUTORS_AT_END,
    HAS_CONTRIBUTORS,
    HEAD,
    NUMBER,
    NUMBER_ALIGN,
    NUMPY_SCALAR,
    PICKLE,
    PY_BOOL,
    PY_COMPLEX,
    PY_FLOAT,
    PY_INT,
    PY_NONE,
    ArrayInfo,
    Encoded,
    align,
    large_copies,
    malformed,
    pack_buffer,
    pack_head,
    unpack_buffer,
    unpack_head,
    writable_copy,
)
from hoplite_mp._serialize.streams import encode_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


NDIM_MAX = 64  # NumPy's own limit


@functools.lru_cache(4096)
def _array_head(
    name: str,
    shape: tuple[int, ...],
    order: str,
    contributors: tuple[int, ...] | None = None,
    buffer_offset: int | None = None,
) -> tuple[bytes, int, int]:
    """The head of an array, the offset of its buffer, and the size of its payload. The result
    depends only on the arguments, so it is cached."""
    nbytes = named_dtype(name).itemsize
    for size in shape:
        nbytes *= size
    sources = contributors or ()
    meta = ARRAY_META.pack(len(shape), order == "F", len(name), len(sources)) + name.encode()
    meta += struct.pack(f"<{len(shape)}Q{len(sources)}I", *shape, *sources)
    head_nbytes = HEAD.size + BUFFER.size + len(meta)
    offset = align(head_nbytes) if buffer_offset is None else buffer_offset
    if offset < head_nbytes or offset % BUFFER_ALIGN:
        raise ValueError(
            f"the buffer of this array cannot be at {offset}: its head takes {head_nbytes} "
            f"bytes, and buffers are aligned to {BUFFER_ALIGN}"
        )
    flags = 0 if contributors is None else HAS_CONTRIBUTORS
    head = pack_head(ARRAY, flags, 0, 0, 1, len(meta)) + pack_buffer(offset, nbytes) + meta
    return head, offset, offset + nbytes


def encode_array_head(
    dtype: Any,
    shape: Sequence[int],
    order: str = "C",
    contributors: Sequence[int] | None = None,
    buffer_offset: int | None = None,
) -> tuple[bytes, int, int]:
    """Makes the head of an array whose elements are written later. Returns the head, padded with
    zeros up to the elements; the offset of the elements; and the size of the payload."""
    name = dtype_name(np.dtype(dtype))
    if name is None:
        raise TypeError(f"arrays of dtype {dtype} have no description without pickle")
    if order not in ("C", "F"):
        raise ValueError(f"order is 'C' or 'F', not {order!r}")
    sources = None if contributors is None else tuple(map(int, contributors))
    head, offset, nbytes = _array_head(name, tuple(map(int, shape)), order, sources, buffer_offset)
    return head.ljust(offset, b"\0"), offset, nbytes


def encode_array(array: Array) -> Encoded | None:
    """The payload of an array; None for an array that requires pickle."""
    name = dtype_name(array.dtype)
    if name is None:
        return None
    flags = array.flags
    order = "C"
    if not flags.c_contiguous:
        if flags.f_contiguous:
            order = "F"
        else:
            array = np.ascontiguousarray(array)
    head, offset, nbytes = _array_head(name, array.shape, order)
    return Encoded(head, [raw_bytes(array).raw()], [offset], nbytes, [])


@functools.lru_cache(4096)
def _parse_array(
    meta: bytes, flags: int
) -> tuple[np.dtype[Any], tuple[int, ...], str, tuple[int, ...] | None]:
    """The dtype, shape, order and contributors in an array's meta."""
    if len(meta) < ARRAY_META.size:
        raise malformed(memoryview(meta))
    ndim, fortran, name_len, n_sources = ARRAY_META.unpack_from(meta)
    end = ARRAY_META.size + name_len
    if end + 8 * ndim + 4 * n_sources > len(meta) or ndim > NDIM_MAX or not name_len:
        raise malformed(memoryview(meta))
    name = meta[ARRAY_META.size : end].decode()
    numbers = struct.unpack_from(f"<{ndim}Q{n_sources}I", meta, end)
    sources = numbers[ndim:] if flags & HAS_CONTRIBUTORS else None
    return named_dtype(name), numbers[:ndim], "F" if fortran else "C", sources


_ARRAY_META_AT = HEAD.size + BUFFER.size


def _array_meta(mem: memoryview, meta_len: int) -> bytes:
    if _ARRAY_META_AT + meta_len > len(mem):
        raise malformed(mem)
    return bytes(mem[_ARRAY_META_AT : _ARRAY_META_AT + meta_len])


def decode_array(mem: memoryview, meta_len: int, writable: bool) -> Array:
    """The array of an ARRAY payload: a read-only view of `mem`, or a copy."""
    meta = _array_meta(mem, meta_len)
    offset, nbytes = unpack_buffer(mem, HEAD.size)
    dtype, shape, order, _ = _parse_array(meta, 0)
    if math.prod(shape) * dtype.itemsize != nbytes or offset + nbytes > len(mem):
        raise malformed(mem)
    array: Array
    if not nbytes:
        array = np.empty(shape, dtype, order)  # type: ignore[call-overload]
        array.flags.writeable = writable
        return array
    # frombuffer keeps the memoryview alive; ndarray(buffer=) would keep only the memoryview's
    # owner, without an export of its buffer.
    if not mem.readonly:
        mem = mem.toreadonly()
    if writable and nbytes >= large_copies.bytes_min:
        mem, offset = writable_copy(mem[offset : offset + nbytes]), 0
        writable = False  # the copy is already writable
    array = np.frombuffer(mem, dtype, nbytes // dtype.itemsize, offset)
    if len(shape) != 1:
        array = array.reshape(shape, order=order)  # type: ignore[call-overload]
    return array.copy("K") if writable else array


def read_contributors(mem: memoryview) -> tuple[int, ...] | None:
    """The indices of the sources whose values are in the array; None if it is not the result of a
    reduction."""
    if len(mem) < HEAD.size:
        raise malformed(mem)
    kind, flags, _, _, _, meta_len = unpack_head(mem)
    if kind == PICKLE and flags & CONTRIBUTORS_AT_END:
        (count,) = struct.unpack_from("<I", mem, len(mem) - 4)
        begin = len(mem) - 4 - 4 * count
        if begin < HEAD.size:
            raise malformed(mem)
        return struct.unpack_from(f"<{count}I", mem, begin)
    if kind != ARRAY or not flags & HAS_CONTRIBUTORS:
        return None
    return _parse_array(_array_meta(mem, meta_len), flags)[3]


def describe_array(mem: memoryview) -> ArrayInfo | None:
    """Describes the array or number in a payload, without unpickling. Returns None if there is
    neither. `mem` may end before an array's elements. Raises ValueError if `mem` is not a
    payload."""
    if len(mem) < HEAD.size:
        raise malformed(mem)
    kind, flags, _, _, _, meta_len = unpack_head(mem)
    if kind == ARRAY:
        meta = _array_meta(mem, meta_len)
        offset, nbytes = unpack_buffer(mem, HEAD.size)
        dtype, shape, order, _ = _parse_array(meta, flags)
        if math.prod(shape) * dtype.itemsize != nbytes:
            raise malformed(mem)
        return ArrayInfo(str(dtype_name(dtype)), shape, order, offset, nbytes)
    if kind == NUMBER and flags != PY_NONE:
        name, offset = number_at(mem)
        return ArrayInfo(name, (), "C", offset, named_dtype(name).itemsize)
    return None


# -- payloads of one number, or None: the head contains the bytes and the name of their dtype ------
#
# Many results are single numbers, so numbers are written and read without pickle (except ints
# beyond 64 bits).


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
    except struct.error:  # the value is beyond int64
        return encode_plain(value)


def encode_scalar(value: np.generic) -> Encoded | None:
    """The payload of a numpy scalar; None for strings, and for scalars that require pickle."""
    dtype = value.dtype
    name = dtype_name(dtype)
    if name is None or dtype.kind in "SU" or dtype.type is not type(value):
        return None
    return _in_head(_number_head(NUMPY_SCALAR, name) + value.tobytes())


# Exact type -> its encoder.
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
