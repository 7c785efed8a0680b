"""The state of one Group on one node: its board and, for a Group over several hosts, its next call.

The state is separate from the protocol that changes it (`group_calls.py`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._node.groups.call_state import CallState
from hoplite_mp._node.groups.repeated_plans import RepeatedPlans

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import _tasks
    from hoplite_mp._node.groups.call_state import NodeAttempt
    from hoplite_mp._node.groups.leader import GroupLeader
    from hoplite_mp._protocol.group_calls import GroupAttempt, GroupCommit, GroupMessage
    from hoplite_mp._protocol.local import GroupCall
    from hoplite_mp._protocol.messages import GroupMembers

__all__ = [
    "CommitBackend",
    "GroupCallsEvents",
    "GroupState",
    "Known",
    "MemberCall",
    "PendingMessages",
    "Steps",
]


class Steps:
    """The steps of a node in calls of Groups. A message of a node to itself is delivered when the
    present step is over, so that steps are never nested."""

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
            # After an exception the step's messages must not become part of another step.
            self._own.clear()
            self._is_running = False


# The number of Groups whose messages are kept before the manager has announced the Group. Messages
# of closed Groups, which may arrive late, are kept, too, and need a bound.
PENDING_GROUPS_MAX = 64


class PendingMessages:
    """Messages from other nodes about Groups that the manager has not announced here yet.
    messages_max: for each Group; None: without a bound."""

    def __init__(self, messages_max: int | None = None) -> None:
        self._messages_max = messages_max
        self._by_generation: dict[int, list[tuple[int, Any]]] = {}

    def add(self, node: int, message: Any) -> None:
        """Keeps a message of a node."""
        found = self._by_generation.setdefault(message.generation, [])
        found.append((node, message))
        while len(self._by_generation) > PENDING_GROUPS_MAX:
            del self._by_generation[next(iter(self._by_generation))]
        if self._messages_max is not None:
            del found[: -self._messages_max]

    def take(self, generation: int) -> list[tuple[int, Any]]:
        """Removes and returns the messages about a Group, as (node, message)."""
        return self._by_generation.pop(generation, [])

    def lose_node(self, node: int) -> None:
        """Drops the messages of a node that is gone, because the number of a Group that only this
        node knew may be given to another Group."""
        for found in self._by_generation.values():
            found[:] = [one for one in found if one[0] != node]


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
class MemberCall:
    """A member's undecided call, on its own node."""

    ask: GroupCall
    slot: int  # client slot of the member's process; -1: the member has left
    holds: list[Any]  # on the member's parts


@dataclass(slots=True)
class GroupState(CallState):
    """A Group over several hosts on this node."""

    known: Known = field(kw_only=True)  # its board
    leading: GroupLeader = field(init=False)
    member_calls: dict[int, MemberCall] = field(default_factory=dict)  # by rank
    # Holds on parts of the next call from members that are gone.
    left: list[Any] = field(default_factory=list)
    result: list[Any] = field(default_factory=list)  # holds on the last result
    # Rank here -> its blocks of the last result.
    given_blocks: dict[int, list[int]] = field(default_factory=dict)
    # FROZEN: actions for when the engine has given the calls back.
    deferred: list[Callable[[], None]] = field(default_factory=list)
    deferred_calls: list[MemberCall] = field(default_factory=list)  # calls that wait in `deferred`
    plans: RepeatedPlans = field(default_factory=RepeatedPlans)

    def end_call(self, calls: int) -> None:
        """Records that this many calls are over."""
        CallState.end_call(self, calls)
        self.leading.committed()

    def asks(self, node: int) -> list[GroupCall] | None:
        """The next call of each member here; None if a member has not made it, or there is no
        member."""
        ranks = self.ranks_of(node)
        called = [self.member_calls[rank] for rank in ranks if rank in self.member_calls]
        asks = [one.ask for one in called if one.ask.call == self.calls]
        return asks if asks and len(asks) == len(ranks) else None


class CommitBackend(Protocol):
    """The part of a node that commits the calls of a Group: through the leading node, or through
    the engines."""

    def called(self, state: GroupState, called: MemberCall) -> None:
        """A member on this host has made its next call."""

    def changed(self, state: GroupState, members: GroupMembers) -> None:
        """The manager has announced a new version of the members."""

    def received(self, state: GroupState, node: int, message: GroupAttempt | GroupCommit) -> None:
        """A node has sent an attempt or a decision."""

    def moved(self, state: GroupState, go: GroupAttempt, failure: str, error: str) -> None:
        """This node has its bytes of an attempt, or cannot have them."""


class GroupCallsEvents(Protocol):
    """The calls of all Groups on a node, as `MultiHostCalls` offers them to its components."""

    steps: Steps
    states: dict[int, GroupState]

    def backend(self, state: GroupState) -> CommitBackend:
        """The present commit backend of the Group."""

    def change(self, state: GroupState, members: GroupMembers) -> None:
        """Takes part with the new members."""

    def take(self, node: int, message: GroupMessage) -> None:
        """Handles a message from a node in the present step."""

    def move(self, state: GroupState, attempt: NodeAttempt) -> None:
        """Moves the bytes of an attempt."""

    def conclude(self, state: GroupState, given: GroupCommit, *, on_board: bool) -> None:
        """Ends a call."""

    def member_called(self, slot: int, ask: GroupCall) -> None:
        """A member on this host has made its next call."""

    def resume(self, state: GroupState) -> None:
        """Goes on with the next call."""

    def send(self, state: GroupState, node: int, message: GroupMessage) -> None:
        """Sends a message to a node."""
