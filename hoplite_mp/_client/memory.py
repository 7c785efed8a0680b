"""One process's access to the store: put, get, and arrays allocated in the store.

`put` and `get` serialise a value, copy it at most once, and update a few words in shared memory.
For small objects, no other process is involved. The node provides large blocks, spilled objects,
and spans (ranges of the store from which a process allocates small blocks itself).
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Container, Iterable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _serialize, _shm, errors
from hoplite_mp._client.channel import take_over
from hoplite_mp._common import clock, ids
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.machine_limits import format_bytes
from hoplite_mp._common.object_states import CANCELLED, PENDING, STATE, is_cancelled
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._common.signals import is_interruption
from hoplite_mp._protocol.local import (
    ON_ITS_WAY,
    DropForeign,
    Import,
    Lease,
    LeaseSpan,
    Reply,
    Restore,
    ReturnSpans,
)
from hoplite_mp._serialize.contributions import shortened
from hoplite_mp.errors import (
    ClosedError,
    HopliteError,
    HopliteTimeoutError,
    ObjectLostError,
    ReduceError,
    StoreFullError,
    TaskError,
)

if TYPE_CHECKING:
    from hoplite_mp._client.channel import Channel
    from hoplite_mp.config import Config

__all__ = [
    "FORKED",
    "POPULATE_BYTES_MIN",
    "Memory",
    "PageMap",
    "checked_order",
    "freeze",
    "whole",
]


POPULATE_BYTES_MIN = 1 << 20  # smaller payloads are always written through a mapping
UNIT_BYTES = 1 << 20


class PageMap:
    """One process's mappings of the store, in units of 1 MiB.

    The first write to a mapped page causes a page fault, so mapping pages is worthwhile only if
    they are written repeatedly. The first large write to a unit therefore uses the file, and the
    second creates a mapping.
    """

    def __init__(self, client: _shm.Client) -> None:
        self._client = client
        self.units: set[int] = set()
        self._written: set[int] = set()

    def add(self, payload: int, nbytes: int) -> None:
        """Maps these bytes of the store, unless they are mapped already."""
        units = _units(payload, nbytes)
        if not self.units.issuperset(units):
            self._client.populate(payload, nbytes)
            self.units.update(units)

    def serves(self, payload: int, nbytes: int) -> bool:
        """Whether a write to these bytes should use the mapping. The second write creates it."""
        if nbytes < POPULATE_BYTES_MIN:
            return True
        units = _units(payload, nbytes)
        if self.units.issuperset(units):
            return True
        if self._written.issuperset(units):
            self.add(payload, nbytes)
            return True
        self._written.update(units)
        return False


def _units(payload: int, nbytes: int) -> range:
    return range(payload // UNIT_BYTES, (payload + nbytes - 1) // UNIT_BYTES + 1)


def checked_order(order: str) -> Any:
    """Returns `order`. Raises ValueError unless it is "C" or "F"."""
    if order not in ("C", "F"):
        raise ValueError(f"order must be 'C' or 'F', not {order!r}")
    return order


def freeze(array: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Makes the array read-only, and also every array that it is a view of."""
    base: Any = array
    while type(base) is np.ndarray:
        base.flags.writeable = False
        base = base.base


PREFIX_BIG = 4096 - _shm.BLOCK_HEAD_BYTES  # c.empty()'s array begins on a page boundary
PREFIX_SMALL = 256
SPILLING_POLL_S = 0.001
SIZE_BYTES_MAX = 1 << 62
FORKED = (
    "this process was forked from the process that opened this cluster, and cannot use it: open a "
    "Cluster in this process"
)

Array = np.ndarray[Any, np.dtype[Any]]
WaitOne = Callable[[int, int], None]


