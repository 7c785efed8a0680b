"""Messages about actors: between a client and its node, and between nodes.

Calls to actors are tasks, so they need no messages here. With these messages, clients open, find
and end actors, and the process of a restarted actor requests the actor's saved state.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from hoplite_mp._common.ids import ID_BYTES
from hoplite_mp._protocol.fields import (
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
from hoplite_mp._protocol.resources import Demand
from hoplite_mp._protocol.spawning import Environment

__all__ = [
    "ABOUT_BYTES_MAX",
    "ActorBacklog",
    "ActorBackupStored",
    "ActorEndRequest",
    "ActorFailed",
    "ActorNameClaimed",
    "ActorNameQuery",
    "ActorNameReleased",
    "ActorNameReport",
    "ActorPoolQuery",
    "ActorPoolReport",
    "ActorReady",
    "ActorRequest",
    "ActorRestarts",
    "BindActor",
    "DropActorBackup",
    "EndActor",
    "EndRemoteActor",
    "FailActorCalls",
    "FindActor",
    "LoadActorState",
    "OpenActor",
    "RemoteActorAck",
    "RemoteActorStarted",
    "RestartsQuery",
    "RestartsReport",
    "SaveActorState",
    "StartRemoteActor",
    "StoreActorBackup",
]


class OpenActor(msgspec.Struct, frozen=True, tag="OpenActor", array_like=True):
    """Starts an actor: one object in a separate process. `setup`: an object with the actor's
    constructor and arguments. `about`: the data of the actor's handles, pickled by the client.
    Reply: the local id of the actor's identity (the object that stands for the actor), which the
    node holds until Imported confirms that the caller holds it; or the text of a ValueError. With
    `get_if_exists`, a living actor with that name is reused."""

    setup: int
    about: bytes
    class_name: str
    name: str
    restarts: int
    get_if_exists: bool
    detached: bool
    node: int  # the node on which the actor runs
    places: tuple[int, ...] = ()  # the only nodes that may restart the actor; empty: any node
    env: Environment = ()  # changes to the environment of the actor's process
    demand: Demand = ()  # resources for its lifetime
    only_now: bool = False  # fail instead of waiting for resources


class BindActor(msgspec.Struct, frozen=True, tag="BindActor", array_like=True):
    """Binds a pool to an actor on another host; `pool` is the actor's pool on that host. Reply: the
    number of the local pool that forwards calls to the actor. The number is valid as long as a
    process on this host holds the identity. The other fields are the actor's options."""

    identity: int
    pool: int
    restarts: int = 0
    retries: int = 0
    places: tuple[int, ...] = ()


class FindActor(msgspec.Struct, frozen=True, tag="FindActor", array_like=True):
    """Requests the living actor with that name. Reply: the local id of its identity, which the node
    holds until Imported arrives; 0 if there is no such actor."""

    name: str


class EndActor(msgspec.Struct, frozen=True, tag="EndActor", array_like=True):
    """Ends the actor after the calls made so far or, if `kill`, immediately. Reply: None, before
    the actor has ended. If `unheld`, the actor ends as soon as no process holds its identity, and
    there is no reply."""

    identity: int
    kill: bool
    unheld: bool = False


class ActorRestarts(msgspec.Struct, frozen=True, tag="ActorRestarts", array_like=True):
    """Reply: the number of times that the actor's process was restarted."""

    identity: int


class FailActorCalls(msgspec.Struct, frozen=True, tag="FailActorCalls", array_like=True):
    """Requests that the node fail the queued calls of an actor that has ended. No reply."""

    pool: int


class ActorFailed(msgspec.Struct, frozen=True, tag="ActorFailed", array_like=True):
    """The actor's constructor raised an exception, sent as an error payload. Reply: None."""

    payload: bytes


# Maximum number of calls in a reply to ActorReady or ActorBacklog. Higher: fewer requests. The
# kernel's default limit for a packet is 416 KiB; an id takes up to 9 bytes.
BACKLOG_CALLS_MAX = 8192


class ActorReady(msgspec.Struct, frozen=True, tag="ActorBegins", array_like=True):
    """The actor's object exists. Reply: ids of the calls queued so far, oldest first, at most
    BACKLOG_CALLS_MAX. If the actor began with a saved state, the reply waits until another host has
    a copy of that state."""


class ActorBacklog(msgspec.Struct, frozen=True, tag="ActorBacklog", array_like=True):
    """The actor has begun all calls of the previous reply. Reply: the next calls."""


