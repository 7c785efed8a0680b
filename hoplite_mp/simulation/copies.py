"""Copies of objects on their way to and from one node: the planner's Distributes as cells.

Why it exists: it says to the planner what node/collectives/transfers.py says, at the same
occasions, and does with plans what that does with them.
It must never know: why a plan looks as it does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hoplite_mp.planner.program import program_of
from hoplite_mp.protocol.messages import CopyDropped, FetchComplete, FetchFailed, FetchRequested
from hoplite_mp.protocol.stripes import copy_offset

if TYPE_CHECKING:
    from hoplite_mp.planner.program import Program, Pull
    from hoplite_mp.protocol.messages import Distribute, FetchRefused, Withdraw
    from hoplite_mp.simulation.imitated import ImitatedNode
    from hoplite_mp.simulation.memory import Memory
    from hoplite_mp.simulation.places import Place
    from hoplite_mp.simulation.streams import Cell, Key

__all__ = ["Copies"]

# How often what is received by one plan and served by another is looked at
# (node/collectives/transfers.py).
WINDOW_S = 0.004


@dataclass(slots=True, eq=False)
class Transfer:
    """This node's part in one plan."""

    plan: Distribute
    memory: Memory
    place: Place | None  # that is being filled; None: the object is whole
    receives: bool  # it is on its way to this node by this plan
    come: list[tuple[int, int]] = field(default_factory=list)  # what was here when the plan came
    cells: list[Cell] = field(default_factory=list)
    pulled: dict[Cell, tuple[int, int]] = field(default_factory=dict)  # bytes that each brings
    missing: set[Cell] = field(default_factory=set)
    # Cells that others read, and that grow with what comes by other cells: [begin, end).
    followed: dict[Cell, tuple[int, int]] = field(default_factory=dict)
    served: bool = False

    def reach(self, begin: int, end: int) -> int:
        """How many bytes are here from `begin` on, up to `end`."""
        found = sorted(
            [
                *self.come,
                *((a, cell.begin + cell.watermark) for cell, (a, _) in self.pulled.items()),
            ]
        )
        at = begin
        for first, last in found:
            if first <= at < last:
                at = last
        return min(at, end) - begin


