"""Messages between a client and its node, on one host.

Clients perform most operations without their node. For the others (memory, collectives, groups,
pools), they send these messages. Each message is one packet of a SEQPACKET socketpair. If the
caller has stopped waiting for a reply (after Ctrl-C), the reply is recognized by its number and
dropped.
"""

from __future__ import annotations

import signal
import sys
from typing import Any, TypeAlias

import msgspec

from hoplite_mp._protocol.actors import ActorRequest
from hoplite_mp._protocol.local_groups import (
    BOUNDED_TAG,
    INBOX_MAX,
    RESULT_TAG,
    TAG_MAX,
    USER_TAG_MAX,
    GroupAdmit,
    GroupBlockWritten,
    GroupBuffers,
    GroupCall,
    GroupDoorbell,
    GroupInbox,
    GroupJoin,
    GroupLeave,
    GroupMessageAck,
    GroupRefusal,
    GroupSend,
)
from hoplite_mp._protocol.output import MarkOutput
from hoplite_mp._protocol.resources import Demand, ResourceRequest
from hoplite_mp._protocol.spawning import (
    GIVEN_UP,
    NODE_DIED,
    Environment,
    Exited,
    FromSupervisor,
    LanStart,
    ManagerStarted,
    Shutdown,
    Spawn,
    Spawned,
    SpawnFailed,
    Start,
    StartStandby,
    ToSupervisor,
)

__all__ = [
    "BOUNDED_TAG",
    "GIVEN_UP",
    "INBOX_MAX",
    "LINE_LOST",
    "NODE_DIED",
    "ON_ITS_WAY",
    "POOL_BROKEN",
    "POOL_LEAVING",
    "RESTORED",
    "RESULT_TAG",
    "SETUP_FAILED",
    "SPILLED_PIECE_BYTES",
    "STACKS_FILE",
    "STACKS_SIGNAL",
    "TAG_MAX",
    "USER_TAG_MAX",
    "AddWorkers",
    "AnyRequest",
    "AttachRefused",
    "Attached",
    "BeginWorkerBroadcast",
    "BindPool",
    "ClosePool",
    "Collective",
    "CountDrivers",
    "DepartedNodes",
    "DrainNode",
    "DropForeign",
    "Dump",
    "DumpRead",
    "EndWorkerBroadcast",
    "Exited",
    "Explain",
    "FromSupervisor",
    "GetBroadcastTasks",
    "GroupAdmit",
    "GroupBlockWritten",
    "GroupBuffers",
    "GroupCall",
    "GroupDoorbell",
    "GroupInbox",
    "GroupJoin",
    "GroupLeave",
    "GroupMessageAck",
    "GroupRefusal",
    "GroupSend",
    "HoldForeign",
    "Import",
    "Imported",
    "InitializerDone",
    "InitializerFailed",
    "Interrupt",
    "JoinStatus",
    "LanStart",
    "Lease",
    "LeaseSpan",
    "LeavingNodes",
    "Locate",
    "ManagerStarted",
    "Members",
    "OpenPool",
    "OpenWorkerBroadcast",
    "ReadSpilled",
    "Reply",
    "Request",
    "Restore",
    "RetryTask",
    "ReturnSpans",
    "Shutdown",
    "Spawn",
    "SpawnFailed",
    "Spawned",
    "Start",
    "StartStandby",
    "Stats",
    "ToSupervisor",
    "TraceBegin",
    "TraceDrop",
    "TraceEnd",
    "TracePiece",
    "WorkerBroadcastRequest",
]

# Messages between a client and its node about a worker broadcast, that is, a call to `Cluster.run`.
#
#   caller ── OpenWorkerBroadcast ─►  node     pool of the broadcast, and its number of workers
#          ── tasks of that pool, one for each worker; BeginWorkerBroadcast ─►
#   worker ── GetBroadcastTasks ─►   node     the worker's tasks in broadcasts, not run yet
#   caller ── ClosePool ─►            node     the broadcast has ended
#          ── EndWorkerBroadcast ─►   node     cancels tasks that have not begun


class OpenWorkerBroadcast(msgspec.Struct, frozen=True, tag="OpenRound", array_like=True):
    """Requests that each current worker in the common pools of these nodes (empty: all nodes) run
    one task. Reply: (number of a pool for these tasks, number of workers); None if not all nodes
    have answered within `timeout_s`."""

    nodes: list[int] = []
    timeout_s: float | None = None


