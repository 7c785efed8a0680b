"""The messages about the names of actors: one actor of a name in the whole cluster.

    ActorNameClaimed ─► ActorNameHeld        to the claimant: itself, or who had the name before
    ActorNameAsked   ─► ActorNameHeld        or nobody
    ActorNameReleased ─►                     the actor has ended

An actor is known by its *identity*, the id of an object on its host. A node that meets another
manager claims its names once more, so names need no report of their own.

This module must never know what an actor is.
"""

from __future__ import annotations

from hoplite_mp.protocol.fields import NAME_CHARS_MAX, Message, counts, flags, object_id, text

__all__ = ["ActorNameAsked", "ActorNameClaimed", "ActorNameHeld", "ActorNameReleased"]


class ActorNameClaimed(Message, frozen=True):
    """`node` begins an actor of that name, unless another one has it; `request` 0: it has begun,
    and no answer is expected. `moves`: another node may begin it again when this one is lost."""

    request: int
    node: int
    name: str
    identity: bytes
    moves: bool = False

    def __post_init__(self) -> None:
        counts(request=self.request, node=self.node)
        text("name", self.name, NAME_CHARS_MAX, 1)
        object_id("identity", self.identity)
        flags(moves=self.moves)


class ActorNameAsked(Message, frozen=True):
    """Which actor has that name?"""

    request: int
    node: int
    name: str

    def __post_init__(self) -> None:
        counts(request=self.request, node=self.node)
        text("name", self.name, NAME_CHARS_MAX, 1)


class ActorNameReleased(Message, frozen=True):
    """That actor has ended, or accepts no more calls: its name is free."""

    node: int
    name: str
    identity: bytes

    def __post_init__(self) -> None:
        counts(node=self.node)
        text("name", self.name, NAME_CHARS_MAX, 1)
        object_id("identity", self.identity)


class ActorNameHeld(Message, frozen=True):
    """The answer to a claim or a question: the actor that has the name now; None: there is none."""

    request: int
    name: str
    identity: bytes | None

    def __post_init__(self) -> None:
        counts(request=self.request)
        text("name", self.name, NAME_CHARS_MAX, 1)
        if self.identity is not None:
            object_id("identity", self.identity)
