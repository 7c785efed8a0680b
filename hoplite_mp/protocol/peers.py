"""What nodes say to each other: objects of one that the other uses, and tasks.

    importer ── Acquire Release Drop ─►  home          the home counts which hosts hold an object
             ◄─ Described ──                           at once, and again when a pending one is done
             ── MakeAgain ─►                           all that held it are dead; Described again
             ◄─ CopiesAsked ──                         is it so? to all, before a task is run again
             ── Kept CopiesTold ─►
    sender   ── RunTask CancelTask RecallTasks ─►  runner
             ◄─ TaskEnded ──
    runner   ── Printed LastLinesSent ─►  the host of the driver that the lines are for
             ◄─ PrintedTaken LastLinesAsked ──

An object's *home* is the host that made its id. An import has a number of the importer's, so that a
late word about an import that is over is never taken for the next one of the same object. Small
values travel inside these messages; big ones are fetched over data connections, by plans.

This module must never know how messages travel, nor what anybody does with them.
"""

from __future__ import annotations

from typing import TypeAlias

from hoplite_mp.ids import ID_BYTES
from hoplite_mp.protocol.fields import Message, amounts, between, counts, flags, layout, one_of
from hoplite_mp.protocol.group_calls import GroupMessage
from hoplite_mp.protocol.looking import LookMessage
from hoplite_mp.protocol.output import LastLinesAsked, LastLinesSent, Printed, PrintedTaken
from hoplite_mp.protocol.peer_actors import (
    ActorBegun,
    ActorFound,
    ActorHeld,
    ActorKept,
    ActorSought,
    BeginActor,
    DropActor,
    EndActorThere,
    KeepActor,
    RestartsAsked,
    RestartsTold,
)
from hoplite_mp.protocol.peer_hosts import (
    AddWorkers,
    CloseFarPool,
    CountersAsked,
    CountersNow,
    EndFarRound,
    Evacuated,
    FarPoolOpened,
    FarRoundEnded,
    FarRoundOpened,
    Leaving,
    OpenFarPool,
    OpenFarRound,
    Probe,
    Probed,
    RelayAsked,
    RelayOpened,
    RemoveNode,
    ResourcesFreed,
    WorkersNow,
)
from hoplite_mp.protocol.point_to_point import PointToPoint
from hoplite_mp.protocol.resources import Wanted

__all__ = [
    "OBJECTS_ASKED_MAX",
    "OUTCOMES",
    "STANDINGS",
    "Acquire",
    "ActorBegun",
    "ActorFound",
    "ActorHeld",
    "ActorKept",
    "ActorSought",
    "AddWorkers",
    "BeginActor",
    "CancelTask",
    "CloseFarPool",
    "CopiesAsked",
    "CopiesTold",
    "CountersAsked",
    "CountersNow",
    "Described",
    "Drop",
    "DropActor",
    "EndActorThere",
    "EndFarRound",
    "Evacuated",
    "FarPoolOpened",
    "FarRoundEnded",
    "FarRoundOpened",
    "KeepActor",
    "Kept",
    "LastLinesAsked",
    "LastLinesSent",
    "Leaving",
    "LetGo",
    "Locate",
    "Located",
    "MakeAgain",
    "OpenFarPool",
    "OpenFarRound",
    "PeerMessage",
    "Printed",
    "PrintedTaken",
    "Probe",
    "Probed",
    "RecallTasks",
    "RelayAsked",
    "RelayOpened",
    "Release",
    "RemoveNode",
    "ResourcesFreed",
    "RestartsAsked",
    "RestartsTold",
    "RunTask",
    "TaskEnded",
    "WorkersNow",
]

# How an object stands at its home: "ready" the whole value is held by a living node, "failed" its
# payload is the error, "gone" it was deleted or nobody held it any more.
STANDINGS = ("pending", "ready", "failed", "gone")
# How a task ended at its runner; "returned": it has not begun, and may run anywhere; "full": the
# same, because the resources that it needs are not free there.
OUTCOMES = ("ready", "failed", "cancelled", "returned", "full")
# Limit of a value inside a message. Higher: fewer fetches; lower: shorter turns for the others.
INLINE_BYTES_MAX = 64 << 10
# A payload's own head may come on top.
PAYLOAD_BYTES_MAX = INLINE_BYTES_MAX + (16 << 10)
HOLDERS_MAX = 1 << 16
RECALLED_MAX = 1 << 16
OBJECTS_ASKED_MAX = 1 << 12
NAME_BYTES_MAX = 64
_U16_MAX = (1 << 16) - 1
_I32_MAX = (1 << 31) - 1