class BeginWorkerBroadcast(msgspec.Struct, frozen=True, tag="BeginRound", array_like=True):
    """The caller has queued all tasks of the broadcast in `pool`. No reply."""

    pool: int


class EndWorkerBroadcast(msgspec.Struct, frozen=True, tag="EndRound", array_like=True):
    """Ends the broadcast in the pool, and closes the pool. Reply: None, when all nodes have
    confirmed or timed out. When a node has confirmed, none of its workers begins another task of
    the broadcast."""

    pool: int


class GetBroadcastTasks(msgspec.Struct, frozen=True, tag="TakeRound", array_like=True):
    """This worker is idle between two tasks. Reply: ids of tasks that it must claim and run."""


WorkerBroadcastRequest: TypeAlias = (
    OpenWorkerBroadcast | BeginWorkerBroadcast | EndWorkerBroadcast | GetBroadcastTasks
)


# A pool whose initializer raises is broken. Once the initializer has returned in any worker, the
# pool continues, even if its workers are killed later.
class InitializerDone(msgspec.Struct, frozen=True, tag="SetUp", array_like=True):
    """This worker's initializer has returned. No reply."""


class InitializerFailed(msgspec.Struct, frozen=True, tag="SetupFailed", array_like=True):
    """This worker's initializer has raised. `summary`: the exception; `text`: its traceback. Reply:
    None."""

    summary: str
    text: str


class HoldForeign(msgspec.Struct, frozen=True, tag="HoldForeign", array_like=True):
    """A ref to this object was pickled for another engine. The node holds the object for the next
    `seconds` seconds. Reply: the seconds, or 0.0 if the object is gone."""

    oid: int
    seconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.seconds <= sys.float_info.max:
            raise ValueError(f"seconds={self.seconds}: must be finite and at least 0")


class CountDrivers(msgspec.Struct, frozen=True, tag="UsersOfNode", array_like=True):
    """Reply: the number of drivers attached to this node, excluding the process that started the
    node."""


class RetryTask(msgspec.Struct, frozen=True, tag="TryAgain", array_like=True):
    """The task that this worker has claimed has failed. Reply: whether it is requeued, with one
    fewer retry. Other workers are not woken for an actor's call, because this worker runs it next.
    `failures` > 0: only one item of a chunk has failed, for the `failures`-th time; then the reply
    is whether the worker may retry this item, and the task stays claimed."""

    task: int
    failures: int = 0


RESTORED, ON_ITS_WAY = 1, 2  # replies to Restore
# Bytes in one reply to ReadSpilled. Unprivileged processes can send packets of at most 416 KiB.
SPILLED_PIECE_BYTES = 128 << 10
SETUP_FAILED = 97  # exit code of a worker whose initializer or actor's constructor raised
LINE_LOST = 98  # exit code of a worker whose connection to the node was closed by user code
# When a worker receives this signal, it writes its threads' stacks into the memfd of this name.
STACKS_SIGNAL = signal.SIGRTMIN + 5
STACKS_FILE = "hoplite_mp stacks"
# States of a pool in shared memory.
POOL_BROKEN = 3  # its initializer has raised, so it accepts no more tasks
POOL_LEAVING = 5  # an actor's node is leaving the cluster, so the actor accepts no new calls


class Lease(msgspec.Struct, frozen=True, tag="Lease", array_like=True):
    """Requests a large block with a payload of `nbytes`. `error`: the block is for an error, and
    may use the memory that is reserved for errors. `preallocated`: the block is not needed yet, and
    is refused when other requests need the memory. Reply: the payload's offset, or full=True and an
    error message."""

    nbytes: int
    error: bool = False
    preallocated: bool = False


class LeaseSpan(msgspec.Struct, frozen=True, tag="LeaseSpan", array_like=True):
    """Requests a span for small objects. `error`: the span is for an error, so the reply does not
    wait for free memory. Reply: the span's offset, or full=True and an error message."""

    error: bool = False


class ReturnSpans(msgspec.Struct, frozen=True, tag="GiveSpans", array_like=True):
    """Returns empty spans. No reply."""

    offsets: list[int]


class Restore(msgspec.Struct, frozen=True, tag="Restore", array_like=True):
    """Requests that a spilled object be restored to memory. Reply: RESTORED; or ON_ITS_WAY if the
    object is being fetched from another host (processes that are waiting for it will be woken); or
    full=True and an error message."""

    oid: int


