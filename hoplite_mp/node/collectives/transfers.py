"""Copies of objects on their way to this node or from it: what is asked for, by which plans.

Why it exists: a process here asks for an object, or a broadcast sends it; the manager answers with
a plan, or with several one after another. This file finds the block that a plan fills, or the
memory that others read, and tells the manager when a copy is whole, or does not come.
It must never know: why a plan looks as it does, how its cells are filled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.headers import NODE_SLOT
from hoplite_mp.node.collectives.carryover import Carryover, Copy
from hoplite_mp.node.collectives.filling import fill_blocks
from hoplite_mp.node.collectives.plan_execution import PlanExecution
from hoplite_mp.node.objects.remote_objects import ROOM_LOOK_S
from hoplite_mp.node.ranges import Ranges
from hoplite_mp.planner.program import program_of
from hoplite_mp.protocol.messages import (
    CopyDropped,
    FetchComplete,
    FetchFailed,
    FetchRequested,
)
from hoplite_mp.protocol.operations import COPY_OPERATION
from hoplite_mp.protocol.reports import CopyHeld, DistributeHeld

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp.node.collectives.plan_cells import PlanCells
    from hoplite_mp.node.collectives.plan_executor import PlanExecutor
    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.objects.engine_buffer import EngineBuffer
    from hoplite_mp.node.objects.remote_objects import RemoteObject
    from hoplite_mp.node.objects.replicas import Replicas
    from hoplite_mp.protocol.messages import Distribute, FetchRefused, NodeToManager, Withdraw
    from hoplite_mp.protocol.reports import Report

__all__ = ["Transfers"]


class Transfers:
    """All copies that come to this node or go from it."""

    def __init__(
        self, host: HostContext, cells: PlanCells, replicas: Replicas, plan_executor: PlanExecutor
    ) -> None:
        self.config = host.config
        self.loop = host.loop
        self.client = host.client
        self.store = host.store
        self.remote_objects = host.remote_objects
        self.imports = host.imports
        self.send_manager = host.send_manager
        self.results = host.results
        self.cells = cells
        self.links = cells.links
        self.replicas = replicas
        self.plan_executor = plan_executor
        self.by_epoch: dict[int, PlanExecution] = {}
        self.fetching: dict[bytes, int] = {}  # object -> its header here
        self.epochs = self.copied = 0  # the highest that this node has heard of
        self.expected: set[int] = set()  # epochs of plans for what a collective is bringing
        self.roomless: dict[int, float] = {}  # epoch of a plan that finds no room -> until when
        self.copies: set[bytes] = set()  # objects of other hosts that the manager knows to be here

    # -- the fetcher of remote objects ---------------------------------------------------------

    def fetch(self, oid: int, remote: RemoteObject) -> None:
        """The block at `remote.payload` is to be filled."""
        if self.plan_executor.makes(remote.object):
            return  # its home has heard of the commit before this node: it is here in a moment
        before = self.fetching.get(remote.object, oid)
        if before != oid and before in self.remote_objects:  # a header that nobody holds by now
            self.remote_objects.give_up(before)
        elif before != oid:
            self._take_back(remote.object)
        self.fetching[remote.object] = oid
        self._request(remote)

    def _request(self, remote: RemoteObject) -> None:
        asked = FetchRequested(
            self.client.number, remote.object, remote.nbytes, self._others(remote)
        )
        self.send_manager(asked)

    def _take_back(self, object_id: bytes) -> None:
        """The manager shall not bring it. A plan of which it does not know yet may still come, and
        is withdrawn then."""
        receiving = self._receiving(object_id)
        if receiving is not None:
            self._end_over(receiving.engine_buffer)
        del self.fetching[object_id]
        self.send_manager(CopyDropped(self.client.number, object_id))

    def _end_over(self, engine_buffer: EngineBuffer) -> None:
        """All that is brought into that block, and what was served as far as it had come."""
        for epoch, execution in list(self.by_epoch.items()):
            if execution.engine_buffer is engine_buffer:
                self._end(epoch)

    def forget(self, oid: int, remote: RemoteObject) -> None:
        """Nobody wants it any more."""
        if self.fetching.get(remote.object) == oid:
            self._end_over(remote.engine_buffer)
            self._take_back(remote.object)

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
        execution = PlanExecution(plan, program_of(plan, number), self, self.loop.now_ns())
        if not (self._receive(execution, plan) if receiving else self._serve(execution, plan)):
            self.send_manager(CopyDropped(number, plan.object))
            return
        self.by_epoch[plan.epoch] = execution
        fill_blocks(self.results, execution, self.cells)
        self.cells.begin(execution)
        if receiving and not execution.missing:
            self._whole(execution)

    def _receive(self, execution: PlanExecution, plan: Distribute) -> bool:
        """Goes on where an earlier plan for the same block was; False: nobody wants it any more."""
        remote = self._place(plan.object)
        if remote is None:
            return False
        older = self._receiving(plan.object)
        if older is not None:
            self._end(older.copied.epoch)
        begun = Copy(remote.payload, remote.nbytes, remote.arrived)
        execution.carryover = Carryover(remote.engine_buffer, copies={plan.object: begun})
        return True

    def _serve(self, execution: PlanExecution, plan: Distribute) -> bool:
        """From the whole object, or from what another plan is still bringing; False: neither."""
        older = self._receiving(plan.object)
        if older is not None:
            execution.carryover = Carryover(older.engine_buffer)
            execution.views[0] = self.client.memory(*older.blocks[0])
            execution.growing = True
            return True
        oid = self.imports.local(plan.object)
        got = self.results.pin(oid) if oid else None
        if got is None or isinstance(got, int) or got.nbytes != plan.nbytes:
            return False  # it is not here any more, or an error is in its place
        execution.views[0] = got
        return True

    def _expect(self, plan: Distribute) -> bool:
        """A copy that nobody here has asked for; False: not now, or there is nothing to do."""
        oid = self.replicas.expect(plan.object, plan.nbytes, plan.sources)
        remote = self.remote_objects.by_oid.get(oid)
        if remote is None:  # it has come by another way, or is deleted
            self.replicas.tell(plan.object, plan.nbytes)
            self._is_here(plan)
            return False
        if remote.payload:  # a collective that copies is filling it
            self.expected.add(plan.epoch)
            remote.waiting.append(lambda: self._has_come(plan))
            return False
        payload = self.store.lease(remote.nbytes, NODE_SLOT)
        if payload is not None:
            self.roomless.pop(plan.epoch, None)
            remote.payload = payload
            remote.filler = self
            self.fetching[plan.object] = oid
            return True
        until = self.roomless.setdefault(plan.epoch, self.loop.now() + self.config.put_wait_s)
        if self.loop.now() < until:
            self.loop.call_later(ROOM_LOOK_S, lambda: self._again(plan))
        else:
            del self.roomless[plan.epoch]
            self.replicas.let_go(plan.object)
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

    def _place(self, object_id: bytes) -> RemoteObject | None:
        """The remote object whose block is being filled with that object."""
        return self.remote_objects.by_oid.get(self.fetching.get(object_id, 0))

    def _receiving(self, object_id: bytes) -> PlanExecution | None:
        """The plan by which this node is just receiving that object."""
        if object_id in self.fetching:
            for execution in self.by_epoch.values():
                if execution.receives and execution.copied.object == object_id:
                    return execution
        return None

    def withdraw(self, message: Withdraw) -> None:
        """That plan is over. If it was bringing the object, and the manager has not said another
        one before, it was for a request that this node has taken back meanwhile."""
        if self.roomless.pop(message.epoch, None) is not None:
            self.replicas.let_go(message.object)
        self.expected.discard(message.epoch)
        execution = self.by_epoch.get(message.epoch)
        received = execution is not None and execution.receives
        self._end(message.epoch)
        if received and message.object in self.fetching and not self._receiving(message.object):
            self._abandoned(message.object)

    def _abandoned(self, object_id: bytes) -> None:
        remote = self._place(object_id)
        if remote is None:
            del self.fetching[object_id]
        elif self.replicas.only_kept(object_id):
            self._end_over(remote.engine_buffer)
            # Before `forget`, which would tell the manager what it has just said.
            oid = self.fetching.pop(object_id)
            self.replicas.let_go(object_id)
            self.remote_objects.give_up(oid)
        else:  # it was asked for again
            self._request(remote)

    def refused(self, message: FetchRefused) -> None:
        """The copy cannot be had."""
        self.replicas.let_go(message.object)
        oid = self.fetching.get(message.object)
        if oid is not None and oid in self.remote_objects:
            self.remote_objects.lost(oid, message.message)  # by way of `forget`
        self.fetching.pop(message.object, None)

    def report(self) -> Iterator[NodeToManager | Report]:
        """What a manager must know that has not heard of any copy."""
        number = self.client.number
        for execution in self.by_epoch.values():
            yield DistributeHeld(number, execution.copied, execution.receives)
        for object_id in self.copies:
            oid = self.imports.local(object_id) or None
            if oid is not None and oid not in self.remote_objects:
                yield CopyHeld(number, object_id, self.client.inspect(oid)["size"])
        for remote in self._not_planned():
            yield FetchRequested(number, remote.object, remote.nbytes, self._others(remote))

    def _not_planned(self) -> Iterator[RemoteObject]:
        """What has been asked for, and no plan brings yet."""
        moving = {
            execution.copied.object for execution in self.by_epoch.values() if execution.receives
        }
        for object_id in list(self.fetching):
            remote = self._place(object_id)
            if object_id not in moving and remote is not None:
                yield remote

    def _others(self, remote: RemoteObject) -> tuple[int, ...]:
        found = tuple(holder for holder in remote.holders if holder != self.client.number)
        if not found:  # it was expected from somebody who was still receiving it
            home = self.links.peers.by_home.get(self.replicas.imports.home_of(remote.object))
            found = () if home is None else (home.member.node,)
        return found

    # -- how cells fare ------------------------------------------------------------------------

    def filled(self, execution: PlanExecution, cell: int) -> None:
        """One stripe is there."""
        if not execution.missing:
            self._whole(execution)

    def failed(self, execution: PlanExecution, node: int, reason: str) -> None:
        """One stripe will not come as planned."""
        plan = execution.copied
        self.send_manager(
            FetchFailed(self.client.number, plan.object, plan.epoch, node, reason[:1000])
        )

    def arrived(self, execution: PlanExecution) -> Ranges | None:
        """Which bytes of the block that is served are here; None: the object is whole."""
        object_id = execution.copied.object
        source = self._receiving(object_id)  # another one by now, perhaps
        if source is None:  # withdrawn, and the next is on its way? Else it is over
            return Ranges() if object_id in self.fetching else None
        if source.engine_buffer is not execution.engine_buffer:
            return Ranges()  # that one fills another block
        return source.arrived(object_id, self.cells.engine.watermark)

    def _whole(self, execution: PlanExecution) -> None:
        """All bytes are there. What an earlier plan has begun to write is out of the way first."""
        execution.engine_buffer.when_free(lambda: self._finish(execution))

    def _finish(self, execution: PlanExecution) -> None:
        plan = execution.copied
        if self.by_epoch.get(plan.epoch) is not execution:
            return  # withdrawn meanwhile
        execution.blocks.clear()
        oid = self.fetching.get(plan.object)
        if not execution.program.serves:
            self._end(plan.epoch)  # nobody reads from here
        if oid is not None and oid in self.remote_objects:
            self.remote_objects.arrived(oid)
            if plan.object not in self.fetching:
                return  # nobody wanted it any more: `forget` has said so
            # As long as others read from here, by whichever plan, it stays pinned.
            shared = execution.engine_buffer
            if any(other.engine_buffer is shared for other in self.by_epoch.values()):
                shared.keep.append(self.client.view(oid))
            self.copies.add(plan.object)
            self.replicas.tell(plan.object, plan.nbytes)
            self.send_manager(FetchComplete(self.client.number, plan.object, plan.epoch))
        self.fetching.pop(plan.object, None)

    def _end(self, epoch: int) -> None:
        execution = self.by_epoch.pop(epoch, None)
        if execution is None:
            return
        carryover = self.cells.end(execution).copies.get(execution.copied.object)
        remote = self._place(execution.copied.object)
        if carryover is not None and remote is not None and remote.payload == carryover.payload:
            remote.arrived = carryover.arrived

    # -- for people before whom something hangs ------------------------------------------------

    def waits(self) -> Iterator[dict[str, Any]]:
        """Cells that other nodes fill, and objects whose plan has not come yet."""
        now_ns = self.loop.now_ns()
        for cell, pulling in list(self.links.pulling.items()):
            about = pulling.wanting.describe(cell)
            yield {
                "object": about.get("object", b"").hex(),
                "operation": about.get("operation"),
                "kind": about.get("kind", ""),
                "come": self.cells.engine.watermark(cell),
                "bytes": about.get("bytes", 0),
                "from": f"h{pulling.parent}",
                "seconds": round((now_ns - pulling.begin_ns) / 1e9, 3),
            }
        for remote in self._not_planned():
            yield {
                "object": remote.object.hex(),
                "operation": None,
                "kind": "not planned yet",
                "come": 0,
                "bytes": remote.nbytes,
                "from": ", ".join(f"h{holder}" for holder in remote.holders),
                "seconds": None,
            }
