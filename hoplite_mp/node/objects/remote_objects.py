"""Values of which this host knows only where they are: which nodes hold the bytes, who waits here.

Why it exists: an object whose bytes are on another host looks like a spilled one to every process
of this host: done, to be asked for. Asked for, it is fetched once, whoever else comes meanwhile.
What no node is known to hold is *absent*: it stays done, and whoever asks for it waits until its
maker has found it, or made it again; what cannot be had any more becomes an error that readers
raise.
It must never know: sockets, plans, user classes; how bytes move is the fetcher's, how a value is
made again the maker's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp import serial
from hoplite_mp.errors import ObjectLostError, StoreFullError
from hoplite_mp.headers import AWAY, NODE_SLOT
from hoplite_mp.node.objects.engine_buffer import EngineBuffer
from hoplite_mp.node.ranges import Ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.objects.results import Results
    from hoplite_mp.node.ports import Loop

__all__ = ["Fetcher", "Filler", "Maker", "RemoteObject", "RemoteObjects"]

# How often it is looked whether there is room for a value that was found again. Lower: more looks
# while the store is full.
ROOM_LOOK_S = 0.02
INDEX_SHIFT = 32  # of an id: above it stand table and index, below it the generation


@dataclass(slots=True)
class RemoteObject:
    """Where one object's bytes are."""

    object: bytes
    nbytes: int
    holders: tuple[int, ...]  # numbers of nodes that hold the whole value; none: it is absent
    waiting: list[Callable[[], None]] = field(default_factory=list)
    payload: int = 0  # the block that is being filled; 0: nothing has begun
    released: Callable[[], Any] | None = None  # called when this host needs no holder any more
    layout: bytes = b""  # see node/objects/layouts.py
    filler: Filler | None = None  # who fills the block, while there is one
    engine_buffer: EngineBuffer = field(default_factory=EngineBuffer)  # of the block
    arrived: Ranges = field(default_factory=Ranges)  # in the block, by plans that are over
    why: str = ""  # nobody holds it
    making: bool = False  # the maker has been asked
    asked: int = 0  # how often the maker has tried to find it
    copied: bool = False  # its holders have copies, which go when nobody there wants them


class Filler(Protocol):
    """Who is filling a block."""

    def forget(self, oid: int, remote: RemoteObject) -> None:
        """Stops filling it: nobody wants it any more, or it will be had in another way."""


class Fetcher(Filler, Protocol):
    """Who brings bytes here when they are asked for."""

    def fetch(self, oid: int, remote: RemoteObject) -> None:
        """Fills `remote.payload`, then calls `arrived` or `lost`."""


class Maker(Protocol):
    """Who finds a value that no node is known to hold, or makes it again."""

    def why_not(self, oid: int, remote: RemoteObject) -> str:
        """Why it cannot; "": it can try."""

    def make(self, oid: int, remote: RemoteObject) -> None:
        """Ends with `found`, `replace` or `fail`; never before it returns."""

    def forget(self, oid: int) -> None:
        """Nobody wants it any more."""


class Above(Protocol):
    """What rooms above this one know, or must hear."""

    def near(self, object_id: bytes, oid: int) -> memoryview | None:
        """The payload, if it is on this host after all."""