class ReadSpilled(msgspec.Struct, frozen=True, tag="ReadSpilled", array_like=True):
    """Reads a part of a spilled object's payload; the object stays in the spill file. Reply: the
    bytes, at most SPILLED_PIECE_BYTES; None if the object is not in the spill file."""

    oid: int
    offset: int
    nbytes: int


class Import(msgspec.Struct, frozen=True, tag="Import", array_like=True):
    """Imports objects from other hosts for the caller. Reply: the objects' ids on this host, 0 for
    a lost object. The node holds the objects until Imported confirms that the caller holds them."""

    objects: list[bytes]


class Imported(msgspec.Struct, frozen=True, tag="Imported", array_like=True):
    """The caller now holds the objects of the Import with that number. No reply."""

    number: int


class DropForeign(msgspec.Struct, frozen=True, tag="DropForeign", array_like=True):
    """Deletes an object that another host owns from the whole cluster. No reply."""

    oid: int


class Interrupt(msgspec.Struct, frozen=True, tag="Interrupt", array_like=True):
    """The client in `slot` is running a task that was aborted. The node interrupts this client, and
    kills it if the task does not end. No reply."""

    oid: int
    slot: int


class Collective(msgspec.Struct, frozen=True, tag="Collective", array_like=True):
    """Starts a reduction (with one result for each slice), or a collective that copies (with one
    result, which has no value).

    `to`: numbers of the destination nodes; empty: the default for the kind. `one_of`: groups of
    source indices; the first ready source of each group is reduced; empty: all sources are reduced.
    The node claims the results' headers; the caller holds the sources until the results are done.
    No reply.
    """

    results: list[int]
    sources: list[int]
    kind: str
    op: str
    num: int
    deadline_s: float | None
    reproducible: bool
    to: list[int] = []
    one_of: list[list[int]] = []


class OpenPool(msgspec.Struct, frozen=True, tag="OpenPool", array_like=True):
    """Opens a pool with dedicated workers, here and on other nodes. `setup`: an object with
    (initializer, initargs). `exact`: a worker on another node gets its next task only after the end
    of the previous one. `anywhere`: if the pool's nodes are lost, its tasks may run on other nodes.
    Reply: the pool's number, or an error text if a node was lost before its workers had started."""

    workers: int
    max_tasks: int
    setup: int
    remote: list[tuple[int, int]] = []  # (node, number of workers)
    exact: bool = False
    env: Environment = ()
    demand: Demand = ()  # resources of each worker for its lifetime
    anywhere: bool = False


class AddWorkers(msgspec.Struct, frozen=True, tag="AddWorkers", array_like=True):
    """Adds `count` workers to the common pool of the node. Reply: None."""

    count: int
    node: int


class BindPool(msgspec.Struct, frozen=True, tag="BindPool", array_like=True):
    """Opens a pool whose tasks all run on one other node. Reply: the pool's number."""

    node: int


class ClosePool(msgspec.Struct, frozen=True, tag="ClosePool", array_like=True):
    """Stops the pool's workers when they become idle or, if `kill`, immediately. No reply."""

    pool: int
    kill: bool


class DrainNode(msgspec.Struct, frozen=True, tag="DrainNode", array_like=True):
    """Makes the node leave the cluster. Reply: None, without waiting until it has left."""

    node: int


class Locate(msgspec.Struct, frozen=True, tag="Locate", array_like=True):
    """Reply: the numbers of the nodes that hold an object."""

    oid: int


class Explain(msgspec.Struct, frozen=True, tag="Explain", array_like=True):
    """Reply: the planner's records of the plans that moved an object (`PlanSummary`); None: the
    manager did not answer in time."""

    oid: int


class Members(msgspec.Struct, frozen=True, tag="Members", array_like=True):
    """Reply: for each living node (number, address, host, workers, bytes used, total bytes,
    resources, free resources as known to this node)."""


class DepartedNodes(msgspec.Struct, frozen=True, tag="GoneNodes", array_like=True):
    """Reply: the hosts that have most recently left or been lost, as far as this node knows, each
    as (number, name, seconds since then, True if it left or False if it was lost)."""


