"""The holders of objects, for the planning of transfers.

An entry exists as long as a plan that moves the object is running, or a node other than the
object's first owner has reported a copy. Afterwards the entry is dropped. A later request creates a
new entry, so an object that was lost and recomputed is not confused with its predecessor. A holder
that is only named in a request does not keep the entry alive, because this node would never report
that its copy is gone.

Holders are the nodes named in requests (the requester gets them from the object's owner), and the
nodes that have reported a copy. If a receiver reports that a parent has failed, the parent remains
listed for other receivers, because only the link between the two may be at fault. A node is removed
only after its own report, or after its death.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hoplite_mp._common.ids import unpack_id
from hoplite_mp._protocol.operations import COPY_OPERATION

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hoplite_mp._planner.membership import ClusterMembership
    from hoplite_mp._planner.plan_log import PlanRecord
    from hoplite_mp._protocol.messages import Distribute


@dataclass(slots=True)
class Transfer:
    """A plan that has not been withdrawn. Invariant: `waiting` is not empty."""

    plan: Distribute
    waiting: dict[int, None]  # receivers that have not reported yet, in the plan's order
    rates: dict[int, float]  # bytes per second that each sender sends, according to the model
    ends_at: float  # time of the end, according to the model
    record: PlanRecord | None = None  # None: a plan of the previous planner


@dataclass(slots=True)
class DirectoryEntry:
    """The nodes and transfers of one object. Invariant: `whole` and `receiving` are disjoint."""

    object: bytes
    operation: int
    nbytes: int
    # Node with a complete copy -> whether the node itself has reported the copy. Latest last.
    whole: dict[int, bool] = field(default_factory=dict)
    receiving: dict[int, int] = field(default_factory=dict)  # node -> epoch of its latest plan
    transfers: dict[int, Transfer] = field(default_factory=dict)  # by epoch
    # Node -> number of plans in which the node was a sender.
    served: dict[int, int] = field(default_factory=dict)
    # (receiver, parent) pairs with a failed transfer.
    failed: set[tuple[int, int]] = field(default_factory=set)
    # All nodes that the fields above name or have named.
    nodes: set[int] = field(default_factory=set)
    full: str = ""  # why the latest node that dropped its copy had no memory for it


class Directory:
    """The entries of all objects."""

    def __init__(self, membership: ClusterMembership) -> None:
        self._membership = membership
        self._entries_ever = 0
        self.entries: dict[bytes, DirectoryEntry] = {}
        # Node -> the objects whose entries name the node.
        self.named: dict[int, dict[bytes, None]] = {}

    def entry(self, object_id: bytes, nbytes: int, holders: Iterable[int]) -> DirectoryEntry:
        """Returns the object's entry, which is created if necessary. Records the living nodes in
        `holders`."""
        entry = self.entries.get(object_id)
        if entry is not None and entry.nbytes != nbytes and not entry.transfers:
            self.drop(entry)  # the object was lost and recomputed with a different value
            entry = None
        if entry is None:
            operation = COPY_OPERATION | self._entries_ever
            self._entries_ever += 1
            self.entries[object_id] = entry = DirectoryEntry(object_id, operation, nbytes)
        for holder in holders:
            if self._membership.is_living(holder) and holder not in entry.receiving:
                entry.whole.setdefault(holder, False)
                self.name(entry, (holder,))
        return entry

    def name(self, entry: DirectoryEntry, nodes: Iterable[int]) -> None:
        """Registers these nodes, before they are added to any field of the entry. Also restores an
        entry that was dropped with its last transfer, because another transfer begins."""
        if entry.object not in self.entries:
            self.entries[entry.object] = entry
            known, entry.nodes = entry.nodes, set()
            nodes = (*known, *nodes)
        for node in nodes:
            if node not in entry.nodes:
                entry.nodes.add(node)
                self.named.setdefault(node, {})[entry.object] = None

    def naming(self, node: int) -> list[DirectoryEntry]:
        """The entries that name this node, in the order of their creation."""
        found = [self.entries[object_id] for object_id in self.named.get(node, ())]
        return sorted(found, key=lambda entry: entry.operation)

    def unname(self, entry: DirectoryEntry, node: int) -> None:
        """Removes the registration of a node that the entry no longer names."""
        if node in entry.nodes:
            entry.nodes.discard(node)
            self._unlist(entry, node)

    def drop(self, entry: DirectoryEntry) -> None:
        """Removes the entry, and the registrations of its nodes."""
        if self.entries.pop(entry.object, None) is not None:
            for node in entry.nodes:
                self._unlist(entry, node)

    def _unlist(self, entry: DirectoryEntry, node: int) -> None:
        objects = self.named.get(node, {})
        objects.pop(entry.object, None)
        if not objects:
            self.named.pop(node, None)

    def go_on(self, entries_ever: int) -> None:
        """Continues the count of the previous planner, which had created so many entries."""
        self._entries_ever = max(self._entries_ever, entries_ever)

    def restore(self, plan: Distribute) -> DirectoryEntry:
        """Returns the entry for a plan of the previous planner, which is created if necessary."""
        self._entries_ever = max(self._entries_ever, (plan.operation ^ COPY_OPERATION) + 1)
        entry = self.entries.get(plan.object)
        if entry is None:
            entry = DirectoryEntry(plan.object, plan.operation, plan.nbytes)
            self.entries[plan.object] = entry
        return entry

    def forget_if_over(self, entry: DirectoryEntry) -> None:
        """Drops the entry if no transfer is running and no node other than the first owner has
        reported a copy."""
        if entry.transfers:
            return
        first = self._membership.node_of(unpack_id(entry.object)[0])
        if not any(reported and node != first for node, reported in entry.whole.items()):
            self.drop(entry)
        elif not entry.receiving:
            entry.failed.clear()
