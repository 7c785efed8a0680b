"""Replicas: copies that live without a process that holds them, placed here or elsewhere by a
collective.

Why it exists: `to=` and broadcast put values on hosts where nobody holds a ref yet. Such a copy is
kept by a hold of its node, and does not count at its home: when nobody in the cluster holds the
object any more, the home says LetGo (node/objects/exports.py), and the copies go. A process that
asks for the object of a kept copy makes it an import like any other, as long as it holds it: this
side, too, looks whether its own is the only hold left.
It must never know: how bytes came here, who asked for the copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.headers import STATE
from hoplite_mp.node.objects.exports import KEPT_LOOK_S
from hoplite_mp.protocol.peers import Kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.objects.exports import Exports
    from hoplite_mp.node.objects.imports import Imports
    from hoplite_mp.node.objects.remote_objects import RemoteObjects
    from hoplite_mp.node.objects.results import Results
    from hoplite_mp.node.ports import Loop
    from hoplite_mp.protocol.peers import PeerMessage

__all__ = ["Replicas"]


class Replicas:
    """What this node keeps of others."""

    def __init__(
        self,
        results: Results,
        imports: Imports,
        exports: Exports,
        remote_objects: RemoteObjects,
        send: Callable[[int, PeerMessage], bool],
        loop: Loop,
    ) -> None:
        self.results = results
        self.client = results.client
        self.imports = imports
        self.remote_objects = remote_objects
        self.send = send
        self.loop = loop
        self.exports = exports
        self.holds: dict[bytes, Any] = {}
        self._looking = False

    def expect(
        self, object_id: bytes, nbytes: int, holders: tuple[int, ...], layout: bytes = b""
    ) -> int:
        """The header here of a ready object: its value is at hand, or its bytes are told to be
        elsewhere and can be asked for. 0: it is of this host, and gone."""
        oid = self._header(object_id)
        if oid and self.client.state(oid) == STATE["CLAIMED"] and self._is_foreign(object_id):
            self.remote_objects.complete(oid, object_id, nbytes, holders, layout)
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
        elif oid in self.remote_objects:  # its home has said before the manager that it is here
            self.remote_objects.brought(oid, payload)
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
            self.exports.kept(home, message)
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
        return hold is not None and self.exports.only_ours(hold.oid)

    def lose_peer(self, peer: int) -> None:
        """That host is gone, with its objects."""
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
        for object_id, hold in list(self.holds.items()):
            if object_id not in self.holds:
                continue  # its home has turned out to be gone
            if not self.exports.only_ours(hold.oid):
                continue
            was_counted = self.imports.release_kept(hold.oid)
            if self._never_came(hold.oid):
                del self.holds[object_id]  # and nobody waits for it
            elif was_counted:
                self.tell(object_id, self.client.inspect(hold.oid)["size"])
        self._looking = bool(self.holds)
        if self._looking:
            self.loop.call_later(KEPT_LOOK_S, self._look)

    def _never_came(self, oid: int) -> bool:
        """Was a value to come, and does not any more, or is an error in its place?"""
        remote = self.remote_objects.by_oid.get(oid)
        nowhere = remote is not None and not remote.payload
        return nowhere or self.client.state(oid) == STATE["FAILED"]
