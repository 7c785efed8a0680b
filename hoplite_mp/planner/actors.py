"""Which actor has which name: the first to claim it, until its node says that it has ended.

Names are all that a cluster decides about actors. Where they are is told by their identities, and
who may call them by the refs to those.

Invariant: no two living actors have the same name. After the death of a manager each node states
again which names its actors have (a claim without a request); the next manager takes up these
before it answers any claim that is still open.

An actor that may begin again on another host keeps its name while it is found out, after the death
of its node, whether another one does begin it (planner/homes.py).

This module must never know what an actor is, nor how it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hoplite_mp.protocol.actor_names import ActorNameHeld

if TYPE_CHECKING:
    from hoplite_mp.planner.plan import Send
    from hoplite_mp.protocol.actor_names import (
        ActorNameAsked,
        ActorNameClaimed,
        ActorNameReleased,
    )

__all__ = ["ActorNames"]


class _Holder(NamedTuple):
    """Who has a name."""

    node: int
    identity: bytes
    moves: bool


class ActorNames:
    """All names of living actors."""

    def __init__(self) -> None:
        self._held: dict[str, _Holder] = {}

    def claim(self, message: ActorNameClaimed) -> list[Send]:
        """Gives the name to the claimant if nobody has it."""
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
        held = self._held.get(message.name)
        if held is not None and held.identity == message.identity:
            del self._held[message.name]
        return []

    def lose_node(self, node: int) -> None:
        """Its actors are gone, and their names free, but for those that may begin elsewhere."""
        for name, held in list(self._held.items()):
            if held.node == node and not held.moves:
                del self._held[name]

    def moved(self, lost: int, actors: dict[bytes, int]) -> None:
        """All that is left of that node's actors is begun again by these nodes."""
        for name, held in list(self._held.items()):
            if held.node == lost:
                if held.identity in actors:
                    self._held[name] = held._replace(node=actors[held.identity])
                else:
                    del self._held[name]
