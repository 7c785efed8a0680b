"""The leading node's decision on a Group call: an error, a result, or a plan for large
contributions.

The decision is a pure function of the contributions, so that a test can exercise every case. As on
one host, an error in one rank's contribution is raised by every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hoplite_mp import _serialize
from hoplite_mp._common.call_mismatch import ROOTED, different_calls
from hoplite_mp._common.reduction import reduce_arrays, result_dtype
from hoplite_mp._node.objects.remote_objects import can_fold, layout_words, parse_layout
from hoplite_mp._planner import cost
from hoplite_mp._planner.link_speeds import HostRates, levelled
from hoplite_mp._planner.program import participants, waits_for
from hoplite_mp._planner.repair import kept_cut
from hoplite_mp._planner.tree_shapes import cut
from hoplite_mp._protocol.fields import FOLDING, NO_OBJECT, SHARES
from hoplite_mp._protocol.group_calls import GroupCommit, Piece
from hoplite_mp._protocol.messages import Distribute, ExecuteReduce, Stripe
from hoplite_mp._protocol.operations import GROUP_OPERATION
from hoplite_mp._serialize.contributions import (
    LOST_SHARE,
    PREFIXES,
    TARGETED,
    mask_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hoplite_mp._common.ref import ObjectRef
    from hoplite_mp._protocol.group_calls import GroupAttempt, GroupPart, Plan
    from hoplite_mp._protocol.messages import GroupMembers

__all__ = [
    "ATTEMPT_BITS",
    "MADE_ATTEMPTS",
    "REPEATED",
    "Decision",
    "UndecidedCall",
    "combine",
    "decide",
    "is_repeated",
    "lost",
    "operation_of",
    "version_of",
]

# Numbers of attempts at a call. Cells of two attempts must never be confused, so each attempt has
# its own number. The number consists of the version of the members, one bit for a repeated plan,
# and below that bit the distance from the call for which the repeated plan was made, or a counter
# that starts at 1.
ATTEMPT_BITS = 8
REPEATED = 1 << (ATTEMPT_BITS - 1)
MADE_ATTEMPTS = REPEATED - 1  # maximum number of attempts at one call with newly made plans


def is_repeated(attempt: int) -> bool:
    """Whether the attempt repeats a plan, so that nodes began it without the leading node."""
    return bool(attempt & REPEATED)


def version_of(attempt: int) -> int:
    """The version of the members for which an attempt is made."""
    return attempt >> ATTEMPT_BITS


@dataclass(slots=True)
class Decision:
    """A decision. It is committed when the nodes in `waits` have reported that the bytes of `plans`
    have moved."""

    ranks: tuple[int, ...]
    kind: str
    op: str
    root: int
    pieces: list[Piece] = field(default_factory=list)
    plans: tuple[Plan, ...] = ()
    waits: set[int] = field(default_factory=set)
    nodes: set[int] = field(default_factory=set)  # nodes that take part in the plans
    attempt: int = 0
    error: str = ""
    message: str = ""
    keeps: bool = True  # a later call may begin with these plans

    def fail(self, error: str, message: str) -> Decision:
        """Turns the decision into an error that every rank raises."""
        self.error, self.message = error, message
        self.pieces, self.plans, self.attempt = [], (), 0
        return self

    def opens(self, members: GroupMembers, before: GroupCommit | None) -> int:
        """The value of `GroupCommit.opens`. It is 0 unless exactly the living members take part in
        the following calls. It is also 0 while large calls differ from each other, because engines
        would yield each of them."""
        whole = not members.joining and mask_of(self.ranks) == members.alive
        large = self.attempt and (before is None or before.attempt)
        yielded = large and not self._is_voted_for_again(members)
        return members.version if whole and not yielded else 0

    def _is_voted_for_again(self, members: GroupMembers) -> bool:
        """Whether engines would commit the same call again (engine_commit.py)."""
        if not is_repeated(self.attempt) or not self.keeps:
            return False
        if self.kind in FOLDING and self.pieces:
            return False  # there is no kernel, so Python folds the contributions
        nodes = [members.nodes[rank] for rank in self.ranks]
        return len(set(nodes)) == len(nodes)

    def commit(
        self, members: GroupMembers, call: int, node: int, leader: int, opens: int = 0
    ) -> GroupCommit:
        """The commit message from the leading node to one node."""
        ranks = {rank for rank in self.ranks if members.nodes[rank] == node}
        pieces = [piece for piece in self.pieces if piece.target < 0 or piece.target in ranks]
        # Every node receives the result of a small reduction, to forward it if the leader dies.
        summed = self.kind == "reduce" and not self.attempt
        if self.kind in ("reduce", "gather") and self.root not in ranks and not summed:
            pieces = []
        return GroupCommit(
            members.generation,
            call,
            self.ranks,
            self.kind,
            self.op,
            self.root,
            tuple(pieces),
            self.attempt,
            self.error,
            self.message,
            leader,
            node,
            len(pieces) == len(self.pieces),
            opens,
            bool(self.plans) and self.keeps,
        )


@dataclass(frozen=True, slots=True)
class UndecidedCall:
    """A call for which the leading node needs a decision."""

    members: GroupMembers
    call: int
    attempt: int  # the number of the attempt, if bytes have to move
    ranks: Sequence[int]  # the ranks that take part
    given: dict[int, GroupPart]  # the contributions, by rank
    rates: Mapping[int, HostRates]  # the measured link rates of nodes, as far as known
    # The attempt that this node has begun with a repeated plan, unless a node has given it up.
    begun: GroupAttempt | None = None
    before: Plan | None = None  # the plan of an earlier attempt, whose stripes are kept

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have called."""
        return all(rank in self.given for rank in self.ranks)


