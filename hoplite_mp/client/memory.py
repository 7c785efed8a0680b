"""A process's face of the store: values in, values out, arrays made in place.

Why it exists: put and get are serialisation, one copy at most, and a few words; this file joins the
three. Small objects need nobody; for big blocks, spilled objects and fresh spans the node is asked.
It must never know: tasks, futures, plans.
"""

from __future__ import annotations

import numbers
import time
from collections.abc import Callable, Container
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _shm, ids, serial
from hoplite_mp.client.array_marks import checked_order, freeze
from hoplite_mp.client.mapped import POPULATE_BYTES_MIN, Mapped
from hoplite_mp.client.taking import take_over
from hoplite_mp.contributions import shortened
from hoplite_mp.errors import (
    ClosedError,
    HopliteTimeoutError,
    ObjectLostError,
    ReduceError,
    StoreFullError,
)
from hoplite_mp.headers import CANCELLED, PENDING, STATE, is_cancelled
from hoplite_mp.protocol.local import (
    ON_ITS_WAY,
    DropForeign,
    GiveSpans,
    Import,
    Lease,
    LeaseSpan,
    Reply,
    Restore,
)
from hoplite_mp.ref import ObjectRef

if TYPE_CHECKING:
    from hoplite_mp.client.channel import Channel
    from hoplite_mp.config import Config

__all__ = [
    "FOREVER_NS",
    "Memory",
    "check_timeout",
    "deadline_ns",
    "format_bytes",
    "whole",
]

FOREVER_NS = 1 << 62
PREFIX_BIG = 4096 - _shm.BLOCK_HEAD_BYTES  # the array of c.empty() begins on a page
PREFIX_SMALL = 256
SPILLING_LOOK_S = 0.001
SIZE_BYTES_MAX = 1 << 62

Array = np.ndarray[Any, np.dtype[Any]]
WaitOne = Callable[[int, int], None]


def deadline_ns(timeout: float | None) -> int:
    """Seconds from now as a point of the monotonic clock; None: never; <= 0: a poll."""
    check_timeout(timeout)
    if timeout is None:
        return FOREVER_NS
    if timeout <= 0:
        return 0
    return time.monotonic_ns() + int(min(timeout, 1e9) * 1e9)


def check_timeout(timeout: Any) -> None:
    """TypeError for what is no number of seconds, ValueError for what is not a number."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout={timeout!r}: it must be seconds as a number, or None")
    if timeout != timeout:
        raise ValueError("timeout=nan: it must be seconds, or None")


def whole(value: Any) -> int | None:
    """A whole number, numpy's too, as int; None for anything else, bool among it."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        return None
    return int(value)


