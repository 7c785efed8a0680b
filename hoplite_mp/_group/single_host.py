"""Group calls on one host, with the contributions on the board or in call buffers.

The board is shared memory, on which C code folds and commits small calls. A barrier or a reduction
of a few KiB takes a few microseconds there. Larger arrays are in call buffers in the store, and
each rank copies the bytes that it needs. This module selects these calls, and translates between
NumPy's names and the numbers in `cext/shm_board.h`. If a rank contributes an object, an error or an
array of a different shape, the leader reads all ranks' contributions, as in any other call.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _serialize, _tasks
from hoplite_mp._client.in_place import new_result
from hoplite_mp._common import clock
from hoplite_mp._common.call_mismatch import ROOTED, different_calls
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.reduction import DTYPES, OPS, reduce_arrays, result_dtype
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._protocol.group_calls import error_of
from hoplite_mp._protocol.local import GroupBuffers
from hoplite_mp._serialize.contributions import (
    PREFIXES,
    REDUCTIONS,
    into,
    outs_of,
)
from hoplite_mp.errors import PeerLostError

if TYPE_CHECKING:
    from hoplite_mp._client.runtime import Runtime

__all__ = ["INVALID_CALL", "Combiner", "SingleHost", "mistake_words"]


Array = np.ndarray[Any, np.dtype[Any]]
# How long a call waits in C code. Meanwhile the worker does not count as blocked, and signals are
# not handled.
WAIT_NS = 2_000_000
# The smallest size of call buffers. Each larger size is four times the previous size, so a Group's
# smaller buffers together use a third of the memory of its largest buffers.
BUFFER_BYTES_MIN = 128 << 10
BUFFER_GROWTH = 4
# How long a member makes calls without buffers after the store had no space for them.
REFUSED_NS = 1_000_000_000
GIVING_POLL_S = 0.0001  # copying 8 MiB takes a few milliseconds

_KINDS = {kind: number for number, kind in enumerate(_tasks.CALL_KINDS) if kind != "split"}
_OPS = {op: number for number, op in enumerate(OPS)}
_DTYPES = {at: np.dtype(name) for at, name in enumerate(DTYPES) if name != "bfloat16"}
# The numbers in `cext/shm_board.h`, by NumPy's type number `dtype.num`: a lookup is faster than a
# comparison of dtypes. int64 has two type numbers, for the C types long and long long.
_NUMBERS = {dtype.num: number for number, dtype in _DTYPES.items()}
_NUMBERS |= {np.dtype(c).num: DTYPES.index(np.dtype(c).name) for c in "bBhHiIlLqQ"}
_RESULT_DTYPES = {
    (op, number): np.dtype(np.float64) if name == "mean" and dtype.kind in "biu" else dtype
    for name, op in _OPS.items()
    for number, dtype in _DTYPES.items()
}


class SingleHost:
    """One member's calls that need no objects."""

    def __init__(
        self, runtime: Runtime, board: _tasks.Board, generation: int, rank: int, size: int
    ) -> None:
        self._channel = runtime.channel
        self._memory = runtime.memory
        self._board = board
        self._generation = generation
        self._rank = rank
        self._size = size
        self._buffer_bytes_max = runtime.config.group_buffer_bytes_max
        # The offset in the store of all ranks' call buffers, by the size of one buffer.
        self._buffers: dict[int, int] = {}
        self._refused_until = 0  # monotonic time until which no buffers are requested
        board.set_store(runtime.memory.client.store_address, runtime.memory.client)

    def make(self, call: int, part: tuple[str, str, int, Any], deadline_ns: int) -> int | None:
        """Publishes the contribution, and waits for up to WAIT_NS. Returns a mask of the
        contributors if the call is over (`take` then reads the result), and 0 if it is not over.
        Returns None if the call cannot be made on the board, so nothing was published."""
        kind, op, root, values = part
        number = _KINDS.get(kind)
        if number is None:
            return None
        if not values:
            return self._board.make(
                self._rank, call, number, 0, root, 0, None, 0, WAIT_NS, deadline_ns
            )
        x = values[0]
        if type(x) is not np.ndarray:
            return None
        dtype = _NUMBERS.get(x.dtype.num)
        code = _OPS.get(op) if kind in REDUCTIONS else 0
        if dtype is None or code is None:
            return None
        if not x.flags.c_contiguous or not x.dtype.isnative or x.dtype.metadata is not None:
            return None
        buffer = 0
        if kind not in ("allreduce", "reduce") or _result_nbytes(x, op) > _tasks.BOARD_BYTES_MAX:
            if kind == "reduce_scatter" and not x.ndim:
                return None  # an error, which the leader raises on all ranks
            buffer = self._buffer(call, x.nbytes)
            if not buffer:
                return None
        mask = self._board.make(
            self._rank, call, number, code, root, dtype, x, buffer, WAIT_NS, deadline_ns
        )
        return None if mask < 0 else mask

    def _buffer(self, call: int, nbytes: int) -> int:
        """The offset in the store of this rank's buffer for the call; 0 if there is no buffer."""
        if nbytes > self._buffer_bytes_max:
            return 0
        size = BUFFER_BYTES_MIN
        while size < nbytes:
            size *= BUFFER_GROWTH
        size = min(size, self._buffer_bytes_max)
        each = _tasks.BUFFER_HEAD_BYTES * (1 + -(-size // _tasks.BUFFER_HEAD_BYTES))
        base = self._buffers.get(size)
        if base is None:
            now = clock.monotonic_ns()
            if now < self._refused_until:
                return 0
            ask = GroupBuffers(self._generation, self._rank, each)
            base = self._channel.call(ask).value
            if base is None:
                self._refused_until = now + REFUSED_NS
                return 0
            self._buffers[size] = base
        return base + (2 * self._rank + (call & 1)) * each

    def leave(self) -> None:
        """Leaves the board. Afterwards the member no longer writes to its buffers."""
        self._board.leave_store()
        # Another thread may be copying an array to a buffer, except in a forked child, which does
        # not have that thread.
        while self._board.giving and self._memory.client.usable:
            clock.sleep(GIVING_POLL_S)

    def part(self, rank: int) -> tuple[str, str, int, list[Array]] | None:
        """A rank's contribution on the board or in its buffer, in the same form as for other calls;
        None while the rank is writing it."""
        found = self._board.part(rank)
        if found is None:
            return None
        number, op, root, dtype, shape, data, _ = found
        kind = _tasks.CALL_KINDS[number]
        if kind == "barrier" or (kind == "broadcast" and rank != root):
            return kind, "", root, []
        array = np.frombuffer(data, _DTYPES[dtype]).reshape(shape)
        return kind, OPS[op] if kind in REDUCTIONS else "", root, [array]

    def take(self, kind: str, root: int, call: int, mask: int, out: Any) -> Any:
        """This rank's result of a call whose commit refers to no object. kind: "barrier" if the
        caller only waits for the call. mask: the contributors."""
        if kind == "barrier" or (kind in ("reduce", "gather") and self._rank != root):
            return None
        if kind == "broadcast":
            return self._copied(root, call, out)
        if kind not in REDUCTIONS:
            outs = outs_of(kind, out, self._size)
            return [
                self._copied(rank, call, outs[rank]) if mask >> rank & 1 else None
                for rank in range(self._size)
            ]
        shape, dtype_number, op, buffered = self._board.result_form()
        dtype, first = _RESULT_DTYPES[op, dtype_number], 0
        if kind == "reduce_scatter":  # the sections of numpy.array_split
            each, more = divmod(shape[0], self._size)
            row = self._rank * each + min(self._rank, more)
            first = row * math.prod(shape[1:])
            shape = each + (self._rank < more), *shape[1:]
        if buffered:
            result = self._output(shape, dtype, out)
            self._board.fold(call, first, result)
        else:
            result = np.empty(shape, dtype) if out is None else self._output(shape, dtype, out)
            self._board.result(result)
        return result if out is None or out is result else into(result, out)

    def _copied(self, rank: int, call: int, out: Any) -> Any:
        """A copy of a rank's array, from its buffer."""
        number, shape, _ = self._board.buffered(rank, call)
        result = self._output(shape, _DTYPES[number], out)
        self._board.copy(rank, call, result)
        return result if out is None or out is result else into(result, out)

    def _output(self, shape: tuple[int, ...], dtype: np.dtype[Any], out: Any) -> Array:
        """`out` if the result can be written there directly; otherwise a new array."""
        return out if _fits(out, shape, dtype) else new_result(self._memory, shape, dtype)


def _result_nbytes(x: Array, op: str) -> int:
    return x.size * 8 if op == "mean" and x.dtype.kind in "biu" else x.nbytes


def _fits(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether a result with that shape and dtype can be written directly to `out`."""
    if type(out) is not np.ndarray or out.shape != shape or out.dtype != dtype:
        return False
    return out.flags.c_contiguous and out.flags.writeable


# How the leader combines the contributions to a call on one host.
#
# An error in one rank's contribution must be raised on every rank. Correct contributions are
# combined only once, by the leader.


INVALID_CALL = "mistake"  # the kind of a contribution that contains an error
# Maximum length of an error's text, for which every host must have space.
INVALID_CALL_CHARS_MAX = 8000


class Combiner:
    """Combines contributions: (kind, op, root, values) by rank. The contribution of a rank that had
    an error is (INVALID_CALL, message, 0, kind of the error)."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._memory = runtime.memory
        self.name = name

    def combine(self, parts: dict[int, Any], refs: dict[int, ObjectRef[Any]]) -> Any:
        """A ref to the result, or the refs of the contributions. If this method raises an error,
        every rank raises it."""
        for part in parts.values():
            if part[0] == INVALID_CALL:
                raise error_of(part[3], part[1])
        if difference := different_calls(parts):
            raise ValueError(difference)
        first_rank = min(parts)
        kind, op, root, _ = parts[first_rank]
        if kind in ROOTED and root not in parts:
            raise PeerLostError(f"group {self.name!r}: the root, rank {root}, is lost")
        if kind in REDUCTIONS or kind in PREFIXES:
            arrays = {rank: self._array(part[3][0]) for rank, part in parts.items()}
            if kind == "reduce_scatter" and arrays[first_rank].ndim == 0:
                raise ValueError("reduce_scatter needs arrays of at least one dimension")
            if kind in REDUCTIONS:
                return self._reduced(op, arrays)
            self._result_dtype(op, arrays)  # only a check: each rank folds the arrays itself
        if kind in ("broadcast", "scatter"):
            return refs[root]
        return refs

    def _array(self, given: Any) -> Array:
        """An array to reduce. `given` is the array, or a ref to an object that contains it."""
        if type(given) is ObjectRef:
            given = self._memory.read(self._memory.local_id(given), FOREVER_NS, False)
        return given  # type: ignore[no-any-return]

    def _result_dtype(self, op: str, arrays: dict[int, Array]) -> np.dtype[Any]:
        """The dtype of the reduction's result. Raises ValueError if the arrays cannot be reduced
        together."""
        first_rank = min(arrays)
        first = arrays[first_rank]
        for rank, array in arrays.items():
            if array.shape != first.shape or array.dtype != first.dtype:
                raise ValueError(
                    f"rank {first_rank} has shape {first.shape} and dtype {first.dtype}, rank "
                    f"{rank} has shape {array.shape} and dtype {array.dtype}"
                )
        name = _serialize.dtype_name(first.dtype)
        assert name is not None, "other dtypes are refused earlier"
        try:
            return _serialize.named_dtype(result_dtype(op, name))
        except TypeError as error:  # NumPy does not support the operation for this dtype
            raise ValueError(str(error)) from error

    def _reduced(self, op: str, arrays: dict[int, Array]) -> ObjectRef[Any]:
        dtype = self._result_dtype(op, arrays)
        total = self._memory.empty(arrays[min(arrays)].shape, dtype, "C")
        threads = self._runtime.config.reduce_threads or self._runtime.tasks.cores
        ordered = [np.ascontiguousarray(arrays[rank]) for rank in sorted(arrays)]
        reduce_arrays(op, ordered, total, threads)
        return self._memory.put(total)


def mistake_words(text: str) -> str:
    """An error's text, shortened and without lone surrogates, for messages."""
    return text[:INVALID_CALL_CHARS_MAX].encode(errors="replace").decode()
