"""The other living nodes of the cluster, as far as this node knows; none in a cluster of one host.

Why it exists: most rooms only need to know which nodes there are, not how to reach them.
It must never know: connections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hoplite_mp._protocol.messages import Member

__all__ = ["Roster"]


class Roster:
    """The members by host id, and by node number."""

    def __init__(self) -> None:
        self.by_host_id: dict[int, Member] = {}
        self.by_number: dict[int, Member] = {}
        self.leaving: set[int] = set()  # ids of hosts whose nodes have announced that they leave
        self.leaves = False  # this node itself is leaving the cluster

    def add(self, member: Member) -> None:
        self.by_host_id[member.host_id] = self.by_number[member.node] = member

    def remove(self, number: int) -> None:
        member = self.by_number.pop(number, None)
        if member is not None:
            del self.by_host_id[member.host_id]
            self.leaving.discard(member.host_id)

    @property
    def host_ids(self) -> list[int]:
        """Host ids of all members."""
        return list(self.by_host_id)

    def number_of(self, host_id: int) -> int | None:
        """The number of that host's node; None: it is no member."""
        member = self.by_host_id.get(host_id)
        return None if member is None else member.node
