"""Copies of objects on their way: the planner's plans as cells of the engine.

Why it exists: a plan says who gets which stripe from whom; this file turns this node's part into
pulls and serves over data connections, and tells the manager when a copy is whole. The bytes move
in the engine's thread, from shared memory to shared memory. A copy may be asked for by a process
here, or be sent for by a broadcast.
It must never know: why a plan looks as it does, what the bytes mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp.headers import NODE_SLOT
from hoplite_mp.node.membership.links import UNREACHABLE
from hoplite_mp.node.objects.ground import Ground
from hoplite_mp.node.ranges import Ranges
from hoplite_mp.planner.loads import filled_links
from hoplite_mp.planner.program import program_of
from hoplite_mp.protocol.messages import (
    CopyDropped,
    FetchComplete,
    FetchFailed,
    FetchRequested,
)
from hoplite_mp.protocol.operations import COPY_OPERATION
from hoplite_mp.protocol.reports import CopyHeld, DistributeHeld
from hoplite_mp.protocol.stripes import copy_offset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp.node.collectives.forests import Forests
    from hoplite_mp.node.membership.links import Links
    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.objects.kept import KeptCopies
    from hoplite_mp.node.objects.places import Place
    from hoplite_mp.node.ports import Key
    from hoplite_mp.planner.program import Program, Pull
    from hoplite_mp.protocol.messages import Distribute, FetchRefused, NodeToManager, Withdraw
    from hoplite_mp.protocol.reports import Report

__all__ = ["Transfers"]

# How often what is received by one plan and served by another is looked at.
# Higher: fewer wake-ups; lower: who joins a running broadcast late is less far behind.
WINDOW_S = 0.004
SPACE_RETRY_S = 0.02
# How often, and after how long, a parent that lives is asked again before the manager is asked for
# another one. Higher: longer breaks of a connection are ridden out, and a parent that cannot be
# reached holds the copy up for longer.
PULL_RETRY_S = 0.05
PULL_TRIES_MAX = 4


@dataclass(slots=True)
class Transfer:
    """This node's part in one plan."""

    plan: Distribute
    memory: Any  # a pinned view, or the block that is being filled
    ground: Ground
    watermark: Callable[[int], int]
    receives: bool  # the object is on its way to this node by this plan
    come: Ranges = field(default_factory=Ranges)  # what was here when the plan came
    cells: list[int] = field(default_factory=list)
    # cell -> bytes of the object that it brings [first, last), and where it begins itself.
    pulled: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)  # cells that this node's copy still needs
    # Cells that others read, and that grow with what comes by other cells: [begin, end).
    followed: dict[int, tuple[int, int]] = field(default_factory=dict)
    served: bool = False  # others read from here

    def arrived(self) -> Ranges:
        """Which bytes of the object are here by now."""
        found = self.come.copy()
        for cell, (first, _, begin) in self.pulled.items():
            found.add(first, begin + self.watermark(cell))
        return found


