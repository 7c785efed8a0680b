"""One plan of several nodes, as far as one of them takes part: what it keeps until the end.

Why it exists: whoever makes cells for a plan and whoever watches them share this.
It must never know: how cells are made, when a plan is over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hoplite_mp.node.ground import Ground

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.given import Given
    from hoplite_mp.node.links import Key
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
    views: dict[int, memoryview] = field(default_factory=dict)  # members here, pinned
    given: dict[int, Given] = field(default_factory=dict)  # those that are still being written
    ground: Ground = field(default_factory=Ground)
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
    begun_ns: int = field(default_factory=time.monotonic_ns)  # when this node heard of the plan
    reported: bool = False  # that this node has what it is to have
    measured: bool = False  # its bytes are counted
    done: Callable[[str], None] | None = None  # not the manager's: who hears of the end instead

    def come(self, index: int, begin: int, nbytes: int) -> bool | int:
        """Which bytes of a member here are there: True for all, or how many from `begin` on."""
        given = self.given.get(index)
        return True if given is None else given.watermark(begin, nbytes)

    def follow(self, index: int, cell: int, begin: int, nbytes: int) -> None:
        """The cell lies in those bytes of a member here, and advances with them."""
        if index in self.given:
            self.given[index].cells[cell] = begin, nbytes
