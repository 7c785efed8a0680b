"""Copies of objects on their way: the planner's plans as cells of the engine.

Why it exists: a plan says who gets which stripe from whom; this file turns this node's part into
pulls and serves over data connections, and tells the manager when a copy is whole. The bytes move
in the engine's thread, from shared memory to shared memory.
It must never know: why a plan looks as it does, what the bytes mean.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp import _engine
from hoplite_mp.node.tls_links import TlsLink
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

    from hoplite_mp.node.main import Node
    from hoplite_mp.node.peers import Peers
    from hoplite_mp.node.places import Place
    from hoplite_mp.planner.program import Pull
    from hoplite_mp.protocol.messages import Distribute, FetchRefused, Member, Withdraw
    from hoplite_mp.transport.conversation import Admission

__all__ = ["Transfers"]

COPY_ALIGN = 64
BLOCK_BYTES = 256 << 10  # 2 ms at 1 Gbit/s
# How often what is received by one plan and served by another is looked at.
# Higher: fewer wake-ups; lower: who joins a running broadcast late is less far behind.
WINDOW_S = 0.004
_log = logging.getLogger("hoplite_mp")


def copy_offset(nbytes: int, share: int) -> int:
    """Where a share of an object begins, in bytes."""
    return nbytes if share == SHARES else (nbytes * share >> 20) // COPY_ALIGN * COPY_ALIGN


@dataclass(slots=True)
class Transfer:
    """This node's part in one plan. A cell is known by its stripe."""

    plan: Distribute
    keep: Any  # the memory: a pinned view, or the block that is being filled
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

    def __init__(self, node: Node, peers: Peers) -> None:
        self.node = node
        self.peers = peers
        self.tls = peers.lan.tls
        # Under TLS each block costs some steps in Python.
        block = _engine.BLOCK_BYTES_MOST if self.tls else BLOCK_BYTES
        self.engine = _engine.Engine(node.client.home, block)
        self.driven: dict[int, TlsLink] = {}
        self.links: dict[int, int] = {}  # number of a node -> link
        self.calling: dict[int, list[tuple[int, tuple[int, int, int, int]]]] = {}
        self.pulls: dict[int, tuple[Transfer, int]] = {}  # cell -> (transfer, parent)
        self.by_epoch: dict[int, Transfer] = {}
        self.fetching: dict[bytes, int] = {}  # object -> its header here
        self.copies: set[bytes] = set()  # objects of other hosts that the manager knows to be here
        self.closing: dict[int, Any] = {}  # cell -> what must live until the engine has let go
        node.add(self.engine.fileno(), self.look)

    # -- links ---------------------------------------------------------------------------------

    def admitted(self, admission: Admission) -> None:
        """Another node has made a data connection."""
        peer = self.peers.by_home.get(admission.peer.host)
        if peer is None:
            admission.stream.close()
            return
        if self.tls:
            self._driven(peer.member).receive_over(admission.stream.detach())
        else:
            self._connect(peer.member.node, admission)

    def _connect(self, number: int, admission: Admission) -> None:
        sock = admission.stream.detach()
        with sock:
            link = self.engine.connect(sock.fileno(), number)
        self.links.setdefault(number, link)

    def _driven(self, member: Member) -> TlsLink:
        """The link to a node under TLS; each side connects for what it sends."""
        known = self.driven.get(member.node)
        if known is not None:
            return known
        link = self.driven[member.node] = TlsLink(self.engine, member.node)
        self.links[member.node] = link.link

        def called(admission: Admission | None) -> None:
            if admission is None:
                link.close()
            else:
                link.send_over(admission.stream.detach())

        self.peers.call(member, "data", called)
        return link

    def _pull(self, cell: int, parent: int, key: tuple[int, int, int, int]) -> None:
        if self.tls and parent in self.peers.by_number:
            self._driven(self.peers.by_number[parent].member)
        link = self.links.get(parent)
        if link is not None:
            self.engine.pull(cell, link, key)
            return
        waiting = self.calling.get(parent)
        if waiting is not None:
            waiting.append((cell, key))
            return
        peer = self.peers.by_number.get(parent)
        if peer is None:
            self._failed(cell, "the node is gone")
            return
        self.calling[parent] = [(cell, key)]
        member = peer.member
        self.peers.call(member, "data", lambda admission: self._called(member, admission))

    def _called(self, member: Member, admission: Admission | None) -> None:
        waiting = self.calling.pop(member.node, [])
        if admission is not None:
            self._connect(member.node, admission)
        for cell, key in waiting:
            if cell not in self.pulls:
                continue
            if admission is None:
                self._failed(cell, "the node cannot be reached")
            else:
                self.engine.pull(cell, self.links[member.node], key)

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
                if transfer.plan.object == place.object and transfer.missing:
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
        program = program_of(plan, number)
        receiving = number in plan.receivers
        older = None if receiving else self._receiving(plan.object)
        if receiving:
            memory = self._target(plan)
        else:
            memory = self._source(plan) if older is None else older.keep
        if memory is None:  # nobody wants it any more, or it is not here any more
            self.node.send_manager(CopyDropped(number, plan.object))
            return
        transfer = Transfer(plan, memory, watermark=self.engine.watermark)
        self.by_epoch[plan.epoch] = transfer
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
            cell = transfer.cells[index]
            self._pull(cell, pull.parent, (plan.operation, plan.epoch, index, 0))

        if older is not None:
            self.node.after(0.0, lambda: self._advance(plan.epoch))

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
        self._end(message.epoch)

    def refused(self, message: FetchRefused) -> None:
        """The copy cannot be had."""
        oid = self.fetching.pop(message.object, None)
        if oid is not None and oid in self.node.places:
            self.node.places.lost(oid, message.message)

    def lose_node(self, number: int) -> None:
        """That node is gone, and its link with it."""
        link = self.links.pop(number, None)
        driven = self.driven.pop(number, None)
        if driven is not None:
            driven.close()
        elif link is not None:
            with contextlib.suppress(KeyError):
                self.engine.disconnect(link)

    # -- what the engine says ------------------------------------------------------------------

    def look(self) -> None:
        """Events of the engine."""
        for event in self.engine.events():
            kind = event[0]
            if kind == _engine.FILLED:
                self._filled(event[1])
            elif kind == _engine.PULL_FAILED:
                self._failed(event[1], event[2])
            elif kind == _engine.CLOSED:
                self.closing.pop(event[1], None)
            elif kind == _engine.LINK_LOST:
                _, link, number, reason = event
                if self.links.get(number) == link:
                    del self.links[number]
                    driven = self.driven.pop(number, None)
                    if driven is not None:
                        driven.close()
                _log.info("the data connection to node h%d ended: %s", number, reason)

    def _filled(self, cell: int) -> None:
        found = self.pulls.pop(cell, None)
        if found is None:
            return
        transfer, _ = found
        transfer.missing.discard(cell)
        if transfer.missing:
            return
        plan = transfer.plan
        oid = self.fetching.pop(plan.object, None)
        if not any(
            serve.cell.stripe in transfer.cells
            for serve in program_of(plan, self.node.number).serves
        ):
            self._end(plan.epoch)  # nobody reads from here
        if oid is not None and oid in self.node.places:
            self.node.places.arrived(oid)
            if plan.epoch in self.by_epoch:  # as long as others read from here it stays pinned
                transfer.keep = transfer.keep, self.node.client.view(oid)
            self.copies.add(plan.object)
            self.node.send_manager(FetchComplete(self.node.number, plan.object, plan.epoch))

    def _failed(self, cell: int, reason: str) -> None:
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
        for cell in transfer.cells.values():
            self.pulls.pop(cell, None)
            self.closing[cell] = transfer.keep
            self.engine.close(cell)
        transfer.cells = {}

    def stop(self) -> None:
        """The node ends."""
        self.engine.stop()
