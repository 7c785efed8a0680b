"""Messages about collectives on refs.

request ─► sources become ready or fail ─► plan (epoch 1) ─► stripes complete ─► commit
                                             ▲      │
                                             └──────┘ after the loss of sources or a node:
                                                      epoch + 1
"""

from __future__ import annotations

from itertools import chain

from hoplite_mp._protocol.fields import (
    FOLDING,
    KINDS,
    NO_OBJECT,
    NODES_MAX,
    OP_CHARS_MAX,
    OPERATION_ERRORS,
    RULES,
    SLICES_MAX,
    SOURCES_MAX,
    TEXT_CHARS_MAX,
    Message,
    Stripe,
    between,
    counts,
    flags,
    indices,
    layout,
    numbers,
    object_ids,
    one_of,
    seconds,
    shape,
    sorted_indices,
    text,
    whole_object,
)

# The requesting node chooses the number of an operation: `node << OPERATION_NODE_BITS | count`,
# which is unique in the cluster. Numbers >= COPY_OPERATION are chosen by the planner, for copies;
# numbers >= GROUP_OPERATION belong to Group calls.
OPERATION_NODE_BITS = 40
GROUP_OPERATION = 1 << 62
COPY_OPERATION = 1 << 63

# ---- collectives: node -> manager


class ReduceRequested(Message, frozen=True, tag="ReduceRequested"):
    """A process has called a collective. `deadline_s` counts from the receipt of this message.

    `to` are the destinations, in order; empty: the default of the kind (reduce, gather: this node;
    allreduce: the holders of sources; reduce_scatter: the holders of the sources in order, if there
    are as many results, else this node; broadcast, allgather: all nodes). `results` are the ids of
    the results at the destinations: one, or for reduce_scatter one per slice; for kinds that copy,
    only the object for which the caller is waiting.

    `ready` are the sources that were ready at the call, in the order in which they became ready; a
    deadline of 0 selects exactly these sources. `ready_nbytes`, `ready_layouts` and `ready_holders`
    describe them like the fields of SourceReady; empty: unknown, and this node holds the sources.
    SourceReady follows for the other sources. An id that occurs twice in `sources` counts as two
    sources, which become ready or fail together.

    `one_of`: groups of sources; every source is in exactly one group. The first ready source of
    each group takes part, and `num` counts groups. Empty: each source is a separate group.
    """

    operation: int
    node: int
    caller: int
    sources: tuple[bytes, ...]
    op: str
    num: int
    deadline_s: float | None = None
    reproducible: bool = False
    results: tuple[bytes, ...] = ()
    kind: str = "reduce"
    ready: tuple[int, ...] = ()
    to: tuple[int, ...] = ()
    ready_nbytes: tuple[int, ...] = ()
    ready_layouts: tuple[bytes, ...] = ()
    ready_holders: tuple[tuple[int, ...], ...] = ()
    one_of: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        between("operation", self.operation, 0, GROUP_OPERATION - 1)
        counts(node=self.node, caller=self.caller)
        object_ids("sources", self.sources)
        text("op", self.op, OP_CHARS_MAX)
        between("num", self.num, 1, len(self.one_of or self.sources))
        if self.deadline_s is not None:
            seconds("deadline_s", self.deadline_s)
        flags(reproducible=self.reproducible)
        object_ids("results", self.results, 0)
        between("number of results", len(self.results), 0, SLICES_MAX)
        one_of("kind", self.kind, KINDS)
        indices("ready", self.ready, len(self.sources))
        numbers("to", self.to, NODES_MAX - 1)
        if len(set(self.to)) != len(self.to) and self.kind not in ("reduce_scatter", "alltoall"):
            raise ValueError(f"to must be distinct nodes for {self.kind}: {self.to!r}")
        numbers("ready_nbytes", self.ready_nbytes)
        for description in self.ready_layouts:
            layout("ready_layouts", description)
        for row in self.ready_holders:
            numbers("ready_holders", row, NODES_MAX - 1)
            between("number of holders", len(row), 1, NODES_MAX)
        if self.kind == "broadcast" and len(self.sources) != 1:
            raise ValueError(f"sources must be one object for broadcast, not {len(self.sources)}")
        if self.kind in ("reduce", "gather") and len(self.to) > 1:
            raise ValueError(f"to must be one node for {self.kind}, not {self.to!r}")
        if self.kind == "alltoall" and not self.to:
            raise ValueError("to must not be empty for alltoall")
        for name in ("ready_nbytes", "ready_layouts", "ready_holders"):
            if len(getattr(self, name)) not in (0, len(self.ready)):
                raise ValueError(f"{name} must be empty or have one item per ready: {self!r}")
        if self.one_of:
            self._check_groups()

    def _check_groups(self) -> None:
        if self.kind not in ("reduce", "allreduce"):
            raise ValueError(f"one_of must be empty for {self.kind}: {self.one_of!r}")
        for group in self.one_of:
            numbers("one_of", group)
            between("number of sources in a group", len(group), 1, len(self.sources))
        if sorted(chain.from_iterable(self.one_of)) != list(range(len(self.sources))):
            raise ValueError(f"one_of must name every source once: {self.one_of!r}")


