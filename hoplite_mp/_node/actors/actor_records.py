"""Records of actors, and of the processes and nodes that request them.

Opening an actor requires several messages to the manager and other nodes, and a restart on another
host requires the actor's constructor data. These records keep the state needed for both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hoplite_mp import errors
from hoplite_mp._protocol.local import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import _shm
    from hoplite_mp._planner.resources import Demand
    from hoplite_mp._protocol.actors import OpenActor, StartRemoteActor
    from hoplite_mp._protocol.spawning import Environment

__all__ = [
    "ENDED",
    "ActorRecord",
    "Asker",
    "Client",
    "Opening",
    "WantedActor",
    "ended_calls",
    "taken_words",
]

ENDED = "its actor has ended"  # the reason why a pool starts no process


class Asker(Protocol):
    """A process or node that has requested an actor and is waiting for the answer."""

    def granted(self, hold: Any) -> None:
        """Answers with the identity. hold: a hold on it, kept until the asker has its own."""

    def refused(self, why: str, gone: bool = False) -> None:
        """Answers that there is no such actor. why: the reason, or "" if no actor has that name.
        gone: whether its host is gone."""


@dataclass(slots=True)
class Client:
    """A process on this host that has requested an actor."""

    slot: int
    number: int
    reply: Callable[[Reply], None]  # drops the reply if the process that was in the slot has exited
    # Keeps a hold for the process until it has its own. Returns False if the process has exited.
    keep: Callable[[Any], bool]

    def granted(self, hold: Any) -> None:
        if self.keep(hold):
            self.reply(Reply(self.number, hold.oid))

    def refused(self, why: str, gone: bool = False) -> None:
        self.reply(Reply(self.number, 0, why, gone=gone))

    def answer(self, value: Any) -> None:
        """Answers with any other value."""
        self.reply(Reply(self.number, value))


class WantedActor(NamedTuple):
    """An actor that will be started: the fields of StartRemoteActor after its number, with local
    ids in place of cluster-wide ones."""

    setup: int
    about: bytes
    class_name: str
    name: str
    restarts: int
    get_if_exists: bool
    detached: bool
    output_owner: int
    places: tuple[int, ...] = ()  # numbers of the nodes to which it is bound
    env: Environment = ()
    demand: Demand = ()  # resources that the actor's process keeps until it exits
    only_now: bool = False  # refuse the actor if it would have to wait for its resources

    @classmethod
    def of(cls, message: OpenActor | StartRemoteActor, **changed: Any) -> WantedActor:
        """The actor that a message requests. changed: new values for some of the fields."""
        fields = {name: getattr(message, name) for name in cls._fields if name not in changed}
        return cls(**fields, **changed)


@dataclass(slots=True)
class ActorRecord:
    """One actor on this host."""

    identity: int
    pool: int
    name: str  # the actor's name in the cluster, or "" after its release
    class_name: str
    restarts_left: int
    wanted: WantedActor  # the request for the actor
    label: str = ""  # the same name, kept for messages after the name's release
    restarts: int = 0
    hold: Any = None  # the node's own hold on the identity, if the actor is detached
    state: Any = None  # a hold on the latest checkpoint of its process
    # The error payload that every call raises after the actor's end; None before that.
    ended: bytes | None = None
    begun: bool = field(default=False)  # the present process has created the user's object
    # Kill the actor when no process holds the identity, because its `with` block has raised.
    killed_unheld: bool = False
    closed: bool = False  # closed by a process on its own host, so no other host restarts it
    calls_done: int = 0  # number of calls finished by its former processes

    @property
    def title(self) -> str:
        """The actor's name in error messages."""
        return (
            f"actor {self.label!r} ({self.class_name})"
            if self.label
            else f"actor {self.class_name}"
        )

    @property
    def track_name(self) -> str:
        """The name of the actor's track in a trace."""
        if self.label:
            return f"actor {self.label} ({self.class_name})"
        return f"actor {self.class_name}, pool {self.pool}"

    @property
    def state_name(self) -> str:
        """The state that `status`, `top` and `dump` show."""
        if self.ended is not None:
            return "ended"
        return "lives" if self.begun else "begins"

    def loss(self, process: str, how: str) -> errors.ActorLostError:
        """The error for calls lost by the exit of the actor's process. how: describes the exit."""
        used = self.restarts
        if self.ended is not None:
            then = ""  # the actor had ended before its process exited
        elif self.restarts_left > 0:
            total = used + self.restarts_left
            then = f". This call is lost; the actor restarts (restart {used + 1} of {total})"
        elif used:
            then = f". Its restarts are used up (options(restarts={used}))"
        else:
            then = ". With options(restarts=) it would be restarted"
        return errors.ActorLostError(
            f"{self.title} has lost its state: its process, {process}, {how}{then}"
        )


@dataclass(slots=True)
class Opening:
    """A request that is waiting for the manager's answer about a name."""

    asker: Asker
    wanted: WantedActor | None  # None: only look up the actor of that name
    identity: int = 0
    holds: list[Any] = field(default_factory=list)
    asked: Any = None
    # the reason why the actor did not start, reported when the manager has freed its name
    refusal: str = ""
    gone: bool = False  # the actor did not start because this node is leaving


def taken_words(name: str) -> str:
    """The error text if another actor has the name."""
    return (
        f"there is an actor named {name!r} already: choose another name, find it with get_actor(), "
        "or use options(get_if_exists=True)"
    )


def ended_calls(client: _shm.NodeClient, slot: int) -> int:
    """The number of calls that the process in the slot has finished."""
    info = client.client_info(slot)
    return int(info["tasks_done"] + info["tasks_failed"])
