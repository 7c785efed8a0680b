"""A member's small calls over several hosts: written to the board, answered there by the engine.

While all members make small calls of one kind, the engines of their nodes exchange what they give,
and no node runs Python (`cext/engine_small.h`). A member then writes its part to the board, rings
its doorbell (an eventfd that the engine watches), and sleeps until the result lies beside the part.
A call that is not small, or of another kind, goes through the node like any other
(`multi_host.py`).
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize, _tasks
from hoplite_mp._client.descriptors import Watched, lift
from hoplite_mp._common.reduction import has_kernel, result_dtype
from hoplite_mp._protocol.group_calls import PIECE_BYTES_MAX
from hoplite_mp._protocol.local import GroupBell
from hoplite_mp._serialize.contributions import REDUCTIONS, SMALL_KINDS, SMALL_OPS

if TYPE_CHECKING:
    from hoplite_mp._client.runtime import Runtime

__all__ = ["EngineCalls"]

# In the order of reduce_kernels.h.
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
NONE = 255  # no operator, no dtype
_KINDS = {kind: number for number, kind in enumerate(SMALL_KINDS)}


@functools.cache
def _numbers(kind: str, op: str, name: str | None) -> tuple[int, int, int] | None:
    """(kind, op, dtype) as the engine numbers them; None: it has no such call."""
    if kind not in _KINDS:
        return None
    if kind not in REDUCTIONS:
        return None if op else (_KINDS[kind], NONE, NONE)
    kernel = has_kernel(op, name) if name is not None else None
    if kernel is None or name is None or result_dtype(op, name) != name:
        return None
    return _KINDS[kind], SMALL_OPS.index(op), DTYPES.index(kernel)


class Doorbell(Watched):
    """An eventfd, which is closed with its owner."""

    __slots__ = ()

    def close(self) -> None:
        super().close()
        self.fd = -1  # `there` cannot tell one eventfd from another

    def __del__(self) -> None:
        self.close()


class EngineCalls:
    """One member's place on the board, and its doorbell."""

    def __init__(self, runtime: Runtime, board: int, generation: int, rank: int, size: int) -> None:
        self._channel = runtime.channel
        self._board = _tasks.SmallBoard(runtime.tasks, board)
        self._generation = generation
        self._rank = rank
        self._size = size
        self._doorbell: Doorbell | None = None

    def give(
        self, call: int, kind: str, op: str, root: int, encoded: _serialize.Encoded | None
    ) -> bool:
        """Gives this rank's payload to a call; None: it gives nothing. False: the call has to be
        made through the node."""
        if not self._board.is_open():
            return False
        head, offset, elements = b"", 0, None
        name = None
        if encoded is not None:
            if encoded.refs or encoded.nbytes > PIECE_BYTES_MAX:
                return False
            if kind in REDUCTIONS:
                info = _serialize.describe_array(memoryview(encoded.head))
                if (
                    info is None
                    or info.order != "C"
                    or (kind == "reduce_scatter" and not info.shape)
                ):
                    return False
                name = info.dtype_name
            if len(encoded.buffers) == 1:
                head, offset, elements = encoded.head, encoded.offsets[0], encoded.buffers[0]
            else:
                head = encoded.tobytes()
        numbers = _numbers(kind, op, name)
        if numbers is None or (self._doorbell is None and not self._hang_doorbell()):
            return False
        about = *numbers, root
        if not self._board.give(self._rank, self._size, call, about, head, offset, elements):
            return False
        self.ring()
        return True

    def ring(self) -> None:
        """Wakes the engine, because there is something on the board."""
        doorbell = self._doorbell
        if doorbell is not None and doorbell.there():
            os.eventfd_write(doorbell.fd, 1)
        elif self._hang_doorbell():  # a new doorbell makes the engine look at the board
            return

    def _hang_doorbell(self) -> bool:
        try:
            fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:  # no descriptor is left
            return False
        doorbell = Doorbell(lift(fd))
        self._channel.call(GroupBell(self._generation, self._rank), descriptors=[doorbell.fd])
        self._doorbell = doorbell  # only now, because the line above may be interrupted
        return True

    def is_done(self, call: int) -> bool:
        """Has the engine committed that call?"""
        return self._board.done() > call

    def result(self) -> tuple[int, str, str, Any]:
        """(ranks as bits, no error, no message, data) of the last call, in the form of the node's
        results of other calls; see `MultiHost.take`."""
        _, mask, kind, _, _, _, found = _tasks.read_record(self._board.record())
        if SMALL_KINDS[kind] in REDUCTIONS:
            return mask, "", "", list(found.values())
        return mask, "", "", {(source, -1): part for source, part in found.items()}

    def close(self) -> None:
        """Called when the member has left."""
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None
