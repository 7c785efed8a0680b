"""Messages about nodes: joining, leaving, loss, link speeds, and reports to a new manager.

    NodeJoined ─► NodeAdmitted to the newcomer, MembersChanged to all others
    NodeLeaving ─► no new work for it; Leave, once no running operation needs it
    NodeLost ─► MembersChanged to all remaining nodes

A node sends its *host id*, and the manager assigns *node* numbers in order of joining: 0, 1, 2 ...
The first number is 0, so the node that is forked together with its manager need not wait for the
answer. Numbers are never reassigned: a node that rejoins with a known host id and a higher
incarnation gets its old number.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from hoplite_mp._protocol.copies import Distribute
from hoplite_mp._protocol.fields import (
    ADDRESS_CHARS_MAX,
    ADDRESSES_MAX,
    HOST_CHARS_MAX,
    NODES_MAX,
    Message,
    amounts,
    between,
    counts,
    flags,
    numbers,
    object_id,
    object_ids,
    rate,
    seconds,
    text,
)
from hoplite_mp._protocol.groups import GroupEnd, GroupMembers
from hoplite_mp._protocol.operations import Commit, ExecuteReduce, Forget, OperationFailed
from hoplite_mp._protocol.resources import Demand

__all__ = [
    "NodeReturned",
    "OperationEnded",
    "Report",
    "ReportComplete",
    "ReportedCopy",
    "ReportedDistribute",
    "ReportedGroup",
    "ReportedOwners",
    "ReportedReduce",
]


PEM_BYTES_MAX = 16 << 10  # usually about 1 KiB


def _addresses(value: object) -> None:
    if not isinstance(value, tuple) or len(value) > ADDRESSES_MAX:
        raise ValueError(f"addresses must be a tuple of at most {ADDRESSES_MAX}, not {value!r}")
    for address in value:
        text("address", address, ADDRESS_CHARS_MAX, 1)
        ip, colon, port = address.rpartition(":")
        bracketed = ip.startswith("[") and ip.endswith("]")
        if not colon or not ip or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"addresses must be ip:port, not {address!r}")
        if ":" in ip and not bracketed:
            raise ValueError(f"addresses must have IPv6 in [ ], not {address!r}")


# ---- node -> manager


class NodeJoined(Message, frozen=True, tag="NodeJoined"):
    """A node joins. (A node that returns to a new manager sends NodeReturned instead.) Each rejoin
    of a host increments its incarnation.

    `addresses`: the node's addresses for other nodes, best first; empty: it cannot be reached.
    `memory_total` is the limit of its store in bytes. `stays`: the node counts for leases and votes
    in a cluster with a standby; False for the node of a program, which ends with the program.
    `resources`: its resources by name, in units of 1/10000.
    """

    host_id: int
    incarnation: int
    workers: int
    host: str = ""
    addresses: tuple[str, ...] = ()
    memory_total: int = 0
    stays: bool = False
    resources: Demand = ()

    def __post_init__(self) -> None:
        flags(stays=self.stays)
        counts(host_id=self.host_id, incarnation=self.incarnation, workers=self.workers)
        counts(memory_total=self.memory_total)
        text("host", self.host, HOST_CHARS_MAX)
        _addresses(self.addresses)
        amounts("resources", self.resources)


class NodeLost(Message, frozen=True, tag="NodeLost"):
    """That incarnation of the node is lost, with its clients and operations."""

    node: int
    incarnation: int

    def __post_init__(self) -> None:
        counts(node=self.node, incarnation=self.incarnation)


class NodeLeaving(Message, frozen=True, tag="NodeLeaving"):
    """That incarnation of the node is about to leave: from now on, no plan makes it a parent (a
    node that sends to others), and no object gets it as its owner. Answer: Leave. Meanwhile the
    node broadcasts the objects of which it has the only copy.
    """

    node: int
    incarnation: int

    def __post_init__(self) -> None:
        counts(node=self.node, incarnation=self.incarnation)


class PeerLost(Message, frozen=True, tag="PeerLost"):
    """`node` has lost its connection to `peer`, or found no path to it, while `peer` is still a
    member. The manager, which both can reach, must choose between them."""

    node: int
    peer: int

    def __post_init__(self) -> None:
        counts(node=self.node, peer=self.peer)


class LinkMeasured(Message, frozen=True, tag="LinkMeasured"):
    """A measurement of the path from `node` to `peer` by one of them: half a round trip, or the
    rate of the path if neither host's own link limited the transfer."""

    node: int
    peer: int
    latency_s: float | None
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        counts(node=self.node, peer=self.peer)
        if self.latency_s is not None:
            seconds("latency_s", self.latency_s)
        rate("bytes_per_s", self.bytes_per_s)


