"""Before a lost result is replaced by that of a second run: has any host the first one?

Why it exists: a task that is run again may give another value, and nobody must read parts of both.
That a host has a copy its home may hear late, so it asks all of them while the task runs. Who has
the value whole says so once more; who has only parts of it, or knows where to fetch it, gives that
up, and asks the home anew. When all have answered, nothing is left of a value that nobody named.
Who is only lost to this host lives perhaps, and has it: that the manager decides first.
It must never know: why a value is lost, how it is made again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.protocol.peers import OBJECTS_ASKED_MAX, CopiesAsked, CopiesTold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp.node.objects.imports import Imports
    from hoplite_mp.node.objects.kept import KeptCopies
    from hoplite_mp.node.objects.places import Places
    from hoplite_mp.protocol.peers import PeerMessage

__all__ = ["Inquiries"]


class Inquiries:
    """What this node asks, and what it answers."""

    def __init__(
        self,
        imports: Imports,
        places: Places,
        kept: KeptCopies,
        send: Callable[[int, PeerMessage], bool],
        homes: Callable[[], Iterable[int]],
        doubtful: Callable[[], bool],
    ) -> None:
        """homes: ids of all other living hosts. doubtful: has this host lost one of which the
        manager has not said anything?"""
        self.imports = imports
        self.places = places
        self.client = imports.client
        self.kept = kept
        self.send = send
        self.homes = homes
        self.doubtful = doubtful
        self._number = 1  # of the next question
        self._objects: list[bytes] = []  # what it is about
        self._open: dict[int, set[int]] = {}  # question -> hosts that have not answered

    # -- what this node asks -------------------------------------------------------------------

    def about(self, object_id: bytes) -> int:
        """Asks at the next `flush`; returns the number of the question."""
        self._objects.append(object_id)
        number = self._number
        if len(self._objects) == OBJECTS_ASKED_MAX:
            self.flush()
        return number

    def flush(self) -> None:
        """One message to each host, whatever has come together."""
        if self._objects:
            objects, self._objects = tuple(self._objects), []
            number, self._number = self._number, self._number + 1
            asked = {home for home in self.homes() if self.send(home, CopiesAsked(objects, number))}
            if asked:
                self._open[number] = asked

    def answered(self, number: int) -> bool:
        """Have all hosts said what they have, or died?"""
        return number < self._number and number not in self._open and not self.doubtful()

    def told(self, home: int, message: CopiesTold) -> None:
        """That host has said before what it has."""
        self._answer(message.number, home)

    def lose_peer(self, home: int) -> None:
        """That host is gone, with its copies."""
        for number in list(self._open):
            self._answer(number, home)

    def _answer(self, number: int, home: int) -> None:
        waiting = self._open.get(number, set())
        waiting.discard(home)
        if not waiting:
            self._open.pop(number, None)

    # -- what this node answers ----------------------------------------------------------------

    def asked(self, home: int, message: CopiesAsked) -> None:
        """The home of these objects has lost sight of them."""
        for object_id in message.objects:
            for one in self.imports.all_of(object_id):
                if one.oid in self.places and not self.places.absent(one.oid):
                    self.places.lost(one.oid, "all who had it are gone")
                elif self.imports.is_whole(one):
                    self.kept.tell(object_id, self.client.inspect(one.oid)["size"])
        self.send(home, CopiesTold(message.number))
