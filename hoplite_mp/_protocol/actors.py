"""The messages about actors: between a client and its node, and between nodes.

Calls of actors are tasks and need no message. With these messages a client opens, finds and ends
actors, and an actor's process requests its data when it starts again.
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
from hoplite_mp._protocol.resources import Wanted
from hoplite_mp._protocol.spawning import Environment

__all__ = [
    "ABOUT_BYTES_MAX",
    "ActorAsk",
    "ActorBacklog",
    "ActorBegins",
    "ActorBegun",
    "ActorFailed",
    "ActorFound",
    "ActorHeld",
    "ActorKept",
    "ActorMayEnd",
    "ActorNameAsked",
    "ActorNameClaimed",
    "ActorNameHeld",
    "ActorNameReleased",
    "ActorRestarts",
    "ActorSought",
    "ActorStateAsked",
    "BeginActor",
    "BindActor",
    "DropActor",
    "EndActor",
    "EndActorThere",
    "FailActorCalls",
    "FindActor",
    "KeepActor",
    "KeepActorState",
    "OpenActor",
    "RestartsAsked",
    "RestartsTold",
]


class OpenActor(msgspec.Struct, frozen=True, tag="OpenActor", array_like=True):
    """Starts an actor: one object in a process of its own. `setup`: an object with its constructor
    and arguments. `about`: the data of its handles, pickled by the client. Reply: the local id of
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
    node: int  # the node on which it runs
    places: tuple[int, ...] = ()  # nodes to which it is bound; none: any node may restart it
    env: Environment = ()  # changes to its process's environment
    demand: Wanted = ()  # resources for its lifetime
    only_now: bool = False  # refuse it instead of letting it wait for resources


class BindActor(msgspec.Struct, frozen=True, tag="BindActor", array_like=True):
    """A client will call an actor of another host, whose pool has the number `pool` there. Reply:
    the number of the pool on this host that leads to the actor, and belongs to it as long as a
    process here holds the identity. The other fields are options of the actor."""

    identity: int
    pool: int
    restarts: int = 0
    retries: int = 0
    places: tuple[int, ...] = ()


class FindActor(msgspec.Struct, frozen=True, tag="FindActor", array_like=True):
    """Requests the living actor of that name. Reply: the local id of its identity, which the node
    holds until Imported; 0 if there is no such actor."""

    name: str


class EndActor(msgspec.Struct, frozen=True, tag="EndActor", array_like=True):
    """Ends the actor after the calls made so far; `kill`: now. Reply: None, at once. `unheld`: as
    soon as no process holds its identity; no reply."""

    identity: int
    kill: bool
    unheld: bool = False


class ActorRestarts(msgspec.Struct, frozen=True, tag="ActorRestarts", array_like=True):
    """Reply: how many times the actor's process was restarted."""

    identity: int


class FailActorCalls(msgspec.Struct, frozen=True, tag="FailActorCalls", array_like=True):
    """A call was queued for an actor that has ended; the node must make it fail. No reply."""

    pool: int


class ActorFailed(msgspec.Struct, frozen=True, tag="ActorFailed", array_like=True):
    """The actor's constructor raised this exception, an error payload. Reply: None."""

    payload: bytes


# Maximum number of calls in a reply to ActorBegins or ActorBacklog. Higher: fewer requests. By
# default a kernel accepts packets of up to 416 KiB, and an id takes up to 9 bytes.
BACKLOG_CALLS_MAX = 8192


class ActorBegins(msgspec.Struct, frozen=True, tag="ActorBegins", array_like=True):
    """The actor's object exists now. Reply: ids of calls that were queued before, oldest first, at
    most BACKLOG_CALLS_MAX. If the actor began with a saved state, the reply waits until another
    host has that state, too."""


class ActorBacklog(msgspec.Struct, frozen=True, tag="ActorBacklog", array_like=True):
    """The actor has begun all calls of the previous reply. Reply: the next calls."""


class ActorMayEnd(msgspec.Struct, frozen=True, tag="ActorMayEnd", array_like=True):
    """This actor's process is idle and accepts no new calls. Reply: whether it may end. It may not
    while calls wait for their arguments or are in transit, or while its node is leaving."""


class ActorStateAsked(msgspec.Struct, frozen=True, tag="ActorStateAsked", array_like=True):
    """Requests the last saved state of this actor. Reply: the local id of that object, which the
    node holds until Imported; 0 if there is none."""


class KeepActorState(msgspec.Struct, frozen=True, tag="KeepActorState", array_like=True):
    """That object is the actor's state after its last call, with results of calls; a restarted
    process begins with this state. Reply: None, as soon as another host has the state, too, or if
    no other host could restart the actor."""

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


# The messages about the names of actors: one actor of a name in the whole cluster.
#
#   ActorNameClaimed ─► ActorNameHeld        the claimant's own actor, or the one that has the name
#   ActorNameAsked   ─► ActorNameHeld        the actor that has the name, or none
#   ActorNameReleased ─►                     the actor has ended
#
# An actor is identified by its *identity*, the id of an object on its host. A node that connects to
# a new manager claims its names again, so its report need not contain them.


class ActorNameClaimed(Message, frozen=True, tag="ActorNameClaimed"):
    """`node` starts an actor of that name, unless another actor has the name. `request` 0: the
    actor has started, and no answer is expected. `moves`: another node may restart the actor when
    this node is lost. `by_backup`: sent to a new manager by the node that may restart the actor;
    valid only if `node` itself does not report, because the actor may have ended meanwhile."""

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
    """Requests the actor with that name."""

    request: int
    node: int
    name: str

    def __post_init__(self) -> None:
        counts(request=self.request, node=self.node)
        text("name", self.name, NAME_CHARS_MAX, 1)