class Transfers:
    """All copies that come to this node or go from it."""

    def __init__(self, host: HostContext, links: Links, kept: KeptCopies, forests: Forests) -> None:
        self.config = host.config
        self.loop = host.loop
        self.client = host.client
        self.store = host.store
        self.places = host.places
        self.imports = host.imports
        self.send_manager = host.send_manager
        self.links = links
        self.kept = kept
        self.meter = forests.meter
        self.forests = forests
        self.engine = links.engine
        self.pulls: dict[int, tuple[Transfer, int, Key]] = {}  # cell -> (transfer, parent, key)
        self.tries: dict[int, int] = {}  # cell -> pulls of it that have failed
        self.by_epoch: dict[int, Transfer] = {}
        self.fetching: dict[bytes, int] = {}  # object -> its header here
        self.epochs = self.copied = 0  # the highest that this node has heard of
        # (object, block) -> what has come by plans that are over: the next one goes on there.
        self.come: dict[tuple[bytes, int], Ranges] = {}
        self.expected: set[int] = set()  # epochs of plans for what a collective is bringing
        self.roomless: dict[int, float] = {}  # epoch of a plan that finds no room -> until when
        self.copies: set[bytes] = set()  # objects of other hosts that the manager knows to be here

    # -- the fetcher of places -----------------------------------------------------------------

    def fetch(self, oid: int, place: Place) -> None:
        """The block at `place.payload` is to be filled."""
        if self.forests.makes(place.object):
            return  # its home has heard of the commit before this node: it is here in a moment
        before = self.fetching.get(place.object, oid)
        if before != oid and before in self.places:  # a header that nobody holds by now
            self.places.give_up(before)
        elif before != oid:
            self._take_back(place.object)
        self.fetching[place.object] = oid
        self._request(place)

    def _request(self, place: Place) -> None:
        asked = FetchRequested(self.client.number, place.object, place.nbytes, self._others(place))
        self.send_manager(asked)

    def _take_back(self, object_id: bytes) -> None:
        """The manager shall not bring it. A plan of which it does not know yet may still come, and
        is withdrawn then."""
        receiving = self._receiving(object_id)
        if receiving is not None:
            self._end_over(receiving.ground)
        del self.fetching[object_id]
        self._forget_come(object_id)
        self.send_manager(CopyDropped(self.client.number, object_id))

    def _end_over(self, ground: Ground) -> None:
        """All that is brought into that block, and what was served as far as it had come."""
        for epoch, transfer in list(self.by_epoch.items()):
            if transfer.ground is ground:
                self._end(epoch)

    def forget(self, oid: int, place: Place) -> None:
        """Nobody wants it any more."""
        if self.fetching.get(place.object) == oid:
            self._end_over(place.ground)
            self._take_back(place.object)

    def dropped(self, object_id: bytes) -> None:
        """A copy of another host's object has gone."""
        if object_id in self.copies:
            self.copies.discard(object_id)
            self.send_manager(CopyDropped(self.client.number, object_id))

    # -- the manager's plans -------------------------------------------------------------------

    def distribute(self, plan: Distribute) -> None:
        """Takes up this node's part of a plan."""
        self.epochs = max(self.epochs, plan.epoch)
        self.copied = max(self.copied, (plan.operation ^ COPY_OPERATION) + 1)
        number = self.client.number
        receiving = number in plan.receivers
        if receiving and plan.object not in self.fetching and not self._expect(plan):
            return
        self._take_up(plan, receiving)

    def _take_up(self, plan: Distribute, receiving: bool) -> None:
        number = self.client.number
        program = program_of(plan, number)
        older = None if receiving else self._receiving(plan.object)
        if receiving:
            memory = self._target(plan)
        else:
            memory = self._source(plan) if older is None else older.memory
        if memory is None:  # nobody wants it any more, or it is not here any more
            self.send_manager(CopyDropped(number, plan.object))
            return
        if receiving:
            place = self.places.places[self.fetching[plan.object]]
            ground = place.ground
            come = self.come.pop((plan.object, place.payload), Ranges())
        else:
            ground, come = Ground() if older is None else older.ground, Ranges()
        transfer = Transfer(plan, memory, ground, self.engine.watermark, receiving, come)
        self.by_epoch[plan.epoch] = transfer
        self.meter.begin(filled_links(plan, number))
        self._make(transfer, program, older)
        if transfer.followed:
            self.loop.call_later(0.0, lambda: self._advance(plan.epoch))
        if receiving and not transfer.missing:
            self._whole(transfer)

    def _make(self, transfer: Transfer, program: Program, older: Transfer | None) -> None:
        """The cells: of each stripe what is missing, and what others read."""
        plan = transfer.plan
        pulled: dict[int, Pull] = {}
        if transfer.receives:
            pulled = {pull.cell.stripe: pull for pull in program.pulls}
        served = {serve.cell.stripe for serve in program.serves}
        transfer.served = bool(served)
        begun: dict[int, list[int]] = {index: [] for index in pulled}
        for index, stripe in enumerate(plan.stripes):
            if index not in pulled and index not in served:
                continue
            begin = copy_offset(plan.nbytes, stripe.begin_share)
            end = copy_offset(plan.nbytes, stripe.end_share)
            shown = (plan.operation, plan.epoch, index, 0) if index in served else None
            gaps = transfer.come.gaps(begin, end) if index in pulled else []
            if shown and not (len(gaps) == 1 and gaps[0][1] == end):  # not what one pull fills
                follows = bool(gaps) if index in pulled else older is not None
                there = transfer.come.reach(begin, end) if follows else end - begin
                cell = self._cell(transfer, shown, begin, end, there)
                if follows:
                    transfer.followed[cell] = begin, end
                shown = None
            for first, last in gaps:
                cell = self._cell(transfer, shown, begin, last, first - begin)
                transfer.pulled[cell] = first, last, begin
                transfer.missing.add(cell)
                key = (plan.operation, plan.epoch, index, 0)
                self.pulls[cell] = transfer, pulled[index].parent, key
                begun[index].append(cell)
        for cell in (cell for cells in begun.values() for cell in cells):
            self._pull(cell)

    def _pull(self, cell: int) -> None:
        if cell in self.pulls:  # else withdrawn
            _, parent, key = self.pulls[cell]
            self.links.pull(cell, parent, key, self)

    def _cell(self, transfer: Transfer, key: Key | None, begin: int, end: int, there: int) -> int:
        whole = there == end - begin  # then the memory may be one that is only read
        cell = self.engine.cell(key, transfer.memory, begin, end - begin, whole or there)
        transfer.cells.append(cell)
        return cell

    def _expect(self, plan: Distribute) -> bool:
        """A copy that nobody here has asked for; False: not now, or there is nothing to do."""
        oid = self.kept.expect(plan.object, plan.nbytes, plan.sources)
        place = self.places.places.get(oid)
        if place is None:  # it has come by another way, or is deleted
            self.kept.tell(plan.object, plan.nbytes)
            self._is_here(plan)
            return False
        if place.payload:  # a collective that copies is filling it
            self.expected.add(plan.epoch)
            place.waiting.append(lambda: self._has_come(plan))
            return False
        payload = self.store.lease(place.nbytes, NODE_SLOT)
        if payload is not None:
            self.roomless.pop(plan.epoch, None)
            place.payload = payload
            place.filler = self
            self.fetching[plan.object] = oid
            return True
        until = self.roomless.setdefault(plan.epoch, self.loop.now() + self.config.put_wait_s)
        if self.loop.now() < until:
            self.loop.call_later(SPACE_RETRY_S, lambda: self._again(plan))
        else:
            del self.roomless[plan.epoch]
            self.kept.let_go(plan.object)
            self.send_manager(CopyDropped(self.client.number, plan.object))
        return False

    def _again(self, plan: Distribute) -> None:
        if plan.epoch in self.roomless:  # else withdrawn
            self.distribute(plan)

    def _has_come(self, plan: Distribute) -> None:
        if plan.epoch in self.expected:  # else withdrawn
            self.expected.discard(plan.epoch)
            self._is_here(plan)

    def _is_here(self, plan: Distribute) -> None:
        """A receiver that needs nothing, because its last report has crossed with this plan: others
        may have been told all the same to get the object from here."""
        number = self.client.number
        oid = self.imports.local(plan.object) or None
        if oid is None or isinstance(self.client.view(oid), int):
            self.send_manager(CopyDropped(number, plan.object))
            return
        self.copies.add(plan.object)
        if program_of(plan, number).serves:
            self._take_up(plan, False)
        self.send_manager(FetchComplete(number, plan.object, plan.epoch))

    def _receiving(self, object_id: bytes) -> Transfer | None:
        """The plan by which this node is just receiving that object."""
        if object_id in self.fetching:
            for transfer in self.by_epoch.values():
                if transfer.receives and transfer.plan.object == object_id:
                    return transfer
        return None

    def _advance(self, epoch: int) -> None:
        """What is served while it is still being received grows with it, in steps of a timer."""
        transfer = self.by_epoch.get(epoch)
        if transfer is None:
            return
        object_id = transfer.plan.object
        source = self._receiving(object_id)  # another one by now, perhaps
        arrived = None if source is None else source.arrived()
        if source is not None and source.ground is not transfer.ground:
            arrived = Ranges()  # that one fills another block
        for cell, (begin, end) in transfer.followed.items():
            come = end - begin if arrived is None else arrived.reach(begin, end)
            if arrived is None and object_id in self.fetching:
                come = 0  # the plan has been withdrawn, and the next is on its way
            if come > self.engine.watermark(cell):
                self.engine.advance(cell, come)
        if source is not None or object_id in self.fetching:
            self.loop.call_later(WINDOW_S, lambda: self._advance(epoch))

    def _target(self, plan: Distribute) -> Any:
        """The block that is being filled here; None if nobody wants it any more."""
        oid = self.fetching.get(plan.object)
        place = None if oid is None else self.places.places.get(oid)
        if place is None:
            return None
        for epoch, older in list(self.by_epoch.items()):
            if older.receives and older.plan.object == plan.object:
                self._end(epoch)  # a later plan for the same block goes on where it was
        return self.client.memory(place.payload, place.nbytes)

    def _source(self, plan: Distribute) -> Any:
        """The whole object, pinned; None if it is not here, or an error is in its place."""
        oid = self.imports.local(plan.object) or None
        if oid is None:
            return None
        got = self.client.view(oid)
        if isinstance(got, int) and self.store.restore(oid):
            got = self.client.view(oid)
        mem = None if isinstance(got, int) else memoryview(got)
        return mem if mem is not None and mem.nbytes == plan.nbytes else None

    def withdraw(self, message: Withdraw) -> None:
        """That plan is over. If it was bringing the object, and the manager has not said another
        one before, it was for a request that this node has taken back meanwhile."""
        if self.roomless.pop(message.epoch, None) is not None:
            self.kept.let_go(message.object)
        self.expected.discard(message.epoch)
        transfer = self.by_epoch.get(message.epoch)
        received = transfer is not None and transfer.receives
        self._end(message.epoch)
        if received and message.object in self.fetching and not self._receiving(message.object):
            self._abandoned(message.object)

    def _abandoned(self, object_id: bytes) -> None:
        oid = self.fetching[object_id]
        place = self.places.places.get(oid)
        if place is None:
            del self.fetching[object_id]
        elif self.kept.only_kept(object_id):
            self._end_over(place.ground)
            del self.fetching[object_id]  # or `forget` would tell the manager what it has just said
            self._forget_come(object_id)
            self.kept.let_go(object_id)
            self.places.give_up(oid)
        else:  # it was asked for again
            self._request(place)

    def refused(self, message: FetchRefused) -> None:
        """The copy cannot be had."""
        self.kept.let_go(message.object)
        oid = self.fetching.get(message.object)
        if oid is not None and oid in self.places:
            self.places.lost(oid, message.message)  # by way of `forget`
        self.fetching.pop(message.object, None)
        self._forget_come(message.object)

    def report(self) -> Iterator[NodeToManager | Report]:
        """What a manager must know that has not heard of any copy."""
        number = self.client.number
        moving = set()
        for transfer in self.by_epoch.values():
            yield DistributeHeld(number, transfer.plan, transfer.receives)
            if transfer.receives:
                moving.add(transfer.plan.object)
        for object_id in self.copies:
            oid = self.imports.local(object_id) or None
            if oid is not None and oid not in self.places:
                yield CopyHeld(number, object_id, self.client.inspect(oid)["size"])
        for object_id, oid in self.fetching.items():
            place = self.places.places.get(oid)
            if object_id not in moving and place is not None:
                yield FetchRequested(number, object_id, place.nbytes, self._others(place))

    def _others(self, place: Place) -> tuple[int, ...]:
        found = tuple(holder for holder in place.holders if holder != self.client.number)
        if not found:  # it was expected from somebody who was still receiving it
            home = self.links.peers.by_home.get(self.kept.imports.home_of(place.object))
            found = () if home is None else (home.member.node,)
        return found

    # -- what the links say --------------------------------------------------------------------

    def filled(self, cell: int) -> None:
        """One stripe is there."""
        transfer, *_ = self.pulls.pop(cell)
        self.tries.pop(cell, None)
        transfer.missing.discard(cell)
        if not transfer.missing:
            self._whole(transfer)

    def _whole(self, transfer: Transfer) -> None:
        """All bytes are there. What an earlier plan has begun to write is out of the way first."""
        transfer.ground.when_free(lambda: self._finish(transfer))

    def _finish(self, transfer: Transfer) -> None:
        plan = transfer.plan
        if self.by_epoch.get(plan.epoch) is not transfer:
            return  # withdrawn meanwhile
        transfer.receives = False
        oid = self.fetching.get(plan.object)
        self._forget_come(plan.object)
        if not transfer.served:
            self._end(plan.epoch)  # nobody reads from here
        if oid is not None and oid in self.places:
            self.places.arrived(oid)
            if plan.object not in self.fetching:
                return  # nobody wanted it any more: `forget` has said so
            # As long as others read from here, by whichever plan, it stays pinned.
            if any(other.ground is transfer.ground for other in self.by_epoch.values()):
                transfer.ground.keep.append(self.client.view(oid))
            self.copies.add(plan.object)
            self.kept.tell(plan.object, plan.nbytes)
            self.send_manager(FetchComplete(self.client.number, plan.object, plan.epoch))
        self.fetching.pop(plan.object, None)

    def describe(self, cell: int) -> dict[str, Any]:
        """For people: a stripe of which object."""
        found = self.pulls.get(cell)
        if found is None:
            return {}
        transfer, *_ = found
        first, last, _ = transfer.pulled[cell]
        return {"object": transfer.plan.object, "bytes": last - first, "offset": first}

    def failed(self, cell: int, reason: str) -> None:
        """One stripe will not come as planned; if its parent lives it is asked again first: a
        connection may break without an end of either side."""
        found = self.pulls.get(cell)
        if found is None:
            return
        transfer, parent, _ = found
        tries = self.tries[cell] = self.tries.get(cell, 0) + 1
        lives = parent in self.links.peers.by_number and reason != UNREACHABLE
        if lives and tries <= PULL_TRIES_MAX:
            self.loop.call_later(PULL_RETRY_S, lambda: self._pull(cell))
            return
        plan = transfer.plan
        self.send_manager(
            FetchFailed(self.client.number, plan.object, plan.epoch, parent, reason[:1000])
        )

    def _end(self, epoch: int) -> None:
        transfer = self.by_epoch.pop(epoch, None)
        if transfer is None:
            return
        self.meter.end()
        place = self.places.places.get(self.fetching.get(transfer.plan.object, 0))
        if transfer.receives and place is not None and place.payload:
            self.come[transfer.plan.object, place.payload] = transfer.arrived()
        for cell in transfer.cells:
            self.links.close(cell, transfer.ground)
            self.pulls.pop(cell, None)
            self.tries.pop(cell, None)
        transfer.cells, transfer.pulled, transfer.followed = [], {}, {}

    def _forget_come(self, object_id: bytes) -> None:
        for known in [known for known in self.come if known[0] == object_id]:
            del self.come[known]
