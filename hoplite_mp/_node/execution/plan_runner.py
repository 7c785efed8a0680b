"""Executes this node's part of all plans that involve several nodes.

Collectives, Group calls and copies of objects are programs of pulls, serves and folds, which the
engine executes on cells (ranges of memory with a watermark). The runner begins plans, waits for
free memory, replaces a plan with a later one, and ends plans. The owner of a plan finds memory for
it and reports the outcome. The owner is `Transfers` for the manager's copies, and the runner itself
for collectives.

A fold over many hosts consists of pinned members on this host, cells pulled from other nodes,
folded cells and served cells. The engine works on all cells concurrently, and on each block as soon
as its inputs have arrived. Results are invisible until the commit. Copies need no commit, because
a partial copy is never visible.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from hoplite_mp._common.object_states import STATE
from hoplite_mp._node.execution.filling import Filling
from hoplite_mp._node.execution.folding import Folding, slots_of
from hoplite_mp._node.execution.local_reduce import PlanError, SourcesGone
from hoplite_mp._node.execution.plan_cells import NOBODY
from hoplite_mp._node.execution.plan_state import (
    Carryover,
    NotNow,
    PlanState,
    number_of,
)
from hoplite_mp._node.objects.remote_objects import MEMORY_POLL_S
from hoplite_mp._planner.program import ProgramCache, program_of
from hoplite_mp._protocol.fields import FOLDING
from hoplite_mp._protocol.membership import ReportedReduce
from hoplite_mp._protocol.messages import (
    Distribute,
    ExecuteReduce,
    ExecutionFailed,
    OperationSlow,
    StripesComplete,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from hoplite_mp._node.execution.plan_cells import PlanCells
    from hoplite_mp._node.execution.plan_state import PlanOwner, SlotName
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.objects.remote_objects import RemoteObject
    from hoplite_mp._node.objects.replicas import Replicas
    from hoplite_mp._node.store.growing_block import GrowingBlock, GrowingBlocks, Ranges
    from hoplite_mp._planner.program import Program
    from hoplite_mp._protocol.group_calls import Plan
    from hoplite_mp._protocol.membership import Report
    from hoplite_mp._protocol.messages import Commit

__all__ = ["PlanRunner"]


class PlanRunner:
    """All executions of plans on this node. Nodes are identified by the numbers used in plans."""

    def __init__(
        self,
        host: HostContext,
        cells: PlanCells,
        replicas: Replicas,
        streaming_sources: GrowingBlocks,
    ) -> None:
        self.config = host.config
        self.loop = host.loop
        self.store = host.store
        self.remote_objects = host.remote_objects
        self.imports = host.imports
        self.send_manager = host.send_manager
        self.client = host.client
        self.results = host.results
        self.cells = cells
        self.links = cells.links
        self.replicas = replicas
        self.streaming_sources = streaming_sources
        self.link_estimator = cells.link_estimator
        self.filling = Filling(host, cells, replicas, self, self._brought)
        self.executions: dict[int, PlanState] = {}  # by number (see `number_of`)
        cells.when_filled = self._filled
        self.programs = ProgramCache()

    # -- plans ---------------------------------------------------------------------------------

    def submit(self, plan: Distribute, owner: PlanOwner) -> None:
        """Begins this node's part of a plan to copy one object."""
        self.begin(self._part(plan, program_of(plan, self.client.number), owner))

    def execute(self, plan: ExecuteReduce) -> None:
        """Begins this node's part of a collective's plan, which replaces any earlier plan."""
        program = program_of(plan, self.client.number)
        if program.is_empty:
            self.drop(plan.operation)
        else:
            self.begin(self._part(plan, program, self))

    def execute_privately(
        self,
        plan: Plan,
        done: Callable[[str, str], None],
        wait_s: float | None = None,
        *,
        always: bool = False,
        vote: tuple[int, int, int] | None = None,
    ) -> bool:
        """Like `execute`, but for a Group call, without reports to the manager or to the owners of
        objects. Calls `done("", "")` when this node has received all its bytes, or
        `done(reason, kind of error)` if the execution fails. The caller then calls `take` if it
        needs the blocks, and must call `drop`. wait_s: how long to wait for memory; None means
        `put_wait_s`. vote: see `PlanState`. Returns whether `done` will be called: if this node
        receives any bytes, or if `always` is set."""
        program = self.programs.of(plan, self.client.number)
        if program.is_empty:
            self.drop(plan.operation)
            return False
        execution = self._part(plan, program, self, done, wait_s)
        execution.reports, execution.vote = program.reports or always, vote
        self.begin(execution)
        return execution.reports

    def _part(
        self,
        plan: Plan,
        program: Program,
        owner: PlanOwner,
        done: Callable[[str, str], None] | None = None,
        wait_s: float | None = None,
    ) -> PlanState:
        """Returns a new execution. If the operation already has an execution, the new one replaces
        it and takes over its usable cells and blocks."""
        loop, number = self.loop, number_of(plan)
        previous = self.executions.get(number)
        execution = PlanState(
            plan,
            program,
            owner,
            loop.now_ns(),
            loop.now() + (self.config.put_wait_s if wait_s is None else wait_s),
            carryover=self._end(number),
            reports=program.reports,
            done=done,
            moved=None if previous is None else previous.moved,
        )
        self.executions[number] = execution
        return execution

    def makes(self, object_id: bytes) -> bool:
        """Whether the object is the result of an operation whose commit this node will receive."""
        return any(execution.makes(object_id) for execution in self.executions.values())

    def collectives(self) -> list[PlanState]:
        """The executions of collectives and Group calls."""
        return [execution for execution in self.executions.values() if not execution.is_copy]

    def is_begun(self, operation: int) -> bool:
        """Whether the operation's execution, if there is one, has all its cells and blocks."""
        execution = self.executions.get(operation)
        return execution is None or execution.begun

    def made(self, operation: int) -> dict[int, tuple[int, int]]:
        """The blocks that the execution of a Group call fills: index -> (payload, bytes)."""
        execution = self.executions.get(operation)
        return {} if execution is None else execution.blocks

    def take(
        self, operation: int, payloads: Container[int] | None = None
    ) -> dict[int, tuple[int, int]]:
        """Removes and returns the blocks with these payloads (None: all blocks) of a Group call's
        execution. `drop` must be called afterwards."""
        execution = self.executions.get(operation)
        if execution is None:
            return {}
        blocks, execution.blocks = execution.blocks, {}
        if payloads is not None:
            for index in [i for i, (payload, _) in blocks.items() if payload not in payloads]:
                execution.blocks[index] = blocks.pop(index)
        return blocks

    def commit(self, message: Commit) -> dict[int, tuple[int, int]]:
        """Ends a committed execution. Returns the results of an operation that this host requested:
        index -> (payload, bytes). Results for other hosts become replicas on this node."""
        execution = self.executions.get(message.operation)
        if execution is None:
            return {}
        if execution.plan.epoch != message.epoch:
            # A later plan was completed without this node. This node still receives the commit if
            # it requested the operation, or if the manager died before it sent Forget.
            self.drop(message.operation)
            return {}
        assert not isinstance(execution.plan, Distribute)
        blocks, execution.blocks = execution.blocks, {}
        self.drop(message.operation)
        if execution.plan.requester == self.client.number:
            return blocks
        for index, (payload, nbytes) in blocks.items():
            self.replicas.seal(execution.plan.results[index], payload, nbytes)
        return {}

    def report(self) -> Iterator[Report]:
        """Yields the reports about running collectives for a new manager. The rates of narrow paths
        are reported to the new manager at their next measurement."""
        self.cells.pairs.tell_next_manager()
        for execution in self.executions.values():
            if execution.done is None and isinstance(execution.plan, ExecuteReduce):
                yield ReportedReduce(self.client.number, execution.plan, execution.reported)

    def slowed(self, up: int, down: int) -> None:
        """Reports to the manager that this host's link has become slow while bytes are moving. The
        manager may then reassign this node's stripes of an allreduce to other nodes. up, down: the
        rates of the link in bytes per second."""
        for execution in self.executions.values():
            totals, plan = execution.moved, execution.plan
            if totals is not None and execution.may_be_relieved and not execution.reported:
                sent_before, received_before = totals
                sent, received = self.link_estimator.moved()
                slow = OperationSlow(
                    operation=plan.operation,
                    epoch=plan.epoch,
                    node=self.client.number,
                    up=up,
                    down=down,
                    sent=max(0, sent - sent_before),
                    received=max(0, received - received_before),
                )
                self.send_manager(slow)

    # -- ending --------------------------------------------------------------------------------

    def drop(self, number: int) -> None:
        """Ends an execution that is no longer needed, and frees its blocks."""
        self.cells.engine.hold()
        try:
            self._end(number).discard(self.links, self.client.give_back)
        finally:
            self.cells.engine.release()

    def _end(self, number: int) -> Carryover:
        """Ends an execution. Returns the cells and blocks that the next execution can take over."""
        execution = self.executions.get(number)
        if execution is None:
            return Carryover()
        # This execution no longer fills these objects. `let_go` fetches those with waiting readers.
        for oid in list(execution.copies.values()):
            self.remote_objects.let_go(oid)
        del self.executions[number]
        if execution.done is not None:
            # Prevent later calls to `done`, and release any results to which `done` refers.
            execution.done = _ignore_outcome
        carryover = self.cells.end(execution)
        execution.owner.ended(execution, carryover)
        self._trace(execution)
        for source in execution.streaming.values():
            self._leave(execution, source)
        for payload in (*execution.scratch, *(payload for payload, _ in execution.blocks.values())):
            execution.engine_buffer.when_free(partial(self.client.give_back, payload))
        # With TLS, bytes of a closed cell may still be read for sending.
        execution.engine_buffer.when_free(execution.views.clear)
        return carryover

    def _trace(self, execution: PlanState) -> None:
        """Adds this node's part of a collective or a Group call to the trace."""
        if self.links.trace_events.on and not execution.is_copy:
            plan = execution.plan
            copy = isinstance(plan, Distribute)
            kind = "broadcast" if copy else plan.kind  # type: ignore[union-attr]
            self.links.trace_events.add(
                "collective",
                f"part of {kind}",
                execution.begun_ns,
                operation=plan.operation,
                kind=kind,
                epoch=plan.epoch,
                outcome="reported" if execution.reported else "over",
            )

    def _leave(self, execution: PlanState, source: GrowingBlock) -> None:
        """Stops using a growing block as soon as the engine can no longer read its closed cells."""
        for cell in [cell for cell in source.cells if cell not in self.cells.by_cell]:
            del source.cells[cell]
        execution.engine_buffer.when_free(lambda: self.streaming_sources.leave(source))

    # -- the interface Filler, for remote objects ----------------------------------------------

    def forget(self, oid: int, remote: RemoteObject) -> None:
        """Stops filling an object that is no longer needed or arrives in another way."""
        for execution in list(self.executions.values()):
            for cell in [cell for cell, other in execution.copies.items() if other == oid]:
                del execution.copies[cell]
                self.cells.give_up(execution, cell)
                self.loop.call_later(0.0, partial(self._continue, execution))

    # -- beginning -----------------------------------------------------------------------------

    def begin(self, execution: PlanState) -> None:
        """Makes the cells and starts the pulls. Retries until the execution's deadline while memory
        is short. Does nothing if the execution has ended."""
        if self.has_ended(execution):
            return
        try:
            if not execution.owner.prepare(execution):
                return
            self._make_cells(execution)
        except NotNow as why:
            if self.loop.now() >= execution.until:
                self.fail(execution, f"{why}; {self.store.full_message()}", error="full")
            else:
                self._release_unused(execution)
                self.loop.call_later(MEMORY_POLL_S, lambda: self.begin(execution))
            return
        except SourcesGone as gone:
            self.fail(execution, str(gone), gone.indices)
            return
        except (PlanError, ValueError) as error:
            self.fail(execution, str(error))
            return
        self.cells.measure(execution)  # after the start, so as not to delay the first bytes
        self._maybe_finish(execution)

    def has_ended(self, execution: PlanState) -> bool:
        """Whether the execution was completed, replaced or dropped, or has failed."""
        return self.executions.get(execution.number) is not execution

    def _make_cells(self, execution: PlanState) -> None:
        self.cells.engine.hold()  # the engine's thread starts on all cells at once, at `release`
        try:
            self._make_blocks(execution)
            execution.begun = True
            execution.carryover.discard(self.links, self.client.give_back)
            self.cells.begin(execution)
        finally:
            self.cells.engine.release()

    def _make_blocks(self, execution: PlanState) -> None:
        plan = execution.plan
        if isinstance(plan, Distribute) or plan.kind not in FOLDING:
            self.filling.fill(execution)
        else:
            Folding(self.results, execution, plan, self.cells).begin()

    def _release_unused(self, execution: PlanState) -> None:
        """Frees blocks of earlier plans that this plan cannot use, because the cells of this plan
        may need the memory."""
        plan = execution.plan
        slots: set[SlotName | None] = set()
        copies: set[bytes] = set()
        if isinstance(plan, Distribute):
            copies = {plan.object}
        elif plan.kind not in FOLDING:
            copies = set(plan.objects)
        else:
            # A PlanError is raised again when the cells are made, and then fails the plan.
            with contextlib.suppress(PlanError):
                slots = slots_of(plan, execution.program)
        give_back = self.client.give_back
        execution.carryover.discard(self.links, give_back, slots=slots, copies=copies)

    # -- progress ------------------------------------------------------------------------------

    def _brought(self, execution: PlanState, oid: int) -> None:
        """Called when the other execution that was filling the object has ended."""
        execution.waiting -= 1
        if self.client.state(oid) != STATE["FAILED"]:
            self._maybe_finish(execution)
        elif not self.has_ended(execution):
            self.fail(execution, "a copy was lost while it was arriving", error="lost")

    def _filled(self, execution: PlanState, cell: int) -> None:
        """Called when all bytes of a cell have arrived."""
        oid = execution.copies.pop(cell, None)
        if oid is not None and oid in self.remote_objects:
            remote = self.remote_objects.by_oid[oid]
            self.remote_objects.arrived(oid)
            self.replicas.tell(remote.object, remote.nbytes)
        self._continue(execution)

    def _continue(self, execution: PlanState) -> None:
        """Starts further pulls after a pull has ended. After the last pull, reports that this
        node's part is complete."""
        self.cells.pull_more(execution)
        self._maybe_finish(execution)

    def _maybe_finish(self, execution: PlanState) -> None:
        if execution.missing or execution.waiting or not execution.begun or not execution.reports:
            return
        if execution.reported or self.has_ended(execution):
            return
        # The engine may still be writing to the buffer for an earlier plan.
        if execution.engine_buffer.closing:
            execution.engine_buffer.when_free(lambda: self._maybe_finish(execution))
            return
        execution.reported = True
        if execution.done is not None:
            done, execution.done = execution.done, _ignore_outcome
            done("", "")
        else:
            execution.owner.completed(execution)

    def fail(
        self,
        execution: PlanState,
        reason: str,
        sources: tuple[int, ...] = (),
        error: str = "value",
    ) -> None:
        """Ends an execution that cannot be completed, and notifies its owner."""
        done = execution.done
        self.drop(execution.number)
        if done is not None:
            done(reason or error, error)
        else:
            execution.owner.failed(execution, reason, sources, error)

    # -- the interface PlanOwner, for collectives ----------------------------------------------

    def prepare(self, execution: PlanState) -> bool:
        """Pins the plan's members on this host during the execution. A member is an object, which
        may have to be restored from disk, or a block to which a Group member is still writing."""
        plan = execution.plan
        gone = []
        # A source whose value is an error can be copied but not folded.
        folds = not isinstance(plan, Distribute) and plan.kind in FOLDING
        if isinstance(plan, Distribute):
            at = {0: plan.object}
            wanted = [0] if self.client.number in plan.sources else []
        else:
            at = dict(zip(plan.members, plan.objects, strict=True))
            wanted = list(dict.fromkeys(index for _, index in execution.program.given))
        for index in wanted:
            if index in execution.views:
                continue
            source = self.streaming_sources.get(at[index])
            if source is not None:
                execution.views[index] = self.client.memory(source.payload, source.nbytes)
                execution.streaming[index] = source
                source.users += 1
                continue
            oid = self.imports.local(at[index])
            got = self.results.pin(oid) if oid else STATE["FREE"]
            if got is None:
                # If the object is being fetched from another host, the fetch has its own deadline.
                if oid in self.remote_objects:
                    execution.until = self.loop.now() + self.config.put_wait_s
                raise NotNow(f"source {index} does not fit in the store beside the objects in use")
            if isinstance(got, int) or (folds and self.results.is_gone(got)):
                gone.append(index)
            else:
                execution.views[index] = got
        if gone:
            raise SourcesGone(tuple(sorted(gone)))
        return True

    def arrived(self, execution: PlanState) -> Ranges | None:
        """Implements `PlanOwner.arrived` for a copy that belongs to a Group call."""
        if not execution.missing:
            return None
        return execution.arrived(execution.copied.object, self.cells.engine.watermark)

    def parent_failed(self, execution: PlanState, node: int, reason: str) -> None:
        """Fails the execution, unless the node is gone. In that case a new plan will follow."""
        if node == NOBODY:
            self.fail(execution, f"a fold failed: {reason}", error="lost")
        elif node in self.links.peers.by_number:
            self.fail(execution, f"no bytes arrive from node h{node}: {reason}", error="lost")

    def completed(self, execution: PlanState) -> None:
        plan = execution.plan
        self.send_manager(StripesComplete(plan.operation, plan.epoch, self.client.number))

    def failed(
        self, execution: PlanState, reason: str, sources: tuple[int, ...], error: str
    ) -> None:
        plan, number = execution.plan, self.client.number
        self.send_manager(
            ExecutionFailed(plan.operation, plan.epoch, number, reason[:1000], sources, error)
        )

    def ended(self, execution: PlanState, carryover: Carryover) -> None:
        """Does nothing, because the next plan takes over the whole carryover."""


def _ignore_outcome(_: str, __: str) -> None:
    """Replaces `done` after its call, so that no later failure is reported."""
