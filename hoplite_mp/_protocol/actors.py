"""The messages between a client and its node about actors.

Calls of actors are tasks and need no message. With these messages a client opens, finds and ends
actors, and an actor's process asks what it must know when it starts again.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from hoplite_mp._protocol.inherited_context import Environment
from hoplite_mp._protocol.resources import Wanted

__all__ = [
    "ActorAsk",
    "ActorBacklog",
    "ActorBegins",
    "ActorFailed",
    "ActorMayEnd",
    "ActorRestarts",
    "ActorStateAsked",
    "BindActor",
    "EndActor",
    "FailActorCalls",
    "FindActor",
    "KeepActorState",
    "OpenActor",
]


class OpenActor(msgspec.Struct, frozen=True, tag="OpenActor", array_like=True):
    """Starts an actor: one object in a process of its own. `setup`: an object with its constructor
    and arguments. `about`: what a handle must know, pickled by the client. Reply: the local id of
    the actor's identity, which the node holds until Imported confirms that the caller holds it; or
    the text of a ValueError. With `get_if_exists` the identity may be that of the living actor of
    this name."""

    setup: int
    about: bytes
    class_name: str
    name: str
    restarts: int
    get_if_exists: bool
    detached: bool
    node: int  # the node on which it is to run
    places: tuple[int, ...] = ()  # nodes to which it is bound; none: it may restart on any node
    env: Environment = ()  # changes of its process's environment
    demand: Wanted = ()  # resources that it keeps as long as it lives
    only_now: bool = False  # it is refused if it would have to wait, as by a node that is gone


class BindActor(msgspec.Struct, frozen=True, tag="BindActor", array_like=True):
    """A client will call an actor of another host, whose pool has the number `pool` there. Reply:
    the number of the pool on this host that leads to it, which belongs to the actor as long as a
    process here holds the identity. The other fields are options of the actor."""

    identity: int
    pool: int
    restarts: int = 0
    retries: int = 0
    places: tuple[int, ...] = ()


class FindActor(msgspec.Struct, frozen=True, tag="FindActor", array_like=True):
    """Asks for the living actor of that name. Reply: the local id of its identity, which the node
    holds until Imported; 0 if there is none."""

    name: str


class EndActor(msgspec.Struct, frozen=True, tag="EndActor", array_like=True):
    """Ends the actor after the calls made so far; `kill`: now. Reply: None, at once. `unheld`: as
    soon as no process holds its identity; no reply."""

    identity: int
    kill: bool
    unheld: bool = False


class ActorRestarts(msgspec.Struct, frozen=True, tag="ActorRestarts", array_like=True):
    """Reply: how often the actor's process was started again."""

    identity: int


class FailActorCalls(msgspec.Struct, frozen=True, tag="FailActorCalls", array_like=True):
    """A call was queued for an actor that has ended; the node must make it fail. No reply."""

    pool: int


class ActorFailed(msgspec.Struct, frozen=True, tag="ActorFailed", array_like=True):
    """The actor's constructor raised this exception, an error payload. Reply: None."""

    payload: bytes


# How many calls one reply to ActorBegins or ActorBacklog names. Higher: fewer requests. By default
# a kernel accepts packets of up to 416 KiB, and an id takes up to 9 bytes.
BACKLOG_CALLS_MAX = 8192


class ActorBegins(msgspec.Struct, frozen=True, tag="ActorBegins", array_like=True):
    """The actor's object exists now. Reply: ids of calls that were queued before, oldest first, at
    most BACKLOG_CALLS_MAX. If it began with a kept state, the reply waits until another host has
    that state as well."""


class ActorBacklog(msgspec.Struct, frozen=True, tag="ActorBacklog", array_like=True):
    """The actor has begun all calls that the reply before named. Reply: the next ones."""


class ActorMayEnd(msgspec.Struct, frozen=True, tag="ActorMayEnd", array_like=True):
    """This actor's process is idle and accepts no new calls. Reply: whether it may end. It may not
    while calls wait for their arguments or are on their way, or while its node is leaving."""


class ActorStateAsked(msgspec.Struct, frozen=True, tag="ActorStateAsked", array_like=True):
    """Asks for the state that this actor has kept last. Reply: the local id of that object, which
    the node holds until Imported; 0: none."""


class KeepActorState(msgspec.Struct, frozen=True, tag="KeepActorState", array_like=True):
    """That object is the actor's state after its last call, with results of calls; a process that
    starts again starts from it. Reply: None, as soon as another host has it as well, or if no other
    host could start the actor again."""

    state: int


ActorAsk: TypeAlias = (
    OpenActor
    | FindActor
    | EndActor
    | ActorRestarts
    | FailActorCalls
    | ActorFailed
    | ActorBacklog
    | ActorBegins
    | ActorMayEnd
    | BindActor
    | ActorStateAsked
    | KeepActorState
)
