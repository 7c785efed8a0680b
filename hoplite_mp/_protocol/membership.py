"""The messages about nodes: joining, leaving, loss, the speed of links, reports to a new manager.

    NodeJoined ─► NodeAdmitted to the newcomer, MembersChanged to all others
    NodeLeaving ─► no new work for it; Leave, as soon as nothing that runs needs it
    NodeLost ─► MembersChanged to all that are left

A node names its *host id* (the id of its host's life), and the manager gives it a *node* number, in
order of joining: 0, 1, 2 ... The first number is 0, so the node that is forked together with its
manager need not wait for the answer. A number belongs to its host id for ever: a node that joins
again with a known host id gets its old number, if its incarnation is higher.
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
from hoplite_mp._protocol.resources import Wanted

__all__ = [
    "CopyHeld",
    "DistributeHeld",
    "GroupHeld",
    "NodeReturned",
    "OperationEnded",
    "OwnersKnown",
    "ReduceHeld",
    "Report",
    "Reported",
]


PEM_BYTES_MAX = 16 << 10  # about 1 KiB is usual


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
    """A node joins: the first message of a new life on a connection. (A node that returns to a new
    manager sends NodeReturned instead.) The next life of a host: incarnation + 1.

    `addresses`: the node's addresses for other nodes, best first; none: it cannot be reached.
    `memory_total` is the limit of its store in bytes. `stays`: it is one of the hosts of which half
    must follow a manager that has a standby; False for the node of a program, which ends with the
    program. `resources`: its resources by name, in units of 1/10000.
    """

    host_id: int
    incarnation: int
    workers: int
    host: str = ""
    addresses: tuple[str, ...] = ()
    memory_total: int = 0
    stays: bool = False
    resources: Wanted = ()

    def __post_init__(self) -> None:
        flags(stays=self.stays)
        counts(host_id=self.host_id, incarnation=self.incarnation, workers=self.workers)
        counts(memory_total=self.memory_total)
        text("host", self.host, HOST_CHARS_MAX)
        _addresses(self.addresses)
        amounts("resources", self.resources)


class NodeLost(Message, frozen=True, tag="NodeLost"):
    """That life of the node is over, and so are its clients and its operations."""

    node: int
    incarnation: int

    def __post_init__(self) -> None:
        counts(node=self.node, incarnation=self.incarnation)


class NodeLeaving(Message, frozen=True, tag="NodeLeaving"):
    """That life of the node is about to end: it will not become a parent or owner. Answer: Leave.

    Before that, the node itself moves objects of which it has the only copy, by broadcasts.
    """

    node: int
    incarnation: int

    def __post_init__(self) -> None:
        counts(node=self.node, incarnation=self.incarnation)


class PeerLost(Message, frozen=True, tag="PeerLost"):
    """`node` has lost its connection to `peer`, or found no path to it, and has not been informed
    of the end of `peer`. The manager, which both can reach, must choose between them."""

    node: int
    peer: int

    def __post_init__(self) -> None:
        counts(node=self.node, peer=self.peer)


class LinkMeasured(Message, frozen=True, tag="LinkMeasured"):
    """The path from `node` to `peer`, as measured by one of them: half a round trip, or the rate of
    the path, if neither of the two hosts' own links limited the transfer."""

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
    """The rate of all transfers of `node` together in each direction, while some of them were
    backlogged."""

    node: int
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        counts(node=self.node)
        rate("up_bytes_per_s", self.up_bytes_per_s)
        rate("down_bytes_per_s", self.down_bytes_per_s)


