"""This node's parts in collectives of several nodes: the plans' programs as cells.

Why it exists: it says to the planner what node/collectives/forests.py says, at the same occasions,
and makes of programs what node/collectives/folding.py makes of them. Elements are float32, the
operation is a sum: cells that are one and the same under two names are one here as well.
It must never know: who decided the plan, what becomes of results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from hoplite_mp.planner.program import Cell as Name
from hoplite_mp.planner.program import program_of
from hoplite_mp.protocol.fields import FOLDING
from hoplite_mp.protocol.messages import ExecutionFailed, StripesComplete
from hoplite_mp.simulation.keeping import KeptSlot, given_by, slot_name
from hoplite_mp.simulation.memory import Memory

if TYPE_CHECKING:
    from hoplite_mp.planner.program import Program
    from hoplite_mp.protocol.messages import Commit, ExecuteReduce
    from hoplite_mp.simulation.imitated import ImitatedNode
    from hoplite_mp.simulation.keeping import SlotName
    from hoplite_mp.simulation.places import Place
    from hoplite_mp.simulation.streams import Cell, Key

__all__ = ["ITEM_BYTES", "Parts"]

ITEM_BYTES = 4
# As in node/collectives/forests.py.
SPACE_RETRY_S = 0.02
PULL_RETRY_S = 0.1
PULL_TRIES_MAX = 20
# How long a part waits for a source that is on its way here (Config.put_wait_s).
SOURCE_WAIT_S = 10.0


@dataclass(slots=True, eq=False)
class Part:
    """One plan, as far as this node takes part."""

    plan: ExecuteReduce
    program: Program
    until: float
    views: dict[int, Memory] = field(default_factory=dict)  # members that are here
    blocks: dict[int, Memory] = field(default_factory=dict)  # results that belong here
    cells: dict[Cell, None] = field(default_factory=dict)
    made: dict[Name, Cell] = field(default_factory=dict)
    missing: set[Cell] = field(default_factory=set)
    pulls: dict[Cell, tuple[int, Key]] = field(default_factory=dict)
    queue: list[Cell] = field(default_factory=list)
    running: set[Cell] = field(default_factory=set)
    tries: dict[Cell, int] = field(default_factory=dict)
    copies: dict[Cell, Place] = field(default_factory=dict)
    known: set[Key] = field(default_factory=set)
    slots: dict[SlotName, KeptSlot] = field(default_factory=dict)  # of the epochs before
    filling: dict[SlotName, Cell] = field(default_factory=dict)  # of this one
    waiting: int = 0
    begun: bool = False
    reported: bool = False


class Parts:
    """All of them."""

    def __init__(self, node: ImitatedNode) -> None:
        self.node = node
        self.engine = node.engine
        self.parts: dict[int, Part] = {}  # by operation
        self.by_cell: dict[Cell, Part] = {}

    # ---- the manager's word

    def execute(self, plan: ExecuteReduce) -> None:
        """Takes up this node's part; a later epoch takes the place of an earlier one."""
        slots = self._slots(plan.operation)
        self.drop(plan.operation)
        program = program_of(plan, self.node.number)
        if not program.is_empty:
            part = Part(plan, program, self.node.now + SOURCE_WAIT_S, slots=slots)
            self.parts[plan.operation] = part
            self._begin(part)

    def _slots(self, operation: int) -> dict[SlotName, KeptSlot]:
        """The contributions that have come, or begun to come, by the plan before."""
        part = self.parts.get(operation)
        if part is None or part.plan.kind not in FOLDING or not self.node.world.tracked:
            return {}
        slots = dict(part.slots)
        for slot, cell in part.filling.items():
            assert cell.memory is not None
            slots[slot] = KeptSlot(cell.memory, cell.begin, cell.watermark)
        return slots

    def commit(self, message: Commit) -> dict[int, Memory]:
        """The results of this node's own operation, by index. Those of others it keeps."""
        part = self.parts.get(message.operation)
        if part is None or part.plan.epoch != message.epoch:
            return {}
        plan, blocks = part.plan, part.blocks
        self.node.world.truth.check_result(plan, message, blocks, _bounds_of(plan))
        self.drop(message.operation)
        if plan.requester == self.node.number:
            return blocks
        for index, memory in blocks.items():
            self.node.places.seal(plan.results[index], memory)
        return {}

    def is_making(self, object_id: bytes) -> bool:
        """Is that a result that will be here after the commit?"""
        return any(
            part.plan.results[index] == object_id
            for part in self.parts.values()
            for index in part.blocks
        )

    def drop(self, operation: int) -> None:
        """Nobody needs that part any more."""
        part = self.parts.get(operation)
        if part is None:
            return
        for place in list(part.copies.values()):
            self.node.places.let_go(place)
        for cell in part.cells:
            self.engine.close(cell)
            self.by_cell.pop(cell, None)
        part.cells = {}
        if self.parts.get(operation) is part:
            del self.parts[operation]

    # ---- the filler of places

    def forget(self, place: Place) -> None:
        for part in list(self.parts.values()):
            for cell in [one for one, other in part.copies.items() if other is place]:
                del part.copies[cell]
                part.cells.pop(cell, None)
                part.missing.discard(cell)
                part.running.discard(cell)
                if cell in part.queue:
                    part.queue.remove(cell)
                self.engine.close(cell)
                del self.by_cell[cell]
                self.node.after(0.0, self._look, part)

    # ---- the beginning

    def _begin(self, part: Part) -> None:
        plan = part.plan
        if self.parts.get(plan.operation) is not part:
            return
        gone = self._pin(part)
        if gone is None:
            if self.node.now > part.until:
                self._fail(part, "a source does not come", (), "full")
            else:
                self.node.after(SPACE_RETRY_S, self._begin, part)
            return
        if gone:
            self._fail(part, "sources had vanished", tuple(sorted(gone)))
            return
        (self._fold if plan.kind in FOLDING else self._copy)(part)
        part.begun = True
        self._pull_more(part)
        self._look(part)

    def _pin(self, part: Part) -> list[int] | None:
        """The members that are here; which of them are not, or None: one is on its way."""
        at = dict(zip(part.plan.members, part.plan.objects, strict=True))
        gone = []
        for index in dict.fromkeys(index for _, index in part.program.given):
            memory = self.node.places.holds.get(at[index])
            if memory is not None:
                part.views[index] = memory
            elif at[index] in self.node.places.places:
                place = self.node.places.places[at[index]]
                if place.memory is None:
                    self.node.places.want(place, lambda why: None)
                return None
            else:
                gone.append(index)
        return gone

    def _cell(
        self, part: Part, key: Key | None, memory: Memory | None, begin: int, nbytes: int, come: int
    ) -> Cell:
        cell = self.engine.cell(key, memory, begin, nbytes, come)
        part.cells[cell] = None
        self.by_cell[cell] = part
        return cell

    # ---- folds

    def _fold(self, part: Part) -> None:
        plan, program, node = part.plan, part.program, self.node
        bounds = _bounds_of(plan)
        tracked = node.world.tracked
        if node.number in plan.destinations:
            wanted = [0]
            if plan.kind == "reduce_scatter":
                wanted = [i for i, at in enumerate(plan.destinations) if at == node.number]
            for index in wanted:
                begin, end = bounds[index] if plan.kind == "reduce_scatter" else (0, plan.nbytes)
                part.blocks[index] = Memory(end - begin)
        served = {serve.cell for serve in program.serves}
        pulled = {pull.cell for pull in program.pulls}
        result = set(program.result)
        members = dict(program.given)
        given = given_by(plan)
        alias = {
            fold.cell: fold.sources[0]
            for fold in program.folds
            if len(fold.sources) == 1 and fold.sources[0] in pulled
        }
        names = {source: cell for cell, source in alias.items()}
        made = part.made

        def key(name: Name) -> Key | None:
            if name not in served:
                return None
            return plan.operation, plan.epoch, name.stripe, name.part

        def member(name: Name, index: int, stripe: int) -> Cell:
            begin, end = bounds[stripe]
            memory = node.world.truth.member(plan, index) if tracked else None
            return self._cell(part, key(name), memory, begin, end - begin, end - begin)

        def memory_of(name: Name, in_result: bool) -> tuple[Memory | None, int, int]:
            begin, end = bounds[name.stripe]
            if not tracked:
                return None, begin, end - begin
            if not in_result:
                return Memory(end - begin), 0, end - begin
            if plan.kind == "reduce_scatter":
                return part.blocks[name.stripe], 0, end - begin
            return part.blocks[0], begin, end - begin

        for name in served:
            if name in members:
                made[name] = member(name, members[name], name.stripe)
        for pull in program.pulls:
            name = pull.cell
            other = names.get(name, name)
            in_result = name in result or other in result
            memory, begin, nbytes = memory_of(name, in_result)
            come, slot = 0, None
            if tracked and not in_result and other not in served:
                slot = slot_name(plan, name, bounds[name.stripe], given)
                kept = node.world.keeping.slot(part.slots, slot)
                if kept is not None:
                    memory, begin, come = kept
            cell = made[name] = self._cell(part, key(other), memory, begin, nbytes, come)
            if slot is not None:
                part.filling[slot] = cell
            part.pulls[cell] = name.node, (plan.operation, plan.epoch, name.stripe, name.part)
        for fold in program.folds:
            name = fold.cell
            if name in alias:
                made[name] = made[alias[name]]
                continue
            first = fold.sources[0]
            if len(fold.sources) == 1 and first in members and name not in result:
                made[name] = member(name, members[first], name.stripe)
                continue
            memory, begin, nbytes = memory_of(name, name in result)
            cell = made[name] = self._cell(part, key(name), memory, begin, nbytes, 0)
            sources = []
            for source in fold.sources:
                if source not in made:
                    made[source] = member(source, members[source], source.stripe)
                sources.append(made[source])
            if nbytes:
                cell.filled_by = self
                part.missing.add(cell)
                self.engine.fold(cell, sources)
        pulls = [made[pull.cell] for pull in program.pulls]
        part.queue = [cell for cell in pulls if cell.watermark < max(1, cell.nbytes)]
        part.missing.update(part.queue)

    # ---- copies

    def _copy(self, part: Part) -> None:
        plan, program, places = part.plan, part.program, self.node.places
        for name in program.result:
            if name.node == self.node.number:
                places.tell(plan.objects[name.stripe])
        for serve in program.serves:
            key = (plan.operation, plan.epoch, serve.cell.stripe, serve.cell.part)
            if key not in part.known:
                part.known.add(key)
                view = part.views[plan.members[serve.cell.stripe]]
                self._cell(part, key, view, 0, view.nbytes, view.nbytes)
        for pull in program.pulls:
            name = pull.cell
            key = (plan.operation, plan.epoch, name.stripe, name.part)
            if key in part.known:
                continue
            part.known.add(key)
            object_id, nbytes = plan.objects[name.stripe], plan.sizes[name.stripe]
            place = places.expect(object_id, nbytes, (name.node,))
            if place is None and object_id not in places.holds:
                self._fail(part, "a former life of this host made it", (), "lost")
                return
            if place is None:
                places.tell(object_id)
                continue
            if place.memory is not None:  # it is being brought already
                part.waiting += 1
                place.waiting.append(lambda why: self._arrived(part, why))
                continue
            cell = self._cell(part, None, places.begin(place, self), 0, nbytes, 0)
            part.copies[cell] = place
            part.pulls[cell] = name.node, key
            part.queue.append(cell)
            part.missing.add(cell)

    def _arrived(self, part: Part, why: str) -> None:
        part.waiting -= 1
        if not why:
            self._look(part)
        elif self.parts.get(part.plan.operation) is part:
            self._fail(part, "a copy that was on its way is lost", (), "lost")

    # ---- what the links say

    def _pull_more(self, part: Part) -> None:
        most = part.program.inbound_max or len(part.queue)
        while part.queue and len(part.running) < max(1, most):
            cell = part.queue.pop(0)
            part.running.add(cell)
            node, key = part.pulls[cell]
            self.node.pull(cell, node, key, self)

    def filled(self, cell: Cell) -> None:
        """A cell of ours is full."""
        part = self.by_cell.get(cell)
        if part is None:
            return
        part.missing.discard(cell)
        part.running.discard(cell)
        place = part.copies.pop(cell, None)
        if place is not None and self.node.places.places.get(place.object) is place:
            self.node.places.arrived(place)
            self.node.places.tell(place.object)
        self._pull_more(part)
        self._look(part)

    def failed(self, cell: Cell, reason: str) -> None:
        """A pull has ended early. If its node is gone, another plan is on its way."""
        part = self.by_cell.get(cell)
        if part is None:
            return
        node, key = part.pulls.get(cell, (-1, (0, 0, 0, 0)))
        if node not in self.node.members:
            if node < 0:
                self._fail(part, f"a fold has ended: {reason}", (), "lost")
            return
        part.tries[cell] = part.tries.get(cell, 0) + 1
        if part.tries[cell] > PULL_TRIES_MAX:
            self._fail(part, f"nothing comes from node {node}: {reason}", (), "lost")
            return
        self.node.after(PULL_RETRY_S, self._again, part, cell, node, key)

    def _again(self, part: Part, cell: Cell, node: int, key: Key) -> None:
        if self.by_cell.get(cell) is part and node in self.node.members:
            self.node.pull(cell, node, key, self)

    def _look(self, part: Part) -> None:
        plan = part.plan
        if part.missing or part.waiting or not part.begun or not part.program.reports:
            return
        if self.parts.get(plan.operation) is part:
            part.reported = True
            number = self.node.number
            self.node.send_manager(StripesComplete(plan.operation, plan.epoch, number))

    def _fail(
        self, part: Part, reason: str, sources: tuple[int, ...], error: str = "value"
    ) -> None:
        plan = part.plan
        self.drop(plan.operation)
        number = self.node.number
        self.node.send_manager(
            ExecutionFailed(plan.operation, plan.epoch, number, reason, sources, error)
        )


def _bounds_of(plan: ExecuteReduce) -> list[tuple[int, int]]:
    """Where each stripe lies, in bytes of the whole array."""
    count = plan.nbytes // ITEM_BYTES
    if plan.kind == "reduce_scatter":  # as numpy.array_split
        size, longer = divmod(count, len(plan.results))
        edges = [size * k + min(k, longer) for k in range(len(plan.results) + 1)]
        cut = list(pairwise(edges))
    else:
        cut = [(count * s.begin_share >> 20, count * s.end_share >> 20) for s in plan.stripes]
    return [(begin * ITEM_BYTES, end * ITEM_BYTES) for begin, end in cut]
