"""Executes this node's part of plans that involve several nodes, as cells of the engine.

A fold over many hosts consists of members pinned here, cells pulled from others, folded cells and
served cells. The engine works on all of them concurrently, each block as soon as its inputs are
there. Results stay invisible until the commit. Kinds that only copy need no commit, because each
copy is whole or absent.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from hoplite_mp._common.object_states import STATE
from hoplite_mp._node.execution.filling import Replicating, fill_blocks
from hoplite_mp._node.execution.folding import Folding, slots_of
from hoplite_mp._node.execution.local_reduce import PlanError, SourcesGone
from hoplite_mp._node.execution.plan_cells import NOBODY
from hoplite_mp._node.execution.plan_state import Carryover, NotNow, Pinning, PlanState
from hoplite_mp._node.objects.remote_objects import MEMORY_POLL_S
from hoplite_mp._planner.program import ProgramCache, program_of
from hoplite_mp._protocol.fields import FOLDING
from hoplite_mp._protocol.membership import ReduceHeld
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
    from hoplite_mp._node.execution.plan_state import SlotName
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
    """All executions of plans on this node. Node numbers are those that plans use."""

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
        self.pinning = Pinning(host, streaming_sources)
        self.replicating = Replicating(host, cells, replicas, self, self._brought)
        self.executions: dict[int, PlanState] = {}  # by operation
        self.programs = ProgramCache()

    # -- plans ---------------------------------------------------------------------------------

    def execute(self, plan: ExecuteReduce) -> None:
        """Begins this node's part of a plan, in place of an earlier epoch's."""
        program = program_of(plan, self.client.number)
        if program.is_empty:
            self.drop(plan.operation)
        else:
            self._begin(self._part(plan, program))

    def execute_privately(
        self,
        plan: Plan,
        done: Callable[[str, str], None],
        wait_s: float | None = None,
        *,
        always: bool = False,
        vote: tuple[int, int, int] | None = None,
    ) -> bool:
        """As `execute`, for a call of a Group: the manager and the owners of objects are not told.
        `done` is called with "" when this node has everything it should receive, or with a reason
        why it cannot; `drop` must follow, perhaps after `take`. `wait_s`: for how long to wait for
        memory; None: for `put_wait_s`. Returns whether `done` will be called: if this node receives
        anything or, with `always`, in any case. vote: see `Engine.together`."""
        program = self.programs.of(plan, self.client.number)
        if program.is_empty:
            self.drop(plan.operation)
            return False
        execution = self._part(plan, program, done, wait_s)
        execution.reports, execution.vote = program.reports or always, vote
        self._begin(execution)
        return execution.reports

    def _part(
        self,
        plan: Plan,
        program: Program,
        done: Callable[[str, str], None] | None = None,
        wait_s: float | None = None,
    ) -> PlanState:
        """A new execution that replaces an earlier one of the operation and takes over what it can
        use."""
        loop, before = self.loop, self.executions.get(plan.operation)
        execution = PlanState(
            plan,
            program,
            self,
            loop.now_ns(),
            loop.now() + (self.config.put_wait_s if wait_s is None else wait_s),
            carryover=self._end(plan.operation),
            reports=program.reports,
            done=done,
            moved=None if before is None else before.moved,
        )
        self.executions[plan.operation] = execution
        return execution

    def makes(self, object_id: bytes) -> bool:
        """Is this object the result of an operation whose commit this node is about to receive?"""
        return any(execution.makes(object_id) for execution in self.executions.values())

    def is_begun(self, operation: int) -> bool:
        """Has that execution all its cells and blocks, or no part in the plan?"""
        execution = self.executions.get(operation)
        return execution is None or execution.begun

    def made(self, operation: int) -> dict[int, tuple[int, int]]:
        """The blocks that a private execution has filled: index -> (payload, bytes)."""
        execution = self.executions.get(operation)
        return {} if execution is None else execution.blocks

    def take(
        self, operation: int, payloads: Container[int] | None = None
    ) -> dict[int, tuple[int, int]]:
        """Takes these blocks (None: all) from a private execution. `drop` must follow."""
        execution = self.executions.get(operation)
        if execution is None:
            return {}
        blocks, execution.blocks = execution.blocks, {}
        if payloads is not None:
            for index in [i for i, (payload, _) in blocks.items() if payload not in payloads]:
                execution.blocks[index] = blocks.pop(index)
        return blocks

    def commit(self, message: Commit) -> dict[int, tuple[int, int]]:
        """Ends a committed execution. Returns the results of an operation of this host: index ->
        (payload, bytes); results for other hosts become replicas on this node."""
        execution = self.executions.get(message.operation)
        if execution is None:
            return {}
        if execution.plan.epoch != message.epoch:
            # The others have gone on without this node, and a new manager has heard of both.
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
        """Yields what a manager that knows of no operation must be told. Rates of narrow paths are
        not yielded; each is reported again when it is measured next."""
        self.cells.pairs.tell_next_manager()
        for execution in self.executions.values():
            if execution.done is None and isinstance(execution.plan, ExecuteReduce):
                yield ReduceHeld(self.client.number, execution.plan, execution.reported)

    def slowed(self, up: int, down: int) -> None:
        """This host's link has become slow while bytes move: bytes per second that it carries. The
        manager may give its stripes of an allreduce to others."""
        for execution in self.executions.values():
            before, plan = execution.moved, execution.plan
            if before is not None and execution.may_be_relieved and not execution.reported:
                sent_before, received_before = before
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

    def drop(self, operation: int) -> None:
        """Ends an execution that nobody needs any more, and frees what it had."""
        self.cells.engine.hold()
        try:
            self._end(operation).discard(self.links, self.client.give_back)
        finally:
            self.cells.engine.release()

    def _end(self, operation: int) -> Carryover:
        """Ends an execution, and returns what the next one can take over."""
        execution = self.executions.get(operation)
        if execution is None:
            return Carryover()
        # This execution does not bring these objects any more; those that are awaited are fetched.
        for oid in list(execution.copies.values()):
            self.remote_objects.let_go(oid)
        del self.executions[operation]
        if execution.done is not None:  # nobody is told any more, and it may hold whole results
            execution.done = _heard
        carryover = self.cells.end(execution)
        self._note(execution)
        for source in execution.streaming.values():
            self._leave(execution, source)
        for payload in (*execution.scratch, *(payload for payload, _ in execution.blocks.values())):
            execution.engine_buffer.when_free(partial(self.client.give_back, payload))
        # A block that is on its way under TLS is still read from a closed cell.
        execution.engine_buffer.when_free(execution.views.clear)
        return carryover

    def _note(self, execution: PlanState) -> None:
        """Adds this node's part of the plan to the trace."""
        if self.links.trace_events.on:
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
        """Stops using a streaming source, once its closed cells can no longer be read."""
        for cell in [cell for cell in source.cells if cell not in self.cells.by_cell]:
            del source.cells[cell]
        execution.engine_buffer.when_free(lambda: self.streaming_sources.leave(source))

    # -- the interface Filler, for remote objects ----------------------------------------------

    def forget(self, oid: int, remote: RemoteObject) -> None:
        """Stops filling an object that is not wanted any more, or that arrives in another way."""
        for execution in list(self.executions.values()):
            for cell in [cell for cell, other in execution.copies.items() if other == oid]:
                del execution.copies[cell]
                self.cells.give_up(execution, cell)
                self.loop.call_later(0.0, partial(self._go_on, execution))

    # -- beginning -----------------------------------------------------------------------------

    def _begin(self, execution: PlanState) -> None:
        if self.executions.get(execution.plan.operation) is not execution:
            return
        self.cells.engine.hold()  # the engine's thread begins with all cells at once
        try:
            self._make_cells(execution)
        finally:
            self.cells.engine.release()
        if execution.begun:
            self.cells.measure(execution)  # only now, because the bytes move meanwhile
            self._maybe_finish(execution)

    def _make_cells(self, execution: PlanState) -> None:
        try:
            self.pinning.pin(execution)
            self._make_blocks(execution)
        except NotNow as why:
            if self.loop.now() > execution.until:
                self._fail(execution, f"{why}; {self.store.full_message()}", (), "full")
            else:
                self._release_unused(execution)
                self.loop.call_later(MEMORY_POLL_S, lambda: self._begin(execution))
            return
        except SourcesGone as gone:
            self._fail(execution, str(gone), gone.indices)
            return
        except (PlanError, ValueError) as error:
            self._fail(execution, str(error), ())
            return
        execution.begun = True
        execution.carryover.discard(self.links, self.client.give_back)
        self.cells.begin(execution)

    def _make_blocks(self, execution: PlanState) -> None:
        plan = execution.plan
        if isinstance(plan, Distribute) or (execution.done and plan.kind not in FOLDING):
            fill_blocks(self.results, execution, self.cells)
        elif plan.kind in FOLDING:
            Folding(self.results, execution, plan, self.cells).begin()
        else:
            self.replicating.make(execution, plan)

    def _release_unused(self, execution: PlanState) -> None:
        """Frees what earlier plans have received and this one cannot use, although its cells are
        not made yet, because they may need that memory."""
        plan = execution.plan
        slots: set[SlotName | None] = set()
        copies: set[bytes] = set()
        if isinstance(plan, Distribute):
            copies = {plan.object}
        elif plan.kind not in FOLDING:
            copies = set(plan.objects)
        else:
            with contextlib.suppress(PlanError):  # then the plan fails as soon as there is memory
                slots = slots_of(plan, execution.program)
        give_back = self.client.give_back
        execution.carryover.discard(self.links, give_back, slots=slots, copies=copies)

    # -- copies --------------------------------------------------------------------------------

    def _brought(self, execution: PlanState, oid: int) -> None:
        """Called when the other execution that was filling the object has ended."""
        execution.waiting -= 1
        if self.client.state(oid) != STATE["FAILED"]:
            self._maybe_finish(execution)
        elif self.executions.get(execution.plan.operation) is execution:
            self._fail(execution, "a copy that was on its way is lost", (), "lost")

    # -- notifications of the cells ------------------------------------------------------------

    def filled(self, execution: PlanState, cell: int) -> None:
        """Called when all bytes of a cell are there."""
        oid = execution.copies.pop(cell, None)
        if oid is not None and oid in self.remote_objects:
            remote = self.remote_objects.by_oid[oid]
            self.remote_objects.arrived(oid)
            self.replicas.tell(remote.object, remote.nbytes)
        self._go_on(execution)

    def _go_on(self, execution: PlanState) -> None:
        """Starts further pulls after one has ended, and reports if it was the last."""
        self.cells.pull_more(execution)
        self._maybe_finish(execution)

    def failed(self, execution: PlanState, node: int, reason: str) -> None:
        """Reports that a cell will not be filled, unless its node is gone, because then a new plan
        follows."""
        if node == NOBODY:
            self._fail(execution, f"a fold has ended: {reason}", (), "lost")
        elif node in self.links.peers.by_number:
            self._fail(execution, f"nothing comes from node h{node}: {reason}", (), "lost")

    def arrived(self, execution: PlanState) -> Ranges | None:
        """Which bytes of a Group's copy are here; None if nothing is missing."""
        if not execution.missing:
            return None
        return execution.arrived(execution.copied.object, self.cells.engine.watermark)

    def _maybe_finish(self, execution: PlanState) -> None:
        plan = execution.plan
        if execution.missing or execution.waiting or not execution.begun or not execution.reports:
            return
        # An earlier plan may still be writing into the buffer; wait until that has ended.
        if execution.engine_buffer.closing:
            execution.engine_buffer.when_free(lambda: self._maybe_finish(execution))
            return
        if execution.done is not None:
            done, execution.done = execution.done, _heard
            execution.reported = True
            done("", "")
        elif self.executions.get(plan.operation) is execution:
            execution.reported = True
            self.send_manager(StripesComplete(plan.operation, plan.epoch, self.client.number))

    def _fail(
        self, execution: PlanState, reason: str, sources: tuple[int, ...], error: str = "value"
    ) -> None:
        plan, done = execution.plan, execution.done
        self.drop(plan.operation)
        if done is not None:
            done(reason or error, error)
            return
        self.send_manager(
            ExecutionFailed(
                plan.operation, plan.epoch, self.client.number, reason[:1000], sources, error
            )
        )


def _heard(_: str, __: str) -> None:
    """Replaces `done` after it was called, so that a later failure is not reported a second
    time."""
