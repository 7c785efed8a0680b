"""The names of actors. A name belongs to the first actor that claims it, until the node of this
actor reports the actor's end.

Names are the only property of actors for which the manager must decide. Calls need no decision,
because the identity of an actor contains its node, and any process with a ref may call the actor.

Invariant: no two living actors have the same name. After the death of a manager, each node claims
the names of its actors again, without expecting an answer. The next manager records these claims
before it answers any other claim.

When a node dies, an actor that may be restarted on another host keeps its name until the planner
has decided whether another node restarts the actor (_planner/owners.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hoplite_mp._protocol.actors import ActorNameReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._planner.step_result import Send
    from hoplite_mp._protocol.actors import (
        ActorNameClaimed,
        ActorNameQuery,
        ActorNameReleased,
    )

__all__ = ["ActorNames"]


class _Holder(NamedTuple):
    """The owner of a name, and its node. `can_fail_over`: another host may restart the actor."""

    node: int
    identity: bytes
    can_fail_over: bool


class ActorNames:
    """The names of all living actors."""

    def __init__(self) -> None:
        self._held: dict[str, _Holder] = {}

    def claim(self, message: ActorNameClaimed) -> list[Send]:
        """Assigns the name to the claimant if no other actor has the name. Answers with the actor
        that has it."""
        name = message.name
        claimed = _Holder(message.node, message.identity, message.can_fail_over)
        if not message.request:
            self._held[name] = claimed
            return []
        holder = self._held.setdefault(name, claimed)
        return [(message.node, ActorNameReport(message.request, name, holder.identity))]

    def ask(self, message: ActorNameQuery) -> list[Send]:
        held = self._held.get(message.name)
        identity = None if held is None else held.identity
        return [(message.node, ActorNameReport(message.request, message.name, identity))]

    def release(self, message: ActorNameReleased) -> list[Send]:
        for name in [message.name] if message.name else list(self._held):
            held = self._held.get(name)
            if held is not None and held.identity == message.identity:
                del self._held[name]
        return []

    def lose_node(self, node: int) -> None:
        """Frees the names of the node's actors, except for actors that may be restarted on another
        node."""
        for name, held in list(self._held.items()):
            if held.node == node and not held.can_fail_over:
                del self._held[name]

    def moved(self, lost: int, actors: dict[bytes, int]) -> None:
        """Records the nodes that restart the actors of a lost node. Frees the names of the lost
        node's other actors."""
        for name, held in list(self._held.items()):
            if held.node == lost:
                if held.identity in actors:
                    self._held[name] = held._replace(node=actors[held.identity])
                else:
                    del self._held[name]

    def keep_only(self, keeps_names: Callable[[int], bool]) -> None:
        """Frees the names of actors on nodes for which `keeps_names` returns False. Called by a new
        manager. The node with an actor's backup may have claimed the name for a lost node. It is
        kept until it is decided which node restarts the actor (see `moved`)."""
        for name, held in list(self._held.items()):
            if not keeps_names(held.node):
                del self._held[name]