def format_bytes(nbytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if nbytes == int(nbytes) else f"{nbytes:.1f} {unit}"


class Memory:
    """The store as one process sees it."""

    def __init__(self, client: _shm.Client, channel: Channel, config: Config) -> None:
        self.client = client
        self.channel = channel
        self.config = config
        self.wait_one: WaitOne = lambda oid, deadline: None
        self.wait_moved: Callable[[int, int], bool] = lambda oid, deadline: True
        self.keep: Callable[[], serial.Keep] | None = None  # for large globals of functions
        self.drain: Callable[[], None] = lambda: None  # drops what finished tasks held
        self.pending: Container[int] = ()  # results of this process that were not looked after
        self.ended: Callable[[int], None] = lambda oid: None  # looks after one of these
        self.lost: BaseException | None = None  # why nothing that is pending will ever be done
        self.attached = 0  # refs that came in foreign pickles, functions among them
        self.inner: dict[int, list[ObjectRef[Any]]] = {}  # refs inside objects of ours
        self.mapped = Mapped(client)

    # -- refs ----------------------------------------------------------------------------------

    def check(self) -> None:
        """ClosedError after close, and in a forked child."""
        if not self.client.usable:
            raise ClosedError(
                "this cluster is closed, or this process was forked from the one that opened it"
            )

    def check_lost(self) -> None:
        """As check(); once the node is gone, the error that says so."""
        if self.lost is not None or not self.client.usable:
            self.check()
            raise self.lost_again()

    def lost_again(self) -> BaseException:
        """Why nothing comes any more, for one more to whom it is raised: with a traceback of its
        own."""
        assert self.lost is not None
        return type(self.lost)(*self.lost.args)

    def public_id(self, oid: int) -> bytes:
        return ids.pack_id(self.client.home, oid)

    def _named(self, oid: int) -> ObjectRef[Any]:
        """For messages: as its ref shows it."""
        return ObjectRef(self.public_id(oid))

    def local_id(self, ref: ObjectRef[Any]) -> int:
        home, oid = ids.unpack_whole(ref._id)
        if home != self.client.home:
            return self._local_id_of_foreign(ref)
        return oid

    def _local_id_of_foreign(self, ref: ObjectRef[Any]) -> int:
        """Of an object of another host: where it lies on this one as long as the ref holds it."""
        hold: Any = ref._hold
        if type(hold) is not _shm.Hold or hold.home != self.client.home:
            raise ObjectLostError(
                f"{ref} is gone, or belongs to another cluster or to one that has ended"
            )
        return hold.oid

    def own_ref(self, oid: int) -> ObjectRef[Any]:
        """A ref over the hold that new() has made."""
        return ObjectRef(self.public_id(oid), self.client.hold(oid, False))

    def make_ref(self, object_id: bytes) -> ObjectRef[Any]:
        """A ref with a hold of its own; without one if the object is gone."""
        home, oid = ids.unpack_id(object_id)
        hold = None
        if home == self.client.home:
            if self.client.usable:
                hold = self.client.hold(oid)
        elif self.client.usable:
            hold = self._import(object_id)
        return ObjectRef(object_id, hold)

    def _import(self, object_id: bytes) -> Any:
        """Holds an object of another host; None if it is gone, or there are no other hosts."""
        return take_over(self, Import([object_id]), lambda oids: oids[0])

    # -- writing -------------------------------------------------------------------------------

    def put(self, value: Any) -> ObjectRef[Any]:
        """A sealed object with this process's ref."""
        self.check()
        if self.client.news():
            self.collect()
        if type(value) is np.ndarray:
            block = self.block_of(value)
            if block is not None:
                return self._publish_block(value, block)
        return self.put_encoded(serial.encode(value, self.keep))

    def put_encoded(self, encoded: serial.Encoded, held: bool = False) -> ObjectRef[Any]:
        """`held`: the caller holds the refs inside it as long as somebody may read them."""
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
        return ObjectRef(self.public_id(oid), hold)

    def put_text(self, values: tuple[Any, ...], place: int) -> ObjectRef[Any]:
        """Plain values, the one at `place` a text, without waiting for room: in a store that has
        none, what the text says is cut until it fits beside the header. What tells others of a
        full store must not need room itself."""
        encoded = serial.encode(values)
        if encoded.nbytes > _shm.INLINE_BYTES_MAX:
            lease = self.client.lease_small(encoded.nbytes)
            if lease is not None:
                self.client.write(lease.payload, encoded.head, encoded.buffers, encoded.offsets)
                hold = self.client.put(lease, encoded.nbytes, False)
                return ObjectRef(self.public_id(hold.oid), hold)
            encoded = serial.encode(shortened(values, place))
        return self.put_encoded(encoded)

    def write(self, encoded: serial.Encoded, error: bool = False, what: str = "put") -> _shm.Lease:
        """A LEASED block with the payload in it; of an error from the reserve, if need be. what: as
        errors name it."""
        if error and encoded.nbytes <= self.config.error_bytes_max:
            lease = self.allocate_error(encoded.nbytes)
        else:
            lease = self.allocate(encoded.nbytes, written=True, what=what)
        mapped = self.mapped.serves(lease.payload, encoded.nbytes)
        write = self.client.write if mapped else self.client.write_cold
        write(lease.payload, encoded.head, encoded.buffers, encoded.offsets)
        return lease

    def allocate(self, nbytes: int, written: bool = False, what: str = "put") -> _shm.Lease:
        """A LEASED block, which goes back with what is returned, unless it becomes an object;
        StoreFullError without room for put_wait_s. written: its pages are not asked for here, since
        who writes them all at once knows a better way."""
        lease: _shm.Lease | None
        if nbytes <= self.config.small_object_bytes_max:
            lease = self.client.lease_small(nbytes)
            if lease is not None:
                return lease
            self.collect()
            lease = self.client.lease_small(nbytes)
            deadline = time.monotonic() + self.config.put_wait_s
            while lease is None:
                self._ask(LeaseSpan(), nbytes, deadline, what)
                lease = self.client.lease_small(nbytes)  # spilling may have made room in old spans
                if lease is None:
                    self.give_empty_spans()
            return lease
        self.drain()
        self.collect()
        lease = None
        deadline = time.monotonic() + self.config.put_wait_s
        while lease is None:
            lease = self._ask(Lease(nbytes), nbytes, deadline, what)
        if nbytes >= POPULATE_BYTES_MIN and not written:
            self.mapped.add(lease.payload, nbytes)
        return lease

    def allocate_error(self, nbytes: int) -> _shm.Lease:
        """The same for an error: it does not wait for room, but may use what is kept for errors."""
        if nbytes <= self.config.small_object_bytes_max:
            for _ in range(2):
                lease = self.client.lease_small(nbytes)
                if lease is not None:
                    return lease
                self.collect()
        reply: Reply | _shm.Lease = self.channel.call(Lease(nbytes, True), self.client.take_lease)
        if isinstance(reply, Reply):
            raise StoreFullError(f"an error of {format_bytes(nbytes)}: {reply.error}")
        return reply

    def _ask(
        self, ask: Lease | LeaseSpan, nbytes: int, deadline: float, what: str
    ) -> _shm.Lease | None:
        """A block, or a span that is added to those of this process; None: there is none yet, but
        what was given back may do."""
        take = self.client.take_lease if isinstance(ask, Lease) else self.client.take_span
        reply: Reply | _shm.Lease | None = self.channel.call(ask, take)
        if not isinstance(reply, Reply):
            return reply
        if reply.value == "never" or time.monotonic() >= deadline:
            raise StoreFullError(f"{what} of {format_bytes(nbytes)}: {reply.error}")
        self.drain()
        self.collect()
        if isinstance(ask, Lease):
            self.give_empty_spans()
        return None

    def give_empty_spans(self) -> None:
        spans = self.client.take_empty_spans()
        if spans:
            self.channel.tell(GiveSpans(spans))

    def collect(self) -> None:
        """Takes back what nobody holds any more, and drops the refs that were inside."""
        for oid in self.client.collect():
            self.inner.pop(oid, None)

    def delete(self, ref: ObjectRef[Any]) -> None:
        """Drops it for everybody; waits while the node is just moving it to disk."""
        oid = self.local_id(ref)
        if ids.unpack_id(ref._id)[0] != self.client.home:
            self.channel.tell(DropForeign(oid))
        while self.client.delete(oid) < 0:
            self.check_lost()  # the node would not come to the end of it
            time.sleep(SPILLING_LOOK_S)

    # -- arrays made in the store --------------------------------------------------------------

    def empty(self, shape: Any, dtype: Any, order: str) -> Array:
        """A writable array over a LEASED block."""
        self.check()
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise TypeError(f"an array of {kind} holds Python objects: the store cannot hold it")
        dims = tuple(int(n) for n in (shape if hasattr(shape, "__iter__") else (shape,)))
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
        return np.ndarray(dims, kind, buffer=block, offset=prefix, order=checked_order(order))

    def private_copy(self, part: memoryview) -> Any:
        """A writable copy of a large buffer: in a block of the store, whose pages are warm, rather
        than in fresh memory of the process; there too if the store has no room."""
        nbytes = part.nbytes
        if not self.client.usable:
            return bytearray(part)
        lease = self.channel.call(Lease(PREFIX_BIG + nbytes), self.client.take_lease)
        if isinstance(lease, Reply):  # there is no room
            return bytearray(part)
        payload = lease.payload
        self.mapped.add(payload, PREFIX_BIG + nbytes)
        block = self.client.block_of(lease, PREFIX_BIG + nbytes)
        self.client.write(payload, b"", [part], [PREFIX_BIG])
        return memoryview(block)[PREFIX_BIG:]

    def block_of(self, array: Array) -> _shm.Block | None:
        """The block that this array fills, if it was made by empty() and is not an object yet."""
        base: Any = array.base
        while type(base) is np.ndarray:
            base = base.base
        if type(base) is not _shm.Block or base.published:
            return None
        prefix = PREFIX_BIG if array.nbytes > self.config.small_object_bytes_max else PREFIX_SMALL
        if len(base) != prefix + array.nbytes or not (
            array.flags.c_contiguous or array.flags.f_contiguous
        ):
            return None  # a part of it, or strided
        start = self.client.store_address + base.payload + prefix
        return base if array.__array_interface__["data"][0] == start else None

    def block_head(self, array: Array, block: _shm.Block) -> bytes | None:
        """The payload's head before the array; None if it does not fit there."""
        prefix = len(block) - array.nbytes
        order = "C" if array.flags.c_contiguous else "F"
        try:
            head, _, _ = serial.encode_array_head(array.dtype, array.shape, order, None, prefix)
        except (TypeError, ValueError):
            return None
        return head if len(head) <= prefix else None

    def _publish_block(self, array: Array, block: _shm.Block) -> ObjectRef[Any]:
        head = self.block_head(array, block)
        if head is None:
            return self.put_encoded(serial.encode(array))
        self.client.write(block.payload, head, [], [])
        hold = block.publish()
        freeze(array)
        return ObjectRef(self.public_id(hold.oid), hold)

    # -- reading -------------------------------------------------------------------------------

    def payload(self, oid: int, deadline: int) -> memoryview:
        """The payload of a finished object (a value's, or an error's), pinned while it is used."""
        while True:
            self.check()
            got = self.client.view(oid)
            if not isinstance(got, int):
                return memoryview(got)
            if got in PENDING:
                self.wait_one(oid, deadline)
            elif got == STATE["SPILLING"]:  # done for those who wait; it ends with the write
                if time.monotonic_ns() >= deadline:
                    raise HopliteTimeoutError("the object is on its way to the spill file")
                self.check_lost()
                time.sleep(SPILLING_LOOK_S)
            elif got == STATE["SPILLED"]:
                self._restore(oid, deadline)
            elif got in CANCELLED:
                if is_cancelled(self.client, oid, got):
                    raise CancelledError
                raise ObjectLostError(f"{self._named(oid)} was deleted before it was ready")
            elif got == STATE["DELETED"]:
                raise ObjectLostError(f"{self._named(oid)} was deleted")
            else:
                raise ObjectLostError(f"{self._named(oid)} is gone: nobody held a ref to it")

    def _restore(self, oid: int, deadline: int) -> None:
        patience_ns = int(self.config.put_wait_s * 1e9)
        limit = min(deadline, time.monotonic_ns() + patience_ns)
        while True:
            reply = self.channel.call(Restore(oid))
            if not reply.full:
                limit = min(deadline, time.monotonic_ns() + patience_ns)
                if reply.value != ON_ITS_WAY or self.wait_moved(oid, limit):
                    return
                if time.monotonic_ns() >= deadline:
                    raise HopliteTimeoutError("the object is on its way from another host")
                continue  # there may be no room for it now
            if deadline == 0 or time.monotonic_ns() >= deadline:
                raise HopliteTimeoutError("the object is being read back from the spill file")
            if time.monotonic_ns() >= limit:
                raise StoreFullError(f"get of a spilled object: {reply.error}")
            self.collect()
            self.give_empty_spans()

    def read(self, oid: int, deadline: int, writable: bool) -> Any:
        """The value; raises what the object failed with."""
        mem = self.payload(oid, deadline)
        if oid in self.pending:  # what it was made from is to go now, not at the next call
            self.ended(oid)
        if serial.payload_kind(mem) == serial.ERROR:
            raise self.failure(mem)
        return serial.decode(mem, make_ref=self.make_ref, writable=writable)

    def error(self, oid: int, deadline: int) -> BaseException | None:
        """What the object failed with; None if it has a value."""
        mem = self.payload(oid, deadline)
        return self.failure(mem) if serial.payload_kind(mem) == serial.ERROR else None

    def failure(self, mem: memoryview) -> BaseException:
        """The exception of an error payload; a ReduceError is caused by what its source failed
        with, which only the reader can fetch: the node does not unpickle."""
        error = serial.decode_error(mem, self.make_ref)
        source = getattr(error, "source", None) if isinstance(error, ReduceError) else None
        if isinstance(source, ObjectRef):
            try:
                cause = self.error(self.local_id(source), 0)
            except Exception as lost:  # cancelled, deleted, gone
                cause = lost
            if cause is not None:
                error.__cause__ = cause
        return error

    def inner_refs(self, oid: int) -> list[ObjectRef[Any]]:
        """Refs listed inside a sealed object, each with a hold of this process."""
        try:
            mem = self.payload(oid, FOREVER_NS)  # reads it back if it has been spilled
        except (CancelledError, ObjectLostError):
            return []
        return [self.make_ref(object_id) for object_id in serial.read_refs(mem)]

    def contributors(self, ref: ObjectRef[Any]) -> tuple[int, ...] | None:
        """The indices of a reduction's sources; None before it is ready, and for other objects."""
        oid = self.local_id(ref)
        got = self.client.view(oid)
        if isinstance(got, int) and got != STATE["SPILLED"]:
            return None
        mem = self.payload(oid, FOREVER_NS) if isinstance(got, int) else memoryview(got)
        return None if serial.payload_kind(mem) == serial.ERROR else serial.read_contributors(mem)