class LeavingNodes(msgspec.Struct, frozen=True, tag="LeavingNodes", array_like=True):
    """Reply: the numbers of the nodes that are about to leave the cluster, and accept no more
    work."""


class JoinStatus(msgspec.Struct, frozen=True, tag="Standing", array_like=True):
    """Reply, once this node has joined: (number of this node, cluster id, addresses of the standby,
    the standby's address if it is on this host, number of the node on the standby's host or -1,
    whether that host runs the manager, whether this node has a manager); or (name of an error, its
    text) if this node could not join."""


class Stats(msgspec.Struct, frozen=True, tag="Stats", array_like=True):
    """Reply: (number, counters) of each node that answers."""


class TraceBegin(msgspec.Struct, frozen=True, tag="TraceBegin", array_like=True):
    """Starts a trace on all nodes. `trace`: a random number. Reply: "", or the reason why the trace
    could not be started."""

    trace: int


class TraceEnd(msgspec.Struct, frozen=True, tag="TraceEnd", array_like=True):
    """Ends the trace. Reply: for each node (number, bytes of its document, up to two measurements
    of its clock as (local time, offset of its clock, largest error) in ns); the numbers of lost
    nodes; and the numbers of the nodes that have left and belonged to programs without workers."""

    trace: int


class TracePiece(msgspec.Struct, frozen=True, tag="TracePiece", array_like=True):
    """Reply: a piece of the node's document, starting at `offset`; None: the node is lost."""

    trace: int
    node: int
    offset: int


class TraceDrop(msgspec.Struct, frozen=True, tag="TraceDrop", array_like=True):
    """Discards the trace. Reply: None, when all nodes have confirmed or timed out."""

    trace: int


class Dump(msgspec.Struct, frozen=True, tag="Dump", array_like=True):
    """Requests a dump of the waits on all nodes. Reply: (node, size of its dump in bytes) for each
    node that has answered, and the numbers of the other nodes."""

    stacks: bool


class DumpRead(msgspec.Struct, frozen=True, tag="DumpRead", array_like=True):
    """Reply: a piece of the node's last dump, starting at `offset`."""

    node: int
    offset: int


AnyRequest: TypeAlias = (
    Lease
    | LeaseSpan
    | ReturnSpans
    | Restore
    | ReadSpilled
    | Import
    | Imported
    | DropForeign
    | Interrupt
    | Collective
    | OpenPool
    | AddWorkers
    | BindPool
    | ClosePool
    | GroupBuffers
    | GroupCall
    | GroupSend
    | GroupInbox
    | GroupMessageAck
    | GroupJoin
    | GroupLeave
    | GroupRefusal
    | GroupAdmit
    | Members
    | DepartedNodes
    | JoinStatus
    | InitializerDone
    | InitializerFailed
    | Stats
    | TraceBegin
    | TraceEnd
    | TracePiece
    | TraceDrop
    | Dump
    | DumpRead
    | ActorRequest
    | ResourceRequest
    | MarkOutput
    | WorkerBroadcastRequest
    | RetryTask
    | HoldForeign
    | DrainNode
    | GroupDoorbell
    | GroupBlockWritten
    | Locate
    | Explain
    | LeavingNodes
    | CountDrivers
)


class Request(msgspec.Struct, frozen=True, array_like=True):
    """`number` 0: no reply is expected, and `seen` is ignored. `seen`: the number of the last reply
    that the client has received. Later replies were lost, so their contents, such as leases, are
    revoked."""

    number: int
    seen: int
    ask: AnyRequest


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """`error`: the reason for a failure; `full`: the store has no free memory, so the client
    repeats the request or gives up; `gone`: a node has left or died."""

    number: int
    value: Any = None
    error: str = ""
    full: bool = False
    gone: bool = False


class Attached(msgspec.Struct, frozen=True, tag="Attached"):
    """A node's answer to an attaching driver: client slot, the slot's generation, and settings
    shared by all clients. Sent with descriptors (control memory, store, the node's eventfd, rpc,
    output). The connection stays open until the driver stops reading output."""

    slot: int
    generation: int
    memory_bytes: int
    small_object_bytes_max: int
    span_bytes: int
    output_owner: int = 0  # the driver's name as an output owner; see _protocol/output.py


class AttachRefused(msgspec.Struct, frozen=True, tag="NotAttached"):
    """Sent instead of Attached if the node cannot accept the driver now."""

    reason: str
