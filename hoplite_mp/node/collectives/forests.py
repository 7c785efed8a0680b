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
from hoplite_mp.node.collectives.execute import PlanError, SourcesGone
from hoplite_mp.node.collectives.filling import fill_blocks
from hoplite_mp.node.collectives.folding import Folding
from hoplite_mp.node.collectives.leftovers import Leftovers
from hoplite_mp.node.collectives.parts import NotNow, Part
from hoplite_mp.node.collectives.plan_cells import NOBODY
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

__all__ = ["Forests"]


class Forests:
    """All parts of this node. Numbers of nodes are those of the plan."""

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
        self.parts: dict[int, Part] = {}  # by operation

    # -- the manager's word --------------------------------------------------------------------

    def execute(self, plan: ExecuteReduce) -> None:
        """Takes up this node's part; a later epoch takes the place of an earlier one."""
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
    ) -> Part:
        """In the place of the one before, of which it takes over what it can use."""
        loop = self.loop
        part = Part(
            plan,
            program,
            self,
            loop.now_ns(),
            loop.now() + self.config.put_wait_s,
            left=self._end(plan.operation),
            done=done,
        )
        self.parts[plan.operation] = part
        return part

    def makes(self, object_id: bytes) -> bool:
        """Is that the result of an operation which this node is about to hear of?"""
        return any(part.makes(object_id) for part in self.parts.values())

    def take(self, operation: int) -> dict[int, tuple[int, int]]:
        """The end of a private part: the blocks that it has filled, (payload, bytes)."""
        part = self.parts.get(operation)
        if part is None:
            return {}
        blocks, part.blocks = part.blocks, {}
        self.drop(operation)
        return blocks

    def commit(self, message: Commit) -> dict[int, tuple[int, int]]:
        """The results of this host's own operation: index -> (payload, bytes). Those of others
        become copies that this node keeps."""
        part = self.parts.get(message.operation)
        if part is None or part.plan.epoch != message.epoch:
            return {}
        assert not isinstance(part.plan, Distribute)
        blocks, part.blocks = part.blocks, {}
        self.drop(message.operation)
        if part.plan.requester == self.client.number:
            return blocks
        for index, (payload, nbytes) in blocks.items():
            self.replicas.seal(part.plan.results[index], payload, nbytes)
        return {}

    def report(self) -> Iterator[Report]:
        """What a manager must know that has not heard of any operation."""
        for part in self.parts.values():
            if part.done is None and isinstance(part.plan, ExecuteReduce):
                yield ReduceHeld(self.client.number, part.plan, part.reported)

    # -- the end -------------------------------------------------------------------------------

    def drop(self, operation: int) -> None:
        """Nobody needs that part any more."""
        self._end(operation).discard(self.links, self.client.give_back)

    def _end(self, operation: int) -> Leftovers:
        """That part is over; another one may go on with what it leaves."""
        part = self.parts.get(operation)
        if part is None:
            return Leftovers()
        for oid in list(part.copies.values()):  # others may wait for what does not come this way
            self.remote_objects.let_go(oid)
        del self.parts[operation]
        left = self.cells.end(part)
        self._note(part)
        for source in part.streaming.values():
            self._leave(part, source)
        for payload in (*part.scratch, *(payload for payload, _ in part.blocks.values())):
            part.engine_buffer.when_free(partial(self.client.give_back, payload))
        return left

    def _note(self, part: Part) -> None:
        """For a trace: this node's part of a plan."""
        if self.links.notes.on:
            plan = part.plan
            copy = isinstance(plan, Distribute)
            kind = "broadcast" if copy else plan.kind  # type: ignore[union-attr]
            self.links.notes.add(
                "collective",
                f"part of {kind}",
                part.begun_ns,
                operation=plan.operation,
                kind=kind,
                epoch=plan.epoch,
                outcome="reported" if part.reported else "over",
            )

    def _leave(self, part: Part, source: StreamingSource) -> None:
        """The cells of this part are closed; its memory is in use for a moment longer."""
        for cell in [cell for cell in source.cells if cell not in self.cells.by_cell]:
            del source.cells[cell]
        part.engine_buffer.when_free(lambda: self.streaming_sources.leave(source))

    # -- the filler of remote objects ----------------------------------------------------------

    def forget(self, oid: int, remote: RemoteObject) -> None:
        """That object is not wanted any more, or will be had in another way."""
        for part in list(self.parts.values()):
            for cell in [cell for cell, other in part.copies.items() if other == oid]:
                del part.copies[cell]
                self.cells.give_up(part, cell)
                self.loop.call_later(0.0, partial(self._go_on, part))

    # -- the beginning -------------------------------------------------------------------------

    def _begin(self, part: Part) -> None:
        plan = part.plan
        if self.parts.get(plan.operation) is not part:
            return
        try:
            self._pin(part)
            if isinstance(plan, Distribute) or (part.done and plan.kind not in FOLDING):
                fill_blocks(self.results, part, self.cells)
            elif plan.kind in FOLDING:
                Folding(self.results, part, plan, self.cells).begin()
            else:
                self._copy(part, plan)
        except NotNow as why:
            if self.loop.now() > part.until:
                self._fail(part, f"{why}; {self.store.full_message()}", (), "full")
            else:
                self.loop.call_later(ROOM_LOOK_S, lambda: self._begin(part))
            return
        except SourcesGone as gone:
            self._fail(part, str(gone), gone.indices)
            return
        except (PlanError, ValueError) as error:
            self._fail(part, str(error), ())
            return
        part.begun = True
        part.left.discard(self.links, self.client.give_back)
        self.cells.begin(part)
        self._look(part)

    def _pin(self, part: Part) -> None:
        """The members that are here."""
        plan = part.plan
        gone = []
        if isinstance(plan, Distribute):
            at = {0: plan.object}
            wanted = [0] if self.client.number in plan.sources else []
        else:
            at = dict(zip(plan.members, plan.objects, strict=True))
            wanted = list(dict.fromkeys(index for _, index in part.program.given))
        for index in wanted:
            if index in part.views:
                continue
            source = self.streaming_sources.get(at[index])
            if source is not None:
                part.views[index] = self.client.memory(source.payload, source.nbytes)
                part.streaming[index] = source
                source.users += 1
                continue
            oid = self.imports.local(at[index])
            got = self.results.pin(oid) if oid else STATE["FREE"]
            if got is None:
                if oid in self.remote_objects:  # on its way from another host: that has its own end
                    part.until = self.loop.now() + self.config.put_wait_s
                raise NotNow(f"source {index} does not fit into the store beside what is in use")
            if isinstance(got, int):
                gone.append(index)
            else:
                part.views[index] = got
        if gone:
            raise SourcesGone(tuple(sorted(gone)))

    # -- copies --------------------------------------------------------------------------------

    def _copy(self, part: Part, plan: ExecuteReduce) -> None:
        program = part.program
        for cell in program.result:
            if cell.node == self.client.number:  # what has been here before stays from now on
                self.replicas.keep(plan.objects[cell.stripe], plan.sizes[cell.stripe])
        for serve in program.serves:
            key = part.key(serve.cell)
            if key not in part.known:
                part.known.add(key)
                view = part.views[plan.members[serve.cell.stripe]]
                self.cells.make(part, key, view, 0, view.nbytes, True)
        for pull in program.pulls:
            cell = pull.cell
            key = part.key(cell)
            if key in part.known:
                continue
            object_id, nbytes = plan.objects[cell.stripe], plan.sizes[cell.stripe]
            oid = self.replicas.expect(object_id, nbytes, (cell.node,))
            remote = self.remote_objects.by_oid.get(oid)
            if remote is None:
                part.known.add(key)
                self.replicas.tell(object_id, nbytes)
                continue
            if remote.payload:  # it is being brought already
                part.known.add(key)
                part.waiting += 1
                remote.waiting.append(partial(self._brought, part, oid))
                continue
            payload = self.store.lease(nbytes, NODE_SLOT)
            if payload is None:
                raise NotNow("what is gathered does not fit into the store beside what is in use")
            part.known.add(key)
            remote.payload, remote.filler = payload, self
            memory = self.client.memory(payload, nbytes)
            made = self.cells.make(part, None, memory, 0, nbytes, False, remote.engine_buffer)
            part.copies[made] = oid
            part.pulls[made] = cell.node, key
            part.queue.append(made)
            part.missing.add(made)

    def _brought(self, part: Part, oid: int) -> None:
        """Who was bringing it has ended."""
        part.waiting -= 1
        if self.client.state(oid) != STATE["FAILED"]:
            self._look(part)
        elif self.parts.get(part.plan.operation) is part:
            self._fail(part, "a copy that was on its way is lost", (), "lost")

    # -- how cells fare ------------------------------------------------------------------------

    def filled(self, part: Part, cell: int) -> None:
        """All bytes of a cell are there."""
        oid = part.copies.pop(cell, None)
        if oid is not None and oid in self.remote_objects:
            remote = self.remote_objects.by_oid[oid]
            self.remote_objects.arrived(oid)
            self.replicas.tell(remote.object, remote.nbytes)
        self._go_on(part)

    def _go_on(self, part: Part) -> None:
        """One cell less is on its way."""
        self.cells.pull_more(part)
        self._look(part)

    def failed(self, part: Part, node: int, reason: str) -> None:
        """A cell will not be filled. If its node is gone, another plan is on its way."""
        if node == NOBODY:
            self._fail(part, f"a fold has ended: {reason}", (), "lost")
        elif node in self.links.peers.by_number:
            self._fail(part, f"nothing comes from node h{node}: {reason}", (), "lost")

    def arrived(self, part: Part) -> Ranges | None:
        """Which bytes of a Group's copy are here, while some are missing."""
        if not part.missing:
            return None
        return part.arrived(part.copied.object, self.cells.engine.watermark)

    def _look(self, part: Part) -> None:
        plan = part.plan
        if part.missing or part.waiting or not part.begun or not part.program.reports:
            return
        if (
            part.engine_buffer.closing
        ):  # what an earlier plan has begun to write is to be out of the way
            part.engine_buffer.when_free(lambda: self._look(part))
            return
        if part.done is not None:
            done, part.done = part.done, _heard
            part.reported = True
            done("", "")
        elif self.parts.get(plan.operation) is part:
            part.reported = True
            self.send_manager(StripesComplete(plan.operation, plan.epoch, self.client.number))

    def _fail(
        self, part: Part, reason: str, sources: tuple[int, ...], error: str = "value"
    ) -> None:
        plan = part.plan
        self.drop(plan.operation)
        if part.done is not None:
            part.done(reason or error, error)
            return
        self.send_manager(
            ExecutionFailed(
                plan.operation, plan.epoch, self.client.number, reason[:1000], sources, error
            )
        )


def _heard(_: str, __: str) -> None:
    """It has been said."""
