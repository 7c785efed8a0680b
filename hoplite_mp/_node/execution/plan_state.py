"""The state of one plan on one participating node.

A plan is executed as a set of cells (ranges of memory with a watermark). The code that makes the
cells and the code that watches them share this state, both for copies and for collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hoplite_mp._node.store.growing_block import EngineBuffer, Ranges
from hoplite_mp._planner.program import CONTRIBUTION, MEMBER
from hoplite_mp._protocol.fields import FOLDING
from hoplite_mp._protocol.messages import Distribute
from hoplite_mp._protocol.operations import COPY_OPERATION

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from hoplite_mp._node.peers.links import Links
    from hoplite_mp._node.ports import Key
    from hoplite_mp._node.store.growing_block import GrowingBlock
    from hoplite_mp._planner.program import Cell, Program
    from hoplite_mp._protocol.group_calls import Plan
    from hoplite_mp._protocol.messages import ExecuteReduce

__all__ = [
    "CarriedCopy",
    "Carryover",
    "NotNow",
    "PlanOwner",
    "PlanState",
    "Slot",
    "SlotName",
    "number_of",
    "slot_name",
]


# The carryover from one execution to the next execution of the same operation.
#
# When a host dies or its link becomes slow, the operation is planned again, and bytes that have
# already arrived are kept. Each contribution is received in a slot, which is a cell of its own. The
# new plan continues to fill the slot from its watermark if the same node provides the same elements
# of the same members. If a copy has partly arrived, only the missing byte ranges are pulled.
# Results of folds, and cells that other nodes read, are computed again, because their members or
# bytes may differ in the new plan.
#
# The cells of slots stay open from one plan to the next, while the cells of copies are closed. Both
# plans share an engine buffer, so that no block is freed while the engine may still write to a
# closed cell.


class SlotName(NamedTuple):
    """Identifies the content of a contribution: equal names mean equal bytes."""

    node: int  # the node that provides the contribution
    begin: int  # the range [begin, end), in elements of the whole array
    end: int
    members: tuple[int, ...]  # in the order in which they are folded


@dataclass(slots=True)
class Slot:
    """The cell of one contribution that has arrived or is arriving."""

    cell: int
    payload: int  # offset of the cell's block in the store; 0: the memory is not in the store


@dataclass(slots=True)
class CarriedCopy:
    """A block that is being filled with a copy of an object."""

    payload: int
    nbytes: int
    arrived: Ranges


@dataclass(slots=True)
class Carryover:
    """The cells and blocks that an ended execution leaves to the operation's next execution."""

    engine_buffer: EngineBuffer = field(default_factory=EngineBuffer)
    slots: dict[SlotName, Slot] = field(default_factory=dict)
    copies: dict[bytes, CarriedCopy] = field(default_factory=dict)  # by object id

    def discard(
        self,
        links: Links,
        give_back: Callable[[int], None],
        *,
        slots: Collection[SlotName | None] = (),
        copies: Collection[bytes] = (),
    ) -> None:
        """Frees the slots and copies that the next execution has not taken over, except for those
        named in `slots` and `copies`."""
        unused_slots = [name for name in self.slots if name not in slots]
        unused_copies = [object_id for object_id in self.copies if object_id not in copies]
        payloads = [self.copies.pop(object_id).payload for object_id in unused_copies]
        for name in unused_slots:
            slot = self.slots.pop(name)
            links.close(slot.cell, self.engine_buffer)
            payloads += [slot.payload] if slot.payload else []
        for payload in payloads:
            self.engine_buffer.when_free(partial(give_back, payload))


def slot_name(plan: ExecuteReduce, cell: Cell, bounds: tuple[int, int]) -> SlotName | None:
    """The slot name of a pulled cell. None if the cell is not the contribution of a single node."""
    if plan.shape != "stripes":
        return None
    if cell.part >= MEMBER:
        members: tuple[int, ...] = (plan.order[cell.part - MEMBER],)
    elif cell.part == CONTRIBUTION:
        holder_of = dict(zip(plan.members, plan.holders, strict=True))
        members = tuple(index for index in plan.order if holder_of[index] == cell.node)
    else:
        return None
    return SlotName(cell.node, *bounds, members)


