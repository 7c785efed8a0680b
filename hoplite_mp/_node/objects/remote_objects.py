"""Remote objects: values whose bytes are on other hosts, their holders, and their readers here.

To a process on this host, an object on another host looks like a spilled object: it is done, but
its bytes must be requested. The node fetches it once, however many readers request it. An object
without a known living holder is *absent*: it remains done, and readers wait until the maker
(_node/lineage/reconstruction.py) has found or reconstructed it. The value of a permanently lost
object becomes an error, which readers raise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp import _serialize
from hoplite_mp._common.object_states import AWAY, NODE_SLOT
from hoplite_mp._common.reduction import has_kernel
from hoplite_mp._node.store.growing_block import EngineBuffer, Ranges
from hoplite_mp._protocol.fields import LAYOUT_BYTES_MAX
from hoplite_mp.errors import ObjectLostError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.objects.results import ResultWriter
    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._protocol.messages import Member

__all__ = [
    "Fetcher",
    "Filler",
    "Maker",
    "RemoteObject",
    "RemoteObjects",
    "can_fold",
    "layout_of",
    "layout_words",
    "parse_layout",
    "payload_layout",
]

# Layouts: the shape and dtype of an array as text, for messages between nodes.
#
# Before any byte is sent, a node that reduces arrays from other hosts must know their sizes, and
# the manager must check that the arrays are compatible. The manager only compares the texts, which
# also appear in error messages.


_BETWEEN = " and dtype "
_LAYOUT = re.compile(r"shape \((?:(\d{1,20}(?:, \d{1,20})*),?)?\) and dtype (.+)", re.ASCII)
# The number of bytes of a spilled payload that are read first. If its head is longer, the number is
# multiplied by HEAD_GROWTH until the head is complete.
HEAD_BYTES, HEAD_GROWTH = 16 << 10, 8


def payload_layout(payload: memoryview) -> bytes:
    """The layout of an array or number. b"" for other objects, or if the text is too long."""
    info = _serialize.describe_array(payload)
    if info is None:
        return b""
    text = f"shape {info.shape}{_BETWEEN}{info.dtype_name}".encode()
    return text if len(text) <= LAYOUT_BYTES_MAX else b""


def parse_layout(layout: bytes) -> tuple[tuple[int, ...], str]:
    """Returns (shape, name of the dtype). Raises ValueError if `layout` is not a result of
    `payload_layout`."""
    found = _LAYOUT.fullmatch(layout.decode())
    if found is None:
        raise ValueError(f"not a layout: {layout!r}")
    return tuple(map(int, found[1].split(", "))) if found[1] else (), found[2]


def layout_words(layout: bytes) -> str:
    """A layout as text for errors, with NumPy's name for the dtype as in local errors."""
    try:
        shape, name = parse_layout(layout)
        return f"shape {shape}{_BETWEEN}{_serialize.named_dtype(name)}"
    except (ImportError, ValueError):  # ml_dtypes is missing here, or the text is invalid
        return layout.decode(errors="replace")


def layout_of(results: ResultWriter, remote_objects: RemoteObjects, oid: int) -> bytes:
    """The layout of an object that is ready on this host, or known to be on another one."""
    got = results.client.view(oid)
    if not isinstance(got, int):
        return payload_layout(memoryview(got))
    remote = remote_objects.by_oid.get(oid)
    if remote is not None:
        return remote.layout
    if got not in AWAY:
        return b""
    nbytes = HEAD_BYTES
    while (head := results.store.read_spilled(oid, 0, nbytes)) is not None:
        try:
            return payload_layout(memoryview(head))
        except ValueError:
            if len(head) < nbytes:  # `head` is the whole payload
                raise
        nbytes *= HEAD_GROWTH
    return b""


def can_fold(op: str, layout: bytes) -> bool:
    """Whether a compiled kernel can reduce such arrays. Otherwise NumPy does so on one node."""
    return bool(layout) and has_kernel(op, parse_layout(layout)[1]) is not None


# Retry interval for a fetch while the store is full. Lower: more attempts.
MEMORY_POLL_S = 0.02
FOREVER = float("inf")
INDEX_SHIFT = 32  # a local id's low 32 bits are the generation, the high bits table and index


