"""The planner: messages and time in, plans out. Everything the cluster decides passes here.

`step` takes one message of a node, `tick` the passing of time; both return a Plan, and that is all
they do. The same messages at the same times give the same plans, in a manager, in a simulation and
in a test. A message that comes too late, doubled, or from a life that is over gives an empty plan,
never an exception: whoever speaks out of turn does not end the cluster.

This module must never know how messages arrive, what time it really is, or how many processes
stand behind a node. It only says which room of the planner decides about which message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.planner.group import Groups
from hoplite_mp.planner.membership import Membership
from hoplite_mp.planner.plan import Plan
from hoplite_mp.planner.reduce import Reductions
from hoplite_mp.protocol.messages import (
    ClientLost,
    ExecutionFailed,
    GroupAdmitted,
    GroupJoinRequested,
    GroupLeft,
    NodeJoined,
    NodeLost,
    OperationDropped,
    ReduceRequested,
    SourceFailed,
    SourceReady,
    StripesComplete,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.planner.plan import Send
    from hoplite_mp.protocol.messages import NodeToManager

# Groups at one time: as many as there are boards in a node's shared memory.
BOARDS_MAX = 64
# Collectives under way at one time. Higher: more memory for callers that never wait for results.
OPERATIONS_MAX = 1 << 16


class Planner:
    """All that a manager knows, and what follows from it."""

    def __init__(
        self, *, boards_max: int = BOARDS_MAX, operations_max: int = OPERATIONS_MAX
    ) -> None:
        self.membership = Membership()
        self.reductions = Reductions(operations_max)
        self.groups = Groups(boards_max)

    def step(self, message: NodeToManager, now: float) -> Plan:
        """What follows from one message that came at `now`."""
        sends = _HANDLERS[type(message)](self, message, now)
        return Plan(tuple(sends), self.reductions.wake_at)

    def tick(self, now: float) -> Plan:
        """What follows from its being `now`."""
        return Plan(tuple(self.reductions.tick(now)), self.reductions.wake_at)

    # ---- who is there

    def _node_joined(self, message: NodeJoined, now: float) -> list[Send]:
        if not self.membership.is_joining(message.node, message.incarnation):
            return []
        # A host that comes back before its end was noticed: the end comes first.
        sends = self._end(message.node) if self.membership.is_living(message.node) else []
        self.membership.join(message.node, message.incarnation)
        return sends

    def _node_lost(self, message: NodeLost, now: float) -> list[Send]:
        if not self.membership.is_living(message.node, message.incarnation):
            return []
        return self._end(message.node)

    def _end(self, node: int) -> list[Send]:
        self.membership.lose(node)
        self.reductions.lose_node(node)
        return self.groups.lose_node(node)

    def _client_lost(self, message: ClientLost, now: float) -> list[Send]:
        if not self.membership.is_living(message.node):
            return []
        self.membership.lose_client(message.node, message.client, message.generation)
        return self.groups.lose_client(message.node, message.client, message.generation)

    # ---- collectives

    def _reduce_requested(self, message: ReduceRequested, now: float) -> list[Send]:
        # The caller may die at once: its result may have other holders, so the node decides
        # whether anybody still wants it, and says OperationDropped.
        if not self.membership.is_living(message.node):
            return []
        return self.reductions.request(message, now)

    def _operation(
        self,
        message: (
            SourceReady | SourceFailed | StripesComplete | ExecutionFailed | OperationDropped
        ),
        now: float,
    ) -> list[Send]:
        return self.reductions.step(message)

    # ---- groups

    def _group_join(self, message: GroupJoinRequested, now: float) -> list[Send]:
        caller = (message.node, message.client, message.client_generation)
        if not self.membership.is_living(message.node) or self.membership.is_client_gone(*caller):
            return []
        return self.groups.join(message)

    def _group_admitted(self, message: GroupAdmitted, now: float) -> list[Send]:
        return self.groups.admit(message)

    def _group_left(self, message: GroupLeft, now: float) -> list[Send]:
        return self.groups.leave(message)


# Typed loosely because each row takes the one message that its key names.
_HANDLERS: dict[type, Callable[[Planner, Any, float], list[Send]]] = {
    NodeJoined: Planner._node_joined,
    NodeLost: Planner._node_lost,
    ClientLost: Planner._client_lost,
    ReduceRequested: Planner._reduce_requested,
    SourceReady: Planner._operation,
    SourceFailed: Planner._operation,
    StripesComplete: Planner._operation,
    ExecutionFailed: Planner._operation,
    OperationDropped: Planner._operation,
    GroupJoinRequested: Planner._group_join,
    GroupAdmitted: Planner._group_admitted,
    GroupLeft: Planner._group_left,
}
