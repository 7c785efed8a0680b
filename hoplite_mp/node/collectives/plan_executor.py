"""This node's part in collectives of several nodes: the plan's programs as cells of the engine.

Why it exists: a fold over many hosts is members pinned here, cells pulled from others, cells folded
and cells served, all moving at once by the engine's one rule. What is made here stays invisible
until the commit. Kinds that copy need no commit: each copy is whole or not there.
It must never know: who decided the plan, which call asked for it, what user classes are.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hoplite_mp.headers import NODE_SLOT, STATE
from hoplite_mp.node.collectives.carryover import Carryover
from hoplite_mp.node.collectives.execute import PlanError, SourcesGone
from hoplite_mp.node.collectives.filling import fill_blocks
from hoplite_mp.node.collectives.folding import Folding
from hoplite_mp.node.collectives.plan_cells import NOBODY
from hoplite_mp.node.collectives.plan_execution import NotNow, PlanExecution
from hoplite_mp.node.objects.remote_objects import ROOM_LOOK_S
from hoplite_mp.planner.program import program_of
from hoplite_mp.protocol.fields import FOLDING
from hoplite_mp.protocol.messages import (
    Distribute,
    ExecuteReduce,
    ExecutionFailed,
    StripesComplete,
)
from hoplite_mp.protocol.reports import ReduceHeld

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp.node.collectives.plan_cells import PlanCells
    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.objects.remote_objects import RemoteObject
    from hoplite_mp.node.objects.replicas import Replicas
    from hoplite_mp.node.objects.streaming_source import StreamingSource, StreamingSources
    from hoplite_mp.node.ranges import Ranges
    from hoplite_mp.planner.program import Program
    from hoplite_mp.protocol.group_calls import Plan
    from hoplite_mp.protocol.messages import Commit
    from hoplite_mp.protocol.reports import Report

__all__ = ["PlanExecutor"]


class PlanExecutor:
    """All executions of plans on this node. Numbers of nodes are those of the plan."""

    def __init__(
        self,
        host: HostContext,
        cells: PlanCells,
        replicas: Replicas,
        streaming_sources: StreamingSources,
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
        self.meter = cells.meter
        self.executions: dict[int, PlanExecution] = {}  # by operation

    # -- the manager's word --------------------------------------------------------------------

    def execute(self, plan: ExecuteReduce) -> None:
        """Begins this node's part of a plan; a later epoch takes the place of an earlier one."""
        program = program_of(plan, self.client.number)
        if program.is_empty:
            self.drop(plan.operation)
        else:
            self._begin(self._part(plan, program))

    def execute_privately(self, plan: Plan, done: Callable[[str, str], None]) -> bool:
        """The same for a call of a Group: nobody else learns of what comes here. `done` hears ""
        when this node has what it is to have, or why it cannot; then `take` or `drop`. Returns
        whether it is to have anything."""
        program = program_of(plan, self.client.number)
        if program.is_empty:
            self.drop(plan.operation)
            return False
        self._begin(self._part(plan, program, done))
        return program.reports

    def _part(
        self, plan: Plan, program: Program, done: Callable[[str, str], None] | None = None
    ) -> PlanExecution:
        """In the place of the one before, of which it takes over what it can use."""
        loop = self.loop
        execution = PlanExecution(
            plan,
            program,
            self,
            loop.now_ns(),
            loop.now() + self.config.put_wait_s,
            carryover=self._end(plan.operation),
            done=done,
        )
        self.executions[plan.operation] = execution
        return execution

    def makes(self, object_id: bytes) -> bool:
        """Is that the result of an operation which this node is about to hear of?"""
        return any(execution.makes(object_id) for execution in self.executions.values())

    def take(self, operation: int) -> dict[int, tuple[int, int]]:
        """The end of a private execution: the blocks that it has filled, (payload, bytes)."""
        execution = self.executions.get(operation)
        if execution is None:
            return {}
        blocks, execution.blocks = execution.blocks, {}
        self.drop(operation)
        return blocks

    def commit(self, message: Commit) -> dict[int, tuple[int, int]]:
        """The results of this host's own operation: index -> (payload, bytes). Those of others
        become copies that this node keeps."""
        execution = self.executions.get(message.operation)
        if execution is None or execution.plan.epoch != message.epoch:
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
        """What a manager must know that has not heard of any operation."""
        for execution in self.executions.values():
            if execution.done is None and isinstance(execution.plan, ExecuteReduce):
                yield ReduceHeld(self.client.number, execution.plan, execution.reported)

    # -- the end -------------------------------------------------------------------------------

    def drop(self, operation: int) -> None:
        """Nobody needs that execution any more."""
        self._end(operation).discard(self.links, self.client.give_back)

    def _end(self, operation: int) -> Carryover:
        """That execution is over; the next one may go on with its carryover."""
        execution = self.executions.get(operation)
        if execution is None:
            return Carryover()
        for oid in list(execution.copies.values()):  # others may wait for what does not come so
            self.remote_objects.let_go(oid)
        del self.executions[operation]
        carryover = self.cells.end(execution)
        self._note(execution)
        for source in execution.streaming.values():
            self._leave(execution, source)
        for payload in (*execution.scratch, *(payload for payload, _ in execution.blocks.values())):
            execution.engine_buffer.when_free(partial(self.client.give_back, payload))
        return carryover

    def _note(self, execution: PlanExecution) -> None:
        """For a trace: this node's part of a plan."""
        if self.links.notes.on:
            plan = execution.plan
            copy = isinstance(plan, Distribute)
            kind = "broadcast" if copy else plan.kind  # type: ignore[union-attr]
            self.links.notes.add(
                "collective",
                f"part of {kind}",
                execution.begun_ns,
                operation=plan.operation,
                kind=kind,
                epoch=plan.epoch,
                outcome="reported" if execution.reported else "over",
            )

    def _leave(self, execution: PlanExecution, source: StreamingSource) -> None:
        """The cells of this execution are closed; its memory is in use for a moment longer."""
        for cell in [cell for cell in source.cells if cell not in self.cells.by_cell]:
            del source.cells[cell]
        execution.engine_buffer.when_free(lambda: self.streaming_sources.leave(source))

    # -- the filler of remote objects ----------------------------------------------------------

    def forget(self, oid: int, remote: RemoteObject) -> None:
        """That object is not wanted any more, or will be had in another way."""
        for execution in list(self.executions.values()):
            for cell in [cell for cell, other in execution.copies.items() if other == oid]:
                del execution.copies[cell]
                self.cells.give_up(execution, cell)
                self.loop.call_later(0.0, partial(self._go_on, execution))

    # -- the beginning -------------------------------------------------------------------------

    def _begin(self, execution: PlanExecution) -> None:
        plan = execution.plan
        if self.executions.get(plan.operation) is not execution:
            return
        try:
            self._pin(execution)
            if isinstance(plan, Distribute) or (execution.done and plan.kind not in FOLDING):
                fill_blocks(self.results, execution, self.cells)
            elif plan.kind in FOLDING:
                Folding(self.results, execution, plan, self.cells).begin()
            else:
                self._copy(execution, plan)
        except NotNow as why:
            if self.loop.now() > execution.until:
                self._fail(execution, f"{why}; {self.store.full_message()}", (), "full")
            else:
                self.loop.call_later(ROOM_LOOK_S, lambda: self._begin(execution))
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
        self._look(execution)

    def _pin(self, execution: PlanExecution) -> None:
        """The members that are here."""
        plan = execution.plan
        gone = []
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
                if oid in self.remote_objects:  # on its way from another host: that has its own end
                    execution.until = self.loop.now() + self.config.put_wait_s
                raise NotNow(f"source {index} does not fit into the store beside what is in use")
            if isinstance(got, int):
                gone.append(index)
            else:
                execution.views[index] = got
        if gone:
            raise SourcesGone(tuple(sorted(gone)))

    # -- copies --------------------------------------------------------------------------------

    def _copy(self, execution: PlanExecution, plan: ExecuteReduce) -> None:
        program = execution.program
        for cell in program.result:
            if cell.node == self.client.number:  # what has been here before stays from now on
                self.replicas.keep(plan.objects[cell.stripe], plan.sizes[cell.stripe])
        for serve in program.serves:
            key = execution.key(serve.cell)
            if key not in execution.known:
                execution.known.add(key)
                view = execution.views[plan.members[serve.cell.stripe]]
                self.cells.make(execution, key, view, 0, view.nbytes, True)
        for pull in program.pulls:
            cell = pull.cell
            key = execution.key(cell)
            if key in execution.known:
                continue
            object_id, nbytes = plan.objects[cell.stripe], plan.sizes[cell.stripe]
            oid = self.replicas.expect(object_id, nbytes, (cell.node,))
            remote = self.remote_objects.by_oid.get(oid)
            if remote is None:
                execution.known.add(key)
                self.replicas.tell(object_id, nbytes)
                continue
            if remote.payload:  # it is being brought already
                execution.known.add(key)
                execution.waiting += 1
                remote.waiting.append(partial(self._brought, execution, oid))
                continue
            payload = self.store.lease(nbytes, NODE_SLOT)
            if payload is None:
                raise NotNow("what is gathered does not fit into the store beside what is in use")
            execution.known.add(key)
            remote.payload, remote.filler = payload, self
            memory = self.client.memory(payload, nbytes)
            made = self.cells.make(execution, None, memory, 0, nbytes, False, remote.engine_buffer)
            execution.copies[made] = oid
            execution.pulls[made] = cell.node, key
            execution.queue.append(made)
            execution.missing.add(made)

    def _brought(self, execution: PlanExecution, oid: int) -> None:
        """Who was bringing it has ended."""
        execution.waiting -= 1
        if self.client.state(oid) != STATE["FAILED"]:
            self._look(execution)
        elif self.executions.get(execution.plan.operation) is execution:
            self._fail(execution, "a copy that was on its way is lost", (), "lost")

    # -- how cells fare ------------------------------------------------------------------------

    def filled(self, execution: PlanExecution, cell: int) -> None:
        """All bytes of a cell are there."""
        oid = execution.copies.pop(cell, None)
        if oid is not None and oid in self.remote_objects:
            remote = self.remote_objects.by_oid[oid]
            self.remote_objects.arrived(oid)
            self.replicas.tell(remote.object, remote.nbytes)
        self._go_on(execution)

    def _go_on(self, execution: PlanExecution) -> None:
        """One cell less is on its way."""
        self.cells.pull_more(execution)
        self._look(execution)

    def failed(self, execution: PlanExecution, node: int, reason: str) -> None:
        """A cell will not be filled. If its node is gone, another plan is on its way."""
        if node == NOBODY:
            self._fail(execution, f"a fold has ended: {reason}", (), "lost")
        elif node in self.links.peers.by_number:
            self._fail(execution, f"nothing comes from node h{node}: {reason}", (), "lost")

    def arrived(self, execution: PlanExecution) -> Ranges | None:
        """Which bytes of a Group's copy are here, while some are missing."""
        if not execution.missing:
            return None
        return execution.arrived(execution.copied.object, self.cells.engine.watermark)

    def _look(self, execution: PlanExecution) -> None:
        plan = execution.plan
        if (
            execution.missing
            or execution.waiting
            or not execution.begun
            or not execution.program.reports
        ):
            return
        if (
            execution.engine_buffer.closing
        ):  # what an earlier plan has begun to write is to be out of the way
            execution.engine_buffer.when_free(lambda: self._look(execution))
            return
        if execution.done is not None:
            done, execution.done = execution.done, _heard
            execution.reported = True
            done("", "")
        elif self.executions.get(plan.operation) is execution:
            execution.reported = True
            self.send_manager(StripesComplete(plan.operation, plan.epoch, self.client.number))

    def _fail(
        self, execution: PlanExecution, reason: str, sources: tuple[int, ...], error: str = "value"
    ) -> None:
        plan = execution.plan
        self.drop(plan.operation)
        if execution.done is not None:
            execution.done(reason or error, error)
            return
        self.send_manager(
            ExecutionFailed(
                plan.operation, plan.epoch, self.client.number, reason[:1000], sources, error
            )
        )


def _heard(_: str, __: str) -> None:
    """It has been said."""
