"""Makes, fills and closes the cells of all plans in which this node takes part.

A plan is executed as a set of cells (ranges of memory with a watermark). Some cells are pulled from
other nodes, and failed pulls are retried. Other cells are served to other nodes while their bytes
are still arriving. When a plan ends, the bytes that have arrived are kept for the next plan.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hoplite_mp._node.peers.link_estimator import LinkEstimator
from hoplite_mp._node.peers.links import UNREACHABLE
from hoplite_mp._node.peers.path_estimator import PathEstimator
from hoplite_mp._planner.program import filled_links
from hoplite_mp._protocol.messages import Distribute, HostMeasured, LinkMeasured
from hoplite_mp._protocol.peers import PathCongested

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.execution.plan_state import Carryover, PlanState
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.peers.links import Links
    from hoplite_mp._node.ports import Key
    from hoplite_mp._node.store.growing_block import EngineBuffer

__all__ = ["NOBODY", "PlanCells"]

# A failed pull from a living node is retried at most PULL_TRIES_MAX times, PULL_RETRY_S apart,
# because a connection may break while both nodes are alive. With higher values, pulls survive
# longer interruptions, but a parent that lacks the bytes delays a copy for longer before the
# manager names another parent.
PULL_RETRY_S = 0.1
PULL_TRIES_MAX = 20
# The interval at which a served cell is advanced while its bytes are still being received. Higher:
# fewer wake-ups. Lower: shorter delays for nodes that read the cell.
WINDOW_S = 0.004
# Used in place of a node's number if a fold on this host fills the cell.
NOBODY = -1
_log = logging.getLogger("hoplite_mp")


class PlanCells:
    """The cells of all executions. Nodes are identified by the numbers used in plans."""

    def __init__(self, host: HostContext, links: Links) -> None:
        self.client = host.client
        self.loop = host.loop
        self.remote_objects = host.remote_objects
        self.send_manager = host.send_manager
        self.roster = host.roster
        self.links = links
        self.engine = links.engine
        self.pairs = PathEstimator(
            links.flows, lambda: self.link_estimator.rates, host.loop, self._congested, self._narrow
        )
        self.link_estimator = LinkEstimator(
            lambda: links.moved(near=False), host.loop, self._measured, follower=self.pairs
        )
        self.by_cell: dict[int, PlanState] = {}
        self.when_filled: Callable[[PlanState, int], None]  # set by the runner

    def _measured(self, up: int, down: int) -> None:
        """Sends this host's measured link rates to the manager."""
        self.send_manager(HostMeasured(self.client.number, float(up) or None, float(down) or None))

    def congested(self, host_id: int) -> None:
        """Handles another node's report that its flow to this node is backlogged although the link
        of its host is not full."""
        number = self.roster.number_of(host_id)
        if number is not None:
            self.pairs.congested(number)

    def _congested(self, node: int) -> None:
        """Notifies a node that this node's flow to it is backlogged although this host's link is
        not full."""
        peer = self.links.peers.by_number.get(node)
        if peer is not None:
            self.links.peers.send(peer.member.host_id, PathCongested())

    def _narrow(self, node: int, rate: float) -> None:
        """Sends the measured rate from another node to this one to the manager."""
        _log.info("the path from node h%d to this host carries %.1f MB/s", node, rate / 1e6)
        self.send_manager(LinkMeasured(node, self.client.number, None, rate))

    # -- making and filling --------------------------------------------------------------------

    def make(
        self,
        execution: PlanState,
        key: Key | None,
        memory: Any,
        begin: int,
        nbytes: int,
        filled: bool | int,
        engine_buffer: EngineBuffer | None = None,
    ) -> int:
        """Makes a cell in the engine for the execution."""
        cell = self.engine.cell(key, memory, begin, nbytes, filled)
        execution.cells[cell] = engine_buffer or execution.engine_buffer
        execution.sizes[cell] = nbytes
        self.by_cell[cell] = execution
        return cell

    def own(
        self,
        execution: PlanState,
        key: Key | None,
        index: int,
        memory: Any,
        begin: int,
        nbytes: int,
        at: int = 0,
    ) -> int:
        """Makes a cell over the bytes of a member on this host. Bytes that have already been
        written count as filled. at: the offset of `memory` in the member."""
        written = execution.written(index, at + begin, nbytes)
        cell = self.make(execution, key, memory, begin, nbytes, written)
        execution.follow(index, cell, at + begin, nbytes)
        return cell

    def fold(
        self,
        execution: PlanState,
        cell: int,
        sources: list[int],
        op: str,
        dtype: str,
        divisor: int,
        partial: list[int],
        final: bool,
    ) -> None:
        """Fills a cell from other cells on this host. The arguments are those of `Engine.fold`."""
        self.links.wanting[cell] = self
        execution.missing.add(cell)
        self.engine.fold(cell, sources, op, dtype, divisor, partial, final)

    def begin(self, execution: PlanState) -> None:
        """Starts the pulls. Called after all cells have been made; `measure` must be called
        afterwards."""
        # `execution.cells` includes cells of an earlier execution that this one continues to fill.
        self.by_cell.update(dict.fromkeys(execution.cells, execution))
        self._pull_together(execution)
        if execution.followed:
            self.loop.call_later(0.0, lambda: self._advance(execution))

    def measure(self, execution: PlanState) -> None:
        """Lets the link estimator measure the execution, which has just begun."""
        if not execution.cells or execution.measured:
            return
        if execution.pulls or execution.program.serves:
            execution.measured = True
            if execution.moved is None and execution.may_be_relieved:
                execution.moved = self.link_estimator.moved()
            self.link_estimator.begin(filled_links(execution.plan, self.client.number))

    def _pull_together(self, execution: PlanState) -> None:
        pulls_max = execution.program.inbound_max
        at_once = not pulls_max or len(execution.queue) + len(execution.running) <= pulls_max
        if at_once and not execution.copies and not self.links.trace_events.on:
            # Ask the engine for a single report when all these cells are full.
            self.engine.together(execution.missing, execution.vote)
        self.pull_more(execution)

    def pull_more(self, execution: PlanState) -> None:
        """Starts queued pulls, as many at a time as the program allows."""
        pulls_max = execution.program.inbound_max or len(execution.queue)
        while execution.queue and len(execution.running) < max(1, pulls_max):
            cell = execution.queue.pop(0)
            execution.running.add(cell)
            self._pull(execution, cell)

    def _pull(self, execution: PlanState, cell: int) -> None:
        if self.by_cell.get(cell) is execution:  # otherwise the execution has ended
            self.links.pull(cell, *execution.pulls[cell], self)

    def _advance(self, execution: PlanState) -> None:
        """Advances the cells that are served while their bytes are still arriving. Repeats itself
        on a timer."""
        if not execution.cells:
            return  # the execution has ended
        arrived = execution.owner.arrived(execution)
        for cell, (begin, end) in execution.followed.items():
            available = end - begin if arrived is None else arrived.reach(begin, end)
            if available > self.engine.watermark(cell):
                self.engine.advance(cell, available)
        if arrived is not None:
            self.loop.call_later(WINDOW_S, lambda: self._advance(execution))

    # -- ending --------------------------------------------------------------------------------

    def end(self, execution: PlanState) -> Carryover:
        """Ends an execution. Returns the cells and blocks that the next execution can take over."""
        kept = {slot.cell for slot in execution.slots.values()}
        carryover = execution.leave(self.engine.watermark)
        self.engine.hold()
        try:
            if kept:
                self.engine.together(kept)  # excluding the cells that are closed below
            for cell, engine_buffer in execution.cells.items():
                if cell not in kept:
                    self.links.close(cell, engine_buffer)
                self.by_cell.pop(cell, None)
        finally:
            self.engine.release()
        execution.cells = {}
        if execution.measured:
            self.link_estimator.end()
        return carryover

    def give_up(self, execution: PlanState, cell: int) -> None:
        """Closes one cell that is no longer needed."""
        engine_buffer = execution.cells.pop(cell)
        execution.missing.discard(cell)
        execution.running.discard(cell)
        if cell in execution.queue:
            execution.queue.remove(cell)
        self.links.close(cell, engine_buffer)
        del self.by_cell[cell]

    # -- notifications from the links ----------------------------------------------------------

    def filled(self, cell: int) -> None:
        """Called by `Links` when all bytes of a cell have arrived."""
        execution = self.by_cell.get(cell)
        if execution is not None:
            execution.missing.discard(cell)
            execution.running.discard(cell)
            self.when_filled(execution, cell)

    def failed(self, cell: int, reason: str) -> None:
        """Called by `Links` when a pull or a fold has failed. Retries a pull, or reports the
        failure to the execution's owner."""
        execution = self.by_cell.get(cell)
        if execution is None:
            return
        node, _ = execution.pulls.get(cell, (NOBODY, None))
        tries = execution.tries[cell] = execution.tries.get(cell, 0) + 1
        retries = node in self.links.peers.by_number
        if execution.is_copy and reason == UNREACHABLE:
            retries = False  # the manager may name another parent, which this node can reach
        if retries and tries <= PULL_TRIES_MAX:
            self.loop.call_later(PULL_RETRY_S, lambda: self._pull(execution, cell))
        else:
            execution.owner.parent_failed(execution, node, reason)

    def describe(self, cell: int) -> dict[str, Any]:
        """Describes a cell for `dump`: its object or operation, and its number of bytes."""
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
