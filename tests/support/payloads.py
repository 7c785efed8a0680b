"""Encoding and decoding of payloads and functions, and values to encode."""

from __future__ import annotations

import dataclasses
import struct
import threading
from collections import namedtuple
from typing import Any

import ml_dtypes
import numpy as np

from hoplite_mp import _serialize
from hoplite_mp._common.ref import ObjectRef


def a_ref(n: int = 1) -> ObjectRef[Any]:
    return ObjectRef(n.to_bytes(16, "little"))


def round_trip(value: Any, **options: Any) -> Any:
    return load(_serialize.encode(value), **options)


def load(encoded: _serialize.Encoded, **options: Any) -> Any:
    payload = encoded.tobytes()
    check_layout(encoded, payload)
    return _serialize.decode(memoryview(payload), make_ref=ObjectRef, **options)


def check_layout(encoded: _serialize.Encoded, payload: bytes) -> None:
    assert len(payload) == encoded.nbytes
    kind, _, _, n_refs, n_buffers, meta_len = struct.unpack_from("<BBHIII", payload)
    assert kind == encoded.kind == _serialize.payload_kind(memoryview(payload))
    assert _serialize.read_refs(memoryview(payload)) == [ref._id for ref in encoded.refs]
    table = 16 + 16 * n_refs
    assert table + 16 * n_buffers + meta_len == len(encoded.head)
    listed = list(struct.iter_unpack("<QQ", payload[table : table + 16 * n_buffers]))
    assert listed == [
        (offset, buffer.nbytes)
        for offset, buffer in zip(encoded.offsets, encoded.buffers, strict=True)
    ]
    assert all(offset % 64 == 0 and offset >= len(encoded.head) for offset, _ in listed)
    assert all(b.ndim == 1 and b.itemsize == 1 and b.c_contiguous for b in encoded.buffers)


ML_DTYPES = [np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "int4")]


def array_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Bytes that differ from place to place; no value of its own matters here."""
    count = int(np.prod(shape, dtype=int))
    if dtype.kind in "OT":
        return np.array([str(i) for i in range(count)], dtype).reshape(shape)
    return (np.arange(count) % 7).astype(np.uint8).astype(dtype).reshape(shape)


class Tagged(np.ndarray):
    """A subclass that numpy pickles as an array, and whose attribute finalize sets."""

    def __array_finalize__(self, obj: Any) -> None:
        self.tag = getattr(obj, "tag", "none")


@dataclasses.dataclass
class Boxed:
    array: Any
    more: Any = None


class FakeFuture:
    def __init__(self, ref: ObjectRef[Any]) -> None:
        self.ref = ref
        self.lock = threading.Lock()


_serialize.register_future_type(FakeFuture)


Point = namedtuple("Point", "x y")


def function_trip(function: Any) -> Any:
    return _serialize.decode_function(_serialize.encode_function(function))
