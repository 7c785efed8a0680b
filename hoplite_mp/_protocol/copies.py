"""Messages about copies of objects, about plans for these copies, and about objects whose owners
have died.

    FetchRequested ─► Distribute to all participants ───► FetchComplete ─► Withdraw
                        ▲           │
                        └───────────┘ FetchFailed, a parent lost: new plan, new epoch

Each Distribute in a cluster has a unique *epoch*, across all objects, so messages about different
plans cannot be confused. A receiver follows the latest plan that names it and keeps the bytes that
it has received. Withdraw ends one plan; received bytes are kept.
"""

from __future__ import annotations

from hoplite_mp._protocol.fields import (
    FETCH_ERRORS,
    NODES_MAX,
    SOURCES_MAX,
    TEXT_CHARS_MAX,
    Message,
    Stripe,
    between,
    counts,
    flags,
    numbers,
    object_id,
    object_ids,
    one_of,
    shape,
    text,
    whole_object,
)

# ---- node -> manager


class FetchRequested(Message, frozen=True, tag="FetchRequested"):
    """`node` requests a copy of the object. According to its owner, `holders` have the whole
    object."""

    node: int
    object: bytes
    nbytes: int
    holders: tuple[int, ...]

    def __post_init__(self) -> None:
        counts(node=self.node, nbytes=self.nbytes)
        object_id("object", self.object)
        numbers("holders", self.holders, NODES_MAX - 1)


class FetchComplete(Message, frozen=True, tag="FetchComplete"):
    """`node` has the whole object; `epoch`: the epoch of the latest plan that it has received."""

    node: int
    object: bytes
    epoch: int

    def __post_init__(self) -> None:
        counts(node=self.node, epoch=self.epoch)
        object_id("object", self.object)


class FetchFailed(Message, frozen=True, tag="FetchFailed"):
    """`node` cannot get bytes from `parent`, its sender in the plan with that `epoch`."""

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
    """`node` no longer holds the object, or stops fetching it. `full`: the error text if the cause
    is a lack of memory for the copy of a broadcast, or for reading the object from the disk."""

    node: int
    object: bytes
    full: str = ""

    def __post_init__(self) -> None:
        counts(node=self.node)
        object_id("object", self.object)
        text("full", self.full, TEXT_CHARS_MAX)


class ObjectDeleted(Message, frozen=True, tag="ObjectGone"):
    """The owner has deleted the object, so all transfers of the object are stopped."""

    object: bytes

    def __post_init__(self) -> None:
        object_id("object", self.object)


# ---- manager -> node


class Distribute(Message, frozen=True, tag="Distribute"):
    """The plan of a transfer: the node from which each receiver pulls each part. All participants
    get the same plan.

    `sources` have the whole object. Rule "stripes": receiver r pulls stripe i from its owner, or
    from sources[i % len(sources)] if r is the owner. An owner that is neither source nor receiver
    is still receiving under an earlier plan, and serves the bytes that it has. Rule "tree:d":
    receivers[i] pulls the whole object from receivers[(i - d) // d], and the first d receivers from
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
            raise ValueError(f"receivers must be distinct nodes, at least one: {self.receivers!r}")
        if set(self.receivers).intersection(self.sources):
            raise ValueError(f"receivers hold the object already: {self.sources!r}")
        whole_object("stripes", self.stripes)
        shape("rule", self.rule, ("stripes", "parents"))
        if self.rule != "stripes" and not self.sources:
            raise ValueError(f"sources must not be empty for rule {self.rule!r}")
        if len(self.parents) != (len(self.stripes) if self.rule == "parents" else 0):
            raise ValueError(f"parents: one row per stripe, only for rule 'parents': {self!r}")
        for row in self.parents:
            numbers("parents", row, NODES_MAX - 1)
            if len(row) != len(self.receivers):
                raise ValueError(f"parents must have one node per receiver: {row!r}")


class Withdraw(Message, frozen=True, tag="Withdraw"):
    """Ends the plan: the node stops pulling and serving. Received bytes are kept."""

    operation: int
    object: bytes
    epoch: int

    def __post_init__(self) -> None:
        counts(operation=self.operation, epoch=self.epoch)
        object_id("object", self.object)


class FetchRefused(Message, frozen=True, tag="FetchRefused"):
    """The node's fetch fails. Another FetchRequested may follow."""

    object: bytes
    error: str
    message: str

    def __post_init__(self) -> None:
        object_id("object", self.object)
        one_of("error", self.error, FETCH_ERRORS)
        text("message", self.message, 2 * TEXT_CHARS_MAX)