def _object(name: str, value: bytes) -> None:
    if type(value) is not bytes or len(value) != ID_BYTES:
        raise ValueError(f"{name} must be {ID_BYTES} bytes, not {value!r}")


def _payload(value: bytes | None) -> None:
    if value is not None and len(value) > PAYLOAD_BYTES_MAX:
        raise ValueError(f"a payload of {len(value)} bytes; at most {PAYLOAD_BYTES_MAX} travel so")


class Acquire(Message, frozen=True):
    """The importer's host holds this object from now on; answered by Described."""

    object: bytes
    number: int

    def __post_init__(self) -> None:
        _object("object", self.object)
        counts(number=self.number)


class Described(Message, frozen=True):
    """How the object stands. `payload`: the whole payload, if it is small and at hand; without it
    the bytes are at `holders` (numbers of nodes); none: it is lost, and made again when somebody
    asks for it (MakeAgain). Pending: another one follows. `layout`: of an
    array whose bytes do not come along, its shape and dtype in words (node/objects/layouts.py)."""

    object: bytes
    number: int
    standing: str
    nbytes: int = 0
    payload: bytes | None = None
    holders: tuple[int, ...] = ()
    layout: bytes = b""

    def __post_init__(self) -> None:
        _object("object", self.object)
        layout("layout", self.layout)
        counts(number=self.number, nbytes=self.nbytes)
        one_of("standing", self.standing, STANDINGS)
        _payload(self.payload)
        between("number of holders", len(self.holders), 0, HOLDERS_MAX)
        if self.standing == "failed" and self.payload is None:
            raise ValueError("a failed object has its error as payload")


class MakeAgain(Message, frozen=True):
    """The importer needs this object of the receiver's host, and knows no living node that holds
    it. Answered by Described, after it has been made again if nobody has it any more."""

    object: bytes
    number: int

    def __post_init__(self) -> None:
        _object("object", self.object)
        counts(number=self.number)


class Release(Message, frozen=True):
    """Nobody on the importer's host holds it any more."""

    object: bytes
    number: int

    def __post_init__(self) -> None:
        _object("object", self.object)
        counts(number=self.number)


class Kept(Message, frozen=True):
    """The sender's node has a whole copy of this object, of the receiver's host: it was fetched,
    or placed there by a collective; then it is kept until LetGo, whether a process there holds it
    or not. Release takes a fetched one back. `hosts`: not the sender, but the nodes with these
    home ids; who asked for the copies says so, before it asks where they are."""

    object: bytes
    nbytes: int
    hosts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _object("object", self.object)
        counts(nbytes=self.nbytes)
        between("number of hosts", len(self.hosts), 0, HOLDERS_MAX)


class LetGo(Message, frozen=True):
    """The object is gone: a copy that was only kept is not needed any more."""

    object: bytes

    def __post_init__(self) -> None:
        _object("object", self.object)


class CopiesAsked(Message, frozen=True):
    """The sender, home of these objects, knows nobody who has them, and is about to have them made
    again. The receiver drops what it has in part, says Kept of what it has whole, then CopiesTold.
    """

    objects: tuple[bytes, ...]
    number: int

    def __post_init__(self) -> None:
        between("number of objects", len(self.objects), 1, OBJECTS_ASKED_MAX)
        for one in self.objects:
            _object("object", one)
        counts(number=self.number)


class CopiesTold(Message, frozen=True):
    """The answer: of what was asked by that number nothing is here but what was named by Kept."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class Locate(Message, frozen=True):
    """Who holds this object of the receiver's host? Answered by Located."""

    object: bytes
    number: int

    def __post_init__(self) -> None:
        _object("object", self.object)
        counts(number=self.number)


class Located(Message, frozen=True):
    """Numbers of the nodes that hold the whole value."""

    object: bytes
    number: int
    holders: tuple[int, ...]

    def __post_init__(self) -> None:
        _object("object", self.object)
        counts(number=self.number)
        between("number of holders", len(self.holders), 0, HOLDERS_MAX)


