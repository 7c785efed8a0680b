"""Objects that outlive their owner: this node reports them, and follows or becomes their new owner.

The owner of an object (the host with the id `ImportRecord.owner`) counts the hosts that hold it.
This resembles ownership in Ray (Wang et al., NSDI 2021), where processes own objects. When an owner
dies, every node reports its holds on that owner's objects and its copies of them. The manager then
names a new owner for each object that is complete on some host (_planner/owners.py). Until then
this node releases none of these objects. The new owner starts with the counts in the reports. A
host that has released an object since its report notifies the new owner, which may receive that
message before the manager's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import UNWRITTEN
from hoplite_mp._protocol.copies import HOLDINGS_MAX
from hoplite_mp._protocol.membership import ReportedOwners
from hoplite_mp._protocol.messages import (
    ObjectDeleted,
    OrphansReported,
    OwnerQuery,
    OwnerReport,
    OwnersReassigned,
)
from hoplite_mp._protocol.peers import Acquire, Release
from hoplite_mp.errors import ObjectLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._node.dispatch import ManagerHandler
    from hoplite_mp._node.objects.exports import Exports
    from hoplite_mp._node.objects.imports import ImportRecord, Imports
    from hoplite_mp._node.objects.remote_objects import RemoteObjects
    from hoplite_mp._node.objects.replicas import Replicas
    from hoplite_mp._protocol.messages import NodeToManager
    from hoplite_mp._protocol.peers import PeerMessage


__all__ = ["Lost", "OrphanInventory", "OwnershipTransfer", "is_kept"]

# Orphan inventory: the objects of a dead owner on this host, which the node reports to the manager.
#
# Between the death of an owner and the manager's decision this node must not release any of the
# owner's objects, because the decision relies on the reports. An object may have several headers
# here if a process held a ref to a task's result when the task was sent here.


@dataclass(slots=True)
class Lost:
    """A dead owner whose objects have no new owners yet."""

    host_id: int
    number: int
    # holds on headers until new owners are known
    holds: dict[int, Any] = field(default_factory=dict)
    reported: dict[bytes, int] = field(default_factory=dict)  # object -> number of the import
    # Object -> numbers of imports that were reported to earlier managers. A new owner may count
    # these imports, so this node reports to the new owner which imports it has released since.
    former: dict[bytes, set[int]] = field(default_factory=dict)
    # numbers of imports for which this node expects an OwnerReport
    asked: set[int] = field(default_factory=set)
    # Releases that arrived before the manager's message that makes this node the owner: (object,
    # host id of the sender, number of its import).
    pending_releases: set[tuple[bytes, int, int]] = field(default_factory=set)
    # the manager has declared the death, which this node may have detected earlier
    confirmed: bool = False


class OrphanInventoryEvents(Protocol):
    """Requests from this component to the components above it."""

    def backup_number(self, object_id: bytes, host_id: int) -> int | None:
        """The number of this node's restart data for an actor of the host, or None if this node is
        not the actor's backup. Higher numbers are newer; 0 means that the data is incomplete."""


