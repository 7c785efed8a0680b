"""One plan of several nodes, as far as one of them takes part: what it keeps until the end.

Why it exists: whoever makes cells for a plan and whoever watches them share this, be it the plan of
a copy or of a collective.
It must never know: how cells are made, when a plan is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hoplite_mp.node.collectives.carryover import Carryover, Copy
from hoplite_mp.node.ranges import Ranges
from hoplite_mp.protocol.fields import FOLDING
from hoplite_mp.protocol.messages import Distribute
from hoplite_mp.protocol.operations import COPY_OPERATION

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.collectives.carryover import Slot, SlotName
    from hoplite_mp.node.objects.engine_buffer import EngineBuffer
    from hoplite_mp.node.objects.streaming_source import StreamingSource
    from hoplite_mp.node.ports import Key
    from hoplite_mp.planner.program import Cell, Program
    from hoplite_mp.protocol.group_calls import Plan

__all__ = ["NotNow", "PlanExecution"]


class NotNow(Exception):
    """There is no room, or a source is on its way from disk or from another host."""


class Above(Protocol):
    """Who carries out a plan, and hears how its cells fare."""

    def filled(self, execution: PlanExecution, cell: int) -> None:
        """All bytes of a cell are there."""

    def failed(self, execution: PlanExecution, node: int, reason: str) -> None:
        """Nothing comes from that node as things stand; NOBODY: a fold has ended early."""

    def arrived(self, execution: PlanExecution) -> Ranges | None:
        """Which bytes of the block that `part.followed` lies in are here; None: all, for good."""


@dataclass(slots=True)
class PlanExecution:
    """One plan, as far as this node takes part."""

    plan: Plan
    program: Program
    above: Above
    begun_ns: int  # when this node heard of the plan
    until: float = 0.0  # when to give up waiting for room
    views: dict[int, memoryview] = field(default_factory=dict)  # members here, pinned
    growing: bool = False  # the one in `views` is still being received, by another plan
    # Of `views`: those that are still being written.
    streaming: dict[int, StreamingSource] = field(default_factory=dict)
    carryover: Carryover = field(
        default_factory=Carryover
    )  # of the execution before, not yet taken
    slots: dict[SlotName, Slot] = field(default_factory=dict)  # contributions that are pulled
    # Of blocks, when they were taken.
    arrived_before: dict[bytes, Ranges] = field(default_factory=dict)
    # Cell -> the object in whose block it lies, and the bytes where it begins, and fills from.
    fills: dict[int, tuple[bytes, int, int]] = field(default_factory=dict)
    # Cells that others read, and that grow with what comes by other cells: [begin, end).
    followed: dict[int, tuple[int, int]] = field(default_factory=dict)
    cells: dict[int, EngineBuffer] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # cell -> bytes
    missing: set[int] = field(default_factory=set)  # cells that are not full yet
    pulls: dict[int, tuple[int, Key]] = field(default_factory=dict)  # cell -> (node, key)
    queue: list[int] = field(default_factory=list)  # pulls that are to begin later
    running: set[int] = field(default_factory=set)  # pulls under way
    tries: dict[int, int] = field(default_factory=dict)  # cell -> pulls of it that have failed
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)  # result -> (payload, bytes)
    copies: dict[int, int] = field(default_factory=dict)  # cell -> the header that it fills
    known: set[Key] = field(default_factory=set)  # copies that are dealt with
    waiting: int = 0  # copies that another transfer brings
    scratch: list[int] = field(default_factory=list)  # blocks that only bytes on their way need
    begun: bool = False
    reported: bool = False  # that this node has what it is to have
    measured: bool = False  # its bytes are counted
    # Not the manager's: who hears of the end instead.
    done: Callable[[str, str], None] | None = None

    @property
    def engine_buffer(self) -> EngineBuffer:
        """Shared with the execution before."""
        return self.carryover.engine_buffer

    def key(self, cell: Cell) -> Key:
        """Under which a node asks for a cell, and another one serves it."""
        return self.plan.operation, self.plan.epoch, cell.stripe, cell.part

    @property
    def is_copy(self) -> bool:
        """Is it the manager's, about one object that other nodes might give as well?"""
        return self.plan.operation >= COPY_OPERATION

    @property
    def copied(self) -> Distribute:
        """The plan, of an execution which knows that it copies one object."""
        assert isinstance(self.plan, Distribute)
        return self.plan

    @property
    def receives(self) -> bool:
        """Is the object of a Distribute on its way to this node by this plan?"""
        return bool(self.blocks)

    def arrived(self, object_id: bytes, watermark: Callable[[int], int]) -> Ranges:
        """Which bytes are here of an object that comes."""
        found = self.arrived_before.get(object_id, Ranges()).copy()
        for cell, (one, begin, first) in self.fills.items():
            if one == object_id:
                found.add(first, begin + watermark(cell))
        return found

    def leave(self, watermark: Callable[[int], int]) -> Carryover:
        """What the next execution may go on with. Blocks of copies are no longer this one's."""
        carryover = Carryover(
            self.engine_buffer, self.carryover.slots | self.slots, dict(self.carryover.copies)
        )
        names = self.block_objects()
        for index in [index for index in self.blocks if index in names]:
            payload, nbytes = self.blocks.pop(index)
            arrived = self.arrived(names[index], watermark)
            carryover.copies[names[index]] = Copy(payload, nbytes, arrived)
        self.slots, self.carryover = {}, Carryover(self.engine_buffer)
        return carryover

    def written(self, index: int, begin: int, nbytes: int) -> bool | int:
        """Which bytes of a member here are there: True for all, or how many from `begin` on."""
        if self.growing:
            return 0
        source = self.streaming.get(index)
        return True if source is None else source.written.reach(begin, begin + nbytes)

    def block_objects(self) -> dict[int, bytes]:
        """The objects of which `blocks` are copies; none for what is made here."""
        plan = self.plan
        if isinstance(plan, Distribute):
            return {0: plan.object}
        return {} if plan.kind in FOLDING else dict(enumerate(plan.objects))

    def makes(self, object_id: bytes) -> bool:
        """Will that object be here when the plan is committed?"""
        plan = self.plan
        if isinstance(plan, Distribute) or self.done is not None:
            return False
        return any(plan.results[index] == object_id for index in self.blocks if plan.results)

    def follow(self, index: int, cell: int, begin: int, nbytes: int) -> None:
        """The cell lies in those bytes of a member here, and advances with them."""
        if self.growing:
            self.followed[cell] = begin, begin + nbytes
        if index in self.streaming:
            self.streaming[index].cells[cell] = begin, nbytes
