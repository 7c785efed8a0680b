"""Requests from processes for objects of other hosts: for their locations, and for holds on them.

A process takes its own hold after it has read the reply. Until the process has confirmed this, the
node keeps a hold on its behalf.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hoplite_mp._common.object_states import VALUED
from hoplite_mp._node.objects.leases import ForeignLeases
from hoplite_mp._protocol.local import DropForeign, HoldForeign, Import, Imported, Reply
from hoplite_mp._protocol.peers import LocateReplicas, ReplicaLocations

if TYPE_CHECKING:
    from hoplite_mp._node.dispatch import Handler, Requests
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.questions import Answer
    from hoplite_mp._protocol.local import Request

__all__ = ["ImportRequests", "Locations"]


class ImportRequests:
    """The requests from one host's processes."""

    def __init__(self, host: HostContext, requests: Requests) -> None:
        self.imports = host.imports
        self.lines = host.clients
        self.reply = host.reply
        self.granted: dict[int, dict[int, Any]] = {}  # slot -> number -> holds not yet taken over
        self.foreign_holds = ForeignLeases(host.client.hold, host.loop, host.reply)
        requests.when_forgotten(lambda slot: self.granted.pop(slot, None))

    @property
    def handlers(self) -> dict[type, Handler]:
        """Handlers by type of request."""
        return {
            Import: self.import_,
            Imported: self.imported,
            HoldForeign: self.foreign_holds.asked,
            DropForeign: self.drop_foreign,
        }

    def import_(self, slot: int, request: Request) -> None:
        """Handles a process's request for objects. `granted` keeps them until the process has its
        own holds."""
        line = self.lines.get(slot)
        objects = request.ask.objects  # type: ignore[union-attr]

        def done(holds: list[Any]) -> None:
            if line is None or self.lines.get(slot) is not line:
                return  # the process has died
            self.granted.setdefault(slot, {})[request.number] = holds
            oids = [0 if hold is None else hold.oid for hold in holds]
            self.reply(slot, Reply(request.number, oids))

        self.imports.ask(objects, done)

    def imported(self, slot: int, request: Request) -> None:
        """Releases the holds for all replies up to this number, because the process has its own."""
        number = request.ask.number  # type: ignore[union-attr]
        granted = self.granted.get(slot, {})
        # A process that was interrupted by Ctrl-C may never confirm some of the earlier replies.
        for old in [old for old in granted if old <= number]:
            del granted[old]

    def keep_granted(self, slot: int, number: int, hold: Any) -> None:
        """Keeps a hold that another component grants in the reply with this number."""
        self.granted.setdefault(slot, {})[number] = [hold]

    def drop_foreign(self, slot: int, request: Request) -> None:
        """Handles the deletion of another host's object by a process on this host."""
        self.imports.drop(request.ask.oid)  # type: ignore[union-attr]


# Locations of objects. An object's owner knows the nodes that hold the whole value. Processes on
# other hosts ask the owner through their own node, which answers from its own records if the owner
# dies before it has answered.


class Locations:
    """Questions about the locations of objects, from this host's processes and from other nodes."""

    def __init__(self, host: HostContext) -> None:
        self.client = host.client
        self.remote_objects = host.remote_objects
        self.imports = host.imports
        self.exports = host.exports
        self.replier = host.replier
        self.send_peer = host.send_peer
        self.questions = host.questions

    def ask(self, slot: int, question: int, oid: int) -> None:
        """Replies to a process with the nodes that hold an object."""
        reply = self.replier(slot)
        record = self.imports.by_oid.get(oid)

        def answered(answer: Answer | None) -> None:
            if answer is None:  # this host is the owner, or the owner is lost
                found = self.holders(oid)
            else:
                here = () if oid in self.remote_objects.by_oid else self.holders(oid)
                found = (*answer.message.holders, *here)
            reply(Reply(question, sorted(set(found))))

        if record is None or record.owner == self.client.host_id:
            answered(None)
        else:
            self.questions.ask(
                record.owner, functools.partial(LocateReplicas, record.object), answered
            )

    def holders(self, oid: int) -> tuple[int, ...]:
        """The numbers of the nodes that are known to hold the whole value."""
        remote = self.remote_objects.by_oid.get(oid)
        here = (self.client.number,) if self.client.state(oid) in VALUED else ()
        found = here if remote is None else remote.holders
        return tuple(sorted({*found, *self.exports.copies_of(oid)}))

    def locate(self, peer: int, message: LocateReplicas) -> None:
        """Answers another node's question about an object of this host."""
        oid = self.imports.local(message.object) or None
        found = () if oid is None else self.holders(oid)
        self.send_peer(peer, ReplicaLocations(message.object, message.number, found))
