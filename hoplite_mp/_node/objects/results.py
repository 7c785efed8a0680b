"""Values and errors that the node itself writes: results of collectives, errors of dead tasks.

A header is finished by its claimant. The node claims the results of every collective, and takes
over the headers that a dead process had claimed. The node never unpickles, so it copies the error
of a source as bytes.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize, _shm, _tasks
from hoplite_mp._common import ids
from hoplite_mp._common.object_states import AWAY, CANCELLED, NODE_SLOT
from hoplite_mp._common.ref import ObjectRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.store.budget import Store
    from hoplite_mp.config import Config

__all__ = ["ResultWriter"]

ERROR_BYTES_MAX = 64 << 10


class ResultWriter:
    """Writes and finishes headers that the node has claimed."""

    def __init__(
        self, client: _shm.NodeClient, tasks: _tasks.Tasks, store: Store, config: Config
    ) -> None:
        self.client = client
        self.tasks = tasks
        self.store = store
        self.config = config
        # Local id of a result -> holds on the refs inside it, kept until the owner of the result's
        # table has its own holds.
        self.untaken: dict[int, list[Any]] = {}
        # Returns the local id of an object of any host, or 0 if it has no header here.
        self.local: Callable[[bytes], int] = self.made_here
        # Returns the ids of all headers here for an object. Its owner may count any of them.
        self.headers: Callable[[bytes], list[int]] = self.all_made_here

    def made_here(self, object_id: bytes) -> int:
        """The local id of an object that was created on this host; 0 for other objects."""
        host_id, oid = ids.unpack_id(object_id)
        return oid if host_id == self.client.host_id else 0

    def all_made_here(self, object_id: bytes) -> list[int]:
        """The result of `made_here` as a list, which is empty instead of containing 0."""
        oid = self.made_here(object_id)
        return [oid] if oid else []

    def hold(self, object_id: bytes) -> Any:
        """A hold on an object of any host. None if the object has no header here or is gone."""
        oid = self.local(object_id)
        return self.client.hold(oid) if oid else None

    def ref(self, oid: int) -> ObjectRef[Any]:
        return ObjectRef(ids.pack_id(self.client.host_id, oid), self.client.hold(oid))

    def pin(self, oid: int) -> memoryview | int | None:
        """The payload of an object, restored from the disk if necessary. The object is not spilled
        while the view exists. Returns None if the object does not fit in memory now or is being
        fetched from another host, and the state (an int) of a header without a value."""
        got = self.client.view(oid)
        if got in AWAY:
            if self.store.restore(oid) is None:
                return None
            got = self.client.view(oid)
        if got in AWAY:
            return None
        return got if isinstance(got, int) else memoryview(got)

    @staticmethod
    def is_gone(got: Any) -> bool:
        """Whether `got`, a result of `pin` or `view`, shows that there will never be a value,
        because the object is deleted or contains an error."""
        if isinstance(got, int):
            return got not in AWAY
        return _serialize.payload_kind(memoryview(got)) == _serialize.ERROR

    def lease(self, nbytes: int, failed: bool = False) -> int | None:
        """Leases a block. failed: the block is for an error, for which some memory is reserved."""
        if failed and nbytes <= self.config.error_bytes_max:
            return self.store.lease_error(nbytes, NODE_SLOT)
        return self.store.lease(nbytes, NODE_SLOT)

    def store_value(
        self,
        oid: int,
        encoded: _serialize.Encoded,
        failed: bool,
        error: BaseException | None = None,
        instead: Callable[[], _serialize.Encoded] | None = None,
    ) -> None:
        """Stores a small payload (None, or an error). A payload that does not fit is replaced by
        the result of `instead`, which must fit in the header, or else by a short form of the error.
        error: the exception, if known."""
        if self.store_if_fits(oid, encoded, failed):
            return
        if instead is not None:
            self.store_value(oid, instead(), False)
            return
        short_form = _serialize.encode_short_error(
            error or MemoryError(), "", _shm.INLINE_BYTES_MAX
        )
        self.store_value(oid, short_form, True)

    def store_if_fits(self, oid: int, encoded: _serialize.Encoded, failed: bool) -> bool:
        """Writes a payload and finishes the header. Returns False and leaves the header unchanged
        if the payload does not fit."""
        refs = bool(encoded.refs)
        payload = 0
        if encoded.nbytes <= _shm.INLINE_BYTES_MAX:
            self.client.bind_inline(
                oid, encoded.head, encoded.buffers, encoded.offsets, encoded.nbytes, refs
            )
        else:
            got = self.lease(encoded.nbytes, failed)
            if got is None:
                return False
            payload = got
            self.client.write(payload, encoded.head, encoded.buffers, encoded.offsets)
            self.client.bind(oid, payload, encoded.nbytes, refs)
        if self._finish(oid, payload, failed) and refs:
            self.untaken[oid] = list(encoded.refs)
        return True

    def store_block(self, oid: int, payload: int, nbytes: int) -> None:
        """Finishes a header with a block that is already written."""
        self.client.bind(oid, payload, nbytes, False)
        self._finish(oid, payload, False)

    def _finish(self, oid: int, payload: int, failed: bool) -> bool:
        """Finishes the header. Frees the block and returns False if the header was cancelled or
        deleted."""
        if self.tasks.finish(oid, failed):
            return True
        if payload:
            self.client.give_back(payload, oid)
        self.tasks.settle(oid)
        return False

    def store_error(self, oid: int, error: BaseException, text: str = "") -> None:
        """Fails the header. text: the traceback of the cause, if a worker raised it."""
        self.store_value(oid, _serialize.encode_error(error, text), True, error)

    def replace_spilled(self, oid: int, error: BaseException) -> None:
        """Makes the error the content of a spilled object whose bytes are lost."""
        data = _serialize.encode_error(error, "").tobytes()
        payload = self.lease(len(data), True)
        if payload is None:  # not even the error fits, so delete the object
            self.client.delete(oid)
            return
        self.client.memory(payload, len(data))[:] = data
        if not self.client.restore(oid, payload, len(data), True):
            self.store.free(payload)

    def raw_error(self, oid: int) -> _serialize.Encoded | None:
        """The error payload of a failed source, or None if the payload is not here, is too large,
        or is not an error."""
        state = self.client.state(oid)
        if state in CANCELLED:
            return _serialize.encode_error(CancelledError(), "")
        got = self.client.view(oid)
        if isinstance(got, int) or len(got) > ERROR_BYTES_MAX:
            return None
        data = bytes(memoryview(got))
        if _serialize.payload_kind(memoryview(data)) != _serialize.ERROR:
            return None
        refs: list[ObjectRef[Any]] = [
            ObjectRef(object_id, self.hold(object_id))
            for object_id in _serialize.read_refs(memoryview(data))
        ]
        return _serialize.Encoded(data, [], [], len(data), refs)

    def poll(self) -> None:
        """Releases the refs in results whose owners have taken their own holds."""
        for oid in list(self.untaken):
            if self.tasks.taken(oid):
                del self.untaken[oid]
