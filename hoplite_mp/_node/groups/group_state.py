"""The state of one Group on one node: its board and, for a Group over several hosts, its members,
their undecided calls, and what the leading node collects.

The state is kept apart from the protocol that changes it, so that each can be read by itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp._node.groups.group_decisions import ATTEMPT_BITS, is_repeated
from hoplite_mp._node.groups.repeated_plans import RepeatedPlans
from hoplite_mp._planner.repair import SlowLinks
from hoplite_mp._protocol.group_calls import DECISION_REPEATED_BYTES_MAX, bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import _tasks
    from hoplite_mp._node.groups.group_decisions import Decision
    from hoplite_mp._node.groups.group_results import Prepared
    from hoplite_mp._planner.topology import HostRates
    from hoplite_mp._protocol.group_calls import (
        GroupCommit,
        GroupDone,
        GroupGo,
        GroupMessage,
        GroupPart,
        GroupSlow,
        GroupSync,
        Plan,
    )
    from hoplite_mp._protocol.local import GroupCall
    from hoplite_mp._protocol.messages import GroupMembers

__all__ = [
    "GroupState",
    "InProgress",
    "Known",
    "MemberCall",
    "Steps",
    "Voting",
]


class Steps:
    """The steps of a node in calls of Groups. What a node sends to itself in a step is delivered
    when the step is over, so that no step begins inside another one."""

    def __init__(self, deliver: Callable[[GroupMessage], None]) -> None:
        self._deliver = deliver
        self._own: deque[GroupMessage] = deque()
        self._is_running = False

    def send(self, message: GroupMessage) -> None:
        """Queues a message of this node to itself."""
        self._own.append(message)

    def run(self, step: Callable[..., None], *about: Any) -> None:
        """Runs a step, or a part of the present one."""
        if self._is_running:
            step(*about)
            return
        self._is_running = True
        try:
            step(*about)
            while self._own:
                self._deliver(self._own.popleft())
        finally:
            self._is_running = False


@dataclass(slots=True)
class Known:
    """A Group that has, or had, a member on this host."""

    name: str
    generation: int
    board: _tasks.Board
    shown: GroupMembers  # the members that the manager announced last
    # Rank -> (client slot, its generation).
    here: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Ranks that `shown` places here although their members are gone.
    left: set[int] = field(default_factory=set)
    # The ranks in `left` whose members did not leave in order.
    died: set[int] = field(default_factory=set)
    hold: Any = None  # on a committed result whose leader has left or died
    held_call: int = 0


@dataclass(slots=True)
class InProgress:
    """A decided call whose bytes are moving, on the leading node."""

    call: int
    attempt: int
    outcome: Decision
    waiting: set[int]  # nodes that have not reported yet
    missing: set[int] = field(default_factory=set)  # ranks that have not called yet
    fills: bool = False  # it saturates every node's link, so that rates can be measured
    links: SlowLinks[GroupSlow] = field(default_factory=SlowLinks)
    narrowed: bool = False  # stripes have been changed because a link is slow
    early: bool = False  # parts of some ranks were not known when it was decided


@dataclass(slots=True)
class MemberCall:
    """A member's undecided call, on its own node."""

    ask: GroupCall
    slot: int  # client slot of the member's process; -1: the member has left
    holds: list[Any]  # on what the member gives


@dataclass(slots=True)
class Voting:
    """A call that this node has begun by itself while the engine owns the calls (voted_calls)."""

    go: GroupGo
    made_for: int  # the call for which its plan was made
    commit: GroupCommit  # what is decided if all nodes vote for it
    ended: tuple[str, str] | None = None  # (reason, kind of error) of its failure; "", "": it moved
    prepared: Prepared | None = None  # the result, once its blocks are known
    # Rank -> (client slot, its generation) of the members here that are to read it.
    members: dict[int, tuple[int, int]] = field(default_factory=dict)

    def is_for(self, version: int, call: int) -> bool:
        """Was it begun for that call of members of that version?"""
        return self.go.call == call and self.go.attempt >> ATTEMPT_BITS == version

    def is_about(self, call: int, attempt: int) -> bool:
        """Is it about this attempt at that call?"""
        return (self.go.call, self.go.attempt) == (call, attempt)


