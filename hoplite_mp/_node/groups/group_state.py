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
    """Runs the steps (handlers of one event) of a node in Group calls. A node's message to itself
    is delivered after the present step, so that steps are never nested."""

    def __init__(self, deliver: Callable[[GroupMessage], None]) -> None:
        self._deliver = deliver
        self._own: deque[GroupMessage] = deque()
        self._is_running = False

    def send(self, message: GroupMessage) -> None:
        """Queues a message from this node to itself."""
        self._own.append(message)

    def run(self, step: Callable[..., None], *about: Any) -> None:
        """Runs a step, or a part of the present step."""
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


# The number of unannounced Groups whose messages are kept. The bound is necessary because late
# messages about closed Groups are kept, too.
PENDING_GROUPS_MAX = 64


class PendingMessages:
    """Messages from other nodes about Groups that the manager has not yet announced to this node.
    messages_max: maximum number for each Group; None: no limit."""

    def __init__(self, messages_max: int | None = None) -> None:
        self._messages_max = messages_max
        self._by_generation: dict[int, list[tuple[int, Any]]] = {}

    def add(self, node: int, message: Any) -> None:
        """Keeps a message from a node."""
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
        """Drops the messages from a lost node. If only that node knew their Group, another Group
        may receive the same generation number, and must not receive these messages."""
        for found in self._by_generation.values():
            found[:] = [one for one in found if one[0] != node]


@dataclass(slots=True)
class Known:
    """A Group that has or had a member on this host."""

    name: str
    generation: int
    board: _tasks.Board
    shown: GroupMembers  # the members that the manager announced last
    # Rank -> (client slot, its generation).
    here: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Ranks that `shown` places on this host although their members have left or died.
    left: set[int] = field(default_factory=set)
    # The ranks in `left` whose members died.
    died: set[int] = field(default_factory=set)
    hold: Any = None  # a hold on a committed result whose leader has left or died
    held_call: int = 0  # the call with that result


@dataclass(slots=True)
class MemberCall:
    """A member's undecided call, on the member's node."""

    ask: GroupCall
    slot: int  # client slot of the member's process; -1: the member has left
    holds: list[Any]  # holds on the member's contributions


@dataclass(slots=True)
class GroupState(CallState):
    """The state of a Group over several hosts on this node."""

    known: Known = field(kw_only=True)
    leading: GroupLeader = field(init=False)
    member_calls: dict[int, MemberCall] = field(default_factory=dict)  # by rank
    # Holds on contributions to the next call from members that have left or died.
    left: list[Any] = field(default_factory=list)
    result: list[Any] = field(default_factory=list)  # holds on the last result
    # Rank of a member here -> the blocks of the last result that the member received.
    given_blocks: dict[int, list[int]] = field(default_factory=dict)
    # FROZEN: actions to run when the engine has given the calls back.
    deferred: list[Callable[[], None]] = field(default_factory=list)
    # calls for which an action in `deferred` is waiting
    deferred_calls: list[MemberCall] = field(default_factory=list)
    plans: RepeatedPlans = field(default_factory=RepeatedPlans)

    def end_call(self, calls: int) -> None:
        """Records that this many calls are over."""
        CallState.end_call(self, calls)
        self.leading.committed()

    def asks(self, node: int) -> list[GroupCall] | None:
        """The next call by each member here, or None if a member has not made it or no member is
        here."""
        ranks = self.ranks_of(node)
        called = [self.member_calls[rank] for rank in ranks if rank in self.member_calls]
        asks = [one.ask for one in called if one.ask.call == self.calls]
        return asks if asks and len(asks) == len(ranks) else None


class CommitBackend(Protocol):
    """The component that commits a Group's calls, through the leading node or the engines."""

    def called(self, state: GroupState, called: MemberCall) -> None:
        """Handles the next call by a member on this host."""

    def changed(self, state: GroupState, members: GroupMembers) -> None:
        """Handles the manager's announcement of a new version of the members."""

    def received(self, state: GroupState, node: int, message: GroupAttempt | GroupCommit) -> None:
        """Handles an attempt or a decision from a node."""

    def moved(self, state: GroupState, go: GroupAttempt, failure: str, error: str) -> None:
        """Handles the end of an attempt's transfers to this node. failure: the reason if they
        failed, else ""."""


class GroupCallsEvents(Protocol):
    """The interface of `MultiHostCalls` for its components."""

    steps: Steps
    states: dict[int, GroupState]

    def backend(self, state: GroupState) -> CommitBackend:
        """The present commit backend of the Group."""

    def change(self, state: GroupState, members: GroupMembers) -> None:
        """Continues with the new members."""

    def take(self, node: int, message: GroupMessage) -> None:
        """Handles a message from a node in the present step."""

    def move(self, state: GroupState, attempt: NodeAttempt) -> None:
        """Moves the bytes of an attempt."""

    def conclude(self, state: GroupState, given: GroupCommit, *, on_board: bool) -> None:
        """Ends a call."""

    def member_called(self, slot: int, ask: GroupCall) -> None:
        """Handles the next call by a member on this host."""

    def resume(self, state: GroupState) -> None:
        """Continues with the next call."""

    def send(self, state: GroupState, node: int, message: GroupMessage) -> None:
        """Sends a message to a node."""