# ---- manager -> node


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A living node as other nodes know it."""

    node: int
    incarnation: int
    host_id: int
    workers: int
    host: str = ""
    addresses: tuple[str, ...] = ()
    memory_total: int = 0
    stays: bool = False  # as in NodeJoined
    resources: Wanted = ()  # as in NodeJoined

    def __post_init__(self) -> None:
        flags(stays=self.stays)
        between("node", self.node, 0, NODES_MAX - 1)
        counts(incarnation=self.incarnation, host_id=self.host_id, workers=self.workers)
        counts(memory_total=self.memory_total)
        text("host", self.host, HOST_CHARS_MAX)
        _addresses(self.addresses)
        amounts("resources", self.resources)


class NodeAdmitted(Message, frozen=True, tag="NodeAdmitted"):
    """The answer to a join: the newcomer's number, and all living nodes in order of joining, with
    the newcomer. `given`: how many numbers were assigned since the cluster began; numbers without a
    member belong to lost nodes."""

    node: int
    incarnation: int
    members: tuple[Member, ...]
    given: int

    def __post_init__(self) -> None:
        between("node", self.node, 0, NODES_MAX - 1)
        counts(incarnation=self.incarnation)
        if not any(m.node == self.node for m in self.members):
            raise ValueError(f"members must hold node {self.node} itself: {self.members!r}")
        between("given", self.given, max(m.node for m in self.members) + 1, NODES_MAX)


class Credentials(Message, frozen=True, tag="Credentials"):
    """The cluster's certificate and its key (PEM), with which a node serves other nodes. It is the
    first message on a connection with TLS; without TLS it is not sent."""

    pem: bytes

    def __post_init__(self) -> None:
        between("bytes of pem", len(self.pem), 1, PEM_BYTES_MAX)


class MembersChanged(Message, frozen=True, tag="MembersChanged"):
    """First the nodes `went` are removed, then the nodes `came` are added. A number in both has
    begun a new life. `left`: nodes of `went` that had announced their end."""

    came: tuple[Member, ...]
    went: tuple[int, ...]
    left: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers("went", self.went, NODES_MAX - 1)
        numbers("left", self.left, NODES_MAX - 1)
        if not self.came and not self.went:
            raise ValueError("came and went are both empty: nothing has changed")


class GivenUp(Message, frozen=True, tag="GivenUp"):
    """This life of the node is over. It was silent for `silent_s` and was declared dead; 0: there
    was another reason, for example a lost connection to another node."""

    silent_s: float

    def __post_init__(self) -> None:
        seconds("silent_s", self.silent_s)


class ClusterEnded(Message, frozen=True, tag="ClusterEnded"):
    """The manager's last message: the cluster ends, and there will be no manager at this address
    again."""


class Leave(Message, frozen=True, tag="Leave"):
    """The answer to NodeLeaving: no running operation needs the node any more, so it may end."""

    node: int
    incarnation: int

    def __post_init__(self) -> None:
        counts(node=self.node, incarnation=self.incarnation)


# The report of a node to a new manager: all that the previous manager knew about this node.
#
#   NodeReturned ─► facts, in any order ─► ordinary messages, repeated ─► Reported
#
# A manager's knowledge comes from nodes, so the nodes can report all of it again. Messages between
# NodeReturned and Reported that are not defined in this file are ordinary messages, sent again:
# requests without an answer, and failures that the last manager may not have received.


class NodeReturned(Message, frozen=True, tag="NodeReturned"):
    """First message to a manager other than the one that admitted this node. `members`: all members
    known to this node, with itself.

    The manager continues the counts of the previous manager; otherwise numbers could be used twice,
    and late messages misattributed. The highest values known to this node: how many `numbers` were
    assigned to nodes, the epoch of a Distribute, how many objects had an operation for their copies
    (`copied`), the generation of a group."""

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
            raise ValueError(f"members must hold node {self.node} itself: {self.members!r}")
        between("numbers", self.numbers, max(m.node for m in self.members) + 1, NODES_MAX)


class CopyHeld(Message, frozen=True, tag="CopyHeld"):
    """This node has the whole object of another host, and the previous manager knew this."""

    node: int
    object: bytes
    nbytes: int

    def __post_init__(self) -> None:
        counts(node=self.node, nbytes=self.nbytes)
        object_id("object", self.object)


class DistributeHeld(Message, frozen=True, tag="DistributeHeld"):
    """A plan that runs on this node; `receiving`: the node is receiving the object by this plan."""

    node: int
    plan: Distribute
    receiving: bool

    def __post_init__(self) -> None:
        counts(node=self.node)
        flags(receiving=self.receiving)


class ReduceHeld(Message, frozen=True, tag="ReduceHeld"):
    """The latest plan of an operation in which this node takes part; `reported`: the node has sent
    StripesComplete."""

    node: int
    plan: ExecuteReduce
    reported: bool

    def __post_init__(self) -> None:
        counts(node=self.node)
        flags(reported=self.reported)


class OperationEnded(Message, frozen=True, tag="OperationEnded"):
    """This node has recently received the end of an operation; other nodes may not have."""

    node: int
    end: Commit | OperationFailed | Forget

    def __post_init__(self) -> None:
        counts(node=self.node)


class GroupHeld(Message, frozen=True, tag="GroupHeld"):
    """A group with a board on this node, as last shown, and its members on this node: (rank, client
    slot, generation of the slot). `left`: ranks of this node that are shown, but are gone; those in
    `died` have died without leaving."""

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


class OwnersKnown(Message, frozen=True, tag="OwnersKnown"):
    """Objects whose first owner is gone, and their later owners, as known to this node. The node
    also sends HoldingsReported again for every death that left such objects here, as if there were
    no new owners yet, because the new owners may not have received OwnersNamed."""

    node: int
    objects: tuple[bytes, ...]
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        counts(node=self.node)
        object_ids("objects", self.objects, 0)
        numbers("owners", self.owners, NODES_MAX - 1)
        between("number of owners", len(self.owners), len(self.objects), len(self.objects))


class Reported(Message, frozen=True, tag="Reported"):
    """The end of the node's report."""

    node: int

    def __post_init__(self) -> None:
        counts(node=self.node)


Report: TypeAlias = (
    NodeReturned
    | CopyHeld
    | DistributeHeld
    | ReduceHeld
    | OperationEnded
    | GroupHeld
    | GroupEnd
    | OwnersKnown
    | Reported
)
