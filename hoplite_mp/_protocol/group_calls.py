"""Messages about the calls of a Group, between the nodes of its members.

    members call ─► GroupPart of each node ─► the leading node ─► GroupCommit to all
                                                  │      ▲
                        too large for messages:   ▼      │
                                               GroupAttempt   GroupDone   (the bytes move as cells)
                                                         GroupSlow   (a link slows down)

The node of the lowest living rank leads. Only this node decides, so a call is decided once. Every
node keeps a decision until the next call, in case a new leader needs it (GroupSync). Calls are
numbered from 0 within a generation of the group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from hoplite_mp._common.ids import ID_BYTES
from hoplite_mp._protocol.codec import FRAME_BYTES_MAX
from hoplite_mp._protocol.fields import (
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
from hoplite_mp._protocol.messages import Distribute, ExecuteReduce
from hoplite_mp.errors import ObjectLostError, PeerLostError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "DECISION_REPEATED_BYTES_MAX",
    "PIECES_BYTES_MAX",
    "PIECE_BYTES_MAX",
    "GroupAttempt",
    "GroupCommit",
    "GroupDone",
    "GroupEngineFrame",
    "GroupMessage",
    "GroupPart",
    "GroupSkip",
    "GroupSlow",
    "GroupStart",
    "GroupSync",
    "Piece",
    "Plan",
    "bytes_of",
    "error_kind",
    "error_of",
    "too_large",
]


Plan: TypeAlias = ExecuteReduce | Distribute
# Pieces up to this size are sent inside messages. Higher: more load on the leader's link; lower:
# more calls need a second round trip.
PIECE_BYTES_MAX = 16 << 10
PIECE_HEAD_BYTES_MAX = 16 << 10
# The mean of one-byte integers or bools has eight bytes per element.
RESULT_GROWTH_MAX = 8
SMALL_PARTS_BYTES_MAX = 65 << 10  # FRAME_COLL_BYTES_MAX in cext/engine_frames.h
SMALL_PHASE_MAX = 3  # the last value of enum coll_phase in cext/engine_coll.h
PIECES_MAX = RANKS_MAX * RANKS_MAX
# Total size of the pieces in one message; the rest of a frame is for other fields.
PIECES_BYTES_MAX = FRAME_BYTES_MAX - (64 << 10)
PIECE_FIELDS_BYTES = 48  # upper limit for the fields of a piece besides payload and layout
# A node sends its last decision to the leading node at each change of the members; a larger
# decision is sent only once.
DECISION_REPEATED_BYTES_MAX = 64 << 10
# The exception that all ranks raise when a call fails; see GroupCommit.
_TYPES: dict[str, type[Exception]] = {
    "lost": PeerLostError,
    "value": ValueError,
    "type": TypeError,
    "full": StoreFullError,
    "gone": ObjectLostError,
}
ERRORS = ("", *_TYPES)


def error_kind(error: BaseException) -> str:
    """The name of this error in ERRORS."""
    if isinstance(error, MemoryError):
        return "full"
    return next((kind for kind, cls in _TYPES.items() if isinstance(error, cls)), "value")


def error_of(kind: str, message: str) -> Exception:
    """The exception that all ranks raise."""
    return _TYPES[kind](message)


class Piece(Message, frozen=True, tag="Piece"):
    """The contribution of rank `source` for all ranks (`target` -1) or for one: its payload, or the
    object that holds it, with the layout of that object."""

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
        # A result may be larger than its contributions.
        _check_inline(self, RESULT_GROWTH_MAX * PIECE_BYTES_MAX)


def _check_inline(piece: Piece, nbytes: int) -> None:
    if piece.payload is not None and len(piece.payload) > nbytes + PIECE_HEAD_BYTES_MAX:
        raise ValueError(f"a piece of {len(piece.payload)} bytes is too large for a message")


def too_large(kind: str, pieces: Sequence[Piece]) -> str:
    """The reason why these pieces cannot be sent in one message; "" if they can."""
    largest = PIECE_FIELDS_BYTES + RESULT_GROWTH_MAX * PIECE_BYTES_MAX + 2 * PIECE_HEAD_BYTES_MAX
    if len(pieces) * largest <= PIECES_BYTES_MAX:
        return ""  # fast path
    nbytes = bytes_of(pieces)
    if nbytes <= PIECES_BYTES_MAX:
        return ""
    return (
        f"{kind} of {len(pieces)} small parts with {nbytes} bytes on one host: its messages have "
        f"at most {PIECES_BYTES_MAX} bytes; use fewer parts, or parts of more than "
        f"{PIECE_BYTES_MAX} bytes, which are not sent in messages"
    )


def bytes_of(pieces: Iterable[Piece]) -> int:
    """The approximate size of these pieces in a message, rounded up."""
    return sum(
        PIECE_FIELDS_BYTES + len(piece.payload or b"") + len(piece.layout) for piece in pieces
    )


class GroupPart(Message, frozen=True, tag="GroupPart"):
    """All living members on the sender's node have made the call. `mistake`: the error of a member
    whose call is invalid, and `error` its kind; there are no pieces then. `repeats`: 1 + the number
    of the call whose plan the sender already uses to move the bytes; 0: it is waiting for a
    plan."""

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
    repeats: int = 0

    def __post_init__(self) -> None:
        counts(generation=self.generation, version=self.version, call=self.call)
        counts(repeats=self.repeats)
        one_of("error", self.error, ERRORS)
        between("number of ranks", len(self.ranks), 1, RANKS_MAX)
        text("kind", self.kind, OP_CHARS_MAX)
        text("op", self.op, OP_CHARS_MAX)
        between("root", self.root, 0, RANKS_MAX - 1)
        between("number of pieces", len(self.pieces), 0, PIECES_MAX)
        for piece in self.pieces:
            _check_inline(piece, PIECE_BYTES_MAX)
        text("mistake", self.mistake, 2 * TEXT_CHARS_MAX)


class GroupAttempt(Message, frozen=True, tag="GroupGo"):
    """The leading node requests that the nodes move the bytes of the call by these plans. A later
    attempt replaces an earlier one. `waits`: the nodes that must send GroupDone."""

    generation: int
    call: int
    attempt: int
    plans: tuple[Plan, ...]
    waits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts(generation=self.generation, call=self.call)
        between("attempt", self.attempt, 1, (1 << 32) - 1)


class GroupDone(Message, frozen=True, tag="GroupDone"):
    """The sender's node has its part of the attempt's results. If there is a `failure`, it does not
    have them, for this reason; `error` is the kind of the failure, as in GroupCommit. `up`, `down`:
    the highest rates of its links, in bytes per second; 0: unknown."""

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


class GroupSlow(Message, frozen=True, tag="GroupSlow"):
    """The link of the sender's node has become slow during that attempt. `up`, `down`: its present
    rates in bytes per second; `sent`, `received`: bytes since the attempt began."""

    generation: int
    call: int
    attempt: int
    up: int
    down: int
    sent: int
    received: int

    def __post_init__(self) -> None:
        counts(generation=self.generation, call=self.call, attempt=self.attempt)
        counts(up=self.up, down=self.down, sent=self.sent, received=self.received)


class GroupCommit(Message, frozen=True, tag="GroupCommit"):
    """The leading node's decision about a call. `pieces`: the results in this message; after an
    `attempt`, further results are in blocks of the store.

    `leader`: the node that has decided; `to`: the node for which it selected the pieces; `whole`:
    there are no other pieces, so this node can forward the decision to any other node.

    `error`: the error that all ranks raise: "lost" PeerLostError, "value" ValueError, "type"
    TypeError, "full" StoreFullError, "gone" ObjectLostError; "": none.

    `opens`: nodes with this version of the members pass the following calls to their engines,
    because all living ranks take part in them, and all nodes know the earlier decisions; 0: nodes
    do not do so. `keeps`: a later call may begin with this call's plan.
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
    opens: int = 0
    keeps: bool = False

    def __post_init__(self) -> None:
        counts(generation=self.generation, call=self.call, attempt=self.attempt)
        counts(leader=self.leader, to=self.to, opens=self.opens)
        one_of("error", self.error, ERRORS)
        flags(whole=self.whole, keeps=self.keeps)
        between("number of ranks", len(self.ranks), 1, RANKS_MAX)
        text("message", self.message, 2 * TEXT_CHARS_MAX)


