"""Orphan inventory: which objects of a dead owner this host has, reported to the manager.

Between the death of an owner and the manager's decision this node must not release any of that
owner's objects, because the decision relies on what was reported. One object may have several
headers here, if a process held a ref to a task's result when the task was sent here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._protocol.messages import HoldingsReported
from hoplite_mp._protocol.owners import HOLDINGS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.objects.imports import ImportRecord, Imports

__all__ = ["Lost", "OrphanInventory", "is_kept"]


@dataclass(slots=True)
class Lost:
    """An owner that has died, until its objects have new owners."""

    host_id: int
    number: int
    holds: dict[int, Any] = field(default_factory=dict)  # on headers, until new owners are known
    reported: dict[bytes, int] = field(default_factory=dict)  # object -> number of the import
    # Object -> numbers that were reported to managers which have died since. A new owner may count
    # them, and is told by this node which of them it has released.
    former: dict[bytes, set[int]] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)  # imports about which OwnerTold is still to come
    # Releases that arrived before this node knew that it is the new owner: (object, host id of the
    # sender, number of its import).
    pending_releases: set[tuple[bytes, int, int]] = field(default_factory=set)
    confirmed: bool = False  # the manager knows of the death, which this node may see earlier


class OrphanInventoryEvents(Protocol):
    """What this component reports to components above it, and asks of them."""

    def backup_number(self, object_id: bytes, host_id: int) -> int | None:
        """If this node is the backup of that actor of that host: the number of what it was sent to
        begin the actor from, where higher is newer and 0 means incomplete. Else None."""


class OrphanInventory:
    """Imports whose owner is gone."""

    def __init__(
        self, imports: Imports, node: Callable[[], int], events: OrphanInventoryEvents
    ) -> None:
        self.imports = imports
        self.events = events
        self.client = imports.client
        self.node = node
        self.lost: dict[int, Lost] = {}  # by host id

    def begin(self, host_id: int, number: int) -> None:
        """A host is gone. It must be called before any component releases what it had from
        there."""
        lost = self.lost[host_id] = Lost(host_id, number)
        self.hold(lost, self.of(host_id))

    def lost_as(self, number: int) -> Lost | None:
        """The dead owner whose node had that number."""
        return next((one for one in self.lost.values() if one.number == number), None)

    def of(self, host_id: int) -> list[ImportRecord]:
        """All imports that the host with this id owns."""
        return [one for one in self.imports.by_oid.values() if one.owner == host_id]

    def hold(self, lost: Lost, imports: list[ImportRecord]) -> None:
        """Keeps these imports until their new owner is known."""
        for one in imports:
            hold = self.client.hold(one.oid)
            if hold is not None:
                lost.holds[one.oid] = hold

    def report(
        self, number: int, imports: list[ImportRecord], lost: Lost | None
    ) -> HoldingsReported:
        """Describes what is here of these objects, which the node `number` owned."""
        headers: dict[bytes, list[ImportRecord]] = {}
        for one in imports:
            headers.setdefault(one.object, []).append(one)
        objects: list[bytes] = []
        numbers: list[int] = []
        whole: list[int] = []
        backups: list[int] = []
        for object_id, found in headers.items():
            counted = next((one.number for one in found if one.number), 0)
            here = any(self.imports.is_whole(one) for one in found)
            used = counted or any(map(is_kept, found))
            # An object that was reported before is always reported again, because the manager's
            # answer will name it.
            said = lost is not None and object_id in lost.reported
            if len(objects) == HOLDINGS_MAX or not (here or used or said):
                continue
            if here:
                whole.append(len(objects))
                backup = self.events.backup_number(object_id, found[0].owner)
                if backup is not None:
                    backups += [len(objects), backup]
            objects.append(object_id)
            numbers.append(counted)
            if lost is not None:
                lost.reported[object_id] = counted
        if lost is not None:
            for object_id in lost.former:
                # It is reported so that the manager names its owner to this node.
                if not self.imports.all_of(object_id) and len(objects) < HOLDINGS_MAX:
                    objects.append(object_id)
                    numbers.append(0)
                    lost.reported[object_id] = 0
        known = tuple(objects), tuple(numbers), tuple(whole), tuple(backups)
        return HoldingsReported(self.node(), number, *known)


def is_kept(one: ImportRecord) -> bool:
    """Whether only the node itself holds the object here, as a replica that is whole or on its
    way."""
    return one.kept and not one.number
