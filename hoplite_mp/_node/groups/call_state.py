"""The next call of a Group on one node: its phases, the events between them, and its state.

A node has two roles in a Group. Every node is a *follower*, which takes part with its own members.
The node of the lowest living rank is also the *leader*, which decides the calls. Every node can
become the leader. A table for each role lists all legal events. Messages from other nodes are
checked before they become events, so an event that is missing from the table is a bug of this node,
and raises IllegalCallEvent.

    IDLE ─► COLLECTING ─► PLANNED ─► COMMITTING ─► IDLE ...      FROZEN: no call is decided
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from hoplite_mp._node.groups.group_decisions import is_repeated, version_of
from hoplite_mp._protocol.group_calls import DECISION_REPEATED_BYTES_MAX, bytes_of

if TYPE_CHECKING:
    from hoplite_mp._node.store.growing_block import GrowingBlock
    from hoplite_mp._protocol.group_calls import GroupAttempt, GroupCommit, Plan
    from hoplite_mp._protocol.messages import GroupMembers

__all__ = [
    "FOLLOWER",
    "LEADER",
    "CallEvent",
    "CallPhase",
    "CallState",
    "IllegalCallEvent",
    "NodeAttempt",
    "PhaseOfCall",
    "Prepared",
    "Vote",
]


class CallPhase(enum.Enum):
    """The phase of a Group's next call, for one role of one node."""

    # Follower: some member here has not made the call. Leader: no contribution has arrived.
    IDLE = "idle"
    # Follower: this node has sent its contributions. Leader: some contributions have arrived.
    COLLECTING = "collecting"
    PLANNED = "planned"  # an attempt is moving the bytes
    # Follower: this node has received all its bytes or failed to. Leader: the decision is sent.
    COMMITTING = "committing"
    # Follower: this node has asked the engine, which may commit calls without Python, to give the
    # calls back. Leader: some nodes have not sent a GroupSync, or another node leads.
    FROZEN = "frozen"
    ENDED = "ended"  # all members have left or died


class CallEvent(enum.Enum):
    """An event of the next call."""

    PART = "contributions are sent or received"
    ATTEMPT = "an attempt to move the bytes begins"
    GIVEN_UP = "the attempt ends without a decision"
    MOVED = "this node has received its bytes, or has failed to receive them"
    DECIDED = "the decision is sent"
    COMMITTED = "the call is over on this node, or is skipped"
    CHANGED = "the members change, or a node sends another GroupSync"
    FROZE = "this node asks the engine to give the calls back"
    THAWED = "the engine has given the calls back, or all nodes have sent a GroupSync"
    CLOSED = "the Group has ended"


Table: TypeAlias = dict[CallPhase, dict[CallEvent, CallPhase]]
_P, _E = CallPhase, CallEvent
_ENDS = {_E.COMMITTED: _P.IDLE, _E.CLOSED: _P.ENDED}
_CHANGES = {_E.CHANGED: _P.IDLE}  # this node has to send its contributions again
_ENGINE = {_E.FROZE: _P.FROZEN, _E.THAWED: _P.IDLE}  # the engine may own the calls
# The engine or an earlier leader may commit a call before the freeze reaches it.
_STILL = {_E.COMMITTED: _P.FROZEN, _E.CLOSED: _P.ENDED}
_OVER = {_E.COMMITTED: _P.ENDED}

FOLLOWER: Table = {
    _P.IDLE: {_E.PART: _P.COLLECTING, _E.ATTEMPT: _P.PLANNED} | _ENDS | _CHANGES | _ENGINE,
    _P.COLLECTING: {_E.ATTEMPT: _P.PLANNED} | _ENDS | _CHANGES,
    _P.PLANNED: (
        {_E.PART: _P.PLANNED, _E.ATTEMPT: _P.PLANNED, _E.MOVED: _P.COMMITTING}
        | _ENDS | _CHANGES | _ENGINE
    ),
    _P.COMMITTING: (
        {_E.PART: _P.COMMITTING, _E.ATTEMPT: _P.PLANNED} | _ENDS | _CHANGES | _ENGINE
    ),
    _P.FROZEN: (
        {_E.ATTEMPT: _P.FROZEN, _E.MOVED: _P.FROZEN, _E.FROZE: _P.FROZEN, _E.THAWED: _P.IDLE}
        | _STILL
    ),
    _P.ENDED: _OVER,
}  # fmt: skip

