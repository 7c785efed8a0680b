"""Determines new owners for the objects of a dead node. An object's owner counts its holders.

A *round* begins with the death of a node. It ends when every node that was alive at that time has
reported its copies and uses of the dead node's objects, or has died. Then every object with a
complete copy gets a new owner: the holder with the lowest number, if possible a node that is not
leaving. The new owner of an actor is the node that can restart the actor from the newest state. The
death of a new owner begins another round, which includes the objects that it had taken over.

For each object that has outlived its owner, the planner keeps the number of the new owner until the
new owner reports that the object was freed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from hoplite_mp._common.ids import unpack_id
from hoplite_mp._protocol.copies import HOLDINGS_MAX
from hoplite_mp._protocol.fields import NODES_MAX
from hoplite_mp._protocol.messages import OrphansReported, OwnerReport, OwnersReassigned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._planner.membership import ClusterMembership
    from hoplite_mp._planner.step_result import Send
    from hoplite_mp._protocol.membership import ReportedOwners
    from hoplite_mp._protocol.messages import ObjectDeleted, OwnerQuery

NOBODY = NODES_MAX
# Maximum count of numbers, each of at most 5 bytes, in one message. A frame has at most 16 MiB.
# Lower: more messages after the death of a host with very many objects.
NUMBERS_MAX = 1 << 20
OBJECT_NUMBERS = 8  # an object's id counts as this many numbers


# (object, owner, counted holders, nodes with other copies): see OwnersReassigned.
_Row: TypeAlias = tuple[bytes, int, tuple[int, ...], tuple[int, ...]]


@dataclass(slots=True)
class _Held:
    """The holders of an object. `counted`: (node, import number) as counted by the owner. `whole`:
    the nodes with complete copies."""

    counted: set[tuple[int, int]] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)

    def add(self, other: _Held) -> None:
        self.counted |= other.counted
        self.whole |= other.whole

    def lose(self, node: int) -> None:
        """Removes a node that has died."""
        self.counted = {pair for pair in self.counted if pair[0] != node}
        self.whole.discard(node)


@dataclass(slots=True)
class _Round:
    """The reports after one death. The round ends when `waiting` is empty."""

    waiting: set[int]  # the nodes that have not reported yet
    reports: dict[int, OrphansReported] = field(default_factory=dict)  # by node
    further: dict[bytes, _Held] = field(default_factory=dict)  # holders found by earlier rounds
    asked: list[OwnerQuery] = field(default_factory=list)  # to be answered at the end
    gone: set[bytes] = field(default_factory=set)  # objects that were freed during the round


class OwnerRounds:
    """All open rounds, and all owners that rounds have determined."""

    def __init__(self, membership: ClusterMembership) -> None:
        self._membership = membership
        self._rounds: dict[int, _Round] = {}  # by the node that was lost
        self.named: dict[bytes, int] = {}  # object -> new owner; only objects whose owner changed
        # Called at the end of a round with the lost node, and the nodes that restart its actors.
        self.concluded: Callable[[int, dict[bytes, int]], None] = lambda lost, actors: None

    def lose(self, node: int) -> list[Send]:
        """Begins a round for a dead node. Membership must already have recorded the death."""
        self._rounds.pop(node, None)  # the round of an earlier incarnation
        self._rounds[node] = _Round(set(self._membership.nodes))
        for open_ in self._rounds.values():
            open_.waiting.discard(node)
            open_.reports.pop(node, None)
            for held in open_.further.values():
                held.lose(node)
        return self._conclude()

    def is_open(self, lost: int) -> bool:
        """Whether reports about that node's objects are still expected."""
        return lost in self._rounds

    def restore(self, known: list[ReportedOwners], inventories: list[OrphansReported]) -> None:
        """Takes over the rounds of the previous manager from the reports of all remaining nodes.
        Each node reports again after its admission, because it may meanwhile have received an
        object or the notice of a death. Both reports are used.

        Invariant: every owner in `named` is alive, or the round for its death is open."""
        living = self._membership.is_living
        for message in inventories:
            if not living(message.node) or living(message.lost):
                continue
            open_ = self._rounds.get(message.lost)
            if open_ is None:
                open_ = self._rounds[message.lost] = _Round(set(self._membership.nodes))
            open_.reports[message.node] = _joined(open_.reports.get(message.node), message)
        has: dict[int, set[bytes]] = {}
        for report in known:
            has.setdefault(report.node, set()).update(report.objects)
        for message in inventories:
            has.setdefault(message.node, set()).update(_held_in(message))
        for report in known:
            for object_id, owner in zip(report.objects, report.owners, strict=True):
                if living(owner) and object_id not in has.get(owner, ()):
                    # The owner freed the object while no manager could receive the report.
                    for open_ in self._rounds.values():
                        open_.gone.add(object_id)
                elif not self._owner_lives(object_id) and (living(owner) or owner in self._rounds):
                    self.named[object_id] = owner

    def report(self, message: OrphansReported) -> list[Send]:
        """Records a survivor's report of its objects. An unexpected report is ignored."""
        open_ = self._rounds.get(message.lost)
        if open_ is None or message.node not in open_.waiting:
            return []
        open_.waiting.discard(message.node)
        open_.reports[message.node] = _joined(open_.reports.get(message.node), message)
        return self._conclude()

    def asked(self, message: OwnerQuery) -> list[Send]:
        """Handles a node's query for the owner of an object, after the round that may determine
        the owner."""
        if not self._membership.is_living(message.node):
            return []
        first = self._membership.given_to(unpack_id(message.object)[0])
        owner = self.named.get(message.object, first)  # not in `named`: the owner has not changed
        awaited = [node for node in (owner, first) if node in self._rounds]
        if owner is None:  # the owner died before this manager began, so any round may be its own
            awaited = [*self._rounds]
        if awaited:
            self._rounds[awaited[0]].asked.append(message)
            return []
        answer = owner if owner is not None and self._membership.is_living(owner) else NOBODY
        return [(message.node, OwnerReport(message.object, answer))]

    def gone(self, message: ObjectDeleted) -> None:
        """Handles the owner's report that an object was freed. Other nodes' earlier reports may
        still name the object. A new manager may receive the report after the owner's death. Then
        the reports of the other nodes decide, because the owner may have lost contact with them."""
        if not self._owner_lives(message.object):
            return
        del self.named[message.object]
        for open_ in self._rounds.values():
            open_.gone.add(message.object)

    def _owner_lives(self, object_id: bytes) -> bool:
        owner = self.named.get(object_id)
        return owner is not None and self._membership.is_living(owner)

    def _conclude(self) -> list[Send]:
        """Ends the rounds for which all nodes have reported. If an object in a round has had a
        later owner that is also dead, the round of the later owner ends first, because nodes that
        knew the later owner report the object only in that round."""
        sends: list[Send] = []
        while True:
            ready = [lost for lost, open_ in self._rounds.items() if not open_.waiting]
            after = {lost: self._later_owners(lost) & self._rounds.keys() for lost in ready}
            # A cycle is only possible if nodes that a manager had declared dead have rejoined.
            free = [lost for lost in ready if not after[lost]] or [
                lost for lost in ready if after[lost] <= after.keys()
            ]
            if not free:
                return sends
            sends += self._end(free[0])

    def _later_owners(self, lost: int) -> set[int]:
        """The later owners of the objects in the round of the lost node."""
        reports = self._rounds[lost].reports.values()
        owners = {self.named.get(object_id) for report in reports for object_id in report.objects}
        return {owner for owner in owners if owner is not None} - {lost}

    def _end(self, lost: int) -> list[Send]:
        """Ends the round of the lost node, and determines the new owners of the objects in it."""
        open_ = self._rounds.pop(lost)
        held = _held(open_)
        for other in self._rounds.values():
            held_in_other = _held(other)
            for object_id, holders in held_in_other.items():
                if object_id in held or self.named.get(object_id) == lost:
                    held.setdefault(object_id, _Held()).add(holders)
            for object_id in held_in_other.keys() & held.keys():
                other.further.setdefault(object_id, _Held()).add(held[object_id])
        # Actor -> (how new the state is, -node) of its backups.
        backups: dict[bytes, list[tuple[int, int]]] = {}
        for node, report in open_.reports.items():
            for place, new in zip(report.backups[::2], report.backups[1::2], strict=True):
                backups.setdefault(report.objects[place], []).append((new, -node))
        for object_id in [object_id for object_id, owner in self.named.items() if owner == lost]:
            del self.named[object_id]
        leaving = self._membership.leaving
        for object_id, found in held.items():
            if not found.whole or object_id in open_.gone or object_id in self.named:
                continue  # the object is lost or freed, or already has a new owner
            newest = max(backups.get(object_id, ()), default=None)
            first = min(found.whole - leaving or found.whole)
            self.named[object_id] = first if newest is None else -newest[1]
        self.concluded(lost, {actor: self.named.get(actor, NOBODY) for actor in backups})
        sends: list[Send] = []
        for node, report in sorted(open_.reports.items()):
            if report.objects:
                sends += [(node, message) for message in self._named(node, report, held)]
        for message in open_.asked:
            sends += self.asked(message)
        return sends

    def _named(
        self,
        node: int,
        report: OrphansReported,
        held: dict[bytes, _Held],
    ) -> Iterator[OwnersReassigned]:
        """Yields the messages to a node about the objects that it has reported. Each message fits
        into a frame."""
        rows: list[_Row] = []
        size = 0
        for object_id in report.objects:
            owner = self.named.get(object_id, NOBODY)
            found = held[object_id] if owner == node else _Held()
            counted = tuple(number for pair in sorted(found.counted) for number in pair)
            row = object_id, owner, counted, tuple(sorted(found.whole - {node}))
            length = OBJECT_NUMBERS + len(counted) + len(found.whole)
            if rows and size + length > NUMBERS_MAX:
                yield _reassigned(report.lost, rows, True)
                rows, size = [], 0
            rows.append(row)
            size += length
        yield _reassigned(report.lost, rows, False)


