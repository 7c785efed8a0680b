"""Objects that outlive their home: who has them, and who counts their holders from then on.

Why it exists: the home of an object counts which hosts hold it. When a home dies, every node says
what it has and uses of that home's objects, and the manager names a new home for each that somebody
has whole (planner/homes.py). Until then nothing of them is let go here. The new home counts what
the reports said; whoever has let go meanwhile says so to it, which may come before the manager's
word does.
It must never know: how copies came to be, who reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp import ids
from hoplite_mp.client.memory import STATE
from hoplite_mp.errors import ObjectLostError
from hoplite_mp.protocol.fields import NODES_MAX
from hoplite_mp.protocol.homes import HOLDINGS_MAX
from hoplite_mp.protocol.messages import (
    HoldingsReported,
    HomeAsked,
    HomesNamed,
    HomeTold,
    ObjectGone,
)
from hoplite_mp.protocol.peers import Acquire, Release
from hoplite_mp.protocol.reports import HomesKnown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp.node.exports import Exports
    from hoplite_mp.node.imports import Import, Imports
    from hoplite_mp.node.kept import KeptCopies
    from hoplite_mp.node.places import Places
    from hoplite_mp.protocol.messages import NodeToManager
    from hoplite_mp.protocol.peers import PeerMessage

__all__ = ["Homes"]

_WHOLE = (STATE["SEALED"], STATE["SPILLING"], STATE["SPILLED"])
_UNWRITTEN = (STATE["CLAIMED"], STATE["ABORTED"])


@dataclass(slots=True)
class _Lost:
    """A home that is gone, until its objects have others."""

    number: int
    holds: dict[bytes, Any]  # what is here of its objects stays as long as this does
    reported: dict[bytes, int] = field(default_factory=dict)  # object -> number of the import
    # Let go elsewhere, told to this node before it knows that it is the home: (object, peer, n).
    early: set[tuple[bytes, int, int]] = field(default_factory=set)


class Homes:
    """This node's part in finding new homes."""

    def __init__(
        self,
        imports: Imports,
        exports: Exports,
        places: Places,
        kept: KeptCopies,
        node: Callable[[], int],
        send_manager: Callable[[NodeToManager], None],
        send: Callable[[int, PeerMessage], bool],
        home_at: Callable[[int], int | None],
        number_of: Callable[[int], int | None],
    ) -> None:
        """home_at: home id of the host of a living node, this one's too; number_of: the reverse."""
        self.imports = imports
        self.exports = exports
        self.places = places
        self.kept = kept
        self.client = imports.client
        self.node = node
        self.send_manager = send_manager
        self.send = send
        self.home_at = home_at
        self.number_of = number_of
        self.lost: dict[int, _Lost] = {}  # by home id
        self.numbers: dict[int, int] = {}  # of all hosts that have died, by home id

    def is_open(self, home: int) -> bool:
        """Is it just being found out where the objects of that home are?"""
        return home in self.lost

    # -- after a death -------------------------------------------------------------------------

    def begin(self, home: int, number: int) -> None:
        """That host is gone. Called before anything of it is let go."""
        mine = [one for one in self.imports.by_object.values() if one.home == home]
        holds = {one.object: self.client.hold(one.oid) for one in mine[:HOLDINGS_MAX]}
        self.lost[home] = _Lost(number, holds)
        self.numbers[home] = number

    def report(self, number: int) -> None:
        """The manager knows of that death as well, and waits for what every node has."""
        lost = next((one for one in self.lost.values() if one.number == number), None)
        holds = {} if lost is None else lost.holds
        found = [self.imports.by_object.get(one) for one, hold in holds.items() if hold is not None]
        told = self._holdings(number, [one for one in found if one is not None], lost)
        self.send_manager(told)
        if lost is not None and not told.objects:  # then there will be no answer
            self._close(lost)

    def report_again(self) -> Iterator[HoldingsReported | HomesKnown | HomeAsked]:
        """To a manager that begins anew: what the one before was told, and has said."""
        moved: dict[int, list[Import]] = {}
        homes: dict[bytes, int] = {}
        for one in list(self.imports.by_object.values()):
            home = self.number_of(one.home)
            if one.moved >= 0 and home is not None:
                homes[one.object] = home
                moved.setdefault(one.moved, []).append(one)
            elif one.home in self.lost:
                moved.setdefault(self.lost[one.home].number, []).append(one)
            if one.number and not one.described and home is None and one.home not in self.lost:
                yield HomeAsked(self.node(), one.object)
        if homes:
            yield HomesKnown(self.node(), tuple(homes), tuple(homes.values()))
        open_ = {lost.number: lost for lost in self.lost.values()}
        for number in {**moved, **open_}:
            lost = open_.get(number)
            told = self._holdings(number, moved.get(number, []), lost)
            if told.objects or lost is not None:
                yield told
            if lost is not None and not told.objects:
                self._close(lost)

    def _holdings(self, number: int, imports: list[Import], lost: _Lost | None) -> HoldingsReported:
        """What is here of these objects, which that node counted."""
        objects: list[bytes] = []
        numbers: list[int] = []
        whole: list[int] = []
        for one in imports:
            here = self.client.state(one.oid) in _WHOLE and one.oid not in self.places
            if here:
                whole.append(len(objects))
            if here or one.number:
                objects.append(one.object)
                numbers.append(one.number)
                if lost is not None:
                    lost.reported[one.object] = one.number
        return HoldingsReported(self.node(), number, tuple(objects), tuple(numbers), tuple(whole))

    def receive(self, message: HomesNamed | HomeTold) -> None:
        """The manager's word."""
        if isinstance(message, HomeTold):
            self._told(message)
            return
        lost = next((one for one in self.lost.values() if one.number == message.lost), None)
        if lost is None:
            return
        for at, object_id in enumerate(message.objects):
            home = None if message.homes[at] == NODES_MAX else self.home_at(message.homes[at])
            if home is None:
                self._nobody(lost, object_id)
            elif home == self.client.home:
                self._take_over(lost, object_id, message.counted[at], message.copies[at])
            else:
                self._moved(lost, object_id, home)
        self._close(lost)

    def _close(self, lost: _Lost) -> None:
        """What nobody has taken over is lost; what is not used goes."""
        home = next(home for home, one in self.lost.items() if one is lost)
        del self.lost[home]
        for object_id in lost.holds:
            one = self.imports.by_object.get(object_id)
            if one is not None and one.home == home:
                self._lose(one, lost.number)
        lost.holds.clear()

    def _lose(self, one: Import, number: int) -> None:
        """Nobody has it whole: who is still named as a holder has let go of it, too."""
        why = _no_copy(number)
        if self.client.state(one.oid) in _UNWRITTEN:
            self.imports.fail(one, why)
        else:
            self.places.fail(one.oid, ObjectLostError(f"object {one.object.hex()} is lost: {why}"))

    def _nobody(self, lost: _Lost, object_id: bytes) -> None:
        one = self.imports.by_object.get(object_id)
        if one is not None:
            self._lose(one, lost.number)

    def _moved(self, lost: _Lost, object_id: bytes, home: int) -> None:
        """Another node counts from now on, and has counted this one."""
        one, number = self.imports.by_object.get(object_id), lost.reported[object_id]
        if one is not None:
            one.home, one.moved = home, lost.number
        if number and (one is None or one.number != number):
            self.send(home, Release(object_id, number))  # let go since the report
        if not number and one is not None and not one.number:
            self.kept.keep_on(object_id, lost.holds[object_id])

    def _take_over(
        self, lost: _Lost, object_id: bytes, counted: tuple[int, ...], copies: tuple[int, ...]
    ) -> None:
        """This node counts from now on."""
        one = self.imports.by_object.get(object_id)
        assert one is not None  # it is held here
        one.home, one.moved = self.client.home, lost.number
        for node, number in zip(counted[::2], counted[1::2], strict=True):
            peer = self.home_at(node)
            gone = peer is None or (object_id, peer, number) in lost.early
            if node != self.node() and peer is not None and not gone:
                self.exports.count(object_id, peer, number)
        homes = [self.home_at(node) for node in copies]
        self.kept.lend(object_id, [home for home in homes if home is not None])
        self.imports.answer(one)

    # -- what comes late -----------------------------------------------------------------------

    def released(self, peer: int, message: Release) -> None:
        """A host has let go of an object of which this node is the home, or is about to be."""
        if not self.exports.release(peer, message):
            lost = self.lost.get(self.imports.home_of(message.object))
            if lost is not None:
                lost.early.add((message.object, peer, message.number))

    def homeless(self, one: Import) -> bool:
        """A process here has met an object whose home is gone, or not known yet: who is it?"""
        self.send_manager(HomeAsked(self.node(), one.object))
        return True

    def _told(self, message: HomeTold) -> None:
        one = self.imports.by_object.get(message.object)
        if one is None or not one.number or one.described:
            return
        home = self._named(message.home)
        if home is None or home == self.client.home:
            self.imports.fail(one, _no_copy(self.numbers.get(one.home)))
            return
        if home != one.home:  # else the manager had not heard of its death, or this node of it
            one.home, one.moved = home, self.numbers.get(one.home, -1)
        if home in self.lost:  # it is reported with the others
            self.lost[home].holds[one.object] = self.client.hold(one.oid)
        elif not self.send(home, Acquire(one.object, one.number)):
            self.homeless(one)

    def _named(self, number: int) -> int | None:
        """Home id of a node that the manager has named, which may be gone meanwhile. None: it has
        named nobody."""
        home = self.home_at(number)
        if home is None:
            home = next((one for one, other in self.numbers.items() if other == number), None)
        return home

    def own(self, object_id: bytes) -> int:
        """As in Imports. Who asks this node as the home of an object whose first home is gone has
        heard it from the manager, and this node will."""
        found = self.imports.own(object_id)
        one = self.imports.by_object.get(object_id)
        if found or one is None or one.home not in self.lost:
            return found
        here = self.client.state(one.oid) in _WHOLE and one.oid not in self.places
        return one.oid if here else 0

    def freed(self, one: Import) -> None:
        """Nobody holds it any more, here or elsewhere."""
        if one.home == self.client.home and ids.unpack_id(one.object)[0] != one.home:
            self.send_manager(ObjectGone(one.object))


def _no_copy(number: int | None) -> str:
    had = "its host" if number is None else f"node h{number}"
    return f"{had} had it and is gone, and no other host has a copy; put(copies=2) keeps one"
