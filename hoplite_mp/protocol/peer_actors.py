"""What nodes send each other about actors: one that begins on another host, and its end.

    BeginActor ─► ActorBegun ─► ActorHeld          the sender wants an actor on the receiver's host
    EndActor, RestartsAsked ─► RestartsTold        about an actor of the receiver's host

Calls travel as any task does (RunTask), with the number of the actor's pool on its host.

This module must never know how messages travel, nor what anybody does with them.
"""

from __future__ import annotations

from hoplite_mp.ids import ID_BYTES
from hoplite_mp.protocol.fields import (
    NAME_CHARS_MAX,
    TEXT_CHARS_MAX,
    Message,
    between,
    counts,
    flags,
    object_id,
    text,
)

__all__ = [
    "ABOUT_BYTES_MAX",
    "ActorBegun",
    "ActorHeld",
    "BeginActor",
    "EndActorThere",
    "RestartsAsked",
    "RestartsTold",
]

# What a handle knows of its actor: the names of its methods, most of all.
ABOUT_BYTES_MAX = 256 << 10
NO_IDENTITY = bytes(ID_BYTES)


class BeginActor(Message, frozen=True):
    """An actor on the receiver's host. `setup`: the object with its constructor and arguments.
    `about`: what handles know of it, in words of clients. `audience`: as in RunTask. Answered by
    ActorBegun with the same number."""

    number: int
    setup: bytes
    about: bytes
    class_name: str
    name: str
    restarts: int
    get_if_exists: bool
    detached: bool
    audience: int

    def __post_init__(self) -> None:
        counts(number=self.number, restarts=self.restarts, audience=self.audience)
        object_id("setup", self.setup)
        if type(self.about) is not bytes or len(self.about) > ABOUT_BYTES_MAX:
            raise ValueError(f"about must be at most {ABOUT_BYTES_MAX} bytes")
        text("class_name", self.class_name, NAME_CHARS_MAX)
        text("name", self.name, NAME_CHARS_MAX)
        flags(get_if_exists=self.get_if_exists, detached=self.detached)


class ActorBegun(Message, frozen=True):
    """The identity of the actor, which the sender holds until ActorHeld; zeros: `error` says why
    there is none."""

    number: int
    identity: bytes
    error: str = ""

    def __post_init__(self) -> None:
        counts(number=self.number)
        object_id("identity", self.identity)
        text("error", self.error, TEXT_CHARS_MAX)


class ActorHeld(Message, frozen=True):
    """The sender's host holds the identity of the actor that it asked for by that number."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class EndActorThere(Message, frozen=True):
    """That actor ends after the calls made so far; `kill`: now."""

    identity: bytes
    kill: bool

    def __post_init__(self) -> None:
        object_id("identity", self.identity)
        flags(kill=self.kill)


class RestartsAsked(Message, frozen=True):
    """How often has that actor's process been started again?"""

    number: int
    identity: bytes

    def __post_init__(self) -> None:
        counts(number=self.number)
        object_id("identity", self.identity)


class RestartsTold(Message, frozen=True):
    """The answer."""

    number: int
    restarts: int

    def __post_init__(self) -> None:
        counts(number=self.number)
        between("restarts", self.restarts, 0, 1 << 62)
