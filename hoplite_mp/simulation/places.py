"""Objects on one node: those that it holds whole, and those on their way to it.

Why it exists: gets, broadcasts and collectives that copy may all want the same object; it comes
once, whoever asks. Imitates node/objects/places.py and node/objects/kept.py.
It must never know: how bytes come, how plans look.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hoplite_mp.ids import unpack_id
from hoplite_mp.simulation.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.simulation.imitated import ImitatedNode

__all__ = ["Filler", "Place", "Places"]


class Filler(Protocol):
    """Who fills a place."""

    def forget(self, place: Place) -> None:
        """Stops: nobody wants it any more, or it will be had in another way."""


@dataclass(slots=True, eq=False)
class Place:
    """An object that is elsewhere. `waiting` hear "" when it is here, else why it never will be."""

    object: bytes
    nbytes: int
    holders: tuple[int, ...]
    memory: Memory | None = None  # the block that is being filled; None: nothing has begun
    filler: Filler | None = None
    waiting: list[Callable[[str], None]] = field(default_factory=list)


class Fetcher(Filler, Protocol):
    """Who brings what is asked for."""

    def fetch(self, place: Place) -> None:
        """Fills `place.memory`, then calls `arrived` or `lost`."""


class Places:
    """All objects of one life of a node."""

    def __init__(self, node: ImitatedNode) -> None:
        self.node = node
        self.fetcher: Fetcher | None = None
        self.holds: dict[bytes, Memory] = {}
        self.places: dict[bytes, Place] = {}
        self.kept_at: dict[bytes, set[int]] = {}  # of objects made here: nodes with a copy

    # ---- what is here

    def put(self, object_id: bytes, memory: Memory) -> None:
        """It is here, whole and final, from now on: others may read it."""
        self.node.world.truth.check_sealed(object_id, memory)
        self.holds[object_id] = memory

    def seal(self, object_id: bytes, memory: Memory) -> None:
        """What was made here is a copy that this node keeps; who waits for it already has it."""
        place = self.places.get(object_id)
        if place is not None:
            place.memory = memory
            self.arrived(place)
        elif object_id not in self.holds:
            self.put(object_id, memory)
        self.tell(object_id)

    def is_own(self, object_id: bytes) -> bool:
        """Was it made here?"""
        return unpack_id(object_id)[0] == self.node.home

    def tell(self, object_id: bytes) -> None:
        """A copy is whole: its home must know."""
        if not self.is_own(object_id):
            self.node.tell_home(object_id, "kept", (self.node.number,))

    def holders(self, object_id: bytes) -> tuple[int, ...]:
        """Of an object of this node, as far as it knows."""
        here = (self.node.number,) if object_id in self.holds else ()
        return (*here, *sorted(self.kept_at.get(object_id, ())))

    # ---- what is elsewhere

    def expect(self, object_id: bytes, nbytes: int, holders: tuple[int, ...]) -> Place | None:
        """Where it will be; None: it is here, or it was of this node, and is gone."""
        if object_id in self.holds:
            return None
        place = self.places.get(object_id)
        if place is None and not self.is_own(object_id):
            place = self.places[object_id] = Place(object_id, nbytes, holders)
        return place

    def want(self, place: Place, done: Callable[[str], None]) -> None:
        """Calls `done` when it is here, or will never be."""
        place.waiting.append(done)
        if place.memory is None:
            self._fetch(place)

    def begin(self, place: Place, filler: Filler) -> Memory:
        """Room for it, which the filler fills."""
        place.memory, place.filler = Memory(place.nbytes), filler
        return place.memory

    def _fetch(self, place: Place) -> None:
        assert self.fetcher is not None
        self.begin(place, self.fetcher)
        self.fetcher.fetch(place)

    def let_go(self, place: Place) -> None:
        """Who was filling it will not. If others wait for it, it is fetched."""
        if self.places.get(place.object) is not place:
            return
        if place.waiting:
            self._fetch(place)
        else:
            self._forget(place)

    def _forget(self, place: Place) -> None:
        filler, place.filler, place.memory = place.filler, None, None
        if filler is not None:
            filler.forget(place)

    def arrived(self, place: Place) -> None:
        """Its block is full."""
        assert place.memory is not None
        del self.places[place.object]
        self.put(place.object, place.memory)
        self._close(place, "")

    def lost(self, place: Place, why: str) -> None:
        """No living node holds it."""
        if self.places.get(place.object) is place:
            del self.places[place.object]
            self._forget(place)
            self._close(place, why)

    def _close(self, place: Place, why: str) -> None:
        waiting, place.waiting = place.waiting, []
        for done in waiting:
            done(why)
