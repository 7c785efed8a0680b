"""The other living nodes of the cluster, as this one knows them; on one host alone there are none.

Why it exists: most rooms only want to know who is there, not how messages get there.
It must never know: connections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hoplite_mp.protocol.messages import Member

__all__ = ["Roster"]


class Roster:
    """By the id of their host, and by number."""

    def __init__(self) -> None:
        self.by_home: dict[int, Member] = {}
        self.by_number: dict[int, Member] = {}
        self.leaving: set[int] = set()  # ids of the hosts of those that have said that they leave
        self.leaves = False  # this node itself is leaving the cluster

    def add(self, member: Member) -> None:
        self.by_home[member.home] = self.by_number[member.node] = member

    def remove(self, number: int) -> None:
        member = self.by_number.pop(number, None)
        if member is not None:
            del self.by_home[member.home]
            self.leaving.discard(member.home)

    @property
    def homes(self) -> list[int]:
        """Ids of their hosts."""
        return list(self.by_home)

    def number_of(self, home: int) -> int | None:
        """Of the node of that host; None: there is none."""
        member = self.by_home.get(home)
        return None if member is None else member.node
