"""The state of one plan on one of the nodes that take part in it.

The code that makes a plan's cells and the code that watches them share this state, for plans that
copy an object and for collectives alike.
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


# The carryover from one execution of a plan to the next execution of the same operation.
#
# When a host dies, or its link becomes slow, the operation is planned again, and bytes that have
# already arrived are kept. Each contribution is received into a slot, a cell that nothing else
# writes. Under the new plan the slot is filled further from its watermark if the same node provides
# the same members of the same elements. Of a copy that has arrived in part, only the missing byte
# ranges are pulled. Results of folds, and cells that other nodes read, are made again, because
# members or bytes may differ.
#
# The cells of slots stay open from one plan to the next, while those of copies are closed. Both
# plans share one engine buffer, so that no block is freed while a closed cell may still be written.


class SlotName(NamedTuple):
    """Identifies the content of a contribution: equal names mean equal bytes."""

    node: int  # the node that provides it
    begin: int  # range in elements of the whole array
    end: int
    members: tuple[int, ...]  # in the order in which they are folded


@dataclass(slots=True)
class Slot:
    """The cell of one contribution that has arrived or is arriving."""

    cell: int
    payload: int  # offset of its block in the store; 0: the memory is not in the store


@dataclass(slots=True)
class CarriedCopy:
    """A block that is being filled with a copy of an object."""

    payload: int
    nbytes: int
    arrived: Ranges


@dataclass(slots=True)
class Carryover:
    """What an ended execution leaves to the next one of the same operation."""

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
        """Frees what the next execution has not taken over, except for these."""
        unused = [name for name in self.slots if name not in slots]
        unwanted = [one for one in self.copies if one not in copies]
        payloads = [self.copies.pop(one).payload for one in unwanted]
        for name in unused:
            slot = self.slots.pop(name)
            links.close(slot.cell, self.engine_buffer)
            payloads += [slot.payload] if slot.payload else []
        for payload in payloads:
            self.engine_buffer.when_free(partial(give_back, payload))


def slot_name(plan: ExecuteReduce, cell: Cell, bounds: tuple[int, int]) -> SlotName | None:
    """The slot name of a pulled cell; None if the cell is not the contribution of a single node."""
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
    """There is no memory yet, or a source is still arriving from disk or another host."""


class PlanOwner(Protocol):
    """Submits plans to the runner, and receives their outcomes."""

    def prepare(self, execution: PlanState) -> bool:
        """Finds the memory of members on this host, and that of copies. False: `begin` of the
        runner follows later, or the execution has ended. Raises NotNow, SourcesGone."""

    def arrived(self, execution: PlanState) -> Ranges | None:
        """The bytes of the block under `execution.followed` that have arrived; None: all."""

    def parent_failed(self, execution: PlanState, node: int, reason: str) -> None:
        """That node cannot fill a cell; `node` is NOBODY if a fold on this host has failed."""

    def completed(self, execution: PlanState) -> None:
        """This node has received all its bytes."""

    def failed(
        self, execution: PlanState, reason: str, sources: tuple[int, ...], error: str
    ) -> None:
        """The execution has ended. sources: indices of members that are gone."""

    def ended(self, execution: PlanState, carryover: Carryover) -> None:
        """The execution has ended for any reason, and leaves `carryover` to the next one."""


def number_of(plan: Plan) -> int:
    """The number of the plan's execution on this node. An operation has one plan at a time, but
    several plans may copy one object at the same time, and only their epochs differ."""
    copies = plan.operation >= COPY_OPERATION
    return COPY_OPERATION | plan.epoch if copies else plan.operation


@dataclass(slots=True)
class PlanState:
    """One plan, as far as this node takes part."""

    plan: Plan
    program: Program
    owner: PlanOwner
    begun_ns: int  # when this node received the plan
    until: float = 0.0  # the time at which to give up waiting for memory
    # Pinned members on this host, by index.
    views: dict[int, memoryview] = field(default_factory=dict)
    growing: bool = False  # another plan is still receiving the object in `views`
    # The members in `views` that are still being written.
    streaming: dict[int, GrowingBlock] = field(default_factory=dict)
    carryover: Carryover = field(default_factory=Carryover)  # left by the execution before
    slots: dict[SlotName, Slot] = field(default_factory=dict)  # contributions that are pulled
    # Object -> the byte ranges that its block had when this execution took it over.
    arrived_before: dict[bytes, Ranges] = field(default_factory=dict)
    # Cell -> (the object in whose block it is, offset of its stripe, offset from which it is
    # filled).
    fills: dict[int, tuple[bytes, int, int]] = field(default_factory=dict)
    # Served cells that advance while other cells receive their bytes: [begin, end) in the block.
    followed: dict[int, tuple[int, int]] = field(default_factory=dict)
    cells: dict[int, EngineBuffer] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # cell -> bytes
    missing: set[int] = field(default_factory=set)  # cells that are not full yet
    pulls: dict[int, tuple[int, Key]] = field(default_factory=dict)  # cell -> (node, key)
    queue: list[int] = field(default_factory=list)  # pulls that have not begun
    running: set[int] = field(default_factory=set)  # pulls in progress
    tries: dict[int, int] = field(default_factory=dict)  # cell -> how many pulls of it have failed
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)  # result -> (payload, bytes)
    # Cell -> id of the header whose object it fills.
    copies: dict[int, int] = field(default_factory=dict)
    known: set[Key] = field(default_factory=set)  # keys of copies that are done or in progress
    waiting: int = 0  # number of copies that another execution is bringing
    scratch: list[int] = field(default_factory=list)  # blocks only for intermediate bytes
    begun: bool = False
    reports: bool = True  # the end of this node's part is reported
    reported: bool = False  # that has been done
    # (generation, call, plan): the engine votes for that call of a Group when `missing` is full.
    vote: tuple[int, int, int] | None = None
    measured: bool = False  # the link estimator counts its bytes
    # Bytes (sent, received) by this host before its first execution of an operation whose stripes
    # may pass to others while it runs.
    moved: tuple[int, int] | None = None
    # For a plan of a Group: called at its end, instead of the owner.
    done: Callable[[str, str], None] | None = None

    @property
    def engine_buffer(self) -> EngineBuffer:
        """Shared with the execution that this one replaces."""
        return self.carryover.engine_buffer

    @property
    def number(self) -> int:
        """See `number_of`."""
        return number_of(self.plan)

    def key(self, cell: Cell) -> Key:
        """The key by which other nodes ask for a cell and this one serves it."""
        return self.plan.operation, self.plan.epoch, cell.stripe, cell.part

    @property
    def is_copy(self) -> bool:
        """Whether this is a manager's plan to copy one object, which can get other parents."""
        return self.plan.operation >= COPY_OPERATION

    @property
    def may_be_relieved(self) -> bool:
        """Whether the manager may give this node's stripes to others while the plan is executed."""
        if self.done is not None or isinstance(self.plan, Distribute):
            return False
        return self.plan.kind == "allreduce"

    @property
    def copied(self) -> Distribute:
        """The plan of an execution that is known to copy one object."""
        assert isinstance(self.plan, Distribute)
        return self.plan

    def copies_object(self, object_id: bytes) -> bool:
        """Whether this is a manager's plan to copy that object."""
        return self.is_copy and self.copied.object == object_id

    @property
    def receives(self) -> bool:
        """Whether this plan brings the object of a Distribute to this node."""
        return bool(self.blocks)

    def arrived(self, object_id: bytes, watermark: Callable[[int], int]) -> Ranges:
        """The bytes of an arriving object that are here."""
        found = self.arrived_before.get(object_id, Ranges()).copy()
        for cell, (one, begin, first) in self.fills.items():
            if one == object_id:
                found.add(first, begin + watermark(cell))
        return found

    def leave(self, watermark: Callable[[int], int]) -> Carryover:
        """Removes and returns what the next execution may continue, including blocks of copies."""
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
        """The written part of a range of a member on this host: True if the member is complete,
        otherwise the number of bytes from `begin` on."""
        if self.growing:
            return 0
        source = self.streaming.get(index)
        return True if source is None else source.written.reach(begin, begin + nbytes)

    def block_objects(self) -> dict[int, bytes]:
        """The object of which each block in `blocks` is a copy; blocks of results are left out."""
        plan = self.plan
        if isinstance(plan, Distribute):
            return {0: plan.object}
        return {} if plan.kind in FOLDING else dict(enumerate(plan.objects))

    def makes(self, object_id: bytes) -> bool:
        """Whether the commit of this plan makes that object available on this node."""
        plan = self.plan
        if isinstance(plan, Distribute) or self.done is not None:
            return False
        return any(plan.results[index] == object_id for index in self.blocks if plan.results)

    def follow(self, index: int, cell: int, begin: int, nbytes: int) -> None:
        """Registers a cell over those bytes of a member, so that it advances while they are
        written."""
        if self.growing:
            self.followed[cell] = begin, begin + nbytes
        if index in self.streaming:
            self.streaming[index].cells[cell] = begin, nbytes