@dataclass(slots=True)
class RemoteObject:
    """The locations of an object's bytes, and the state of its fetch."""

    object: bytes
    nbytes: int
    holders: tuple[int, ...]  # numbers of nodes that hold the whole value
    waiting: list[Callable[[], None]] = field(default_factory=list)
    payload: int = 0  # the block that is being filled; 0: no fetch has begun
    # Notifies the node that ran the task that this host no longer needs that node's copy.
    released: Callable[[], Any] | None = None
    layout: bytes = b""
    filler: Filler | None = None  # fills the block
    engine_buffer: EngineBuffer = field(default_factory=EngineBuffer)  # for cells over the block
    arrived: Ranges = field(default_factory=Ranges)  # bytes that earlier plans wrote to the block
    why: str = ""  # reason why no living holder is known
    making: bool = False  # the maker is locating or reconstructing the value
    asked: int = 0  # number of times that the owner was asked for the holders
    copies_failed: int = 0  # number of failed fetches from replicas
    # The reason why the last holder cannot read the object from its disk, and the time until which
    # readers receive that reason.
    full: str = ""
    full_until: float = 0.0
    copied: bool = False  # the holders have replicas, which they may release at any time


class Filler(Protocol):
    """Fills a block with an object's bytes."""

    def forget(self, oid: int, remote: RemoteObject) -> None:
        """Stops filling the block, because the object is no longer needed or its value arrives in
        another way."""


class Fetcher(Filler, Protocol):
    """Transfers bytes to this host."""

    def fetch(self, oid: int, remote: RemoteObject) -> None:
        """Fills `remote.payload`, then calls `arrived` or `lost`."""


class Maker(Protocol):
    """Finds a value without a known holder, or reconstructs it."""

    def why_not(self, oid: int, remote: RemoteObject) -> str:
        """The reason why `make` cannot succeed, or "" if an attempt can be made."""

    def make(self, oid: int, remote: RemoteObject) -> None:
        """Eventually calls `found`, `replace` or `fail` of RemoteObjects, but never before this
        method has returned."""

    def forget(self, oid: int) -> None:
        """Stops looking for a value that is no longer needed."""


class RemoteObjectsEvents(Protocol):
    """Requests from this component to the components above it."""

    def near(self, object_id: bytes, oid: int) -> memoryview | None:
        """The object's payload if it is on this host under a header other than `oid`, else None."""


