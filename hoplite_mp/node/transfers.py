"""Copies of objects on their way: the planner's plans as cells of the engine.

Why it exists: a plan says who gets which stripe from whom; this file turns this node's part into
pulls and serves over data connections, and tells the manager when a copy is whole. The bytes move
in the engine's thread, from shared memory to shared memory. A copy may be asked for by a process
here, or be sent for by a broadcast.
It must never know: why a plan looks as it does, what the bytes mean.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp.node.ground import Ground
from hoplite_mp.node.store import NODE_SLOT
from hoplite_mp.planner.loads import filled_links
from hoplite_mp.planner.program import program_of
from hoplite_mp.protocol.fields import SHARES
from hoplite_mp.protocol.messages import (
    CopyDropped,
    FetchComplete,
    FetchFailed,
    FetchRequested,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.kept import KeptCopies
    from hoplite_mp.node.links import Links
    from hoplite_mp.node.main import Node
    from hoplite_mp.node.meter import Meter
    from hoplite_mp.node.places import Place
    from hoplite_mp.planner.program import Pull
    from hoplite_mp.protocol.messages import Distribute, FetchRefused, Withdraw

__all__ = ["Transfers"]

COPY_ALIGN = 64
# How often what is received by one plan and served by another is looked at.
# Higher: fewer wake-ups; lower: who joins a running broadcast late is less far behind.
WINDOW_S = 0.004
SPACE_RETRY_S = 0.02


def copy_offset(nbytes: int, share: int) -> int:
    """Where a share of an object begins, in bytes."""
    return nbytes if share == SHARES else (nbytes * share >> 20) // COPY_ALIGN * COPY_ALIGN


@dataclass(slots=True)
class Transfer:
    """This node's part in one plan. A cell is known by its stripe."""

    plan: Distribute
    memory: Any  # a pinned view, or the block that is being filled
    ground: Ground
    cells: dict[int, int] = field(default_factory=dict)  # stripe -> cell of the engine
    missing: set[int] = field(default_factory=set)  # cells that this node's copy still needs
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)  # cell -> bytes of the object

    def progress(self, begin: int, end: int) -> int:
        """How many bytes from `begin` on have come, up to `end`."""
        at = begin
        for cell, (first, last) in sorted(self.ranges.items(), key=lambda item: item[1]):
            if first <= at < last:
                at = min(last, first + self.watermark(cell))
                if at < last:
                    break
        return min(at, end) - begin

    watermark: Callable[[int], int] = int


