"""Before a lost result is replaced by that of a second run: has any host the first one?

Why it exists: a task that is run again may give another value, and nobody must read parts of both.
That a host has a copy its home may hear late, so it asks all of them while the task runs. Who has
the value whole says so once more; who has only parts of it, or knows where to fetch it, gives that
up, and asks the home anew. When all have answered, nothing is left of a value that nobody named.
Who is only lost to this host lives perhaps, and has it: that the manager decides first.
It must never know: why a value is lost, how it is made again.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from hoplite_mp.protocol.peers import OBJECTS_ASKED_MAX, CopiesAsked, CopiesTold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp.node.objects.imports import Imports
    from hoplite_mp.node.objects.remote_objects import RemoteObjects
    from hoplite_mp.node.objects.replicas import Replicas
    from hoplite_mp.node.questions import Questions
    from hoplite_mp.protocol.peers import PeerMessage

__all__ = ["CopyCensus"]


class CopyCensus:
    """What this node asks, and what it answers."""

    def __init__(
        self,
        imports: Imports,
        remote_objects: RemoteObjects,
        replicas: Replicas,
        questions: Questions,
        send: Callable[[int, PeerMessage], bool],
        homes: Callable[[], Iterable[int]],
        doubtful: Callable[[], bool],
    ) -> None:
        """homes: ids of all other living hosts. doubtful: has this host lost one of which the
        manager has not said anything?"""
        self.imports = imports
        self.remote_objects = remote_objects
        self.client = imports.client
        self.replicas = replicas
        self.questions = questions
        self.send = send
        self.homes = homes
        self.doubtful = doubtful
        self._round = 1  # the number of the next `flush`
        self._objects: list[bytes] = []  # what it is about
        self._open: set[int] = set()  # rounds that not all hosts have answered

    # -- what this node asks -------------------------------------------------------------------

    def about(self, object_id: bytes) -> int:
        """Asks at the next `flush`; returns the number of that round."""
        self._objects.append(object_id)
        number = self._round
        if len(self._objects) == OBJECTS_ASKED_MAX:
            self.flush()
        return number

    def flush(self) -> None:
        """One message to each host, whatever has come together."""
        if self._objects:
            objects, self._objects = tuple(self._objects), []
            number, self._round = self._round, self._round + 1
            self._open.add(number)
            self.questions.ask_all(
                self.homes(),
                functools.partial(CopiesAsked, objects),
                lambda found: self._open.discard(number),
            )

    def answered(self, number: int) -> bool:
        """Have all hosts said what they have, or died?"""
        return number < self._round and number not in self._open and not self.doubtful()

    # -- what this node answers ----------------------------------------------------------------

    def asked(self, home: int, message: CopiesAsked) -> None:
        """The home of these objects has lost sight of them."""
        for object_id in message.objects:
            for one in self.imports.all_of(object_id):
                if one.oid in self.remote_objects and not self.remote_objects.absent(one.oid):
                    self.remote_objects.lost(one.oid, "all who had it are gone")
                elif self.imports.is_whole(one):
                    self.replicas.tell(object_id, self.client.inspect(one.oid)["size"])
        self.send(home, CopiesTold(message.number))
