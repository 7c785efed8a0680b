"""Object ids: sixteen bytes that permanently identify an object on all hosts.

    public id   | host id u64 | local id u64 |                         little-endian
    local id    | table 16 | index 16 | generation 32 |                most significant first

The host id identifies the host whose control memory contains the object's header. The local id is
the header's position there. The generation counts the uses of a header, so that an old id never
identifies a newer object.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ID_BYTES = 16
TABLE_BITS = 16
INDEX_BITS = 16
GENERATION_BITS = 32

_PUBLIC = struct.Struct("<QQ")


def pack_local(table: int, index: int, generation: int) -> int:
    """The 64-bit local id."""
    _check("table", table, TABLE_BITS)
    _check("index", index, INDEX_BITS)
    _check("generation", generation, GENERATION_BITS)
    return table << (INDEX_BITS + GENERATION_BITS) | index << GENERATION_BITS | generation


def unpack_local(local: int) -> tuple[int, int, int]:
    """The table, index and generation in a 64-bit local id."""
    _check("local id", local, 64)
    return (
        local >> (INDEX_BITS + GENERATION_BITS),
        local >> GENERATION_BITS & ((1 << INDEX_BITS) - 1),
        local & ((1 << GENERATION_BITS) - 1),
    )


def pack_id(host: int, local: int) -> bytes:
    """The sixteen bytes of a public id."""
    _check("host id", host, 64)
    _check("local id", local, 64)
    return _PUBLIC.pack(host, local)


unpack_whole: Callable[[bytes], tuple[int, int]] = _PUBLIC.unpack
"""Like unpack_id, for bytes that are known to be an id."""


def unpack_id(public: bytes) -> tuple[int, int]:
    """The host id and the local id in a public id."""
    if len(public) != ID_BYTES:
        raise ValueError(f"an object id has {ID_BYTES} bytes, not {len(public)}")
    host, local = _PUBLIC.unpack(public)
    return host, local


def format_id(public: bytes) -> str:
    """The id as 32 hexadecimal digits, for messages and logs."""
    if len(public) != ID_BYTES:
        raise ValueError(f"an object id has {ID_BYTES} bytes, not {len(public)}")
    return public.hex()


def random_host_id() -> int:
    """A new host id. Never 0, because 0 means "no host"."""
    while not (host := int.from_bytes(os.urandom(8), "little")):
        pass
    return host


def _check(name: str, value: int, bits: int) -> None:
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{name} must fit into {bits} bits, not {value}")
