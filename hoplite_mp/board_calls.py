"""Small calls of a Group on one host, whose parts and results lie on the board itself.

Why it exists: a barrier or a reduction of a few KiB takes some microseconds there, because C folds
and commits it and neither objects nor pickle are needed. This file decides which calls these are,
and translates between NumPy's names and the numbers of `cext/shm_board.h`. If one rank gives
something else (an object, a mistake, another shape), the other ranks need not know: the leader then
reads all parts, wherever they lie, as in any other call.
It must never know: which rank leads, when a call is over, objects of the store.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hoplite_mp import _tasks, clock

__all__ = ["UNDECIDED", "BoardCalls"]

Array = np.ndarray[Any, np.dtype[Any]]
# How long such a call waits in C. Meanwhile its worker does not count as blocked, and signals are
# not handled.
WAIT_NS = 2_000_000
UNDECIDED = 0  # in place of the mask: the part is published, but the call is not over yet

_KINDS = {number: kind for kind, number in _tasks.BOARD_KINDS.items()}
_OPS = {number: op for op, number in _tasks.BOARD_OPS.items()}
_DTYPES = {number: np.dtype(name) for name, number in _tasks.BOARD_DTYPES.items()}
# By NumPy's own number of a type, `dtype.num`, so that no dtypes have to be compared. Two of these
# numbers mean int64, because C's long and long long both are.
_NUMBERS = {np.dtype(name).num: number for name, number in _tasks.BOARD_DTYPES.items()}
_NUMBERS |= {np.dtype(c).num: _tasks.BOARD_DTYPES[np.dtype(c).name] for c in "bBhHiIlLqQ"}
_FLOAT64 = np.dtype(np.float64)


class BoardCalls:
    """The small calls of one member."""

    def __init__(self, board: _tasks.Board, rank: int, size: int) -> None:
        self._board = board
        self._rank = rank
        self._size = size

    def make(
        self, call: int, part: tuple[str, str, int, Any], out: Any, deadline_ns: int
    ) -> tuple[int, Any] | None:
        """Publishes the part, and waits for up to WAIT_NS. Returns (mask of the ranks in the
        result, what this rank gets: `out`, or a new array if the result does not fit there), or
        (UNDECIDED, None). None: nothing was published, because the call is not one for the
        board."""
        kind, op, root, values = part
        number = _tasks.BOARD_KINDS.get(kind)
        if number is None:
            return None
        until = min(clock.monotonic_ns() + WAIT_NS, deadline_ns)
        if not values:
            mask = self._board.small(self._rank, call, number, 0, 0, 0, None, None, until)
            return mask, None
        x = values[0]
        dtype = _NUMBERS.get(x.dtype.num)
        code = _tasks.BOARD_OPS.get(op)
        if dtype is None or code is None or x.nbytes > _tasks.BOARD_BYTES_MAX:
            return None
        if not x.flags.c_contiguous or not x.dtype.isnative or x.dtype.metadata is not None:
            return None
        result: Array | None = None
        if kind == "allreduce" or self._rank == root:
            found = _FLOAT64 if op == "mean" and x.dtype.kind in "biu" else _DTYPES[dtype]
            result = out if _fits(out, x.shape, found) else np.empty(x.shape, found)
        about = self._rank, call, number, code, root, dtype
        mask = self._board.small(*about, x, result, until)
        if mask < 0:
            return None
        return (mask, result) if mask else (UNDECIDED, None)

    def part(self, rank: int) -> tuple[str, str, int, list[Array]] | None:
        """The part that a rank has published on the board, in the form of any call's part; None
        while the rank is writing it."""
        found = self._board.part(rank)
        if found is None:
            return None
        kind, op, root, dtype, shape, data, _ = found
        if _KINDS[kind] == "barrier":
            return "barrier", "", 0, []
        array = np.frombuffer(data, _DTYPES[dtype]).reshape(shape)
        return _KINDS[kind], _OPS[op], root, [array]

    def result(self) -> tuple[int, Array | None]:
        """(mask of the ranks in the result, its array) of the latest call, whose commit names no
        object."""
        found = self._board.part(_tasks.MEMBERS_MAX)
        assert found is not None, "nobody writes it before this rank has made its next call"
        kind, op, _, dtype, shape, data, mask = found
        if _KINDS[kind] == "barrier":
            return mask, None
        integers = _OPS[op] == "mean" and _DTYPES[dtype].kind in "biu"
        array = np.frombuffer(data, _FLOAT64 if integers else _DTYPES[dtype]).reshape(shape)
        return mask, array


def _fits(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Can a result of that shape and dtype be written to `out` as it is?"""
    if type(out) is not np.ndarray or out.shape != shape or out.dtype != dtype:
        return False
    return out.flags.c_contiguous and out.flags.writeable
