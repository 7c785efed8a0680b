"""Which nodes hold an object: requests of processes here, answered by the object's owner.

The owner knows who holds the whole value. Processes of other hosts ask it through their node; if
the owner dies meanwhile, their node answers with what it knows itself.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from hoplite_mp._common.object_states import VALUED
from hoplite_mp._protocol.local import Reply
from hoplite_mp._protocol.peers import Located, LocateReplicas

if TYPE_CHECKING:
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.questions import Answer

__all__ = ["Locations"]


class Locations:
    """Questions of this host's processes, and of other nodes about this host's objects."""

    def __init__(self, host: HostContext) -> None:
        self.client = host.client
        self.remote_objects = host.remote_objects
        self.imports = host.imports
        self.exports = host.exports
        self.replier = host.replier
        self.send_peer = host.send_peer
        self.questions = host.questions

    def ask(self, slot: int, question: int, oid: int) -> None:
        """A process asks which nodes hold an object."""
        reply = self.replier(slot)
        one = self.imports.by_oid.get(oid)

        def told(answer: Answer | None) -> None:
            if answer is None:  # this host is the owner, or the owner is lost
                found = self.holders(oid)
            else:
                here = () if oid in self.remote_objects.by_oid else self.holders(oid)
                found = (*answer.message.holders, *here)
            reply(Reply(question, sorted(set(found))))

        if one is None or one.owner == self.client.host_id:
            told(None)
        else:
            self.questions.ask(one.owner, functools.partial(LocateReplicas, one.object), told)

    def holders(self, oid: int) -> tuple[int, ...]:
        """Numbers of the nodes that hold the whole value, as far as this node knows."""
        remote = self.remote_objects.by_oid.get(oid)
        here = (self.client.number,) if self.client.state(oid) in VALUED else ()
        found = here if remote is None else remote.holders
        return tuple(sorted({*found, *self.exports.copies_of(oid)}))

    def locate(self, peer: int, message: LocateReplicas) -> None:
        """Another node asks about an object of this host."""
        oid = self.imports.local(message.object) or None
        found = () if oid is None else self.holders(oid)
        self.send_peer(peer, Located(message.object, message.number, found))
