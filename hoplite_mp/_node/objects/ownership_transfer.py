"""Objects that outlive their owner: this node's part in finding and becoming new owners.

The owner of an object (the host with the id `ImportRecord.owner`) counts the hosts that hold it;
compare ownership in Ray (Wang et al., NSDI 2021), where processes own objects. When an owner dies,
every node reports its holds and copies of that owner's objects, and the manager names a new owner
for each object that some host has completely (_planner/owners.py). Until then this node releases
none of these objects. The new owner starts with the counts of the reports. A host that has released
an object since its report notifies the new owner, possibly before the manager does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import UNWRITTEN
from hoplite_mp._protocol.copies import HOLDINGS_MAX
from hoplite_mp._protocol.membership import OwnersKnown
from hoplite_mp._protocol.messages import (
    HoldingsReported,
    ObjectGone,
    OwnerAsked,
    OwnersNamed,
    OwnerTold,
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

# Orphan inventory: the objects of a dead owner on this host, reported to the manager.
#
# Between the death of an owner and the manager's decision this node must not release any of the
# owner's objects, because the decision relies on the reports. An object may have several headers
# here, if a process held a ref to a task's result when the task was sent here.


@dataclass(slots=True)
class Lost:
    """A dead owner, until its objects have new owners."""

    host_id: int
    number: int
    holds: dict[int, Any] = field(default_factory=dict)  # on headers, until new owners are known
    reported: dict[bytes, int] = field(default_factory=dict)  # object -> number of the import
    # Object -> numbers reported to managers that have died since. A new owner may count these
    # imports; this node notifies it of the released ones.
    former: dict[bytes, set[int]] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)  # imports about which OwnerTold is outstanding
    # Releases that arrived before the manager's message that makes this node the owner: (object,
    # host id of the sender, number of its import).
    pending_releases: set[tuple[bytes, int, int]] = field(default_factory=set)
    # the manager has declared the death, which this node may detect earlier
    confirmed: bool = False


class OrphanInventoryEvents(Protocol):
    """Reports and requests of this component to the components above it."""

    def backup_number(self, object_id: bytes, host_id: int) -> int | None:
        """If this node is the backup of an actor of the host: the number of its restart data, where
        higher is newer and 0 means incomplete. Otherwise None."""


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
        """A host is gone. Must precede the release of objects of that host by any component."""
        lost = self.lost[host_id] = Lost(host_id, number)
        self.hold(lost, self.of(host_id))

    def lost_as(self, number: int) -> Lost | None:
        """The dead owner whose node had the number."""
        return next((one for one in self.lost.values() if one.number == number), None)

    def of(self, host_id: int) -> list[ImportRecord]:
        """All imports that the host with this id owns."""
        return [one for one in self.imports.by_oid.values() if one.owner == host_id]

    def hold(self, lost: Lost, imports: list[ImportRecord]) -> None:
        """Holds these imports until their new owner is known."""
        for one in imports:
            hold = self.client.hold(one.oid)
            if hold is not None:
                lost.holds[one.oid] = hold

    def report(
        self, number: int, imports: list[ImportRecord], lost: Lost | None
    ) -> HoldingsReported:
        """Describes this host's part in these objects, which the node `number` owned."""
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
                # Reported so that the manager names the object's owner to this node.
                if not self.imports.all_of(object_id) and len(objects) < HOLDINGS_MAX:
                    objects.append(object_id)
                    numbers.append(0)
                    lost.reported[object_id] = 0
        return HoldingsReported(
            node=self.node(),
            lost=number,
            objects=tuple(objects),
            imports=tuple(numbers),
            whole=tuple(whole),
            backups=tuple(backups),
        )


def is_kept(one: ImportRecord) -> bool:
    """Whether only the node itself holds the object here, as a replica, complete or still
    arriving."""
    return one.kept and not one.number


class OwnershipTransferEvents(Protocol):
    """Reports and requests of this component to the components above it."""

    def backup_number(self, object_id: bytes, host_id: int) -> int | None:
        """See OrphanInventoryEvents."""

    def moved(self, one: ImportRecord) -> None:
        """An import has a new owner, which may be this host."""

    def ownerless(self, one: ImportRecord) -> None:
        """The manager has named no new owner for an import, and will not name one."""

    def owners_handled(self) -> None:
        """A manager's message about owners has been handled completely."""


