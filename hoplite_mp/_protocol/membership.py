"""The messages about nodes: how they join, leave and are lost, and how fast their links are.

    NodeJoined ─► NodeAdmitted to the newcomer, MembersChanged to all others
    NodeLeaving ─► no new work for it; Leave, as soon as nothing that runs needs it
    NodeLost ─► MembersChanged to all that are left

A node names its *host id* (the id of its host's life), and the manager gives it a *node* number,
in order of joining: 0, 1, 2 ... The first to join is 0, so the node that is forked together with
its manager knows its number and need not wait for the answer. A number belongs to its host id for
ever: a node that joins again with a known one gets its old number, if its incarnation is higher.
"""

from __future__ import annotations

import msgspec

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
    rate,
    seconds,
    text,
)
from hoplite_mp._protocol.resources import Wanted

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

    `addresses`: those at which other nodes can reach it, best first; none: it cannot be reached.
    `memory_total` is the limit of its store in bytes. `stays`: it is one of the hosts of which half
    must follow a manager that has a standby; False for the node of a program, which ends with it.
    `resources`: what it has, by name, in units of 1/10000.
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
    """That life of the node is over, with its clients and its operations."""

    node: int
    incarnation: int

    def __post_init__(self) -> None:
        counts(node=self.node, incarnation=self.incarnation)


class NodeLeaving(Message, frozen=True, tag="NodeLeaving"):
    """That life of the node is about to end: it becomes no parent or owner any more. Answer: Leave.

    The node itself moves what only it holds before: it requests a broadcast to another node.
    """

    node: int
    incarnation: int

    def __post_init__(self) -> None:
        counts(node=self.node, incarnation=self.incarnation)


class PeerLost(Message, frozen=True, tag="PeerLost"):
    """`node` has lost its connection to `peer`, or found no way to it, and has not received since
    that `peer` is gone. The manager, which both can reach, must choose between them."""

    node: int
    peer: int

    def __post_init__(self) -> None:
        counts(node=self.node, peer=self.peer)


class LinkMeasured(Message, frozen=True, tag="LinkMeasured"):
    """The path from `node` to `peer`, as one of them has measured it: half a round trip, or its
    rate, if neither of the two hosts' own links limited the transfer."""

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
    """The rate in each direction that all transfers of `node` together reached while some were
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
    """A living node as the others know it."""

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
    the newcomer. `given`: how many numbers were given to nodes since the cluster began; the nodes
    of those that no member has are gone."""

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
    """The cluster's certificate and its key (PEM), with which a node serves other nodes. First
    message on a connection that TLS protects; without TLS it is not sent."""

    pem: bytes

    def __post_init__(self) -> None:
        between("bytes of pem", len(self.pem), 1, PEM_BYTES_MAX)


class MembersChanged(Message, frozen=True, tag="MembersChanged"):
    """First the nodes `went`, then the nodes `came`. A number in both has begun a new life. `left`:
    the nodes of `went` that had announced their end."""

    came: tuple[Member, ...]
    went: tuple[int, ...]
    left: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers("went", self.went, NODES_MAX - 1)
        numbers("left", self.left, NODES_MAX - 1)
        if not self.came and not self.went:
            raise ValueError("came and went are both empty: nothing has changed")


class GivenUp(Message, frozen=True, tag="GivenUp"):
    """This life of the node is over. It was silent for `silent_s` and was declared dead; 0: it was
    given up for another reason, for example because it and another node have lost each other."""

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
