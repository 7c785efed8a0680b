"""A Group of which a member is on this host, as its node knows it.

Why it exists: the rooms for membership, calls and messages of Groups all start from it.
It must never know: any of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hoplite_mp import _tasks
    from hoplite_mp.protocol.messages import GroupMembers

__all__ = ["Known"]


@dataclass(slots=True)
class Known:
    """A group of which a member is here."""

    name: str
    generation: int
    board: _tasks.Board
    size: int = 0
    shown: GroupMembers | None = None
    here: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank -> slot, generation
    left: set[int] = field(default_factory=set)  # shown as held here, by who has gone
    died: set[int] = field(default_factory=set)  # those of them who have not left
    hold: Any = None  # of a committed result whose leader has died
    held_call: int = 0

    def leave(self, rank: int) -> None:
        """Who held this rank here is gone; the manager has yet to say so."""
        del self.here[rank]
        self.left.add(rank)
