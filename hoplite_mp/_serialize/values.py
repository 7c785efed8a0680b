"""Writes values as payloads of a suitable kind, and reads them without a copy.

Most objects need no pickle: a few bytes describe an array, bytes or a number. All other objects
become pickle streams. Writing returns the head and the buffers, which compiled code copies into the
store. Reading makes arrays that are views of the store's memory. This module must not copy large
data itself, and must not depend on the origin of the memory.
"""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._common.signals import is_interruption
from hoplite_mp._serialize.arrays import (
    NUMBER_ENCODERS,
    decode_array,
    decode_number,
    encode_array,
    encode_scalar,
)
from hoplite_mp._serialize.errors import blamed, decode_error
from hoplite_mp._serialize.layout import (
    ARRAY,
    BUFFER,
    BUFFER_ALIGN,
    BYTES,
    CONTRIBUTORS_AT_END,
    ERROR,
    HEAD,
    MUTABLE,
    NUMBER,
    PICKLE,
    PLAIN,
    Encoded,
    malformed,
    pack_buffer,
    pack_head,
    unpack_buffer,
    unpack_head,
)
from hoplite_mp._serialize.picklers import MakeScan, write_stream
from hoplite_mp._serialize.streams import (
    PLAIN_ITEMS_MAX,
    UNPICKLABLE,
    MakeRef,
    ResolveRef,
    all_atoms,
    encode_plain,
    fill,
    load_within,
    unpicklable,
)
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from collections.abc import Callable


def encode(value: Any, scan: MakeScan | None = None, beside: bool = True) -> Encoded:
    """The payload of any value. Raises TypeError if the value cannot be pickled.

    `scan` makes a Scan, which handles the large globals of functions that are sent by value. It
    stores the globals as separate objects or, without `beside`, only marks them.
    """
    encoder = _ENCODERS.get(type(value))
    encoded = None if encoder is None else encoder(value)
    return _encode_other(value, scan, beside) if encoded is None else encoded


def _encode_plain_items(value: Any) -> Encoded | None:
    if len(value) <= PLAIN_ITEMS_MAX and all_atoms(map(type, value)):
        return encode_plain(value)
    return None


def _encode_plain_dict(value: dict[Any, Any]) -> Encoded | None:
    if (
        len(value) <= PLAIN_ITEMS_MAX
        and all_atoms(map(type, value))
        and all_atoms(map(type, value.values()))
    ):
        return encode_plain(value)
    return None


def _encode_bytes(value: bytes | bytearray) -> Encoded:
    nbytes = len(value)
    flags = 0 if type(value) is bytes else MUTABLE
    head = pack_head(BYTES, flags, 0, 0, 1, 0) + pack_buffer(BUFFER_ALIGN, nbytes)
    return Encoded(head, [memoryview(value)], [BUFFER_ALIGN], BUFFER_ALIGN + nbytes, [])


def _encode_other(value: Any, scan: MakeScan | None, beside: bool) -> Encoded:
    if isinstance(value, np.generic):
        encoded = encode_scalar(value)
        if encoded is not None:
            return encoded
    try:
        return fill(Encoded, write_stream(value, scan=scan, beside=beside), PICKLE, 0)
    except (MemoryError, HopliteError):
        raise
    except UNPICKLABLE as error:
        if is_interruption(error):
            raise
        shown = value.value if isinstance(value, Folded) else value
        raise unpicklable("value", shown, error, blamed(shown)) from error


class Folded:
    """The result of a reduction by a user's function. `contributors`: the indices of the reduced
    sources. Readers get only `value`."""

    __slots__ = ("contributors", "value")

    def __init__(self, value: Any, contributors: tuple[int, ...]) -> None:
        self.value = value
        self.contributors = contributors

    def __reduce__(self) -> Any:
        return _same, (self.value,)


def _same(value: Any) -> Any:
    """Used in the pickled results of reductions."""
    return value


def _encode_folded(folded: Folded) -> Encoded:
    encoded = _encode_other(folded, None, True)
    kind, flags = encoded.head[:2]
    encoded.head = bytes([kind, flags | CONTRIBUTORS_AT_END]) + encoded.head[2:]
    sources = folded.contributors
    end = struct.pack(f"<{len(sources)}II", *sources, len(sources))
    encoded.buffers.append(memoryview(end))
    encoded.offsets.append(encoded.nbytes)
    encoded.nbytes += len(end)
    return encoded


_ENCODERS: dict[type, Callable[[Any], Encoded | None]] = {
    **NUMBER_ENCODERS,
    str: encode_plain,
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    tuple: _encode_plain_items,
    list: _encode_plain_items,
    dict: _encode_plain_dict,
    np.ndarray: encode_array,
    Folded: _encode_folded,
}


def decode(
    mem: memoryview,
    *,
    make_ref: MakeRef,
    writable: bool = False,
    resolve: ResolveRef | None = None,
) -> Any:
    """The value of a payload. Its arrays are read-only views of `mem`, or private copies if
    `writable`.

    `mem` may be longer than the payload. The views keep the exporter of `mem` alive through the
    buffer protocol. Raises the exception in an ERROR payload, and ValueError if `mem` is not a
    payload.
    """
    try:
        kind, flags, _, _, _, meta_len = head = unpack_head(mem)
        if kind == NUMBER:
            return decode_number(mem, flags)
    except (struct.error, IndexError):
        raise malformed(mem) from None
    if kind == PICKLE:
        if flags & PLAIN:
            if HEAD.size + meta_len > len(mem):
                raise malformed(mem)
            return pickle.loads(mem[HEAD.size : HEAD.size + meta_len])
        return load_within(mem, head, 0, make_ref, resolve, writable)
    if kind == ARRAY:
        return decode_array(mem, meta_len, writable)
    if kind == BYTES:
        if len(mem) < HEAD.size + BUFFER.size:
            raise malformed(mem)
        offset, nbytes = unpack_buffer(mem, HEAD.size)
        if offset + nbytes > len(mem):
            raise malformed(mem)
        data = mem[offset : offset + nbytes]
        return bytearray(data) if flags & MUTABLE else data.tobytes()
    if kind == ERROR:
        raise decode_error(mem, make_ref)
    raise malformed(mem)
