"""What nodes send each other about actors: one that begins on another host, and its end.

    BeginActor ─► ActorBegun ─► ActorHeld          the sender wants an actor on the receiver's host
    EndActor, RestartsAsked ─► RestartsTold        about an actor of the receiver's host
    KeepActor ─► ActorKept, DropActor              the receiver is to begin it if the sender dies
    ActorSought ─► ActorFound                      of an actor whose host was lost

Calls travel as any task does (RunTask), with the number of the actor's pool on its host.

This module must never know how messages travel, nor what anybody does with them.
"""

from __future__ import annotations

from hoplite_mp.ids import ID_BYTES
from hoplite_mp.protocol.birth import Environment
from hoplite_mp.protocol.fields import (
    NAME_CHARS_MAX,
    NODES_MAX,
    TEXT_CHARS_MAX,
    Message,
    amounts,
    between,
    counts,
    environment,
    flags,
    numbers,
    object_id,
    text,
)
from hoplite_mp.protocol.resources import Wanted

__all__ = [
    "ABOUT_BYTES_MAX",
    "ActorBegun",
    "ActorFound",
    "ActorHeld",
    "ActorKept",
    "ActorSought",
    "BeginActor",
    "DropActor",
    "EndActorThere",
    "KeepActor",
    "RestartsAsked",
    "RestartsTold",
]

# What a handle knows of its actor: the names of its methods, most of all.
ABOUT_BYTES_MAX = 256 << 10
NO_IDENTITY = bytes(ID_BYTES)


class BeginActor(Message, frozen=True):
    """An actor on the receiver's host. `setup`: the object with its constructor and arguments.
    `about`: what handles know of it, in words of clients. `audience`: as in RunTask. `places`: the
    nodes to which it is bound; none: it may begin again on any. `env`: changes of its process's
    environment. `demand`: resources that it keeps for life. `only_now`: refused where it would wait
    for them. Answered by ActorBegun with the same number."""

    number: int
    setup: bytes
    about: bytes
    class_name: str
    name: str
    restarts: int
    get_if_exists: bool
    detached: bool
    audience: int
    places: tuple[int, ...] = ()
    env: Environment = ()
    demand: Wanted = ()
    only_now: bool = False

    def __post_init__(self) -> None:
        environment("env", self.env)
        counts(number=self.number, restarts=self.restarts, audience=self.audience)
        object_id("setup", self.setup)
        _small("about", self.about)
        text("class_name", self.class_name, NAME_CHARS_MAX)
        text("name", self.name, NAME_CHARS_MAX)
        flags(get_if_exists=self.get_if_exists, detached=self.detached)
        numbers("places", self.places, NODES_MAX - 1)
        amounts("demand", self.demand)


class ActorBegun(Message, frozen=True):
    """The identity of the actor, which the sender holds until ActorHeld; zeros: `error` says why
    there is none, and `gone` that the sender is no place for one any more."""

    number: int
    identity: bytes
    error: str = ""
    gone: bool = False

    def __post_init__(self) -> None:
        counts(number=self.number)
        flags(gone=self.gone)
        object_id("identity", self.identity)
        text("error", self.error, TEXT_CHARS_MAX)


class ActorHeld(Message, frozen=True):
    """The sender's host holds the identity of the actor that it asked for by that number."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class EndActorThere(Message, frozen=True):
    """That actor ends after the calls made so far; `kill`: now; `unheld`: as soon as nobody holds
    its identity."""

    identity: bytes
    kill: bool
    unheld: bool = False

    def __post_init__(self) -> None:
        object_id("identity", self.identity)
        flags(kill=self.kill, unheld=self.unheld)


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


class KeepActor(Message, frozen=True):
    """The receiver keeps what it needs to begin that actor of the sender's host again, should that
    be lost: `setup` and what it names, and `state`, which its process has kept last (zeros: none).
    `name` is the one that it has, `label` the one that errors call it by. `restarts_left`: before
    this one; `restarts`: how often it has begun again. `begun`: its constructor has run, so what
    that needs is ready. A later message about the same actor replaces this one. Answered by
    ActorKept with the same number, when everything is there."""

    number: int
    identity: bytes
    setup: bytes
    state: bytes
    about: bytes
    class_name: str
    name: str
    label: str
    restarts_left: int
    restarts: int
    detached: bool
    begun: bool
    audience: int
    places: tuple[int, ...] = ()
    env: Environment = ()
    demand: Wanted = ()

    def __post_init__(self) -> None:
        environment("env", self.env)
        counts(number=self.number, audience=self.audience)
        counts(restarts_left=self.restarts_left, restarts=self.restarts)
        object_id("identity", self.identity)
        object_id("setup", self.setup)
        object_id("state", self.state)
        _small("about", self.about)
        text("class_name", self.class_name, NAME_CHARS_MAX)
        text("name", self.name, NAME_CHARS_MAX)
        text("label", self.label, NAME_CHARS_MAX)
        flags(detached=self.detached, begun=self.begun)
        numbers("places", self.places, NODES_MAX - 1)
        amounts("demand", self.demand)


class ActorKept(Message, frozen=True):
    """What the KeepActor of that number names is here, as far as it can be had."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class DropActor(Message, frozen=True):
    """That actor has ended, or is kept elsewhere."""

    identity: bytes

    def __post_init__(self) -> None:
        object_id("identity", self.identity)


class ActorSought(Message, frozen=True):
    """The sender's calls of that actor, whose host was lost, are to go to the receiver, which
    counts the holders of its identity now. Answered as soon as the receiver knows that."""

    identity: bytes

    def __post_init__(self) -> None:
        object_id("identity", self.identity)


class ActorFound(Message, frozen=True):
    """The number of the actor's pool on the sender's host; 0: what its calls raise, as an error
    payload."""

    identity: bytes
    pool: int
    error: bytes = b""

    def __post_init__(self) -> None:
        object_id("identity", self.identity)
        counts(pool=self.pool)
        _small("error", self.error)


def _small(name: str, value: bytes) -> None:
    if type(value) is not bytes or len(value) > ABOUT_BYTES_MAX:
        raise ValueError(f"{name} must be at most {ABOUT_BYTES_MAX} bytes")
