"""The messages about a Group's calls and its point-to-point messages: of members and of nodes.

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

import msgspec

from hoplite_mp._common.ids import ID_BYTES
from hoplite_mp._protocol.codec import FRAME_BYTES_MAX
from hoplite_mp._protocol.fields import (
    OP_CHARS_MAX,
    RANKS_MAX,
    SOURCES_MAX,
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
    "INBOX_MAX",
    "MESSAGE_INLINE_BYTES_MAX",
    "PIECES_BYTES_MAX",
    "PIECE_BYTES_MAX",
    "RESULT_TAG",
    "TAG_MAX",
    "GroupAdmit",
    "GroupBell",
    "GroupBuffers",
    "GroupCall",
    "GroupCommit",
    "GroupDone",
    "GroupGo",
    "GroupInbox",
    "GroupJoin",
    "GroupLeave",
    "GroupMessage",
    "GroupPart",
    "GroupReceived",
    "GroupRefusal",
    "GroupSend",
    "GroupSent",
    "GroupSentTaken",
    "GroupSkip",
    "GroupSlow",
    "GroupSmall",
    "GroupSourceEnded",
    "GroupStart",
    "GroupSync",
    "GroupWritten",
    "Piece",
    "Plan",
    "PointToPoint",
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


# The messages between nodes that carry messages from one member of a Group to another.
#
#     sender's node ── GroupSent ──────► receiver's node       in the order in which they were sent
# ◄─ GroupSentTaken ──                       it holds what it needs, or drops it
# ── GroupSourceEnded ►                      no more will come from that member
#
# A message is an object of the sender's host. That host holds it until the receiver's host has a
# copy of a small one, or counts as a holder of a large one. Connections between nodes keep the
# order, so all messages of a member arrive before the report that it is gone.


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


# The messages between a member of a Group and its node, on one host.
#
# It is the part of `local.py` about Groups. A group on one host needs these messages only when
# members join and leave; with members on other hosts each call is a message to the node.


INBOX_MAX = 1000  # messages that one reply names


class GroupJoin(msgspec.Struct, frozen=True, tag="GroupJoin", array_like=True):
    """Joins a Group. Reply: (board, generation, rank, are there other hosts?, identity of the
    caller: node, slot, generation of the slot), or the message of a ValueError; a text: the group
    in which the caller's task was has ended. `parent`, `founders`: as in GroupJoinRequested.
    `call`: the task that asks, if several tasks run in the caller's process; otherwise 0."""

    name: str
    size: int
    rank: int | None
    parent: int = 0
    founders: list[tuple[int, int, int, int]] = []
    call: int = 0


class GroupBell(msgspec.Struct, frozen=True, tag="GroupBell", array_like=True):
    """Brings a descriptor, an eventfd, to which the member writes when it has given its part of a
    small call to the board. Reply: as soon as the node watches it."""

    generation: int
    rank: int


class GroupBuffers(msgspec.Struct, frozen=True, tag="GroupBuffers", array_like=True):
    """Asks for call buffers of `nbytes` each, two for each rank, one after the other. Reply: the
    offset in the store of the first one, the same for all members; None: there is no room, or the
    caller is no member any more."""

    generation: int
    rank: int
    nbytes: int


class GroupCall(msgspec.Struct, frozen=True, tag="GroupCall", array_like=True):
    """A member's next call, in a group with members on other hosts. Each part is a payload, or an
    object that the member holds until the call is over, or a block of the store that the member
    hands over while it still writes to it. No reply."""

    generation: int
    rank: int
    call: int
    kind: str
    op: str
    root: int
    parts: list[bytes | int | tuple[int, int, int]]  # the last: (payload, bytes, written bytes)
    mistake: str = ""
    error: str = "value"  # the kind of the mistake, as in GroupCommit


class GroupWritten(msgspec.Struct, frozen=True, tag="GroupWritten", array_like=True):
    """The member has written these ranges of that block's payload. No reply."""

    payload: int
    ranges: list[tuple[int, int]]


class GroupSend(msgspec.Struct, frozen=True, tag="GroupSend", array_like=True):
    """This member sends that object to a rank. The caller holds it, and the objects inside it
    (`refs`; None: they are too many for a packet, the node reads them from the object, which the
    caller has pinned), until the reply: "", or why it will not be received."""

    generation: int
    rank: int
    to: int
    tag: int
    oid: int
    nbytes: int
    refs: list[bytes] | None


class GroupInbox(msgspec.Struct, frozen=True, tag="GroupInbox", array_like=True):
    """Asks for the messages to this member after the one with the number `seen`. Reply: ([(number,
    source, tag, object)], for each rank how many of its members have ended and had all their
    messages named, the ranks from which no more messages will come as bits, are there more
    messages?); None: this is no longer a member. The node holds the messages until
    GroupReceived."""

    generation: int
    rank: int
    seen: int


class GroupReceived(msgspec.Struct, frozen=True, tag="GroupReceived", array_like=True):
    """This member no longer needs that message. No reply."""

    generation: int
    rank: int
    number: int


class GroupLeave(msgspec.Struct, frozen=True, tag="GroupLeave", array_like=True):
    """This member will not call again. Reply: None, when the node holds what this member has
    committed for the members that still read it."""

    name: str
    generation: int
    rank: int
    calls: int = 0  # how many calls are over for this member


class GroupRefusal(msgspec.Struct, frozen=True, tag="GroupRefusal", array_like=True):
    """Asks why the group is not formed. Reply: (True, why this member was taken out of it), or
    (False, why the last request to join it was refused, or "")."""

    name: str
    generation: int
    rank: int


class GroupAdmit(msgspec.Struct, frozen=True, tag="GroupAdmit", array_like=True):
    """The leader has admitted a joining rank, at a commit. No reply."""

    name: str
    generation: int
    rank: int