@dataclass(slots=True)
class GroupState:
    """A Group over several hosts, as this node knows it."""

    members: GroupMembers
    known: Known  # its board
    calls: int = 0  # number of decided calls, and so the next call's number
    member_calls: dict[int, MemberCall] = field(default_factory=dict)  # by rank
    # Holds on what members that are gone gave to the next call.
    left: list[Any] = field(default_factory=list)
    last_part: tuple[int, int] | None = None  # (version, call) of the last GroupPart sent
    last: GroupCommit | None = None
    handed: tuple[int, int] | None = None  # (leading node, `calls`) of the last large `last` sent
    result: list[Any] = field(default_factory=list)  # holds on the last result
    # The blocks of the last result that each rank here was given.
    given_blocks: dict[int, list[int]] = field(default_factory=dict)
    # Rank -> its first call: for ranks on this node, and on the leading node for all others, too.
    starts: dict[int, int] = field(default_factory=dict)
    # While the engine owns the calls (small_calls), `calls` and `last` may lag behind. The actions
    # in `deferred` run when the engine has given the calls back.
    owned: bool = False
    deferred: list[Callable[[], None]] = field(default_factory=list)
    deferred_calls: list[MemberCall] = field(default_factory=list)  # those that `deferred` takes up
    go: GroupGo | None = None
    voting: Voting | None = None  # what `go` was begun for
    # An attempt at a later call, which has begun without this node, while it awaits a commit.
    ahead: GroupGo | None = None
    plans: RepeatedPlans = field(default_factory=RepeatedPlans)
    # (call, bytes sent, bytes received by this host) when the first attempt at that call began
    moved: tuple[int, int, int] = (-1, 0, 0)
    awaiting_local: bool = False  # `go` cannot begin before members on this node have called
    # The fields from here to `rates` are used by the leading node only.
    # node -> its part of an undecided call
    parts: dict[int, GroupPart] = field(default_factory=dict)
    syncs: dict[int, GroupSync] = field(default_factory=dict)  # node -> its latest GroupSync
    # A node has said again what it knows of earlier calls, so the next call is decided anew.
    unsettled: bool = True
    deciding: int = -1  # the call whose decision this node has sent, also to itself
    in_progress: InProgress | None = None
    # node -> its report on a repeated plan, from before all have called, or that it gives it up
    early: dict[int, GroupDone] = field(default_factory=dict)
    attempts: int = 0
    rates: dict[int, HostRates] = field(
        default_factory=dict
    )  # node -> link rates that it has measured
    # A cache of `expected`, valid once every rank takes part in all further calls.
    _known: tuple[GroupMembers, list[int]] | None = None
    late_timer: int = -1  # the call for whose last host a timer is running
    not_early: int = -1  # the call that must not begin early, because a node has had no room for it
    # A commit that another node passed on, while this node's share of the result is still on its
    # way from the node that decided it.
    owed: GroupCommit | None = None

    def asks(self, node: int) -> list[GroupCall] | None:
        """The next call of all members of this node; None if not all have made it, or there are
        none."""
        ranks = self.ranks_of(node)
        called = [self.member_calls[rank] for rank in ranks if rank in self.member_calls]
        asks = [one.ask for one in called if one.ask.call == self.calls]
        return asks if asks and len(asks) == len(ranks) else None

    def ranks_of(self, node: int) -> list[int]:
        """The ranks on a node that take part in the next call."""
        return [rank for rank in self.expected() if self.members.nodes[rank] == node]

    def ranks_at(self, node: int) -> dict[int, int]:
        """The ranks on a node with a known first call, and that call."""
        nodes = self.members.nodes
        return {rank: call for rank, call in self.starts.items() if nodes[rank] == node}

    def expected(self) -> list[int]:
        """The ranks that take part in the next call, as far as this node knows."""
        known = self._known
        if known is not None and known[0] is self.members:
            return known[1]
        found = sorted(rank for rank, start in self.starts.items() if start <= self.calls)
        # All have started, which stays so until the members change.
        if len(found) == len(self.starts):
            self._known = self.members, found
        return found

    def last_for(self, leader: int) -> GroupCommit | None:
        """The last decision, for the leading node. A large one is sent to it once, because many
        members may leave one after another."""
        if self.last is None or bytes_of(self.last.pieces) <= DECISION_REPEATED_BYTES_MAX:
            return self.last
        before, self.handed = self.handed, (leader, self.calls)
        return self.last if before != self.handed else None

    def given(self) -> dict[int, GroupPart]:
        """By rank, the parts of the next call that have come, in that order."""
        found: dict[int, GroupPart] = {}
        for part in self.parts.values():
            if part.call == self.calls:
                found.update(dict.fromkeys(part.ranks, part))
        return found

    def start(self, rank: int, call: int) -> None:
        """Records the first call of a rank."""
        self.starts[rank] = call
        self._known = None

    @property
    def unstarted(self) -> list[int]:
        """Members whose first call is not known yet."""
        both = self.members.alive | self.members.joining
        return [r for r in range(self.members.size) if both >> r & 1 and r not in self.starts]

    @property
    def synced(self) -> set[int]:
        """Nodes that have said, for the present members, what they know of earlier calls; without
        those that know of a call of which this node does not know yet."""
        version, calls = self.members.version, self.calls
        said = self.syncs.items()
        return {n for n, one in said if one.version == version and one.committed <= calls}

    @property
    def nodes(self) -> set[int]:
        """The nodes of all members, including joining ones."""
        return {node for node in self.members.nodes if node is not None}

    @property
    def knowing(self) -> set[int]:
        """Nodes that may know of a decision, because they have, or had, a member."""
        return self.nodes.union(self.members.former)

    @property
    def attempted(self) -> Plan | None:
        """The plan of an attempt at the next call, if there was one."""
        go = self.go
        return go.plans[0] if go is not None and go.call == self.calls and go.plans else None

    @property
    def begun_as_repeated(self) -> GroupGo | None:
        """The attempt at the next call that this node has begun without being asked to."""
        go = self.go
        if go is None or go.call != self.calls or not is_repeated(go.attempt):
            return None
        return go if go.attempt >> ATTEMPT_BITS == self.members.version else None

    @property
    def is_one_each(self) -> bool:
        """Has each node one member at most?"""
        places = [node for node in self.members.nodes if node is not None]
        return len(set(places)) == len(places)

    def lacks(self, node: int, message: GroupCommit) -> bool:
        """Was it passed on by another node than the one that decided it, without this node's share
        of the result?"""
        if message.to == node or message.whole or message.error:
            return False
        here = self.here(node, message)
        if message.kind in ("reduce", "gather"):
            return message.root in here
        return bool(here)

    def here(self, node: int, message: GroupCommit) -> list[int]:
        """The ranks of a decided call whose members are on that node; not members that joined after
        it."""
        own = self.ranks_at(node)
        return [r for r in message.ranks if r in own and own[r] <= message.call]

    @property
    def leader(self) -> int | None:
        """The leading node, which has the lowest living rank; None if no rank is alive."""
        rank = self.members.leader
        return None if rank is None else self.members.nodes[rank]
