"""One plan of several nodes, as far as one of them takes part: what it keeps until the end.

Why it exists: whoever makes cells for a plan and whoever watches them share this.
It must never know: how cells are made, when a plan is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hoplite_mp.node.collectives.leftovers import Copy, Leftovers
from hoplite_mp.node.ranges import Ranges
from hoplite_mp.protocol.fields import FOLDING
from hoplite_mp.protocol.messages import Distribute

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.collectives.leftovers import Slot, SlotName
    from hoplite_mp.node.objects.given import Given
    from hoplite_mp.node.objects.ground import Ground
    from hoplite_mp.node.ports import Key
    from hoplite_mp.planner.program import Program
    from hoplite_mp.protocol.group_calls import Plan

__all__ = ["NotNow", "Part"]


class NotNow(Exception):
    """There is no room, or a source is on its way from disk or from another host."""


@dataclass(slots=True)
class Part:
    """One plan, as far as this node takes part."""

    plan: Plan
    program: Program
    until: float  # when to give up waiting for room
    begun_ns: int  # when this node heard of the plan
    views: dict[int, memoryview] = field(default_factory=dict)  # members here, pinned
    given: dict[int, Given] = field(default_factory=dict)  # those that are still being written
    left: Leftovers = field(default_factory=Leftovers)  # by the part before, not yet taken
    slots: dict[SlotName, Slot] = field(default_factory=dict)  # contributions that are pulled
    come: dict[bytes, Ranges] = field(default_factory=dict)  # of blocks, when they were taken
    # Cell -> the object in whose block it lies, and the bytes where it begins, and fills from.
    fills: dict[int, tuple[bytes, int, int]] = field(default_factory=dict)
    cells: dict[int, Ground] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # cell -> bytes
    missing: set[int] = field(default_factory=set)  # cells that are not full yet
    pulls: dict[int, tuple[int, Key]] = field(default_factory=dict)  # cell -> (node, key)
    queue: list[int] = field(default_factory=list)  # pulls that are to begin later
    running: set[int] = field(default_factory=set)  # pulls under way
    tries: dict[int, int] = field(default_factory=dict)
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
    def ground(self) -> Ground:
        """Shared with the part before."""
        return self.left.ground

    def leave(self, watermark: Callable[[int], int]) -> Leftovers:
        """What the part after this one may go on with. Blocks of copies are no more this one's."""
        left = Leftovers(self.ground, self.left.slots | self.slots, dict(self.left.copies))
        names = self.block_objects()
        for index in [index for index in self.blocks if index in names]:
            payload, nbytes = self.blocks.pop(index)
            arrived = self.come.get(names[index], Ranges()).copy()
            for cell, (object_id, begin, first) in self.fills.items():
                if object_id == names[index]:
                    arrived.add(first, begin + watermark(cell))
            left.copies[names[index]] = Copy(payload, nbytes, arrived)
        self.slots, self.left = {}, Leftovers(self.ground)
        return left

    def written(self, index: int, begin: int, nbytes: int) -> bool | int:
        """Which bytes of a member here are there: True for all, or how many from `begin` on."""
        given = self.given.get(index)
        return True if given is None else given.written.reach(begin, begin + nbytes)

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
        if index in self.given:
            self.given[index].cells[cell] = begin, nbytes
