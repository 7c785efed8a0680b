"""The report of a node to a new manager: everything that the last one knew about this node.

    NodeReturned ─► facts, in any order ─► ordinary messages, repeated ─► Reported

A manager knows what nodes have reported to it, so they can give it all of that again. The messages
between NodeReturned and Reported that are not of this file are ordinary ones, sent again: requests
without an answer, and failures that the last manager may not have received.
"""

from __future__ import annotations

from typing import TypeAlias

from hoplite_mp._protocol.copies import Distribute
from hoplite_mp._protocol.fields import (
    NODES_MAX,
    Message,
    between,
    counts,
    flags,
    numbers,
    object_id,
    object_ids,
)
from hoplite_mp._protocol.groups import GroupEnd, GroupMembers
from hoplite_mp._protocol.membership import Member
from hoplite_mp._protocol.operations import Commit, ExecuteReduce, Forget, OperationFailed

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


class NodeReturned(Message, frozen=True, tag="NodeReturned"):
    """First message to a manager other than the one that admitted this node. `members`: as this
    node knows them, with itself.

    The manager continues the counts of the last one; otherwise a late message about one thing would
    be taken for a message about another. As far as this node knows: how many `numbers` were given
    to nodes, the highest epoch of a Distribute, how many objects had an operation for their copies
    (`copied`), the highest generation of a group."""

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
    """This node has the whole object of another host, and the last manager knew it."""

    node: int
    object: bytes
    nbytes: int

    def __post_init__(self) -> None:
        counts(node=self.node, nbytes=self.nbytes)
        object_id("object", self.object)


class DistributeHeld(Message, frozen=True, tag="DistributeHeld"):
    """A plan that runs on this node; `receiving`: the node is receiving the object by it."""

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
    """This node was sent the end of an operation not long ago; other nodes may not have been."""

    node: int
    end: Commit | OperationFailed | Forget

    def __post_init__(self) -> None:
        counts(node=self.node)


class GroupHeld(Message, frozen=True, tag="GroupHeld"):
    """A group with a board on this node, as last shown, and its members of this node: (rank, client
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
    """Objects whose first owner is gone, and their later owners, as far as this node has received
    them. The node also sends HoldingsReported again for every death that left such objects here, as
    if no owner were named yet, because the named nodes may not have received OwnersNamed."""

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
