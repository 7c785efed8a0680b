"""Copies of objects to this node or from it: the requests for them, and the plans that bring them.

When a process here asks for an object, or a broadcast sends one, the manager makes a plan, and
perhaps further plans that replace it. This file finds the block that a plan fills, or the memory
that other nodes read, and tells the manager when a copy is complete or cannot be made.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import AWAY, NODE_SLOT, STATE
from hoplite_mp._node.execution.filling import fill_blocks
from hoplite_mp._node.execution.plan_state import CarriedCopy, Carryover, PlanState
from hoplite_mp._node.objects.remote_objects import MEMORY_POLL_S
from hoplite_mp._node.store.growing_block import Ranges
from hoplite_mp._planner.program import program_of
from hoplite_mp._protocol.membership import CopyHeld, DistributeHeld
from hoplite_mp._protocol.messages import (
    CopyDropped,
    FetchComplete,
    FetchFailed,
    FetchRequested,
)
from hoplite_mp._protocol.operations import COPY_OPERATION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._node.execution.plan_cells import PlanCells
    from hoplite_mp._node.execution.plan_runner import PlanRunner
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.objects.remote_objects import RemoteObject
    from hoplite_mp._node.objects.replicas import Replicas
    from hoplite_mp._node.store.growing_block import EngineBuffer
    from hoplite_mp._protocol.membership import Report
    from hoplite_mp._protocol.messages import Distribute, FetchRefused, NodeToManager, Withdraw

__all__ = ["Transfers"]


class Transfers:
    """All copies that this node receives or serves."""

    def __init__(
        self, host: HostContext, cells: PlanCells, replicas: Replicas, plan_runner: PlanRunner
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
        self.plan_runner = plan_runner
        self.by_epoch: dict[int, PlanState] = {}
        self.fetching: dict[bytes, int] = {}  # object -> local id of its header here
        # The highest epoch of a plan that this node has received, and how many objects have had an
        # operation for their copies, as far as this node knows. A new manager continues both.
        self.epochs = self.copied = 0
        # Epochs of plans that would bring an object which a collective is already bringing.
        self.expected: set[int] = set()
        # Epoch of a plan -> until when it waits for memory, or for the end of this host's task.
        self.roomless: dict[int, float] = {}
        self.unserved: dict[int, float] = {}
        # Objects of other hosts that the manager knows to be here, in the order of their arrival.
        self.copies: dict[bytes, None] = {}

    # -- fetching remote objects ---------------------------------------------------------------

    def fetch(self, oid: int, remote: RemoteObject) -> None:
        """Requests that the block at `remote.payload` be filled."""
        if self.plan_runner.makes(remote.object):
            # It is the result of a collective whose commit its owner has received before this node.
            # The commit that is on its way makes it available here.
            return
        before = self.fetching.get(remote.object, oid)
        if before != oid and before in self.remote_objects:  # a header that nobody holds any more
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
        """Tells the manager not to bring the object. A plan that the manager made before it learns
        of this may still arrive, and will be withdrawn."""
        receiving = self._receiving(object_id)
        if receiving is not None:
            self._end_over(receiving.engine_buffer)
        del self.fetching[object_id]
        self.send_manager(CopyDropped(self.client.number, object_id))

    def _end_over(self, engine_buffer: EngineBuffer) -> None:
        """Ends all plans that fill that block, and those that serve it while it is being filled."""
        for epoch, execution in list(self.by_epoch.items()):
            if execution.engine_buffer is engine_buffer:
                self._end(epoch)

    def forget(self, oid: int, remote: RemoteObject) -> None:
        """Stops fetching an object that nobody wants any more."""
        if self.fetching.get(remote.object) == oid:
            self._end_over(remote.engine_buffer)
            self._take_back(remote.object)

    def _has_copy(self, object_id: bytes) -> None:
        """Notes that the manager is told of a whole copy here, and must be told when that is gone.
        An object of this host is not noted, because the manager need not be told of its end."""
        if ids.unpack_id(object_id)[0] != self.client.host_id:
            self.copies[object_id] = None

    def dropped(self, object_id: bytes) -> None:
        """Tells the manager that the copy of another host's object is gone."""
        if object_id in self.copies:
            del self.copies[object_id]
            self.send_manager(CopyDropped(self.client.number, object_id))

    # -- the manager's plans -------------------------------------------------------------------

    def distribute(self, plan: Distribute) -> None:
        """Begins this node's part of a plan."""
        self.epochs = max(self.epochs, plan.epoch)
        self.copied = max(self.copied, (plan.operation ^ COPY_OPERATION) + 1)
        number = self.client.number
        receiving = number in plan.receivers
        if receiving and plan.object not in self.fetching and not self._expect(plan):
            return
        self._take_up(plan, receiving)

    def _take_up(self, plan: Distribute, receiving: bool) -> None:
        number = self.client.number
        execution = PlanState(plan, program_of(plan, number), self, self.loop.now_ns())
        taken = self._receive(execution, plan) if receiving else self._serve(execution, plan)
        if taken is None:
            self._serve_later(plan)
            return
        if not taken:
            self.send_manager(CopyDropped(number, plan.object))
            return
        self.unserved.pop(plan.epoch, None)
        self.by_epoch[plan.epoch] = execution
        fill_blocks(self.results, execution, self.cells)
        self.cells.begin(execution)
        self.cells.measure(execution)
        if receiving and not execution.missing:
            self._whole(execution)

    def _receive(self, execution: PlanState, plan: Distribute) -> bool:
        """Continues where an earlier plan for the same block stopped; False if nobody wants it any
        more."""
        remote = self._place(plan.object)
        if remote is None:
            return False
        older = self._receiving(plan.object)
        if older is not None:
            self._end(older.copied.epoch)
        begun = CarriedCopy(remote.payload, remote.nbytes, remote.arrived)
        execution.carryover = Carryover(remote.engine_buffer, copies={plan.object: begun})
        return True

    def _serve(self, execution: PlanState, plan: Distribute) -> bool | None:
        """Serves the whole object, or what another plan is still receiving; False if it is not
        here, None if it is on disk and there is no memory for it now."""
        older = self._receiving(plan.object)
        if older is not None:
            execution.carryover = Carryover(older.engine_buffer)
            execution.views[0] = self.client.memory(*older.blocks[0])
            execution.growing = True
            return True
        oid = self.imports.local(plan.object)
        if not oid or oid in self.remote_objects:
            return False
        got = self.results.pin(oid)
        if got is None:
            return None
        if isinstance(got, int) or got.nbytes != plan.nbytes:
            return False  # the object is gone, or an error is in its place
        execution.views[0] = got
        return True

    def _serve_later(self, plan: Distribute) -> None:
        """Tries again later to serve the object; if there is no memory for put_wait_s, tells the
        manager why the object is not served."""
        until = self.unserved.setdefault(plan.epoch, self.loop.now() + self.config.put_wait_s)
        if self.loop.now() < until:
            self.loop.call_later(MEMORY_POLL_S, lambda: self._serve_again(plan))
            return
        del self.unserved[plan.epoch]
        self._tell_full(plan)

    def _serve_again(self, plan: Distribute) -> None:
        if plan.epoch in self.unserved:  # else the plan was withdrawn
            self._take_up(plan, False)

    def _tell_full(self, plan: Distribute) -> None:
        why = self.store.full_message()[:1000]
        self.send_manager(CopyDropped(self.client.number, plan.object, why))

    def _expect(self, plan: Distribute) -> bool:
        """Finds memory for a copy that no process here asked for. False: there is no memory yet, or
        the object is here or on its way already."""
        oid = self.replicas.expect(plan.object, plan.nbytes, plan.sources)
        remote = self.remote_objects.by_oid.get(oid)
        if remote is None and self._is_awaited(plan, oid):
            return False
        if remote is None:  # it has arrived in another way, or is deleted
            self.roomless.pop(plan.epoch, None)
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
        if not self._tries_later(plan):
            del self.roomless[plan.epoch]
            self.replicas.let_go(plan.object)
            self._tell_full(plan)
        return False

    def _is_awaited(self, plan: Distribute, oid: int) -> bool:
        """Whether the object is the result of a task of this host that has ended on another one,
        and the message that it has is still on its way here; then the plan is tried again."""
        claimed = bool(oid) and self.client.state(oid) == STATE["CLAIMED"]
        return claimed and self._tries_later(plan)

    def _tries_later(self, plan: Distribute) -> bool:
        """Tries a plan to receive again soon; False if it was tried for put_wait_s."""
        until = self.roomless.setdefault(plan.epoch, self.loop.now() + self.config.put_wait_s)
        if self.loop.now() >= until:
            return False
        self.loop.call_later(MEMORY_POLL_S, lambda: self._again(plan))
        return True

    def _again(self, plan: Distribute) -> None:
        if plan.epoch in self.roomless:  # else the plan was withdrawn
            self.distribute(plan)

    def _has_come(self, plan: Distribute) -> None:
        if plan.epoch in self.expected:  # else the plan was withdrawn
            self.expected.discard(plan.epoch)
            self._is_here(plan)

    def _is_here(self, plan: Distribute) -> None:
        """Answers a plan to receive an object that is already here, because this node's last report
        crossed it. The object is served nevertheless, since other nodes may have been told to get
        it from here."""
        number = self.client.number
        oid = self.imports.local(plan.object)
        state = self.client.state(oid) if oid else STATE["FREE"]
        on_disk = state in AWAY and oid not in self.remote_objects
        if not (on_disk or state in (STATE["SEALED"], STATE["FAILED"])):
            self.send_manager(CopyDropped(number, plan.object))
            return
        self._has_copy(plan.object)
        if program_of(plan, number).serves:
            self._take_up(plan, False)
        self.send_manager(FetchComplete(number, plan.object, plan.epoch))

    def _place(self, object_id: bytes) -> RemoteObject | None:
        """The remote object whose block is being filled with that object."""
        return self.remote_objects.by_oid.get(self.fetching.get(object_id, 0))

    def _receiving(self, object_id: bytes) -> PlanState | None:
        """The plan by which this node is receiving that object at present."""
        if object_id in self.fetching:
            for execution in self.by_epoch.values():
                if execution.receives and execution.copied.object == object_id:
                    return execution
        return None

    def withdraw(self, message: Withdraw) -> None:
        """Ends a withdrawn plan. If it was bringing the object and the manager sent no other plan
        first, it belonged to a request that this node has taken back."""
        if self.roomless.pop(message.epoch, None) is not None:
            self.replicas.let_go(message.object)
        self.unserved.pop(message.epoch, None)
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
            # Remove it before `give_up` calls `forget`, which would tell the manager of the
            # withdrawal that came from the manager.
            oid = self.fetching.pop(object_id)
            self.replicas.let_go(object_id)
            self.remote_objects.give_up(oid)
        else:  # a process has asked for it again
            self._request(remote)

    def refused(self, message: FetchRefused) -> None:
        """Fails an object that the manager cannot bring. If the reason is that its holder has no
        memory to read it from disk, it is requested again instead, because it is not lost."""
        self.replicas.let_go(message.object)
        oid = self.fetching.get(message.object)
        if oid is not None and oid in self.remote_objects:
            if message.error == "full":
                self.remote_objects.refuse(oid, message.message)
                if not self._receiving(message.object):  # else `withdraw` requests it again
                    again = partial(self._request_again, message.object, oid)
                    self.loop.call_later(MEMORY_POLL_S, again)
                return
            self.remote_objects.lost(oid, message.message)  # this calls `forget`
        self.fetching.pop(message.object, None)

    def _request_again(self, object_id: bytes, oid: int) -> None:
        remote = self._place(object_id)
        wanted = self.fetching.get(object_id) == oid and not self._receiving(object_id)
        if remote is not None and wanted:
            self._request(remote)

    def report(self) -> Iterator[NodeToManager | Report]:
        """Yields what a manager that knows of no copy must be told. Plans that wait for memory are
        dropped, because it would not withdraw them; it sends them again if it needs them."""
        number = self.client.number
        self.roomless.clear()
        self.unserved.clear()
        for execution in self.by_epoch.values():
            yield DistributeHeld(number, execution.copied, execution.receives)
        for object_id in self.copies:
            oid = self.imports.local(object_id) or None
            if oid is not None and oid not in self.remote_objects:
                yield CopyHeld(number, object_id, self.client.inspect(oid)["size"])
        for remote in self._not_planned():
            yield FetchRequested(number, remote.object, remote.nbytes, self._others(remote))

    def _not_planned(self) -> Iterator[RemoteObject]:
        """Requested objects that no plan brings yet."""
        moving = {
            execution.copied.object for execution in self.by_epoch.values() if execution.receives
        }
        for object_id in list(self.fetching):
            remote = self._place(object_id)
            if object_id not in moving and remote is not None:
                yield remote

    def _others(self, remote: RemoteObject) -> tuple[int, ...]:
        found = tuple(holder for holder in remote.holders if holder != self.client.number)
        if not found:  # no holder is known, so name the node of the object's owner
            owner = self.links.peers.by_host_id.get(self.replicas.imports.owner_of(remote.object))
            found = () if owner is None else (owner.member.node,)
        return found

    # -- notifications of the cells ------------------------------------------------------------

    def filled(self, execution: PlanState, cell: int) -> None:
        """Called when a stripe has arrived."""
        if not execution.missing:
            self._whole(execution)

    def failed(self, execution: PlanState, node: int, reason: str) -> None:
        """Tells the manager that a stripe cannot be pulled as planned."""
        plan = execution.copied
        self.send_manager(
            FetchFailed(self.client.number, plan.object, plan.epoch, node, reason[:1000])
        )

    def arrived(self, execution: PlanState) -> Ranges | None:
        """Which bytes of the served block are here; None if the object is whole, or the copy was
        given up."""
        object_id = execution.copied.object
        # This may be another plan than the one that was receiving it when serving began.
        source = self._receiving(object_id)
        # That plan was withdrawn; another may follow if the object is still being fetched.
        if source is None:
            return Ranges() if object_id in self.fetching else None
        if source.engine_buffer is not execution.engine_buffer:
            return Ranges()  # it fills another block
        return source.arrived(object_id, self.cells.engine.watermark)

    def _whole(self, execution: PlanState) -> None:
        """Finishes once no closed cell of an earlier plan can still be written."""
        execution.engine_buffer.when_free(lambda: self._finish(execution))

    def _finish(self, execution: PlanState) -> None:
        plan = execution.copied
        if self.by_epoch.get(plan.epoch) is not execution:
            return  # withdrawn in the meantime
        execution.blocks.clear()
        oid = self.fetching.get(plan.object)
        if not execution.program.serves:
            self._end(plan.epoch)  # no other node reads from here
        if oid is not None and oid in self.remote_objects:
            self.remote_objects.arrived(oid)
            if plan.object not in self.fetching:
                return  # nobody wanted it any more, and `forget` has told the manager
            # Keep the object pinned as long as another plan serves from this block.
            shared = execution.engine_buffer
            if any(other.engine_buffer is shared for other in self.by_epoch.values()):
                shared.keep.append(self.client.view(oid))
            self._has_copy(plan.object)
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

    # -- for dumps ------------------------------------------------------------------------------

    def waits(self) -> Iterator[dict[str, Any]]:
        """Yields what this node waits for: cells that other nodes fill, and objects that no plan
        brings yet."""
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
