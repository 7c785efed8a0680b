"""What a member of a Group and its node say to each other on one host.

Why it exists: a part of `local.py`, by its subject. Calls on one host need none of these but the
joining and the leaving; with members on other hosts each call is a message to the node.
It must never know: how a call is decided.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "GroupAdmit",
    "GroupCall",
    "GroupJoin",
    "GroupLeave",
    "GroupRefusal",
    "GroupWritten",
]


class GroupJoin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply: (board, generation, rank, are there other hosts?), or a ValueError's message; a text:
    the group that the caller's task was in has ended."""

    name: str
    size: int
    rank: int | None


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


class GroupLeave(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This member will not call again. No reply."""

    name: str
    generation: int
    rank: int


class GroupRefusal(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Why does nobody come? Reply: who was last refused a place in that group, and why, or ""."""

    name: str


class GroupAdmit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The leader has let a joining rank in, at a commit. No reply."""

    name: str
    generation: int
    rank: int
