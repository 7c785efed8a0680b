"""The calls of a Cluster that store, read and drop objects.

Why it exists: put, get and wait are what every program begins with; they check their arguments and
hand on to the memory of this process.
It must never know: how bytes are stored, where tasks run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hoplite_mp.client.futures import Future
from hoplite_mp.client.memory import STATE, deadline_ns
from hoplite_mp.collectives import as_refs, keep_copies
from hoplite_mp.nesting import NESTS, as_ref, in_nest
from hoplite_mp.nodes import node_id, other_places
from hoplite_mp.protocol.local import Locate
from hoplite_mp.ref import ObjectRef

if TYPE_CHECKING:
    from hoplite_mp.client.runtime import Runtime

__all__ = ["ObjectCalls"]

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]
_HELD = (STATE["SEALED"], STATE["SPILLING"], STATE["SPILLED"])


class ObjectCalls:
    """The part of `Cluster` that is about objects."""

    _runtime: Runtime

    def put(self, value: T, copies: int = 1) -> ObjectRef[T]:
        """Stores an immutable value: arrays and other buffers are copied in once, out never.

        Waits up to Config.put_wait_s for room, then StoreFullError; at once for more than the
        limit. An array of `empty()` is published without a copy and becomes read-only.

        copies: on how many nodes it is then held, this one among them, so that it outlives the
        death of one less; it returns when all have it, others in place of those that die meanwhile.
        ValueError: there are fewer nodes. A copy that is lost later is not replaced.
        """
        to = other_places(self._runtime, copies)
        ref = self._runtime.memory.put(value)
        keep_copies(self._runtime, ref, copies, to)
        return ref

    def empty(self, shape: Any, dtype: Any = float, order: str = "C") -> Array:
        """A writable array inside the store, uninitialised. `put(a)`, or returning it from a task,
        publishes it without a copy and makes it read-only; never published, it is freed with the
        last array over it. Views of it that were made before stay writable: do not use them."""
        return self._runtime.memory.empty(shape, dtype, order)

    def get(self, refs: Any, timeout: float | None = None, copy: bool = False) -> Any:
        """The value of a ref or Future, or a list for several, in order; read-only. Any nesting of
        list, tuple and dict (these very types) gives the same nesting of values.

        Raises the first failure in that order: the task's own exception, CancelledError,
        ObjectLostError, ReduceError; HopliteTimeoutError after `timeout` seconds (0 polls).
        copy=True: writable copies.
        """
        memory = self._runtime.memory
        memory.check()
        deadline = deadline_ns(timeout)

        def read(ref: ObjectRef[Any]) -> Any:
            return memory.read(memory.local_id(ref), deadline, copy)

        if isinstance(refs, (ObjectRef, Future)):
            (ref,) = as_refs(refs)
            return read(ref)
        if type(refs) not in NESTS:
            return [read(ref) for ref in as_refs(refs)]
        return in_nest(in_nest(refs, as_ref), read)  # all are refs before anything is waited for

    def wait(
        self, refs: Any, num: int | None = None, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        """(done, not done), each in the given order; returns when `num` (default: all) are done,
        ready or failed, or at the timeout."""
        memory, submitter = self._runtime.memory, self._runtime.submitter
        memory.check()
        given = [refs] if isinstance(refs, (ObjectRef, Future)) else list(refs)
        oids = [memory.local_id(ref) for ref in as_refs(given)]
        wanted = len(oids) if num is None else num
        if not 0 <= wanted <= len(oids):
            raise ValueError(f"num={num!r}: it must be from 0 to the number of refs, {len(oids)}")
        if wanted:
            submitter.waiting.wait_many(oids, wanted, deadline_ns(timeout))
        flags = [submitter.tasks.done(oid) for oid in oids]
        done = [ref for ref, flag in zip(given, flags, strict=True) if flag]
        return done, [ref for ref, flag in zip(given, flags, strict=True) if not flag]

    def delete(self, refs: Any) -> None:
        """Drops objects now: later gets fail with ObjectLostError. Arrays in use keep their memory;
        tasks and reductions that still need a ref see a failed source."""
        memory = self._runtime.memory
        memory.check()
        for ref in as_refs(refs):
            memory.delete(ref)

    def locations(self, ref: Any) -> list[str]:
        """Ids of the nodes that hold the whole value."""
        memory = self._runtime.memory
        memory.check()
        (one,) = as_refs(ref)
        oid = memory.local_id(one)
        if memory.client.state(oid) not in _HELD:
            return []
        return [node_id(number) for number in self._runtime.channel.call(Locate(oid)).value]
