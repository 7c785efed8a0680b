"""The messages about the names of actors: one actor of a name in the whole cluster.

    ActorNameClaimed ─► ActorNameHeld        the claimant's own actor, or the one that has the name
    ActorNameAsked   ─► ActorNameHeld        the actor that has the name, or none
    ActorNameReleased ─►                     the actor has ended

An actor is known by its *identity*, the id of an object on its host. A node that connects to a new
manager claims its names again, so names need no report of their own.
"""

from __future__ import annotations

from hoplite_mp._protocol.fields import NAME_CHARS_MAX, Message, counts, flags, object_id, text

__all__ = ["ActorNameAsked", "ActorNameClaimed", "ActorNameHeld", "ActorNameReleased"]


class ActorNameClaimed(Message, frozen=True, tag="ActorNameClaimed"):
    """`node` starts an actor of that name, unless another actor has the name. `request` 0: the
    actor has started, and no answer is expected. `moves`: another node may start it again when this
    one is lost. `by_backup`: the node that may start it again says so to a new manager; that holds
    only if `node` itself does not report, because the actor may have ended meanwhile."""

    request: int
    node: int
    name: str
    identity: bytes
    moves: bool = False
    by_backup: bool = False

    def __post_init__(self) -> None:
        counts(request=self.request, node=self.node)
        text("name", self.name, NAME_CHARS_MAX, 1)
        object_id("identity", self.identity)
        flags(moves=self.moves, by_backup=self.by_backup)


class ActorNameAsked(Message, frozen=True, tag="ActorNameAsked"):
    """Which actor has that name?"""

    request: int
    node: int
    name: str

    def __post_init__(self) -> None:
        counts(request=self.request, node=self.node)
        text("name", self.name, NAME_CHARS_MAX, 1)


class ActorNameReleased(Message, frozen=True, tag="ActorNameReleased"):
    """That actor has ended, or accepts no more calls, so its name is free. An empty name: the
    sender does not know whether the manager still has one for that actor."""

    node: int
    name: str
    identity: bytes

    def __post_init__(self) -> None:
        counts(node=self.node)
        text("name", self.name, NAME_CHARS_MAX)
        object_id("identity", self.identity)


class ActorNameHeld(Message, frozen=True, tag="ActorNameHeld"):
    """The answer to a claim or a question: the actor that has the name now; None: there is none."""

    request: int
    name: str
    identity: bytes | None

    def __post_init__(self) -> None:
        counts(request=self.request)
        text("name", self.name, NAME_CHARS_MAX, 1)
        if self.identity is not None:
            object_id("identity", self.identity)
