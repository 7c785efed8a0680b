"""What the execution of a plan leaves to that of the next plan of the same operation.

Why it exists: after a death an operation is planned anew, and what has come stays. A contribution
has its own slot, a cell that is only received into: under the new plan it goes on at its watermark
if the same node gives the same members of the same elements. So does a copy, byte by byte. What was
folded or published is made again: other members, other bytes.
It must never know: who died, what the new plan looks like as a whole.

The cells of slots stay open from one plan to the next. Those of copies do not, so both share
one engine buffer, and no block is free while a closed cell may still be written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hoplite_mp.node.objects.engine_buffer import EngineBuffer
from hoplite_mp.planner.program import CONTRIBUTION, MEMBER

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.membership.links import Links
    from hoplite_mp.node.ranges import Ranges
    from hoplite_mp.planner.program import Cell
    from hoplite_mp.protocol.messages import ExecuteReduce

__all__ = ["Carryover", "Copy", "Slot", "SlotName", "slot_name"]


class SlotName(NamedTuple):
    """What a contribution contains: two with the same name are the same bytes."""

    node: int  # that gives it
    begin: int  # elements of the whole array
    end: int
    members: tuple[int, ...]  # in the order in which they are folded


@dataclass(slots=True)
class Slot:
    """One contribution that has come, or is coming."""

    cell: int
    payload: int  # of the store; 0: memory of its own


@dataclass(slots=True)
class Copy:
    """A block that is being filled with an object."""

    payload: int
    nbytes: int
    arrived: Ranges


@dataclass(slots=True)
class Carryover:
    """Of one execution."""

    engine_buffer: EngineBuffer = field(default_factory=EngineBuffer)
    slots: dict[SlotName, Slot] = field(default_factory=dict)
    copies: dict[bytes, Copy] = field(default_factory=dict)  # by object

    def discard(self, links: Links, give_back: Callable[[int], None]) -> None:
        """The next execution has taken what it can use."""
        payloads = [copy.payload for copy in self.copies.values()]
        for slot in self.slots.values():
            links.close(slot.cell, self.engine_buffer)
            payloads += [slot.payload] if slot.payload else []
        for payload in payloads:
            self.engine_buffer.when_free(partial(give_back, payload))
        self.slots, self.copies = {}, {}


def slot_name(plan: ExecuteReduce, cell: Cell, bounds: tuple[int, int]) -> SlotName | None:
    """The name of a cell that is pulled; None: it is nobody's contribution alone."""
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
