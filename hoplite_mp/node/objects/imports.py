"""Objects of other hosts that processes of this host use.

Why it exists: a ref of another host's becomes a header of this host's, which the node claims until
the object's home says how it stands; from then on every process uses it like any other object. The
home is told once when the first process here holds it, and once when the last one has let go.
It must never know: who asks for what, how messages travel, where big bytes come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp import ids, serial
from hoplite_mp.errors import ObjectLostError
from hoplite_mp.headers import GONE, KIND_FOREIGN, NODE_SLOT, STATE, UNWRITTEN, VALUED
from hoplite_mp.protocol.peers import Acquire, Drop, Release

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.objects.remote_objects import RemoteObjects
    from hoplite_mp.node.objects.results import Results
    from hoplite_mp.protocol.peers import Described, PeerMessage

__all__ = ["Import", "Imports"]


@dataclass(slots=True, eq=False)
class Import:
    """One header here that stands for an object of another host."""

    object: bytes
    home: int
    number: int
    oid: int
    hold: Any  # the node's own, until somebody else holds it
    described: bool = False
    kept: bool = False  # by a hold of the node's, whether processes hold it or not
    moved: int = -1  # number of the node after whose death another home was named
    waiting: list[Callable[[], None]] = field(default_factory=list)
    # All headers here that stand for the same object, in a list that they share. The first one is
    # found by the object's id; the others are those that somebody still holds.
    same: list[Import] = field(default_factory=list, repr=False)


class Above(Protocol):
    """What rooms above this one know, or must hear."""

    def nobody_named(self, oid: int) -> None:
        """A home names nobody who has what all known holders have taken along."""

    def homeless(self, one: Import) -> bool:
        """An import's home is not there; False: there cannot be another."""


