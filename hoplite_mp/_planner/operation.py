"""One collective: its state, and the transitions that messages about it cause.

Theory of operation. A request names sources that may not exist yet. They become ready, or fail, in
any order; reports may arrive late or twice. As soon as `num` sources are ready, these are the
members. The plan announces the members to all participating nodes, and no node decides this again.
A failed source is skipped while `num` can still be met. From the deadline on one source is enough;
all sources that are ready by then take part. A request may divide its sources into groups of
alternatives: the first ready source of each group takes part, and groups are counted in place of
sources.

             enough ready                     complete everywhere
    WAITING ──────────────► EXECUTING ─────────────────────────────► Commit, forgotten
      ▲  │                     │   │
      │  └─ cannot be met ─────│───┴─ failed as a whole ──► OperationFailed, forgotten
      └────────────────────────┘
       sources vanished, or a node that holds members or owns stripes was lost: epoch + 1

The table TRANSITIONS holds every transition that a message can cause, except that reports of slow
links (OperationSlow) may lead to the next epoch of a running plan. Messages that are not in the
table are ignored; late messages are among these. A transition only records the event; `reduce` then
decides what follows, in the same way after every message.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hoplite_mp._planner.program import participants, waits_for
from hoplite_mp._planner.repair import SlowLinks
from hoplite_mp._protocol.fields import FOLDING
from hoplite_mp._protocol.messages import (
    Commit,
    ExecuteReduce,
    ExecutionFailed,
    Forget,
    OperationDropped,
    OperationFailed,
    ReduceRequested,
    SourceFailed,
    SourceReady,
    StripesComplete,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hoplite_mp._planner.plan_log import PlanRecord
    from hoplite_mp._protocol.messages import ManagerToNode, OperationSlow

    # What nodes report about an operation.
    Report: TypeAlias = (
        SourceReady | SourceFailed | StripesComplete | ExecutionFailed | OperationDropped
    )


class OperationState(enum.Enum):
    """The states of an operation. A finished operation has none, because it is forgotten."""

    WAITING = "for enough sources to be ready"
    EXECUTING = "the members are fixed and announced"


class DeadlinePassed:
    """The deadline of an operation has passed. An internal event, not a message."""


class HolderLost(NamedTuple):
    """A node was lost. It may hold sources, own stripes or be a destination. An internal event."""

    node: int


class CopyMade(NamedTuple):
    """A node has received the object of a broadcast. An internal event."""

    node: int


class CopyRefused(NamedTuple):
    """A node will never receive the object of a broadcast. An internal event."""

    node: int
    reason: str
    error: str = "lost"


@dataclass(slots=True)
class Source:
    """A ready source. `holders`: its living holders, in the order of their reports."""

    nbytes: int
    layout: bytes
    holders: dict[int, None] = field(default_factory=dict)


class SourceGroups:
    """The groups of alternatives into which a request divides its sources. Counts the groups that
    are ready or have failed, because each report needs these numbers."""

    def __init__(self, one_of: tuple[tuple[int, ...], ...]) -> None:
        self.of = {index: place for place, group in enumerate(one_of) for index in group}
        # Group -> its ready sources, without groups that have none.
        self.ready: Counter[int] = Counter()
        self._left = [len(group) for group in one_of]  # sources that have not failed
        self.failed = 0  # groups whose sources have all failed

    def note_ready(self, index: int) -> None:
        """Records that a source has become ready."""
        self.ready[self.of[index]] += 1

    def note_failed(self, index: int, was_ready: bool) -> bool:
        """Records that a source has failed. Returns whether its whole group has failed now."""
        place = self.of[index]
        if was_ready:
            self.ready[place] -= 1
            if not self.ready[place]:
                del self.ready[place]
        self._left[place] -= 1
        self.failed += self._left[place] == 0
        return self._left[place] == 0

    def firsts(self, ready: Iterable[int]) -> Iterator[int]:
        """The first of each group among ready sources, which are given by arrival."""
        seen: set[int] = set()
        for index in ready:
            if self.of[index] not in seen:
                seen.add(self.of[index])
                yield index


@dataclass(slots=True)
class Operation:
    """A running collective: requested, and not yet committed, failed or dropped."""

    request: ReduceRequested
    need: int  # ready sources that suffice: 1 <= need <= num; 1 from the deadline on
    twins: dict[bytes, list[int]]  # ids given more than once, with all their indices
    groups: SourceGroups | None = None  # None: each source is a group of its own
    state: OperationState = OperationState.WAITING
    deadline_at: float | None = None  # not None if and only if in the list of deadlines
    ready: dict[int, Source] = field(default_factory=dict)  # by arrival; ∩ failed = ∅
    failed: set[int] = field(default_factory=set)
    # The first failure that counts: of a source, or of the last source in a group.
    cause: tuple[int, str] | None = None
    epoch: int = 0  # plans announced so far
    members: tuple[int, ...] = ()  # of the current epoch, sorted
    plan: ExecuteReduce | None = None  # the latest plan; None before it, and for a broadcast
    destinations: tuple[int, ...] = ()  # without a plan: for a broadcast, or if nothing must move
    unfinished: set[int] = field(default_factory=set)  # nodes that have not reported yet
    lost: set[int] = field(default_factory=set)  # nodes lost during the operation
    told: dict[int, None] = field(default_factory=dict)  # living nodes that have the latest plan
    # (index, node): the node should have held the source but did not, or was lost with it.
    gone: dict[tuple[int, int], None] = field(default_factory=dict)
    # The nodes' reports of slow links in this epoch.
    links: SlowLinks[OperationSlow] = field(default_factory=SlowLinks)
    record: PlanRecord | None = None  # of the latest plan
    relieved: bool = False  # the stripes of a node with a slow link were moved

    def same(self, index: int) -> Iterable[int]:
        """All indices of the source at `index`; none if there is no such source."""
        if index >= len(self.request.sources):
            return ()
        return self.twins.get(self.request.sources[index], (index,))

    def note_gone(self, index: int, nodes: Iterable[int]) -> None:
        """These nodes no longer hold the source. If the operation fails for lack of sources, the
        requester is informed, because it may know of another copy or recompute the source."""
        self.gone.update({(index, node): None for node in nodes})

    def all_gone(self, index: int, nodes: tuple[int, ...]) -> SourceFailed:
        """The event that a source has failed because all nodes that held it are gone."""
        self.note_gone(index, nodes)
        reason = f"its holder, node {nodes[0]}, is lost"
        return SourceFailed(self.request.operation, index, reason)

    def can_be_met(self) -> bool:
        """Whether `need` sources, or groups, can still become ready."""
        if self.groups is not None:
            return len(self.request.one_of) - self.groups.failed >= self.need
        return len(self.request.sources) - len(self.failed) >= self.need

    def choose(self) -> tuple[int, ...] | None:
        """The sources that take part, by arrival; None if too few are ready."""
        if self.groups is None:
            enough, found = len(self.ready) >= self.need, iter(self.ready)
        else:
            enough, found = len(self.groups.ready) >= self.need, self.groups.firsts(self.ready)
        return tuple(islice(found, self.request.num)) if enough else None

    def folding_order(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """The order in which chosen sources are folded: a reproducible reduction keeps that of the
        request, others that of arrival."""
        if not self.request.reproducible:
            return chosen
        if self.groups is None:
            return self.members
        return tuple(sorted(chosen, key=self.groups.of.__getitem__))

    def moves(self, holder_of: dict[int, int], destinations: tuple[int, ...]) -> bool:
        """Whether a collective that copies must send any member to a node other than its holder."""
        wanted_by = set(destinations)
        for index, holder in holder_of.items():
            if self.request.kind == "alltoall":
                if destinations[index % len(destinations)] != holder:
                    return True
            elif wanted_by != {holder}:
                return True
        return False

    def failure(self) -> OperationFailed:
        """The message that ends the operation when too few sources are left."""
        assert self.cause is not None
        index, reason = self.cause
        failed, total, what = len(self.failed), len(self.request.sources), "sources"
        if self.groups is not None:
            failed, total, what = self.groups.failed, len(self.request.one_of), "groups of sources"
        message = (
            f"{failed} of {total} {what} failed, so {self.need} cannot become ready; "
            f"the first failure was source {index}: {reason}"
        )
        error = "reduce" if self.request.kind in FOLDING else "source"
        gone = tuple(number for pair in self.gone for number in pair)
        return OperationFailed(self.request.operation, error, message, index, gone)

    def mismatch(self, chosen: Sequence[int]) -> OperationFailed | None:
        """The error if members of a fold have different layouts, as far as these are known."""
        if self.request.kind not in FOLDING:
            return None
        layouts = {index: self.ready[index].layout for index in chosen}
        if len({*layouts.values()} - {b""}) < 2:
            return None
        known = sorted((index, layout) for index, layout in layouts.items() if layout)
        first, expected = known[0]
        index, layout = next((index, layout) for index, layout in known if layout != expected)
        text = (
            f"sources differ: {first} ({self._named(first)}) has "
            f"{expected.decode(errors='replace')}, {index} ({self._named(index)}) has "
            f"{layout.decode(errors='replace')}"
        )
        return OperationFailed(self.request.operation, "value", text)

    def _named(self, index: int) -> str:
        """The text of a source's ref, as users see it."""
        return f"ObjectRef({self.request.sources[index].hex()})"

    def commit(self) -> Commit:
        """The message that ends the operation successfully."""
        at = self.destinations if self.plan is None else self.plan.destinations
        if self.request.kind != "alltoall":  # alltoall identifies destinations by position
            at = tuple(node for node in at if node not in self.lost)
        return Commit(self.request.operation, self.epoch, self.members, at)

    def everybody(self) -> list[int]:
        """The nodes that have the operation's plan, and the requester."""
        return list(dict.fromkeys((*self.told, self.request.node)))


