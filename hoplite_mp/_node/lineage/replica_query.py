"""Replica query: before a reconstructed result is used, all hosts are asked for the first one.

A task that is run again may return another value, and no reader may see parts of both. The owner of
a lost result may not know yet that a host has a copy, so it asks all hosts while the task runs
again. A host that has the whole value reports it once more. A host that has a part of it, or is
about to fetch it, gives that up and asks the owner anew. So when all hosts have answered, no trace
is left of a first value that no host has reported. A host that only this one has lost contact with
may still be alive and have the value, so this node waits for the manager's verdict.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from hoplite_mp._protocol.peers import OBJECTS_ASKED_MAX, CopiesAsked, CopiesTold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp._node.objects.imports import Imports
    from hoplite_mp._node.objects.remote_objects import RemoteObjects
    from hoplite_mp._node.objects.replicas import Replicas
    from hoplite_mp._node.questions import Questions
    from hoplite_mp._protocol.peers import PeerMessage

__all__ = ["ReplicaQuery"]


class ReplicaQuery:
    """The questions of this node to others, and its answers to theirs."""

    def __init__(
        self,
        imports: Imports,
        remote_objects: RemoteObjects,
        replicas: Replicas,
        questions: Questions,
        send: Callable[[int, PeerMessage], bool],
        host_ids: Callable[[], Iterable[int]],
        doubtful: Callable[[], bool],
    ) -> None:
        """host_ids: returns the ids of all other living hosts. doubtful: whether this node has lost
        contact with a host about which the manager has not decided yet."""
        self.imports = imports
        self.remote_objects = remote_objects
        self.client = imports.client
        self.replicas = replicas
        self.questions = questions
        self.send = send
        self.host_ids = host_ids
        self.doubtful = doubtful
        self._round = 1  # the number of the next `flush`
        self._objects: list[bytes] = []  # the objects of the next round
        self._open: set[int] = set()  # rounds that some hosts have not answered

    # -- questions of this node ----------------------------------------------------------------

    def about(self, object_id: bytes) -> int:
        """Adds an object to the next round; returns the number of the round."""
        self._objects.append(object_id)
        number = self._round
        if len(self._objects) == OBJECTS_ASKED_MAX:
            self.flush()
        return number

    def flush(self) -> None:
        """Begins the round: one message to each host about all objects that were added."""
        if self._objects:
            objects, self._objects = tuple(self._objects), []
            number, self._round = self._round, self._round + 1
            self._open.add(number)
            self.questions.ask_all(
                self.host_ids(),
                functools.partial(CopiesAsked, objects),
                lambda found: self._open.discard(number),
            )

    def answered(self, number: int) -> bool:
        """Whether each host has answered that round, or has died."""
        return number < self._round and number not in self._open and not self.doubtful()

    # -- answers of this node ------------------------------------------------------------------

    def asked(self, host_id: int, message: CopiesAsked) -> None:
        """Answers the owner of these objects, which knows no host that has them."""
        for object_id in message.objects:
            for one in self.imports.all_of(object_id):
                if one.oid in self.remote_objects and not self.remote_objects.absent(one.oid):
                    self.remote_objects.lost(one.oid, "all who had it are gone")
                elif self.imports.is_whole(one):
                    self.replicas.tell(object_id, self.client.inspect(one.oid)["size"])
        self.send(host_id, CopiesTold(message.number))
