"""What a client and its node say to each other on one host.

Why it exists: most of what a client does needs nobody; what is left (memory, collectives, groups,
pools) is asked of the node in these messages. One message is one packet of a SEQPACKET socketpair:
a reply that nobody waits for any more (Ctrl-C in the middle) is dropped by its number.
It must never know: how either side does what is asked.
"""

from __future__ import annotations

import signal
from typing import Any, TypeAlias

import msgspec

from hoplite_mp.protocol.actors import ActorAsk
from hoplite_mp.protocol.birth import Environment
from hoplite_mp.protocol.foreign import HoldForeign, UsersOfNode
from hoplite_mp.protocol.local_groups import (
    INBOX_MAX,
    TAG_MAX,
    GroupAdmit,
    GroupCall,
    GroupInbox,
    GroupJoin,
    GroupLeave,
    GroupReceived,
    GroupRefusal,
    GroupSend,
    GroupWritten,
)
from hoplite_mp.protocol.output import MarkLines
from hoplite_mp.protocol.resources import ResourceAsk, Wanted
from hoplite_mp.protocol.retries import TryAgain
from hoplite_mp.protocol.rounds import RoundAsk
from hoplite_mp.protocol.setup import SetUp, SetupFailed
from hoplite_mp.protocol.spawning import (
    GIVEN_UP,
    NODE_DIED,
    Exited,
    FromSupervisor,
    LanStart,
    ManagerStarted,
    NotSpawned,
    Shutdown,
    Spawn,
    Spawned,
    Start,
    StartStandby,
    ToSupervisor,
)

__all__ = [
    "GIVEN_UP",
    "INBOX_MAX",
    "LINE_LOST",
    "NODE_DIED",
    "ON_ITS_WAY",
    "POOL_BROKEN",
    "POOL_LEAVING",
    "RESTORED",
    "SETUP_FAILED",
    "SPILLED_PIECE_BYTES",
    "STACKS_FILE",
    "STACKS_SIGNAL",
    "TAG_MAX",
    "AddWorkers",
    "Ask",
    "Attached",
    "BindPool",
    "ClosePool",
    "Collective",
    "DrainNode",
    "DropForeign",
    "Dump",
    "DumpRead",
    "Exited",
    "FromSupervisor",
    "GiveSpans",
    "GoneNodes",
    "GroupAdmit",
    "GroupCall",
    "GroupInbox",
    "GroupJoin",
    "GroupLeave",
    "GroupReceived",
    "GroupRefusal",
    "GroupSend",
    "GroupWritten",
    "Import",
    "Imported",
    "Interrupt",
    "LanStart",
    "Lease",
    "LeaseSpan",
    "LeavingNodes",
    "Locate",
    "ManagerStarted",
    "Members",
    "NotAttached",
    "NotSpawned",
    "OpenPool",
    "ReadSpilled",
    "Reply",
    "Request",
    "Restore",
    "SetUp",
    "SetupFailed",
    "Shutdown",
    "Spawn",
    "Spawned",
    "Standing",
    "Start",
    "StartStandby",
    "Stats",
    "ToSupervisor",
    "TraceBegin",
    "TraceDrop",
    "TraceEnd",
    "TracePiece",
]


RESTORED, ON_ITS_WAY = 1, 2  # replies to Restore
# In one reply to ReadSpilled. What a system without privileges gives a packet is 416 KiB.
SPILLED_PIECE_BYTES = 128 << 10
SETUP_FAILED = 97  # exit code of a worker: its initializer, or its actor's constructor, raised
LINE_LOST = 98  # exit code of a worker: user code has closed its line to the node
# A worker that gets this signal writes where its threads stand into its nameless file of this name.
STACKS_SIGNAL = signal.SIGRTMIN + 5
STACKS_FILE = "hoplite_mp stacks"
# The state of a pool, in shared memory, whose initializer has raised: it takes no more tasks.
POOL_BROKEN = 3
POOL_LEAVING = 5  # an actor's, whose node leaves the cluster: it takes no new calls


