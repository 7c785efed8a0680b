"""The layout of payloads, independent of their meaning: structs, flags, and positions.

docs/architecture.md shows the layout ("Payload of an object"). Of the Python modules, only this
one defines it.

Payloads come from other processes and hosts. A reader compares the sizes in the head with the
available bytes before it allocates anything, and raises ValueError if they do not fit. The contents
of a pickle stream are not checked, because only members of the cluster write them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable

    from hoplite_mp._common.ref import ObjectRef


PICKLE, ARRAY, BYTES, NUMBER, ERROR = range(5)

HEAD = struct.Struct("<BBHIII")  # kind, flags, reserved, n_refs, n_buffers, meta_len
BUFFER = struct.Struct("<QQ")  # offset, length
ARRAY_META = struct.Struct("<BBHI")  # ndim, order, length of the dtype's name, n_contributors
ERROR_META = struct.Struct("<II")  # lengths of the traceback and of the summary
# Calling a bound method by a global name is cheaper than looking up the method for each call.
pack_head, unpack_head = HEAD.pack, HEAD.unpack_from
pack_buffer, unpack_buffer = BUFFER.pack, BUFFER.unpack_from

BUFFER_ALIGN = 64
REF_BYTES = 16
NUMBER_ALIGN = 16
# An array of up to this size inside a container stays in the stream, because its row in the buffer
# table, its alignment and its memoryview would cost more than copying it.
INBAND_BYTES_MAX = 1024
META_BYTES_MAX = 2**32 - 1  # the field in the head is a u32

# Flags of PICKLE. PLAIN: the stream uses no function of this package. ARGS_ONLY: the value is the
# arguments of a call without keywords. REFS_AT: the stream also has a list of the places where a
# ref's index stands for the ref's value.
PLAIN, ARGS_ONLY, REFS_AT = 1, 2, 4
# Flag of PICKLE: the payload ends with the contributors of a reduction, and their number.
CONTRIBUTORS_AT_END = 8
MUTABLE = 1  # flag of BYTES: the value is a bytearray
HAS_CONTRIBUTORS = 1  # flag of ARRAY
# Flag of ERROR: the payload ends with a shorter payload of the same failure, and its length.
HAS_SHORT_FORM = 1
# Flags of NUMBER: the original Python type; 0 is the numpy scalar given in the description.
NUMPY_SCALAR, PY_INT, PY_FLOAT, PY_COMPLEX, PY_BOOL, PY_NONE = range(6)


class Encoded:
    """A payload that is ready to be copied: `head` at offset 0, and `buffers` at the offsets in
    `offsets`.

    `refs` are the refs inside the payload, in the payload's order; the caller keeps them alive. The
    buffers are one-dimensional memoryviews of the value's own memory.
    """

    __slots__ = ("buffers", "head", "nbytes", "offsets", "refs")

    def __init__(
        self,
        head: bytes,
        buffers: list[memoryview],
        offsets: list[int],
        nbytes: int,
        refs: list[ObjectRef[Any]],
    ) -> None:
        self.head = head
        self.buffers = buffers
        self.offsets = offsets
        self.nbytes = nbytes
        self.refs = refs

    def tobytes(self) -> bytes:
        """A copy of the whole payload, for small payloads and for tests."""
        payload = bytearray(self.nbytes)
        payload[: len(self.head)] = self.head
        for offset, buffer in zip(self.offsets, self.buffers, strict=True):
            payload[offset : offset + buffer.nbytes] = buffer
        return bytes(payload)

    @property
    def kind(self) -> int:
        """PICKLE, ARRAY, BYTES, NUMBER or ERROR."""
        return self.head[0]


class ArrayInfo(NamedTuple):
    """An array or number inside a payload: its bytes begin at `offset`."""

    dtype_name: str
    shape: tuple[int, ...]
    order: str
    offset: int
    nbytes: int


def payload_kind(mem: memoryview) -> int:
    """The kind of a payload: PICKLE, ARRAY, BYTES, NUMBER or ERROR. Raises ValueError if `mem` is
    not a payload."""
    if not len(mem) or mem[0] > ERROR:
        raise malformed(mem)
    return mem[0]


def malformed(mem: memoryview) -> ValueError:
    """The error to raise when the bytes of a payload are inconsistent, or end too early."""
    return ValueError(
        f"{len(mem)} bytes that are not a payload: {bytes(mem[: HEAD.size]).hex()}..."
    )


def read_refs(mem: memoryview) -> list[bytes]:
    """The ids of the refs inside a payload. Raises ValueError if `mem` is not a payload."""
    nbytes = len(mem)
    end = HEAD.size + REF_BYTES * unpack_head(mem)[3] if nbytes >= HEAD.size else nbytes + 1
    if end > nbytes:
        raise malformed(mem)
    return [bytes(mem[i : i + REF_BYTES]) for i in range(HEAD.size, end, REF_BYTES)]


def align(offset: int, to: int = BUFFER_ALIGN) -> int:
    """The smallest multiple of `to` that is at least `offset`."""
    return (offset + to - 1) // to * to


class PickleStream:
    """The output of a pickler: the bytes of the stream, the buffers beside it, and its refs. It
    also assigns indices to the refs, for picklers and for the code that moves arrays out of
    band."""

    __slots__ = ("buffers", "chunks", "dependencies", "index", "refs", "write")

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.buffers: list[pickle.PickleBuffer] = []
        self.refs: list[ObjectRef[Any]] = []
        self.dependencies: dict[ObjectRef[Any], None] = {}  # an ordered set
        self.index: dict[ObjectRef[Any], int] = {}
        self.write = self.chunks.append  # picklers write to this object as to a file

    def index_of(self, ref: ObjectRef[Any]) -> int:
        """The index of `ref` in the payload's list of refs."""
        index = self.index.setdefault(ref, len(self.refs))
        if index == len(self.refs):
            self.refs.append(ref)
        return index


# -- writable copies of buffers ------------------------------------------------------------------


def fresh_copy(part: memoryview) -> memoryview:
    """A copy in new memory of this process. Unlike bytearray, numpy requests huge pages from the
    kernel, and lets other threads run during the copy."""
    made = np.empty(part.nbytes, np.uint8)
    made[:] = np.frombuffer(part, np.uint8)
    return made.data


class LargeCopies:
    """The function that copies large buffers for a reader that may write. A worker sets its own
    function."""

    bytes_min = 1 << 20
    copy: Callable[[memoryview], Any] = staticmethod(fresh_copy)


large_copies = LargeCopies()


def writable_copy(part: memoryview) -> Any:
    """A copy of `part` that the reader may write to."""
    if part.nbytes < large_copies.bytes_min:
        return bytearray(part)
    return large_copies.copy(part)
