"""What has been sent to one member of a Group and is not received yet, in the order of its senders.

Why it exists: large messages arrive later than small ones that were sent after them, and the end of
a sender is known sooner than all that it has sent is here. A box gives out messages of one sender
in their order, each when it is whole, then the sender's end; what comes after a message that is
lost with its host is lost, too, so that what is received is a prefix of what was sent.
It must never know: messages between nodes, the store, who is a member.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hoplite_mp.protocol.local import INBOX_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Box", "End", "Letter"]


@dataclass(slots=True, eq=False)
class Letter:
    """One message. `holds`: on its object and on those inside it."""

    source: int
    tag: int
    oid: int
    holds: list[Any]
    ready: bool = False


@dataclass(slots=True, eq=False)
class End:
    """After everything that the member has sent who held that rank until that version."""

    rank: int
    version: int


class Box:
    """Of one member. `born`: the version of the members since which it is one. `announce`: called
    when there is something new to ask for."""

    def __init__(self, size: int, born: int, announce: Callable[[], None]) -> None:
        self.born = born
        self.announce = announce
        self.arrived: dict[int, Letter] = {}  # by number: whole, and not received
        self.last = 0  # number of the latest of them
        self.ended = [0] * size  # by rank: members that are over, and all they have sent is above
        self.gone = 0  # ranks of which nothing will come, as bits
        # (rank, node) of a sender -> what is not whole, and all that was sent after it.
        self._incoming: dict[tuple[int, int], deque[Letter | End]] = {}
        # rank -> (its node, version from which on it is gone): its End has not come.
        self._due: dict[int, tuple[int, int]] = {}
        self._end_seen = [0] * size  # by rank: version of the latest End
        self._lost: set[int] = set()  # nodes of which nothing more is taken
        self._present, self._formed = 0, False

    # -- what comes ----------------------------------------------------------------------------

    def add(self, rank: int, node: int, one: Letter | End) -> None:
        """The next that a member has sent."""
        if isinstance(one, Letter) and node in self._lost:
            return
        if isinstance(one, End) and one.version <= self.born:  # of somebody whom this one never met
            return
        self._incoming.setdefault((rank, node), deque()).append(one)
        self._advance(rank, node)

    def ready(self, letter: Letter, node: int) -> None:
        """It is whole, or can be had."""
        letter.ready = True
        self._advance(letter.source, node)

    def lose(self, rank: int, node: int) -> None:
        """What is not whole of that sender will never be."""
        self._lost.add(node)
        incoming = self._incoming.get((rank, node), deque())
        whole = 0
        while whole < len(incoming) and isinstance(one := incoming[whole], Letter) and one.ready:
            whole += 1
        kept = [one for at, one in enumerate(incoming) if at < whole or isinstance(one, End)]
        self._incoming[rank, node] = deque(kept)
        self._advance(rank, node)

    def lose_node(self, node: int) -> None:
        """That host is gone: nothing more comes from there."""
        self._lost.add(node)
        for rank, at in list(self._incoming):
            if at == node:
                self.lose(rank, node)
        for rank, (at, version) in list(self._due.items()):
            if at == node:
                self.add(rank, node, End(rank, version))

    def _advance(self, rank: int, node: int) -> None:
        incoming = self._incoming.get((rank, node))
        news = False
        while incoming:
            one = incoming[0]
            if isinstance(one, Letter):
                if not one.ready:
                    break
                self.last += 1
                self.arrived[self.last] = one
            else:
                self.ended[one.rank] += 1
                self._end_seen[one.rank] = max(self._end_seen[one.rank], one.version)
                due = self._due.get(one.rank)
                if due is not None and due[1] <= one.version:
                    del self._due[one.rank]
                self._judge()
            incoming.popleft()
            news = True
        if incoming is not None and not incoming:
            del self._incoming[rank, node]
        if news:
            self.announce()

    # -- who sends -----------------------------------------------------------------------------

    def expect_end(self, rank: int, node: int, version: int) -> None:
        """The member there is gone, from that version on: its End comes, or has come."""
        if self._end_seen[rank] < version:
            self._due[rank] = node, version

    def know(self, present: int, *, formed: bool) -> None:
        """These ranks are held by somebody."""
        self._present, self._formed = present, formed
        before = self.gone
        self._judge()
        if self.gone != before:
            self.announce()

    def _judge(self) -> None:
        due = sum(1 << rank for rank in self._due)
        everybody = (1 << len(self.ended)) - 1
        self.gone = everybody & ~self._present & ~due if self._formed else 0

    # -- what is asked -------------------------------------------------------------------------

    def named(self, seen: int) -> tuple[list[tuple[int, int, int, int]], list[int], int, bool]:
        """As the reply to GroupInbox."""
        upto = min(self.last, seen + INBOX_MAX)
        found = []
        for number in range(seen + 1, upto + 1):
            letter = self.arrived.get(number)
            if letter is not None:
                found.append((number, letter.source, letter.tag, letter.oid))
        return found, self.ended, self.gone, upto < self.last

    def close(self) -> None:
        """Nobody receives from it any more."""
        self.arrived.clear()
        for incoming in self._incoming.values():
            for one in incoming:
                if isinstance(one, Letter):
                    one.holds = []
        self._incoming.clear()
