"""One collective: what it has learned, and which message teaches it what.

Theory of operation. A request names sources that may not exist yet. They become ready, or fail,
in any order, doubled or late. As soon as `num` are ready these are the members, and the plan says
so to everybody: nobody decides it a second time. A failed source is skipped while `num` can still
be met. From the deadline on one source is enough, so that whatever is ready counts.

             enough ready                     complete everywhere
    WAITING ──────────────► EXECUTING ─────────────────────────────► Commit, forgotten
      ▲  │                     │   │
      │  └─ cannot be met ─────│───┴─ failed as a whole ──► OperationFailed, forgotten
      └────────────────────────┘
       sources vanished, a node that gives or owns was lost: epoch + 1

The table below holds every transition that a message can cause; what is not in it is ignored, and
that is how late messages die. A transition only notes what was learned; `reduce` then draws the
conclusion, the same way whatever came.

This module must never know what a source contains, nor which nodes would be best.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hoplite_mp.planner.program import participants, waits_for
from hoplite_mp.protocol.messages import (
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
    from collections.abc import Callable, Iterable

    from hoplite_mp.protocol.messages import ManagerToNode

    # What nodes report about an operation.
    Report: TypeAlias = (
        SourceReady | SourceFailed | StripesComplete | ExecutionFailed | OperationDropped
    )


class State(enum.Enum):
    """There is no finished state: what is finished is forgotten."""

    WAITING = "for enough sources to be ready"
    EXECUTING = "the members are fixed and announced"


class DeadlinePassed:
    """An event that does not come as a message."""


class HolderLost(NamedTuple):
    """Another one: a node that may hold sources, own stripes, or be a destination, is no more."""

    node: int


class CopyMade(NamedTuple):
    """Another one: this node has the object that a broadcast brings."""

    node: int


class CopyRefused(NamedTuple):
    """Another one: this node will never have it."""

    node: int
    reason: str
    error: str = "lost"


@dataclass(slots=True)
class Source:
    """A ready source: which living nodes hold it, first the one that said so first."""

    nbytes: int
    layout: bytes
    holders: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True)
class Operation:
    """A collective that has been asked for and is not yet committed, failed or dropped."""

    request: ReduceRequested
    need: int  # ready sources that suffice: 1 <= need <= num; 1 from the deadline on
    twins: dict[bytes, list[int]]  # ids given more than once, with all their indices
    state: State = State.WAITING
    deadline_at: float | None = None  # not None exactly while it stands in the list of deadlines
    ready: dict[int, Source] = field(default_factory=dict)  # in order of arrival; ∩ failed = ∅
    failed: set[int] = field(default_factory=set)
    cause: tuple[int, str] | None = None  # the first failure; not None when `failed` is not empty
    epoch: int = 0  # plans announced so far
    members: tuple[int, ...] = ()  # of the present epoch, sorted
    plan: ExecuteReduce | None = None  # the latest one; None before it, and for a broadcast
    destinations: tuple[int, ...] = ()  # of a broadcast, which has no plan of its own
    unfinished: set[int] = field(default_factory=set)  # nodes that have not reported yet
    lost: set[int] = field(default_factory=set)  # nodes lost while it ran
    told: dict[int, None] = field(default_factory=dict)  # living nodes that have the latest plan
    # Of sources that were to be at a node, and were not there: (index, node).
    gone: dict[tuple[int, int], None] = field(default_factory=dict)

    def same(self, index: int) -> Iterable[int]:
        """All indices of the source at `index`; none if there is no such source."""
        if index >= len(self.request.sources):
            return ()
        return self.twins.get(self.request.sources[index], (index,))

    def can_be_met(self) -> bool:
        """Can `need` sources still become ready?"""
        return len(self.request.sources) - len(self.failed) >= self.need

    def commit(self) -> Commit:
        """Its good end."""
        at = self.destinations if self.plan is None else self.plan.destinations
        if self.request.kind != "alltoall":  # whose destinations are told by their places
            at = tuple(node for node in at if node not in self.lost)
        return Commit(self.request.operation, self.epoch, self.members, at)

    def everybody(self) -> list[int]:
        """Who has its plan, and who asked for it."""
        return list(dict.fromkeys((*self.told, self.request.node)))


# ---- transitions: what an operation learns. A returned message ends it.


def note_ready(op: Operation, message: SourceReady) -> None:
    """One more holder of a source."""
    for index in op.same(message.index):
        if index not in op.failed:
            source = op.ready.get(index)
            if source is None:
                op.ready[index] = source = Source(message.nbytes, message.layout)
            source.holders.setdefault(message.node)


def note_failed(op: Operation, message: SourceFailed) -> None:
    """A source that will not take part."""
    for index in op.same(message.index):
        op.ready.pop(index, None)
        op.failed.add(index)
        op.cause = op.cause or (index, message.reason)


def _lower_need(op: Operation, _: DeadlinePassed) -> None:
    op.need = 1


def _note_complete(op: Operation, message: StripesComplete) -> ManagerToNode | None:
    if message.epoch != op.epoch:
        return None
    return _finish(op, message.node)


def _finish(op: Operation, node: int) -> ManagerToNode | None:
    """One less to wait for; the last one ends it."""
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


# Kinds whose every destination must live: elsewhere its part cannot be.
_BOUND = ("reduce", "gather", "reduce_scatter")


def _note_holder_lost(op: Operation, event: HolderLost) -> ManagerToNode | None:
    """The source goes with its last holder; the operation with a destination it cannot spare."""
    node = event.node
    op.lost.add(node)
    op.told.pop(node, None)
    for index, source in list(op.ready.items()):
        source.holders.pop(node, None)
        if not source.holders:
            reason = f"node {node}, which held it, was lost"
            note_failed(op, SourceFailed(op.request.operation, index, reason))
    named = op.request.to
    destinations = named if op.plan is None else op.plan.destinations
    if node in destinations and (
        op.request.kind in _BOUND or all(other in op.lost for other in destinations)
    ):
        text = f"node {node}, where its result was to be, was lost"
        return OperationFailed(op.request.operation, "lost", text)
    return None


def _note_node_lost(op: Operation, event: HolderLost) -> ManagerToNode | None:
    """While a plan is executed: who only receives is not missed, without others it starts anew."""
    message = _note_holder_lost(op, event)
    if message is not None:
        return message
    plan, node = op.plan, event.node
    if plan is None or node not in participants(plan):
        return _finish(op, node) if node in op.unfinished else None
    gives = node in plan.holders or any(stripe.owner == node for stripe in plan.stripes)
    if gives or (plan.shape != "stripes" and node in waits_for(plan)):
        op.state = State.WAITING
        return None
    return _finish(op, node) if node in op.unfinished else None


def _note_execution_failed(op: Operation, message: ExecutionFailed) -> ManagerToNode | None:
    if message.epoch != op.epoch:
        return None
    vanished = sorted(set(message.failed_sources).intersection(op.members))
    if not vanished:
        # Nothing that could be left out: a further epoch would fail in the same way.
        return OperationFailed(op.request.operation, message.error, message.reason)
    for index in vanished:
        _note_gone(op, index, message)
    op.state = State.WAITING
    return None


def _note_gone(op: Operation, index: int, message: ExecutionFailed) -> None:
    """Others may still hold it: a copy goes when nobody there wants it any more."""
    op.gone[index, message.node] = None
    source = op.ready.get(index)
    if source is None or message.node not in source.holders or len(source.holders) == 1:
        note_failed(op, SourceFailed(op.request.operation, index, message.reason))
        return
    for one in op.same(index):
        op.ready[one].holders.pop(message.node, None)


def _drop(op: Operation, _: OperationDropped) -> ManagerToNode:
    return Forget(op.request.operation)


# Rows that look the same in both states mean different things. While a plan is executed, a source
# that becomes ready is a spare for the next epoch; one that fails is none, but the plan stands,
# because its executor may have taken the source before; it will say so if it has not.
TRANSITIONS: dict[tuple[State, type], Callable[[Operation, Any], ManagerToNode | None]] = {
    (State.WAITING, SourceReady): note_ready,
    (State.WAITING, SourceFailed): note_failed,
    (State.WAITING, DeadlinePassed): _lower_need,
    (State.WAITING, OperationDropped): _drop,
    (State.WAITING, HolderLost): _note_holder_lost,
    (State.EXECUTING, SourceReady): note_ready,
    (State.EXECUTING, SourceFailed): note_failed,
    (State.EXECUTING, DeadlinePassed): _lower_need,
    (State.EXECUTING, OperationDropped): _drop,
    (State.EXECUTING, HolderLost): _note_node_lost,
    (State.EXECUTING, CopyMade): _note_copy,
    (State.EXECUTING, CopyRefused): _note_refusal,
    (State.EXECUTING, StripesComplete): _note_complete,
    (State.EXECUTING, ExecutionFailed): _note_execution_failed,
}