class SourceReady(Message, frozen=True, tag="SourceReady"):
    """`node` and `others` hold the whole source `index`. One living holder is enough; if all are
    lost, the source has failed.

    `layout` describes the dtype, shape and order, and is opaque to the manager. It must be the same
    for all members of a reduction; otherwise the operation fails, and the error names two sources
    that differ.
    """

    operation: int
    index: int
    node: int
    nbytes: int = 0
    layout: bytes = b""
    others: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts(operation=self.operation, index=self.index, node=self.node, nbytes=self.nbytes)
        layout("layout", self.layout)
        numbers("others", self.others, NODES_MAX - 1)


class SourceFailed(Message, frozen=True, tag="SourceFailed"):
    """Source `index` failed or was deleted. This is final, even after SourceReady."""

    operation: int
    index: int
    reason: str

    def __post_init__(self) -> None:
        counts(operation=self.operation, index=self.index)
        text("reason", self.reason, TEXT_CHARS_MAX)


class StripesComplete(Message, frozen=True, tag="StripesComplete"):
    """`node` has finished its part of that epoch's plan: its stripes are folded, and it has the
    result if it is a destination. It continues to serve until Commit or Forget.
    """

    operation: int
    epoch: int
    node: int

    def __post_init__(self) -> None:
        counts(operation=self.operation, epoch=self.epoch, node=self.node)


class OperationSlow(Message, frozen=True, tag="OperationSlow"):
    """The link of `node` has become slow during the execution of that epoch's plan. `up`, `down`:
    its current rates in bytes per second; `sent`, `received`: bytes that its host has sent and
    received since the start of the operation."""

    operation: int
    epoch: int
    node: int
    up: int
    down: int
    sent: int
    received: int

    def __post_init__(self) -> None:
        counts(operation=self.operation, epoch=self.epoch, node=self.node)
        counts(up=self.up, down=self.down, sent=self.sent, received=self.received)