class HostMeasured(Message, frozen=True, tag="HostMeasured"):
    """The total rate of all transfers of `node` in each direction, measured while some transfers
    were backlogged."""

    node: int
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        counts(node=self.node)
        rate("up_bytes_per_s", self.up_bytes_per_s)
        rate("down_bytes_per_s", self.down_bytes_per_s)


# ---- manager -> node


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A living node."""

    node: int
    incarnation: int
    host_id: int
    workers: int
    host: str = ""
    addresses: tuple[str, ...] = ()
    memory_total: int = 0
    stays: bool = False  # as in NodeJoined
    resources: Demand = ()  # as in NodeJoined

    def __post_init__(self) -> None:
        flags(stays=self.stays)
        between("node", self.node, 0, NODES_MAX - 1)
        counts(incarnation=self.incarnation, host_id=self.host_id, workers=self.workers)
        counts(memory_total=self.memory_total)
        text("host", self.host, HOST_CHARS_MAX)
        _addresses(self.addresses)
        amounts("resources", self.resources)


class NodeAdmitted(Message, frozen=True, tag="NodeAdmitted"):
    """The answer to a join: the newcomer's number, and all living nodes in order of joining,
    including the newcomer. `given`: how many numbers have been assigned; numbers without a member
    belong to lost nodes."""

    node: int
    incarnation: int
    members: tuple[Member, ...]
    given: int

    def __post_init__(self) -> None:
        between("node", self.node, 0, NODES_MAX - 1)
        counts(incarnation=self.incarnation)
        if not any(m.node == self.node for m in self.members):
            raise ValueError(f"members must contain node {self.node}: {self.members!r}")
        between("given", self.given, max(m.node for m in self.members) + 1, NODES_MAX)


class Credentials(Message, frozen=True, tag="Credentials"):
    """The cluster's certificate and its key (PEM), which a node uses to serve other nodes. It is
    the first message on a connection with TLS; without TLS it is not sent."""

    pem: bytes

    def __post_init__(self) -> None:
        between("bytes of pem", len(self.pem), 1, PEM_BYTES_MAX)


class MembersChanged(Message, frozen=True, tag="MembersChanged"):
    """Nodes in `removed` are removed before nodes in `added` are added. A node in both has a new
    incarnation. `left`: the nodes in `removed` that left and were not lost."""

    added: tuple[Member, ...]
    removed: tuple[int, ...]
    left: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers("removed", self.removed, NODES_MAX - 1)
        numbers("left", self.left, NODES_MAX - 1)
        if not self.added and not self.removed:
            raise ValueError("added and removed are both empty")


class DeclaredDead(Message, frozen=True, tag="GivenUp"):
    """This incarnation of the node was declared dead after `silent_s` of silence; 0: for another
    reason, for example a lost connection to another node."""

    silent_s: float

    def __post_init__(self) -> None:
        seconds("silent_s", self.silent_s)


class ClusterEnded(Message, frozen=True, tag="ClusterEnded"):
    """The manager's last message: the cluster shuts down, and no other manager takes over."""


class Leave(Message, frozen=True, tag="Leave"):
    """The answer to NodeLeaving: no running operation needs the node, so it may exit."""

    node: int
    incarnation: int

    def __post_init__(self) -> None:
        counts(node=self.node, incarnation=self.incarnation)


# The report of a node to a new manager: the previous manager's state about this node.
#
#   NodeReturned ─► facts, in any order ─► ordinary messages, repeated ─► ReportComplete
#
# A manager's state comes from nodes, so they can report it again. Messages between NodeReturned and
# ReportComplete that are not defined in this file are repeated ordinary messages: unanswered
# requests, and failures that the previous manager may not have received.