class NotNow(Exception):
    """Raised if there is no memory yet, or a source is still being read from disk or received."""


class PlanOwner(Protocol):
    """Submits plans to the runner, and receives their outcomes."""

    def prepare(self, execution: PlanState) -> bool:
        """Finds the memory of members on this host, and memory for copies. Returns False if the
        execution has ended, or if the owner will later call the runner's `begin`. Raises NotNow or
        SourcesGone."""

    def arrived(self, execution: PlanState) -> Ranges | None:
        """The byte ranges that have arrived in the block that contains the cells in
        `execution.followed`. None if all bytes have arrived."""

    def parent_failed(self, execution: PlanState, node: int, reason: str) -> None:
        """Called when `node` cannot fill a cell. `node` is NOBODY if a fold on this host failed."""

    def completed(self, execution: PlanState) -> None:
        """Called when this node has received all its bytes."""

    def failed(
        self, execution: PlanState, reason: str, sources: tuple[int, ...], error: str
    ) -> None:
        """Called when the execution has failed. sources: the indices of members that are gone."""

    def ended(self, execution: PlanState, carryover: Carryover) -> None:
        """Called when the execution has ended for any reason. carryover: the cells and blocks that
        the next execution may use."""


def number_of(plan: Plan) -> int:
    """The number that identifies the plan's execution on this node. A collective has one plan at a
    time, but several plans with different epochs may copy one object at the same time."""
    copies = plan.operation >= COPY_OPERATION
    return COPY_OPERATION | plan.epoch if copies else plan.operation