class OrphanInventory:
    """The imports whose owner is gone."""

    def __init__(
        self, imports: Imports, node: Callable[[], int], events: OrphanInventoryEvents
    ) -> None:
        self.imports = imports
        self.events = events
        self.client = imports.client
        self.node = node
        self.lost: dict[int, Lost] = {}  # by host id

    def begin(self, host_id: int, number: int) -> None:
        """Starts the inventory for a lost host. Must be called before any component releases
        objects of that host."""
        lost = self.lost[host_id] = Lost(host_id, number)
        self.hold(lost, self.of(host_id))

    def lost_as(self, number: int) -> Lost | None:
        """The dead owner with that node number."""
        return next((lost for lost in self.lost.values() if lost.number == number), None)

    def of(self, host_id: int) -> list[ImportRecord]:
        """All imports that the host with this id owns."""
        return [record for record in self.imports.by_oid.values() if record.owner == host_id]

    def hold(self, lost: Lost, imports: list[ImportRecord]) -> None:
        """Holds these imports until their new owner is known."""
        for record in imports:
            hold = self.client.hold(record.oid)
            if hold is not None:
                lost.holds[record.oid] = hold

    def report(
        self, number: int, imports: list[ImportRecord], lost: Lost | None
    ) -> OrphansReported:
        """Describes this host's holds on these objects and its copies of them. number: the node
        number of their dead owner."""
        headers: dict[bytes, list[ImportRecord]] = {}
        for record in imports:
            headers.setdefault(record.object, []).append(record)
        objects: list[bytes] = []
        numbers: list[int] = []
        whole: list[int] = []
        backups: list[int] = []
        for object_id, found in headers.items():
            counted = next((record.number for record in found if record.number), 0)
            here = any(self.imports.is_whole(record) for record in found)
            used = counted or any(map(is_kept, found))
            # An object that was reported before is always reported again, because the manager will
            # decide about it.
            reported = lost is not None and object_id in lost.reported
            if len(objects) == HOLDINGS_MAX or not (here or used or reported):
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
                # Report the object so that the manager sends its new owner to this node.
                if not self.imports.all_of(object_id) and len(objects) < HOLDINGS_MAX:
                    objects.append(object_id)
                    numbers.append(0)
                    lost.reported[object_id] = 0
        return OrphansReported(
            node=self.node(),
            lost=number,
            objects=tuple(objects),
            imports=tuple(numbers),
            whole=tuple(whole),
            backups=tuple(backups),
        )


def is_kept(record: ImportRecord) -> bool:
    """Whether the object is here only as a replica (complete or not) that the node itself holds."""
    return record.kept and not record.number


class OwnershipTransferEvents(Protocol):
    """Reports and requests from this component to the components above it."""

    def backup_number(self, object_id: bytes, host_id: int) -> int | None:
        """See OrphanInventoryEvents."""

    def moved(self, record: ImportRecord) -> None:
        """Handles an import with a new owner, which may be this host."""

    def ownerless(self, record: ImportRecord) -> None:
        """Handles an import for which the manager will never name a new owner."""

    def owners_handled(self) -> None:
        """Called when a manager's message about owners has been handled completely."""