class ExecutionFailed(Message, frozen=True, tag="ExecutionFailed"):
    """A plan could not be executed.

    `failed_sources`: lost sources; if possible, a plan without them follows (epoch + 1). If empty,
    the operation fails with `error` and `reason`.
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


class OperationDropped(Message, frozen=True, tag="OperationDropped"):
    """The result is no longer needed. The manager answers with Forget, unless it has already
    sent Forget."""

    operation: int

    def __post_init__(self) -> None:
        counts(operation=self.operation)


# ---- collectives: manager -> node


class ExecuteReduce(Message, frozen=True, tag="ExecuteReduce"):
    """The plan for `members`. Holders, owners and destinations receive the same message.

    `order` is the folding order; `objects` and `holders` are the id and source node of each member.
    `destinations` get the result (reduce_scatter: slice i goes to the i-th destination, which owns
    stripe i; the bounds of the stripe are those of `numpy.array_split`, not its shares). Shape
    "stripes": the owner of each stripe pulls it from every other holder; destinations pull the
    folded stripe from the owner. Shape "tree:d": a stripe flows up and down a tree of degree d,
    whose root is its owner. Owners and destinations report StripesComplete. For kinds that copy,
    `stripes` is empty and each destination pulls its members as whole objects; `sizes` are the
    members' bytes. `nbytes` is the size of the largest member. `hoplite_mp/_planner/program.py`
    derives each node's actions from this message.
    """

    operation: int
    epoch: int
    members: tuple[int, ...]
    order: tuple[int, ...]
    stripes: tuple[Stripe, ...]
    rule: str
    kind: str
    op: str
    requester: int
    objects: tuple[bytes, ...]
    holders: tuple[int, ...]
    destinations: tuple[int, ...]
    results: tuple[bytes, ...] = ()
    nbytes: int = 0
    layout: bytes = b""
    shape: str = "stripes"
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts(operation=self.operation, requester=self.requester, nbytes=self.nbytes)
        between("epoch", self.epoch, 1, (1 << 32) - 1)
        sorted_indices("members", self.members)
        indices("order", self.order, SOURCES_MAX)
        if tuple(sorted(self.order)) != self.members:
            raise ValueError(f"order must contain the members, not {self.order!r}")
        one_of("kind", self.kind, KINDS)
        if self.kind in FOLDING:
            whole_object("stripes", self.stripes)
        elif self.stripes:
            raise ValueError(f"stripes must be empty for {self.kind}: {self.stripes!r}")
        one_of("rule", self.rule, RULES)
        text("op", self.op, OP_CHARS_MAX)
        object_ids("objects", self.objects)
        object_ids("results", self.results, 0)
        layout("layout", self.layout)
        shape("shape", self.shape, ("stripes",))
        numbers("holders", self.holders, NODES_MAX - 1)
        numbers("destinations", self.destinations, NODES_MAX - 1)
        numbers("sizes", self.sizes)
        if len(self.sizes) not in (0, len(self.members)):
            raise ValueError(f"sizes must be empty or have one item per member: {self.sizes!r}")
        for name in ("objects", "holders"):
            if len(getattr(self, name)) != len(self.members):
                raise ValueError(f"{name} must have one item per member: {getattr(self, name)!r}")
        if not self.destinations:
            raise ValueError("destinations must not be empty")
        if self.kind in ("reduce", "gather") and len(self.destinations) > 1:
            raise ValueError(f"destinations must be one for {self.kind}: {self.destinations!r}")
        if self.kind == "reduce_scatter" and self.destinations != tuple(
            stripe.owner for stripe in self.stripes
        ):
            raise ValueError(f"destinations must own the stripes: {self.destinations!r}")

    @property
    def is_early(self) -> bool:
        """Whether an object is still unknown, because its rank has not made the call yet."""
        return NO_OBJECT in self.objects


class Commit(Message, frozen=True, tag="Commit"):
    """All nodes have finished the plan of `epoch`. The destinations seal the result, and the other
    nodes release it.

    Sent to all nodes with that epoch's plan, and to the requester. Epoch 0: nothing was moved.
    `destinations`: the plan's destinations, which now have the results.
    """

    operation: int
    epoch: int
    contributors: tuple[int, ...]
    destinations: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts(operation=self.operation, epoch=self.epoch)
        numbers("destinations", self.destinations, NODES_MAX - 1)
        sorted_indices("contributors", self.contributors)


class OperationFailed(Message, frozen=True, tag="OperationFailed"):
    """The operation has failed; `cause_index`: the first failed source. `gone`: flat (index, node)
    pairs of sources that the node should have held, but did not."""

    operation: int
    error: str
    message: str
    cause_index: int | None = None
    gone: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts(operation=self.operation)
        one_of("error", self.error, OPERATION_ERRORS)
        text("message", self.message, 2 * TEXT_CHARS_MAX)
        numbers("gone", self.gone, max(SOURCES_MAX, NODES_MAX) - 1)
        between("numbers in gone", len(self.gone) % 2, 0, 0)
        if self.cause_index is not None:
            between("cause_index", self.cause_index, 0, SOURCES_MAX - 1)


class Forget(Message, frozen=True, tag="Forget"):
    """Ends the operation: the node drops the operation's state. No answer."""

    operation: int

    def __post_init__(self) -> None:
        counts(operation=self.operation)
