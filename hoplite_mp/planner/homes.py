"""Which node counts the holders of an object whose home has died.

A *round* begins with the death of a node and ends when everybody who was there then has reported
what it holds of that node's objects, or has died. Then every object that somebody has whole gets a
new home: the living holder with the lowest number, of those that stay if there are any. An object
that is an actor goes to the node that can begin it again from what is newest. A home that
dies in its turn begins a round of its own, and what it had taken over is reported there as if it
had been its own from the beginning.

What is kept is one number for each object that has outlived its home, until its new home says that
it is gone.

This module must never know who uses an object for what.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from hoplite_mp.ids import unpack_id
from hoplite_mp.protocol.fields import NODES_MAX
from hoplite_mp.protocol.messages import HomesNamed, HomeTold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp.planner.membership import Membership
    from hoplite_mp.planner.plan import Send
    from hoplite_mp.protocol.messages import HoldingsReported, HomeAsked, ObjectGone
    from hoplite_mp.protocol.reports import HomesKnown

NOBODY = NODES_MAX
# Numbers in one message, of at most 5 bytes, and how many an object's id counts as. Frames have
# 16 MiB at most. Lower: more messages after the death of a host that had very many objects.
NUMBERS_MAX = 1 << 20
OBJECT_NUMBERS = 8


# An object, its home, who holds it there, the other copies: see HomesNamed.
_Row: TypeAlias = tuple[bytes, int, tuple[int, ...], tuple[int, ...]]


@dataclass(slots=True)
class _Round:
    """What is known after a death; ends when `waiting` is empty."""

    waiting: set[int]
    reports: dict[int, HoldingsReported] = field(default_factory=dict)
    asked: list[HomeAsked] = field(default_factory=list)  # answered at the end


class Homes:
    """All rounds that are open, and all homes that were named."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._rounds: dict[int, _Round] = {}  # by the node that was lost
        self.named: dict[bytes, int] = {}  # object -> its home, if that is not the first one
        # Told at the end of a round: the node that was lost, and who begins its actors again.
        self.concluded: Callable[[int, dict[bytes, int]], None] = lambda lost, actors: None

    def lose(self, node: int) -> list[Send]:
        """A node is no more, as far as membership knows already."""
        sends: list[Send] = []
        for lost, open_ in list(self._rounds.items()):
            open_.waiting.discard(node)
            open_.reports.pop(node, None)
            sends += self._conclude(lost)
        self._rounds[node] = _Round(set(self._membership.nodes))
        return sends + self._conclude(node)

    def restore(self, known: list[HomesKnown], holdings: list[HoldingsReported]) -> list[Send]:
        """What another manager had begun. All nodes that are left have told what they have; where
        one was lost with that manager, others have yet to hear of it."""
        living = self._membership.is_living
        for told in known:
            for object_id, home in zip(told.objects, told.homes, strict=True):
                if living(home):
                    self.named[object_id] = home
        sends: list[Send] = []
        for message in holdings:
            if not living(message.node) or living(message.lost):
                continue
            open_ = self._rounds.get(message.lost)
            if open_ is None:
                open_ = self._rounds[message.lost] = _Round(set())
            open_.waiting.discard(message.node)
            open_.reports[message.node] = message
        for lost in list(self._rounds):
            sends += self._conclude(lost)
        return sends

    def report(self, message: HoldingsReported) -> list[Send]:
        """What one survivor has. A double, or one of an earlier life, is ignored."""
        open_ = self._rounds.get(message.lost)
        if open_ is None or message.node not in open_.waiting:
            return []
        open_.waiting.discard(message.node)
        open_.reports[message.node] = message
        return self._conclude(message.lost)

    def asked(self, message: HomeAsked) -> list[Send]:
        """Somebody has met an object whose home is gone, or not known there yet."""
        if not self._membership.is_living(message.node):
            return []
        first = self._membership.number_of(unpack_id(message.object)[0])
        for node in (self.named.get(message.object), first):
            open_ = None if node is None else self._rounds.get(node)
            if open_ is not None:
                open_.asked.append(message)
                return []
        home = self.named.get(message.object, first)  # the first one lives, as far as is known here
        told = home if home is not None and self._membership.is_living(home) else NOBODY
        return [(message.node, HomeTold(message.object, told))]

    def gone(self, message: ObjectGone) -> None:
        """Its home says that nobody holds it any more."""
        self.named.pop(message.object, None)

    def _home(self, object_id: bytes) -> int:
        home = self.named.get(object_id, NOBODY)
        return home if home != NOBODY and self._membership.is_living(home) else NOBODY

    def _conclude(self, lost: int) -> list[Send]:
        """Names the homes if everybody has reported."""
        if self._rounds[lost].waiting:
            return []
        open_ = self._rounds.pop(lost)
        counted: dict[bytes, list[int]] = {}
        whole: dict[bytes, list[int]] = {}
        spares: dict[bytes, list[tuple[int, int]]] = {}  # how new, and -node
        for node, report in sorted(open_.reports.items()):
            for object_id, number in zip(report.objects, report.imports, strict=True):
                if number:
                    counted.setdefault(object_id, []).extend((node, number))
            for place in report.whole:
                whole.setdefault(report.objects[place], []).append(node)
            for place, new in zip(report.spares[::2], report.spares[1::2], strict=True):
                spares.setdefault(report.objects[place], []).append((new, -node))
        for object_id in [one for one, home in self.named.items() if home == lost]:
            del self.named[object_id]
        leaving = self._membership.leaving
        for object_id, nodes in whole.items():
            if self._home(object_id) != NOBODY:
                continue  # named by another manager, as some know
            staying = [node for node in nodes if node not in leaving]
            newest = max(spares.get(object_id, ()), default=None)
            self.named[object_id] = min(staying or nodes) if newest is None else -newest[1]
        self.concluded(lost, {one: self._home(one) for one in spares})
        sends: list[Send] = []
        for node, report in sorted(open_.reports.items()):
            if report.objects:
                named = [*self._named(node, report, counted, whole)]
                sends += [(node, message) for message in named]
        for message in open_.asked:
            sends += self.asked(message)
        return sends

    def _named(
        self,
        node: int,
        report: HoldingsReported,
        counted: dict[bytes, list[int]],
        whole: dict[bytes, list[int]],
    ) -> Iterator[HomesNamed]:
        """What that node is told, in messages that fit into a frame."""
        rows: list[_Row] = []
        size = 0
        for one in report.objects:
            home = self.named.get(one, NOBODY)
            held, others = (counted.get(one, ()), whole.get(one, ())) if home == node else ((), ())
            row = one, home, tuple(held), tuple(other for other in others if other != node)
            length = OBJECT_NUMBERS + len(held) + len(others)
            if rows and size + length > NUMBERS_MAX:
                yield _told(report.lost, rows, True)
                rows, size = [], 0
            rows.append(row)
            size += length
        yield _told(report.lost, rows, False)


def _told(lost: int, rows: list[_Row], more: bool) -> HomesNamed:
    objects, homes, counted, copies = zip(*rows, strict=True)
    return HomesNamed(lost, objects, homes, counted, copies, more)
