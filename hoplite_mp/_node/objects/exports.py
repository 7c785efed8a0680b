"""Exports: objects of this host that other hosts hold, or that have replicas on other nodes.

The owner of an object counts the hosts that hold it, one entry for each import, and keeps the
object with its own hold. When a pending object is done, every importer is notified: with the
payload if that is small and present, otherwise with the nodes that have the bytes. Replicas
(_node/objects/replicas.py) do not count as holders: when the object has no holder left in the
cluster, the owner asks the nodes with replicas to release them. While there are replicas, the owner
polls whether its own hold is the only one left. That state is stable, because processes can then
obtain a hold only through this node.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp import _serialize
from hoplite_mp._common.object_states import AWAY, DROPPED, NODE_SLOT, is_cancelled
from hoplite_mp._node.objects.remote_objects import layout_of, payload_layout
from hoplite_mp._protocol.fields import INLINE_BYTES_MAX
from hoplite_mp._protocol.peers import DropReplica, ObjectReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp._node.objects.remote_objects import RemoteObjects
    from hoplite_mp._node.objects.results import ResultWriter
    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._node.roster import Roster
    from hoplite_mp._protocol.messages import Member
    from hoplite_mp._protocol.peers import Acquire, PeerMessage, Reconstruct, Release, ReplicaStored

__all__ = ["KEPT_POLL_S", "Exports"]

# Interval of checks whether replicated objects are still held. Higher: memory of unneeded replicas
# is freed later. Lower: more checks (a few us for each object).
KEPT_POLL_S = 0.25
# For objects that are polled in each turn, because no process announces their completion.
NO_BUCKET = -1


@dataclass(slots=True)
class Export:
    """An object that other hosts hold, or that has replicas on other nodes."""

    oid: int
    object: bytes
    hold: Any
    importers: set[tuple[int, int]] = field(default_factory=set)  # (host id, number of the import)
    copies: set[int] = field(default_factory=set)  # ids of hosts whose nodes keep a replica
    # buckets (lists of waiters) in which the node is registered until the object is done
    watched: list[int] = field(default_factory=list)


class ExportsEvents(Protocol):
    """Requests from this component to the components above it."""

    def extra_holds(self, oid: int) -> int:
        """The number of the node's holds on the object that are not for a process here: holds for
        lineage, and a hold for the host of the task whose result the object is."""


class Exports:
    """All objects of this host that other hosts use."""

    def __init__(
        self,
        results: ResultWriter,
        remote_objects: RemoteObjects,
        send: Callable[[int, PeerMessage], bool],
        node: Callable[[], int],
        loop: LoopPort,
        roster: Roster,
        events: ExportsEvents,
    ) -> None:
        self.results = results
        self.client = results.client
        self.tasks = results.tasks
        self.remote_objects = remote_objects
        self.send = send
        self.node = node  # this node's number
        self.loop = loop
        self.roster = roster
        self.events = events
        # Returns the local id of an object that this host owns, or 0 if another host owns it.
        self.own: Callable[[bytes], int] = results.made_here
        self.exports: dict[int, Export] = {}
        self._copied: dict[int, Export] = {}  # exports with replicas, which are polled
        # Bucket -> pending objects whose completion a process announces in the bucket.
        self._watched: dict[int, set[int]] = {}
        # Absent object -> imports that are waiting for it: (host id, object, number of the import).
        self.again: dict[int, dict[tuple[int, bytes, int], None]] = {}

    def acquire(self, peer: int, message: Acquire) -> None:
        """Handles another host's notification that it holds an object of this host."""
        if not self.count(message.object, peer, message.number):
            self.send(peer, ObjectReport(message.object, message.number, "gone"))

    def count(self, object_id: bytes, peer: int, number: int) -> bool:
        """Counts the import `number` of the host `peer`, and describes the object to that host.
        Returns False if the object is gone."""
        export = self._export(object_id)
        if export is None:
            return False
        export.importers.add((peer, number))
        if not export.watched and not self.tasks.done(export.oid):
            self._watch(export)
        self.send(peer, self.describe(export.oid, object_id, number))
        return True

    def _export(self, object_id: bytes) -> Export | None:
        oid = self.own(object_id)
        export = self.exports.get(oid)
        if export is None:
            hold = self.client.hold(oid) if oid else None
            if hold is not None:
                export = self.exports[oid] = Export(oid, object_id, hold)
        return export

    def release(self, peer: int, message: Release) -> bool:
        """Handles a host's notification that it no longer holds an object. Returns False if this
        node did not count that import."""
        export = self.exports.get(self.own(message.object))
        if export is None:
            return False
        if not message.keeps:
            export.copies.discard(peer)
        if (peer, message.number) not in export.importers:
            return False
        export.importers.discard((peer, message.number))
        self._forget_if_unused(export)
        return True

    def make_again(self, peer: int, message: Reconstruct) -> None:
        """Handles another host's request for an object of this host that has no known living
        holder."""
        oid = self.own(message.object)
        if self.remote_objects.needs_making(oid):
            asks = self.again.setdefault(oid, {})
            asks[peer, message.object, message.number] = None
        elif oid:
            self.send(peer, self.describe(oid, message.object, message.number))
        else:
            self.send(peer, ObjectReport(message.object, message.number, "gone"))

    def drop(self, object_id: bytes) -> None:
        """Deletes an object of this host because a process on another host has deleted it."""
        oid = self.own(object_id)
        if oid:
            self.client.delete(oid)

    def peer_lost(self, member: Member) -> None:
        """Forgets the imports and replicas of a lost host."""
        for export in list(self.exports.values()):
            export.importers = {
                importer for importer in export.importers if importer[0] != member.host_id
            }
            export.copies.discard(member.host_id)
            self._forget_if_unused(export)

    def _forget_if_unused(self, export: Export) -> None:
        if not export.importers:
            self._unwatch(export)
            if export.oid not in self._copied:
                self.exports.pop(export.oid, None)

    # -- replicas ------------------------------------------------------------------------------

    def kept(self, peer: int, message: ReplicaStored) -> None:
        """Handles another node's notification that it keeps a replica of this host's object."""
        if not self.lend(message.object, message.hosts or (peer,)):
            self.send(peer, DropReplica(message.object))

    def lend(self, object_id: bytes, hosts: Iterable[int]) -> bool:
        """Records that the hosts with these ids keep replicas of an object of this host. Returns
        False if the object is gone."""
        export = self._export(object_id)
        if export is None:
            return False
        if export.oid not in self._copied:
            if self.client.state(export.oid) in DROPPED:
                self._forget_if_unused(export)
                return False
            if not self._copied:
                self.loop.call_later(KEPT_POLL_S, self._poll_copies)
            self._copied[export.oid] = export
        export.copies.update({*hosts} - {self.client.host_id})
        return True

    def copies_of(self, oid: int) -> tuple[int, ...]:
        """Numbers of the nodes that keep a replica of an object of this host."""
        export = self.exports.get(oid)
        found = map(self.roster.number_of, () if export is None else export.copies)
        return tuple(number for number in found if number is not None)

    def _poll_copies(self) -> None:
        for oid, export in list(self._copied.items()):
            wanted = export.importers or not self.only_ours(oid)
            if wanted and export.copies and self.client.state(oid) not in DROPPED:
                continue
            del self._copied[oid]
            copies, export.copies = export.copies, set()
            for peer in copies:
                self.send(peer, DropReplica(export.object))
            self._forget_if_unused(export)
        if self._copied:
            self.loop.call_later(KEPT_POLL_S, self._poll_copies)

    def only_ours(self, oid: int) -> bool:
        """Whether the object is kept only by a single hold of this node, apart from
        `extra_holds`."""
        return self.holds_only(oid, 1)

    def holds_only(self, oid: int, more: int) -> bool:
        """Like `only_ours`, but for `more` holds instead of one."""
        ours = more + self.events.extra_holds(oid)
        counts = self.client.private_counts(oid)
        return counts[0] == ours and self.client.inspect(oid)["refs"] == [NODE_SLOT]

    # -- pending objects -----------------------------------------------------------------------

    def _watch(self, export: Export) -> None:
        export.watched = self.tasks.park([export.oid])
        # No process announces an object in the node's own tables or an object that is already done.
        if not export.watched or self.tasks.done(export.oid):
            export.watched.append(NO_BUCKET)
        for bucket in export.watched:
            self._watched.setdefault(bucket, set()).add(export.oid)

    def _unwatch(self, export: Export) -> None:
        buckets, export.watched = export.watched, []
        for bucket in buckets:
            self._watched[bucket].discard(export.oid)
        self.tasks.unpark([bucket for bucket in buckets if bucket != NO_BUCKET])

    def poll(self) -> None:
        """Describes objects that are now done to the hosts that are waiting for them."""
        found: list[int] = []
        for bucket in (NO_BUCKET, *self.tasks.take_parked_news()):
            found += [oid for oid in self._watched.get(bucket, ()) if self.tasks.done(oid)]
        for oid in found:
            export = self.exports.get(oid)
            if export is None or not export.watched:
                continue  # a failed send in this loop has removed the export
            self._unwatch(export)
            for peer, number in list(export.importers):  # a failed send may remove an importer
                self.send(peer, self.describe(oid, export.object, number))
        for oid in [oid for oid in self.again if not self.remote_objects.needs_making(oid)]:
            for peer, object_id, number in self.again.pop(oid):
                self.send(peer, self.describe(oid, object_id, number))

    def describe(self, oid: int, object_id: bytes, number: int) -> ObjectReport:
        """The current state of an object, for the import `number`."""
        if not self.tasks.done(oid):
            return ObjectReport(object_id, number, "pending")
        got = self.client.view(oid)
        if isinstance(got, int):
            if is_cancelled(self.client, oid, got):
                error = _serialize.encode_error(CancelledError(), "").tobytes()
                return ObjectReport(object_id, number, "failed", len(error), error)
            if got not in AWAY:
                return ObjectReport(object_id, number, "gone")
            remote = self.remote_objects.by_oid.get(oid)
            return ObjectReport(
                object_id,
                number,
                "ready",
                self.client.inspect(oid)["size"],
                None,
                self._holders(oid) if remote is None else remote.holders,
                layout_of(self.results, self.remote_objects, oid),
            )
        mem = memoryview(got)
        holders = self._holders(oid)
        if _serialize.payload_kind(mem) == _serialize.ERROR:
            error = _serialize.short_error(mem)
            return ObjectReport(object_id, number, "failed", len(error), error, holders)
        payload = bytes(mem) if mem.nbytes <= INLINE_BYTES_MAX else None
        layout = payload_layout(mem)
        return ObjectReport(object_id, number, "ready", mem.nbytes, payload, holders, layout)

    def _holders(self, oid: int) -> tuple[int, ...]:
        return (self.node(), *self.copies_of(oid))