def whole(value: Any) -> int | None:
    """An integer of any type (a NumPy integer, a 0-d array) as an int; None for any other value,
    including bool."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


class Memory:
    """The store, as used by one process."""

    def __init__(self, client: _shm.Client, channel: Channel, config: Config) -> None:
        self.client = client
        self.channel = channel
        self.config = config
        self.wait_one: WaitOne = lambda oid, deadline: None
        self.wait_moved: Callable[[int, int], bool] = lambda oid, deadline: True
        # Finds large arrays that functions capture.
        self.scan: Callable[[], _serialize.Scan] | None = None
        self.drain: Callable[[], None] = lambda: None  # drops the objects of finished tasks
        self.pending: Container[int] = ()  # unprocessed results for this process
        self.ended: Callable[[int], None] = lambda oid: None  # processes one such result
        # Called when the failure of a task has been read, or another process may read it.
        self.failure_read: Callable[[int], None] = lambda oid: None
        # The error for all pending objects, set when the node is lost.
        self.lost: BaseException | None = None
        # Waits for a limited time until the thread that watches the node has set `lost`.
        self.await_lost: Callable[[], None] = _nothing
        # `client.printed` changes when a worker prints. `printed` is its value when lines were last
        # printed here.
        self.printed = client.printed
        self.print_lines: Callable[[float | None], None] | None = None  # only in drivers
        self.attached = 0  # number of refs that were unpickled outside `decode`
        self.inner: dict[int, list[ObjectRef[Any]]] = {}  # own object -> refs inside it
        # Whether a task's exception such as SystemExit is raised unchanged, instead of as a
        # TaskError.
        self.raises_exits = False
        self.mapped = PageMap(client)
        # Payloads of the blocks that contain results of Group calls. Their owner may write to them.
        self.results: set[int] = set()

    # -- refs ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises ClosedError after close, and in a forked child."""
        if not self.client.usable:
            raise ClosedError(FORKED if self.client.forked else "this cluster is closed")

    def check_lost(self) -> None:
        """Like `check`, but also raises the error for pending objects if the node is lost."""
        if self.lost is not None or not self.client.usable:
            self.check()
            raise self.lost_again()

    def lost_again(self) -> BaseException:
        """A copy of the error that all pending objects have failed with, so that each raise has its
        own traceback."""
        assert self.lost is not None
        return type(self.lost)(*self.lost.args)

    def show_printed(self, deadline: int) -> None:
        """Prints the workers' output so far, waiting at most until the deadline. Called before a
        result is returned if `client.printed` has changed. Does nothing in an event loop, because
        it blocks."""
        seen = self.client.printed
        if self.print_lines is not None:
            loops: Any = sys.modules.get("asyncio.events")
            if loops is not None and loops._get_running_loop() is not None:
                return
            left = None if deadline == FOREVER_NS else (deadline - clock.monotonic_ns()) / 1e9
            self.print_lines(left)
        self.printed = seen  # set last, because other threads must wait for these lines, too

    def node_gone(self) -> BaseException:
        """The error for a call that has found that the node has stopped."""
        self.check()
        self.await_lost()
        if self.lost is not None:
            return self.lost_again()
        return errors.NodeLostError("the node of this host has ended")

    def public_id(self, oid: int) -> bytes:
        return ids.pack_id(self.client.host_id, oid)

    def _named(self, oid: int) -> ObjectRef[Any]:
        """A ref without a hold, which identifies the object in messages."""
        return ObjectRef(self.public_id(oid))

    def local_id(self, ref: ObjectRef[Any]) -> int:
        host_id, oid = ids.unpack_whole(ref._id)
        if host_id != self.client.host_id:
            return self._local_id_of_foreign(ref)
        return oid

    def _local_id_of_foreign(self, ref: ObjectRef[Any]) -> int:
        """The local id of another host's object, valid as long as the ref's hold exists."""
        hold: Any = ref._hold
        if type(hold) is not _shm.Hold or hold.host_id != self.client.host_id:
            raise ObjectLostError(
                f"{ref} is gone, or belongs to another cluster or to a cluster that has ended"
            )
        return hold.oid

    def own_ref(self, oid: int) -> ObjectRef[Any]:
        """A ref that takes over the hold created by `client.new`."""
        return ObjectRef(self.public_id(oid), self.client.hold(oid, False))

    def make_ref(self, object_id: bytes) -> ObjectRef[Any]:
        """A ref with a new hold, or without a hold if the object is gone."""
        host_id, oid = ids.unpack_id(object_id)
        hold = None
        if host_id == self.client.host_id:
            if self.client.usable:
                hold = self.client.hold(oid)
        elif self.client.usable:
            hold = self._import(object_id)
        return ObjectRef(object_id, hold)

    def _import(self, object_id: bytes) -> Any:
        """A hold on another host's object; None if the object is gone, or there are no other
        hosts."""
        return take_over(self, Import([object_id]), lambda oids: oids[0])

    # -- writing -------------------------------------------------------------------------------

    def put(self, value: Any) -> ObjectRef[Any]:
        """Stores a value, and returns a ref to the sealed object."""
        self.check()
        if self.client.news():
            self.collect()
        if type(value) is np.ndarray:
            block = self.block_to_publish(value)
            if block is not None:
                return self._publish_block(value, block)
        return self.put_encoded(_serialize.encode(value, self.scan))

    def put_encoded(self, encoded: _serialize.Encoded, held: bool = False) -> ObjectRef[Any]:
        """Stores an encoded value. held: whether the caller keeps the refs inside the object as
        long as the object may be read."""
        refs = bool(encoded.refs)
        if encoded.nbytes <= _shm.INLINE_BYTES_MAX:
            hold = self.client.put_inline(
                encoded.head, encoded.buffers, encoded.offsets, encoded.nbytes, refs
            )
        else:
            hold = self.client.put(self.write(encoded), encoded.nbytes, refs)
        oid = hold.oid
        if refs and not held:
            self.inner[oid] = list(encoded.refs)
            self.note_passed_on(encoded.refs)
        return ObjectRef(self.public_id(oid), hold)

    def put_error(self, encoded: _serialize.Encoded) -> ObjectRef[Any]:
        """Like `put_encoded`, for an error of up to `error_bytes_max` bytes. Does not wait for
        space, but may use the space reserved for errors. Raises StoreFullError if there is none."""
        if encoded.nbytes <= _shm.INLINE_BYTES_MAX or encoded.refs:
            return self.put_encoded(encoded)
        hold = self.client.put(self.write(encoded, error=True), encoded.nbytes, False)
        return ObjectRef(self.public_id(hold.oid), hold)

    def put_text(self, values: tuple[Any, ...], place: int) -> ObjectRef[Any]:
        """Stores plain values without waiting for space. The value at index `place` is a string. If
        even the space reserved for errors is full, the string is shortened until all values fit
        into the header, because an error that reports a full store must not need space itself."""
        encoded = _serialize.encode(values)
        if _shm.INLINE_BYTES_MAX < encoded.nbytes <= self.config.error_bytes_max:
            with contextlib.suppress(StoreFullError):
                return self.put_error(encoded)
        if encoded.nbytes > _shm.INLINE_BYTES_MAX:
            encoded = shortened(values, place)
        return self.put_encoded(encoded)

    def write(
        self, encoded: _serialize.Encoded, error: bool = False, what: str = "put"
    ) -> _shm.Lease:
        """Writes the payload into a new LEASED block. error: whether the payload is an error, which
        may use the space reserved for errors. what: the operation's name, for error messages."""
        if error and encoded.nbytes <= self.config.error_bytes_max:
            lease = self.allocate_error(encoded.nbytes)
        else:
            lease = self.allocate(encoded.nbytes, written=True, what=what)
        mapped = self.mapped.serves(lease.payload, encoded.nbytes)
        write = self.client.write if mapped else self.client.write_cold
        write(lease.payload, encoded.head, encoded.buffers, encoded.offsets)
        return lease

    def allocate(self, nbytes: int, written: bool = False, what: str = "put") -> _shm.Lease:
        """A LEASED block: one that this process owns and that is not an object yet. If it never
        becomes an object, the block is returned to the node when the last reference to the Lease is
        dropped. Raises StoreFullError if there is no space within `put_wait_s`. written: whether
        the caller maps and writes the pages; otherwise large blocks are mapped here."""
        lease: _shm.Lease | None
        if nbytes <= self.config.small_object_bytes_max:
            lease = self.client.lease_small(nbytes)
            if lease is not None:
                return lease
            self.collect()
            lease = self.client.lease_small(nbytes)
            deadline = clock.monotonic() + self.config.put_wait_s
            while lease is None:
                self._ask(LeaseSpan(), nbytes, deadline, what)
                # Spilling may have made space in older spans.
                lease = self.client.lease_small(nbytes)
                if lease is None:
                    self.give_empty_spans()
            return lease
        self.drain()
        self.collect()
        lease = None
        deadline = clock.monotonic() + self.config.put_wait_s
        while lease is None:
            lease = self._ask(Lease(nbytes), nbytes, deadline, what)
        if nbytes >= POPULATE_BYTES_MIN and not written:
            self.mapped.add(lease.payload, nbytes)
        return lease

    def preallocate(self, nbytes: int) -> _shm.Lease | None:
        """A block of more than `small_object_bytes_max` bytes for later use; None if other objects
        need the space."""
        reply: Reply | _shm.Lease = self.channel.call(
            Lease(nbytes, preallocated=True), self.client.take_lease
        )
        if isinstance(reply, Reply):
            return None
        if nbytes >= POPULATE_BYTES_MIN:
            self.mapped.add(reply.payload, nbytes)
        return reply

    def allocate_error(self, nbytes: int) -> _shm.Lease:
        """Like `allocate`, for an error. Does not wait for space, but may use the space reserved
        for errors."""
        if nbytes <= self.config.small_object_bytes_max:
            for make_space in (self.collect, self._ask_for_span):
                lease = self.client.lease_small(nbytes)
                if lease is not None:
                    return lease
                make_space()
            lease = self.client.lease_small(nbytes)
            if lease is not None:
                return lease
        reply: Reply | _shm.Lease = self.channel.call(Lease(nbytes, True), self.client.take_lease)
        if isinstance(reply, Reply):
            raise StoreFullError(f"an error of {format_bytes(nbytes)}: {reply.error}")
        return reply

    def _ask_for_span(self) -> None:
        """Adds a span to this process's spans if the store has one immediately. Many small errors
        then need only one request."""
        self.channel.call(LeaseSpan(error=True), self.client.take_span)

    def _ask(
        self, ask: Lease | LeaseSpan, nbytes: int, deadline: float, what: str
    ) -> _shm.Lease | None:
        """Requests a block or a span from the node. Returns the block, or adds the span to this
        process's spans and returns None. Also returns None if there is no space yet. After None,
        the caller should try again."""
        take = self.client.take_lease if isinstance(ask, Lease) else self.client.take_span
        reply: Reply | _shm.Lease | None = self.channel.call(ask, take)
        if not isinstance(reply, Reply):
            return reply
        if reply.value == "never" or clock.monotonic() >= deadline:
            raise StoreFullError(f"{what} of {format_bytes(nbytes)}: {reply.error}")
        self.drain()
        self.collect()
        if isinstance(ask, Lease):
            self.give_empty_spans()
        return None

    def give_empty_spans(self) -> None:
        spans = self.client.take_empty_spans()
        try:
            if spans:
                self.channel.tell(ReturnSpans(spans))
        except BaseException:  # the request was not sent, for example because of Ctrl-C
            list(map(self.client.add_span, spans))
            raise

    def collect(self) -> None:
        """Frees objects without holders, and drops the refs inside them."""
        for oid in self.client.collect():
            self.inner.pop(oid, None)

    def delete(self, ref: ObjectRef[Any]) -> None:
        """Deletes an object for all processes. Waits while the node is spilling the object."""
        oid = self.local_id(ref)
        if ids.unpack_id(ref._id)[0] != self.client.host_id:
            self.channel.tell(DropForeign(oid))
        while self.client.delete(oid) < 0:
            self.check_lost()  # a lost node would never finish spilling
            clock.sleep(SPILLING_POLL_S)

    # -- arrays made in the store --------------------------------------------------------------

    def empty(self, shape: Any, dtype: Any, order: str) -> Array:
        """A writable array in a LEASED block."""
        self.check()
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise TypeError(f"an array of {kind} contains Python objects: the store cannot hold it")
        try:
            dims = tuple(map(operator.index, shape if hasattr(shape, "__iter__") else (shape,)))
        except TypeError:
            raise TypeError(
                f"shape={shape!r:.80}: it must be an integer or a sequence of integers"
            ) from None
        if any(n < 0 for n in dims):
            raise ValueError(f"negative dimensions are not allowed: {dims}")
        nbytes = kind.itemsize
        for n in dims:
            nbytes *= n
        if nbytes >= SIZE_BYTES_MAX:
            raise StoreFullError(f"empty of {nbytes} bytes: no store can be that large")
        prefix = PREFIX_BIG if nbytes > self.config.small_object_bytes_max else PREFIX_SMALL
        block: Any = self.client.block_of(
            self.allocate(prefix + nbytes, what="empty"), prefix + nbytes
        )
        block.prefix = prefix
        self.results.discard(block.payload)
        return np.ndarray(dims, kind, buffer=block, offset=prefix, order=checked_order(order))

    def private_copy(self, part: memoryview) -> Any:
        """A writable copy of a large buffer. The copy is in a block of the store, or in ordinary
        memory if the store has no space."""
        nbytes = part.nbytes
        if not self.client.usable:
            return bytearray(part)
        lease = self.channel.call(Lease(PREFIX_BIG + nbytes), self.client.take_lease)
        if isinstance(lease, Reply):  # the store has no space
            return bytearray(part)
        payload = lease.payload
        self.mapped.add(payload, PREFIX_BIG + nbytes)
        block = self.client.block_of(lease, PREFIX_BIG + nbytes)
        self.client.write(payload, b"", [part], [PREFIX_BIG])
        return memoryview(block)[PREFIX_BIG:]

    def block_of(self, array: Array) -> _shm.Block | None:
        """The LEASED block that the array fills completely; None if there is no such block, or it
        has become an object."""
        base: Any = array.base
        while type(base) is np.ndarray:
            base = base.base
        if type(base) is not _shm.Block or base.published:
            return None
        if not base.prefix or len(base) != base.prefix + array.nbytes:
            return None  # only a part of the array
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            return None
        start = self.client.store_address + base.payload + base.prefix
        return base if array.__array_interface__["data"][0] == start else None

    def block_to_publish(self, array: Array) -> _shm.Block | None:
        """The block that this array fills, if `put` may turn the block into an object, as it may
        for an array from `empty`. The result of a Group call is copied, because its owner may still
        write to the block."""
        block = self.block_of(array)
        return None if block is None or block.payload in self.results else block

    def block_head(self, array: Array, block: _shm.Block) -> bytes | None:
        """The payload's head, which is written before the array; None if the head does not fit."""
        prefix = len(block) - array.nbytes
        order = "C" if array.flags.c_contiguous else "F"
        try:
            head, _, _ = _serialize.encode_array_head(array.dtype, array.shape, order, None, prefix)
        except (TypeError, ValueError):
            return None
        return head if len(head) <= prefix else None

    def _publish_block(self, array: Array, block: _shm.Block) -> ObjectRef[Any]:
        head = self.block_head(array, block)
        if head is None:
            return self.put_encoded(_serialize.encode(array))
        self.client.write(block.payload, head, [], [])
        hold = block.publish()
        freeze(array)
        return ObjectRef(self.public_id(hold.oid), hold)

    # -- reading -------------------------------------------------------------------------------

    def payload(self, oid: int, deadline: int) -> memoryview:
        """The payload of a finished object (a value or an error), pinned while it is used."""
        while True:
            self.check()
            got = self.client.view(oid)
            if not isinstance(got, int):
                return memoryview(got)
            if got in PENDING:
                self.wait_one(oid, deadline)
            # SPILLING counts as done. This state ends when the node has written the bytes.
            elif got == STATE["SPILLING"]:
                if clock.monotonic_ns() >= deadline:
                    raise HopliteTimeoutError("the object is being written to the spill file")
                self.check_lost()
                clock.sleep(SPILLING_POLL_S)
            elif got == STATE["SPILLED"]:
                self._restore(oid, deadline)
            elif got in CANCELLED:
                if is_cancelled(self.client, oid, got):
                    raise CancelledError
                raise ObjectLostError(f"{self._named(oid)} was deleted before it was ready")
            elif got == STATE["DELETED"]:
                raise ObjectLostError(f"{self._named(oid)} was deleted")
            else:
                raise ObjectLostError(f"{self._named(oid)} is gone: no process held a ref to it")

    def _restore(self, oid: int, deadline: int) -> None:
        patience_ns = int(self.config.put_wait_s * 1e9)
        limit = min(deadline, clock.monotonic_ns() + patience_ns)
        while True:
            reply = self.channel.call(Restore(oid))
            if not reply.full:
                limit = min(deadline, clock.monotonic_ns() + patience_ns)
                if reply.value != ON_ITS_WAY or self.wait_moved(oid, limit):
                    return
                if clock.monotonic_ns() >= deadline:
                    raise HopliteTimeoutError("the object is being copied from another host")
                continue  # request the object again
            if deadline == 0 or clock.monotonic_ns() >= deadline:
                raise HopliteTimeoutError("the object is being read back from the spill file")
            if clock.monotonic_ns() >= limit:
                raise StoreFullError(f"get of a spilled object: {reply.error}")
            self.collect()
            self.give_empty_spans()

    def read(self, oid: int, deadline: int, writable: bool) -> Any:
        """Returns the object's value, or raises its error."""
        mem = self.payload(oid, deadline)
        if self.client.printed != self.printed:
            self.show_printed(deadline)
        failed = _serialize.payload_kind(mem) == _serialize.ERROR
        if failed:  # before `ended`: another thread may record the Future's failure
            self.failure_read(oid)
        if oid in self.pending:  # releases the task's holds now instead of at the next `drain`
            self.ended(oid)
        if failed:
            raise self.failure(mem)
        try:
            return _serialize.decode(mem, make_ref=self.make_ref, writable=writable)
        except BaseException as error:
            made = self._value_not_loaded(error, lambda: f"the value of {self._named(oid)}")
            try:
                if made is error:
                    raise
                raise made from _serialize.cause_of(made)
            finally:
                del made  # no reference cycle through the traceback

    def decode_value(
        self, mem: memoryview, what: str | Callable[[], str], writable: bool = False
    ) -> Any:
        """Like `_serialize.decode`. what: the value's name, for the error that is raised if the
        value's own code fails."""
        try:
            return _serialize.decode(mem, make_ref=self.make_ref, writable=writable)
        except BaseException as error:
            made = self._value_not_loaded(error, what)
            try:
                if made is error:
                    raise
                raise made from _serialize.cause_of(made)
            finally:
                del made  # no reference cycle through the traceback

    def _value_not_loaded(
        self, error: BaseException, what: str | Callable[[], str]
    ) -> BaseException:
        """The error to raise for a value that could not be loaded; `error` itself if it is an
        interruption of the call."""
        if isinstance(error, (KeyboardInterrupt, MemoryError)) or is_interruption(error):
            return error
        return self.not_loaded(error, what if isinstance(what, str) else what())

    def call_not_loaded(self, error: BaseException, what: str) -> BaseException:
        """The error to raise if a call's function or arguments could not be loaded. Errors raised
        by reading a ref's value, and interruptions of the call, are returned unchanged."""
        if isinstance(error, (KeyboardInterrupt, MemoryError)) or is_interruption(error):
            return error
        frame = _serialize.get_traceback(error)
        while frame is not None:
            if frame.tb_frame.f_code is Memory.read.__code__:
                return error
            frame = frame.tb_next
        return self.not_loaded(error, what)

    def not_loaded(self, error: BaseException, what: str) -> BaseException:
        """The error for a value that could not be loaded because its own code raised `error`."""
        kind = type(error)
        if issubclass(kind, HopliteError):
            return error
        text = f"{what} could not be loaded: {kind.__qualname__}: {_serialize.text_of(error)}"
        text = text.removesuffix(": ")
        if not issubclass(kind, _serialize.EXITS):
            return _serialize.reworded(error, text)
        if self.raises_exits:
            return error
        made = TaskError(text)
        made.__cause__ = error
        return made

    def error(self, oid: int, deadline: int) -> BaseException | None:
        """The error that the object has failed with; None if it has a value."""
        mem = self.payload(oid, deadline)
        if _serialize.payload_kind(mem) != _serialize.ERROR:
            return None
        self.failure_read(oid)
        return self.failure(mem)

    def note_passed_on(self, refs: Iterable[ObjectRef[Any]]) -> None:
        """Records that other processes may now read these objects, including the failures of their
        tasks."""
        for ref in refs:
            with contextlib.suppress(ObjectLostError):  # the readers will get this error, too
                self.failure_read(self.local_id(ref))

    def failure(self, mem: memoryview) -> BaseException:
        """The exception in an error payload. For a ReduceError, also reads the error of its source
        and sets it as the cause. The node cannot do so, because it never unpickles."""
        error = self.to_raise(_serialize.decode_error(mem, self.make_ref))
        source = getattr(error, "source", None) if type(error) is ReduceError else None
        if isinstance(source, ObjectRef):
            try:
                cause = self.error(self.local_id(source), 0)
            except Exception as lost:  # cancelled, deleted or gone
                cause = lost
            if cause is not None:
                error.__cause__ = cause
        return error

    def to_raise(self, error: BaseException) -> BaseException:
        """The exception to raise in the program for a task's exception."""
        if issubclass(type(error), _serialize.EXITS) and not self.raises_exits:
            return _serialize.exit_error(error)
        return error

    def inner_refs(self, oid: int) -> list[ObjectRef[Any]]:
        """The refs inside a sealed object, each with a hold by this process."""
        try:
            mem = self.payload(oid, FOREVER_NS)  # restores a spilled object
        except (CancelledError, ObjectLostError):
            return []
        return [self.make_ref(object_id) for object_id in _serialize.read_refs(mem)]

    def contributors(self, ref: ObjectRef[Any]) -> tuple[int, ...] | None:
        """The indices of the sources that were reduced into the result; None if the object is not
        ready, or is not a reduction's result."""
        oid = self.local_id(ref)
        got = self.client.view(oid)
        if isinstance(got, int) and got != STATE["SPILLED"]:
            return None
        mem = self.payload(oid, FOREVER_NS) if isinstance(got, int) else memoryview(got)
        return (
            None
            if _serialize.payload_kind(mem) == _serialize.ERROR
            else _serialize.read_contributors(mem)
        )


def _nothing() -> None:
    pass
