"""What is here of objects whose home has died, and what the manager is told of it.

Why it exists: between a death and the manager's word nothing of the dead host's objects may go, as
others will count on what has been reported. One object may have several headers here: a process has
held a ref to a task that was then sent here.
It must never know: what becomes of the objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp.protocol.homes import HOLDINGS_MAX
from hoplite_mp.protocol.messages import HoldingsReported

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.objects.imports import Import, Imports

__all__ = ["Holdings", "Lost", "is_kept"]


@dataclass(slots=True)
class Lost:
    """A home that is gone, until its objects have others."""

    home: int
    number: int
    holds: dict[int, Any] = field(default_factory=dict)  # headers that stay as long as this does
    reported: dict[bytes, int] = field(default_factory=dict)  # object -> number of the import
    asked: set[int] = field(default_factory=set)  # numbers of imports that HomeTold will be about
    # Let go elsewhere, told to this node before it knows that it is the home: (object, peer, n).
    pending_releases: set[tuple[bytes, int, int]] = field(default_factory=set)


class Above(Protocol):
    """What rooms above this one know, or must hear."""

    def spare_number(self, object_id: bytes, home: int) -> int | None:
        """How new is what this node can begin that actor of that host from? None: it is none."""


class Holdings:
    """Imports of homes that are gone."""

    def __init__(self, imports: Imports, node: Callable[[], int], above: Above) -> None:
        self.imports = imports
        self.above = above
        self.client = imports.client
        self.node = node
        self.lost: dict[int, Lost] = {}  # by home id

    def begin(self, home: int, number: int) -> None:
        """That host is gone. Called before anything of it is let go."""
        lost = self.lost[home] = Lost(home, number)
        self.hold(lost, self.of(home))

    def lost_as(self, number: int) -> Lost | None:
        """The host whose node had that number."""
        return next((one for one in self.lost.values() if one.number == number), None)

    def of(self, home: int) -> list[Import]:
        """All whose holders that host counts."""
        return [one for one in self.imports.by_oid.values() if one.home == home]

    def hold(self, lost: Lost, imports: list[Import]) -> None:
        """They stay until it is known who counts them."""
        for one in imports:
            hold = self.client.hold(one.oid)
            if hold is not None:
                lost.holds[one.oid] = hold

    def report(self, number: int, imports: list[Import], lost: Lost | None) -> HoldingsReported:
        """What is here of these objects, which that node counted."""
        headers: dict[bytes, list[Import]] = {}
        for one in imports:
            headers.setdefault(one.object, []).append(one)
        objects: list[bytes] = []
        numbers: list[int] = []
        whole: list[int] = []
        spares: list[int] = []
        for object_id, found in headers.items():
            counted = next((one.number for one in found if one.number), 0)
            here = any(self.imports.is_whole(one) for one in found)
            used = counted or any(map(is_kept, found))
            said = lost is not None and object_id in lost.reported  # an answer will name it
            if len(objects) == HOLDINGS_MAX or not (here or used or said):
                continue
            if here:
                whole.append(len(objects))
                spare = self.above.spare_number(object_id, found[0].home)
                if spare is not None:
                    spares += [len(objects), spare]
            objects.append(object_id)
            numbers.append(counted)
            if lost is not None:
                lost.reported[object_id] = counted
        known = tuple(objects), tuple(numbers), tuple(whole), tuple(spares)
        return HoldingsReported(self.node(), number, *known)


def is_kept(one: Import) -> bool:
    """Is it here, or on its way, for the node alone?"""
    return one.kept and not one.number
