"""The cells of all plans that this node takes part in: made, filled from other nodes, closed.

Why it exists: copies of objects (transfers.py) and collectives (plan_executor.py) are carried out
alike. A plan is cells; some of them are pulled from other nodes, and a pull that fails is tried
again by one policy; others grow with what arrives; and what has arrived when a plan ends is what
the next plan begins with.
It must never know: who has made a plan, what becomes of the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.node.membership.links import UNREACHABLE
from hoplite_mp.node.membership.meter import Meter
from hoplite_mp.planner.loads import filled_links
from hoplite_mp.protocol.messages import Distribute, HostMeasured

if TYPE_CHECKING:
    from hoplite_mp.node.collectives.carryover import Carryover
    from hoplite_mp.node.collectives.plan_execution import PlanExecution
    from hoplite_mp.node.membership.links import Links
    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.objects.engine_buffer import EngineBuffer
    from hoplite_mp.node.ports import Key

__all__ = ["NOBODY", "PlanCells"]

# A pull that failed although its node lives is tried again, so often and after so long, because a
# connection may break without an end of either side. Higher: longer breaks are ridden out, and a
# parent that has nothing to give holds a copy up for longer before the manager names another one.
PULL_RETRY_S = 0.1
PULL_TRIES_MAX = 20
# How often a cell that is served while it is still being received is advanced.
# Higher: fewer wake-ups; lower: who joins a running broadcast late is less far behind.
WINDOW_S = 0.004
NOBODY = -1  # instead of the number of a node: a fold fills the cell


class PlanCells:
    """The cells of all executions of plans. Numbers of nodes are those of the plan."""

    def __init__(self, host: HostContext, links: Links) -> None:
        self.client = host.client
        self.loop = host.loop
        self.remote_objects = host.remote_objects
        self.send_manager = host.send_manager
        self.links = links
        self.engine = links.engine
        self.meter = Meter(lambda: links.moved(near=False), host.loop, tell=self._measured)
        self.by_cell: dict[int, PlanExecution] = {}

    def _measured(self, up: int, down: int) -> None:
        """What moves has shown how fast this host's links are."""
        self.send_manager(HostMeasured(self.client.number, float(up) or None, float(down) or None))

    # -- their beginning -----------------------------------------------------------------------

    def make(
        self,
        execution: PlanExecution,
        key: Key | None,
        memory: Any,
        begin: int,
        nbytes: int,
        filled: bool | int,
        engine_buffer: EngineBuffer | None = None,
    ) -> int:
        """A cell of the engine for that execution."""
        cell = self.engine.cell(key, memory, begin, nbytes, filled)
        execution.cells[cell] = engine_buffer or execution.engine_buffer
        execution.sizes[cell] = nbytes
        self.by_cell[cell] = execution
        return cell

    def own(
        self,
        execution: PlanExecution,
        key: Key | None,
        index: int,
        memory: Any,
        begin: int,
        nbytes: int,
        at: int = 0,
    ) -> int:
        """A cell over bytes of a member that is here, as far as they are written; `at`: where in
        the member that memory begins."""
        there = execution.written(index, at + begin, nbytes)
        cell = self.make(execution, key, memory, begin, nbytes, there)
        execution.follow(index, cell, at + begin, nbytes)
        return cell

    def fold(
        self,
        execution: PlanExecution,
        cell: int,
        sources: list[int],
        op: str,
        dtype: str,
        divisor: int,
        partial: list[int],
        final: bool,
    ) -> None:
        """Fills a cell from others here; as `Engine.fold`."""
        self.links.wanting[cell] = self
        execution.missing.add(cell)
        self.engine.fold(cell, sources, op, dtype, divisor, partial, final)

    def begin(self, execution: PlanExecution) -> None:
        """All cells are made: pulls begin."""
        # Also cells that an earlier execution has made, and that this one goes on with.
        self.by_cell.update(dict.fromkeys(execution.cells, execution))
        if execution.pulls or execution.program.serves:
            execution.measured = True
            self.meter.begin(filled_links(execution.plan, self.client.number))
        self.pull_more(execution)
        if execution.followed:
            self.loop.call_later(0.0, lambda: self._advance(execution))

    def pull_more(self, execution: PlanExecution) -> None:
        """As many pulls at a time as the program allows."""
        most = execution.program.inbound_max or len(execution.queue)
        while execution.queue and len(execution.running) < max(1, most):
            cell = execution.queue.pop(0)
            execution.running.add(cell)
            self._pull(execution, cell)

    def _pull(self, execution: PlanExecution, cell: int) -> None:
        if self.by_cell.get(cell) is execution:  # else it is over
            self.links.pull(cell, *execution.pulls[cell], self)

    def _advance(self, execution: PlanExecution) -> None:
        """What is served while it is still being received grows with it, in steps of a timer."""
        if not execution.cells:
            return  # it is over
        arrived = execution.above.arrived(execution)
        for cell, (begin, end) in execution.followed.items():
            come = end - begin if arrived is None else arrived.reach(begin, end)
            if come > self.engine.watermark(cell):
                self.engine.advance(cell, come)
        if arrived is not None:
            self.loop.call_later(WINDOW_S, lambda: self._advance(execution))

    # -- their end -----------------------------------------------------------------------------

    def end(self, execution: PlanExecution) -> Carryover:
        """That execution is over; the next one may go on with its carryover."""
        stay = {slot.cell for slot in execution.slots.values()}
        carryover = execution.leave(self.engine.watermark)
        for cell, engine_buffer in execution.cells.items():
            if cell not in stay:
                self.links.close(cell, engine_buffer)
            self.by_cell.pop(cell, None)
        execution.cells = {}
        if execution.measured:
            self.meter.end()
        return carryover

    def give_up(self, execution: PlanExecution, cell: int) -> None:
        """One cell is not wanted any more."""
        engine_buffer = execution.cells.pop(cell)
        execution.missing.discard(cell)
        execution.running.discard(cell)
        if cell in execution.queue:
            execution.queue.remove(cell)
        self.links.close(cell, engine_buffer)
        del self.by_cell[cell]

    # -- what the links say --------------------------------------------------------------------

    def filled(self, cell: int) -> None:
        """All bytes of a cell are there."""
        execution = self.by_cell.get(cell)
        if execution is not None:
            execution.missing.discard(cell)
            execution.running.discard(cell)
            execution.above.filled(execution, cell)

    def failed(self, cell: int, reason: str) -> None:
        """A pull, or a fold, has ended early."""
        execution = self.by_cell.get(cell)
        if execution is None:
            return
        node, _ = execution.pulls.get(cell, (NOBODY, None))
        tries = execution.tries[cell] = execution.tries.get(cell, 0) + 1
        lives = node in self.links.peers.by_number
        if execution.is_copy and reason == UNREACHABLE:
            lives = False  # to us: there may be others that can be reached
        if lives and tries <= PULL_TRIES_MAX:
            self.loop.call_later(PULL_RETRY_S, lambda: self._pull(execution, cell))
        else:
            execution.above.failed(execution, node, reason)

    def describe(self, cell: int) -> dict[str, Any]:
        """For people: a stripe of which object, or a part of which operation."""
        execution = self.by_cell.get(cell)
        if execution is None:
            return {}
        plan = execution.plan
        found: dict[str, Any] = {"bytes": execution.sizes.get(cell, 0)}
        if not execution.is_copy:
            found |= {"operation": plan.operation, "epoch": plan.epoch}
        if isinstance(plan, Distribute):
            _, begin, first = execution.fills.get(cell, (plan.object, 0, 0))
            found |= {"object": plan.object, "bytes": found["bytes"] - (first - begin)}
            return found | {"offset": first}
        found["kind"] = plan.kind
        remote = self.remote_objects.by_oid.get(execution.copies.get(cell, 0))
        if remote is not None:
            found["object"] = remote.object
        return found
