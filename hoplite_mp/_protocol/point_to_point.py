"""The messages between nodes that carry messages from one member of a Group to another.

    sender's node ── GroupSent ──────► receiver's node       in the order in which they were sent
                  ◄─ GroupSentTaken ──                       it holds what it needs, or drops it
                  ── GroupSourceEnded ►                      no more will come from that member

A message is an object of the sender's host. That host holds it until the receiver's host has a copy
of a small one, or counts as a holder of a large one. Connections between nodes keep the order, so
all messages of a member arrive before the report that it is gone.
"""

from __future__ import annotations

from typing import TypeAlias

from hoplite_mp._common.ids import ID_BYTES
from hoplite_mp._protocol.fields import RANKS_MAX, SOURCES_MAX, Message, between, counts, flags

__all__ = [
    "MESSAGE_INLINE_BYTES_MAX",
    "RESULT_TAG",
    "TAG_MAX",
    "GroupSent",
    "GroupSentTaken",
    "GroupSourceEnded",
    "PointToPoint",
]

TAG_MAX = (1 << 31) - 1
RESULT_TAG = TAG_MAX  # of messages that carry results of a Group's calls; users have lower ones
# A message that is not larger travels inside GroupSent. Higher: fewer fetches; lower: other
# messages on that connection wait less.
MESSAGE_INLINE_BYTES_MAX = 64 << 10


class GroupSent(Message, frozen=True, tag="GroupSent"):
    """Rank `source`, on the sender's node, has sent this to rank `to`, on the receiver's node.
    `version`: that of the members (GroupMembers) by which it was sent; a node that has not received
    this version keeps the message until it has. `payload`: the whole payload, if it is small.
    `refs`: objects inside it."""

    generation: int
    version: int
    number: int
    source: int
    to: int
    tag: int
    object: bytes
    payload: bytes | None = None
    refs: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        counts(generation=self.generation, version=self.version, number=self.number)
        between("source", self.source, 0, RANKS_MAX - 1)
        between("to", self.to, 0, RANKS_MAX - 1)
        between("tag", self.tag, 0, TAG_MAX)
        between("number of refs", len(self.refs), 0, SOURCES_MAX)
        for one in (self.object, *self.refs):
            if type(one) is not bytes or len(one) != ID_BYTES:
                raise ValueError(f"object and refs must be of {ID_BYTES} bytes, not {one!r}")
        if self.payload is not None and len(self.payload) > MESSAGE_INLINE_BYTES_MAX:
            raise ValueError(f"a message of {len(self.payload)} bytes does not travel so")


class GroupSentTaken(Message, frozen=True, tag="GroupSentTaken"):
    """The receiving node no longer needs the sending node to hold that message."""

    generation: int
    number: int

    def __post_init__(self) -> None:
        counts(generation=self.generation, number=self.number)


class GroupSourceEnded(Message, frozen=True, tag="GroupSourceEnded"):
    """The member that had this rank on the sender's node is gone, by the members of that version.
    All that it has sent was forwarded before. `unheard`: this node has missed some versions, after
    a manager's death; if one of them showed a member of that rank here, nothing comes from it."""

    generation: int
    version: int
    rank: int
    unheard: bool = False

    def __post_init__(self) -> None:
        counts(generation=self.generation, version=self.version)
        between("rank", self.rank, 0, RANKS_MAX - 1)
        flags(unheard=self.unheard)


PointToPoint: TypeAlias = GroupSent | GroupSentTaken | GroupSourceEnded
