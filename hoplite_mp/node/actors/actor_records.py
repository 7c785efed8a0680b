"""What a node keeps of each actor, and of each process or node that has asked for one.

Why it exists: opening an actor waits for the manager and for other nodes, and begins again on
another host from what is written here. It must never know: what is done with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hoplite_mp.protocol.local import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.planner.resources import Demand
    from hoplite_mp.protocol.birth import Environment

__all__ = ["Actor", "Asker", "Client", "Opening", "Wanted"]


class Asker(Protocol):
    """Who has asked for an actor, and waits for the answer."""

    def granted(self, hold: Any) -> None:
        """It gets the identity; the hold lasts until it has one of its own."""

    def refused(self, why: str, gone: bool = False) -> None:
        """There is no such actor, and why; "": nobody has that name. gone: its host is."""


@dataclass(slots=True)
class Client:
    """A process of this host that asks."""

    slot: int
    number: int
    reply: Callable[[Reply], None]  # to the process that is in the slot now, or to nobody
    # Keeps a hold for that process until it has one of its own; False: it is gone.
    keep: Callable[[Any], bool]

    def granted(self, hold: Any) -> None:
        if self.keep(hold):
            self.reply(Reply(self.number, hold.oid))

    def refused(self, why: str, gone: bool = False) -> None:
        self.reply(Reply(self.number, 0, why, gone=gone))

    def answer(self, value: Any) -> None:
        """Some other answer."""
        self.reply(Reply(self.number, value))


class Wanted(NamedTuple):
    """An actor that is to begin on this host: the fields of BeginActor after its number, in that
    order, with what they are here."""

    setup: int
    about: bytes
    class_name: str
    name: str
    restarts: int
    get_if_exists: bool
    detached: bool
    audience: int
    places: tuple[int, ...] = ()  # to which it is bound
    env: Environment = ()
    demand: Demand = ()  # resources that it keeps for life
    only_now: bool = False  # not where it would wait for them


@dataclass(slots=True)
class Actor:
    """One actor of this host."""

    identity: int
    pool: int
    name: str  # while it is this actor's
    class_name: str
    restarts_left: int
    wanted: Wanted  # what it was made from
    label: str = ""  # its name, for ever
    restarts: int = 0
    hold: Any = None  # the node's own on the identity: the actor is detached
    state: Any = None  # a hold on what its process has kept last
    # What every call raises from now on, as an error payload; None: the actor lives.
    ended: bytes | None = None
    begun: bool = field(default=False)  # its present process has made its object
    # When nobody holds the identity: the `with` of its maker was left by an exception.
    killed_unheld: bool = False
    calls_done: int = 0  # by processes that have ended

    @property
    def title(self) -> str:
        """As errors name it."""
        return (
            f"actor {self.label!r} ({self.class_name})"
            if self.label
            else f"actor {self.class_name}"
        )


@dataclass(slots=True)
class Opening:
    """Somebody waits for the manager's word on a name."""

    asker: Asker
    wanted: Wanted | None  # None: the actor of that name is only looked for
    identity: int = 0
    holds: list[Any] = field(default_factory=list)
    asked: Any = None