class Imports:
    """All objects of other hosts that are in use here."""

    def __init__(
        self,
        results: Results,
        remote_objects: RemoteObjects,
        send: Callable[[int, PeerMessage], bool],
        above: Above,
    ) -> None:
        self.results = results
        self.above = above
        self.client = results.client
        self.remote_objects = remote_objects
        self.send = send  # to the node whose host has this home id; False: there is none
        self.by_object: dict[bytes, Import] = {}
        self.by_oid: dict[int, Import] = {}
        self._next = 1
        results.local = self.local

    def ask(self, objects: list[bytes], done: Callable[[list[Any]], None]) -> None:
        """Calls `done` with a hold on each object's header here (None: it is gone), as soon as the
        homes have said that the objects stay as long as these holds do."""
        found = [self._hold(one) for one in objects]
        open_ = {id(one): one for one, _ in found if one is not None and not one.described}
        left = len(open_)
        holds = [hold for _, hold in found]

        def one_less() -> None:
            nonlocal left
            left -= 1
            if not left:
                done(holds)

        for one in open_.values():
            one.waiting.append(one_less)
        if not open_:
            done(holds)

    def _hold(self, object_id: bytes) -> tuple[Import | None, Any]:
        home, oid = ids.unpack_id(object_id)
        if home == self.client.home:
            return None, self.client.hold(oid)
        known = self.by_object.get(object_id)
        if known is not None:
            hold = self.client.hold(known.oid)
            if hold is not None:
                if known.kept and not known.number and known.home != self.client.home:
                    self._acquire(known)
                return known, hold
        one = self._new(object_id)
        hold = self.client.hold(one.oid)
        self._acquire(one)
        return one, hold

    def _new(self, object_id: bytes) -> Import:
        oid = self.client.new(KIND_FOREIGN, STATE["CLAIMED"], NODE_SLOT, 0)
        hold = self.client.hold(oid, False)
        one = Import(object_id, ids.unpack_id(object_id)[0], 0, oid, hold)
        self.lead(one)
        return one

    def lead(self, one: Import) -> None:
        """Of all headers here that stand for its object, this is the one that is found by it."""
        one.same = self.by_object.get(one.object, one).same
        self.by_object[one.object] = self.by_oid[one.oid] = one
        if one in one.same:
            one.same.remove(one)
        one.same.insert(0, one)

    def all_of(self, object_id: bytes) -> list[Import]:
        """All headers here that stand for that object."""
        one = self.by_object.get(object_id)
        return [] if one is None else [*one.same]

    def _acquire(self, one: Import) -> None:
        """Tells the home that it is held here; its answer is on the way from now on."""
        one.number, self._next = self._next, self._next + 1
        one.described = False
        if not self.send(one.home, Acquire(one.object, one.number)) and not self.above.homeless(
            one
        ):
            self.fail(one, "its host is not in this cluster, or has left it")

    def keep(self, object_id: bytes) -> Any:
        """A hold on the header here, which the home does not count."""
        one = self.by_object.get(object_id)
        hold = None if one is None else self.client.hold(one.oid)
        if one is None or hold is None:
            one = self._new(object_id)
            hold, one.hold, one.described = one.hold, None, True
        one.kept = True
        return hold

    def release_kept(self, oid: int) -> bool:
        """No process holds it here any more; the node keeps it all the same. False: none has."""
        one = self.by_oid.get(oid)
        if one is None or not one.number or not one.described:
            return False
        self.send(one.home, Release(one.object, one.number))
        one.number = 0
        return True

    def adopt(self, object_id: bytes, oid: int) -> None:
        """A header of this host's that stands for that object already (a task that runs here). One
        that processes have waited with so far is told by the home, as others are."""
        self.lead(Import(object_id, ids.unpack_id(object_id)[0], 0, oid, None, True))

    def public(self, oid: int) -> bytes:
        """The id under which all hosts know an object that has a header here."""
        one = self.by_oid.get(oid)
        return ids.pack_id(self.client.home, oid) if one is None else one.object

    def near(self, object_id: bytes, oid: int) -> memoryview | None:
        """The payload of that object, if this host has it under another header than that one: a
        process has held a ref to a task that was then sent here."""
        one = self.by_object.get(object_id)
        if one is None or one.oid == oid:
            return None
        got = self.client.view(one.oid)
        if isinstance(got, int) and self.results.store.restore(one.oid):
            got = self.client.view(one.oid)
        return None if isinstance(got, int) else memoryview(got)

    def own(self, object_id: bytes) -> int:
        """Where an object lies of which this host is the home: it was made here, or this host has
        taken it over. 0: it is another's."""
        home, oid = ids.unpack_id(object_id)
        if home == self.client.home:
            return oid
        one = self.by_object.get(object_id)
        return one.oid if one is not None and one.home == self.client.home else 0

    def local(self, object_id: bytes) -> int:
        """Where an object of any host lies on this one; 0: nowhere."""
        home, oid = ids.unpack_id(object_id)
        if home == self.client.home:
            return oid
        one = self.by_object.get(object_id)
        return 0 if one is None else one.oid

    def is_whole(self, one: Import) -> bool:
        """Is the value on this host?"""
        return self.client.state(one.oid) in VALUED and one.oid not in self.remote_objects

    def home_of(self, object_id: bytes) -> int:
        """Who counts its holders."""
        one = self.by_object.get(object_id)
        return ids.unpack_id(object_id)[0] if one is None else one.home

    # -- what the home says --------------------------------------------------------------------

    def described(self, message: Described) -> None:
        """How an object of ours stands at its home: at once, and when a pending one is done."""
        headers = self.all_of(message.object)
        one = next((one for one in headers if one.number == message.number), None)
        if one is None:
            return
        if self.client.state(one.oid) not in UNWRITTEN:
            if self.remote_objects.absent(one.oid):
                self._there_again(one, message)
            else:
                self.remote_objects.learn(one.oid, message.holders)
            self.answer(one)  # said before, or placed here by a collective
            return
        if message.standing == "ready":
            self._ready(one, message)
        elif message.standing == "failed":
            assert message.payload is not None
            self.store(one, message.payload, True)
        elif message.standing == "gone":
            self.fail(one, "it was deleted, or nobody held it any more")
        self.answer(one)

    def _there_again(self, one: Import, message: Described) -> None:
        """What the home says of an object whose holders have died."""
        if message.payload is not None:
            self.remote_objects.replace(one.oid, message.payload)
        elif message.standing == "gone":
            why = f"object {one.object.hex()} is lost: it was deleted, or nobody held it any more"
            self.remote_objects.fail(one.oid, ObjectLostError(why))
        elif message.holders:
            self.remote_objects.found(one.oid, message.holders, message.nbytes, message.layout)
        elif message.standing == "ready":
            self.above.nobody_named(one.oid)

    def _ready(self, one: Import, message: Described) -> None:
        if message.payload is None or not self.store(one, message.payload, False):
            self.remote_objects.complete(
                one.oid, message.object, message.nbytes, message.holders, message.layout
            )

    def store(self, one: Import, payload: bytes, failed: bool) -> bool:
        """Writes the value of a header that is CLAIMED. False: there is no room for it now (an
        error is then told in a few words)."""
        encoded = serial.Encoded(payload, [], [], len(payload), [])
        if not failed:
            return self.results.store_if_room(one.oid, encoded, False)
        lost = ObjectLostError("its error found no room here")
        self.results.store_value(one.oid, encoded, True, lost)
        return True

    def fail(self, one: Import, why: str) -> None:
        """Its value will never be known here."""
        if self.client.state(one.oid) == STATE["CLAIMED"]:
            error = ObjectLostError(f"object {one.object.hex()} is lost: {why}")
            self.store(one, serial.encode_error(error, "").tobytes(), True)
        self.answer(one)

    def answer(self, one: Import) -> None:
        """Who has asked for it goes on."""
        one.described = True
        waiting, one.waiting = one.waiting, []
        for done in waiting:
            done()
        one.hold = None  # who asked has a hold by now, or does not want it

    # -- the end -------------------------------------------------------------------------------

    def freed(self, oid: int) -> None:
        """The node has collected a header of its own; its last holder here may have gone."""
        one = self.by_oid.get(oid)
        if one is None or self.client.state(oid) not in GONE:
            return
        del self.by_oid[oid]
        one.same.remove(one)
        if one.same:
            self.by_object[one.object] = one.same[0]
        else:
            del self.by_object[one.object]
        self.remote_objects.drop(oid)
        if one.number or not one.kept:
            self.send(one.home, Release(one.object, one.number))

    def drop(self, oid: int) -> None:
        """Somebody here has deleted it."""
        one = self.by_oid.get(oid)
        if one is not None:
            self.send(one.home, Drop(one.object))