def find_twins(sources: tuple[bytes, ...]) -> dict[bytes, list[int]]:
    """Ids that occur more than once, with all their indices."""
    if len(set(sources)) == len(sources):
        return {}
    indices: dict[bytes, list[int]] = {}
    for index, source in enumerate(sources):
        indices.setdefault(source, []).append(index)
    return {source: same for source, same in indices.items() if len(same) > 1}


# ---- transitions: they record what happened. A returned message ends the operation.


def note_ready(op: Operation, message: SourceReady) -> None:
    """Records another holder of a source. If a ready source occurs more than once, the request
    names all its indices. The first index registers all of them, so the others cost nothing."""
    known = op.ready.get(message.index)
    if known is not None and message.node in known.holders:
        return
    for index in op.same(message.index):
        if index not in op.failed:
            source = op.ready.get(index)
            if source is None:
                op.ready[index] = source = Source(message.nbytes, message.layout)
                if op.groups is not None:
                    op.groups.note_ready(index)
            source.holders.setdefault(message.node)


def note_failed(op: Operation, message: SourceFailed) -> None:
    """Records that a source has failed, with all its indices."""
    if message.index in op.failed:
        return
    for index in op.same(message.index):
        known = op.ready.pop(index, None)
        op.failed.add(index)
        if op.groups is None or op.groups.note_failed(index, known is not None):
            op.cause = op.cause or (index, message.reason)


