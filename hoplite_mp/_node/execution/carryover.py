"""What one execution of a plan hands over to the next execution of the same operation.

When a host dies, or its link becomes slow, the operation is planned again, and bytes that have
already arrived are kept. Each contribution is received into a slot, a cell that nothing else
writes. Under the new plan the slot is filled further from its watermark if the same node provides
the same members of the same elements. Of a copy that has arrived in part, only the missing byte
ranges are pulled. Results of folds, and cells that other nodes read, are made again, because
members or bytes may differ.

The cells of slots stay open from one plan to the next, while those of copies are closed. Both plans
share one engine buffer, so that no block is freed while a closed cell may still be written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hoplite_mp._node.store.growing_block import EngineBuffer
from hoplite_mp._planner.program import CONTRIBUTION, MEMBER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from hoplite_mp._node.peers.links import Links
    from hoplite_mp._node.ranges import Ranges
    from hoplite_mp._planner.program import Cell
    from hoplite_mp._protocol.messages import ExecuteReduce

__all__ = ["CarriedCopy", "Carryover", "Slot", "SlotName", "slot_name"]


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