def _held(open_: _Round) -> dict[bytes, _Held]:
    """The holders of each object in a round, according to the reports and to earlier rounds."""
    found = {
        object_id: _Held() for report in open_.reports.values() for object_id in report.objects
    }
    for node, report in open_.reports.items():
        for object_id, number in zip(report.objects, report.imports, strict=True):
            if number:
                found[object_id].counted.add((node, number))
        for place in report.whole:
            found[report.objects[place]].whole.add(node)
    for object_id in found.keys() & open_.further.keys():
        found[object_id].add(open_.further[object_id])
    return found


def _held_in(report: OrphansReported) -> set[bytes]:
    """The objects of which the node has a complete copy, or which it uses."""
    whole = {report.objects[place] for place in report.whole}
    used = zip(report.objects, report.imports, strict=True)
    return whole | {object_id for object_id, number in used if number}


def _joined(first: OrphansReported | None, later: OrphansReported) -> OrphansReported:
    """Merges two reports of a node. For an object in both reports, the later report counts."""
    if first is None or not first.objects:
        return later
    imports: dict[bytes, int] = {}
    whole: dict[bytes, None] = {}
    backups: dict[bytes, int] = {}
    for report in (first, later):
        for object_id, number in zip(report.objects, report.imports, strict=True):
            imports[object_id] = number
            whole.pop(object_id, None)
        whole.update(dict.fromkeys(report.objects[place] for place in report.whole))
        for place, new in zip(report.backups[::2], report.backups[1::2], strict=True):
            backups[report.objects[place]] = new
    for object_id in list(imports)[HOLDINGS_MAX:]:  # a report names at most HOLDINGS_MAX objects
        del imports[object_id]
        whole.pop(object_id, None)
    at = {object_id: place for place, object_id in enumerate(imports)}
    news = (number for one, new in backups.items() if one in whole for number in (at[one], new))
    return OrphansReported(
        later.node,
        later.lost,
        tuple(imports),
        tuple(imports.values()),
        tuple(at[one] for one in whole),
        tuple(news),
    )


def _reassigned(lost: int, rows: list[_Row], more: bool) -> OwnersReassigned:
    objects, owners, counted, copies = zip(*rows, strict=True)
    return OwnersReassigned(lost, objects, owners, counted, copies, more)