class GroupStart(Message, frozen=True, tag="GroupStart"):
    """The number of the first call of a rank that has joined a formed group, on the receiver's
    node. Sent by the node that leads in that version of the members. If a change of the members
    arrives first, this message is ignored."""

    generation: int
    version: int
    rank: int
    call: int

    def __post_init__(self) -> None:
        between("rank", self.rank, 0, RANKS_MAX - 1)
        counts(generation=self.generation, version=self.version, call=self.call)


class GroupSkip(Message, frozen=True, tag="GroupSkip"):
    """The number of the next call. Earlier numbers are skipped, because all members that could have
    made those calls are gone."""

    generation: int
    call: int

    def __post_init__(self) -> None:
        counts(generation=self.generation, call=self.call)


class GroupEngineFrame(Message, frozen=True, tag="GroupSmall"):
    """A frame between two engines (cext/engine_coll.h) that have no link. phase: the kind of the
    frame (enum coll_phase); plan: the number of its plan, or 0; parts: the contributions of the
    sender's members to a small call."""

    generation: int
    version: int
    call: int
    phase: int
    plan: int
    parts: bytes

    def __post_init__(self) -> None:
        counts(generation=self.generation, version=self.version, call=self.call)
        between("phase", self.phase, 0, SMALL_PHASE_MAX)
        between("plan", self.plan, 0, (1 << 32) - 1)
        between("bytes of parts", len(self.parts), 0, SMALL_PARTS_BYTES_MAX)


class GroupSync(Message, frozen=True, tag="GroupSync"):
    """The state of the sender's node; sent to the leading node after each change of the members."""

    generation: int
    version: int
    committed: int  # number of decided calls
    last: GroupCommit | None = None
    starts: tuple[tuple[int, int], ...] = ()  # (rank on the sender's node, its first call)

    def __post_init__(self) -> None:
        counts(generation=self.generation, version=self.version, committed=self.committed)


GroupMessage: TypeAlias = (
    GroupPart
    | GroupAttempt
    | GroupDone
    | GroupSlow
    | GroupCommit
    | GroupStart
    | GroupSkip
    | GroupEngineFrame
    | GroupSync
)
