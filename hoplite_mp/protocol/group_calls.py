"""What the nodes of a Group's members say to each other about its calls.

    members call ─► GroupPart of each node ─► the leading node ─► GroupCommit to all
                                                  │      ▲
                        too big for messages:     ▼      │
                                               GroupGo   GroupDone   (the bytes move as cells)

The leading node is that of the lowest living rank. Only it decides, so a call is decided once; what
it has decided every node keeps until the next call, so that a new leader can learn it (GroupSync).
A call's number counts from 0 within one generation of the group.

This module must never know how bytes are reduced, nor who is a member.
"""

from __future__ import annotations

from typing import TypeAlias

from hoplite_mp.errors import ObjectLostError, PeerLostError, StoreFullError
from hoplite_mp.ids import ID_BYTES
from hoplite_mp.protocol.fields import (
    OP_CHARS_MAX,
    RANKS_MAX,
    TEXT_CHARS_MAX,
    Message,
    between,
    counts,
    flags,
    layout,
    one_of,
    text,
)
from hoplite_mp.protocol.messages import Distribute, ExecuteReduce

__all__ = [
    "PIECE_BYTES_MAX",
    "GroupCommit",
    "GroupDone",
    "GroupGo",
    "GroupMessage",
    "GroupPart",
    "GroupSkip",
    "GroupStart",
    "GroupSync",
    "Piece",
    "Plan",
    "error_kind",
    "error_of",
]

Plan: TypeAlias = ExecuteReduce | Distribute
# A piece that is not larger travels inside the messages. Higher: the leader's link carries more;
# lower: more calls need a second round trip.
PIECE_BYTES_MAX = 16 << 10
PIECE_HEAD_BYTES_MAX = 16 << 10
PIECES_MAX = RANKS_MAX * RANKS_MAX
# What a call fails with on every rank: see GroupCommit.
_TYPES: dict[str, type[Exception]] = {
    "lost": PeerLostError,
    "value": ValueError,
    "type": TypeError,
    "full": StoreFullError,
    "gone": ObjectLostError,
}
ERRORS = ("", *_TYPES)


def error_kind(error: BaseException) -> str:
    """Under which of ERRORS every rank raises it."""
    if isinstance(error, MemoryError):
        return "full"
    return next((kind for kind, one in _TYPES.items() if isinstance(error, one)), "value")


def error_of(kind: str, message: str) -> Exception:
    """What a rank raises."""
    return _TYPES[kind](message)


class Piece(Message, frozen=True):
    """What rank `source` gives: to everybody (`target` -1), or to one rank. Its payload, or the
    object that holds it and what that is like."""

    source: int
    target: int
    nbytes: int
    payload: bytes | None = None
    object: bytes = bytes(ID_BYTES)
    layout: bytes = b""

    def __post_init__(self) -> None:
        between("source", self.source, 0, RANKS_MAX - 1)
        between("target", self.target, -1, RANKS_MAX - 1)
        counts(nbytes=self.nbytes)
        layout("layout", self.layout)
        if self.payload is not None and len(self.payload) > PIECE_BYTES_MAX + PIECE_HEAD_BYTES_MAX:
            raise ValueError(f"a piece of {len(self.payload)} bytes does not travel in a message")


class GroupPart(Message, frozen=True):
    """All living members of the sender's node have made that call. `mistake`: one of them could
    not, for this reason, and `error` is of what kind that is; then there are no pieces."""

    generation: int
    version: int
    call: int
    ranks: tuple[int, ...]
    kind: str
    op: str
    root: int
    pieces: tuple[Piece, ...]
    mistake: str = ""
    error: str = "value"

    def __post_init__(self) -> None:
        counts(generation=self.generation, version=self.version, call=self.call)
        one_of("error", self.error, ERRORS)
        between("number of ranks", len(self.ranks), 1, RANKS_MAX)
        text("kind", self.kind, OP_CHARS_MAX)
        text("op", self.op, OP_CHARS_MAX)
        between("root", self.root, 0, RANKS_MAX - 1)
        between("number of pieces", len(self.pieces), 0, PIECES_MAX)
        text("mistake", self.mistake, 2 * TEXT_CHARS_MAX)


class GroupGo(Message, frozen=True):
    """The leading node: move the bytes of that call by these plans. A later attempt takes the
    place of an earlier one. `waits`: the nodes that say when they are done."""

    generation: int
    call: int
    attempt: int
    plans: tuple[Plan, ...]
    waits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts(generation=self.generation, call=self.call)
        between("attempt", self.attempt, 1, (1 << 32) - 1)


class GroupDone(Message, frozen=True):
    """The sender's node has its part of that attempt's results. `failure`: it cannot have it, and
    `error` is of what kind that is, as in GroupCommit.
    `up`, `down`: bytes per second that its links have reached, 0: it does not know."""

    generation: int
    call: int
    attempt: int
    failure: str = ""
    up: int = 0
    down: int = 0
    error: str = ""

    def __post_init__(self) -> None:
        counts(generation=self.generation, call=self.call, attempt=self.attempt)
        counts(up=self.up, down=self.down)
        one_of("error", self.error, ERRORS)
        text("failure", self.failure, TEXT_CHARS_MAX)


class GroupCommit(Message, frozen=True):
    """The decision. `pieces`: results that travel here; with `attempt`, the others are in blocks.

    `leader`: the node that has decided; `to`: for which node it picked the pieces; `whole`: these
    are all, so that this node can hand the decision on to any other.

    `error`: what every rank raises, "lost" a PeerLostError, "value" a ValueError, "type" a
    TypeError, "full" a StoreFullError, "gone" an ObjectLostError; "": nothing.
    """

    generation: int
    call: int
    ranks: tuple[int, ...]
    kind: str
    op: str
    root: int
    pieces: tuple[Piece, ...] = ()
    attempt: int = 0
    error: str = ""
    message: str = ""
    leader: int = 0
    to: int = 0
    whole: bool = True

    def __post_init__(self) -> None:
        counts(generation=self.generation, call=self.call, attempt=self.attempt)
        counts(leader=self.leader, to=self.to)
        one_of("error", self.error, ERRORS)
        flags(whole=self.whole)
        between("number of ranks", len(self.ranks), 1, RANKS_MAX)
        text("message", self.message, 2 * TEXT_CHARS_MAX)


class GroupStart(Message, frozen=True):
    """A rank of the receiver's node that came later takes part from that call on. It is said by
    whoever leads with the members of that version, and a change of the members unsays it if it has
    not arrived by then."""

    generation: int
    version: int
    rank: int
    call: int

    def __post_init__(self) -> None:
        between("rank", self.rank, 0, RANKS_MAX - 1)
        counts(generation=self.generation, version=self.version, call=self.call)


class GroupSkip(Message, frozen=True):
    """The next call is this one: all who could have made those before are gone."""

    generation: int
    call: int

    def __post_init__(self) -> None:
        counts(generation=self.generation, call=self.call)


class GroupSync(Message, frozen=True):
    """To the leading node, after each change of the members: what the sender's node knows."""

    generation: int
    version: int
    committed: int  # calls that are decided
    last: GroupCommit | None = None
    starts: tuple[tuple[int, int], ...] = ()  # (rank of that node, its first call)

    def __post_init__(self) -> None:
        counts(generation=self.generation, version=self.version, committed=self.committed)


GroupMessage: TypeAlias = (
    GroupPart | GroupGo | GroupDone | GroupCommit | GroupStart | GroupSkip | GroupSync
)
