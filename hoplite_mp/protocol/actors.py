"""What a client and its node say to each other about actors on one host.

Why it exists: calls of actors are tasks and need no message; opening, finding, ending an actor and
what its process learns when it begins again are asked of the node in these messages.
It must never know: how a process is started, what a call does.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from hoplite_mp.protocol.birth import Environment
from hoplite_mp.protocol.resources import Wanted

__all__ = [
    "ActorAsk",
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


class OpenActor(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A process of its own for one object. `setup`: an object with its constructor and arguments.
    `about`: what a handle must know, pickled by the client. Reply: the local id of the actor's
    identity, which the node holds until Imported says that the caller holds it; or a ValueError's
    text. With `get_if_exists` the identity may be that of the living actor of this name."""

    setup: int
    about: bytes
    class_name: str
    name: str
    restarts: int
    get_if_exists: bool
    detached: bool
    node: int  # where it is to run
    places: tuple[int, ...] = ()  # to which it is bound; none: it may begin again on any node
    env: Environment = ()  # changes of its process's environment
    demand: Wanted = ()  # resources that it keeps for life
    only_now: bool = False  # refused as by a node that is gone, where it would wait for them


class BindActor(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Calls of an actor of another host, whose pool has the number `pool` there, will be made here.
    Reply: the number of the pool on this host that leads there; it stays the actor's own as long as
    anybody here holds the identity. The rest: what its options say."""

    identity: int
    pool: int
    restarts: int = 0
    retries: int = 0
    places: tuple[int, ...] = ()


class FindActor(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The living actor of that name. Reply: the local id of its identity, held by the node until
    Imported; 0 if there is none."""

    name: str


class EndActor(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The actor ends after the calls made so far; `kill`: now. Reply: None, at once. `unheld`: as
    soon as nobody holds its identity; no reply."""

    identity: int
    kill: bool
    unheld: bool = False


class ActorRestarts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply: how often the actor's process has been started again."""

    identity: int


class FailActorCalls(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A call was queued for an actor that has ended: it is to fail. No reply."""

    pool: int


class ActorFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This process's constructor raised: the exception as an error payload. Reply: None."""

    payload: bytes


class ActorBegins(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This process's object is made. Reply: ids of calls that were queued before, oldest first."""


class ActorMayEnd(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This actor's process is idle and accepts no new calls. Reply: whether it may end, because no
    call waits for its arguments."""


class ActorStateAsked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Which state has this actor kept last? Reply: the local id of that object, which the node
    holds until Imported; 0: none."""


class KeepActorState(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """That object is the actor's state after its last call, with results of calls: a process that
    begins again begins with it. Reply: None, when it is on another host as well, or there is none
    that could begin the actor again."""

    state: int


ActorAsk: TypeAlias = (
    OpenActor
    | FindActor
    | EndActor
    | ActorRestarts
    | FailActorCalls
    | ActorFailed
    | ActorBegins
    | ActorMayEnd
    | BindActor
    | ActorStateAsked
    | KeepActorState
)