class RemoteObjects:
    """All objects with a header on this host whose bytes are on other hosts."""

    def __init__(self, results: ResultWriter, loop: LoopPort, events: RemoteObjectsEvents) -> None:
        self.results = results
        self.client = results.client
        self.store = results.store
        self.fetcher: Fetcher | None = None  # None in a cluster of one host
        self.maker: Maker | None = None  # None in a cluster of one host
        self.loop = loop
        self.events = events
        self.by_oid: dict[int, RemoteObject] = {}
        # Table and index of a header, as returned by `take_gone` -> the header's id.
        self._at: dict[int, int] = {}
        self._gone: list[int] = []  # objects that `add` has found freed or deleted

    def __contains__(self, oid: int) -> bool:
        return oid in self.by_oid

    def complete(
        self,
        oid: int,
        object_id: bytes,
        nbytes: int,
        holders: tuple[int, ...],
        layout: bytes = b"",
        refs: bool = False,
    ) -> bool:
        """Marks a CLAIMED header as done, with its value on these nodes. Returns False if it was
        cancelled."""
        done = self.client.finish_elsewhere(oid, nbytes, refs)
        if done:
            self.add(oid, object_id, nbytes, holders, layout)
        else:
            self.results.tasks.settle(oid)
        return done

    def add(
        self, oid: int, object_id: bytes, nbytes: int, holders: tuple[int, ...], layout: bytes
    ) -> None:
        """Adds an object whose header is SPILLED but whose bytes are on other hosts."""
        self.by_oid[oid] = RemoteObject(object_id, nbytes, holders, layout=layout)
        before = self._at.get(oid >> INDEX_SHIFT, oid)
        if before != oid:  # the header has been reused for another object
            self._gone.append(before)
        self._at[oid >> INDEX_SHIFT] = oid
        if not self.client.mark_elsewhere(oid):
            self._gone.append(oid)

    def _take(self, oid: int) -> RemoteObject | None:
        if self._at.get(oid >> INDEX_SHIFT) == oid:
            del self._at[oid >> INDEX_SHIFT]
        return self.by_oid.pop(oid, None)

    def want(self, oid: int, done: Callable[[], None]) -> bool:
        """Fetches the object. Calls `done` when its bytes are here or have become unavailable.
        Returns False, without starting a fetch, if memory is short."""
        remote = self.by_oid[oid]
        if self.absent(oid):
            remote.waiting.append(done)
            self.make(oid)
            return True
        if not remote.payload:
            payload = self.store.lease(remote.nbytes, NODE_SLOT)
            if payload is None:
                return False
            remote.payload = payload
            self._fetch(oid, remote)
        remote.waiting.append(done)
        if oid not in self.by_oid:  # the fetch has already ended
            done()
        return True

    def refuse(self, oid: int, why: str) -> None:
        """Records that the last holder could not read the object from its disk, because its memory
        was short for put_wait_s. The object is not lost. The fetch continues, and readers on this
        host receive the reason `why`."""
        remote = self.by_oid[oid]
        remote.full = why
        remote.full_until = self.loop.now() + 2 * self.store.config.put_wait_s

    def refusal(self, oid: int) -> str:
        """The reason why a holder has recently refused to send the object, or ""."""
        remote = self.by_oid.get(oid)
        return "" if remote is None or self.loop.now() > remote.full_until else remote.full

    def absent(self, oid: int) -> bool:
        """Whether the object is done, but has no known holder and is not being fetched."""
        remote = self.by_oid.get(oid)
        return remote is not None and not remote.holders and not remote.payload

    def needs_making(self, oid: int) -> bool:
        """Whether the object has no known holder. If so, requests it from the maker, unless a fetch
        is still running."""
        remote = self.by_oid.get(oid)
        if remote is None or remote.holders:
            return False
        if not remote.payload:
            self.make(oid)
        return True

    def make(self, oid: int) -> None:
        """Requests an absent value from the maker, once for all readers that need it."""
        remote = self.by_oid[oid]
        if not remote.making and self.maker is not None:
            remote.making = True
            self.maker.make(oid, remote)

    def found(
        self,
        oid: int,
        holders: tuple[int, ...],
        nbytes: int = 0,
        layout: bytes = b"",
        copied: bool = False,
    ) -> None:
        """Records the holders of an absent object. nbytes, layout: the size and layout of a
        reconstructed value, which may differ from the first one. copied: as in RemoteObject."""
        if not self.absent(oid):
            return
        remote = self.by_oid[oid]
        if nbytes:
            remote.nbytes, remote.layout = nbytes, layout
        remote.holders, remote.making, remote.why, remote.copied = holders, False, "", copied
        if remote.waiting:
            self._fetch_when_free(oid, remote, FOREVER, _nothing)

    def set_holders(self, oid: int, holders: tuple[int, ...]) -> None:
        """Sets the holders of an object that is being fetched without a known holder."""
        remote = self.by_oid.get(oid)
        if remote is not None and not remote.holders:
            remote.holders = holders

    def bring(self, oid: int, full: Callable[[], None]) -> None:
        """Fetches an object even if no reader is waiting for it. If memory is short, retries for
        put_wait_s and then calls `full`."""
        remote = self.by_oid[oid]
        remote.waiting.append(_nothing)
        if self.absent(oid):
            self.make(oid)
        elif not remote.payload:
            until = self.loop.now() + self.store.config.put_wait_s
            self._fetch_when_free(oid, remote, until, full)

    def _fetch_when_free(
        self, oid: int, remote: RemoteObject, until: float, full: Callable[[], None]
    ) -> None:
        """Begins the fetch. If memory is short, retries until the time `until` and then calls
        `full`. Fails an object that can never fit."""
        if self.by_oid.get(oid) is not remote or remote.payload or not remote.holders:
            return
        payload = self.store.lease(remote.nbytes, NODE_SLOT)
        if payload is not None:
            remote.payload = payload
            self._fetch(oid, remote)
        elif self.store.impossible(remote.nbytes):
            name = f"object {remote.object.hex()} of {remote.nbytes} bytes"
            self.fail(oid, StoreFullError(f"{name}: {self.store.full_message()}"))
        elif self.loop.now() < until:
            self.loop.call_later(
                MEMORY_POLL_S, lambda: self._fetch_when_free(oid, remote, until, full)
            )
        else:
            full()

    def _fetch(self, oid: int, remote: RemoteObject) -> None:
        near = self.events.near(remote.object, oid)
        if near is not None:
            self.client.memory(remote.payload, remote.nbytes)[:] = near
            self.arrived(oid)
            return
        assert self.fetcher is not None
        remote.filler = self.fetcher
        self.fetcher.fetch(oid, remote)

    def let_go(self, oid: int) -> None:
        """Called when the filler has stopped. Fetches the object if a reader is waiting for it."""
        remote = self.by_oid.get(oid)
        if remote is not None and remote.waiting:
            self._fetch(oid, remote)
        elif remote is not None:
            self._forget(oid, remote)

    def give_up(self, oid: int) -> None:
        """Stops the present fetch. The next request begins a new one."""
        self._forget(oid, self.by_oid[oid])

    def _forget(self, oid: int, remote: RemoteObject) -> None:
        payload, filler = remote.payload, remote.filler
        remote.payload, remote.filler = 0, None
        if filler is not None:
            filler.forget(oid, remote)
        if payload:
            remote.engine_buffer.when_free(lambda: self.store.free(payload))
            remote.engine_buffer, remote.arrived = EngineBuffer(), Ranges()

    def restore(self, oid: int) -> bool | None:
        """Like `Store.restore`. Returns None if the object is being fetched or memory is short, and
        False if it is not a remote object."""
        remote = self.by_oid.get(oid)
        if remote is None:
            return False
        if not remote.payload:
            self.want(oid, lambda: None)
        return None

    def arrived(self, oid: int) -> None:
        """Finishes the fetch of an object whose block contains the whole payload."""
        remote = self._take(oid)
        assert remote is not None
        if not self.client.restore(oid, remote.payload, remote.nbytes):
            # The object was dropped or deleted. The block is freed when no cell uses it.
            self._forget(oid, remote)
        _close(remote)

    def brought(self, oid: int, payload: int) -> None:
        """Finishes an object with a block that has received the whole value in another way."""
        remote = self.by_oid[oid]
        self._forget(oid, remote)
        remote.payload = payload
        self.arrived(oid)

    def lost(self, oid: int, why: str) -> None:
        """Called when no living holder of the object is known. The object becomes absent, or fails
        if the maker cannot help."""
        remote = self.by_oid[oid]
        why = remote.why or f"object {remote.object.hex()} is lost: {why}"
        not_again = "" if self.maker is None else self.maker.why_not(oid, remote)
        if self.maker is None or not_again:
            self.fail(oid, ObjectLostError(f"{why}; {not_again}" if not_again else why))
            return
        if remote.payload and remote.copied:
            remote.copies_failed += 1
        self._forget(oid, remote)
        if remote.released is not None:
            remote.released()
        remote.holders, remote.why, remote.making, remote.released = (), why, False, None
        if remote.waiting:
            self.make(oid)

    def fail(self, oid: int, error: BaseException) -> None:
        """Makes readers raise this error, because the object is permanently lost."""
        self.replace(oid, _serialize.encode_error(error, "").tobytes())

    def replace(self, oid: int, data: bytes | memoryview) -> None:
        """Makes this payload (a value or an error) the object's content."""
        remote = self._take(oid)
        if remote is None:
            return
        self._forget(oid, remote)
        mem = memoryview(data)
        payload = self.results.lease(mem.nbytes)
        if payload is None:  # not even the payload fits, so delete the object
            self.client.delete(oid)
        else:
            self.client.memory(payload, mem.nbytes)[:] = mem
            failed = _serialize.payload_kind(mem) == _serialize.ERROR
            if not self.client.restore(oid, payload, mem.nbytes, failed):
                self.store.free(payload)
        _close(remote)

    def settled(self, oid: int) -> None:
        """Stops fetching an object whose header has its value from another source."""
        remote = self._take(oid)
        if remote is not None:
            self._forget(oid, remote)
            _close(remote)

    def drop(self, oid: int) -> RemoteObject | None:
        """Removes an object whose header is gone or now has other content."""
        remote = self._take(oid)
        if remote is None:
            return None
        self._forget(oid, remote)
        if remote.making and self.maker is not None:
            self.maker.forget(oid)
        _close(remote)
        return remote

    def purge(self) -> list[RemoteObject]:
        """Drops objects whose headers were freed or deleted. Only visits headers whose bit is set
        in the `gone` bitmap of their table."""
        gone, self._gone = self._gone, []
        for key in self.client.take_gone():
            oid = self._at.get(key)
            if oid is not None:
                gone.append(oid)
        found = []
        for oid in gone:
            if oid in self.by_oid and self.client.state(oid) in AWAY:
                continue
            remote = self.drop(oid)
            if remote is not None:
                found.append(remote)
        return found

    def peer_lost(self, member: Member) -> None:
        """Handles the loss of a host and of the objects that only its node held. If an object is
        being fetched, the manager decides whether other holders remain."""
        for oid in list(self.by_oid):
            self.lose_holder(oid, member.node)

    def lose_copy(self, oid: int, number: int) -> None:
        """Called when a node has released its replica of an object."""
        if oid in self.by_oid and self.by_oid[oid].copied:
            self.lose_holder(oid, number)

    def lose_holder(self, oid: int, number: int) -> None:
        """Removes a node from the object's holders, because it no longer has the bytes."""
        remote = self.by_oid.get(oid)
        if remote is None or number not in remote.holders:
            return
        remote.holders = tuple(holder for holder in remote.holders if holder != number)
        if remote.holders:
            return
        remote.why = f"object {remote.object.hex()} is lost: node h{number} had it"
        if not remote.payload or remote.filler is not self.fetcher:
            self.lost(oid, remote.why)


def _nothing() -> None:
    """Does nothing: waiting readers are woken through the object's header."""


def _close(remote: RemoteObject) -> None:
    for done in remote.waiting:
        done()
    if remote.released is not None:
        remote.released()
