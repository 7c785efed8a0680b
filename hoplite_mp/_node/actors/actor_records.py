"""Records of actors, and of the processes or nodes that request one.

Opening an actor takes several messages to the manager and other nodes, and a restart on another
host needs the actor's constructor data. These records keep that state.
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
    from hoplite_mp._protocol.actors import BeginActor, OpenActor
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

ENDED = "its actor has ended"  # why a pool starts no process


class Asker(Protocol):
    """A process or node that has requested an actor, and waits for the answer."""

    def granted(self, hold: Any) -> None:
        """Answers with the identity. `hold` is kept until the asker has its own."""

    def refused(self, why: str, gone: bool = False) -> None:
        """Answers that there is no such actor, and why; "": no actor has that name. gone: whether
        its host is gone."""


@dataclass(slots=True)
class Client:
    """A process of this host that has requested an actor."""

    slot: int
    number: int
    reply: Callable[[Reply], None]  # drops the reply if the process that was in the slot has ended
    # Keeps a hold for the process until it has its own; False: the process has ended.
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
    """An actor that is to begin: the fields of BeginActor after its number, with local ids in place
    of cluster-wide ones."""

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
    demand: Demand = ()  # lifelong resources
    only_now: bool = False  # refuse the actor if it would have to wait for them

    @classmethod
    def of(cls, message: OpenActor | BeginActor, **changed: Any) -> WantedActor:
        """The actor that a message requests. changed: fields with other values."""
        fields = {name: getattr(message, name) for name in cls._fields if name not in changed}
        return cls(**fields, **changed)


@dataclass(slots=True)
class ActorRecord:
    """One actor of this host."""

    identity: int
    pool: int
    name: str  # while the actor has this name in the cluster; afterwards ""
    class_name: str
    restarts_left: int
    wanted: WantedActor  # the request that it was made from
    label: str = ""  # the same name, kept for messages after the name's release
    restarts: int = 0
    hold: Any = None  # the node's own hold on the identity, if the actor is detached
    state: Any = None  # a hold on the latest checkpoint of its process
    # The error payload that every call raises from now on; None while the actor lives.
    ended: bytes | None = None
    begun: bool = field(default=False)  # its present process has made its object
    # Kill the actor when no process holds the identity, because its `with` block has raised.
    killed_unheld: bool = False
    closed: bool = False  # closed by a process of its own host, so no other host restarts it
    calls_done: int = 0  # by its processes that have ended

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
        """The error of its calls after the process has ended."""
        used = self.restarts
        if self.ended is not None:
            then = ""  # the actor had ended before its process
        elif self.restarts_left > 0:
            total = used + self.restarts_left
            then = f". This call is lost; the actor restarts (restart {used + 1} of {total})"
        elif used:
            then = f". Its restarts are used up (options(restarts={used}))"
        else:
            then = ". options(restarts=) restarts it"
        return errors.ActorLostError(
            f"{self.title} has lost its state: its process, {process}, {how}{then}"
        )


@dataclass(slots=True)
class Opening:
    """A request that waits for the manager's answer about a name."""

    asker: Asker
    wanted: WantedActor | None  # None: only look up the actor of that name
    identity: int = 0
    holds: list[Any] = field(default_factory=list)
    asked: Any = None
    refusal: str = ""  # why the actor did not begin; reported once the manager has freed its name
    gone: bool = False  # it did not begin because this node is leaving


def taken_words(name: str) -> str:
    """The error text if another actor has the name."""
    return (
        f"there is an actor named {name!r} already: choose another name, find it with get_actor(), "
        "or use options(get_if_exists=True)"
    )


def ended_calls(client: _shm.NodeClient, slot: int) -> int:
    """How many calls the process in the slot has finished."""
    info = client.client_info(slot)
    return int(info["tasks_done"] + info["tasks_failed"])
