"""One collective: its state, and the transitions that messages about it cause.

Theory of operation. A request names sources that may not exist yet. They become ready, or fail, in
any order; reports may arrive late or twice. The first `num` sources that become ready are the
members. The plan announces the members to all participating nodes, and nodes do not choose members
themselves. Failed sources are skipped as long as `num` sources can still become ready. After the
deadline one source is enough, and all sources that are ready by then take part. A request may
divide its sources into groups of alternatives. Then the first ready source of each group takes
part, and groups are counted in place of sources.

             enough ready                     complete everywhere
    WAITING ──────────────► EXECUTING ─────────────────────────────► Commit, forgotten
      ▲  │                     │   │
      │  └─ cannot be met ─────│───┴─ failed as a whole ──► OperationFailed, forgotten
      └────────────────────────┘
       sources vanished, or a node that holds members or owns stripes was lost: epoch + 1

The table TRANSITIONS contains every transition that a message can cause, with one exception:
reports of slow links (OperationSlow) may cause a plan of the next epoch.
Messages that are not in the table, such as late messages, are ignored. A transition only records
the event. After every message, `reduce` applies the same rule to the recorded state and decides
what to send.
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
    """The states of an operation. A finished operation is forgotten and has no state."""

    WAITING = "for enough sources to be ready"
    EXECUTING = "the members are fixed and announced"


class DeadlinePassed:
    """The deadline of an operation has passed. An internal event, not a message."""


class HolderLost(NamedTuple):
    """A node that holds sources, owns stripes or is a destination was lost. An internal event."""

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
    """The groups of alternatives into which a request divides its sources. Counts the ready and
    the failed groups, because these numbers are needed after each report."""

    def __init__(self, one_of: tuple[tuple[int, ...], ...]) -> None:
        self.of = {index: place for place, group in enumerate(one_of) for index in group}
        # Group -> number of its ready sources. Groups without ready sources are absent.
        self.ready: Counter[int] = Counter()
        # For each group, the number of sources that have not failed.
        self._left = [len(group) for group in one_of]
        self.failed = 0  # number of groups whose sources have all failed

    def note_ready(self, index: int) -> None:
        """Records that a source has become ready."""
        self.ready[self.of[index]] += 1

    def note_failed(self, index: int, was_ready: bool) -> bool:
        """Records that a source has failed. Returns whether its whole group has now failed."""
        place = self.of[index]
        if was_ready:
            self.ready[place] -= 1
            if not self.ready[place]:
                del self.ready[place]
        self._left[place] -= 1
        self.failed += self._left[place] == 0
        return self._left[place] == 0

    def firsts(self, ready: Iterable[int]) -> Iterator[int]:
        """Yields the first source of each group from `ready`, which is in order of arrival."""
        seen: set[int] = set()
        for index in ready:
            if self.of[index] not in seen:
                seen.add(self.of[index])
                yield index


@dataclass(slots=True)
class Operation:
    """A running collective, from the request until it is committed, failed or dropped."""

    request: ReduceRequested
    need: int  # number of ready sources that suffice, at most num; 1 after the deadline
    twins: dict[bytes, list[int]]  # source that is named more than once -> all its indices
    groups: SourceGroups | None = None  # None: the sources are not divided into groups
    state: OperationState = OperationState.WAITING
    deadline_at: float | None = None  # None: the list of deadlines has no entry for the operation
    ready: dict[int, Source] = field(default_factory=dict)  # in order of arrival; none in `failed`
    failed: set[int] = field(default_factory=set)
    # (index, reason) of the first failure of a source, or of a whole group.
    cause: tuple[int, str] | None = None
    epoch: int = 0  # number of plans announced so far
    members: tuple[int, ...] = ()  # the members of the current epoch, sorted
    plan: ExecuteReduce | None = None  # the latest plan; None before the first, or for a broadcast
    # The destinations of a broadcast, or of an operation that need not move any bytes.
    destinations: tuple[int, ...] = ()
    unfinished: set[int] = field(default_factory=set)  # nodes that have not finished their part
    lost: set[int] = field(default_factory=set)  # nodes lost during the operation
    told: dict[int, None] = field(default_factory=dict)  # living nodes that have the latest plan
    # (index, node): the node was expected to hold the source, but did not hold it or was lost.
    gone: dict[tuple[int, int], None] = field(default_factory=dict)
    # The nodes' reports of slow links in this epoch.
    links: SlowLinks[OperationSlow] = field(default_factory=SlowLinks)
    record: PlanRecord | None = None  # of the latest plan
    relieved: bool = False  # stripes have been moved away from a node with a slow link

    def same(self, index: int) -> Iterable[int]:
        """All indices at which the request names the source at `index`. Empty if out of range."""
        if index >= len(self.request.sources):
            return ()
        return self.twins.get(self.request.sources[index], (index,))

    def note_gone(self, index: int, nodes: Iterable[int]) -> None:
        """Records that these nodes no longer hold the source. If too few sources are left, the
        requester is informed, because it may find another copy or recompute the source."""
        self.gone.update({(index, node): None for node in nodes})

    def all_gone(self, index: int, nodes: tuple[int, ...]) -> SourceFailed:
        """Returns the event that a source has failed because all nodes that held it are lost."""
        self.note_gone(index, nodes)
        reason = f"its holder, node {nodes[0]}, is lost"
        return SourceFailed(self.request.operation, index, reason)

    def can_be_met(self) -> bool:
        """Whether `need` sources, or groups, can still become ready."""
        if self.groups is not None:
            return len(self.request.one_of) - self.groups.failed >= self.need
        return len(self.request.sources) - len(self.failed) >= self.need

    def choose(self) -> tuple[int, ...] | None:
        """The sources that take part, in order of arrival. None if too few are ready."""
        if self.groups is None:
            enough, found = len(self.ready) >= self.need, iter(self.ready)
        else:
            enough, found = len(self.groups.ready) >= self.need, self.groups.firsts(self.ready)
        return tuple(islice(found, self.request.num)) if enough else None

    def folding_order(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """The order in which the chosen sources are folded: the order of the request for a
        reproducible reduction, otherwise the order of arrival."""
        if not self.request.reproducible:
            return chosen
        if self.groups is None:
            return self.members
        return tuple(sorted(chosen, key=self.groups.of.__getitem__))

    def moves(self, holder_of: dict[int, int], destinations: tuple[int, ...]) -> bool:
        """Whether a collective that only copies must send any member to another node."""
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
        failed, total, noun = len(self.failed), len(self.request.sources), "sources"
        if self.groups is not None:
            failed, total, noun = self.groups.failed, len(self.request.one_of), "groups of sources"
        message = (
            f"{failed} of {total} {noun} failed, so {self.need} cannot become ready; "
            f"the first failure was source {index}: {reason}"
        )
        error = "reduce" if self.request.kind in FOLDING else "source"
        gone = tuple(number for pair in self.gone for number in pair)
        return OperationFailed(self.request.operation, error, message, index, gone)

    def mismatch(self, chosen: Sequence[int]) -> OperationFailed | None:
        """Returns the error if members of a fold are known to have different layouts."""
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
        """The ref of a source, as it is displayed to users."""
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
    """Maps each id that occurs more than once to all its indices."""
    if len(set(sources)) == len(sources):
        return {}
    indices: dict[bytes, list[int]] = {}
    for index, source in enumerate(sources):
        indices.setdefault(source, []).append(index)
    return {source: same for source, same in indices.items() if len(same) > 1}


# ---- transitions: functions that record an event. A returned message ends the operation.


def note_ready(op: Operation, message: SourceReady) -> None:
    """Records another holder of a source. If the request names the source at several indices, each
    of them may be reported. The first report updates all indices, so the others are ignored."""
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
    """Records that a source has failed, at all its indices."""
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


# Kinds that fail if any destination is lost, because no other node can receive its part of the
# result.
_BOUND = ("reduce", "gather", "reduce_scatter")


def _note_holder_lost(op: Operation, event: HolderLost) -> ManagerToNode | None:
    """Records the loss of a node. A source fails if the node was its last holder. The operation
    fails if it needs the node as a destination."""
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
    """Records the loss of a node while a plan is being executed. If other nodes depend on the lost
    node, the operation is planned again. Otherwise the plan continues without the node."""
    message = _note_holder_lost(op, event)
    if message is not None:
        return message
    plan, node = op.plan, event.node
    if plan is None or node not in participants(plan):
        return _finish(op, node) if node in op.unfinished else None
    provides = node in plan.holders or any(stripe.owner == node for stripe in plan.stripes)
    if provides or (plan.shape != "stripes" and node in waits_for(plan)):
        op.state = OperationState.WAITING
        return None
    return _finish(op, node) if node in op.unfinished else None


def _note_execution_failed(op: Operation, message: ExecutionFailed) -> ManagerToNode | None:
    if message.epoch != op.epoch:
        return None
    vanished = sorted(set(message.failed_sources).intersection(op.members))
    if not vanished:
        # The failure is not due to a missing source, so another plan would fail in the same way.
        return OperationFailed(op.request.operation, message.error, message.reason)
    noted: set[bytes] = set()
    for index in vanished:
        op.note_gone(index, (message.node,))
        source = op.request.sources[index]
        if source not in noted:  # the message may name several indices of the same source
            noted.add(source)
            _note_gone(op, index, message)
    op.state = OperationState.WAITING
    return None


def _note_gone(op: Operation, index: int, message: ExecutionFailed) -> None:
    """Records that a node no longer holds a source. The source fails only if no other node holds
    it, because a node may delete its own copy when no local process needs the copy any more."""
    source = op.ready.get(index)
    if source is None or message.node not in source.holders or len(source.holders) == 1:
        note_failed(op, SourceFailed(op.request.operation, index, message.reason))
        return
    for same in op.same(index):
        op.ready[same].holders.pop(message.node, None)


def _drop(op: Operation, _: OperationDropped) -> ManagerToNode:
    return Forget(op.request.operation)


# Some rows have the same function in both states, but different consequences. While a plan is being
# executed, a source that becomes ready is a spare for the next epoch. If a source fails, the plan
# remains valid, because the nodes may already have read the source; otherwise they report
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