class ActorEndRequest(msgspec.Struct, frozen=True, tag="ActorMayEnd", array_like=True):
    """This actor's process is idle and accepts no new calls. Reply: whether the process may exit.
    The process must not exit while calls are in transit or waiting for arguments, or while its node
    is leaving."""


class LoadActorState(msgspec.Struct, frozen=True, tag="ActorStateAsked", array_like=True):
    """Requests the last saved state of this actor. Reply: the local id of the object with the
    state, which the node holds until Imported arrives; 0 if there is no saved state."""


class SaveActorState(msgspec.Struct, frozen=True, tag="KeepActorState", array_like=True):
    """Saves the actor's state after its last call, with the results of calls; a restarted process
    begins with this state. Reply: None, once another host has a copy of the state, or immediately
    if no other host could restart the actor."""

    state: int


ActorRequest: TypeAlias = (
    OpenActor
    | FindActor
    | EndActor
    | ActorRestarts
    | FailActorCalls
    | ActorFailed
    | ActorBacklog
    | ActorReady
    | ActorEndRequest
    | BindActor
    | LoadActorState
    | SaveActorState
)


# Messages about names of actors, which are unique in the cluster.
#
#   ActorNameClaimed ─► ActorNameReport     the claimant's actor, or the actor that has the name
#   ActorNameQuery   ─► ActorNameReport     the actor that has the name, or none
#   ActorNameReleased ─►                    the actor has ended
#
# An actor is identified by its *identity*, the id of an object on its host. A node claims its
# actors' names again when there is a new manager, so its report to that manager does not contain
# these names.


class ActorNameClaimed(Message, frozen=True, tag="ActorNameClaimed"):
    """`node` starts an actor with that name, unless another actor has the name. `request` 0: the
    actor has started, and no answer is expected. `can_fail_over`: another node may restart the
    actor if this node is lost. `by_backup`: sent to a new manager by the actor's backup; valid only
    if `node` does not report, because the actor may have ended meanwhile."""

    request: int
    node: int
    name: str
    identity: bytes
    can_fail_over: bool = False
    by_backup: bool = False

    def __post_init__(self) -> None:
        counts(request=self.request, node=self.node)
        text("name", self.name, NAME_CHARS_MAX, 1)
        object_id("identity", self.identity)
        flags(can_fail_over=self.can_fail_over, by_backup=self.by_backup)


class ActorNameQuery(Message, frozen=True, tag="ActorNameAsked"):
    """Requests the actor with that name."""

    request: int
    node: int
    name: str

    def __post_init__(self) -> None:
        counts(request=self.request, node=self.node)
        text("name", self.name, NAME_CHARS_MAX, 1)


class ActorNameReleased(Message, frozen=True, tag="ActorNameReleased"):
    """That actor has ended, or accepts no more calls, so its name is free. An empty name stands for
    any name that the manager still has for the actor."""

    node: int
    name: str
    identity: bytes

    def __post_init__(self) -> None:
        counts(node=self.node)
        text("name", self.name, NAME_CHARS_MAX)
        object_id("identity", self.identity)


class ActorNameReport(Message, frozen=True, tag="ActorNameHeld"):
    """The answer to a claim or query: the actor that has the name, or None."""

    request: int
    name: str
    identity: bytes | None

    def __post_init__(self) -> None:
        counts(request=self.request)
        text("name", self.name, NAME_CHARS_MAX, 1)
        if self.identity is not None:
            object_id("identity", self.identity)


# Messages between nodes about actors.
#
#   StartRemoteActor ─► RemoteActorStarted ─► RemoteActorAck    starts an actor on that host
#   EndRemoteActor, RestartsQuery ─► RestartsReport             about an actor on that host
#   StoreActorBackup ─► ActorBackupStored, DropActorBackup      makes that host the actor's backup
#   ActorPoolQuery ─► ActorPoolReport                           after the loss of an actor's host
#
# Calls are sent like all tasks (RunTask), with the number of the actor's pool on its host.


# Limit for the data of a handle about its actor, mainly the names of its methods.
ABOUT_BYTES_MAX = 256 << 10
NO_IDENTITY = bytes(ID_BYTES)


