"""What the leader of a Group's call makes of all parts, when they are in one shared memory.

Why it exists: whatever is wrong with one rank's part is every rank's error; what is right is added
up once, by whoever leads.
It must never know: boards, when a call begins or is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import serial
from hoplite_mp.contributions import PREFIXES, REDUCTIONS, ROOTED
from hoplite_mp.errors import PeerLostError
from hoplite_mp.protocol.group_calls import error_of
from hoplite_mp.reduction import reduce_arrays, result_dtype

if TYPE_CHECKING:
    from hoplite_mp.client.runtime import Runtime
    from hoplite_mp.ref import ObjectRef

__all__ = ["MISTAKE", "Leading"]

MISTAKE = "mistake"  # the kind of a part whose rank could not make its call
Array = np.ndarray[Any, np.dtype[Any]]


class Leading:
    """Parts are (kind, op, root, values) by rank; those of a mistake (MISTAKE, message, 0, kind of
    the error)."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._memory = runtime.memory
        self.name = name

    def combine(self, parts: dict[int, Any], refs: dict[int, ObjectRef[Any]]) -> Any:
        """A ref to the result, or the refs of the parts. Whatever it raises, the call fails with
        that for everybody."""
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
        if kind == "reduce_scatter" and parts[first_rank][3][0].ndim == 0:
            raise ValueError("reduce_scatter needs arrays of at least one dimension")
        if kind in REDUCTIONS:
            return self._reduced(op, {rank: part[3][0] for rank, part in parts.items()})
        if kind in PREFIXES:  # each rank folds those that it needs
            self._result_dtype(op, {rank: part[3][0] for rank, part in parts.items()})
        if kind in ("broadcast", "scatter"):
            return refs[root]
        return refs

    def _result_dtype(self, op: str, arrays: dict[int, Array]) -> np.dtype[Any]:
        """ValueError: they cannot be reduced with each other."""
        first_rank = min(arrays)
        first = arrays[first_rank]
        for rank, array in arrays.items():
            if array.shape != first.shape or array.dtype != first.dtype:
                raise ValueError(
                    f"rank {first_rank} has shape {first.shape} and dtype {first.dtype}, rank "
                    f"{rank} has shape {array.shape} and dtype {array.dtype}"
                )
        name = serial.dtype_name(first.dtype)
        assert name is not None, "others are refused where they are given"
        try:
            return serial.named_dtype(result_dtype(op, name))
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
    detail = ", ".join([repr(op)] * bool(op) + [f"root={root}"] * (kind in ROOTED))
    return f"{kind}({detail})"
