"""Passes arrays in the store to other members of a Group without a copy.

A Group call usually copies a rank's contribution into the store, and the result out of the store.
Some arrays are already in the store: an array from `empty`, or the result of an earlier call, is in
a block of this process; an array from `get` is a view of a sealed object. Such arrays are
recognised by their address, and the other members read them in place. A block becomes an object for
the duration of the call (`Block.lend`), so its bytes remain if this process dies or drops the
array. The block is taken back when no member is reading it any more. Only arrays that fill their
block or object are recognised.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _serialize, _shm
from hoplite_mp._common.object_states import STATE
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._protocol.local import Lease, Reply

if TYPE_CHECKING:
    from hoplite_mp._client.memory import Memory

__all__ = ["RESULT_BYTES_MIN", "InPlace", "new_result", "own_copy"]

Array = np.ndarray[Any, np.dtype[Any]]
# Results of at least this size are allocated in the store, whose pages are already in memory. For
# smaller results, malloc is faster than a request for a block from the node.
RESULT_BYTES_MIN = 1 << 20
# Copying a smaller array is cheaper than lending its block and taking the block back.
IN_PLACE_BYTES_MIN = 16 << 10
PREFIX_BYTES = 4096 - _shm.BLOCK_HEAD_BYTES  # so that the array begins on a page boundary


class InPlace:
    """The blocks that one member has lent to the other members."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._lent: dict[int, tuple[_shm.Block, ObjectRef[Any]]] = {}  # by payload

    @property
    def lends(self) -> bool:
        """Whether any block of this process is lent."""
        return bool(self._lent)

    def ref(self, array: Array, may_lend: bool) -> ObjectRef[Any] | None:
        """A ref to an object with the array's bytes; None if the array must be copied. `may_lend`:
        whether a block of this process may be lent. After the call, the caller may write to the
        block again."""
        if array.nbytes < IN_PLACE_BYTES_MIN:
            return None
        base: Any = array.base
        while type(base) is np.ndarray:
            base = base.base
        if type(base) is _shm.Block:
            found = self._of_object(array, base, base.published)
            return self._of_block(array, base) if found is None and may_lend else found
        view = base.obj if type(base) is memoryview else None
        return self._of_object(array, view, view.oid) if type(view) is _shm.View else None

    def _of_block(self, array: Array, block: _shm.Block) -> ObjectRef[Any] | None:
        """Like `ref`, for an array in a block of this process. Lends the block."""
        if block.is_lent:  # to another call
            return None
        found = self._memory.block_of(array)
        head = None if found is None else self._memory.block_head(array, found)
        if head is None:
            return None
        self._memory.client.write(block.payload, head, [], [])
        hold = block.lend()
        ref: ObjectRef[Any] = ObjectRef(self._memory.public_id(hold.oid), hold)
        self._lent[block.payload] = block, ref
        return ref

    def _of_object(
        self, array: Array, shown: _shm.Block | _shm.View, oid: int
    ) -> ObjectRef[Any] | None:
        """Like `ref`, for an array that is a view of a sealed object, which never changes."""
        if not oid or (type(shown) is _shm.Block and shown.is_lent):
            return None
        if self._memory.client.state(oid) != STATE["SEALED"]:
            return None
        ref = self._memory.make_ref(self._memory.public_id(oid))
        return ref if ref._hold is not None and fills(self._memory, array, ref) else None

    def take_back(self) -> bool:
        """Takes back the lent blocks that have no readers. Returns False if any block still has
        readers."""
        for payload, (block, _) in list(self._lent.items()):
            if block.recall():
                del self._lent[payload]
        return not self._lent


def fills(memory: Memory, array: Array, ref: ObjectRef[Any]) -> bool:
    """Whether the array covers the whole object, with the same dtype, shape and order."""
    got = memory.client.view(memory.local_id(ref))
    if not isinstance(got, _shm.View):
        return False
    mem = memoryview(got)
    info = _serialize.describe_array(mem)
    if info is None or info.nbytes != array.nbytes or info.shape != array.shape:
        return False
    if info.dtype_name != _serialize.dtype_name(array.dtype):
        return False
    contiguous = array.flags.c_contiguous if info.order == "C" else array.flags.f_contiguous
    start = np.frombuffer(mem, np.uint8, 1).__array_interface__["data"][0] + info.offset
    return bool(contiguous and array.__array_interface__["data"][0] == start)


def own_copy(memory: Memory, array: Array) -> Array:
    """A writable copy. If it is large and the store has free space, it is in a block of the
    store."""
    if array.nbytes < RESULT_BYTES_MIN or array.dtype.hasobject or not memory.client.usable:
        return np.array(array)
    order = "C" if array.flags.c_contiguous or not array.flags.f_contiguous else "F"
    copy = new_result(memory, array.shape, array.dtype, order)
    np.copyto(copy, array)
    return copy


def new_result(
    memory: Memory, shape: tuple[int, ...], dtype: np.dtype[Any], order: Any = "C"
) -> Array:
    """An uninitialised array for a result. If it is large and the store has free space, it is in a
    block of the store."""
    nbytes = PREFIX_BYTES + math.prod(shape) * dtype.itemsize
    if nbytes < PREFIX_BYTES + RESULT_BYTES_MIN:
        return np.empty(shape, dtype, order)
    lease = memory.channel.call(Lease(nbytes), memory.client.take_lease)
    if isinstance(lease, Reply):  # the store has no space
        return np.empty(shape, dtype, order)
    memory.mapped.add(lease.payload, nbytes)
    block: Any = memory.client.block_of(lease, nbytes)
    block.prefix = PREFIX_BYTES
    memory.results.add(block.payload)
    return np.ndarray(shape, dtype, block, PREFIX_BYTES, order=order)