_AGAIN = {_E.CHANGED: _P.FROZEN}  # the call is decided again
LEADER: Table = {
    _P.IDLE: {_E.PART: _P.COLLECTING} | _ENDS | _AGAIN,
    _P.COLLECTING: (
        {_E.PART: _P.COLLECTING, _E.ATTEMPT: _P.PLANNED, _E.DECIDED: _P.COMMITTING}
        | _ENDS | _AGAIN
    ),
    _P.PLANNED: (
        {_E.ATTEMPT: _P.PLANNED, _E.GIVEN_UP: _P.COLLECTING, _E.DECIDED: _P.COMMITTING}
        | _ENDS | _AGAIN
    ),
    _P.COMMITTING: _ENDS | _AGAIN,  # the next event is the leader's commit message to itself
    _P.FROZEN: {_E.THAWED: _P.IDLE} | _STILL | _AGAIN,
    _P.ENDED: _OVER,
}  # fmt: skip


class IllegalCallEvent(Exception):
    """The table has no such transition, which is a bug of this node."""


class PhaseOfCall:
    """The phase of the next call in one role."""

    __slots__ = ("_table", "now")

    def __init__(self, table: Table) -> None:
        self._table = table
        self.now = CallPhase.FROZEN if table is LEADER else CallPhase.IDLE

    def take(self, event: CallEvent) -> None:
        """Enters the phase that follows the event."""
        after = self._table[self.now].get(event)
        if after is None:
            raise IllegalCallEvent(f"{event.name} while {self.now.name}")
        self.now = after


@dataclass(slots=True)
class Prepared:
    """The result of a call that is not committed yet. Its blocks belong to the execution of the
    call's plan, or are contributions of members."""

    oid: int = 0  # the object that members will read
    holds: list[Any] = field(default_factory=list)
    # payload offset of a block -> the rank that will receive the block
    blocks: dict[int, int] = field(default_factory=dict)
    # contributions of members here that return to the same members with the result
    sources: list[GrowingBlock] = field(default_factory=list)


@dataclass(slots=True)
class Vote:
    """This node's vote for an attempt that the node has begun without the leader, while the engine
    owns (commits) the calls."""

    made_for: int  # the call for which the attempt's plan was made
    commit: GroupCommit  # the decision if all nodes vote for it
    # How the transfers to this node ended: (reason, kind of error) if they failed, else ("", "").
    ended: tuple[str, str] | None = None
    prepared: Prepared | None = None  # the result, once its blocks are known
    # Rank -> (client slot, its generation), for the members here that will read the result.
    members: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class NodeAttempt:
    """One node's share in an attempt at a call."""

    go: GroupAttempt
    awaiting_local: bool = False  # the attempt is waiting for the calls of members on this node
    vote: Vote | None = None  # None: the leading node decides
    # Total bytes (sent, received) by this host before the first attempt at the call began to move
    # bytes, or None if no attempt has begun.
    moved: tuple[int, int] | None = None

    @property
    def version(self) -> int:
        """The version of the members for which the attempt is made."""
        return version_of(self.go.attempt)

    def is_for(self, call: int, attempt: int) -> bool:
        """Whether this is the attempt with that number at that call."""
        return (self.go.call, self.go.attempt) == (call, attempt)


