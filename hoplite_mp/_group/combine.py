"""Combines all parts of a Group's call, at its leader, when they are in one shared memory.

A mistake in one rank's part must be an error on every rank; correct parts are combined only once,
by the leader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _serialize
from hoplite_mp._client.deadlines import FOREVER_NS
from hoplite_mp._common.reduction import reduce_arrays, result_dtype
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._protocol.group_calls import error_of
from hoplite_mp._serialize.contributions import PREFIXES, REDUCTIONS, ROOTED
from hoplite_mp.errors import PeerLostError

if TYPE_CHECKING:
    from hoplite_mp._client.runtime import Runtime

__all__ = ["MISTAKE", "Combiner", "mistake_words"]

MISTAKE = "mistake"  # the kind of a part whose rank could not make its call
MISTAKE_CHARS_MAX = 8000  # of the message of a mistake, for which every host must have room
Array = np.ndarray[Any, np.dtype[Any]]


class Combiner:
    """Combines parts: (kind, op, root, values) by rank. The part of a rank that made a mistake is
    (MISTAKE, message, 0, kind of the error)."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._memory = runtime.memory
        self.name = name

    def combine(self, parts: dict[int, Any], refs: dict[int, ObjectRef[Any]]) -> Any:
        """A ref to the result, or the refs of the parts. If it raises an error, the call fails with
        that on every rank."""
        for part in parts.values():
            if part[0] == MISTAKE:
                raise error_of(part[3], part[1])
        first_rank = min(parts)
        kind, op, root, _ = parts[first_rank]
        for rank, part in parts.items():
            if part[:3] != (kind, op, root):
                raise ValueError(
                    f"ranks {first_rank} and {rank} made different calls: "
                    f"{_describe(parts[first_rank])} and {_describe(part)}"
                )
        if kind in ROOTED and root not in parts:
            raise PeerLostError(f"group {self.name!r}: the root, rank {root}, is lost")
        if kind in REDUCTIONS or kind in PREFIXES:
            arrays = {rank: self._array(part[3][0]) for rank, part in parts.items()}
            if kind == "reduce_scatter" and arrays[first_rank].ndim == 0:
                raise ValueError("reduce_scatter needs arrays of at least one dimension")
            if kind in REDUCTIONS:
                return self._reduced(op, arrays)
            self._result_dtype(op, arrays)  # only a check, because each rank folds what it needs
        if kind in ("broadcast", "scatter"):
            return refs[root]
        return refs

    def _array(self, given: Any) -> Array:
        """An array that is to be reduced, which may be an object of its own."""
        if type(given) is ObjectRef:
            given = self._memory.read(self._memory.local_id(given), FOREVER_NS, False)
        return given  # type: ignore[no-any-return]

    def _result_dtype(self, op: str, arrays: dict[int, Array]) -> np.dtype[Any]:
        """The dtype of their reduction. ValueError: they cannot be reduced with each other."""
        first_rank = min(arrays)
        first = arrays[first_rank]
        for rank, array in arrays.items():
            if array.shape != first.shape or array.dtype != first.dtype:
                raise ValueError(
                    f"rank {first_rank} has shape {first.shape} and dtype {first.dtype}, rank "
                    f"{rank} has shape {array.shape} and dtype {array.dtype}"
                )
        name = _serialize.dtype_name(first.dtype)
        assert name is not None, "others are refused where they are given"
        try:
            return _serialize.named_dtype(result_dtype(op, name))
        except TypeError as error:  # numpy has no such operation for this dtype
            raise ValueError(str(error)) from error

    def _reduced(self, op: str, arrays: dict[int, Array]) -> ObjectRef[Any]:
        dtype = self._result_dtype(op, arrays)
        total = self._memory.empty(arrays[min(arrays)].shape, dtype, "C")
        threads = self._runtime.config.reduce_threads or self._runtime.tasks.cores
        ordered = [np.ascontiguousarray(arrays[rank]) for rank in sorted(arrays)]
        reduce_arrays(op, ordered, total, threads)
        return self._memory.put(total)


def _describe(part: Any) -> str:
    kind, op, root, _ = part
    if op and kind == "allgather":  # of a reduction by a function
        return str(op)
    detail = ", ".join([repr(op)] * bool(op) + [f"root={root}"] * (kind in ROOTED))
    return f"{kind}({detail})"


def mistake_words(text: str) -> str:
    """An error's text for messages: not too long, and without lone surrogates."""
    return text[:MISTAKE_CHARS_MAX].encode(errors="replace").decode()
