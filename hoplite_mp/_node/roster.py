"""The node's view of its cluster: whether it has joined, and the other living nodes.

Most components need only the members, not the connections to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hoplite_mp._protocol.messages import Member

__all__ = ["NodeLifecycle", "Roster"]


class Roster:
    """The members, by host id and by node number."""

    def __init__(self) -> None:
        self.by_host_id: dict[int, Member] = {}
        self.by_number: dict[int, Member] = {}
        self.leaving: set[int] = set()  # ids of hosts that have announced their departure
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
        """The number of the host's node; None if it is not a member."""
        member = self.by_host_id.get(host_id)
        return None if member is None else member.node


class NodeLifecycle:
    """The state of one node. A component that detects the end of the cluster or the exclusion of
    this host sets a flag, and the loop stops after the current turn. `alone`: the cluster has one
    host, whose node needs no number from the manager."""

    def __init__(self, alone: bool) -> None:
        self.joined = alone  # this node has joined, and knows its number
        self.stopping = False  # the current turn of the loop is the last one
        self.orderly = False  # all workers had ended before the node stopped
        self.given_up = False  # this host is alive, but excluded or cut off

    def leave(self) -> None:
        """Stops the node because it is no longer needed or the cluster has shut down. The
        supervisor then stops the host's other processes."""
        self.stopping = True

    def workers_ended(self) -> None:
        """Stops the node in an orderly shutdown, after the supervisor has stopped all workers."""
        self.stopping = self.orderly = True