def _lower_need(op: Operation, _: DeadlinePassed) -> None:
    op.need = 1


def _note_complete(op: Operation, message: StripesComplete) -> ManagerToNode | None:
    if message.epoch != op.epoch:
        return None
    return _finish(op, message.node)


def _finish(op: Operation, node: int) -> ManagerToNode | None:
    """Records that a node has finished. The last node ends the operation."""
    op.unfinished.discard(node)
    if op.unfinished:
        return None
    return op.commit()


def _note_copy(op: Operation, event: CopyMade) -> ManagerToNode | None:
    return _finish(op, event.node) if event.node in op.unfinished else None


def _note_refusal(op: Operation, event: CopyRefused) -> ManagerToNode | None:
    if event.node not in op.unfinished:
        return None
    text = f"node {event.node} cannot have its copy: {event.reason}"
    return OperationFailed(op.request.operation, event.error, text)


# Kinds that fail if any destination is lost, because its part of the result has no other place.
_BOUND = ("reduce", "gather", "reduce_scatter")


def _note_holder_lost(op: Operation, event: HolderLost) -> ManagerToNode | None:
    """Records the loss of a node. A source fails with its last holder, and the operation fails with
    a destination that it needs."""
    node = event.node
    op.lost.add(node)
    op.told.pop(node, None)
    for index, source in list(op.ready.items()):
        source.holders.pop(node, None)
        if not source.holders:
            op.note_gone(index, (node,))
            reason = f"its holder, node {node}, was lost"
            note_failed(op, SourceFailed(op.request.operation, index, reason))
    named = op.request.to
    destinations = named if op.plan is None else op.plan.destinations
    if node in destinations and (
        op.request.kind in _BOUND or all(other in op.lost for other in destinations)
    ):
        text = f"node {node}, a destination of its result, was lost"
        return OperationFailed(op.request.operation, "lost", text)
    return None


