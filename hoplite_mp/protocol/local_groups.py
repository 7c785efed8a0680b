"""What a member of a Group and its node say to each other on one host.

Why it exists: a part of `local.py`, by its subject. Calls on one host need none of these but the
joining and the leaving; with members on other hosts each call is a message to the node.
It must never know: how a call is decided.
"""

from __future__ import annotations

import msgspec

from hoplite_mp.protocol.point_to_point import TAG_MAX

__all__ = [
    "INBOX_MAX",
    "TAG_MAX",
    "GroupAdmit",
    "GroupCall",
    "GroupInbox",
    "GroupJoin",
    "GroupLeave",
    "GroupReceived",
    "GroupRefusal",
    "GroupSend",
    "GroupWritten",
]

INBOX_MAX = 1000  # messages that one reply names


class GroupJoin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply: (board, generation, rank, are there other hosts?, identity of the caller: node, slot,
    generation of the slot), or a ValueError's message; a text: the group that the caller's task was
    in has ended. `parent`, `founders`: as in GroupJoinRequested."""

    name: str
    size: int
    rank: int | None
    parent: int = 0
    founders: list[tuple[int, int, int, int]] = []


class GroupCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A member's next call, in a group with members on other hosts. Each part is a payload, or an
    object that the member holds until the call is over, or a block of the store that the member
    hands over and goes on writing. No reply."""

    generation: int
    rank: int
    call: int
    kind: str
    op: str
    root: int
    parts: list[bytes | int | tuple[int, int, int]]  # the last: (payload, bytes, written bytes)
    mistake: str = ""
    error: str = "value"  # of what kind the mistake is, as in GroupCommit


class GroupWritten(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The member has written these ranges of that block's payload. No reply."""

    payload: int
    ranges: list[tuple[int, int]]


class GroupSend(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This member sends that object to a rank. The caller holds it, and the objects inside it
    (`refs`), until the reply: "", or why nobody will receive it."""

    generation: int
    rank: int
    to: int
    tag: int
    oid: int
    nbytes: int
    refs: list[bytes]


class GroupInbox(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What has come for this member after the message with the number `seen`? Reply: ([(number,
    source, tag, object)], by rank how many members are over and all their messages named, ranks of
    which nothing will come as bits, are there more messages?). The node holds them until
    GroupReceived."""

    generation: int
    rank: int
    seen: int


class GroupReceived(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This member needs that message no more. No reply."""

    generation: int
    rank: int
    number: int


class GroupLeave(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This member will not call again. No reply."""

    name: str
    generation: int
    rank: int


class GroupRefusal(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Why does nobody come? Reply: (is this member none any more?, why), or else why the last one
    was refused a place in that group, or ""."""

    name: str
    generation: int
    rank: int


class GroupAdmit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The leader has let a joining rank in, at a commit. No reply."""

    name: str
    generation: int
    rank: int
