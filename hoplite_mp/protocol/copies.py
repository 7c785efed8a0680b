"""The messages about copies of immutable objects: who wants one, who has one, who sends to whom.

    FetchRequested ─► Distribute to all that take part ─► FetchComplete ─► Withdraw
                        ▲           │
                        └───────────┘ FetchFailed, a parent lost: a new plan under a new epoch

An *epoch* numbers the Distributes of a cluster: no two have the same, whatever the object, so
what is said about one is never taken for another. A receiver follows the latest plan that names
it and keeps the bytes that it has. Withdraw ends one plan and touches no bytes.

This module must never know how parents are chosen.
"""

from __future__ import annotations

from hoplite_mp.protocol.fields import (
    FETCH_ERRORS,
    NODES_MAX,
    TEXT_CHARS_MAX,
    Message,
    between,
    counts,
    numbers,
    object_id,
    one_of,
    shape,
    text,
)
from hoplite_mp.protocol.stripes import Stripe, whole_object

# ---- node -> manager


class FetchRequested(Message, frozen=True):
    """`node` wants a copy of the object; its home says that `holders` hold it whole."""

    node: int
    object: bytes
    nbytes: int
    holders: tuple[int, ...]

    def __post_init__(self) -> None:
        counts(node=self.node, nbytes=self.nbytes)
        object_id("object", self.object)
        numbers("holders", self.holders, NODES_MAX - 1)


class FetchComplete(Message, frozen=True):
    """`node` holds the object whole; `epoch` is that of the latest plan that it has read."""

    node: int
    object: bytes
    epoch: int

    def __post_init__(self) -> None:
        counts(node=self.node, epoch=self.epoch)
        object_id("object", self.object)


class FetchFailed(Message, frozen=True):
    """`node` cannot get its bytes from `parent`, the one that it saw itself in plan `epoch`."""

    node: int
    object: bytes
    epoch: int
    parent: int
    reason: str

    def __post_init__(self) -> None:
        counts(node=self.node, epoch=self.epoch, parent=self.parent)
        object_id("object", self.object)
        text("reason", self.reason, TEXT_CHARS_MAX)


class CopyDropped(Message, frozen=True):
    """`node` holds the object no more, or gives up fetching it. `full`: why there was no room for
    it, if that is the reason: for a copy that a broadcast was to place there, or to read it from
    the disk."""

    node: int
    object: bytes
    full: str = ""

    def __post_init__(self) -> None:
        counts(node=self.node)
        object_id("object", self.object)
        text("full", self.full, TEXT_CHARS_MAX)


class ObjectGone(Message, frozen=True):
    """The object's home says that it is deleted: all transfers of it end."""

    object: bytes

    def __post_init__(self) -> None:
        object_id("object", self.object)


# ---- manager -> node


class Distribute(Message, frozen=True):
    """Who gets the object from whom. The same message goes to sources, owners and receivers.

    `sources` hold it whole. Rule "stripes": receiver r pulls stripe i from its owner o, if o is
    not r itself; r == o pulls it from sources[i % len(sources)]. An owner that is neither source
    nor receiver has been receiving by an earlier plan and serves as far as it has come.
    Rule "tree:d": receivers[i] pulls all from receivers[(i - d) // d], the first d from
    sources[0]; "tree:1" is a chain. Rule "parents": receivers[i] pulls stripe k from parents[k][i].
    """

    operation: int
    object: bytes
    epoch: int
    nbytes: int
    sources: tuple[int, ...]
    receivers: tuple[int, ...]
    stripes: tuple[Stripe, ...]
    rule: str
    parents: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        counts(operation=self.operation, nbytes=self.nbytes)
        between("epoch", self.epoch, 1, (1 << 32) - 1)
        object_id("object", self.object)
        numbers("sources", self.sources, NODES_MAX - 1)
        numbers("receivers", self.receivers, NODES_MAX - 1)
        if len(set(self.receivers)) != len(self.receivers) or not self.receivers:
            raise ValueError(f"receivers must be different nodes, at least one: {self.receivers!r}")
        if set(self.receivers).intersection(self.sources):
            raise ValueError(f"receivers hold the object already: {self.sources!r}")
        whole_object("stripes", self.stripes)
        shape("rule", self.rule, ("stripes", "parents"))
        if self.rule != "stripes" and not self.sources:
            raise ValueError(f"sources must not be empty for rule {self.rule!r}")
        if len(self.parents) != (len(self.stripes) if self.rule == "parents" else 0):
            raise ValueError(f"parents must be one row a stripe, for rule 'parents' only: {self!r}")
        for row in self.parents:
            numbers("parents", row, NODES_MAX - 1)
            if len(row) != len(self.receivers):
                raise ValueError(f"parents must have one node a receiver: {row!r}")


class Withdraw(Message, frozen=True):
    """That plan is over: neither pull nor serve by it. Bytes that have come stay."""

    operation: int
    object: bytes
    epoch: int

    def __post_init__(self) -> None:
        counts(operation=self.operation, epoch=self.epoch)
        object_id("object", self.object)


class FetchRefused(Message, frozen=True):
    """The copy cannot be had: the end of that node's fetch. Another FetchRequested may follow."""

    object: bytes
    error: str
    message: str

    def __post_init__(self) -> None:
        object_id("object", self.object)
        one_of("error", self.error, FETCH_ERRORS)
        text("message", self.message, 2 * TEXT_CHARS_MAX)