def _note_node_lost(op: Operation, event: HolderLost) -> ManagerToNode | None:
    """Records the loss of a node while a plan is executed. If other nodes depend on the lost node,
    the operation starts again; if it was only a receiver, the plan continues without it."""
    message = _note_holder_lost(op, event)
    if message is not None:
        return message
    plan, node = op.plan, event.node
    if plan is None or node not in participants(plan):
        return _finish(op, node) if node in op.unfinished else None
    gives = node in plan.holders or any(stripe.owner == node for stripe in plan.stripes)
    if gives or (plan.shape != "stripes" and node in waits_for(plan)):
        op.state = OperationState.WAITING
        return None
    return _finish(op, node) if node in op.unfinished else None


def _note_execution_failed(op: Operation, message: ExecutionFailed) -> ManagerToNode | None:
    if message.epoch != op.epoch:
        return None
    vanished = sorted(set(message.failed_sources).intersection(op.members))
    if not vanished:
        # No source can be left out, so a further epoch would fail in the same way.
        return OperationFailed(op.request.operation, message.error, message.reason)
    noted: set[bytes] = set()
    for index in vanished:
        op.note_gone(index, (message.node,))
        source = op.request.sources[index]
        if source not in noted:  # a node without the source names all its indices
            noted.add(source)
            _note_gone(op, index, message)
    op.state = OperationState.WAITING
    return None


def _note_gone(op: Operation, index: int, message: ExecutionFailed) -> None:
    """Records that a node no longer holds a source. Other nodes may still hold the source, because
    a node deletes its copy as soon as no local process needs it."""
    source = op.ready.get(index)
    if source is None or message.node not in source.holders or len(source.holders) == 1:
        note_failed(op, SourceFailed(op.request.operation, index, message.reason))
        return
    for one in op.same(index):
        op.ready[one].holders.pop(message.node, None)


def _drop(op: Operation, _: OperationDropped) -> ManagerToNode:
    return Forget(op.request.operation)


# Rows that look the same in both states mean different things. While a plan is executed, a source
# that becomes ready is a spare for the next epoch. A source that fails is no longer a spare, but
# the plan remains valid, because its nodes may have read the source before; otherwise they report
# ExecutionFailed.
TRANSITIONS: dict[tuple[OperationState, type], Callable[[Operation, Any], ManagerToNode | None]] = {
    (OperationState.WAITING, SourceReady): note_ready,
    (OperationState.WAITING, SourceFailed): note_failed,
    (OperationState.WAITING, DeadlinePassed): _lower_need,
    (OperationState.WAITING, OperationDropped): _drop,
    (OperationState.WAITING, HolderLost): _note_holder_lost,
    (OperationState.EXECUTING, SourceReady): note_ready,
    (OperationState.EXECUTING, SourceFailed): note_failed,
    (OperationState.EXECUTING, DeadlinePassed): _lower_need,
    (OperationState.EXECUTING, OperationDropped): _drop,
    (OperationState.EXECUTING, HolderLost): _note_node_lost,
    (OperationState.EXECUTING, CopyMade): _note_copy,
    (OperationState.EXECUTING, CopyRefused): _note_refusal,
    (OperationState.EXECUTING, StripesComplete): _note_complete,
    (OperationState.EXECUTING, ExecutionFailed): _note_execution_failed,
}
