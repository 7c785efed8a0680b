"""The messages about objects whose owner is dead: which nodes hold them, and the new owners.

    MembersChanged(went) ─► HoldingsReported, by each node that is left
                            OwnersNamed, when all have reported, to each that named an object
    OwnerAsked ─► OwnerTold

The owner of an object counts which hosts hold it. When it dies, the survivors report to the manager
which of its objects they hold. The living node with the lowest number that has the whole object
becomes its owner (for an actor: a node that can start it again). The object keeps its id, which may
name a dead host.
"""

from __future__ import annotations

from hoplite_mp._protocol.fields import (
    NODES_MAX,
    SOURCES_MAX,
    Message,
    between,
    counts,
    flags,
    numbers,
    object_id,
    object_ids,
)

# Objects in one report, of 40 bytes each. Further objects that a node holds are lost with their
# owner.
HOLDINGS_MAX = SOURCES_MAX

# ---- node -> manager


class HoldingsReported(Message, frozen=True, tag="HoldingsReported"):
    """`node` knows that `lost` is gone, and used or holds these objects, whose owner that was.
    `imports`: the number of the import by which the owner counted this node as a holder of each
    object; 0: no process there holds it. `whole`: places in `objects` of those whose whole value is
    there; `backups`: places of actors that this node can start again, each with how new its state
    is: (place, number) pairs, flat."""

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


class OwnerAsked(Message, frozen=True, tag="OwnerAsked"):
    """`node` has met a ref to this object, whose first owner is gone, and asks who owns it now."""

    node: int
    object: bytes

    def __post_init__(self) -> None:
        counts(node=self.node)
        object_id("object", self.object)


# ---- manager -> node


class OwnersNamed(Message, frozen=True, tag="OwnersNamed"):
    """All nodes have reported about `lost`. `objects` are those that the receiver has named, in one
    message or several: `more` follow. `owners`: their owners from now on; NODES_MAX: no node has
    the whole object, so it is lost. `counted`: for each object whose owner the receiver is, its
    holders as (node, import) pairs, flat; `copies`: the other nodes that have the whole object."""

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


class OwnerTold(Message, frozen=True, tag="OwnerTold"):
    """The answer to OwnerAsked. NODES_MAX: the object has no owner."""

    object: bytes
    owner: int

    def __post_init__(self) -> None:
        object_id("object", self.object)
        between("owner", self.owner, 0, NODES_MAX)
