"""Which sources go into a collective, decided once, in order of arrival.

Theory of operation. A request names sources that may not exist yet. They become ready, or fail,
in any order, doubled or late. As soon as `num` are ready these are the members, and the plan says
so to everybody: nobody decides it a second time. A failed source is skipped while `num` can still
be met. From the deadline on one source is enough, so that whatever is ready counts.

             enough ready                     all stripes complete
    WAITING ──────────────► EXECUTING ─────────────────────────────► Commit, forgotten
      ▲  │                     │   │
      │  └─ cannot be met ─────│───┴─ failed as a whole ──► OperationFailed, forgotten
      └────────────────────────┘
       sources vanished: epoch + 1

The table below holds every transition that a message can cause; what is not in it is ignored, and
that is how late messages die. A transition only notes what was learned; `_settle` then draws the
conclusion, the same way whatever came. A finished operation leaves nothing behind.

This module must never know what a source contains, nor how it is added.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from hoplite_mp.planner.forest import owners, single_vertex
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

    from hoplite_mp.planner.plan import Send
    from hoplite_mp.protocol.messages import ManagerToNode

    # What nodes report about an operation that they have asked for.
    Report: TypeAlias = (
        SourceReady | SourceFailed | StripesComplete | ExecutionFailed | OperationDropped
    )


class State(enum.Enum):
    """There is no finished state: what is finished is forgotten."""

    WAITING = "for enough sources to be ready"
    EXECUTING = "the members are fixed and announced"


class DeadlinePassed:
    """The one event that does not come as a message."""


@dataclass(slots=True)
class Operation:
    """A collective that has been asked for and is not yet committed, failed or dropped."""

    request: ReduceRequested
    need: int  # ready sources that suffice: 1 <= need <= num; 1 from the deadline on
    twins: dict[bytes, list[int]]  # ids given more than once, with all their indices
    state: State = State.WAITING
    deadline_at: float | None = None  # not None exactly while it stands in the list of deadlines
    ready: dict[int, None] = field(default_factory=dict)  # in order of arrival; ∩ failed = ∅
    failed: set[int] = field(default_factory=set)
    cause: tuple[int, str] | None = None  # the first failure; not None when `failed` is not empty
    epoch: int = 0  # plans announced so far
    members: tuple[int, ...] = ()  # of the present epoch, sorted
    unfinished: set[int] = field(default_factory=set)  # owners that have not reported yet

    def same(self, index: int) -> Iterable[int]:
        """All indices of the source at `index`; none if there is no such source."""
        if index >= len(self.request.sources):
            return ()
        return self.twins.get(self.request.sources[index], (index,))

    def can_be_met(self) -> bool:
        """Can `need` sources still become ready?"""
        return len(self.request.sources) - len(self.failed) >= self.need


# ---- transitions: what an operation learns. A returned message ends it.


def _note_ready(op: Operation, message: SourceReady) -> None:
    for index in op.same(message.index):
        if index not in op.failed:
            op.ready.setdefault(index)


def _note_failed(op: Operation, message: SourceFailed) -> None:
    for index in op.same(message.index):
        op.ready.pop(index, None)
        op.failed.add(index)
        op.cause = op.cause or (index, message.reason)


def _lower_need(op: Operation, _: DeadlinePassed) -> None:
    op.need = 1


def _note_complete(op: Operation, message: StripesComplete) -> ManagerToNode | None:
    if message.epoch != op.epoch:
        return None
    op.unfinished.discard(message.node)
    if op.unfinished:
        return None
    return Commit(op.request.operation, op.epoch, op.members)


def _note_execution_failed(op: Operation, message: ExecutionFailed) -> ManagerToNode | None:
    if message.epoch != op.epoch:
        return None
    vanished = sorted(set(message.failed_sources).intersection(op.members))
    if not vanished:
        # Nothing that could be left out: a further epoch would fail in the same way.
        return OperationFailed(op.request.operation, message.error, message.reason)
    for index in vanished:
        _note_failed(op, SourceFailed(op.request.operation, index, message.reason))
    op.state = State.WAITING
    return None


def _drop(op: Operation, _: OperationDropped) -> ManagerToNode:
    return Forget(op.request.operation)


# Rows that look the same in both states mean different things. While a plan is executed, a source
# that becomes ready is a spare for the next epoch; one that fails is none, but the plan stands,
# because its executor may have taken the source before; it will say so if it has not.
TRANSITIONS: dict[tuple[State, type], Callable[[Operation, Any], ManagerToNode | None]] = {
    (State.WAITING, SourceReady): _note_ready,
    (State.WAITING, SourceFailed): _note_failed,
    (State.WAITING, DeadlinePassed): _lower_need,
    (State.WAITING, OperationDropped): _drop,
    (State.EXECUTING, SourceReady): _note_ready,
    (State.EXECUTING, SourceFailed): _note_failed,
    (State.EXECUTING, DeadlinePassed): _lower_need,
    (State.EXECUTING, OperationDropped): _drop,
    (State.EXECUTING, StripesComplete): _note_complete,
    (State.EXECUTING, ExecutionFailed): _note_execution_failed,
}


# ---- conclusions


def _settle(op: Operation) -> ManagerToNode | None:
    """What follows from what is known: a plan, an end, or nothing yet."""
    if op.state is not State.WAITING:
        return None
    if not op.can_be_met():
        return _failure(op)
    if len(op.ready) < op.need:
        return None
    chosen = tuple(islice(op.ready, op.request.num))
    if op.request.kind == "gather":
        return Commit(op.request.operation, op.epoch, tuple(sorted(chosen)))
    return _begin(op, chosen)


def _begin(op: Operation, chosen: tuple[int, ...]) -> ExecuteReduce:
    """Fix the members and announce them as the next epoch."""
    op.state = State.EXECUTING
    op.epoch += 1
    op.members = tuple(sorted(chosen))
    stripes = single_vertex(op.request.node)
    op.unfinished = owners(stripes)
    order, rule = (op.members, "fold") if op.request.reproducible else (chosen, "any")
    return ExecuteReduce(op.request.operation, op.epoch, op.members, order, stripes, rule)


def _failure(op: Operation) -> OperationFailed:
    assert op.cause is not None
    index, reason = op.cause
    total = len(op.request.sources)
    message = (
        f"{len(op.failed)} of {total} sources failed, so {op.need} cannot be ready any more; "
        f"first source {index}: {reason}"
    )
    error = "source" if op.request.kind == "gather" else "reduce"
    return OperationFailed(op.request.operation, error, message, index)


def _find_twins(sources: tuple[bytes, ...]) -> dict[bytes, list[int]]:
    if len(set(sources)) == len(sources):
        return {}
    indices: dict[bytes, list[int]] = {}
    for index, source in enumerate(sources):
        indices.setdefault(source, []).append(index)
    return {source: same for source, same in indices.items() if len(same) > 1}


# ---- all operations together

# The messages after which an operation is over and nothing of it is kept.
_ENDS = (Commit, OperationFailed, Forget)


class Reductions:
    """The operations of a cluster that are not yet over."""

    def __init__(self, operations_max: int) -> None:
        self._operations_max = operations_max
        self.operations: dict[int, Operation] = {}
        self._deadlines: list[tuple[float, int]] = []  # sorted; of open operations only

    @property
    def wake_at(self) -> float | None:
        """When `tick` has something to do."""
        return self._deadlines[0][0] if self._deadlines else None

    def request(self, message: ReduceRequested, now: float) -> list[Send]:
        """A new operation. A double of an open one is ignored."""
        if message.operation in self.operations:
            return []
        if len(self.operations) >= self._operations_max:
            text = f"{self._operations_max} collectives are under way, and no more are allowed"
            return [(message.node, OperationFailed(message.operation, "full", text))]
        op = Operation(message, message.num, _find_twins(message.sources))
        self.operations[message.operation] = op
        if message.deadline_s is not None and message.deadline_s <= 0:
            # Passed at the call, not at the next tick: what else has failed by then is not asked.
            _lower_need(op, DeadlinePassed())
        elif message.deadline_s is not None:
            op.deadline_at = now + message.deadline_s
            insort(self._deadlines, (op.deadline_at, message.operation))
        for index in message.ready:
            _note_ready(op, SourceReady(message.operation, index, message.node))
        return self._conclude(op, None)

    def step(self, message: Report) -> list[Send]:
        """One message about one operation; ignored if that is over or unknown."""
        op = self.operations.get(message.operation)
        return [] if op is None else self._apply(op, message)

    def tick(self, now: float) -> list[Send]:
        """Every deadline up to `now` passes."""
        sends: list[Send] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, operation = self._deadlines.pop(0)
            op = self.operations[operation]
            op.deadline_at = None
            sends += self._apply(op, DeadlinePassed())
        return sends

    def lose_node(self, node: int) -> None:
        """Who asked is gone, so nobody is told."""
        for op in [op for op in self.operations.values() if op.request.node == node]:
            self._forget(op)

    def _apply(self, op: Operation, event: Report | DeadlinePassed) -> list[Send]:
        transition = TRANSITIONS.get((op.state, type(event)))
        return [] if transition is None else self._conclude(op, transition(op, event))

    def _conclude(self, op: Operation, message: ManagerToNode | None) -> list[Send]:
        message = message or _settle(op)
        if message is None:
            return []
        if isinstance(message, _ENDS):
            self._forget(op)
        return [(op.request.node, message)]

    def _forget(self, op: Operation) -> None:
        del self.operations[op.request.operation]
        if op.deadline_at is not None:
            place = bisect_left(self._deadlines, (op.deadline_at, op.request.operation))
            del self._deadlines[place]
