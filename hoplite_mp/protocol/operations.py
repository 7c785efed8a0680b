"""The messages about collectives on refs: a request, its sources, a plan, its end.

    request ─► sources become ready or fail ─► plan (epoch 1) ─► stripes complete ─► commit
                                                 ▲      │
                                                 └──────┘ sources vanished: epoch + 1

This module must never know how an order of arrival is decided upon, nor how bytes are added.
"""

from __future__ import annotations

import math

import msgspec

from hoplite_mp.protocol.fields import (
    KINDS,
    OP_CHARS_MAX,
    OPERATION_ERRORS,
    RULES,
    SHARES,
    SLICES_MAX,
    SOURCES_MAX,
    TEXT_CHARS_MAX,
    Message,
    between,
    counts,
    flags,
    indices,
    object_ids,
    one_of,
    sorted_indices,
    text,
)

# ---- collectives: node -> manager


class ReduceRequested(Message, frozen=True):
    """A process called a collective. `deadline_s` counts from here; `slices` results are made.

    `ready` are the sources known to be ready at the call, in the order in which they became so:
    a deadline of 0 means exactly these. Others follow as SourceReady. An id that stands twice in
    `sources` is two sources which become ready, or fail, together.
    """

    operation: int
    node: int
    caller: int
    sources: tuple[bytes, ...]
    op: str
    num: int
    deadline_s: float | None = None
    reproducible: bool = False
    slices: int = 1
    kind: str = "reduce"
    ready: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts(operation=self.operation, node=self.node, caller=self.caller)
        object_ids("sources", self.sources)
        text("op", self.op, OP_CHARS_MAX)
        between("num", self.num, 1, len(self.sources))
        deadline_s = self.deadline_s
        if deadline_s is not None and (
            type(deadline_s) not in (int, float) or not 0 <= deadline_s < math.inf
        ):
            raise ValueError(f"deadline_s must be None or seconds from 0 on, not {deadline_s!r}")
        flags(reproducible=self.reproducible)
        between("slices", self.slices, 1, SLICES_MAX)
        one_of("kind", self.kind, KINDS)
        indices("ready", self.ready, len(self.sources))


class SourceReady(Message, frozen=True):
    """`node` holds source `index` as a whole."""

    operation: int
    index: int
    node: int

    def __post_init__(self) -> None:
        counts(operation=self.operation, index=self.index, node=self.node)


class SourceFailed(Message, frozen=True):
    """Source `index` failed or was deleted; final, also after SourceReady."""

    operation: int
    index: int
    reason: str

    def __post_init__(self) -> None:
        counts(operation=self.operation, index=self.index)
        text("reason", self.reason, TEXT_CHARS_MAX)


class StripesComplete(Message, frozen=True):
    """`node` has finished its stripes of that epoch's plan."""

    operation: int
    epoch: int
    node: int

    def __post_init__(self) -> None:
        counts(operation=self.operation, epoch=self.epoch, node=self.node)


class ExecutionFailed(Message, frozen=True):
    """A plan could not be executed.

    With `failed_sources`: these had vanished, and there will be a plan without them (epoch + 1)
    if that is still possible. Without: the operation fails with `error` and `reason`.
    """

    operation: int
    epoch: int
    node: int
    reason: str
    failed_sources: tuple[int, ...] = ()
    error: str = "value"

    def __post_init__(self) -> None:
        counts(operation=self.operation, epoch=self.epoch, node=self.node)
        text("reason", self.reason, TEXT_CHARS_MAX)
        indices("failed_sources", self.failed_sources, SOURCES_MAX)
        one_of("error", self.error, OPERATION_ERRORS)


class OperationDropped(Message, frozen=True):
    """Nobody wants the result any more. The manager answers Forget, or had answered already."""

    operation: int

    def __post_init__(self) -> None:
        counts(operation=self.operation)


# ---- collectives: manager -> node


class Stripe(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Shares [begin_share, end_share) of SHARES of the result, added up by node `owner`."""

    owner: int
    begin_share: int
    end_share: int

    def __post_init__(self) -> None:
        counts(owner=self.owner)
        between("begin_share", self.begin_share, 0, SHARES - 1)
        between("end_share", self.end_share, self.begin_share + 1, SHARES)


class ExecuteReduce(Message, frozen=True):
    """The plan: exactly `members` go in, added in `order`; whoever owns a stripe reports it."""

    operation: int
    epoch: int
    members: tuple[int, ...]
    order: tuple[int, ...]
    stripes: tuple[Stripe, ...]
    rule: str

    def __post_init__(self) -> None:
        counts(operation=self.operation, epoch=self.epoch)
        sorted_indices("members", self.members)
        indices("order", self.order, SOURCES_MAX)
        if tuple(sorted(self.order)) != self.members:
            raise ValueError(f"order must hold the members, not {self.order!r}")
        end = 0
        for stripe in self.stripes:
            if stripe.begin_share != end:
                raise ValueError(f"stripes must follow each other: {self.stripes!r}")
            end = stripe.end_share
        if end != SHARES:
            raise ValueError(f"stripes must cover all {SHARES} shares: {self.stripes!r}")
        one_of("rule", self.rule, RULES)


class Commit(Message, frozen=True):
    """All stripes of `epoch` are complete: seal the result. Epoch 0: nothing was to be moved."""

    operation: int
    epoch: int
    contributors: tuple[int, ...]

    def __post_init__(self) -> None:
        counts(operation=self.operation, epoch=self.epoch)
        sorted_indices("contributors", self.contributors)


class OperationFailed(Message, frozen=True):
    """The operation cannot come true; `cause_index` names the source that failed first."""

    operation: int
    error: str
    message: str
    cause_index: int | None = None

    def __post_init__(self) -> None:
        counts(operation=self.operation)
        one_of("error", self.error, OPERATION_ERRORS)
        text("message", self.message, 2 * TEXT_CHARS_MAX)
        if self.cause_index is not None:
            between("cause_index", self.cause_index, 0, SOURCES_MAX - 1)


class Forget(Message, frozen=True):
    """Stop what is being done for that operation and drop it; nobody waits for an answer."""

    operation: int

    def __post_init__(self) -> None:
        counts(operation=self.operation)
