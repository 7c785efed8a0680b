"""The messages between the nodes of a Group's members about its calls.

    members call ─► GroupPart of each node ─► the leading node ─► GroupCommit to all
                                                  │      ▲
                        too big for messages:     ▼      │
                                               GroupGo   GroupDone   (the bytes move as cells)
                                                         GroupSlow   (a link slows down)

The leading node is that of the lowest living rank. Only it decides, so a call is decided once.
Every node keeps a decision until the next call, so that a new leader can learn it (GroupSync).
Calls are numbered from 0 within one generation of the group.
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
    "GroupCommit",
    "GroupDone",
    "GroupGo",
    "GroupMessage",
    "GroupPart",
    "GroupSkip",
    "GroupSlow",
    "GroupSmall",
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
# A piece that is not larger travels inside the messages. Higher: the leader's link carries more;
# lower: more calls need a second round trip.
PIECE_BYTES_MAX = 16 << 10
PIECE_HEAD_BYTES_MAX = 16 << 10
# The mean of integers of one byte, and of bools, has eight bytes an element.
RESULT_GROWTH_MAX = 8
SMALL_PARTS_BYTES_MAX = 65 << 10  # FRAME_SMALL_BYTES_MAX in cext/engine_frames.h
SMALL_PHASE_MAX = 3  # of enum small_phase in cext/engine_small.h
PIECES_MAX = RANKS_MAX * RANKS_MAX
# What pieces may have together in one message; the rest of a frame is for what else is in it.
PIECES_BYTES_MAX = FRAME_BYTES_MAX - (64 << 10)
PIECE_FIELDS_BYTES = 48  # of a piece, besides its payload and layout; at most
# A node tells the leading one its last decision at each change of the members, but one that is
# larger only once.
DECISION_REPEATED_BYTES_MAX = 64 << 10
# The exception that every rank raises when a call fails; see GroupCommit.
_TYPES: dict[str, type[Exception]] = {
    "lost": PeerLostError,
    "value": ValueError,
    "type": TypeError,
    "full": StoreFullError,
    "gone": ObjectLostError,
}
ERRORS = ("", *_TYPES)


def error_kind(error: BaseException) -> str:
    """The name in ERRORS under which every rank raises this error."""
    if isinstance(error, MemoryError):
        return "full"
    return next((kind for kind, one in _TYPES.items() if isinstance(error, one)), "value")


def error_of(kind: str, message: str) -> Exception:
    """The exception that a rank raises."""
    return _TYPES[kind](message)


class Piece(Message, frozen=True, tag="Piece"):
    """What rank `source` gives to all (`target` -1) or to one rank: its payload, or the object that
    holds it and the layout of that object."""

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
        # A result may be larger than the parts of which it was made.
        _travels(self, RESULT_GROWTH_MAX * PIECE_BYTES_MAX)


def _travels(piece: Piece, nbytes: int) -> None:
    if piece.payload is not None and len(piece.payload) > nbytes + PIECE_HEAD_BYTES_MAX:
        raise ValueError(f"a piece of {len(piece.payload)} bytes does not travel in a message")


def too_large(kind: str, pieces: Sequence[Piece]) -> str:
    """Why these do not travel in one message; "": they do."""
    largest = PIECE_FIELDS_BYTES + RESULT_GROWTH_MAX * PIECE_BYTES_MAX + 2 * PIECE_HEAD_BYTES_MAX
    if len(pieces) * largest <= PIECES_BYTES_MAX:
        return ""  # the usual case, without a look at each
    nbytes = bytes_of(pieces)
    if nbytes <= PIECES_BYTES_MAX:
        return ""
    return (
        f"{kind} of {len(pieces)} small parts with {nbytes} bytes on one host: its messages carry "
        f"{PIECES_BYTES_MAX} at most; give fewer parts, or parts of more than {PIECE_BYTES_MAX} "
        "bytes, which need no message"
    )


def bytes_of(pieces: Iterable[Piece]) -> int:
    """About how long these are in a message; not less."""
    return sum(
        PIECE_FIELDS_BYTES + len(piece.payload or b"") + len(piece.layout) for piece in pieces
    )


class GroupPart(Message, frozen=True, tag="GroupPart"):
    """All living members of the sender's node have made that call. `mistake`: why one of them could
    not, and `error` the kind of the error; then there are no pieces. `repeats`: 1 + the number of
    the call by whose plan the sender has begun to move the bytes; 0: it waits for a plan."""

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
            _travels(piece, PIECE_BYTES_MAX)
        text("mistake", self.mistake, 2 * TEXT_CHARS_MAX)


class GroupGo(Message, frozen=True, tag="GroupGo"):
    """The leading node asks to move the bytes of that call by these plans. A later attempt replaces
    an earlier one. `waits`: the nodes that must send GroupDone."""

    generation: int
    call: int
    attempt: int
    plans: tuple[Plan, ...]
    waits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts(generation=self.generation, call=self.call)
        between("attempt", self.attempt, 1, (1 << 32) - 1)


class GroupDone(Message, frozen=True, tag="GroupDone"):
    """The sender's node has its part of that attempt's results. `failure`: why it cannot have it,
    and `error` the kind of the error, as in GroupCommit.
    `up`, `down`: bytes per second that its links have reached; 0: unknown."""

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
    """The link of the sender's node has become slow while that attempt's bytes move. `up`, `down`:
    bytes per second that it carries now; `sent`, `received`: bytes since the attempt began."""

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
    """The decision. `pieces`: the results in this message; with `attempt`, others are in blocks.

    `leader`: the node that has decided; `to`: the node for which it picked the pieces; `whole`:
    there are no other pieces, so this node can pass the decision on to any other.

    `error`: what every rank raises, "lost" a PeerLostError, "value" a ValueError, "type" a
    TypeError, "full" a StoreFullError, "gone" an ObjectLostError; "": nothing.

    `opens`: a node whose members are of that version gives the calls after this one to its engine,
    because all living ranks take part in them, and all nodes know the decisions before; 0: it does
    not. `keeps`: a later call may begin by this one's plan.
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
    """A rank of the receiver's node that joined later takes part from that call on. The leading
    node of the members of that version sends it. A change of the members cancels it if it has not
    arrived by then."""

    generation: int
    version: int
    rank: int
    call: int

    def __post_init__(self) -> None:
        between("rank", self.rank, 0, RANKS_MAX - 1)
        counts(generation=self.generation, version=self.version, call=self.call)


class GroupSkip(Message, frozen=True, tag="GroupSkip"):
    """The next call is this one, because all members that could have made those before are gone."""

    generation: int
    call: int

    def __post_init__(self) -> None:
        counts(generation=self.generation, call=self.call)


class GroupSmall(Message, frozen=True, tag="GroupSmall"):
    """A frame between two engines (cext/engine_small.h) that have no link, or have lost it. phase:
    what it says (enum small_phase); plan: the one that it names, or 0; parts: what the sender's
    members give to a small call."""

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
    """What the sender's node knows; sent to the leading node after each change of the members."""

    generation: int
    version: int
    committed: int  # calls that are decided
    last: GroupCommit | None = None
    starts: tuple[tuple[int, int], ...] = ()  # (rank of that node, its first call)

    def __post_init__(self) -> None:
        counts(generation=self.generation, version=self.version, committed=self.committed)


GroupMessage: TypeAlias = (
    GroupPart
    | GroupGo
    | GroupDone
    | GroupSlow
    | GroupCommit
    | GroupStart
    | GroupSkip
    | GroupSmall
    | GroupSync
)
