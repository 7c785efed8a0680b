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
from hoplite_mp.node.objects.ground import Ground
from hoplite_mp.node.ranges import Ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.objects.results import Results
    from hoplite_mp.node.ports import Loop

__all__ = ["Fetcher", "Filler", "Maker", "Place", "Places"]

# How often it is looked whether there is room for a value that was found again. Lower: more looks
# while the store is full.
ROOM_LOOK_S = 0.02
INDEX_SHIFT = 32  # of an id: above it stand table and index, below it the generation


@dataclass(slots=True)
class Place:
    """Where one object's bytes are."""

    object: bytes
    nbytes: int
    holders: tuple[int, ...]  # numbers of nodes that hold the whole value; none: it is absent
    waiting: list[Callable[[], None]] = field(default_factory=list)
    payload: int = 0  # the block that is being filled; 0: nothing has begun
    released: Callable[[], Any] | None = None  # called when this host needs no holder any more
    layout: bytes = b""  # see node/objects/layouts.py
    filler: Filler | None = None  # who fills the block, while there is one
    ground: Ground = field(default_factory=Ground)  # of the block
    come: Ranges = field(default_factory=Ranges)  # in the block, by plans that are over
    why: str = ""  # nobody holds it
    making: bool = False  # the maker has been asked
    asked: int = 0  # how often the maker has tried to find it
    copied: bool = False  # its holders have copies, which go when nobody there wants them


class Filler(Protocol):
    """Who is filling a block."""

    def forget(self, oid: int, place: Place) -> None:
        """Stops filling it: nobody wants it any more, or it will be had in another way."""


class Fetcher(Filler, Protocol):
    """Who brings bytes here when they are asked for."""

    def fetch(self, oid: int, place: Place) -> None:
        """Fills `place.payload`, then calls `arrived` or `lost`."""


class Maker(Protocol):
    """Who finds a value that no node is known to hold, or makes it again."""

    def why_not(self, oid: int, place: Place) -> str:
        """Why it cannot; "": it can try."""

    def make(self, oid: int, place: Place) -> None:
        """Ends with `found`, `replace` or `fail`; never before it returns."""

    def forget(self, oid: int) -> None:
        """Nobody wants it any more."""


class Above(Protocol):
    """What rooms above this one know, or must hear."""

    def near(self, object_id: bytes, oid: int) -> memoryview | None:
        """The payload, if it is on this host after all."""


