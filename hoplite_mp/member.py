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


class HostsMember:
    """Gives parts, takes results."""

    def __init__(self, runtime: Runtime, generation: int, rank: int, size: int) -> None:
        self._channel = runtime.channel
        self._memory = runtime.memory
        self._generation = generation
        self.rank = rank
        self.size = size

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
        return refs

    def take(self, kind: str, root: int, data: Any, out: Array | None) -> Any:
        """What a call returns, out of what the node has made of it."""
        if kind in ("allreduce", "reduce"):
            return into(self._value(data[0]), out)
        if kind == "reduce_scatter":
            if isinstance(data, dict):
                return into(self._value(data[self.rank]), out)
            return into(np.array_split(self._value(data[0]), self.size)[self.rank], out)
        if kind == "broadcast":
            return into(self._value(data[root, -1]), out)
        target = self.rank if kind == "alltoall" else -1
        gathered: list[Any] = [None] * self.size
        for source in range(self.size):
            if (source, target) in data:
                gathered[source] = into(self._value(data[source, target]), None)
        return gathered

    def _value(self, given: bytes | ObjectRef[Any]) -> Any:
        if isinstance(given, bytes):
            return serial.decode(memoryview(given), make_ref=self._memory.make_ref)
        return self._memory.read(self._memory.local_id(given), FOREVER_NS, False)


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