class Copies:
    """All copies that come to this node or go from it."""

    def __init__(self, node: ImitatedNode) -> None:
        self.node = node
        self.engine = node.engine
        self.pulls: dict[Cell, tuple[Transfer, int]] = {}  # with the parent
        self.by_epoch: dict[int, Transfer] = {}
        self.fetching: dict[bytes, Place] = {}
        self.known: dict[bytes, None] = {}  # copies here of which the manager was told
        self.expected: set[int] = set()  # plans for what a collective is bringing

    # ---- the fetcher of places

    def fetch(self, place: Place) -> None:
        """Asks the planner for it."""
        if self.node.parts.is_making(place.object):
            return  # its home has heard of the commit before this node: it is here in a moment
        self.fetching[place.object] = place
        number = self.node.number
        holders = tuple(holder for holder in place.holders if holder != number)
        self.node.send_manager(FetchRequested(number, place.object, place.nbytes, holders))

    def forget(self, place: Place) -> None:
        if self.fetching.get(place.object) is place:
            del self.fetching[place.object]
            for epoch, transfer in list(self.by_epoch.items()):
                if transfer.place is place:
                    self._end(epoch)
            self.node.send_manager(CopyDropped(self.node.number, place.object))

    # ---- the manager's plans

    def distribute(self, plan: Distribute) -> None:
        """Takes up this node's part."""
        number = self.node.number
        receiving = number in plan.receivers
        if receiving and plan.object not in self.fetching and not self._expect(plan):
            return
        self._begin(plan, receiving)

    def _begin(self, plan: Distribute, receiving: bool) -> None:
        number = self.node.number
        program = program_of(plan, number)
        older = None if receiving else self._receiving(plan.object)
        place = self.fetching[plan.object] if receiving else None
        memory: Memory | None
        if place is not None:
            memory = self._target(place)
        elif older is not None:
            memory, place = older.memory, older.place
        else:
            memory = self.node.places.holds.get(plan.object)
        if memory is None:  # it is not here any more
            self.node.send_manager(CopyDropped(number, plan.object))
            return
        transfer = Transfer(plan, memory, place, receiving)
        self.by_epoch[plan.epoch] = transfer
        self._make(transfer, program, older)
        if transfer.followed:
            self.node.after(0.0, self._advance, plan.epoch)
        if receiving and not transfer.missing:
            self._whole(transfer)

    def _make(self, transfer: Transfer, program: Program, older: Transfer | None) -> None:
        """The cells: of each stripe what is missing, and what others read."""
        plan, keeping = transfer.plan, self.node.world.keeping
        pulled: dict[int, Pull] = {}
        if transfer.receives:
            pulled = {pull.cell.stripe: pull for pull in program.pulls}
        served = {serve.cell.stripe for serve in program.serves}
        transfer.served = bool(served)
        begun: dict[int, list[Cell]] = {index: [] for index in pulled}
        for index, stripe in enumerate(plan.stripes):
            if index not in pulled and index not in served:
                continue
            begin = copy_offset(plan.nbytes, stripe.begin_share)
            end = copy_offset(plan.nbytes, stripe.end_share)
            shown = (plan.operation, plan.epoch, index, 0) if index in served else None
            gaps = keeping.gaps(transfer.memory, begin, end) if index in pulled else []
            transfer.come += _between(gaps, begin, end) if index in pulled else []
            if shown and not (len(gaps) == 1 and gaps[0][1] == end):  # not what one pull fills
                follows = bool(gaps) if index in pulled else older is not None
                there = transfer.reach(begin, end) if follows else end - begin
                cell = self._cell(transfer, shown, begin, end, there)
                if follows:
                    transfer.followed[cell] = begin, end
                shown = None
            for first, last in gaps:
                cell = self._cell(transfer, shown, begin, last, first - begin)
                transfer.pulled[cell] = first, last
                transfer.missing.add(cell)
                self.pulls[cell] = transfer, pulled[index].parent
                begun[index].append(cell)
        for index, cells in begun.items():
            for cell in cells:
                key = (plan.operation, plan.epoch, index, 0)
                self.node.pull(cell, pulled[index].parent, key, self)

    def _cell(self, transfer: Transfer, key: Key | None, begin: int, end: int, there: int) -> Cell:
        memory = transfer.memory if self.node.world.tracked else None
        cell = self.engine.cell(key, memory, begin, end - begin, there)
        transfer.cells.append(cell)
        return cell

    def _expect(self, plan: Distribute) -> bool:
        """A copy that nobody here has asked for; False: there is nothing to do now."""
        place = self.node.places.expect(plan.object, plan.nbytes, plan.sources)
        if place is None:  # it has come by another way, or is gone
            self._is_here(plan)
            return False
        if place.memory is not None:  # a collective that copies is filling it
            self.expected.add(plan.epoch)
            place.waiting.append(lambda why: self._has_come(plan))
            return False
        self.node.places.begin(place, self)
        self.fetching[plan.object] = place
        return True

    def _has_come(self, plan: Distribute) -> None:
        if plan.epoch in self.expected:  # else withdrawn
            self.expected.discard(plan.epoch)
            self._is_here(plan)

    def _is_here(self, plan: Distribute) -> None:
        """A receiver that needs nothing: others may have been told to get it from here."""
        self._say_complete(plan)
        if plan.object in self.node.places.holds and program_of(plan, self.node.number).serves:
            self._begin(plan, False)

    def _say_complete(self, plan: Distribute) -> None:
        number = self.node.number
        if plan.object not in self.node.places.holds:
            self.node.send_manager(CopyDropped(number, plan.object))
            return
        self.node.places.tell(plan.object)
        self.known[plan.object] = None
        self.node.send_manager(FetchComplete(number, plan.object, plan.epoch))

    def _receiving(self, object_id: bytes) -> Transfer | None:
        """The plan by which this node is just receiving that object."""
        if object_id in self.fetching:
            for transfer in self.by_epoch.values():
                if transfer.receives and transfer.plan.object == object_id:
                    return transfer
        return None

    def _advance(self, epoch: int) -> None:
        """What is served while it is still being received grows with it."""
        transfer = self.by_epoch.get(epoch)
        if transfer is None:
            return
        object_id = transfer.plan.object
        source = self._receiving(object_id)  # another one by now, perhaps
        for cell, (begin, end) in transfer.followed.items():
            come = end - begin if source is None else source.reach(begin, end)
            if source is None and object_id in self.fetching:
                come = 0  # the plan has been withdrawn, and the next is on its way
            if come > cell.watermark:
                self.engine.raise_to(cell, come)
        if source is not None or object_id in self.fetching:
            self.node.after(WINDOW_S, self._advance, epoch)

    def _target(self, place: Place) -> Memory | None:
        for epoch, older in list(self.by_epoch.items()):
            if older.receives and older.plan.object == place.object:
                self._end(epoch)  # a later plan for the same block goes on where it was
        return place.memory

    def withdraw(self, message: Withdraw) -> None:
        """That plan is over."""
        self.expected.discard(message.epoch)
        self._end(message.epoch)

    def refused(self, message: FetchRefused) -> None:
        """The copy cannot be had."""
        place = self.fetching.get(message.object)
        if place is not None:
            self.node.places.lost(place, message.message)
        self.fetching.pop(message.object, None)

    # ---- what the links say

    def filled(self, cell: Cell) -> None:
        """One stripe is there."""
        transfer, _ = self.pulls.pop(cell)
        transfer.missing.discard(cell)
        if not transfer.missing:
            self._whole(transfer)

    def _whole(self, transfer: Transfer) -> None:
        plan = transfer.plan
        if self.by_epoch.get(plan.epoch) is not transfer:
            return
        transfer.receives = False
        place = self.fetching.get(plan.object)
        if not transfer.served:
            self._end(plan.epoch)  # nobody reads from here
        if place is not None and self.node.places.places.get(plan.object) is place:
            self.node.places.arrived(place)
            if plan.object not in self.fetching:
                return
            self.node.places.tell(plan.object)
            self.known[plan.object] = None
            self.node.send_manager(FetchComplete(self.node.number, plan.object, plan.epoch))
        self.fetching.pop(plan.object, None)

    def failed(self, cell: Cell, reason: str) -> None:
        """One stripe will not come as planned."""
        found = self.pulls.get(cell)
        if found is not None:
            transfer, parent = found
            plan, number = transfer.plan, self.node.number
            self.node.send_manager(FetchFailed(number, plan.object, plan.epoch, parent, reason))

    def _end(self, epoch: int) -> None:
        transfer = self.by_epoch.pop(epoch, None)
        if transfer is None:
            return
        for cell in transfer.cells:
            self.engine.close(cell)
            self.pulls.pop(cell, None)
        transfer.cells, transfer.pulled, transfer.followed = [], {}, {}


def _between(gaps: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """What of [begin, end) is in none of these."""
    found = []
    for first, last in gaps:
        if begin < first:
            found.append((begin, first))
        begin = last
    return [*found, (begin, end)] if begin < end else found
