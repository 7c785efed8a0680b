"""Values of which this host knows only where they are: which nodes hold the bytes, who waits here.

Why it exists: an object whose bytes are on another host looks like a spilled one to every process
of this host: done, to be asked for. Asked for, it is fetched once, whoever else comes meanwhile;
what cannot be fetched any more becomes an error that readers raise.
It must never know: sockets, plans, user classes; how bytes move is the fetcher's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp import serial
from hoplite_mp.client.memory import STATE
from hoplite_mp.errors import ObjectLostError
from hoplite_mp.node.ground import Ground
from hoplite_mp.node.store import NODE_SLOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.results import Results

__all__ = ["Fetcher", "Filler", "Place", "Places"]


@dataclass(slots=True)
class Place:
    """Where one object's bytes are."""

    object: bytes
    nbytes: int
    holders: tuple[int, ...]  # numbers of nodes that hold the whole value
    waiting: list[Callable[[], None]] = field(default_factory=list)
    payload: int = 0  # the block that is being filled; 0: nothing has begun
    released: Callable[[], Any] | None = None  # called when this host needs no holder any more
    layout: bytes = b""  # see node/layouts.py
    filler: Filler | None = None  # who fills the block, while there is one
    ground: Ground = field(default_factory=Ground)  # of the block


class Filler(Protocol):
    """Who is filling a block."""

    def forget(self, oid: int, place: Place) -> None:
        """Stops filling it: nobody wants it any more, or it will be had in another way."""


class Fetcher(Filler, Protocol):
    """Who brings bytes here when they are asked for."""

    def fetch(self, oid: int, place: Place) -> None:
        """Fills `place.payload`, then calls `arrived` or `lost`."""


class Places:
    """All values of this host's headers whose bytes are elsewhere."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.client = results.client
        self.store = results.store
        self.fetcher: Fetcher | None = None  # set when there is a network
        self.places: dict[int, Place] = {}

    def __contains__(self, oid: int) -> bool:
        return oid in self.places

    def add(
        self,
        oid: int,
        object_id: bytes,
        nbytes: int,
        holders: tuple[int, ...],
        layout: bytes = b"",
    ) -> None:
        """A header that finish_elsewhere() has just completed."""
        self.places[oid] = Place(object_id, nbytes, holders, layout=layout)

    def want(self, oid: int, done: Callable[[], None]) -> bool:
        """Calls `done` when the bytes are here, or will never be. False: there is no room for them
        now, and nothing has been begun."""
        place = self.places[oid]
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

    def _fetch(self, oid: int, place: Place) -> None:
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

    def _forget(self, oid: int, place: Place) -> None:
        payload, filler = place.payload, place.filler
        place.payload, place.filler = 0, None
        if filler is not None:
            filler.forget(oid, place)
        if payload:
            place.ground.when_free(lambda: self.store.free(payload))
            place.ground = Ground()

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
        place = self.places.pop(oid)
        if not self.client.restore(oid, place.payload):
            self._forget(oid, place)  # dropped or deleted; whoever is served from it lets go first
        _close(place)

    def lost(self, oid: int, why: str) -> None:
        """No living node holds it: whoever reads it learns that."""
        place = self.places.pop(oid)
        self._forget(oid, place)
        encoded = serial.encode_error(ObjectLostError(why), "")
        payload = self.results.lease(encoded.nbytes)
        if payload is None:  # not even for that: to be deleted says nearly the same
            self.client.delete(oid)
        else:
            self.client.write(payload, encoded.head, encoded.buffers, encoded.offsets)
            if not self.client.restore(oid, payload, encoded.nbytes):
                self.store.free(payload)
        _close(place)

    def drop(self, oid: int) -> Place | None:
        """The header is gone, or holds something else now."""
        place = self.places.pop(oid, None)
        if place is None:
            return None
        self._forget(oid, place)
        _close(place)
        return place

    def purge(self) -> list[Place]:
        """Those whose header is not waiting for its bytes any more (freed, deleted)."""
        gone = [oid for oid in self.places if self.client.state(oid) not in _AWAY]
        return [place for oid in gone if (place := self.drop(oid)) is not None]

    def lose_node(self, number: int) -> None:
        """What only that node held, and nobody is fetching from others, is lost."""
        for oid, place in list(self.places.items()):
            place.holders = tuple(holder for holder in place.holders if holder != number)
            if not place.holders:
                self.lost(oid, f"object {place.object.hex()} is lost: node h{number} had it")


def _close(place: Place) -> None:
    for done in place.waiting:
        done()
    if place.released is not None:
        place.released()


_AWAY: Any = (STATE["SPILLED"], STATE["SPILLING"])