class Lease(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A big block of `nbytes` payload; `error`: for an error, from the reserve if need be. Reply:
    payload offset, or full=True and the message."""

    nbytes: int
    error: bool = False


class LeaseSpan(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A span for small objects. Reply: its offset, or full=True and the message."""


class GiveSpans(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Empty spans go back. No reply."""

    offsets: list[int]


class Restore(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A spilled object is wanted in memory. Reply: RESTORED, or ON_ITS_WAY from another
    host (who waits for the object is woken), or full=True and the message."""

    oid: int


class ReadSpilled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A part of a spilled object's payload is wanted in private memory, the object stays where it
    is. Reply: the bytes, at most SPILLED_PIECE_BYTES; None if it is not in the spill file."""

    oid: int
    offset: int
    nbytes: int


class Import(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Objects of other hosts are used here. Reply: their ids on this host, 0 for one that is gone;
    the node keeps them until Imported says that the caller holds them."""

    objects: list[bytes]


class Imported(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The objects of that Import (its number) are held now. No reply."""

    number: int


class DropForeign(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An object of another host was deleted here: it is to go everywhere. No reply."""

    oid: int


class Interrupt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`slot` runs an aborted task: interrupt it, and kill it if it does not end. No reply."""

    oid: int
    slot: int


class Collective(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A reduction (one result for each slice), or a kind that copies (one result without a value).

    `to`: numbers of the nodes where results or copies belong; empty: as the kind implies. The
    results' headers are claimed by the node; the caller holds the sources until they are done.
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


class OpenPool(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Workers of their own, here and on other nodes. `setup`: an object with (initializer,
    initargs). `exact`: no worker elsewhere is given a task beyond the one that it runs. Reply:
    pool number."""

    workers: int
    max_tasks: int
    setup: int
    far: list[tuple[int, int]] = []  # (node, workers there)
    exact: bool = False
    env: Environment = ()
    demand: Wanted = ()  # resources that each worker keeps for life


class AddWorkers(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """More workers for everybody's tasks on that node. Reply: nothing, or a ValueError's text."""

    count: int
    node: int


class BindPool(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A pool whose tasks all run on one other node. Reply: pool number."""

    node: int


class ClosePool(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The pool's workers end when idle; `kill`: at once. No reply."""

    pool: int
    kill: bool


class DrainNode(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """That node of the cluster shall leave it. Reply: at once."""

    node: int


class Locate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Who holds an object? Reply: numbers of nodes."""

    oid: int


class Members(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply: of each living node (number, address, host, workers, bytes used, bytes in all,
    resources, how much of these is free as far as this node knows)."""


class GoneNodes(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply: of the last hosts that this node has seen go: (number, name, seconds ago)."""


class LeavingNodes(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply: the numbers of the nodes that are about to leave the cluster and take no more work."""


class Standing(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply: (number of this node in its cluster, cluster id, addresses of the standby, where it is
    if it is this host's, number of the node whose host has one of those addresses or -1, whether
    the manager is there); or (name of an error, its text) if it could not join."""


class Stats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply: counters of this host."""


class TraceBegin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Every node writes down what happens, from now on. `trace`: a random number. Reply: why not,
    or ""."""

    trace: int


class TraceEnd(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The end of that trace. Reply: of each node (number, bytes of its document, what is known of
    its clock: (time here, how much its clock is ahead, error at most) in ns, up to two of them),
    the numbers of nodes that are lost, and of programs' nodes, without workers, that have left."""

    trace: int


class TracePiece(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply: bytes of that node's document from `offset` on; None: the node is lost."""

    trace: int
    node: int
    offset: int


class TraceDrop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nobody needs that trace any more. Reply: when all nodes know it."""

    trace: int


class Dump(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What does everybody wait for? Reply: (node, bytes to be read) of those that have answered,
    and the numbers of the others."""

    stacks: bool


class DumpRead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply: bytes of that node's answer to the last Dump from `offset` on."""

    node: int
    offset: int


Ask: TypeAlias = (
    Lease
    | LeaseSpan
    | GiveSpans
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
    | DrainNode
    | GroupCall
    | GroupSend
    | GroupInbox
    | GroupReceived
    | GroupWritten
    | GroupJoin
    | GroupLeave
    | GroupRefusal
    | GroupAdmit
    | Locate
    | Members
    | GoneNodes
    | LeavingNodes
    | Standing
    | SetUp
    | SetupFailed
    | Stats
    | TraceBegin
    | TraceEnd
    | TracePiece
    | TraceDrop
    | Dump
    | DumpRead
    | ActorAsk
    | ResourceAsk
    | MarkLines
    | RoundAsk
    | TryAgain
    | HoldForeign
    | UsersOfNode
)


class Request(msgspec.Struct, frozen=True, array_like=True):
    """`number` 0: no reply wanted. `seen`: the last reply that arrived; a lease in a later one
    that was lost on the way is taken back."""

    number: int
    seen: int
    ask: Ask


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """`error`: text of what was wrong; `full`: the store has no room now, ask again or give up;
    `gone`: what is wrong is that a node is not there any more."""

    number: int
    value: Any = None
    error: str = ""
    full: bool = False
    gone: bool = False


class Attached(msgspec.Struct, frozen=True, tag=True):
    """Node to a driver that has come by itself, with descriptors (control memory, store, the node's
    eventfd, rpc, output): its client slot, the slot's generation, and what all clients must do
    alike. The connection that carries it stays open until the driver reads nothing any more."""

    slot: int
    generation: int
    memory_bytes: int
    small_object_bytes_max: int
    span_bytes: int
    audience: int = 0  # its name where lines of workers are sent; see protocol/output.py


class NotAttached(msgspec.Struct, frozen=True, tag=True):
    """Instead: why this host's node has no place for it now."""

    reason: str
