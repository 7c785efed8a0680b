"""Messages between nodes about tasks, and about objects that are used on a host other than the
owner's.

    importer ── Acquire Release Drop ─►  owner         the owner records which hosts hold an object
             ◄─ ObjectReport ──                        now; again when a pending object is done
             ── Reconstruct ─►                         all holders are dead; ObjectReport follows
             ◄─ CopiesQuery ──                         to all nodes, before a task is rerun
             ── ReplicaStored CopiesReport ─►
    sender   ── RunTask CancelTask RecallTasks ─►  runner
             ◄─ TaskEnded ──
    runner   ── OutputLines OutputFlushed ─►  the driver's host
             ◄─ OutputAck OutputFlushRequest ──

An object's *owner* is the host that created its id, or the successor that the manager named after
the owner's death (_planner/owners.py). The importer numbers its imports, so a late message about an
earlier import of an object is not attributed to a later import. Small values are sent inside these
messages. Large values are fetched over data connections, as planned by the manager.
"""

from __future__ import annotations

from typing import TypeAlias

from hoplite_mp._common.ids import ID_BYTES
from hoplite_mp._protocol.actors import (
    ActorBackupStored,
    ActorPoolQuery,
    ActorPoolReport,
    DropActorBackup,
    EndRemoteActor,
    RemoteActorAck,
    RemoteActorStarted,
    RestartsQuery,
    RestartsReport,
    StartRemoteActor,
    StoreActorBackup,
)
from hoplite_mp._protocol.diagnostics import DiagnosticsMessage
from hoplite_mp._protocol.fields import (
    PAYLOAD_BYTES_MAX,
    Message,
    amounts,
    between,
    counts,
    flags,
    layout,
    one_of,
)
from hoplite_mp._protocol.group_calls import GroupMessage
from hoplite_mp._protocol.local_groups import PointToPoint
from hoplite_mp._protocol.output import OutputAck, OutputFlushed, OutputFlushRequest, OutputLines
from hoplite_mp._protocol.peer_hosts import (
    AddPeerWorkers,
    CloseRemotePool,
    CountersQuery,
    CountersReport,
    EndRemoteBroadcast,
    Evacuated,
    OpenRemoteBroadcast,
    OpenRemotePool,
    PathCongested,
    PeerLeaving,
    Probe,
    ProbeResponse,
    RelayOpened,
    RelayRequest,
    RemoteBroadcastEnded,
    RemoteBroadcastOpened,
    RemotePoolOpened,
    RemoveNode,
    ResourcesFreed,
    WorkersReport,
)
from hoplite_mp._protocol.resources import Demand

__all__ = [
    "OBJECTS_ASKED_MAX",
    "OBJECT_STATES",
    "OUTCOMES",
    "Acquire",
    "ActorBackupStored",
    "ActorPoolQuery",
    "ActorPoolReport",
    "AddPeerWorkers",
    "CancelTask",
    "CloseRemotePool",
    "CopiesQuery",
    "CopiesReport",
    "CountersQuery",
    "CountersReport",
    "Drop",
    "DropActorBackup",
    "DropReplica",
    "EndRemoteActor",
    "EndRemoteBroadcast",
    "Evacuated",
    "LocateReplicas",
    "ObjectReport",
    "OpenRemoteBroadcast",
    "OpenRemotePool",
    "OutputAck",
    "OutputFlushRequest",
    "OutputFlushed",
    "OutputLines",
    "PathCongested",
    "PeerLeaving",
    "PeerMessage",
    "Probe",
    "ProbeResponse",
    "RecallTasks",
    "Reconstruct",
    "RelayOpened",
    "RelayRequest",
    "Release",
    "RemoteActorAck",
    "RemoteActorStarted",
    "RemoteBroadcastEnded",
    "RemoteBroadcastOpened",
    "RemotePoolOpened",
    "RemoveNode",
    "ReplicaLocations",
    "ReplicaStored",
    "ResourcesFreed",
    "RestartsQuery",
    "RestartsReport",
    "RunTask",
    "StartRemoteActor",
    "StoreActorBackup",
    "TaskEnded",
    "WorkersReport",
]