# Messages about objects of a dead owner: their holders and new owners.
#
#   MembersChanged(removed) ─► OrphansReported, by each remaining node
#                           OwnersReassigned, after all reports, to each node that reported one
#   OwnerQuery ─► OwnerReport
#
# The owner of an object counts the hosts that hold it. After the owner's death, the survivors
# report to the manager which of its objects they hold. For each object, the new owner is the living
# node with the lowest number that has the whole object (for an actor: that can restart the actor).
# The object keeps its id, which then names a dead host.


# Maximum number of objects in one report, 40 bytes each. If a node has more, the others are lost
# with their owner.
HOLDINGS_MAX = SOURCES_MAX

# ---- node -> manager


class OrphansReported(Message, frozen=True, tag="HoldingsReported"):
    """The objects of the lost owner `lost` that `node` uses or holds. `imports`: for each object,
    the number of the import by which the owner counted this node as a holder; 0: no process of the
    node holds the object. `whole`: indices in `objects` of complete copies. `backups`: flat (index,
    number) pairs of actors that this node can restart; a higher number means a more recent
    state."""

    node: int
    lost: int
    objects: tuple[bytes, ...] = ()
    imports: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    backups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts(node=self.node, lost=self.lost)
        object_ids("objects", self.objects, 0)
        numbers("imports", self.imports)
        numbers("whole", self.whole, max(0, len(self.objects) - 1))
        numbers("backups", self.backups)
        numbers("backups", self.backups[::2], max(0, len(self.objects) - 1))
        if len(self.backups) % 2:
            raise ValueError(f"backups must be pairs: {self.backups!r}")
        between("number of imports", len(self.imports), len(self.objects), len(self.objects))
        between("number of whole", len(self.whole), 0, len(self.objects))
        between("number of backups", len(self.backups), 0, 2 * len(self.objects))


class OwnerQuery(Message, frozen=True, tag="OwnerAsked"):
    """`node` has received a ref to this object, whose original owner is lost, and requests
    the current owner."""

    node: int
    object: bytes

    def __post_init__(self) -> None:
        counts(node=self.node)
        object_id("object", self.object)


# ---- manager -> node


class OwnersReassigned(Message, frozen=True, tag="OwnersNamed"):
    """The new owners of `lost`'s objects, after all nodes have reported. `objects`: the objects
    that the receiver has reported; `more`: another message follows. `owners`: the new owners;
    NODES_MAX: no node has the whole object, so it is lost. For each object that the receiver now
    owns: `counted`, its holders as flat (node, import) pairs, and `copies`, the other nodes that
    have the whole object."""

    lost: int
    objects: tuple[bytes, ...]
    owners: tuple[int, ...]
    counted: tuple[tuple[int, ...], ...]
    copies: tuple[tuple[int, ...], ...]
    more: bool = False

    def __post_init__(self) -> None:
        counts(lost=self.lost)
        flags(more=self.more)
        object_ids("objects", self.objects, 0)
        numbers("owners", self.owners, NODES_MAX)
        for name in ("owners", "counted", "copies"):
            count = len(getattr(self, name))
            between(f"number of {name}", count, len(self.objects), len(self.objects))
        for row in self.counted:
            numbers("counted", row)
            if len(row) % 2:
                raise ValueError(f"counted must be pairs: {row!r}")
        for row in self.copies:
            numbers("copies", row, NODES_MAX - 1)


class OwnerReport(Message, frozen=True, tag="OwnerTold"):
    """The answer to OwnerQuery. NODES_MAX: the object has no owner."""

    object: bytes
    owner: int

    def __post_init__(self) -> None:
        object_id("object", self.object)
        between("owner", self.owner, 0, NODES_MAX)
