"""Copies that live without a process that holds them: placed here or elsewhere by a collective.

Why it exists: `to=` and broadcast put values on hosts where nobody holds a ref yet. Such a copy is
kept by a hold of its node, and does not count at its home: when nobody in the cluster holds the
object any more, the home says LetGo, and the copies go. A process that asks for the object of a
kept copy makes it an import like any other, as long as it holds it.

Both sides look, while there is something to look at, whether theirs is the only hold left: no
process can take one from then on but through this node.
It must never know: how bytes came here, who asked for the copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp.headers import DROPPED, NODE_SLOT, STATE
from hoplite_mp.protocol.peers import Kept, LetGo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp.node.objects.imports import Imports
    from hoplite_mp.node.objects.places import Places
    from hoplite_mp.node.objects.results import Results
    from hoplite_mp.node.ports import Loop
    from hoplite_mp.protocol.peers import PeerMessage, Release

__all__ = ["KEPT_LOOK_S", "KeptCopies"]

# How often it is looked whether a kept object is still wanted. Higher: memory of copies that nobody
# wants is free later; lower: more looks (a few us for each kept object).
KEPT_LOOK_S = 0.25


@dataclass(slots=True)
class Lent:
    """An object of this host that other nodes keep copies of."""

    hold: Any
    object: bytes
    peers: set[int] = field(default_factory=set)  # homes of the hosts


class Above(Protocol):
    """What rooms above this one know, or must hear."""

    def extra_holds(self, oid: int) -> int:
        """How many holds on an object are there for other reasons than that somebody wants it?"""


class KeptCopies:
    """What this node keeps of others, and what others keep of it."""

    def __init__(
        self,
        results: Results,
        imports: Imports,
        places: Places,
        send: Callable[[int, PeerMessage], bool],
        loop: Loop,
        above: Above,
    ) -> None:
        self.results = results
        self.client = results.client
        self.imports = imports
        self.places = places
        self.send = send
        self.loop = loop
        self.above = above
        self.holds: dict[bytes, Any] = {}  # objects of others
        self.lent: dict[int, Lent] = {}  # objects of this host
        self._looking = False

    # -- copies here ---------------------------------------------------------------------------

    def expect(
        self, object_id: bytes, nbytes: int, holders: tuple[int, ...], layout: bytes = b""
    ) -> int:
        """The header here of a ready object: its value is at hand, or its bytes are told to be
        elsewhere and can be asked for. 0: it is of this host, and gone."""
        oid = self._header(object_id)
        if oid and self.client.state(oid) == STATE["CLAIMED"] and self._is_foreign(object_id):
            self.places.complete(oid, object_id, nbytes, holders, layout)
        return oid

    def keep(self, object_id: bytes, nbytes: int) -> None:
        """A value that is here, for another reason so far."""
        if self._is_foreign(object_id) and object_id not in self.holds:
            self._header(object_id)
            self.tell(object_id, nbytes)

    def seal(self, object_id: bytes, payload: int, nbytes: int) -> None:
        """A block with the whole value becomes the copy here."""
        oid = self._header(object_id)
        if self.client.state(oid) == STATE["CLAIMED"]:
            self.results.store_block(oid, payload, nbytes)
        elif oid in self.places:  # its home has said before the manager that it is here
            self.places.brought(oid, payload)
        else:
            self.client.give_back(payload)
        self.tell(object_id, nbytes)

    def tell(self, object_id: bytes, nbytes: int) -> None:
        """A copy is whole: its home must know."""
        home = self.imports.home_of(object_id)
        if home != self.client.home and not self.send(home, Kept(object_id, nbytes)):
            one = self.imports.by_object.get(object_id)
            if one is not None:
                self.imports.above.homeless(one)

    def say(self, message: Kept) -> None:
        """Tells the object's home, which may be this host."""
        home = self.imports.home_of(message.object)
        if home == self.client.home:
            self.kept(home, message)
        else:
            self.send(home, message)

    def _is_foreign(self, object_id: bytes) -> bool:
        return self.imports.home_of(object_id) != self.client.home

    def _header(self, object_id: bytes) -> int:
        own = self.imports.own(object_id)
        if own:
            return own
        if object_id not in self.holds:
            self.holds[object_id] = self.imports.keep(object_id)
            self._look_later()
        return int(self.holds[object_id].oid)

    def let_go(self, object_id: bytes) -> None:
        """Its home says that nobody wants it any more."""
        self.holds.pop(object_id, None)

    def only_kept(self, object_id: bytes) -> bool:
        """Is nobody here who wants it?"""
        hold = self.holds.get(object_id)
        return hold is not None and self._only_ours(hold.oid)

    # -- copies elsewhere ----------------------------------------------------------------------

    def kept(self, peer: int, message: Kept) -> None:
        """Another node keeps a copy of an object of this host."""
        if not self.lend(message.object, message.hosts or (peer,)):
            self.send(peer, LetGo(message.object))

    def lend(self, object_id: bytes, hosts: Iterable[int]) -> bool:
        """Hosts with these homes keep a copy of an object of this one; False: it is gone."""
        oid = self.imports.own(object_id)
        lent = self.lent.get(oid)
        if lent is None:
            hold = self.client.hold(oid) if oid else None
            if hold is None or self.client.state(oid) in DROPPED:
                return False
            lent = self.lent[oid] = Lent(hold, object_id)
            self._look_later()
        lent.peers.update({*hosts} - {self.client.home})
        return True

    def released(self, peer: int, message: Release) -> None:
        """No process there holds it any more; a copy that is kept all the same is told again."""
        lent = self.lent.get(self.imports.own(message.object))
        if lent is not None:
            lent.peers.discard(peer)

    def peers_of(self, oid: int) -> tuple[int, ...]:
        """Homes of the hosts that keep a copy of an object of this one."""
        lent = self.lent.get(oid)
        return () if lent is None else tuple(lent.peers)

    def lose_peer(self, peer: int) -> None:
        """That host is gone, with its copies and its objects."""
        for lent in self.lent.values():
            lent.peers.discard(peer)
        for object_id in [one for one in self.holds if self.imports.home_of(one) == peer]:
            del self.holds[object_id]

    def keep_on(self, object_id: bytes, hold: Any) -> None:
        """A copy that is here stays, though the home that knew of it is gone: there is another."""
        self.holds[object_id] = hold
        self._look_later()

    # -- who still wants them ------------------------------------------------------------------

    def _look_later(self) -> None:
        if not self._looking:
            self._looking = True
            self.loop.call_later(KEPT_LOOK_S, self._look)

    def _look(self) -> None:
        for oid, lent in list(self.lent.items()):
            if lent.peers and self.client.state(oid) not in DROPPED and not self._only_ours(oid):
                continue
            del self.lent[oid]
            for peer in lent.peers:
                self.send(peer, LetGo(lent.object))
        for object_id, hold in list(self.holds.items()):
            if object_id not in self.holds:
                continue  # its home has turned out to be gone
            if not self._only_ours(hold.oid):
                continue
            was_counted = self.imports.release_kept(hold.oid)
            if self._never_came(hold.oid):
                del self.holds[object_id]  # and nobody waits for it
            elif was_counted:
                self.tell(object_id, self.client.inspect(hold.oid)["size"])
        self._looking = bool(self.lent or self.holds)
        if self._looking:
            self.loop.call_later(KEPT_LOOK_S, self._look)

    def _never_came(self, oid: int) -> bool:
        """Was a value to come, and does not any more, or is an error in its place?"""
        place = self.places.places.get(oid)
        nowhere = place is not None and not place.payload
        return nowhere or self.client.state(oid) == STATE["FAILED"]

    def _only_ours(self, oid: int) -> bool:
        """Is this file's the last hold on it?"""
        counts = self.client.private_counts(oid)
        ours = 1 + self.above.extra_holds(oid)
        return counts[0] == ours and self.client.inspect(oid)["refs"] == [NODE_SLOT]
