"""Requests copies of objects, and reports on the copies that this node receives or serves.

When a process on this host requests an object, or a broadcast sends one, the manager makes a plan,
which it may later replace. `PlanRunner` executes the plans. This file finds the block that a plan
fills, or the memory that other nodes read, and reports to the manager when a copy is complete or
has failed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import AWAY, STATE
from hoplite_mp._node.execution.local_reduce import SourcesGone
from hoplite_mp._node.execution.plan_state import CarriedCopy, Carryover, NotNow
from hoplite_mp._node.objects.remote_objects import MEMORY_POLL_S
from hoplite_mp._node.store.growing_block import Ranges
from hoplite_mp._protocol.membership import ReportedCopy, ReportedDistribute
from hoplite_mp._protocol.messages import (
    CopyDropped,
    FetchComplete,
    FetchFailed,
    FetchRequested,
)
from hoplite_mp._protocol.operations import COPY_OPERATION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._node.execution.plan_runner import PlanRunner
    from hoplite_mp._node.execution.plan_state import PlanState
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.objects.remote_objects import RemoteObject
    from hoplite_mp._node.objects.replicas import Replicas
    from hoplite_mp._node.store.growing_block import EngineBuffer
    from hoplite_mp._protocol.membership import Report
    from hoplite_mp._protocol.messages import Distribute, FetchRefused, NodeToManager, Withdraw

__all__ = ["Transfers"]


class Transfers:
    """All copies that this node receives or serves."""

    def __init__(self, host: HostContext, replicas: Replicas, plan_runner: PlanRunner) -> None:
        self.config = host.config
        self.loop = host.loop
        self.client = host.client
        self.store = host.store
        self.remote_objects = host.remote_objects
        self.imports = host.imports
        self.send_manager = host.send_manager
        self.results = host.results
        self.cells = plan_runner.cells
        self.links = plan_runner.links
        self.replicas = replicas
        self.plan_runner = plan_runner
        self.fetching: dict[bytes, int] = {}  # object -> id of its header on this host
        # The highest epoch of a plan, and one more than the highest number of a copy operation,
        # among the plans that this node has received. A new manager continues both counters.
        self.epochs = self.copied = 0
        # Other hosts' objects of which this node has reported a complete copy, in order of arrival.
        self.copies: dict[bytes, None] = {}

    # -- fetching remote objects ---------------------------------------------------------------

    def fetch(self, oid: int, remote: RemoteObject) -> None:
        """Requests a plan that fills the block at `remote.payload`."""
        if self.plan_runner.makes(remote.object):
            # The object is the result of a collective whose commit has reached the owner but not
            # yet this node. The same commit will make the object available here.
            return
        previous = self.fetching.get(remote.object, oid)
        if previous != oid and previous in self.remote_objects:  # a header without holders
            self.remote_objects.give_up(previous)
        elif previous != oid:
            self._cancel(remote.object)
        self.fetching[remote.object] = oid
        self.send_manager(self._request(remote))

    def _request(self, remote: RemoteObject) -> FetchRequested:
        holders = self._others(remote)
        return FetchRequested(self.client.number, remote.object, remote.nbytes, holders)

    def _cancel(self, object_id: bytes) -> None:
        """Cancels the request to the manager. A plan that the manager has already made may still
        arrive; the manager then withdraws it."""
        receiving = self._receiving(object_id)
        if receiving is not None:
            self._end_plans_using(receiving.engine_buffer)
        del self.fetching[object_id]
        self.send_manager(CopyDropped(self.client.number, object_id))

    def _end_plans_using(self, engine_buffer: EngineBuffer) -> None:
        """Ends all plans that fill the buffer's block or serve it while it is being filled."""
        for execution in self._executions:
            if execution.engine_buffer is engine_buffer:
                self.plan_runner.drop(execution.number)

    def forget(self, oid: int, remote: RemoteObject) -> None:
        """Stops fetching an object that is no longer needed."""
        if self.fetching.get(remote.object) == oid:
            self._end_plans_using(remote.engine_buffer)
            self._cancel(remote.object)

    def _has_copy(self, object_id: bytes) -> None:
        """Records that a complete copy is reported to the manager, so that its removal is reported,
        too. Objects that this host owns are not recorded."""
        if ids.unpack_id(object_id)[0] != self.client.host_id:
            self.copies[object_id] = None

    def dropped(self, object_id: bytes) -> None:
        """Reports to the manager that the copy of another host's object is gone."""
        if object_id in self.copies:
            del self.copies[object_id]
            self.send_manager(CopyDropped(self.client.number, object_id))

    # -- the manager's plans -------------------------------------------------------------------

    def distribute(self, plan: Distribute) -> None:
        """Begins this node's part of a plan."""
        self.epochs = max(self.epochs, plan.epoch)
        self.copied = max(self.copied, (plan.operation ^ COPY_OPERATION) + 1)
        self.plan_runner.submit(plan, self)

    @property
    def _executions(self) -> list[PlanState]:
        """All executions of the manager's plans to copy an object."""
        return [state for state in self.plan_runner.executions.values() if state.is_copy]

    def prepare(self, execution: PlanState) -> bool:
        """Prepares to receive the object if this node is a receiver and does not have the object
        yet. Otherwise prepares to serve the object."""
        requested = execution.copied.object in self.fetching
        if execution.reports and not requested and not self._expect(execution):
            return False
        if execution.reports:
            self._receive(execution, execution.copied)
        else:
            self._serve(execution, execution.copied)
        return True

    def _receive(self, execution: PlanState, plan: Distribute) -> None:
        """Prepares to continue where an earlier plan for the same block stopped."""
        remote = self._place(plan.object)
        if remote is None:  # the object is no longer needed
            raise SourcesGone((0,))
        older = self._receiving(plan.object)
        if older is not None:
            self.plan_runner.drop(older.number)
        begun = CarriedCopy(remote.payload, remote.nbytes, remote.arrived)
        execution.carryover = Carryover(remote.engine_buffer, copies={plan.object: begun})

    def _serve(self, execution: PlanState, plan: Distribute) -> None:
        """Serves the complete object, or the bytes that another plan is still receiving."""
        older = self._receiving(plan.object)
        if older is not None:
            execution.carryover = Carryover(older.engine_buffer)
            execution.views[0] = self.client.memory(*older.blocks[0])
            execution.growing = True
            return
        oid = self.imports.local(plan.object)
        got = self.results.pin(oid) if oid and oid not in self.remote_objects else STATE["FREE"]
        if got is None:
            raise NotNow("the object is on disk and does not fit in the store")
        if isinstance(got, int) or got.nbytes != plan.nbytes:
            raise SourcesGone((0,))  # the object is gone, or an error has replaced it
        execution.views[0] = got

    def _expect(self, execution: PlanState) -> bool:
        """Finds memory for a copy that no process here has requested. Returns False if another
        execution is receiving the copy or there is nothing to do."""
        plan = execution.copied
        oid, remote = self.plan_runner.filling.claim(
            execution, plan.object, plan.nbytes, plan.sources, self, self._other_ended
        )
        if remote is not None:
            self.fetching[plan.object] = oid
            return True
        if execution.waiting:
            return False
        # The object may be the result of an outbound task whose TaskEnded message has not arrived
        # yet.
        if self.client.state(oid) == STATE["CLAIMED"] and self.loop.now() < execution.until:
            raise NotNow("the object is not done yet")
        return self._report_present(execution)

    def _other_ended(self, execution: PlanState, _oid: int) -> None:
        """Called when the other execution that was receiving the copy has ended."""
        if self.plan_runner.has_ended(execution):
            return  # the plan was withdrawn
        execution.waiting = 0
        execution.until = self.loop.now() + self.config.put_wait_s
        if self._report_present(execution):
            self.plan_runner.begin(execution)

    def _report_present(self, execution: PlanState) -> bool:
        """Reports to the manager that the object is already here, because the manager made the plan
        before it received this node's last report. Fails the plan if the object is gone. Returns
        whether this node must serve the object to other nodes."""
        plan, number = execution.copied, self.client.number
        oid = self.imports.local(plan.object)
        state = self.client.state(oid) if oid else STATE["FREE"]
        on_disk = state in AWAY and oid not in self.remote_objects
        if not (on_disk or state in (STATE["SEALED"], STATE["FAILED"])):
            self.plan_runner.fail(execution, "the object is gone")
            return False
        execution.reports = False
        self._has_copy(plan.object)
        self.send_manager(FetchComplete(number, plan.object, plan.epoch))
        if not execution.program.serves:
            self.plan_runner.drop(execution.number)
        return bool(execution.program.serves)

    def _place(self, object_id: bytes) -> RemoteObject | None:
        """The remote object into whose block the object is received, or None."""
        return self.remote_objects.by_oid.get(self.fetching.get(object_id, 0))

    def _receiving(self, object_id: bytes) -> PlanState | None:
        """The execution by which this node is receiving the object, or None."""
        if object_id not in self.fetching:
            return None
        receiving = (state for state in self.plan_runner.executions.values() if state.receives)
        return next((state for state in receiving if state.copies_object(object_id)), None)

    def withdraw(self, message: Withdraw) -> None:
        """Ends a withdrawn plan. If no other plan for receiving the object replaces it, the request
        for the object ends or is repeated (see `_abandoned`)."""
        execution = self.plan_runner.executions.get(COPY_OPERATION | message.epoch)
        if execution is None:
            return
        received = execution.receives
        self._drop(execution)
        if received and message.object in self.fetching and not self._receiving(message.object):
            self._abandoned(message.object)

    def _drop(self, execution: PlanState) -> None:
        """Ends a plan that the manager has withdrawn or does not know."""
        if execution.reports and not execution.begun and not execution.waiting:
            self.replicas.let_go(execution.copied.object)  # the plan was waiting for memory
        self.plan_runner.drop(execution.number)

    def _abandoned(self, object_id: bytes) -> None:
        """Forgets a requested object for which no plan is left, or requests the object again if a
        process still needs it."""
        remote = self._place(object_id)
        if remote is None:
            del self.fetching[object_id]
        elif self.replicas.only_kept(object_id):
            self._end_plans_using(remote.engine_buffer)
            # Remove the entry before `give_up` calls `forget`, which would otherwise report the
            # withdrawal to the manager.
            oid = self.fetching.pop(object_id)
            self.replicas.let_go(object_id)
            self.remote_objects.give_up(oid)
        else:  # a process has requested the object again
            self.send_manager(self._request(remote))

    def refused(self, message: FetchRefused) -> None:
        """Fails an object that the manager cannot provide. If a holder merely lacks the memory to
        read the object from disk, the object is not lost. In that case it is requested again."""
        self.replicas.let_go(message.object)
        oid = self.fetching.get(message.object)
        if oid is not None and oid in self.remote_objects:
            if message.error == "full":
                self.remote_objects.refuse(oid, message.message)
                if not self._receiving(message.object):  # otherwise `withdraw` requests it again
                    again = partial(self._request_again, message.object, oid)
                    self.loop.call_later(MEMORY_POLL_S, again)
                return
            self.remote_objects.lost(oid, message.message)  # calls `forget`
        self.fetching.pop(message.object, None)

    def _request_again(self, object_id: bytes, oid: int) -> None:
        remote = self._place(object_id)
        wanted = self.fetching.get(object_id) == oid and not self._receiving(object_id)
        if remote is not None and wanted:
            self.send_manager(self._request(remote))

    def report(self) -> Iterator[NodeToManager | Report]:
        """Yields the reports on this node's copies and requests for a new manager. Drops plans that
        have not begun. The new manager does not withdraw them, but makes new plans as needed."""
        number = self.client.number
        for execution in self._executions:
            if execution.begun:
                yield ReportedDistribute(number, execution.copied, execution.receives)
            else:
                self._drop(execution)
        for object_id in self.copies:
            oid = self.imports.local(object_id) or None
            if oid is not None and oid not in self.remote_objects:
                yield ReportedCopy(number, object_id, self.client.inspect(oid)["size"])
        for remote in self._not_planned():
            yield self._request(remote)

    def _not_planned(self) -> Iterator[RemoteObject]:
        """Yields the requested objects for which there is no plan yet."""
        planned = {execution.copied.object for execution in self._executions if execution.receives}
        for object_id in list(self.fetching):
            remote = self._place(object_id)
            if object_id not in planned and remote is not None:
                yield remote

    def _others(self, remote: RemoteObject) -> tuple[int, ...]:
        """The other nodes that may have a copy of the object."""
        found = tuple(holder for holder in remote.holders if holder != self.client.number)
        if not found:  # no holder is known, so name the owner's node
            owner = self.links.peers.by_host_id.get(self.replicas.imports.owner_of(remote.object))
            found = () if owner is None else (owner.member.node,)
        return found

    # -- notifications from the runner ---------------------------------------------------------

    def arrived(self, execution: PlanState) -> Ranges | None:
        """The bytes of the served block that have arrived. None if the object is complete or is no
        longer being received."""
        object_id = execution.copied.object
        # The receiving plan may have changed since this node began to serve the object.
        source = self._receiving(object_id)
        if source is None:
            # The receiving plan was withdrawn. Another may follow if the object is still needed.
            return Ranges() if object_id in self.fetching else None
        if source.engine_buffer is not execution.engine_buffer:
            return Ranges()  # the receiving plan fills another block
        return source.arrived(object_id, self.cells.engine.watermark)

    def parent_failed(self, execution: PlanState, node: int, reason: str) -> None:
        """Reports to the manager that a stripe cannot be pulled as planned."""
        plan = execution.copied
        self.send_manager(
            FetchFailed(self.client.number, plan.object, plan.epoch, node, reason[:1000])
        )

    def completed(self, execution: PlanState) -> None:
        """Makes the object available, and notifies the manager."""
        plan = execution.copied
        execution.blocks.clear()
        oid = self.fetching.get(plan.object)
        if not execution.program.serves:
            self.plan_runner.drop(execution.number)  # no other node reads this copy
        if oid is not None and oid in self.remote_objects:
            self.remote_objects.arrived(oid)
            if plan.object not in self.fetching:
                return  # the object is no longer needed; `forget` has notified the manager
            # Keep the object pinned as long as another plan serves from this block.
            shared = execution.engine_buffer
            if any(other.engine_buffer is shared for other in self._executions):
                shared.keep.append(self.client.view(oid))
            self._has_copy(plan.object)
            self.replicas.tell(plan.object, plan.nbytes)
            self.send_manager(FetchComplete(self.client.number, plan.object, plan.epoch))
        self.fetching.pop(plan.object, None)

    def failed(
        self, execution: PlanState, reason: str, sources: tuple[int, ...], error: str
    ) -> None:
        """Reports to the manager that this node neither receives nor serves the object."""
        object_id, full = execution.copied.object, ""
        if error == "full":
            full = self.store.full_message()[:1000]
            if execution.reports:
                self.replicas.let_go(object_id)
        self.send_manager(CopyDropped(self.client.number, object_id, full))

    def ended(self, execution: PlanState, carryover: Carryover) -> None:
        """Keeps the received ranges with the remote object for the next plan that fills its
        block."""
        object_id = execution.copied.object
        copy, remote = carryover.copies.pop(object_id, None), self._place(object_id)
        if copy is not None and remote is not None and remote.payload == copy.payload:
            remote.arrived = copy.arrived

    # -- for dumps ------------------------------------------------------------------------------

    def waits(self) -> Iterator[dict[str, Any]]:
        """Yields the transfers for which this node is waiting: cells that other nodes fill, and
        objects for which there is no plan yet."""
        now_ns = self.loop.now_ns()
        for cell, pulling in list(self.links.pulling.items()):
            description = pulling.wanting.describe(cell)
            yield {
                "object": description.get("object", b"").hex(),
                "operation": description.get("operation"),
                "kind": description.get("kind", ""),
                "received": self.cells.engine.watermark(cell),
                "bytes": description.get("bytes", 0),
                "from": f"h{pulling.parent}",
                "seconds": round((now_ns - pulling.begin_ns) / 1e9, 3),
            }
        for remote in self._not_planned():
            yield {
                "object": remote.object.hex(),
                "operation": None,
                "kind": "not planned yet",
                "received": 0,
                "bytes": remote.nbytes,
                "from": ", ".join(f"h{holder}" for holder in remote.holders),
                "seconds": None,
            }
