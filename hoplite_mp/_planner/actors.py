"""Which actor has which name: the first actor that claims it, until its node reports that actor's
end.

Names are the only thing about actors that a cluster decides. The identity of an actor contains its
node, and any process that has a ref to an actor may call it.

Invariant: no two living actors have the same name. After the death of a manager each node states
again which names its actors have (a claim without a request). The next manager records these before
it answers any claim that is still open.

When a node dies, an actor that may be restarted on another host keeps its name until it is decided
whether another node restarts it (_planner/owners.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hoplite_mp._protocol.actors import ActorNameHeld

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._planner.step_result import Send
    from hoplite_mp._protocol.actors import (
        ActorNameAsked,
        ActorNameClaimed,
        ActorNameReleased,
    )

__all__ = ["ActorNames"]


class _Holder(NamedTuple):
    """The actor that has a name, and its node. `moves`: another host may restart the actor."""

    node: int
    identity: bytes
    moves: bool


class ActorNames:
    """All names of living actors."""

    def __init__(self) -> None:
        self._held: dict[str, _Holder] = {}

    def claim(self, message: ActorNameClaimed) -> list[Send]:
        """Gives the name to the claimant if no other actor has it, and answers which one has it."""
        name = message.name
        claimed = _Holder(message.node, message.identity, message.moves)
        if not message.request:
            self._held[name] = claimed
            return []
        holder = self._held.setdefault(name, claimed)
        return [(message.node, ActorNameHeld(message.request, name, holder.identity))]

    def ask(self, message: ActorNameAsked) -> list[Send]:
        held = self._held.get(message.name)
        identity = None if held is None else held.identity
        return [(message.node, ActorNameHeld(message.request, message.name, identity))]

    def release(self, message: ActorNameReleased) -> list[Send]:
        for name in [message.name] if message.name else list(self._held):
            held = self._held.get(name)
            if held is not None and held.identity == message.identity:
                del self._held[name]
        return []

    def lose_node(self, node: int) -> None:
        """The names of the node's actors are free, except of actors that may be restarted
        elsewhere."""
        for name, held in list(self._held.items()):
            if held.node == node and not held.moves:
                del self._held[name]

    def moved(self, lost: int, actors: dict[bytes, int]) -> None:
        """These actors of the lost node are restarted by these nodes; its others have ended."""
        for name, held in list(self._held.items()):
            if held.node == lost:
                if held.identity in actors:
                    self._held[name] = held._replace(node=actors[held.identity])
                else:
                    del self._held[name]

    def keep_only(self, is_decided_on: Callable[[int], bool]) -> None:
        """For a new manager: frees the names of nodes that neither live nor will be decided on (see
        `moved`). A node that keeps the state of such an actor may have stated the name for it."""
        for name, held in list(self._held.items()):
            if not is_decided_on(held.node):
                del self._held[name]
