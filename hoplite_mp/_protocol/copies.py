"""The messages about copies of immutable objects: which nodes want or have one, and the plans.

    FetchRequested ─► Distribute to all that take part ─► FetchComplete ─► Withdraw
                        ▲           │
                        └───────────┘ FetchFailed, a parent lost: a new plan under a new epoch

The Distributes of a cluster are numbered by *epochs*. No two have the same epoch, even for
different objects, so a message about one is never taken for a message about another. A receiver
follows the latest plan that names it and keeps the bytes that it has. Withdraw ends one plan; all
bytes stay.
"""

from __future__ import annotations

from hoplite_mp._protocol.fields import (
    FETCH_ERRORS,
    NODES_MAX,
    TEXT_CHARS_MAX,
    Message,
    Stripe,
    between,
    counts,
    numbers,
    object_id,
    one_of,
    shape,
    text,
    whole_object,
)

# ---- node -> manager


class FetchRequested(Message, frozen=True, tag="FetchRequested"):
    """`node` wants a copy of the object. By the object's owner, `holders` have it whole."""

    node: int
    object: bytes
    nbytes: int
    holders: tuple[int, ...]

    def __post_init__(self) -> None:
        counts(node=self.node, nbytes=self.nbytes)
        object_id("object", self.object)
        numbers("holders", self.holders, NODES_MAX - 1)


class FetchComplete(Message, frozen=True, tag="FetchComplete"):
    """`node` has the whole object; `epoch` is that of the latest plan that it has received."""

    node: int
    object: bytes
    epoch: int

    def __post_init__(self) -> None:
        counts(node=self.node, epoch=self.epoch)
        object_id("object", self.object)


class FetchFailed(Message, frozen=True, tag="FetchFailed"):
    """`node` cannot get its bytes from `parent`, which it derived itself from the plan `epoch`."""

    node: int
    object: bytes
    epoch: int
    parent: int
    reason: str

    def __post_init__(self) -> None:
        counts(node=self.node, epoch=self.epoch, parent=self.parent)
        object_id("object", self.object)
        text("reason", self.reason, TEXT_CHARS_MAX)


class CopyDropped(Message, frozen=True, tag="CopyDropped"):
    """`node` no longer holds the object, or stops fetching it. `full`: if the reason is that there
    was no room (for the copy of a broadcast, or to read the object from the disk), its text."""

    node: int
    object: bytes
    full: str = ""

    def __post_init__(self) -> None:
        counts(node=self.node)
        object_id("object", self.object)
        text("full", self.full, TEXT_CHARS_MAX)


class ObjectGone(Message, frozen=True, tag="ObjectGone"):
    """The object's owner has deleted it, so all transfers of it end."""

    object: bytes

    def __post_init__(self) -> None:
        object_id("object", self.object)


# ---- manager -> node


class Distribute(Message, frozen=True, tag="Distribute"):
    """Which node gets the object from which. Sources, owners and receivers are sent the same one.

    `sources` have the whole object. Rule "stripes": receiver r pulls stripe i from its owner o, if
    o is not r itself; r == o pulls it from sources[i % len(sources)]. An owner that is neither
    source nor receiver is receiving by an earlier plan, and serves the bytes that it has.
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


class Withdraw(Message, frozen=True, tag="Withdraw"):
    """That plan is over: the node stops pulling and serving by it. Received bytes stay."""

    operation: int
    object: bytes
    epoch: int

    def __post_init__(self) -> None:
        counts(operation=self.operation, epoch=self.epoch)
        object_id("object", self.object)


class FetchRefused(Message, frozen=True, tag="FetchRefused"):
    """There will be no copy, and that node's fetch ends. Another FetchRequested may follow."""

    object: bytes
    error: str
    message: str

    def __post_init__(self) -> None:
        object_id("object", self.object)
        one_of("error", self.error, FETCH_ERRORS)
        text("message", self.message, 2 * TEXT_CHARS_MAX)
