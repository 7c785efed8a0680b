"""Messages from a Group's members to their node, and point-to-point messages between nodes.

    sender's node ── PeerGroupMessage ──►  receiver's node     in the order in which they were sent
                  ◄─ PeerGroupMessageAck ──                    the sender may release the message
                  ── GroupSourceEnded ──►                      the member has ended

A message is an object on the sender's host. That host holds the object until the receiver's host
has a copy of it (small objects) or is counted as its holder (large objects). Connections between
nodes preserve order, so all messages of a member arrive before the report of its end.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from hoplite_mp._common.ids import ID_BYTES
from hoplite_mp._protocol.fields import (
    RANKS_MAX,
    SOURCES_MAX,
    Message,
    between,
    counts,
    flags,
)

__all__ = [
    "BOUNDED_TAG",
    "INBOX_MAX",
    "MESSAGE_INLINE_BYTES_MAX",
    "RESULT_TAG",
    "TAG_MAX",
    "USER_TAG_MAX",
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
    "GroupSourceEnded",
    "PeerGroupMessage",
    "PeerGroupMessageAck",
    "PointToPoint",
]

TAG_MAX = (1 << 31) - 1
RESULT_TAG = TAG_MAX  # for results of Group calls; users' tags are lower
BOUNDED_TAG = TAG_MAX - 1  # for arrays of bounded allreduces
USER_TAG_MAX = TAG_MAX - 2
# Messages up to this size are sent inside PeerGroupMessage. Higher: fewer fetches; lower: other
# messages on the connection wait less.
MESSAGE_INLINE_BYTES_MAX = 64 << 10


class PeerGroupMessage(Message, frozen=True, tag="GroupSent"):
    """A message from rank `source` on the sender's node to rank `to` on the receiver's node.
    `version`: the version of the members (GroupMembers) when it was sent; the receiver keeps the
    message until it has received this version. `payload`: the whole payload, if it is small.
    `refs`: ids of the objects that the payload refers to."""

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
        for object_id in (self.object, *self.refs):
            if type(object_id) is not bytes or len(object_id) != ID_BYTES:
                raise ValueError(f"object and refs must have {ID_BYTES} bytes, not {object_id!r}")
        if self.payload is not None and len(self.payload) > MESSAGE_INLINE_BYTES_MAX:
            raise ValueError(
                f"payload of {len(self.payload)} bytes is too large for PeerGroupMessage"
            )


class PeerGroupMessageAck(Message, frozen=True, tag="GroupSentTaken"):
    """The sending node may release the message."""

    generation: int
    number: int

    def __post_init__(self) -> None:
        counts(generation=self.generation, number=self.number)


class GroupSourceEnded(Message, frozen=True, tag="GroupSourceEnded"):
    """The member with this rank on the sender's node has ended, as of that version of the members.
    All its messages have been forwarded. `missed_versions`: the sender has missed some versions
    after a manager's death; members with this rank on this node in the missed versions send
    nothing."""

    generation: int
    version: int
    rank: int
    missed_versions: bool = False

    def __post_init__(self) -> None:
        counts(generation=self.generation, version=self.version)
        between("rank", self.rank, 0, RANKS_MAX - 1)
        flags(missed_versions=self.missed_versions)


PointToPoint: TypeAlias = PeerGroupMessage | PeerGroupMessageAck | GroupSourceEnded


# Messages between a member of a Group and its node, in addition to those in `local.py`.
#
# A group on one host needs these messages only when members join and leave. In a group with members
# on other hosts, each call is a message to the node.


INBOX_MAX = 1000  # maximum number of messages in a reply


class GroupJoin(msgspec.Struct, frozen=True, tag="GroupJoin", array_like=True):
    """Joins a Group. Reply: (board, generation, rank, whether there are other hosts, identity of
    the caller: node, slot, generation of the slot); a string (the reason) if the earlier group of
    the caller's task has ended; or the text of a ValueError. `parent`, `founders`: as in
    GroupJoinRequested. `call`: the caller's task, if its process runs several tasks; otherwise
    0."""

    name: str
    size: int
    rank: int | None
    parent: int = 0
    founders: list[tuple[int, int, int, int]] = []
    call: int = 0


class GroupDoorbell(msgspec.Struct, frozen=True, tag="GroupBell", array_like=True):
    """Passes an eventfd to which the member writes when its contribution to a small call is on the
    board. Reply: None, once the node is watching the eventfd."""

    generation: int
    rank: int


class GroupBuffers(msgspec.Struct, frozen=True, tag="GroupBuffers", array_like=True):
    """Requests adjacent call buffers of `nbytes`, two for each rank. Reply: the offset of the first
    buffer in the store, the same for all members; None: there is no free memory, or the caller is
    no longer a member."""

    generation: int
    rank: int
    nbytes: int


class GroupCall(msgspec.Struct, frozen=True, tag="GroupCall", array_like=True):
    """A member's next call, in a group with members on other hosts. Each part is a payload, an
    object that the member holds until the call has ended, or a block of the store that the member
    is still writing. No reply."""

    generation: int
    rank: int
    call: int
    kind: str
    op: str
    root: int
    parts: list[bytes | int | tuple[int, int, int]]  # tuple: (payload, bytes, written bytes)
    mistake: str = ""
    error: str = "value"  # the kind of the mistake, as in GroupCommit


class GroupBlockWritten(msgspec.Struct, frozen=True, tag="GroupWritten", array_like=True):
    """The member has written these ranges of that block's payload. No reply."""

    payload: int
    ranges: list[tuple[int, int]]


class GroupSend(msgspec.Struct, frozen=True, tag="GroupSend", array_like=True):
    """Sends an object to a rank. The caller holds the object, and the objects that it refers to,
    until the reply arrives. Reply: "", or the reason why the message will not be received. `refs`:
    ids of the objects that the object refers to; None: they do not fit into a packet, so the node
    reads them from the object, which the caller has pinned."""

    generation: int
    rank: int
    to: int
    tag: int
    oid: int
    nbytes: int
    refs: list[bytes] | None


class GroupInbox(msgspec.Struct, frozen=True, tag="GroupInbox", array_like=True):
    """Requests the messages to this member with numbers above `seen`. Reply: ([(number, source,
    tag, object)], for each rank the number of ended members whose messages have all been listed, a
    mask of the ranks that will send no more messages, whether there are more messages); None: the
    caller is no longer a member. The node holds the messages until GroupMessageAck."""

    generation: int
    rank: int
    seen: int


class GroupMessageAck(msgspec.Struct, frozen=True, tag="GroupReceived", array_like=True):
    """This member no longer needs that message. No reply."""

    generation: int
    rank: int
    number: int


class GroupLeave(msgspec.Struct, frozen=True, tag="GroupLeave", array_like=True):
    """This member makes no more calls. Reply: None, once the node holds this member's committed
    results for the members that are still reading the results."""

    name: str
    generation: int
    rank: int
    calls: int = 0  # number of calls that have ended for this member


class GroupRefusal(msgspec.Struct, frozen=True, tag="GroupRefusal", array_like=True):
    """Requests the reason why the group is not formed. Reply: (True, the reason why this member was
    removed), or (False, the reason for the last refused join, or "")."""

    name: str
    generation: int
    rank: int


class GroupAdmit(msgspec.Struct, frozen=True, tag="GroupAdmit", array_like=True):
    """The leader has admitted a joining rank, at a commit. No reply."""

    name: str
    generation: int
    rank: int