def decide(
    undecided: UndecidedCall, owners: Collection[int] = (), before: Plan | None = None
) -> Decision:
    """Decides a call. owners: the nodes that should own stripes of an allreduce, if not all nodes
    should. before: the plan of an earlier attempt, whose stripes are kept."""
    members, ranks, given = undecided.members, undecided.ranks, undecided.given
    first = given[ranks[0]]
    outcome = Decision(tuple(ranks), first.kind, first.op, first.root)
    for rank in ranks:
        if given[rank].mistake:
            return outcome.fail(given[rank].error, given[rank].mistake)
    calls = {rank: (given[rank].kind, given[rank].op, given[rank].root) for rank in ranks}
    if difference := different_calls(calls):
        return outcome.fail("value", difference)
    if first.kind in ROOTED and first.root not in ranks:
        text = f"group {members.name!r}: the root, rank {first.root}, is lost"
        return outcome.fail("lost", text)
    taking = set(ranks)
    pieces = [
        piece
        for rank in ranks
        for piece in given[rank].pieces
        if piece.source == rank and (piece.target < 0 or piece.target in taking)
    ]
    if first.kind in FOLDING:
        _fold(outcome, undecided, pieces, owners)
    elif first.kind != "barrier" and (first.kind not in PREFIXES or _alike(outcome, pieces)):
        _copy(outcome, undecided, pieces)
    if before is not None:
        outcome.plans = tuple(_cut_as(before, plan) for plan in outcome.plans)
    return outcome


def _cut_as(before: Plan, plan: Plan) -> Plan:
    """The plan, cut into the stripes of an earlier plan if the two are compatible."""
    if isinstance(before, ExecuteReduce) and isinstance(plan, ExecuteReduce):
        owners = {stripe.owner for stripe in plan.stripes}
        if before.kind != plan.kind or plan.kind not in ("reduce", "allreduce"):
            return plan
    elif isinstance(before, Distribute) and isinstance(plan, Distribute):
        owners = {*plan.sources, *plan.receivers}
    else:
        return plan
    kept = kept_cut(before.stripes, owners, plan.stripes)
    return plan if kept is None else msgspec.structs.replace(plan, stripes=kept)


def operation_of(members: GroupMembers, call: int) -> int:
    """The number of a call in its plans and cells."""
    return GROUP_OPERATION | (members.generation & 0x3FFFFFFF) << 32 | call & 0xFFFFFFFF