# The state of an object at its owner. "ready": it has a value, which may be lost (see
# ObjectReport); "failed": the payload is the error; "gone": the object was deleted, or all holders
# have released it.
OBJECT_STATES = ("pending", "ready", "failed", "gone")
# The end of a task at its runner. "returned": the task has not begun, and may run anywhere;
# "full": like "returned", because the runner has too few free resources; "again": a run has failed,
# and the task is rerun after the retry delay.
OUTCOMES = ("ready", "failed", "cancelled", "returned", "full", "again")
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
        raise ValueError(f"payload of {len(value)} bytes; at most {PAYLOAD_BYTES_MAX} are allowed")


class Acquire(Message, frozen=True, tag="Acquire"):
    """The importer's host now holds this object. Answered by ObjectReport."""

    object: bytes
    number: int

    def __post_init__(self) -> None:
        _object("object", self.object)
        counts(number=self.number)


class ObjectReport(Message, frozen=True, tag="Described"):
    """The state of the object. `payload`: the whole payload, if it is small and in memory;
    otherwise `holders` (numbers of nodes) have the bytes. No holders: the object is lost, and is
    recomputed on request (Reconstruct). Pending: another ObjectReport follows. `layout`: shape and
    dtype, as text, of an array whose bytes are not in this message
    (_node/objects/remote_objects.py)."""

    object: bytes
    number: int
    state: str
    nbytes: int = 0
    payload: bytes | None = None
    holders: tuple[int, ...] = ()
    layout: bytes = b""

    def __post_init__(self) -> None:
        _object("object", self.object)
        layout("layout", self.layout)
        counts(number=self.number, nbytes=self.nbytes)
        one_of("state", self.state, OBJECT_STATES)
        _payload(self.payload)
        between("number of holders", len(self.holders), 0, HOLDERS_MAX)
        if self.state == "failed" and self.payload is None:
            raise ValueError("the payload of a failed object must be its error")


class Reconstruct(Message, frozen=True, tag="MakeAgain"):
    """The importer needs this object, which the receiver owns, but has found no living holder.
    Answered by ObjectReport, after the object has been recomputed if no node has it."""

    object: bytes
    number: int

    def __post_init__(self) -> None:
        _object("object", self.object)
        counts(number=self.number)


class Release(Message, frozen=True, tag="Release"):
    """No process on the importer's host holds the object any more. `keeps`: its node still has a
    complete copy."""

    object: bytes
    number: int
    keeps: bool = False

    def __post_init__(self) -> None:
        _object("object", self.object)
        counts(number=self.number)
        flags(keeps=self.keeps)


class ReplicaStored(Message, frozen=True, tag="Kept"):
    """The sender has a complete copy of this object, which the receiver owns. If the copy was
    fetched, Release revokes this message. If a collective has placed the copy, it is kept until
    DropReplica, whether or not a process on the sender's host holds the object. If there are
    `hosts`, not the sender but the nodes with these host ids have the copies. The node that
    requested the copies sends this message, because it has not located them yet."""

    object: bytes
    nbytes: int
    hosts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _object("object", self.object)
        counts(nbytes=self.nbytes)
        between("number of hosts", len(self.hosts), 0, HOLDERS_MAX)


class DropReplica(Message, frozen=True, tag="LetGo"):
    """The object is gone, so the receiver can drop its replica."""

    object: bytes

    def __post_init__(self) -> None:
        _object("object", self.object)


class CopiesQuery(Message, frozen=True, tag="CopiesAsked"):
    """The owner of these objects has no record of a holder, and is about to recompute them. The
    receiver drops its incomplete copies, and sends ReplicaStored for each complete copy, then
    CopiesReport."""

    objects: tuple[bytes, ...]
    number: int

    def __post_init__(self) -> None:
        between("number of objects", len(self.objects), 1, OBJECTS_ASKED_MAX)
        for object_id in self.objects:
            _object("object", object_id)
        counts(number=self.number)


class CopiesReport(Message, frozen=True, tag="CopiesTold"):
    """The answer to the CopiesQuery with the same number: the sender has no copies other than those
    in its ReplicaStored messages."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class LocateReplicas(Message, frozen=True, tag="Locate"):
    """Requests the holders of this object, which the receiver owns. Answered by
    ReplicaLocations."""

    object: bytes
    number: int

    def __post_init__(self) -> None:
        _object("object", self.object)
        counts(number=self.number)


class ReplicaLocations(Message, frozen=True, tag="Located"):
    """The numbers of the nodes that hold the whole value."""

    object: bytes
    number: int
    holders: tuple[int, ...]

    def __post_init__(self) -> None:
        _object("object", self.object)
        counts(number=self.number)
        between("number of holders", len(self.holders), 0, HOLDERS_MAX)


class Drop(Message, frozen=True, tag="Drop"):
    """A process on the importer's host has deleted the object, for the whole cluster."""

    object: bytes

    def __post_init__(self) -> None:
        _object("object", self.object)


