"""One member's side of a Group's calls when members live on several hosts.

Why it exists: there is no memory that all share, so a part goes to the node of this host, small
ones as bytes, large ones as objects; what the call results in comes back as one object.
It must never know: who leads, when a call is decided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import serial
from hoplite_mp.client.memory import FOREVER_NS
from hoplite_mp.leading import MISTAKE
from hoplite_mp.protocol.group_calls import PIECE_BYTES_MAX
from hoplite_mp.protocol.local import GroupCall

if TYPE_CHECKING:
    from hoplite_mp.client.runtime import Runtime
    from hoplite_mp.ref import ObjectRef

__all__ = ["HostsMember", "into"]

Array = np.ndarray[Any, np.dtype[Any]]
ROOTED = ("broadcast", "gather")


class HostsMember:
    """Gives parts, takes results."""

    def __init__(self, runtime: Runtime, generation: int, rank: int, size: int) -> None:
        self._channel = runtime.channel
        self._memory = runtime.memory
        self._generation = generation
        self.rank = rank
        self.size = size
        self._own: Array | None = None  # a copy of this rank's part of the latest call

    def give(self, call: int, part: tuple[str, str, int, Any]) -> list[ObjectRef[Any]]:
        """Tells the node of (kind, op, root, value); returns what must live until the commit."""
        kind, op, root, value = part
        refs: list[ObjectRef[Any]] = []
        payloads: list[bytes | None] = []
        oids: list[int] = []
        mistake = ""
        if kind == MISTAKE:
            mistake, op = op, ""
        elif value is not None:
            for one in value if kind == "alltoall" else [value]:
                encoded = serial.encode(one)
                if encoded.nbytes <= PIECE_BYTES_MAX and not encoded.refs:
                    payloads.append(encoded.tobytes())
                    oids.append(0)
                    continue
                refs.append(self._memory.put(one))
                payloads.append(None)
                oids.append(self._memory.local_id(refs[-1]))
        self._channel.tell(
            GroupCall(self._generation, self.rank, call, kind, op, root, payloads, oids, mistake)
        )
        # While the others' parts are on their way: what this rank gets back of its own.
        self._own = None
        if not mistake and (kind == "allgather" or (kind in ROOTED and root == self.rank)):
            self._own = np.array(value)
        elif not mistake and kind == "alltoall":
            self._own = np.array(value[self.rank])
        return refs

    def take(self, kind: str, root: int, data: Any, out: Array | None) -> Any:
        """What a call returns, out of what the node has made of it."""
        if kind in ("allreduce", "reduce"):
            return self._taken(data[0], out)
        if kind == "reduce_scatter":
            if isinstance(data, dict):
                return self._taken(data[self.rank], out)
            total = serial.decode(memoryview(data[0]), make_ref=self._memory.make_ref)
            return into(np.array_split(total, self.size)[self.rank], out)
        own, self._own = self._own, None
        if kind == "broadcast":
            if own is not None:
                return own if out is None else into(own, out)
            return self._taken(data[root, -1], out)
        target = self.rank if kind == "alltoall" else -1
        gathered: list[Any] = [None] * self.size
        for source in range(self.size):
            if source == self.rank and own is not None:
                gathered[source] = own
            elif (source, target) in data:
                gathered[source] = self._taken(data[source, target], None)
        return gathered

    def _taken(self, given: Any, out: Array | None) -> Array:
        """An array of this process's own, or `out` filled: from a payload, from an object that
        several here read, or from a block that is this process's from now on."""
        if isinstance(given, bytes):
            return into(serial.decode(memoryview(given), make_ref=self._memory.make_ref), out)
        if not isinstance(given, tuple):
            return into(self._memory.read(self._memory.local_id(given), FOREVER_NS, False), out)
        payload, nbytes = given
        block: Any = self._memory.client.block(payload, nbytes)
        info = serial.describe_array(memoryview(block))
        if info is None or out is not None:
            make_ref = self._memory.make_ref
            return into(serial.decode(memoryview(block), make_ref=make_ref), out)
        dtype = serial.named_dtype(info.dtype_name)
        order: Any = info.order
        return np.ndarray(info.shape, dtype, block, info.offset, order=order)


def into(value: Array, out: Array | None) -> Array:
    """A writable copy, or `out` filled."""
    if out is None:
        return np.array(value)
    if out.shape != value.shape or out.dtype != value.dtype:
        raise ValueError(
            f"out has shape {out.shape} and dtype {out.dtype}, the result {value.shape} and "
            f"{value.dtype}"
        )
    np.copyto(out, value)
    return out