class OwnershipTransfer:
    """The transfer of ownership from dead owners, on this node."""

    def __init__(
        self,
        imports: Imports,
        exports: Exports,
        remote_objects: RemoteObjects,
        replicas: Replicas,
        node: Callable[[], int],
        send_manager: Callable[[NodeToManager], None],
        send: Callable[[int, PeerMessage], bool],
        host_id_at: Callable[[int], int | None],
        number_of: Callable[[int], int | None],
        events: OwnershipTransferEvents,
    ) -> None:
        """host_id_at: returns the host id for the number of a living node, which may be this node.
        number_of: returns the number for a host id."""
        self.imports = imports
        self.exports = exports
        self.remote_objects = remote_objects
        self.replicas = replicas
        self.client = imports.client
        self.node = node
        self.send_manager = send_manager
        self.send = send
        self.host_id_at = host_id_at
        self.number_of = number_of
        self.events = events
        self.orphan_inventory = OrphanInventory(imports, node, events)
        self.lost = self.orphan_inventory.lost  # by host id
        self.numbers: dict[int, int] = {}  # host id -> node number, for all nodes that have died
        # Node number of the first owner -> holds on objects that were reported again to a new
        # manager even though they already have a new owner. The holds are kept until the manager
        # has answered.
        self._restated: dict[int, list[Any]] = {}

    def is_open(self, host_id: int) -> bool:
        """Whether the host is dead and the manager has yet to name new owners for its objects."""
        return host_id in self.lost

    def is_decided(self, host_id: int) -> bool:
        """Whether the host is dead and the manager will name no more owners for its objects."""
        return host_id in self.numbers and host_id not in self.lost

    # -- after a death -------------------------------------------------------------------------

    def begin(self, host_id: int, number: int) -> None:
        """Handles the loss of a host. Must be called before any component releases objects of that
        host."""
        self.numbers[host_id] = number
        self.orphan_inventory.begin(host_id, number)

    def report(self, number: int) -> None:
        """Reports this node's orphan inventory to the manager, which has declared the death and is
        waiting for a report from every node."""
        lost = self.orphan_inventory.lost_as(number)
        if lost is not None:
            lost.confirmed = True
        # The report includes objects that were first imported after the death.
        imports = [] if lost is None else self.orphan_inventory.of(lost.host_id)
        self.send_manager(self.orphan_inventory.report(number, imports, lost))
        if lost is not None and not lost.reported:  # the manager does not answer an empty report
            self._close(lost)

    def report_again(self) -> Iterator[OrphansReported | ReportedOwners | OwnerQuery]:
        """Yields this node's reports for a new manager, and the known new owners."""
        moved: dict[int, list[ImportRecord]] = {}
        owners: dict[bytes, int] = {}
        for record in list(self.imports.by_oid.values()):
            owner = self.number_of(record.owner)
            if record.moved >= 0 and owner is not None:
                owners[record.object] = owner
                moved.setdefault(record.moved, []).append(record)
            elif record.owner in self.lost:
                number = self.lost[record.owner].number
                moved.setdefault(number, []).append(record)
                if record.moved >= 0:  # some nodes may only know the first owner
                    owners[record.object] = number
            unresolved = is_kept(record) or (record.number and not record.described)
            # Unanswered queries were lost with the former manager, so they are repeated even if the
            # owner's host is now known.
            if unresolved and (owner is None or record.asks) and record.owner not in self.lost:
                yield OwnerQuery(self.node(), record.object)
        for begin in range(0, len(owners), HOLDINGS_MAX):
            part = slice(begin, begin + HOLDINGS_MAX)
            yield ReportedOwners(self.node(), tuple(owners)[part], tuple(owners.values())[part])
        restated: dict[int, list[Any]] = {}
        open_ = {lost.number: lost for lost in self.lost.values()}
        for number in {**moved, **open_}:
            lost = open_.get(number)
            if lost is not None:
                for object_id, before in lost.reported.items():
                    lost.former.setdefault(object_id, set()).add(before)
                lost.reported.clear()
                lost.asked.clear()  # this report replaces the queries to the former manager
            inventory = self.orphan_inventory.report(number, moved.get(number, []), lost)
            if inventory.objects:
                # Keep the objects, because the manager may name this node as their owner if the
                # present owner dies before the manager has answered.
                restated[number] = [
                    self.client.hold(record.oid) for record in moved.get(number, ())
                ]
            if inventory.objects or lost is not None:
                yield inventory
            # Until the death is confirmed, the manager may still name that host as an owner. When
            # it declares the host lost, `report` is called again.
            if lost is not None and lost.confirmed and not inventory.objects:
                self._close(lost)
        self._restated = restated

    @property
    def manager_handlers(self) -> dict[type, ManagerHandler]:
        """Handlers of messages from the manager about owners."""

        def owner_reported(message: OwnerReport) -> None:
            self._owner_reported(message)
            self.events.owners_handled()

        def owners_named(message: OwnersReassigned) -> None:
            self._owners_named(message)
            self.events.owners_handled()

        return {OwnerReport: owner_reported, OwnersReassigned: owners_named}

    def _owners_named(self, message: OwnersReassigned) -> None:
        if not message.more:
            self._restated.pop(message.lost, None)
        lost = self.orphan_inventory.lost_as(message.lost)
        if lost is None:
            return
        for at, object_id in enumerate(message.objects):
            owner = self._named(message.owners[at])
            ours = [
                record for record in self.imports.all_of(object_id) if record.owner == lost.host_id
            ]
            if owner is None:
                for record in ours:
                    self._lose(record, lost)
            elif owner == self.client.host_id:
                self._take_over(lost, ours, message.counted[at], message.copies[at])
            else:
                self._moved(lost, object_id, ours, owner)
        if not message.more:
            self._close(lost)

    def back(self, host_id: int) -> None:
        """Handles the return of a host that the last manager had declared lost. The host is a
        member again without a restart, because a user has promoted the standby (`promote
        --anyway`). The host keeps its objects, so this node acquires them from it. If the last
        manager has already named another owner, both hosts count holders, and values are read from
        either."""
        self._restated.pop(self.numbers.pop(host_id, -1), None)
        lost = self.lost.pop(host_id, None)
        if lost is None:
            return
        for record in self.orphan_inventory.of(host_id):
            self.events.moved(record)
            # The owner counts an import only once, however often it is acquired. Each time it
            # replies with the object's description, which also answers readers of an absent value.
            if record.number:
                self._acquire(record)
            elif self.imports.is_whole(record) or is_kept(record):
                self._keep_on(record)
            else:
                self.imports.follow_owner(record.oid)
        lost.holds.clear()
        self.events.owners_handled()

    def _named(self, number: int) -> int | None:
        """The host id of a node that the manager has named, even if the node has died since. None
        if the manager has named no owner."""
        owner = self.host_id_at(number)
        if owner is None:
            owner = next(
                (host_id for host_id, other in self.numbers.items() if other == number), None
            )
        return owner

    def _close(self, lost: Lost) -> None:
        """Ends the transfer after the death of one owner. Objects without a new owner are lost, and
        the holds that have kept the headers are released."""
        del self.lost[lost.host_id]
        for record in self.orphan_inventory.of(lost.host_id):
            if record.number not in lost.asked:
                self._lose(record, lost)
        lost.holds.clear()

    def _lose(self, record: ImportRecord, lost: Lost) -> None:
        """Fails an object that is complete on no host, even if holders are recorded here."""
        why = _no_copy(lost.number)
        remote = self.remote_objects.by_oid.get(record.oid)
        if remote is not None and remote.payload:  # the running transfer may still succeed
            hold = self.client.hold(record.oid)
            remote.waiting.append(lambda: _drop(hold))
        elif self.client.state(record.oid) in UNWRITTEN:
            self.imports.fail(record, why)
        else:
            self.remote_objects.fail(
                record.oid, ObjectLostError(f"object {record.object.hex()} is lost: {why}")
            )
        self.imports.answer(record)
        self.events.ownerless(record)  # the value may be complete here, as for an actor's identity

    def _moved(self, lost: Lost, object_id: bytes, ours: list[ImportRecord], owner: int) -> None:
        """Follows a new owner on another node. The new owner counts this host's import as
        reported."""
        number = lost.reported.get(object_id, 0)
        for record in ours:
            self._follow(record, owner)
            self.events.moved(record)
        if owner in self.lost:
            return
        # Acquire precedes Release, because otherwise the object could be freed in between. Release
        # precedes ReplicaStored, because a Release makes the owner forget this host's replica.
        for record in ours:
            # An owner named by a former manager ignores a later OwnersReassigned, because its
            # transfer is closed, and so does not count newly reported imports. A reported import
            # without a description is therefore acquired, too. The owner counts each import only
            # once.
            if record.number and (record.number != number or not record.described):
                self._acquire(record)
        # A header that an OwnerReport has already assigned to the new owner may also have the
        # reported number.
        here = {record.number for record in self.imports.all_of(object_id)}
        for before in sorted({number, *lost.former.get(object_id, ())} - here - {0}):
            self.send(owner, Release(object_id, before))  # released after the report
        for record in ours:
            if not record.number and (self.imports.is_whole(record) or is_kept(record)):
                self._keep_on(record)

    def _acquire(self, record: ImportRecord) -> None:
        if not self.send(record.owner, Acquire(record.object, record.number)):
            self.ask_for_owner(record)

    def _keep_on(self, record: ImportRecord) -> None:
        """Keeps a complete or incomplete replica, and reports it to the new owner when it is
        complete."""
        hold = self.client.hold(record.oid)
        if hold is None:
            return
        record.kept = True
        self.replicas.keep_on(record.object, hold)
        if self.imports.is_whole(record):  # the replica may have been completed after the report
            self._tell(record)

    def _take_over(
        self,
        lost: Lost,
        ours: list[ImportRecord],
        counted: tuple[int, ...],
        copies: tuple[int, ...],
    ) -> None:
        """Makes this node the owner. counted: alternately the number of a node and the number of
        its import. copies: numbers of nodes that have replicas."""
        if not ours:  # an earlier manager has already made this node the owner
            return
        primary = next((record for record in ours if self.imports.is_whole(record)), ours[0])
        object_id = primary.object
        self.imports.lead(primary)
        for record in ours:
            record.owner, record.moved = self.client.host_id, lost.number
        for node, number in zip(counted[::2], counted[1::2], strict=True):
            peer = self.host_id_at(node)
            gone = peer is None or (object_id, peer, number) in lost.pending_releases
            if node != self.node() and peer is not None and not gone:
                self.exports.count(object_id, peer, number)
        host_ids = [self.host_id_at(node) for node in copies]
        self.exports.lend(object_id, [host_id for host_id in host_ids if host_id is not None])
        self.imports.answer(primary)
        for record in ours:
            if record is not primary and record.number:
                self.imports.described(self.exports.describe(primary.oid, object_id, record.number))
                record.hold = self.client.hold(primary.oid)
        self.replicas.let_go(object_id)  # the export's hold now keeps the object
        self.events.moved(primary)

    # -- late messages -------------------------------------------------------------------------

    def released(self, peer: int, message: Release) -> None:
        """Handles the release of an object that this node owns or is about to own. In the latter
        case the release is remembered, because the manager's message may still count that
        import."""
        self.exports.release(peer, message)
        lost = self.lost.get(self.imports.owner_of(message.object))
        if lost is not None:
            lost.pending_releases.add((message.object, peer, message.number))

    def ask_for_owner(self, record: ImportRecord) -> bool:
        """Asks the manager for the new owner of an object whose owner is gone. Called when a
        process here has received a ref to the object, or a replica here is complete."""
        if record.number and record.owner in self.lost:
            self.lost[record.owner].asked.add(record.number)
        self.send_manager(OwnerQuery(self.node(), record.object))
        return True

    def _owner_reported(self, message: OwnerReport) -> None:
        owner = self._named(message.owner)
        for record in self.imports.all_of(message.object):
            if is_kept(record):
                self._copy_answered(record, owner)
            if not record.number or record.described:
                continue
            if record.owner in self.lost:
                self.lost[record.owner].asked.discard(record.number)
            if owner is None or owner == self.client.host_id:
                self.imports.fail(record, _no_copy(self.numbers.get(record.owner)))
                continue
            self._follow(record, owner)
            self.events.moved(record)
            if owner not in self.lost:
                self._acquire(record)

    def _copy_answered(self, record: ImportRecord, owner: int | None) -> None:
        """Handles the manager's answer about a replica here that was unknown to the dead owner."""
        if self.number_of(record.owner) is not None or record.owner in self.lost:
            return
        if owner is None:
            self.replicas.let_go(record.object)
        elif owner != self.client.host_id:
            self._follow(record, owner)
            if owner not in self.lost:
                self._keep_on(record)

    def _follow(self, record: ImportRecord, owner: int) -> None:
        """Sets a new owner. If the new owner is already dead, the import is held until the manager
        has named the next one."""
        # The manager may name the same host again if it or this node has missed the host's death.
        if owner != record.owner:
            record.owner, record.moved = owner, self.numbers.get(record.owner, -1)
        if owner in self.lost:
            self.orphan_inventory.hold(self.lost[owner], [record])

    def own(self, object_id: bytes) -> int:
        """Like `Imports.own`, but objects of dead owners count as well if they are complete here,
        because other hosts may be notified before this node that this node is the new owner."""
        found = self.imports.own(object_id)
        if found:
            return found
        ours = (record for record in self.imports.all_of(object_id) if record.owner in self.lost)
        return next((record.oid for record in ours if self.imports.is_whole(record)), 0)

    def freed(self, record: ImportRecord) -> None:
        """Handles a freed header. If it was the object's last header here and this node had become
        the owner, no host holds the object any longer, and the manager is notified."""
        others = self.imports.all_of(record.object)
        other = next((other for other in others if other.owner == record.owner), None)
        if other is not None:
            if (is_kept(other) or not record.number) and self.imports.is_whole(other):
                # The Release for the freed header makes the owner forget this host's replica.
                self._tell(other)
        elif record.owner == self.client.host_id != ids.unpack_id(record.object)[0]:
            self.send_manager(ObjectDeleted(record.object))

    def _tell(self, record: ImportRecord) -> None:
        self.replicas.tell(record.object, self.client.inspect(record.oid)["size"])


def _drop(hold: Any) -> None:
    """Does nothing. The closure that calls this function keeps `hold` alive until the call."""


def _no_copy(number: int | None) -> str:
    had = "its host" if number is None else f"node h{number}"
    return f"{had} had it and is gone, and no other host has a copy; put(copies=2) keeps two copies"