def _fold(
    outcome: Decision, undecided: UndecidedCall, pieces: list[Piece], owners: Collection[int]
) -> None:
    if not _alike(outcome, pieces):
        return
    first = pieces[0]
    if all(piece.payload is not None for piece in pieces):
        total = combine(outcome.op, [piece.payload or b"" for piece in pieces])
        outcome.pieces = [Piece(first.source, -1, len(total), total)]
        return
    # Without a kernel every node receives all contributions and folds them itself.
    if not can_fold(outcome.op, first.layout):
        _copy(outcome, undecided, pieces)
        return
    members, rates = undecided.members, undecided.rates
    nodes = _nodes(members, outcome.ranks)
    holders = tuple(_node(members, piece.source) for piece in pieces)
    results: tuple[bytes, ...] = (NO_OBJECT,)
    if outcome.kind == "reduce":
        destinations: tuple[int, ...] = (_node(members, outcome.root),)
        root = destinations[0]
        others = [node for node in nodes if node != root] or nodes
        stripes = _passed_on(members, root, others, first.nbytes, rates)
    elif outcome.kind == "allreduce":
        destinations = tuple(nodes)
        owning = [node for node in nodes if node in owners] or nodes
        stripes = _shared(members, owning, first.nbytes, rates)
    else:
        size = members.size
        destinations = tuple(
            _node(members, rank) if rank in outcome.ranks else nodes[0] for rank in range(size)
        )
        stripes = tuple(
            Stripe(node, i * SHARES // size, (i + 1) * SHARES // size)
            for i, node in enumerate(destinations)
        )
        results = (NO_OBJECT,) * size
    order = tuple(piece.source for piece in pieces)
    plan = ExecuteReduce(
        operation_of(members, undecided.call),
        undecided.attempt,
        tuple(sorted(order)),
        order,
        stripes,
        "any",
        outcome.kind,
        outcome.op,
        nodes[0],
        tuple(piece.object for piece in pieces),
        holders,
        destinations,
        results,
        first.nbytes,
        first.layout,
    )
    _go(outcome, plan, undecided.attempt)


def _alike(outcome: Decision, pieces: list[Piece]) -> bool:
    """Whether the pieces can be reduced together. If not, the outcome becomes an error."""
    first = pieces[0]
    for piece in pieces:
        if not piece.layout:
            outcome.fail("value", f"rank {piece.source} passed a value that cannot be reduced")
            return False
        if piece.layout != first.layout:
            outcome.fail(
                "value",
                f"rank {first.source} has {layout_words(first.layout)}, rank {piece.source} has "
                f"{layout_words(piece.layout)}",
            )
            return False
    shape, name = parse_layout(first.layout)
    if outcome.kind == "reduce_scatter" and not shape:
        outcome.fail("value", "reduce_scatter needs arrays of at least one dimension")
        return False
    try:
        result_dtype(outcome.op, name)
    except TypeError as error:
        outcome.fail("value", str(error))
        return False
    return True


def _go(outcome: Decision, plan: Plan, attempt: int) -> None:
    outcome.plans, outcome.attempt = (plan,), attempt
    outcome.waits = outcome.waits | waits_for(plan)
    outcome.nodes = outcome.nodes | set(participants(plan))


def _copy(outcome: Decision, undecided: UndecidedCall, pieces: list[Piece]) -> None:
    """Plans a call that moves pieces unchanged: small pieces inside the commit, and large ones by a
    plan."""
    members, attempt = undecided.members, undecided.attempt
    outcome.pieces = [piece for piece in pieces if piece.payload is not None]
    large = [piece for piece in pieces if piece.payload is None]
    outcome.pieces += large  # receivers look their blocks up by these entries
    nodes = _nodes(members, outcome.ranks)
    if not large:
        return
    # A member may still be writing a piece that no other node pulls, so its node must report when
    # the piece is complete.
    outcome.waits = {
        _node(members, piece.source) for piece in large if _stays(members, outcome, nodes, piece)
    }
    outcome.nodes = set(outcome.waits)
    outcome.attempt = attempt
    if len(nodes) == 1:
        return
    operation = operation_of(members, undecided.call)
    if outcome.kind == "broadcast":
        (piece,) = large
        root = _node(members, outcome.root)
        receivers = tuple(node for node in nodes if node != root)
        stripes = _passed_on(members, root, receivers, piece.nbytes, undecided.rates)
        spread = Distribute(
            operation, piece.object, attempt, piece.nbytes, (root,), receivers, stripes, "stripes"
        )
        _go(outcome, spread, attempt)
        return
    kind, destinations = "allgather", tuple(nodes)
    index = {piece.source: piece for piece in large}
    if outcome.kind == "gather":
        kind, destinations = "gather", (_node(members, outcome.root),)
    elif outcome.kind in TARGETED:
        kind = "alltoall"
        destinations = tuple(
            _node(members, rank) if rank in outcome.ranks else nodes[0]
            for rank in range(members.size)
        )
        index = {piece.source * members.size + piece.target: piece for piece in large}
    order = tuple(sorted(index))
    plan = ExecuteReduce(
        operation,
        attempt,
        order,
        order,
        (),
        "any",
        kind,
        "",
        nodes[0],
        tuple(index[i].object for i in order),
        tuple(_node(members, index[i].source) for i in order),
        destinations,
        (),
        max(piece.nbytes for piece in large),
        sizes=tuple(index[i].nbytes for i in order),
    )
    _go(outcome, plan, attempt)


def _stays(members: GroupMembers, outcome: Decision, nodes: Sequence[int], piece: Piece) -> bool:
    """Whether only the piece's own node reads it."""
    node = _node(members, piece.source)
    if piece.target >= 0:
        return _node(members, piece.target) == node
    if outcome.kind == "gather":
        return _node(members, outcome.root) == node
    return len(nodes) == 1


def _node(members: GroupMembers, rank: int) -> int:
    node = members.nodes[rank]
    assert node is not None
    return node


def _nodes(members: GroupMembers, ranks: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(_node(members, rank) for rank in ranks))


def _weighted(members: GroupMembers, owners: Sequence[int]) -> tuple[Stripe, ...]:
    """Stripes owned by these nodes, with widths in the proportions of the group's own stripes."""
    widths = dict.fromkeys(owners, 0)
    for stripe in members.stripes:
        if stripe.owner in widths:
            widths[stripe.owner] += stripe.end_share - stripe.begin_share
    if not any(widths.values()):
        widths = dict.fromkeys(owners, 1)
    return cut(widths.items())


def _snapped(nodes: Sequence[int], rates: Mapping[int, HostRates]) -> list[HostRates] | None:
    """The nodes' measured link rates, rounded to levels. None if a node has not reported its rate
    yet."""
    if any(node not in rates for node in nodes):
        return None
    fastest = max(min(rates[node]) for node in nodes)
    level = [levelled(min(rates[node]), fastest) for node in nodes]
    return [HostRates(rate, rate) for rate in level]


def _shared(
    members: GroupMembers, nodes: Sequence[int], nbytes: int, rates: Mapping[int, HostRates]
) -> tuple[Stripe, ...]:
    """The stripes of an allreduce. Each of these nodes owns one, unless its link is too slow."""
    hosts = _snapped(nodes, rates)
    if hosts is None or len(nodes) < 2:
        return _weighted(members, nodes)
    _, shares = cost.allreduce(nbytes, hosts)
    return cut(zip(nodes, shares, strict=True))


def _passed_on(
    members: GroupMembers,
    root: int,
    others: Sequence[int],
    nbytes: int,
    rates: Mapping[int, HostRates],
) -> tuple[Stripe, ...]:
    """The stripes of a transfer from the root to the others, each of which forwards one stripe. A
    reduce uses the same stripes, because it is the mirror image."""
    hosts = _snapped([root, *others], rates)
    if hosts is None or len(others) < 2:
        return _weighted(members, others)
    _, _, shares = cost.broadcast(nbytes, hosts[0].up, hosts[1:])
    return cut(zip(others, shares, strict=True))


def lost(message: GroupCommit, members: GroupMembers) -> GroupCommit:
    """The commit as an error, for a node whose share of the result was lost with the deciding
    node."""
    decided = f"node h{message.leader} decided call {message.call}"
    text = f"group {members.name!r}: {decided} and {LOST_SHARE}"
    return msgspec.structs.replace(message, pieces=(), error="lost", message=text)


def combine(op: str, payloads: Sequence[bytes | memoryview]) -> bytes:
    """The payload of the left fold of arrays with the same shape and dtype."""
    arrays = [
        np.asarray(_serialize.decode(memoryview(payload), make_ref=_no_ref)) for payload in payloads
    ]
    name = _serialize.dtype_name(arrays[0].dtype)
    assert name is not None
    out = np.empty(arrays[0].shape, _serialize.named_dtype(result_dtype(op, name)))
    reduce_arrays(op, [np.ascontiguousarray(array) for array in arrays], out, 1)
    return _serialize.encode(out).tobytes()


def _no_ref(object_id: bytes) -> ObjectRef[Any]:
    raise ValueError("an array contains no refs")