class ActorNameReleased(Message, frozen=True, tag="ActorNameReleased"):
    """That actor has ended, or accepts no more calls, so its name is free. An empty name: the
    sender does not know whether the manager still has a name for that actor."""

    node: int
    name: str
    identity: bytes

    def __post_init__(self) -> None:
        counts(node=self.node)
        text("name", self.name, NAME_CHARS_MAX)
        object_id("identity", self.identity)


class ActorNameHeld(Message, frozen=True, tag="ActorNameHeld"):
    """The answer to a claim or request: the actor that has the name now; None if there is none."""

    request: int
    name: str
    identity: bytes | None

    def __post_init__(self) -> None:
        counts(request=self.request)
        text("name", self.name, NAME_CHARS_MAX, 1)
        if self.identity is not None:
            object_id("identity", self.identity)


# The messages between nodes about actors: one that starts on another host, and its end.
#
#   BeginActor ─► ActorBegun ─► ActorHeld          the sender wants an actor on the receiver's host
#   EndActorThere, RestartsAsked ─► RestartsTold   about an actor of the receiver's host
#   KeepActor ─► ActorKept, DropActor              the receiver starts it again if the sender dies
#   ActorSought ─► ActorFound                      about an actor whose host was lost
#
# Calls travel like all tasks (RunTask), with the number of the actor's pool on its host.


# Limit for the data of a handle about its actor, mainly the names of its methods.
ABOUT_BYTES_MAX = 256 << 10
NO_IDENTITY = bytes(ID_BYTES)


class BeginActor(Message, frozen=True, tag="BeginActor"):
    """Starts an actor on the receiver's host. `setup`: the object with its constructor and
    arguments. `about`: the data of its handles, in a form that only clients understand.
    `output_owner`: as in RunTask. `places`: the nodes to which it is bound; none: any node may
    restart it. `env`: changes to its process's environment. `demand`: resources for its lifetime.
    `only_now`: refuse the actor instead of letting it wait for them. Answered by ActorBegun with
    the same number."""

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
    demand: Wanted = ()
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


class ActorBegun(Message, frozen=True, tag="ActorBegun"):
    """The identity of the actor, which the sender holds until ActorHeld. Zeros: there is no actor;
    `error`: the reason; `gone`: the sender accepts no more actors."""

    number: int
    identity: bytes
    error: str = ""
    gone: bool = False

    def __post_init__(self) -> None:
        counts(number=self.number)
        flags(gone=self.gone)
        object_id("identity", self.identity)
        text("error", self.error, TEXT_CHARS_MAX)


class ActorHeld(Message, frozen=True, tag="ActorHeld"):
    """The sender's host holds the identity of the actor that it requested with that number."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class EndActorThere(Message, frozen=True, tag="EndActorThere"):
    """Ends that actor after the calls made so far; `kill`: now; `unheld`: as soon as no process
    holds its identity."""

    identity: bytes
    kill: bool
    unheld: bool = False

    def __post_init__(self) -> None:
        object_id("identity", self.identity)
        flags(kill=self.kill, unheld=self.unheld)


class RestartsAsked(Message, frozen=True, tag="RestartsAsked"):
    """Requests how many times that actor's process was restarted."""

    number: int
    identity: bytes

    def __post_init__(self) -> None:
        counts(number=self.number)
        object_id("identity", self.identity)


class RestartsTold(Message, frozen=True, tag="RestartsTold"):
    """The answer to RestartsAsked."""

    number: int
    restarts: int

    def __post_init__(self) -> None:
        counts(number=self.number)
        between("restarts", self.restarts, 0, 1 << 62)


class KeepActor(Message, frozen=True, tag="KeepActor"):
    """The receiver keeps the data with which it can restart that actor of the sender's host if that
    host is lost: `setup` with its objects, and `state`, the last state that the actor's process has
    saved (zeros: none). `name` is the actor's registered name, `label` its name in errors.
    `restarts_left`: remaining restarts, with the next one; `restarts`: previous restarts. `begun`:
    its constructor has run, so the objects that it needs are ready. A later message about this
    actor replaces this one as soon as its objects have arrived. Answered by ActorKept with the same
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
    demand: Wanted = ()

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


class ActorKept(Message, frozen=True, tag="ActorKept"):
    """The objects of the KeepActor with that number are here, except lost objects."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class DropActor(Message, frozen=True, tag="DropActor"):
    """The receiver need not keep that actor any more: it has ended, or has another backup."""

    identity: bytes
    ended: bool = False  # the actor has ended; else another host is its backup now

    def __post_init__(self) -> None:
        object_id("identity", self.identity)


class ActorSought(Message, frozen=True, tag="ActorSought"):
    """The sender will send its calls of that actor, whose host was lost, to the receiver, which is
    now the owner of its identity. Answered as soon as the receiver knows that it is the owner."""

    identity: bytes

    def __post_init__(self) -> None:
        object_id("identity", self.identity)


class ActorFound(Message, frozen=True, tag="ActorFound"):
    """The number of the actor's pool on the sender's host; 0: the actor is not there, and its calls
    fail. `error`, an error payload, is not used yet."""

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