class StartRemoteActor(Message, frozen=True, tag="BeginActor"):
    """Starts an actor on the receiver's host. `setup`: the object with its constructor and
    arguments. `about`: the data of its handles, opaque to nodes. `output_owner`: as in RunTask. The
    other fields: as in OpenActor. Answered by RemoteActorStarted with the same number."""

    number: int
    setup: bytes
    about: bytes
    class_name: str
    name: str
    restarts: int
    get_if_exists: bool
    detached: bool
    output_owner: int
    places: tuple[int, ...] = ()
    env: Environment = ()
    demand: Demand = ()
    only_now: bool = False

    def __post_init__(self) -> None:
        environment("env", self.env)
        counts(number=self.number, restarts=self.restarts, output_owner=self.output_owner)
        object_id("setup", self.setup)
        _small("about", self.about)
        text("class_name", self.class_name, NAME_CHARS_MAX)
        text("name", self.name, NAME_CHARS_MAX)
        flags(get_if_exists=self.get_if_exists, detached=self.detached)
        numbers("places", self.places, NODES_MAX - 1)
        amounts("demand", self.demand)


class RemoteActorStarted(Message, frozen=True, tag="ActorBegun"):
    """The identity of the actor, which the sender holds until RemoteActorAck. Zeros mean that the
    actor was not started; then `error` is the reason. `gone`: the sender accepts no more actors."""

    number: int
    identity: bytes
    error: str = ""
    gone: bool = False

    def __post_init__(self) -> None:
        counts(number=self.number)
        flags(gone=self.gone)
        object_id("identity", self.identity)
        text("error", self.error, TEXT_CHARS_MAX)


class RemoteActorAck(Message, frozen=True, tag="ActorHeld"):
    """The sender's host holds the identity of the actor that it requested with that number."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class EndRemoteActor(Message, frozen=True, tag="EndActorThere"):
    """Ends the actor after the calls made so far; if `kill`, immediately; if `unheld`, as soon as
    no process holds its identity."""

    identity: bytes
    kill: bool
    unheld: bool = False

    def __post_init__(self) -> None:
        object_id("identity", self.identity)
        flags(kill=self.kill, unheld=self.unheld)


class RestartsQuery(Message, frozen=True, tag="RestartsAsked"):
    """Requests the number of times that the actor's process was restarted."""

    number: int
    identity: bytes

    def __post_init__(self) -> None:
        counts(number=self.number)
        object_id("identity", self.identity)


class RestartsReport(Message, frozen=True, tag="RestartsTold"):
    """The answer to RestartsQuery."""

    number: int
    restarts: int

    def __post_init__(self) -> None:
        counts(number=self.number)
        between("restarts", self.restarts, 0, 1 << 62)


class StoreActorBackup(Message, frozen=True, tag="KeepActor"):
    """Makes the receiver the backup of that actor on the sender's host. The receiver keeps the data
    for a restart: `setup` with its objects, and `state`, the last saved state (zeros: none). `name`
    is the actor's registered name, `label` its name in errors. `restarts_left`: remaining restarts,
    including the next one; `restarts`: previous restarts. `begun`: its constructor has run, so the
    objects that the constructor needs are ready. A later message about this actor replaces this one
    once the later message's objects have arrived. Answered by ActorBackupStored with the same
    number, after the arrival of all objects that are not lost."""

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
    output_owner: int
    places: tuple[int, ...] = ()
    env: Environment = ()
    demand: Demand = ()

    def __post_init__(self) -> None:
        environment("env", self.env)
        counts(number=self.number, output_owner=self.output_owner)
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


class ActorBackupStored(Message, frozen=True, tag="ActorKept"):
    """The sender's host has the objects of the StoreActorBackup with that number, except lost
    objects."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class DropActorBackup(Message, frozen=True, tag="DropActor"):
    """The receiver is no longer the backup of that actor."""

    identity: bytes
    ended: bool = False  # whether the actor has ended; if not, another host is its backup

    def __post_init__(self) -> None:
        object_id("identity", self.identity)


class ActorPoolQuery(Message, frozen=True, tag="ActorSought"):
    """Requests the pool of that actor, whose host was lost, from the new owner of its identity.
    Answered by ActorPoolReport once the receiver has been informed that it is the owner."""

    identity: bytes

    def __post_init__(self) -> None:
        object_id("identity", self.identity)


class ActorPoolReport(Message, frozen=True, tag="ActorFound"):
    """The number of the actor's pool on the sender's host; 0: the actor does not exist, and its
    calls fail. `error` (an error payload) is not used yet."""

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
