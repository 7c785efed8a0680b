"""The messages between nodes about actors: one that starts on another host, and its end.

    BeginActor ─► ActorBegun ─► ActorHeld          the sender wants an actor on the receiver's host
    EndActorThere, RestartsAsked ─► RestartsTold   about an actor of the receiver's host
    KeepActor ─► ActorKept, DropActor              the receiver starts it again if the sender dies
    ActorSought ─► ActorFound                      about an actor whose host was lost

Calls travel like all tasks (RunTask), with the number of the actor's pool on its host.
"""

from __future__ import annotations

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
from hoplite_mp._protocol.inherited_context import Environment
from hoplite_mp._protocol.resources import Wanted

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

# What a handle knows about its actor, above all the names of its methods.
ABOUT_BYTES_MAX = 256 << 10
NO_IDENTITY = bytes(ID_BYTES)


class BeginActor(Message, frozen=True, tag="BeginActor"):
    """Starts an actor on the receiver's host. `setup`: the object with its constructor and
    arguments. `about`: what handles know about it, in a form that only clients understand.
    `output_owner`: as in RunTask. `places`: the nodes to which it is bound; none: it may restart on
    any node. `env`: changes of its process's environment. `demand`: resources that it keeps as long
    as it lives. `only_now`: it is refused if it would have to wait for them. Answered by ActorBegun
    with the same number."""

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
    `error`: why; `gone`: because the sender takes no actors any more."""

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
    """The sender's host holds the identity of the actor that it requested by that number."""

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
    """Asks how often that actor's process was started again."""

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
    """The receiver keeps what it needs to start that actor of the sender's host again if that host
    is lost: `setup` and the objects that it names, and `state`, which the actor's process has kept
    last (zeros: none). `name` is its registered name, `label` its name in errors. `restarts_left`:
    how many are left before this one; `restarts`: how often it was started again. `begun`: its
    constructor has run, so the objects that it needs are ready. A later message about this actor
    replaces this one as soon as its objects are there. Answered by ActorKept with the same number,
    when all objects are there that are not lost."""

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
    """The objects that the KeepActor of that number names are here, except those that are lost."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class DropActor(Message, frozen=True, tag="DropActor"):
    """The receiver need not keep that actor any more: it has ended, or is kept elsewhere."""

    identity: bytes
    ended: bool = False  # the actor has ended; else another host is its backup now

    def __post_init__(self) -> None:
        object_id("identity", self.identity)


class ActorSought(Message, frozen=True, tag="ActorSought"):
    """The sender will send its calls of that actor, whose host was lost, to the receiver, which is
    now the owner of its identity. Answered as soon as the receiver knows that it is."""

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