class Places:
    """All values of this host's headers whose bytes are elsewhere."""

    def __init__(self, results: Results, loop: Loop, above: Above) -> None:
        self.results = results
        self.client = results.client
        self.store = results.store
        self.fetcher: Fetcher | None = None  # set when there is a network
        self.maker: Maker | None = None  # likewise
        self.loop = loop
        self.above = above
        self.places: dict[int, Place] = {}
        # The table and index of their headers, as take_gone() names them -> id.
        self._at: dict[int, int] = {}
        self._gone: list[int] = []  # found gone when they were added

    def __contains__(self, oid: int) -> bool:
        return oid in self.places

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
        self.places[oid] = Place(object_id, nbytes, holders, layout=layout)
        before = self._at.get(oid >> INDEX_SHIFT, oid)
        if before != oid:  # that header is another object's now
            self._gone.append(before)
        self._at[oid >> INDEX_SHIFT] = oid
        if not self.client.mark_elsewhere(oid):
            self._gone.append(oid)

    def _take(self, oid: int) -> Place | None:
        if self._at.get(oid >> INDEX_SHIFT) == oid:
            del self._at[oid >> INDEX_SHIFT]
        return self.places.pop(oid, None)

    def want(self, oid: int, done: Callable[[], None]) -> bool:
        """Calls `done` when the bytes are here, or will never be. False: there is no room for them
        now, and nothing has been begun."""
        place = self.places[oid]
        if self.absent(oid):
            place.waiting.append(done)
            self.make(oid)
            return True
        if not place.payload:
            payload = self.store.lease(place.nbytes, NODE_SLOT)
            if payload is None:
                return False
            place.payload = payload
            self._fetch(oid, place)
        place.waiting.append(done)
        if oid not in self.places:  # it was that quick
            done()
        return True

    def absent(self, oid: int) -> bool:
        """Is it done, and no node known to hold it?"""
        place = self.places.get(oid)
        return place is not None and not place.holders and not place.payload

    def needs_making(self, oid: int) -> bool:
        """Is no node known to hold it? Then it is made from now on, or is on its way already."""
        place = self.places.get(oid)
        if place is None or place.holders:
            return False
        if not place.payload:
            self.make(oid)
        return True

    def make(self, oid: int) -> None:
        """Somebody needs an absent value; several who do cause one attempt."""
        place = self.places[oid]
        if not place.making and self.maker is not None:
            place.making = True
            self.maker.make(oid, place)

    def found(
        self,
        oid: int,
        holders: tuple[int, ...],
        nbytes: int = 0,
        layout: bytes = b"",
        copied: bool = False,
    ) -> None:
        """These nodes hold what was absent. nbytes, layout: of a value that was made again, and may
        be another one. copied: as in Place."""
        if not self.absent(oid):
            return
        place = self.places[oid]
        if nbytes:
            place.nbytes, place.layout = nbytes, layout
        place.holders, place.making, place.why, place.copied = holders, False, "", copied
        if place.waiting:
            self._fetch_when_room(oid, place)

    def learn(self, oid: int, holders: tuple[int, ...]) -> None:
        """These nodes hold what is on its way from somebody who may have it in part only."""
        place = self.places.get(oid)
        if place is not None and not place.holders:
            place.holders = holders

    def bring(self, oid: int) -> None:
        """Fetches it though nobody waits for it, as soon as there is room."""
        place = self.places[oid]
        place.waiting.append(_nothing)
        if self.absent(oid):
            self.make(oid)
        elif not place.payload:
            self._fetch_when_room(oid, place)

    def _fetch_when_room(self, oid: int, place: Place) -> None:
        """Who reads it asks again, and learns that there is none; who has it still has it."""
        if self.places.get(oid) is not place or place.payload or not place.holders:
            return
        payload = self.store.lease(place.nbytes, NODE_SLOT)
        if payload is not None:
            place.payload = payload
            self._fetch(oid, place)
        elif self.store.impossible(place.nbytes):
            name = f"object {place.object.hex()} of {place.nbytes} bytes"
            self.fail(oid, StoreFullError(f"{name}: {self.store.full_message()}"))
        else:
            self.loop.call_later(ROOM_LOOK_S, lambda: self._fetch_when_room(oid, place))

    def _fetch(self, oid: int, place: Place) -> None:
        near = self.above.near(place.object, oid)
        if near is not None:
            self.client.memory(place.payload, place.nbytes)[:] = near
            self.arrived(oid)
            return
        assert self.fetcher is not None
        place.filler = self.fetcher
        self.fetcher.fetch(oid, place)

    def let_go(self, oid: int) -> None:
        """Who was filling the block will not. If others wait for it, it is fetched."""
        place = self.places.get(oid)
        if place is not None and place.waiting:
            self._fetch(oid, place)
        elif place is not None:
            self._forget(oid, place)

    def give_up(self, oid: int) -> None:
        """It is not being brought any more; whoever asks for it from now on has it fetched."""
        self._forget(oid, self.places[oid])

    def _forget(self, oid: int, place: Place) -> None:
        payload, filler = place.payload, place.filler
        place.payload, place.filler = 0, None
        if filler is not None:
            filler.forget(oid, place)
        if payload:
            place.ground.when_free(lambda: self.store.free(payload))
            place.ground, place.come = Ground(), Ranges()

    def restore(self, oid: int) -> bool | None:
        """As Store.restore: None: it is on its way, or will be when there is room."""
        place = self.places.get(oid)
        if place is None:
            return False
        if not place.payload:
            self.want(oid, lambda: None)
        return None

    def arrived(self, oid: int) -> None:
        """The block holds the whole payload."""
        place = self._take(oid)
        assert place is not None
        if not self.client.restore(oid, place.payload, place.nbytes):
            self._forget(oid, place)  # dropped or deleted; whoever is served from it lets go first
        _close(place)

    def brought(self, oid: int, payload: int) -> None:
        """The whole value is in a block of its own: it has come in another way than was asked."""
        place = self.places[oid]
        self._forget(oid, place)
        place.payload = payload
        self.arrived(oid)

    def lost(self, oid: int, why: str) -> None:
        """No living node is known to hold it. Who reads it waits for the maker, or learns why."""
        place = self.places[oid]
        why = place.why or f"object {place.object.hex()} is lost: {why}"
        not_again = "" if self.maker is None else self.maker.why_not(oid, place)
        if self.maker is None or not_again:
            self.fail(oid, ObjectLostError(f"{why}; {not_again}" if not_again else why))
            return
        self._forget(oid, place)
        if place.released is not None:
            place.released()
        place.holders, place.why, place.making, place.released = (), why, False, None
        if place.waiting:
            self.make(oid)

    def fail(self, oid: int, error: BaseException) -> None:
        """It will never be had: readers raise this."""
        self.replace(oid, serial.encode_error(error, "").tobytes())

    def replace(self, oid: int, data: bytes | memoryview) -> None:
        """This payload is what the object is from now on: an error, or the value itself."""
        place = self._take(oid)
        if place is None:
            return
        self._forget(oid, place)
        mem = memoryview(data)
        payload = self.results.lease(mem.nbytes)
        if payload is None:  # not even for that: to be deleted says nearly the same
            self.client.delete(oid)
        else:
            self.client.memory(payload, mem.nbytes)[:] = mem
            failed = serial.payload_kind(mem) == serial.ERROR
            if not self.client.restore(oid, payload, mem.nbytes, failed):
                self.store.free(payload)
        _close(place)

    def settled(self, oid: int) -> None:
        """The header holds the value: it has come by another way."""
        place = self._take(oid)
        if place is not None:
            self._forget(oid, place)
            _close(place)

    def drop(self, oid: int) -> Place | None:
        """The header is gone, or holds something else now."""
        place = self._take(oid)
        if place is None:
            return None
        self._forget(oid, place)
        if place.making and self.maker is not None:
            self.maker.forget(oid)
        _close(place)
        return place

    def purge(self) -> list[Place]:
        """Drops those whose header is not waiting for its bytes any more (freed, deleted): only
        those that the headers' own words name are looked at."""
        gone, self._gone = self._gone, []
        for key in self.client.take_gone():
            oid = self._at.get(key)
            if oid is not None:
                gone.append(oid)
        found = []
        for oid in gone:
            if oid in self.places and self.client.state(oid) in AWAY:
                continue
            place = self.drop(oid)
            if place is not None:
                found.append(place)
        return found

    def lose_node(self, number: int) -> None:
        """What only that node held is lost. What is just being fetched may have other holders:
        who plans the fetch goes on with them, or says that it is lost."""
        for oid in list(self.places):
            self.lose_holder(oid, number)

    def lose_copy(self, oid: int, number: int) -> None:
        """That node holds an object no more; its value stays, if it was kept for its sender."""
        if oid in self.places and self.places[oid].copied:
            self.lose_holder(oid, number)

    def lose_holder(self, oid: int, number: int) -> None:
        """That node does not have its bytes any more."""
        place = self.places.get(oid)
        if place is None or number not in place.holders:
            return
        place.holders = tuple(holder for holder in place.holders if holder != number)
        if place.holders:
            return
        place.why = f"object {place.object.hex()} is lost: node h{number} had it"
        if not place.payload or place.filler is not self.fetcher:
            self.lost(oid, place.why)


def _nothing() -> None:
    """Who waits for it is woken by its header."""


def _close(place: Place) -> None:
    for done in place.waiting:
        done()
    if place.released is not None:
        place.released()
