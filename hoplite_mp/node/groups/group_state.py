"""One Group as one node knows it: its board; if it is over several hosts, members, their undecided
call, what the leading node collects.

Why it exists: what is known is apart from what is done about it, so that both can be read.
It must never know: messages' ways, the store, time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hoplite_mp import _tasks
    from hoplite_mp.node.groups.group_decisions import Outcome
    from hoplite_mp.planner.topology import Host
    from hoplite_mp.protocol.group_calls import (
        GroupCommit,
        GroupGo,
        GroupPart,
        GroupSync,
        Plan,
    )
    from hoplite_mp.protocol.local import GroupCall
    from hoplite_mp.protocol.messages import GroupMembers

__all__ = ["InProgress", "Known", "MemberCall", "State"]


@dataclass(slots=True)
class Known:
    """A Group of which a member is on this host."""

    name: str
    generation: int
    board: _tasks.Board
    shown: GroupMembers  # the manager's latest word
    here: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank -> slot, generation
    left: set[int] = field(default_factory=set)  # shown as held here, by who has gone
    died: set[int] = field(default_factory=set)  # those of them who have not left
    hold: Any = None  # of a committed result whose leader has died
    held_call: int = 0


@dataclass(slots=True)
class InProgress:
    """A decided call whose bytes are moving, as the leading node sees it."""

    call: int
    attempt: int
    outcome: Outcome
    waiting: set[int]  # nodes that are not done yet
    missing: set[int] = field(default_factory=set)  # ranks that have not called yet


@dataclass(slots=True)
class MemberCall:
    """The undecided call of a member here."""

    ask: GroupCall
    slot: int  # of its process
    holds: list[Any]  # on what it gives


@dataclass(slots=True)
class State:
    """One group over several hosts, as this node knows it."""

    members: GroupMembers
    known: Known  # its board
    calls: int = 0  # decided ones; the number of the next
    member_calls: dict[int, MemberCall] = field(default_factory=dict)  # by rank
    left: list[Any] = field(default_factory=list)  # what those gave to the next call who are gone
    last_part: tuple[int, int] | None = None  # (version, call) of the last GroupPart
    last: GroupCommit | None = None
    result: list[Any] = field(default_factory=list)  # holds on the last result
    # rank -> its first call: those of this node, and as the leading node also those of others.
    starts: dict[int, int] = field(default_factory=dict)
    go: GroupGo | None = None
    awaiting_local: bool = False  # `go` waits for members of this node
    # As the leading node only.
    parts: dict[int, GroupPart] = field(default_factory=dict)  # node -> its undecided call
    synced: set[int] = field(default_factory=set)
    syncs: dict[int, GroupSync] = field(default_factory=dict)  # node -> its latest
    in_progress: InProgress | None = None
    attempts: int = 0
    rates: dict[int, Host] = field(default_factory=dict)  # node -> as it has said itself
    _known: tuple[GroupMembers, list[int]] | None = None  # who takes part in all calls
    waited: int = -1  # the call for whose last members there is a timer
    # Decided; what is picked for this node is still on its way from the one that has decided it.
    owed: GroupCommit | None = None

    def ranks_of(self, node: int) -> list[int]:
        """The ranks at a node that take part in the next call."""
        return [rank for rank in self.expected() if self.members.nodes[rank] == node]

    def ranks_at(self, node: int) -> dict[int, int]:
        """The ranks at a node that take part in some call: the first one of each."""
        nodes = self.members.nodes
        return {rank: call for rank, call in self.starts.items() if nodes[rank] == node}

    def expected(self) -> list[int]:
        """The ranks that take part in the next call, as far as this node knows."""
        known = self._known
        if known is not None and known[0] is self.members:
            return known[1]
        found = sorted(rank for rank, start in self.starts.items() if start <= self.calls)
        if len(found) == len(self.starts):  # and it stays so until the members change
            self._known = self.members, found
        return found

    def start(self, rank: int, call: int) -> None:
        """The first call of a rank."""
        self.starts[rank] = call
        self._known = None

    @property
    def unstarted(self) -> list[int]:
        """Members of whose first call nobody has said anything."""
        both = self.members.alive | self.members.joining
        return [r for r in range(self.members.size) if both >> r & 1 and r not in self.starts]

    @property
    def nodes(self) -> set[int]:
        """Where members live, joining ones too."""
        return {node for node in self.members.nodes if node is not None}

    @property
    def knowing(self) -> set[int]:
        """Who may know of a decision: nodes that have a member, or had one."""
        return self.nodes.union(self.members.former)

    @property
    def attempted(self) -> Plan | None:
        """By which the next call was begun already."""
        go = self.go
        return go.plans[0] if go is not None and go.call == self.calls and go.plans else None

    @property
    def leader(self) -> int | None:
        """The leading node; None: nobody counts yet."""
        rank = self.members.leader
        return None if rank is None else self.members.nodes[rank]
