"""Replicas: copies of other hosts' objects that the node keeps even if no process here holds them.

Broadcasts and the argument `to=` place values on hosts that hold no ref yet. Such a host's node
keeps the copy with its own hold, which the owner does not count. When the object has no holder left
in the cluster, the owner sends DropReplica (_node/objects/exports.py), and the replicas are
released. When a process here requests the object, the replica becomes an import like any other
while the process holds it. This component therefore polls whether the node's own hold is the only
one left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp._common.object_states import STATE, VALUELESS
from hoplite_mp._node.objects.exports import KEPT_POLL_S
from hoplite_mp._protocol.peers import ReplicaStored

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.objects.exports import Exports
    from hoplite_mp._node.objects.imports import Imports
    from hoplite_mp._node.objects.remote_objects import RemoteObjects
    from hoplite_mp._node.objects.results import ResultWriter
    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._protocol.messages import Member
    from hoplite_mp._protocol.peers import PeerMessage

__all__ = ["Replicas"]


class Replicas:
    """The replicas that this node keeps."""

    def __init__(
        self,
        results: ResultWriter,
        imports: Imports,
        exports: Exports,
        remote_objects: RemoteObjects,
        send: Callable[[int, PeerMessage], bool],
        loop: LoopPort,
    ) -> None:
        self.results = results
        self.client = results.client
        self.imports = imports
        self.remote_objects = remote_objects
        self.send = send
        self.loop = loop
        self.exports = exports
        self.holds: dict[bytes, Any] = {}
        # Results of other hosts' tasks that the node keeps until those hosts release them, and for
        # which the owners also count this host because processes here hold them.
        self._results: set[int] = set()
        self._polling = False

    def expect(
        self, object_id: bytes, nbytes: int, holders: tuple[int, ...], layout: bytes = b""
    ) -> int:
        """Returns the id of a ready object's header on this host. The value is here or can be
        fetched from the nodes `holders`. If this host owns the object, the object may be gone."""
        oid = self._header(object_id)
        if oid and self.client.state(oid) == STATE["CLAIMED"] and self._is_foreign(object_id):
            self.remote_objects.complete(oid, object_id, nbytes, holders, layout)
        return oid

    def keep(self, object_id: bytes, nbytes: int) -> None:
        """Keeps a value that is already here as a replica."""
        if self._is_foreign(object_id) and object_id not in self.holds:
            self._header(object_id)
            self.tell(object_id, nbytes)

    def seal(self, object_id: bytes, payload: int, nbytes: int) -> None:
        """Turns a block with the whole value into a replica."""
        oid = self._header(object_id)
        if self.client.state(oid) == STATE["CLAIMED"]:
            self.results.store_block(oid, payload, nbytes)
        # The owner's description has arrived before the manager's commit.
        elif oid in self.remote_objects:
            self.remote_objects.brought(oid, payload)
        else:
            self.client.give_back(payload)
        self.tell(object_id, nbytes)

    def tell(self, object_id: bytes, nbytes: int) -> None:
        """Notifies the object's owner that a replica is complete."""
        owner = self.imports.owner_of(object_id)
        if owner != self.client.host_id and not self.send(owner, ReplicaStored(object_id, nbytes)):
            record = self.imports.by_object.get(object_id)
            if record is not None:
                self.imports.events.ask_for_owner(record)

    def report(self, message: ReplicaStored) -> None:
        """Passes the notification to the object's owner, which may be this host."""
        owner = self.imports.owner_of(message.object)
        if owner == self.client.host_id:
            self.exports.kept(owner, message)
        else:
            self.send(owner, message)

    def _is_foreign(self, object_id: bytes) -> bool:
        return self.imports.owner_of(object_id) != self.client.host_id

    def _header(self, object_id: bytes) -> int:
        own = self.imports.own(object_id)
        if own:
            return own
        if object_id not in self.holds:
            self.holds[object_id] = self.imports.keep(object_id)
            self._poll_later()
        return int(self.holds[object_id].oid)

    def let_go(self, object_id: bytes) -> None:
        """Releases a replica, for example after a DropReplica from the owner."""
        self.holds.pop(object_id, None)

    def only_kept(self, object_id: bytes) -> bool:
        """Whether the object is here only as a replica, which no process here holds."""
        hold = self.holds.get(object_id)
        return hold is not None and self.exports.only_ours(hold.oid)

    def peer_lost(self, member: Member) -> None:
        """Releases the replicas of a lost host's objects. The lineage components have already taken
        their own holds on them."""
        for object_id in [
            object_id
            for object_id in self.holds
            if self.imports.owner_of(object_id) == member.host_id
        ]:
            del self.holds[object_id]

    def keep_on(self, object_id: bytes, hold: Any) -> None:
        """Keeps a replica of an object whose lost owner has been replaced by a new one."""
        self.holds[object_id] = hold
        self._poll_later()

    def watch_result(self, oid: int) -> None:
        """Polls whether the node's own hold on the result of another host's task is the only one
        left here. The node keeps the result for the owner, which also counts this host because
        processes here hold the result."""
        self._results.add(oid)
        self._poll_later()

    # -- polling -------------------------------------------------------------------------------

    def _poll_later(self) -> None:
        if not self._polling:
            self._polling = True
            self.loop.call_later(KEPT_POLL_S, self._poll)

    def _poll(self) -> None:
        for object_id, hold in list(self.holds.items()):
            if object_id not in self.holds:
                continue  # a failed send in this loop has dropped the replica
            if not self.exports.only_ours(hold.oid):
                continue
            never_came = self._cannot_arrive(hold.oid)
            was_counted = self.imports.release_kept(hold.oid, keeps=not never_came)
            if never_came:
                del self.holds[object_id]
            elif was_counted:
                self.tell(object_id, self.client.inspect(hold.oid)["size"])
        self._results = {oid for oid in self._results if not self._result_ended(oid)}
        self._polling = bool(self.holds or self._results)
        if self._polling:
            self.loop.call_later(KEPT_POLL_S, self._poll)

    def _result_ended(self, oid: int) -> bool:
        """Whether polling of a result can stop. If the node does not keep the result, the owner is
        notified when the result's header is freed."""
        record = self.imports.by_oid.get(oid)
        if record is None or not record.number or not self.client.private_counts(oid)[0]:
            return True
        replica = self.holds.get(record.object)  # may be a hold on another header of the object
        ours = self.exports.holds_only(oid, int(replica is not None and replica.oid == oid))
        return ours and self.imports.release_kept(oid, keeps=False)

    def _cannot_arrive(self, oid: int) -> bool:
        """Whether the value can no longer arrive, because it is lost or an error, or its task was
        cancelled."""
        remote = self.remote_objects.by_oid.get(oid)
        nowhere = remote is not None and not remote.payload
        return nowhere or self.client.state(oid) in VALUELESS