@dataclass(slots=True)
class CallState:
    """This node's view of the next call of a Group over several hosts."""

    members: GroupMembers
    calls: int = 0  # number of decided calls, and so the next call's number
    phase: PhaseOfCall = field(default_factory=lambda: PhaseOfCall(FOLLOWER))
    part_sent: bool = False  # this node has sent its contributions to the leading node
    # In the phases IDLE and COLLECTING, this attempt is for an earlier version of the members.
    attempt: NodeAttempt | None = None
    # An attempt at a later call, begun by the leader before this node received a commit.
    ahead: GroupAttempt | None = None
    # A commit that another node has forwarded, while this node's share of the result is still on
    # its way from the deciding node.
    pending_commit: GroupCommit | None = None
    owned: bool = False  # the engine owns the calls, so `calls` and `last` may lag behind
    last: GroupCommit | None = None  # the last decision
    # (leading node, `calls`) when this node last sent a large `last`
    handed: tuple[int, int] | None = None
    # Rank -> its first call, for the ranks on this node, and on the leading node for all ranks.
    starts: dict[int, int] = field(default_factory=dict)
    # A cache of `expected`, valid once every rank takes part in all further calls.
    _known: tuple[GroupMembers, list[int]] | None = None

    def begin(self, go: GroupAttempt, vote: Vote | None = None) -> NodeAttempt:
        """Replaces the attempt with another one."""
        before = self.attempt
        moved = before.moved if before is not None and before.go.call == go.call else None
        self.attempt = NodeAttempt(go, vote=vote, moved=moved)
        return self.attempt

    @property
    def vote(self) -> Vote | None:
        """The vote for the present attempt."""
        return None if self.attempt is None else self.attempt.vote

    def end_call(self, calls: int) -> None:
        """Records that this many calls are over."""
        self.calls, self.part_sent = calls, False
        self.phase.take(CallEvent.COMMITTED)

    def ranks_of(self, node: int) -> list[int]:
        """The ranks on a node that take part in the next call."""
        return [rank for rank in self.expected() if self.members.nodes[rank] == node]

    def ranks_at(self, node: int) -> dict[int, int]:
        """The first calls of ranks on a node, as far as they are known."""
        nodes = self.members.nodes
        return {rank: call for rank, call in self.starts.items() if nodes[rank] == node}

    def expected(self) -> list[int]:
        """The ranks that take part in the next call, as far as this node knows."""
        known = self._known
        if known is not None and known[0] is self.members:
            return known[1]
        found = sorted(rank for rank, start in self.starts.items() if start <= self.calls)
        # Once all members have started, `found` stays the same until the members change.
        if len(found) == len(self.starts):
            self._known = self.members, found
        return found

    def last_for(self, leader: int) -> GroupCommit | None:
        """The last decision, or None if it is large and this leading node already has it. A large
        decision is sent only once, because many members may leave one after another."""
        if self.last is None or bytes_of(self.last.pieces) <= DECISION_REPEATED_BYTES_MAX:
            return self.last
        before, self.handed = self.handed, (leader, self.calls)
        return self.last if before != self.handed else None

    def start(self, rank: int, call: int) -> None:
        """Records the first call of a rank."""
        self.starts[rank] = call
        self._known = None

    @property
    def unstarted(self) -> list[int]:
        """The ranks of members whose first call is not known yet."""
        both = self.members.alive | self.members.joining
        return [r for r in range(self.members.size) if both >> r & 1 and r not in self.starts]

    @property
    def nodes(self) -> set[int]:
        """The nodes of all members, including joining ones."""
        return {node for node in self.members.nodes if node is not None}

    @property
    def knowing(self) -> set[int]:
        """Nodes that may have received a decision, because they have or had a member."""
        return self.nodes.union(self.members.former)

    @property
    def attempted(self) -> Plan | None:
        """The plan of the attempt at the next call, if there is one."""
        go = None if self.attempt is None else self.attempt.go
        return go.plans[0] if go is not None and go.call == self.calls and go.plans else None

    @property
    def begun_as_repeated(self) -> GroupAttempt | None:
        """The attempt at the next call that this node has begun with a repeated plan."""
        go = None if self.attempt is None else self.attempt.go
        if go is None or go.call != self.calls or not is_repeated(go.attempt):
            return None
        return go if version_of(go.attempt) == self.members.version else None

    @property
    def is_one_each(self) -> bool:
        """Whether each node has at most one member."""
        places = [node for node in self.members.nodes if node is not None]
        return len(set(places)) == len(places)

    def lacks(self, node: int, message: GroupCommit) -> bool:
        """Whether the commit was forwarded by a node other than the deciding one, and lacks this
        node's share of the result."""
        if message.to == node or message.whole or message.error:
            return False
        here = self.here(node, message)
        if message.kind in ("reduce", "gather"):
            return message.root in here
        return bool(here)

    def here(self, node: int, message: GroupCommit) -> list[int]:
        """The ranks of a decided call whose members are on the node, excluding members that joined
        after the call."""
        own = self.ranks_at(node)
        return [r for r in message.ranks if r in own and own[r] <= message.call]

    @property
    def leader(self) -> int | None:
        """The leading node, which is the node of the lowest living rank. None if no rank is
        alive."""
        rank = self.members.leader
        return None if rank is None else self.members.nodes[rank]