class Transfers:
    """All copies that come to this node or go from it."""

    def __init__(self, node: Node, links: Links, kept: KeptCopies, meter: Meter) -> None:
        self.node = node
        self.links = links
        self.kept = kept
        self.meter = meter
        self.engine = links.engine
        self.pulls: dict[int, tuple[Transfer, int]] = {}  # cell -> (transfer, parent)
        self.by_epoch: dict[int, Transfer] = {}
        self.fetching: dict[bytes, int] = {}  # object -> its header here
        self.roomless: dict[int, float] = {}  # epoch of a plan that finds no room -> until when
        self.copies: set[bytes] = set()  # objects of other hosts that the manager knows to be here

    # -- the fetcher of places -----------------------------------------------------------------

    def fetch(self, oid: int, place: Place) -> None:
        """The block at `place.payload` is to be filled."""
        self.fetching[place.object] = oid
        number = self.node.number
        holders = tuple(holder for holder in place.holders if holder != number)
        self.node.send_manager(FetchRequested(number, place.object, place.nbytes, holders))

    def forget(self, oid: int, place: Place) -> None:
        """Nobody wants it any more."""
        if self.fetching.get(place.object) == oid:
            del self.fetching[place.object]
            for epoch, transfer in list(self.by_epoch.items()):
                if transfer.ground is place.ground:  # also what was served as far as it had come
                    self._end(epoch)
            self.node.send_manager(CopyDropped(self.node.number, place.object))

    def dropped(self, object_id: bytes) -> None:
        """A copy of another host's object has gone."""
        if object_id in self.copies:
            self.copies.discard(object_id)
            self.node.send_manager(CopyDropped(self.node.number, object_id))

    # -- the manager's plans -------------------------------------------------------------------

    def distribute(self, plan: Distribute) -> None:
        """Takes up this node's part of a plan."""
        number = self.node.number
        receiving = number in plan.receivers
        if receiving and plan.object not in self.fetching and not self._expect(plan):
            return
        program = program_of(plan, number)
        older = None if receiving else self._receiving(plan.object)
        if receiving:
            memory = self._target(plan)
        else:
            memory = self._source(plan) if older is None else older.memory
        if memory is None:  # nobody wants it any more, or it is not here any more
            self.node.send_manager(CopyDropped(number, plan.object))
            return
        if receiving:
            ground = self.node.places.places[self.fetching[plan.object]].ground
        else:
            ground = Ground() if older is None else older.ground
        transfer = Transfer(plan, memory, ground, watermark=self.engine.watermark)
        self.by_epoch[plan.epoch] = transfer
        self.meter.begin(filled_links(plan, number))
        pulled: dict[int, Pull] = {pull.cell.stripe: pull for pull in program.pulls}
        served = {serve.cell.stripe for serve in program.serves}
        for index, stripe in enumerate(plan.stripes):
            if index not in pulled and index not in served:
                continue
            begin = copy_offset(plan.nbytes, stripe.begin_share)
            end = copy_offset(plan.nbytes, stripe.end_share)
            key = (plan.operation, plan.epoch, index, 0) if index in served else None
            there = index not in pulled and older is None
            cell = self.engine.cell(key, memory, begin, end - begin, there)
            transfer.cells[index] = cell
            transfer.ranges[cell] = (begin, end)
            if index in pulled:
                transfer.missing.add(cell)
                self.pulls[cell] = (transfer, pulled[index].parent)
        for index, pull in pulled.items():
            key = (plan.operation, plan.epoch, index, 0)
            self.links.pull(transfer.cells[index], pull.parent, key, self)

        if older is not None:
            self.node.after(0.0, lambda: self._advance(plan.epoch))

    def _expect(self, plan: Distribute) -> bool:
        """A copy that nobody here has asked for; False: not now, or there is nothing to do."""
        oid = self.kept.expect(plan.object, plan.nbytes, plan.sources)
        place = self.node.places.places.get(oid)
        if place is None:  # it has come by another way, or is deleted
            self.kept.tell(plan.object, plan.nbytes)
            self._say_complete(plan)
            return False
        if place.payload:  # a collective that copies is filling it
            place.waiting.append(lambda: self._say_complete(plan))
            return False
        payload = self.node.store.lease(place.nbytes, NODE_SLOT)
        if payload is not None:
            self.roomless.pop(plan.epoch, None)
            place.payload = payload
            place.filler = self
            self.fetching[plan.object] = oid
            return True
        until = self.roomless.setdefault(plan.epoch, time.monotonic() + self.node.config.put_wait_s)
        if time.monotonic() < until:
            self.node.after(SPACE_RETRY_S, lambda: self._again(plan))
        else:
            del self.roomless[plan.epoch]
            self.kept.let_go(plan.object)
            self.node.send_manager(CopyDropped(self.node.number, plan.object))
        return False

    def _again(self, plan: Distribute) -> None:
        if plan.epoch in self.roomless:  # else withdrawn
            self.distribute(plan)

    def _say_complete(self, plan: Distribute) -> None:
        number = self.node.number
        oid = self.node.local_oid(plan.object)
        if oid is None or isinstance(self.node.client.view(oid), int):
            self.node.send_manager(CopyDropped(number, plan.object))
            return
        self.copies.add(plan.object)
        self.node.send_manager(FetchComplete(number, plan.object, plan.epoch))

    def _receiving(self, object_id: bytes) -> Transfer | None:
        """The plan by which this node is just receiving that object."""
        for transfer in self.by_epoch.values():
            if transfer.plan.object == object_id and transfer.missing:
                return transfer
        return None

    def _advance(self, epoch: int) -> None:
        """What is served while it is still being received grows with it, in steps of a timer."""
        transfer = self.by_epoch.get(epoch)
        if transfer is None:
            return
        object_id = transfer.plan.object
        source = self._receiving(object_id)  # another one by now, perhaps
        for cell, (begin, end) in transfer.ranges.items():
            come = end - begin if source is None else source.progress(begin, end)
            if source is None and object_id in self.fetching:
                come = 0  # the plan has been withdrawn, and the next is on its way
            if come > self.engine.watermark(cell):
                self.engine.advance(cell, come)
        if source is not None or object_id in self.fetching:
            self.node.after(WINDOW_S, lambda: self._advance(epoch))

    def _target(self, plan: Distribute) -> Any:
        """The block that is being filled here; None if nobody wants it any more."""
        oid = self.fetching.get(plan.object)
        place = None if oid is None else self.node.places.places.get(oid)
        if place is None:
            return None
        for epoch, older in list(self.by_epoch.items()):
            if older.plan.object == plan.object and older.missing:
                self._end(epoch)  # a later plan for the same block: it begins again
        return self.node.client.memory(place.payload, place.nbytes)

    def _source(self, plan: Distribute) -> Any:
        """The whole object, pinned; None if it is not here."""
        oid = self.node.local_oid(plan.object)
        if oid is None:
            return None
        got = self.node.client.view(oid)
        if isinstance(got, int) and self.node.store.restore(oid):
            got = self.node.client.view(oid)
        return None if isinstance(got, int) else memoryview(got)

    def withdraw(self, message: Withdraw) -> None:
        """That plan is over."""
        self.roomless.pop(message.epoch, None)
        self._end(message.epoch)

    def refused(self, message: FetchRefused) -> None:
        """The copy cannot be had."""
        self.kept.let_go(message.object)
        oid = self.fetching.get(message.object)
        if oid is not None and oid in self.node.places:
            self.node.places.lost(oid, message.message)  # by way of `forget`
        self.fetching.pop(message.object, None)

    # -- what the links say --------------------------------------------------------------------

    def filled(self, cell: int) -> None:
        """One stripe is there."""
        transfer, _ = self.pulls.pop(cell)
        transfer.missing.discard(cell)
        if transfer.missing:
            return
        plan = transfer.plan
        oid = self.fetching.get(plan.object)
        if not any(
            serve.cell.stripe in transfer.cells
            for serve in program_of(plan, self.node.number).serves
        ):
            self._end(plan.epoch)  # nobody reads from here
        if oid is not None and oid in self.node.places:
            self.node.places.arrived(oid)
            if plan.object not in self.fetching:
                return  # nobody wanted it any more: `forget` has said so
            # As long as others read from here, by whichever plan, it stays pinned.
            if any(other.ground is transfer.ground for other in self.by_epoch.values()):
                transfer.ground.keep.append(self.node.client.view(oid))
            self.copies.add(plan.object)
            self.kept.tell(plan.object, plan.nbytes)
            self.node.send_manager(FetchComplete(self.node.number, plan.object, plan.epoch))
        self.fetching.pop(plan.object, None)

    def describe(self, cell: int) -> dict[str, Any]:
        """For people: a stripe of which object."""
        found = self.pulls.get(cell)
        if found is None:
            return {}
        begin, end = found[0].ranges[cell]
        return {"object": found[0].plan.object, "bytes": end - begin, "offset": begin}

    def failed(self, cell: int, reason: str) -> None:
        """One stripe will not come as planned."""
        found = self.pulls.get(cell)
        if found is None:
            return
        transfer, parent = found
        plan = transfer.plan
        self.node.send_manager(
            FetchFailed(self.node.number, plan.object, plan.epoch, parent, reason[:1000])
        )

    def _end(self, epoch: int) -> None:
        transfer = self.by_epoch.pop(epoch, None)
        if transfer is None:
            return
        self.meter.end()
        for cell in transfer.cells.values():
            self.links.close(cell, transfer.ground)
            self.pulls.pop(cell, None)
        transfer.cells = {}