class OwnershipTransfer:
    """This node's part in finding new owners."""

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
        """host_id_at: the host id of a living node's number, perhaps of this node; number_of: the
        reverse."""
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
        self.numbers: dict[int, int] = {}  # numbers of all nodes that have died, by host id
        # Holds on objects that were reported again to a new manager although they have a new owner,
        # by the number of the first owner, until the manager has answered.
        self._restated: dict[int, list[Any]] = {}

    def is_open(self, host_id: int) -> bool:
        """Whether the host is dead and its objects have no new owners yet."""
        return host_id in self.lost

    def is_decided(self, host_id: int) -> bool:
        """Whether the host is dead and no more owners will be named for its objects."""
        return host_id in self.numbers and host_id not in self.lost

    # -- after a death -------------------------------------------------------------------------

    def begin(self, host_id: int, number: int) -> None:
        """A host is gone. Must precede the release of objects of that host by any component."""
        self.numbers[host_id] = number
        self.orphan_inventory.begin(host_id, number)

    def report(self, number: int) -> None:
        """Reports this node's orphan inventory to the manager, which has declared the death and
        waits for the report of every node."""
        lost = self.orphan_inventory.lost_as(number)
        if lost is not None:
            lost.confirmed = True
        # Includes objects that were first encountered after the death.
        imports = [] if lost is None else self.orphan_inventory.of(lost.host_id)
        self.send_manager(self.orphan_inventory.report(number, imports, lost))
        if lost is not None and not lost.reported:  # an empty report gets no answer
            self._close(lost)

    def report_again(self) -> Iterator[HoldingsReported | OwnersKnown | OwnerAsked]:
        """Repeats this node's reports, and the known new owners, to a new manager."""
        moved: dict[int, list[ImportRecord]] = {}
        owners: dict[bytes, int] = {}
        for one in list(self.imports.by_oid.values()):
            owner = self.number_of(one.owner)
            if one.moved >= 0 and owner is not None:
                owners[one.object] = owner
                moved.setdefault(one.moved, []).append(one)
            elif one.owner in self.lost:
                number = self.lost[one.owner].number
                moved.setdefault(number, []).append(one)
                if one.moved >= 0:  # other nodes may only know the first owner
                    owners[one.object] = number
            asks = is_kept(one) or (one.number and not one.described)
            # Open questions are repeated even if the owner's host is now known: they were lost with
            # the former manager.
            if asks and (owner is None or one.asks) and one.owner not in self.lost:
                yield OwnerAsked(self.node(), one.object)
        for begin in range(0, len(owners), HOLDINGS_MAX):
            part = slice(begin, begin + HOLDINGS_MAX)
            yield OwnersKnown(self.node(), tuple(owners)[part], tuple(owners.values())[part])
        restated: dict[int, list[Any]] = {}
        open_ = {lost.number: lost for lost in self.lost.values()}
        for number in {**moved, **open_}:
            lost = open_.get(number)
            if lost is not None:
                for object_id, before in lost.reported.items():
                    lost.former.setdefault(object_id, set()).add(before)
                lost.reported.clear()
                lost.asked.clear()  # the new manager has no open question; this report replaces it
            told = self.orphan_inventory.report(number, moved.get(number, []), lost)
            if told.objects:
                # The manager may name this node as the owner, if the present owner has died by
                # then.
                restated[number] = [self.client.hold(one.oid) for one in moved.get(number, ())]
            if told.objects or lost is not None:
                yield told
            # A manager that has not detected the death may name that host as an owner, and later
            # declare it lost; then `report` follows.
            if lost is not None and lost.confirmed and not told.objects:
                self._close(lost)
        self._restated = restated

    @property
    def manager_handlers(self) -> dict[type, ManagerHandler]:
        """Handlers of messages of the manager about owners."""

        def told(message: OwnerTold) -> None:
            self._told(message)
            self.events.owners_handled()

        def owners_named(message: OwnersNamed) -> None:
            self._owners_named(message)
            self.events.owners_handled()

        return {OwnerTold: told, OwnersNamed: owners_named}

    def _owners_named(self, message: OwnersNamed) -> None:
        if not message.more:
            self._restated.pop(message.lost, None)
        lost = self.orphan_inventory.lost_as(message.lost)
        if lost is None:
            return
        for at, object_id in enumerate(message.objects):
            owner = self._named(message.owners[at])
            ours = [one for one in self.imports.all_of(object_id) if one.owner == lost.host_id]
            if owner is None:
                for one in ours:
                    self._lose(one, lost)
            elif owner == self.client.host_id:
                self._take_over(lost, ours, message.counted[at], message.copies[at])
            else:
                self._moved(lost, object_id, ours, owner)
        if not message.more:
            self._close(lost)

    def back(self, host_id: int) -> None:
        """A host that the last manager had declared lost is a member again without a restart,
        because a user has promoted its standby (`promote --anyway`). Its objects get no other
        owners, so this node acquires them from that host. Where the last manager had already named
        another owner, both hosts count holders; values are read from either."""
        self._restated.pop(self.numbers.pop(host_id, -1), None)
        lost = self.lost.pop(host_id, None)
        if lost is None:
            return
        for one in self.orphan_inventory.of(host_id):
            self.events.moved(one)
            # The owner counts an import once, however often it is acquired. It describes the object
            # each time, which also answers readers of an absent value.
            if one.number:
                self._acquire(one)
            elif self.imports.is_whole(one) or is_kept(one):
                self._keep_on(one)
            else:
                self.imports.follow_owner(one.oid)
        lost.holds.clear()
        self.events.owners_handled()

    def _named(self, number: int) -> int | None:
        """The host id of a node named by the manager, which may have died meanwhile. None: the
        manager has named no owner."""
        owner = self.host_id_at(number)
        if owner is None:
            owner = next((one for one, other in self.numbers.items() if other == number), None)
        return owner

    def _close(self, lost: Lost) -> None:
        """Ends the search after the death of one owner: objects without a new owner are lost, and
        holds that kept the headers meanwhile are released."""
        del self.lost[lost.host_id]
        for one in self.orphan_inventory.of(lost.host_id):
            if one.number not in lost.asked:
                self._lose(one, lost)
        lost.holds.clear()

    def _lose(self, one: ImportRecord, lost: Lost) -> None:
        """The object is lost, because no host has it completely, whatever holders are recorded
        here."""
        why = _no_copy(lost.number)
        remote = self.remote_objects.by_oid.get(one.oid)
        if remote is not None and remote.payload:  # the running transfer decides whether it is lost
            hold = self.client.hold(one.oid)
            remote.waiting.append(lambda: _drop(hold))
        elif self.client.state(one.oid) in UNWRITTEN:
            self.imports.fail(one, why)
        else:
            self.remote_objects.fail(
                one.oid, ObjectLostError(f"object {one.object.hex()} is lost: {why}")
            )
        self.imports.answer(one)
        self.events.ownerless(one)  # the value may be complete here, like that of an identity

    def _moved(self, lost: Lost, object_id: bytes, ours: list[ImportRecord], owner: int) -> None:
        """Another node is the owner now, and counts this host's import as reported."""
        number = lost.reported.get(object_id, 0)
        for one in ours:
            self._follow(one, owner)
            self.events.moved(one)
        if owner in self.lost:
            return
        # Acquire precedes Release, because otherwise the object could be freed in between. Release
        # precedes ReplicaStored, because a Release makes the owner forget this host's replica.
        for one in ours:
            # An owner named by a former manager does not count later imports, because it has closed
            # its search and ignores OwnersNamed. So a reported import without a description is
            # acquired as well; an owner that already counts it counts it once.
            if one.number and (one.number != number or not one.described):
                self._acquire(one)
        # A header that OwnerTold has already moved may also have the reported number.
        here = {one.number for one in self.imports.all_of(object_id)}
        for before in sorted({number, *lost.former.get(object_id, ())} - here - {0}):
            self.send(owner, Release(object_id, before))  # released after the report
        for one in ours:
            if not one.number and (self.imports.is_whole(one) or is_kept(one)):
                self._keep_on(one)

    def _acquire(self, one: ImportRecord) -> None:
        if not self.send(one.owner, Acquire(one.object, one.number)):
            self.ask_for_owner(one)

    def _keep_on(self, one: ImportRecord) -> None:
        """Keeps a replica, here or arriving, and reports it to its new owner when complete."""
        hold = self.client.hold(one.oid)
        if hold is None:
            return
        one.kept = True
        self.replicas.keep_on(one.object, hold)
        if self.imports.is_whole(one):  # it may have been completed after the report
            self._tell(one)

    def _take_over(
        self,
        lost: Lost,
        ours: list[ImportRecord],
        counted: tuple[int, ...],
        copies: tuple[int, ...],
    ) -> None:
        """Makes this node the owner. counted: (node, number of its import) pairs, flat. copies:
        numbers of nodes that have replicas."""
        if not ours:  # a former manager, which died between two messages, made this node the owner
            return
        mine = next((one for one in ours if self.imports.is_whole(one)), ours[0])
        object_id = mine.object
        self.imports.lead(mine)
        for one in ours:
            one.owner, one.moved = self.client.host_id, lost.number
        for node, number in zip(counted[::2], counted[1::2], strict=True):
            peer = self.host_id_at(node)
            gone = peer is None or (object_id, peer, number) in lost.pending_releases
            if node != self.node() and peer is not None and not gone:
                self.exports.count(object_id, peer, number)
        host_ids = [self.host_id_at(node) for node in copies]
        self.exports.lend(object_id, [host_id for host_id in host_ids if host_id is not None])
        self.imports.answer(mine)
        for one in ours:
            if one is not mine and one.number:
                self.imports.described(self.exports.describe(mine.oid, object_id, one.number))
                one.hold = self.client.hold(mine.oid)
        self.replicas.let_go(object_id)  # the export's hold now keeps the object
        self.events.moved(mine)

    # -- late messages -------------------------------------------------------------------------

    def released(self, peer: int, message: Release) -> None:
        """A host has released an object of which this node is, or is about to become, the owner. In
        the latter case the manager's message may still count that import, even if it was acquired
        and released here already."""
        self.exports.release(peer, message)
        lost = self.lost.get(self.imports.owner_of(message.object))
        if lost is not None:
            lost.pending_releases.add((message.object, peer, message.number))

    def ask_for_owner(self, one: ImportRecord) -> bool:
        """Asks the manager for the new owner of an object whose owner is gone, because a process
        here has received a ref to it, or a replica here is complete."""
        if one.number and one.owner in self.lost:
            self.lost[one.owner].asked.add(one.number)
        self.send_manager(OwnerAsked(self.node(), one.object))
        return True

    def _told(self, message: OwnerTold) -> None:
        owner = self._named(message.owner)
        for one in self.imports.all_of(message.object):
            if is_kept(one):
                self._copy_answered(one, owner)
            if not one.number or one.described:
                continue
            if one.owner in self.lost:
                self.lost[one.owner].asked.discard(one.number)
            if owner is None or owner == self.client.host_id:
                self.imports.fail(one, _no_copy(self.numbers.get(one.owner)))
                continue
            self._follow(one, owner)
            self.events.moved(one)
            if owner not in self.lost:
                self._acquire(one)

    def _copy_answered(self, one: ImportRecord, owner: int | None) -> None:
        """The manager's answer about a replica here that was unknown to the dead owner."""
        if self.number_of(one.owner) is not None or one.owner in self.lost:
            return
        if owner is None:
            self.replicas.let_go(one.object)
        elif owner != self.client.host_id:
            self._follow(one, owner)
            if owner not in self.lost:
                self._keep_on(one)

    def _follow(self, one: ImportRecord, owner: int) -> None:
        """Sets a new owner. If it is already dead, the import is held until the manager has named
        the next owner."""
        # The manager may name the same host again if it or this node missed the host's death.
        if owner != one.owner:
            one.owner, one.moved = owner, self.numbers.get(one.owner, -1)
        if owner in self.lost:
            self.orphan_inventory.hold(self.lost[owner], [one])

    def own(self, object_id: bytes) -> int:
        """As Imports.own. Another host may learn before this node that the manager has made this
        node the owner of an object, so objects of dead owners count as well if they are complete
        here."""
        found = self.imports.own(object_id)
        if found:
            return found
        ours = (one for one in self.imports.all_of(object_id) if one.owner in self.lost)
        return next((one.oid for one in ours if self.imports.is_whole(one)), 0)

    def freed(self, one: ImportRecord) -> None:
        """A header here was freed. If it was the object's last header here, and this node has
        become the owner, no host holds the object, and the manager is notified."""
        others = self.imports.all_of(one.object)
        other = next((other for other in others if other.owner == one.owner), None)
        if other is not None:
            if (is_kept(other) or not one.number) and self.imports.is_whole(other):
                # A Release of the freed header makes the owner forget this host's replica.
                self._tell(other)
        elif one.owner == self.client.host_id != ids.unpack_id(one.object)[0]:
            self.send_manager(ObjectGone(one.object))

    def _tell(self, one: ImportRecord) -> None:
        self.replicas.tell(one.object, self.client.inspect(one.oid)["size"])


def _drop(hold: Any) -> None:
    """Holds its parameter until the call."""


def _no_copy(number: int | None) -> str:
    had = "its host" if number is None else f"node h{number}"
    return f"{had} had it and is gone, and no other host has a copy; put(copies=2) keeps one"
