"""The messages about objects whose home is dead: who holds them, and who counts that from now on.

    MembersChanged(went) ─► HoldingsReported, by each node that is left
                            HomesNamed, when all have reported, to each that named an object
    HomeAsked ─► HomeTold

The home of an object counts which hosts hold it. When it dies, the survivors tell the manager what
they hold of its objects, and the living one with the lowest number that has an object whole becomes
its home (of an actor: one that can begin it again). The object keeps its id: that it names a dead
host is no matter to anybody.

This module must never know how homes count, nor what objects are.
"""

from __future__ import annotations

from hoplite_mp.protocol.fields import (
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

# Objects in one report. What a node holds beyond them is lost with its home. 40 bytes for each.
HOLDINGS_MAX = SOURCES_MAX

# ---- node -> manager


class HoldingsReported(Message, frozen=True):
    """`node` has heard that `lost` is gone, and used or holds these of the objects whose home it
    was. `imports`: by which number the home knew that processes there hold it; 0: none do.
    `whole`: places in `objects` of those whose whole value is there; `spares`: of those that are
    actors which this node can begin again, each with how new that is: (place, number) pairs,
    flat."""

    node: int
    lost: int
    objects: tuple[bytes, ...] = ()
    imports: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    spares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts(node=self.node, lost=self.lost)
        object_ids("objects", self.objects, 0)
        numbers("imports", self.imports)
        numbers("whole", self.whole, max(0, len(self.objects) - 1))
        numbers("spares", self.spares)
        numbers("spares", self.spares[::2], max(0, len(self.objects) - 1))
        if len(self.spares) % 2:
            raise ValueError(f"spares must be pairs: {self.spares!r}")
        between("number of imports", len(self.imports), len(self.objects), len(self.objects))
        between("number of whole", len(self.whole), 0, len(self.objects))
        between("number of spares", len(self.spares), 0, 2 * len(self.objects))


class HomeAsked(Message, frozen=True):
    """`node` has met a ref to this object, whose first home is gone: which node counts now?"""

    node: int
    object: bytes

    def __post_init__(self) -> None:
        counts(node=self.node)
        object_id("object", self.object)


# ---- manager -> node


class HomesNamed(Message, frozen=True):
    """All have reported about `lost`. `objects` are those that the receiver has named, in one
    message or several: `more` follow. `homes`: the nodes that count from now on; NODES_MAX: nobody
    holds it whole, it is lost. `counted`: for each object of which the receiver is the home, who
    holds it: (node, import) pairs, flat; `copies`: the other nodes that have it whole."""

    lost: int
    objects: tuple[bytes, ...]
    homes: tuple[int, ...]
    counted: tuple[tuple[int, ...], ...]
    copies: tuple[tuple[int, ...], ...]
    more: bool = False

    def __post_init__(self) -> None:
        counts(lost=self.lost)
        flags(more=self.more)
        object_ids("objects", self.objects, 0)
        numbers("homes", self.homes, NODES_MAX)
        for name in ("homes", "counted", "copies"):
            count = len(getattr(self, name))
            between(f"number of {name}", count, len(self.objects), len(self.objects))
        for row in self.counted:
            numbers("counted", row)
            if len(row) % 2:
                raise ValueError(f"counted must be pairs: {row!r}")
        for row in self.copies:
            numbers("copies", row, NODES_MAX - 1)


class HomeTold(Message, frozen=True):
    """The answer to HomeAsked. NODES_MAX: there is none."""

    object: bytes
    home: int

    def __post_init__(self) -> None:
        object_id("object", self.object)
        between("home", self.home, 0, NODES_MAX)