class Drop(Message, frozen=True):
    """Somebody there deleted it: for everybody."""

    object: bytes

    def __post_init__(self) -> None:
        _object("object", self.object)


class RunTask(Message, frozen=True):
    """A task for any worker of the runner's host.

    `task` is the id of its result. `args` are the arguments' payload, or `args_object` is the
    object that they are (16 zero bytes: none). The sender holds everything that is named here until
    the task has ended. `audience`: home of the host whose driver hears what it prints; 0: the
    sender's. `target`: the lost result that this run makes again, by which Groups know the task;
    empty: it is the task's first result.
    """

    task: bytes
    function: bytes
    args: bytes
    args_object: bytes
    retries: int
    timeout_ns: int
    flags: int
    name: bytes
    pool: int = 0  # of the runner's host; 0: its workers for everybody
    audience: int = 0
    tries: int = 0  # so far, each ended by the death of a worker or host
    priority: int = 0
    floor: int = 0  # of a task with a priority or resources: level of its sender
    demand: Wanted = ()  # resources
    target: bytes = b""

    def __post_init__(self) -> None:
        between("pool", self.pool, 0, _U16_MAX)
        for name in ("task", "function", "args_object", *(("target",) if self.target else ())):
            _object(name, getattr(self, name))
        _payload(self.args)
        counts(timeout_ns=self.timeout_ns, audience=self.audience)
        between("retries", self.retries, 0, _U16_MAX)
        between("tries", self.tries, 0, _U16_MAX)
        between("flags", self.flags, 0, (1 << 32) - 1)
        between("priority", self.priority, -_I32_MAX, _I32_MAX)
        between("floor", self.floor, -_I32_MAX - 1, _I32_MAX)
        amounts("demand", self.demand)
        between("bytes of name", len(self.name), 0, NAME_BYTES_MAX)


class TaskEnded(Message, frozen=True):
    """`payload`: the result or the error if it is small; otherwise its bytes stay with the runner,
    which keeps them until Release(task, 0). `layout`: as in Described."""

    task: bytes
    outcome: str
    nbytes: int = 0
    refs: bool = False
    payload: bytes | None = None
    layout: bytes = b""

    def __post_init__(self) -> None:
        _object("task", self.task)
        layout("layout", self.layout)
        one_of("outcome", self.outcome, OUTCOMES)
        counts(nbytes=self.nbytes)
        flags(refs=self.refs)
        _payload(self.payload)
        if self.outcome == "failed" and self.payload is None:
            raise ValueError("a failed task has its error as payload")


class CancelTask(Message, frozen=True):
    """A forced cancel: interrupt it if it runs."""

    task: bytes

    def __post_init__(self) -> None:
        _object("task", self.task)


class RecallTasks(Message, frozen=True):
    """Those of these tasks that the runner has not begun come back as "returned"."""

    tasks: list[bytes]

    def __post_init__(self) -> None:
        between("number of tasks", len(self.tasks), 1, RECALLED_MAX)
        for task in self.tasks:
            _object("task", task)


PeerMessage: TypeAlias = (
    Acquire
    | Described
    | MakeAgain
    | Release
    | Kept
    | LetGo
    | CopiesAsked
    | CopiesTold
    | Locate
    | Located
    | Drop
    | RunTask
    | TaskEnded
    | CancelTask
    | RecallTasks
    | AddWorkers
    | WorkersNow
    | ResourcesFreed
    | OpenFarPool
    | FarPoolOpened
    | CloseFarPool
    | OpenFarRound
    | FarRoundOpened
    | EndFarRound
    | FarRoundEnded
    | BeginActor
    | ActorBegun
    | ActorHeld
    | EndActorThere
    | RestartsAsked
    | RestartsTold
    | RemoveNode
    | Leaving
    | Evacuated
    | CountersAsked
    | CountersNow
    | Printed
    | PrintedTaken
    | LastLinesAsked
    | LastLinesSent
    | Probe
    | Probed
    | RelayAsked
    | RelayOpened
    | LookMessage
    | GroupMessage
    | PointToPoint
    | KeepActor
    | ActorKept
    | DropActor
    | ActorSought
    | ActorFound
)
