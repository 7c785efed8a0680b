"""What a node keeps of its bytes when a plan is replaced by a later one.

Why it exists: this part of a node's behaviour decides what a failure costs, so it stands by itself,
to be compared and exchanged. Both questions are asked when the cells of the new plan are made:
which bytes of a copy are missing, and which slot already holds what a contributor gives again.
`Ranges` answers as nodes do (node/ranges.py, node/collectives/leftovers.py), `Nothing` begins each
plan anew.
It must never know: when plans are replaced, nor by whom.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from hoplite_mp.planner.program import CONTRIBUTION, MEMBER

if TYPE_CHECKING:
    from hoplite_mp.planner.program import Cell
    from hoplite_mp.protocol.messages import ExecuteReduce
    from hoplite_mp.simulation.memory import Memory

__all__ = ["Keeping", "KeptSlot", "Nothing", "Ranges", "SlotName", "given_by", "slot_name"]

# As in node/ranges.py.
GAPS_MAX = 8


class SlotName(NamedTuple):
    """What a contribution contains: two with the same name are the same bytes."""

    node: int
    begin: int
    end: int
    members: tuple[int, ...]


class KeptSlot(NamedTuple):
    """Bytes [0, watermark) of a contribution."""

    memory: Memory
    begin: int
    watermark: int


class Keeping(Protocol):
    """One way to answer."""

    def gaps(self, block: Memory, begin: int, end: int) -> list[tuple[int, int]]:
        """What is missing of these bytes of a copy."""

    def slot(self, slots: dict[SlotName, KeptSlot], name: SlotName | None) -> KeptSlot | None:
        """What is in that slot already."""


class Nothing:
    """Every plan begins at byte 0."""

    def gaps(self, block: Memory, begin: int, end: int) -> list[tuple[int, int]]:
        return [(begin, end)] if begin < end else []

    def slot(self, slots: dict[SlotName, KeptSlot], name: SlotName | None) -> KeptSlot | None:
        return None


class Ranges:
    """Copies go on where they were, byte by byte; the slots of the living stay."""

    def gaps(self, block: Memory, begin: int, end: int) -> list[tuple[int, int]]:
        missing: list[tuple[int, int]] = []
        at = begin
        for row in block.read(begin, end):
            if row.begin > at:
                missing.append((at, row.begin))
            at = row.end
        if at < end:
            missing.append((at, end))
        if len(missing) > GAPS_MAX:
            missing[GAPS_MAX - 1 :] = [(missing[GAPS_MAX - 1][0], end)]
        return missing

    def slot(self, slots: dict[SlotName, KeptSlot], name: SlotName | None) -> KeptSlot | None:
        return None if name is None else slots.get(name)


def given_by(plan: ExecuteReduce) -> dict[int, tuple[int, ...]]:
    """The members that each node gives, in folding order."""
    holder_of = dict(zip(plan.members, plan.holders, strict=True))
    given: dict[int, list[int]] = {}
    for index in plan.order:
        given.setdefault(holder_of[index], []).append(index)
    return {node: tuple(members) for node, members in given.items()}


def slot_name(
    plan: ExecuteReduce, cell: Cell, bounds: tuple[int, int], given: dict[int, tuple[int, ...]]
) -> SlotName | None:
    """The name of a cell that is pulled; None: it is nobody's contribution alone."""
    if plan.shape != "stripes":
        return None
    if cell.part >= MEMBER:
        members: tuple[int, ...] = (plan.order[cell.part - MEMBER],)
    elif cell.part == CONTRIBUTION:
        members = given[cell.node]
    else:
        return None
    return SlotName(cell.node, *bounds, members)
