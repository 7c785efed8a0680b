"""Who holds an object: asked by a process here, answered by the object's home.

Why it exists: the home counts who holds the whole value. Processes of other hosts ask through their
node; a home that goes away meanwhile leaves the answer to what this node knows itself.
It must never know: how copies come to be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hoplite_mp.headers import VALUED
from hoplite_mp.protocol.local import Reply
from hoplite_mp.protocol.peers import Locate, Located

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.objects.context import HostContext

__all__ = ["Locations"]


class _Asked(NamedTuple):
    """A question that the object's home answers."""

    reply: Callable[[Reply], None]
    question: int
    oid: int
    home: int


class Locations:
    """Questions of this host's processes, and of other nodes about its objects."""

    def __init__(self, host: HostContext) -> None:
        self.client = host.client
        self.places = host.places
        self.imports = host.imports
        self.exports = host.exports
        self.reply = host.reply
        self.replier = host.replier
        self.send_peer = host.send_peer
        self.asked: dict[int, _Asked] = {}  # by number
        self._next = 1

    def ask(self, slot: int, question: int, oid: int) -> None:
        """A process wants to know who holds an object; it is answered by a Reply."""
        one = self.imports.by_oid.get(oid)
        if one is not None and one.home != self.client.home:
            number, self._next = self._next, self._next + 1
            self.asked[number] = _Asked(self.replier(slot), question, oid, one.home)
            if self.send_peer(one.home, Locate(one.object, number)):
                return
            del self.asked[number]
        self.reply(slot, _told(question, self.holders(oid)))

    def holders(self, oid: int) -> tuple[int, ...]:
        """Numbers of the nodes that hold the whole value, as far as this node knows."""
        place = self.places.places.get(oid)
        here = (self.client.number,) if self.client.state(oid) in VALUED else ()
        found = here if place is None else place.holders
        return tuple(sorted({*found, *self.exports.copies_of(oid)}))

    def locate(self, peer: int, message: Locate) -> None:
        """Another node asks about an object of this host."""
        oid = self.imports.local(message.object) or None
        found = () if oid is None else self.holders(oid)
        self.send_peer(peer, Located(message.object, message.number, found))

    def located(self, message: Located) -> None:
        """The home's answer."""
        asked = self.asked.pop(message.number, None)
        if asked is not None:
            here = () if asked.oid in self.places.places else self.holders(asked.oid)
            asked.reply(_told(asked.question, (*message.holders, *here)))

    def lose_peer(self, peer: int) -> None:
        """That host will not answer."""
        for number, asked in list(self.asked.items()):
            if asked.home == peer:
                del self.asked[number]
                asked.reply(_told(asked.question, self.holders(asked.oid)))


def _told(question: int, numbers: tuple[int, ...]) -> Reply:
    return Reply(question, sorted(set(numbers)))