class NodeReturned(Message, frozen=True, tag="NodeReturned"):
    """The first message to a manager other than the one that admitted this node. `members`: all
    members known to this node, including the node itself.

    The new manager continues the previous manager's counters; otherwise numbers could be reused,
    and late messages could be misattributed. The counters as known to this node are: `numbers`, the
    number of assigned node numbers; `epochs`, the highest epoch of a Distribute; `copied`, the
    number of operations for copies; `generations`, the highest generation of a group."""

    node: int
    incarnation: int
    numbers: int
    members: tuple[Member, ...]
    epochs: int = 0
    copied: int = 0
    generations: int = 0

    def __post_init__(self) -> None:
        between("node", self.node, 0, NODES_MAX - 1)
        counts(incarnation=self.incarnation, epochs=self.epochs, copied=self.copied)
        counts(generations=self.generations)
        if not any((m.node, m.incarnation) == (self.node, self.incarnation) for m in self.members):
            raise ValueError(f"members must contain node {self.node}: {self.members!r}")
        between("numbers", self.numbers, max(m.node for m in self.members) + 1, NODES_MAX)


class ReportedCopy(Message, frozen=True, tag="CopyHeld"):
    """This node has a complete copy of another host's object, which it had reported to the previous
    manager."""

    node: int
    object: bytes
    nbytes: int

    def __post_init__(self) -> None:
        counts(node=self.node, nbytes=self.nbytes)
        object_id("object", self.object)


class ReportedDistribute(Message, frozen=True, tag="DistributeHeld"):
    """A running plan of this node; `receiving`: the node receives the object by this plan."""

    node: int
    plan: Distribute
    receiving: bool

    def __post_init__(self) -> None:
        counts(node=self.node)
        flags(receiving=self.receiving)


class ReportedReduce(Message, frozen=True, tag="ReduceHeld"):
    """The latest plan of an operation in which this node takes part; `reported`: the node has sent
    StripesComplete."""

    node: int
    plan: ExecuteReduce
    reported: bool

    def __post_init__(self) -> None:
        counts(node=self.node)
        flags(reported=self.reported)


class OperationEnded(Message, frozen=True, tag="OperationEnded"):
    """The message that ended an operation. This node has received it recently; other nodes may have
    missed it."""

    node: int
    end: Commit | OperationFailed | Forget

    def __post_init__(self) -> None:
        counts(node=self.node)


class ReportedGroup(Message, frozen=True, tag="GroupHeld"):
    """A group with a board on this node. `shown`: its last GroupMembers. `here`: its members on
    this node, as (rank, client slot, generation of the slot). `left`: ranks that are on this node
    according to `shown`, but are gone. `died`: the ranks in `left` that died without leaving."""

    node: int
    shown: GroupMembers
    here: tuple[tuple[int, int, int], ...]
    left: tuple[int, ...] = ()
    died: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts(node=self.node)
        numbers("left", self.left, self.shown.size - 1)
        numbers("died", self.died, self.shown.size - 1)
        for rank, client, generation in self.here:
            between("rank", rank, 0, self.shown.size - 1)
            counts(client=client, generation=generation)


class ReportedOwners(Message, frozen=True, tag="OwnersKnown"):
    """Objects whose first owner is gone, with their later owners as known to this node. The node
    also repeats OrphansReported for every death that left such objects on it, as if there were no
    new owners, because the new owners may not have received OwnersReassigned."""

    node: int
    objects: tuple[bytes, ...]
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        counts(node=self.node)
        object_ids("objects", self.objects, 0)
        numbers("owners", self.owners, NODES_MAX - 1)
        between("number of owners", len(self.owners), len(self.objects), len(self.objects))


class ReportComplete(Message, frozen=True, tag="Reported"):
    """The end of the node's report."""

    node: int

    def __post_init__(self) -> None:
        counts(node=self.node)


Report: TypeAlias = (
    NodeReturned
    | ReportedCopy
    | ReportedDistribute
    | ReportedReduce
    | OperationEnded
    | ReportedGroup
    | GroupEnd
    | ReportedOwners
    | ReportComplete
)