@dataclass(slots=True)
class PlanState:
    """The state of one plan on this node."""

    plan: Plan
    program: Program
    owner: PlanOwner
    begun_ns: int  # time at which this node received the plan
    until: float = 0.0  # time at which to give up waiting for memory
    # Index of a member on this host -> its pinned bytes.
    views: dict[int, memoryview] = field(default_factory=dict)
    growing: bool = False  # another plan is still receiving the object in `views`
    # The members in `views` that are still being written.
    streaming: dict[int, GrowingBlock] = field(default_factory=dict)
    carryover: Carryover = field(default_factory=Carryover)  # left by the previous execution
    slots: dict[SlotName, Slot] = field(default_factory=dict)  # contributions that are pulled
    # Object -> the byte ranges that had arrived in its block when this execution took it over.
    arrived_before: dict[bytes, Ranges] = field(default_factory=dict)
    # Cell -> (the object whose block contains the cell, offset of the stripe, offset of the first
    # byte that the cell receives).
    fills: dict[int, tuple[bytes, int, int]] = field(default_factory=dict)
    # Served cell whose bytes are received in other cells -> its range [begin, end) in the block.
    followed: dict[int, tuple[int, int]] = field(default_factory=dict)
    cells: dict[int, EngineBuffer] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # cell -> bytes
    missing: set[int] = field(default_factory=set)  # cells that are not full yet
    pulls: dict[int, tuple[int, Key]] = field(default_factory=dict)  # cell -> (node, key)
    queue: list[int] = field(default_factory=list)  # pulls that have not begun
    running: set[int] = field(default_factory=set)  # pulls in progress
    tries: dict[int, int] = field(default_factory=dict)  # cell -> number of its failed pulls
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)  # result -> (payload, bytes)
    # Cell -> id of the header whose object the cell fills.
    copies: dict[int, int] = field(default_factory=dict)
    known: set[Key] = field(default_factory=set)  # keys of copies that are done or in progress
    waiting: int = 0  # number of copies that another execution is receiving
    scratch: list[int] = field(default_factory=list)  # blocks for intermediate bytes
    begun: bool = False  # all cells and blocks have been made
    reports: bool = True  # this node must report when its part is complete
    reported: bool = False  # this node has reported that its part is complete
    # (generation, call, plan) of a Group call. The engine votes to commit the call when the cells
    # in `missing` are full. None: no vote.
    vote: tuple[int, int, int] | None = None
    measured: bool = False  # the link estimator counts the bytes of this execution
    # The host's total bytes (sent, received) when its first execution of the operation began. None
    # if the manager may not reassign the operation's stripes.
    moved: tuple[int, int] | None = None
    # For a Group call: called instead of the owner when the execution completes or fails.
    done: Callable[[str, str], None] | None = None

    @property
    def engine_buffer(self) -> EngineBuffer:
        """The engine buffer, which is shared with the execution that this execution replaces."""
        return self.carryover.engine_buffer

    @property
    def number(self) -> int:
        """See `number_of`."""
        return number_of(self.plan)

    def key(self, cell: Cell) -> Key:
        """The key by which nodes request the cell from each other."""
        return self.plan.operation, self.plan.epoch, cell.stripe, cell.part

    @property
    def is_copy(self) -> bool:
        """Whether this is a manager's plan to copy one object, whose parents may be replaced."""
        return self.plan.operation >= COPY_OPERATION

    @property
    def may_be_relieved(self) -> bool:
        """Whether the manager may reassign this node's stripes to others during the execution."""
        if self.done is not None or isinstance(self.plan, Distribute):
            return False
        return self.plan.kind == "allreduce"

    @property
    def copied(self) -> Distribute:
        """The plan, which must be a plan to copy one object."""
        assert isinstance(self.plan, Distribute)
        return self.plan

    def copies_object(self, object_id: bytes) -> bool:
        """Whether this is a manager's plan to copy the object `object_id`."""
        return self.is_copy and self.copied.object == object_id

    @property
    def receives(self) -> bool:
        """Whether this node receives the object of a Distribute through this plan."""
        return bool(self.blocks)

    def arrived(self, object_id: bytes, watermark: Callable[[int], int]) -> Ranges:
        """The byte ranges of the object that have arrived."""
        found = self.arrived_before.get(object_id, Ranges()).copy()
        for cell, (filled, begin, first) in self.fills.items():
            if filled == object_id:
                found.add(first, begin + watermark(cell))
        return found

    def leave(self, watermark: Callable[[int], int]) -> Carryover:
        """Removes and returns the slots, and the blocks of copies, that the next execution may
        continue to fill."""
        carryover = Carryover(
            self.engine_buffer, self.carryover.slots | self.slots, dict(self.carryover.copies)
        )
        names = self.block_objects()
        for index in [index for index in self.blocks if index in names]:
            payload, nbytes = self.blocks.pop(index)
            arrived = self.arrived(names[index], watermark)
            carryover.copies[names[index]] = CarriedCopy(payload, nbytes, arrived)
        self.slots, self.carryover = {}, Carryover(self.engine_buffer)
        return carryover

    def written(self, index: int, begin: int, nbytes: int) -> bool | int:
        """How much of a range of a member on this host has been written: True if the member is
        complete, otherwise the number of bytes after `begin`."""
        if self.growing:
            return 0
        source = self.streaming.get(index)
        return True if source is None else source.written.reach(begin, begin + nbytes)

    def block_objects(self) -> dict[int, bytes]:
        """Maps each key of `blocks` to the object that is copied into the block. Empty if the
        blocks are the results of a fold."""
        plan = self.plan
        if isinstance(plan, Distribute):
            return {0: plan.object}
        return {} if plan.kind in FOLDING else dict(enumerate(plan.objects))

    def makes(self, object_id: bytes) -> bool:
        """Whether the commit of this plan will make the object available on this node."""
        plan = self.plan
        if isinstance(plan, Distribute) or self.done is not None:
            return False
        return any(plan.results[index] == object_id for index in self.blocks if plan.results)

    def follow(self, index: int, cell: int, begin: int, nbytes: int) -> None:
        """Registers a cell over a range of a member's bytes, so that the cell advances while the
        bytes are being written."""
        if self.growing:
            self.followed[cell] = begin, begin + nbytes
        if index in self.streaming:
            self.streaming[index].cells[cell] = begin, nbytes