class RemoteObjects:
    """All values of this host's headers whose bytes are elsewhere."""

    def __init__(self, results: Results, loop: Loop, above: Above) -> None:
        self.results = results
        self.client = results.client
        self.store = results.store
        self.fetcher: Fetcher | None = None  # set when there is a network
        self.maker: Maker | None = None  # likewise
        self.loop = loop
        self.above = above
        self.by_oid: dict[int, RemoteObject] = {}
        # The table and index of their headers, as take_gone() names them -> id.
        self._at: dict[int, int] = {}
        self._gone: list[int] = []  # found gone when they were added

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
        """A header that is CLAIMED is done: these nodes have its value. False: it was cancelled."""
        done = self.client.finish_elsewhere(oid, nbytes, refs)
        if done:
            self.add(oid, object_id, nbytes, holders, layout)
        else:
            self.results.tasks.settle(oid)
        return done

    def add(
        self, oid: int, object_id: bytes, nbytes: int, holders: tuple[int, ...], layout: bytes
    ) -> None:
        """A header that is SPILLED, though not on the disk."""
        self.by_oid[oid] = RemoteObject(object_id, nbytes, holders, layout=layout)
        before = self._at.get(oid >> INDEX_SHIFT, oid)
        if before != oid:  # that header is another object's now
            self._gone.append(before)
        self._at[oid >> INDEX_SHIFT] = oid
        if not self.client.mark_elsewhere(oid):
            self._gone.append(oid)

    def _take(self, oid: int) -> RemoteObject | None:
        if self._at.get(oid >> INDEX_SHIFT) == oid:
            del self._at[oid >> INDEX_SHIFT]
        return self.by_oid.pop(oid, None)

    def want(self, oid: int, done: Callable[[], None]) -> bool:
        """Calls `done` when the bytes are here, or will never be. False: there is no room for them
        now, and nothing has been begun."""
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
        if oid not in self.by_oid:  # it was that quick
            done()
        return True

    def absent(self, oid: int) -> bool:
        """Is it done, and no node known to hold it?"""
        remote = self.by_oid.get(oid)
        return remote is not None and not remote.holders and not remote.payload

    def needs_making(self, oid: int) -> bool:
        """Is no node known to hold it? Then it is made from now on, or is on its way already."""
        remote = self.by_oid.get(oid)
        if remote is None or remote.holders:
            return False
        if not remote.payload:
            self.make(oid)
        return True

    def make(self, oid: int) -> None:
        """Somebody needs an absent value; several who do cause one attempt."""
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
        """These nodes hold what was absent. nbytes, layout: of a value that was made again, and may
        be another one. copied: as in RemoteObject."""
        if not self.absent(oid):
            return
        remote = self.by_oid[oid]
        if nbytes:
            remote.nbytes, remote.layout = nbytes, layout
        remote.holders, remote.making, remote.why, remote.copied = holders, False, "", copied
        if remote.waiting:
            self._fetch_when_room(oid, remote)

    def learn(self, oid: int, holders: tuple[int, ...]) -> None:
        """These nodes hold what is on its way from somebody who may have it in part only."""
        remote = self.by_oid.get(oid)
        if remote is not None and not remote.holders:
            remote.holders = holders

    def bring(self, oid: int) -> None:
        """Fetches it though nobody waits for it, as soon as there is room."""
        remote = self.by_oid[oid]
        remote.waiting.append(_nothing)
        if self.absent(oid):
            self.make(oid)
        elif not remote.payload:
            self._fetch_when_room(oid, remote)

    def _fetch_when_room(self, oid: int, remote: RemoteObject) -> None:
        """Who reads it asks again, and learns that there is none; who has it still has it."""
        if self.by_oid.get(oid) is not remote or remote.payload or not remote.holders:
            return
        payload = self.store.lease(remote.nbytes, NODE_SLOT)
        if payload is not None:
            remote.payload = payload
            self._fetch(oid, remote)
        elif self.store.impossible(remote.nbytes):
            name = f"object {remote.object.hex()} of {remote.nbytes} bytes"
            self.fail(oid, StoreFullError(f"{name}: {self.store.full_message()}"))
        else:
            self.loop.call_later(ROOM_LOOK_S, lambda: self._fetch_when_room(oid, remote))

    def _fetch(self, oid: int, remote: RemoteObject) -> None:
        near = self.above.near(remote.object, oid)
        if near is not None:
            self.client.memory(remote.payload, remote.nbytes)[:] = near
            self.arrived(oid)
            return
        assert self.fetcher is not None
        remote.filler = self.fetcher
        self.fetcher.fetch(oid, remote)

    def let_go(self, oid: int) -> None:
        """Who was filling the block will not. If others wait for it, it is fetched."""
        remote = self.by_oid.get(oid)
        if remote is not None and remote.waiting:
            self._fetch(oid, remote)
        elif remote is not None:
            self._forget(oid, remote)

    def give_up(self, oid: int) -> None:
        """It is not being brought any more; whoever asks for it from now on has it fetched."""
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
        """As Store.restore: None: it is on its way, or will be when there is room."""
        remote = self.by_oid.get(oid)
        if remote is None:
            return False
        if not remote.payload:
            self.want(oid, lambda: None)
        return None

    def arrived(self, oid: int) -> None:
        """The block holds the whole payload."""
        remote = self._take(oid)
        assert remote is not None
        if not self.client.restore(oid, remote.payload, remote.nbytes):
            self._forget(oid, remote)  # dropped or deleted; whoever is served from it lets go first
        _close(remote)

    def brought(self, oid: int, payload: int) -> None:
        """The whole value is in a block of its own: it has come in another way than was asked."""
        remote = self.by_oid[oid]
        self._forget(oid, remote)
        remote.payload = payload
        self.arrived(oid)

    def lost(self, oid: int, why: str) -> None:
        """No living node is known to hold it. Who reads it waits for the maker, or learns why."""
        remote = self.by_oid[oid]
        why = remote.why or f"object {remote.object.hex()} is lost: {why}"
        not_again = "" if self.maker is None else self.maker.why_not(oid, remote)
        if self.maker is None or not_again:
            self.fail(oid, ObjectLostError(f"{why}; {not_again}" if not_again else why))
            return
        self._forget(oid, remote)
        if remote.released is not None:
            remote.released()
        remote.holders, remote.why, remote.making, remote.released = (), why, False, None
        if remote.waiting:
            self.make(oid)

    def fail(self, oid: int, error: BaseException) -> None:
        """It will never be had: readers raise this."""
        self.replace(oid, serial.encode_error(error, "").tobytes())

    def replace(self, oid: int, data: bytes | memoryview) -> None:
        """This payload is what the object is from now on: an error, or the value itself."""
        remote = self._take(oid)
        if remote is None:
            return
        self._forget(oid, remote)
        mem = memoryview(data)
        payload = self.results.lease(mem.nbytes)
        if payload is None:  # not even for that: to be deleted says nearly the same
            self.client.delete(oid)
        else:
            self.client.memory(payload, mem.nbytes)[:] = mem
            failed = serial.payload_kind(mem) == serial.ERROR
            if not self.client.restore(oid, payload, mem.nbytes, failed):
                self.store.free(payload)
        _close(remote)

    def settled(self, oid: int) -> None:
        """The header holds the value: it has come by another way."""
        remote = self._take(oid)
        if remote is not None:
            self._forget(oid, remote)
            _close(remote)

    def drop(self, oid: int) -> RemoteObject | None:
        """The header is gone, or holds something else now."""
        remote = self._take(oid)
        if remote is None:
            return None
        self._forget(oid, remote)
        if remote.making and self.maker is not None:
            self.maker.forget(oid)
        _close(remote)
        return remote

    def purge(self) -> list[RemoteObject]:
        """Drops those whose header is not waiting for its bytes any more (freed, deleted): only
        those that the headers' own words name are looked at."""
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

    def lose_node(self, number: int) -> None:
        """What only that node held is lost. What is just being fetched may have other holders:
        who plans the fetch goes on with them, or says that it is lost."""
        for oid in list(self.by_oid):
            self.lose_holder(oid, number)

    def lose_copy(self, oid: int, number: int) -> None:
        """That node holds an object no more; its value stays, if it was kept for its sender."""
        if oid in self.by_oid and self.by_oid[oid].copied:
            self.lose_holder(oid, number)

    def lose_holder(self, oid: int, number: int) -> None:
        """That node does not have its bytes any more."""
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
    """Who waits for it is woken by its header."""


def _close(remote: RemoteObject) -> None:
    for done in remote.waiting:
        done()
    if remote.released is not None:
        remote.released()
