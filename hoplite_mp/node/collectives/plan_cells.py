"""The cells of all plans that this node takes part in: made, filled from other nodes, closed.

Why it exists: copies of objects (transfers.py) and collectives (forests.py) are carried out alike.
A plan is cells; some of them are pulled from other nodes, and a pull that fails is tried again by
one policy; others grow with what arrives; and what has arrived when a plan ends is what the next
plan begins with.
It must never know: who has made a plan, what becomes of the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.node.membership.links import UNREACHABLE
from hoplite_mp.node.membership.meter import Meter
from hoplite_mp.planner.loads import filled_links
from hoplite_mp.protocol.messages import Distribute, HostMeasured

if TYPE_CHECKING:
    from hoplite_mp.node.collectives.leftovers import Leftovers
    from hoplite_mp.node.collectives.parts import Part
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
    """The cells of all parts of plans. Numbers of nodes are those of the plan."""

    def __init__(self, host: HostContext, links: Links) -> None:
        self.client = host.client
        self.loop = host.loop
        self.remote_objects = host.remote_objects
        self.send_manager = host.send_manager
        self.links = links
        self.engine = links.engine
        self.meter = Meter(lambda: links.moved(near=False), host.loop, tell=self._measured)
        self.by_cell: dict[int, Part] = {}

    def _measured(self, up: int, down: int) -> None:
        """What moves has shown how fast this host's links are."""
        self.send_manager(HostMeasured(self.client.number, float(up) or None, float(down) or None))

    # -- their beginning -----------------------------------------------------------------------

    def make(
        self,
        part: Part,
        key: Key | None,
        memory: Any,
        begin: int,
        nbytes: int,
        filled: bool | int,
        engine_buffer: EngineBuffer | None = None,
    ) -> int:
        """A cell of the engine for that part."""
        cell = self.engine.cell(key, memory, begin, nbytes, filled)
        part.cells[cell] = engine_buffer or part.engine_buffer
        part.sizes[cell] = nbytes
        self.by_cell[cell] = part
        return cell

    def own(
        self,
        part: Part,
        key: Key | None,
        index: int,
        memory: Any,
        begin: int,
        nbytes: int,
        at: int = 0,
    ) -> int:
        """A cell over bytes of a member that is here, as far as they are written; `at`: where in
        the member that memory begins."""
        there = part.written(index, at + begin, nbytes)
        cell = self.make(part, key, memory, begin, nbytes, there)
        part.follow(index, cell, at + begin, nbytes)
        return cell

    def fold(
        self,
        part: Part,
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
        part.missing.add(cell)
        self.engine.fold(cell, sources, op, dtype, divisor, partial, final)

    def begin(self, part: Part) -> None:
        """All cells are made: pulls begin."""
        self.by_cell.update(dict.fromkeys(part.cells, part))  # those too that the part before made
        if part.pulls or part.program.serves:
            part.measured = True
            self.meter.begin(filled_links(part.plan, self.client.number))
        self.pull_more(part)
        if part.followed:
            self.loop.call_later(0.0, lambda: self._advance(part))

    def pull_more(self, part: Part) -> None:
        """As many pulls at a time as the program allows."""
        most = part.program.inbound_max or len(part.queue)
        while part.queue and len(part.running) < max(1, most):
            cell = part.queue.pop(0)
            part.running.add(cell)
            self._pull(part, cell)

    def _pull(self, part: Part, cell: int) -> None:
        if self.by_cell.get(cell) is part:  # else it is over
            self.links.pull(cell, *part.pulls[cell], self)

    def _advance(self, part: Part) -> None:
        """What is served while it is still being received grows with it, in steps of a timer."""
        if not part.cells:
            return  # it is over
        arrived = part.above.arrived(part)
        for cell, (begin, end) in part.followed.items():
            come = end - begin if arrived is None else arrived.reach(begin, end)
            if come > self.engine.watermark(cell):
                self.engine.advance(cell, come)
        if arrived is not None:
            self.loop.call_later(WINDOW_S, lambda: self._advance(part))

    # -- their end -----------------------------------------------------------------------------

    def end(self, part: Part) -> Leftovers:
        """That part is over; another one may go on with what it leaves."""
        stay = {slot.cell for slot in part.slots.values()}
        left = part.leave(self.engine.watermark)
        for cell, engine_buffer in part.cells.items():
            if cell not in stay:
                self.links.close(cell, engine_buffer)
            self.by_cell.pop(cell, None)
        part.cells = {}
        if part.measured:
            self.meter.end()
        return left

    def give_up(self, part: Part, cell: int) -> None:
        """One cell is not wanted any more."""
        engine_buffer = part.cells.pop(cell)
        part.missing.discard(cell)
        part.running.discard(cell)
        if cell in part.queue:
            part.queue.remove(cell)
        self.links.close(cell, engine_buffer)
        del self.by_cell[cell]

    # -- what the links say --------------------------------------------------------------------

    def filled(self, cell: int) -> None:
        """All bytes of a cell are there."""
        part = self.by_cell.get(cell)
        if part is not None:
            part.missing.discard(cell)
            part.running.discard(cell)
            part.above.filled(part, cell)

    def failed(self, cell: int, reason: str) -> None:
        """A pull, or a fold, has ended early."""
        part = self.by_cell.get(cell)
        if part is None:
            return
        node, _ = part.pulls.get(cell, (NOBODY, None))
        tries = part.tries[cell] = part.tries.get(cell, 0) + 1
        lives = node in self.links.peers.by_number
        if part.is_copy and reason == UNREACHABLE:
            lives = False  # to us: there may be others that can be reached
        if lives and tries <= PULL_TRIES_MAX:
            self.loop.call_later(PULL_RETRY_S, lambda: self._pull(part, cell))
        else:
            part.above.failed(part, node, reason)

    def describe(self, cell: int) -> dict[str, Any]:
        """For people: a stripe of which object, or a part of which operation."""
        part = self.by_cell.get(cell)
        if part is None:
            return {}
        plan = part.plan
        found: dict[str, Any] = {"bytes": part.sizes.get(cell, 0)}
        if not part.is_copy:
            found |= {"operation": plan.operation, "epoch": plan.epoch}
        if isinstance(plan, Distribute):
            _, begin, first = part.fills.get(cell, (plan.object, 0, 0))
            found |= {"object": plan.object, "bytes": found["bytes"] - (first - begin)}
            return found | {"offset": first}
        found["kind"] = plan.kind
        remote = self.remote_objects.by_oid.get(part.copies.get(cell, 0))
        if remote is not None:
            found["object"] = remote.object
        return found
