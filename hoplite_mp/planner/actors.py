"""Which actor has which name: the first to claim it, until its node says that it has ended.

Names are all that a cluster decides about actors. Where they are is told by their identities, and
who may call them by the refs to those.

Invariant: no two living actors have the same name. After the death of a manager each node states
again which names its actors have (a claim without a request); the next manager takes up these
before it answers any claim that is still open.

This module must never know what an actor is, nor how it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.protocol.actor_names import ActorNameHeld

if TYPE_CHECKING:
    from hoplite_mp.planner.plan import Send
    from hoplite_mp.protocol.actor_names import (
        ActorNameAsked,
        ActorNameClaimed,
        ActorNameReleased,
    )

__all__ = ["ActorNames"]


class ActorNames:
    """All names of living actors."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, bytes]] = {}  # name -> node, identity

    def claim(self, message: ActorNameClaimed) -> list[Send]:
        """Gives the name to the claimant if nobody has it."""
        name, identity = message.name, message.identity
        if not message.request:
            self._held[name] = (message.node, identity)
            return []
        _, holder = self._held.setdefault(name, (message.node, identity))
        return [(message.node, ActorNameHeld(message.request, name, holder))]

    def ask(self, message: ActorNameAsked) -> list[Send]:
        held = self._held.get(message.name)
        identity = None if held is None else held[1]
        return [(message.node, ActorNameHeld(message.request, message.name, identity))]

    def release(self, message: ActorNameReleased) -> list[Send]:
        held = self._held.get(message.name)
        if held is not None and held[1] == message.identity:
            del self._held[message.name]
        return []

    def lose_node(self, node: int) -> None:
        """Its actors are gone, and their names free."""
        self._held = {name: held for name, held in self._held.items() if held[0] != node}
