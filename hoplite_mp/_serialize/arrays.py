"""Payloads of one array: a head that the node can read too, and the array's own memory.

Thanks to that head, a reduction never unpickles a user's data.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._common.dtypes import Array, dtype_name, named_dtype, raw_bytes
from hoplite_mp._serialize.copies import large_copies, writable_copy
from hoplite_mp._serialize.layout import (
    ARRAY,
    ARRAY_META,
    BUFFER,
    BUFFER_ALIGN,
    CONTRIBUTORS_AT_END,
    HAS_CONTRIBUTORS,
    HEAD,
    NUMBER,
    PICKLE,
    PY_NONE,
    ArrayInfo,
    Encoded,
    align,
    malformed,
    pack_buffer,
    pack_head,
    unpack_buffer,
    unpack_head,
)
from hoplite_mp._serialize.numbers import number_at

if TYPE_CHECKING:
    from collections.abc import Sequence

NDIM_MAX = 64  # NumPy's own


@functools.lru_cache(4096)
def _array_head(
    name: str,
    shape: tuple[int, ...],
    order: str,
    contributors: tuple[int, ...] | None = None,
    buffer_offset: int | None = None,
) -> tuple[bytes, int, int]:
    """Head, place of the buffer, and size of the payload. Cached, because the function is pure."""
    nbytes = named_dtype(name).itemsize
    for size in shape:
        nbytes *= size
    who = contributors or ()
    meta = ARRAY_META.pack(len(shape), order == "F", len(name), len(who)) + name.encode()
    meta += struct.pack(f"<{len(shape)}Q{len(who)}I", *shape, *who)
    head_nbytes = HEAD.size + BUFFER.size + len(meta)
    offset = align(head_nbytes) if buffer_offset is None else buffer_offset
    if offset < head_nbytes or offset % BUFFER_ALIGN:
        raise ValueError(
            f"the buffer of this array cannot stand at {offset}: its head takes {head_nbytes} "
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
    """The head of an array whose bytes are filled in later: (head with zeros up to them, place of
    them, total bytes)."""
    name = dtype_name(np.dtype(dtype))
    if name is None:
        raise TypeError(f"arrays of dtype {dtype} have no description without pickle")
    if order not in ("C", "F"):
        raise ValueError(f"order is 'C' or 'F', not {order!r}")
    who = None if contributors is None else tuple(map(int, contributors))
    head, offset, nbytes = _array_head(name, tuple(map(int, shape)), order, who, buffer_offset)
    return head.ljust(offset, b"\0"), offset, nbytes


def encode_array(array: Array) -> Encoded | None:
    """The payload of an array; None for an array that only pickle can describe."""
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
    """(dtype, shape, order, contributors) of an array's meta."""
    if len(meta) < ARRAY_META.size:
        raise malformed(memoryview(meta))
    ndim, fortran, name_len, n_who = ARRAY_META.unpack_from(meta)
    end = ARRAY_META.size + name_len
    if end + 8 * ndim + 4 * n_who > len(meta) or ndim > NDIM_MAX or not name_len:
        raise malformed(memoryview(meta))
    name = meta[ARRAY_META.size : end].decode()
    numbers = struct.unpack_from(f"<{ndim}Q{n_who}I", meta, end)
    who = numbers[ndim:] if flags & HAS_CONTRIBUTORS else None
    return named_dtype(name), numbers[:ndim], "F" if fortran else "C", who


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
    # frombuffer keeps the memoryview; ndarray(buffer=) would keep only its owner, not an export.
    if not mem.readonly:
        mem = mem.toreadonly()
    if writable and nbytes >= large_copies.bytes_min:
        mem, offset = writable_copy(mem[offset : offset + nbytes]), 0
        writable = False  # the copy is writable already
    array = np.frombuffer(mem, dtype, nbytes // dtype.itemsize, offset)
    if len(shape) != 1:
        array = array.reshape(shape, order=order)  # type: ignore[call-overload]
    return array.copy("K") if writable else array


def read_contributors(mem: memoryview) -> tuple[int, ...] | None:
    """The sources whose values are in the array; None if it is not the result of a reduction."""
    if len(mem) < HEAD.size:
        raise malformed(mem)
    kind, flags, _, _, _, meta_len = unpack_head(mem)
    if kind == PICKLE and flags & CONTRIBUTORS_AT_END:
        (count,) = struct.unpack_from("<I", mem, len(mem) - 4)
        return struct.unpack_from(f"<{count}I", mem, len(mem) - 4 - 4 * count)
    if kind != ARRAY or not flags & HAS_CONTRIBUTORS:
        return None
    return _parse_array(_array_meta(mem, meta_len), flags)[3]


def describe_array(mem: memoryview) -> ArrayInfo | None:
    """Describes the array or number that a payload holds, without unpickling; None if it holds
    neither. `mem` may end before an array's elements. ValueError: it is no payload."""
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