class RunTask(Message, frozen=True, tag="RunTask"):
    """A task for any worker on the runner's host.

    `task` is the id of its result. The arguments are either the payload `args` or the object
    `args_object` (16 zero bytes: none). The sender holds all objects in this message until the task
    has ended. `output_owner`: the driver that gets the task's output; 0: the driver of the sender's
    host. `target`: the lost result that this run recomputes, by which Groups identify the task;
    empty: the task's result has not been computed before.
    """

    task: bytes
    function: bytes
    args: bytes
    args_object: bytes
    retries: int
    timeout_ns: int
    flags: int
    name: bytes
    pool: int = 0  # a pool on the runner's host; 0: the common pool
    output_owner: int = 0
    tries: int = 0  # number of earlier runs, each ended by the loss of a worker or host
    priority: int = 0
    floor: int = 0  # for a task with a priority or resources: the priority of the submitting task
    demand: Demand = ()  # resources
    target: bytes = b""

    def __post_init__(self) -> None:
        between("pool", self.pool, 0, _U16_MAX)
        for name in ("task", "function", "args_object", *(("target",) if self.target else ())):
            _object(name, getattr(self, name))
        _payload(self.args)
        counts(timeout_ns=self.timeout_ns, output_owner=self.output_owner)
        between("retries", self.retries, 0, _U16_MAX)
        between("tries", self.tries, 0, _U16_MAX)
        between("flags", self.flags, 0, (1 << 32) - 1)
        between("priority", self.priority, -_I32_MAX, _I32_MAX)
        between("floor", self.floor, -_I32_MAX - 1, _I32_MAX)
        amounts("demand", self.demand)
        between("bytes of name", len(self.name), 0, NAME_BYTES_MAX)


class TaskEnded(Message, frozen=True, tag="TaskEnded"):
    """A task has ended. `payload`: the result or error, if it is small; otherwise the runner keeps
    the bytes until Release(task, 0). `layout`: as in ObjectReport."""

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
            raise ValueError("the payload of a failed task must be its error")


class CancelTask(Message, frozen=True, tag="CancelTask"):
    """Cancels a task by force: a running task is interrupted."""

    task: bytes

    def __post_init__(self) -> None:
        _object("task", self.task)


class RecallTasks(Message, frozen=True, tag="RecallTasks"):
    """Requests that the runner return the listed tasks that have not begun (TaskEnded
    "returned")."""

    tasks: list[bytes]

    def __post_init__(self) -> None:
        between("number of tasks", len(self.tasks), 1, RECALLED_MAX)
        for task in self.tasks:
            _object("task", task)


PeerMessage: TypeAlias = (
    Acquire
    | ObjectReport
    | Reconstruct
    | Release
    | ReplicaStored
    | DropReplica
    | CopiesQuery
    | CopiesReport
    | LocateReplicas
    | ReplicaLocations
    | Drop
    | RunTask
    | TaskEnded
    | CancelTask
    | RecallTasks
    | AddPeerWorkers
    | WorkersReport
    | ResourcesFreed
    | OpenRemotePool
    | RemotePoolOpened
    | CloseRemotePool
    | OpenRemoteBroadcast
    | RemoteBroadcastOpened
    | PathCongested
    | EndRemoteBroadcast
    | RemoteBroadcastEnded
    | StartRemoteActor
    | RemoteActorStarted
    | RemoteActorAck
    | EndRemoteActor
    | RestartsQuery
    | RestartsReport
    | RemoveNode
    | PeerLeaving
    | Evacuated
    | CountersQuery
    | CountersReport
    | OutputLines
    | OutputAck
    | OutputFlushRequest
    | OutputFlushed
    | Probe
    | ProbeResponse
    | RelayRequest
    | RelayOpened
    | DiagnosticsMessage
    | GroupMessage
    | PointToPoint
    | StoreActorBackup
    | ActorBackupStored
    | DropActorBackup
    | ActorPoolQuery
    | ActorPoolReport
)
