"""A member's mailbox: messages sent to it that it has not received, in each sender's order.

A large message arrives later than small ones sent after it, and this node may learn that a sender
is gone before everything it sent is here. A mailbox releases one sender's messages in order, each
when it is complete, and then the sender's end. If a message is lost with its host, all later ones
of that sender are dropped, so what is received is always a prefix of what was sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hoplite_mp._protocol.local import INBOX_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["End", "Mailbox", "QueuedMessage"]


@dataclass(slots=True, eq=False)
class QueuedMessage:
    """One message. `holds` keep its object, and the objects that it refers to, alive."""

    source: int
    tag: int
    oid: int
    holds: list[Any]
    ready: bool = False


@dataclass(slots=True, eq=False)
class End:
    """Follows the last message of a member. `rank`: the rank that it held; `version`: a version of
    the members that does not have it any more."""

    rank: int
    version: int


class Mailbox:
    """The mailbox of one member. `born` is the version of the members in which it became one;
    `announce` is called when there is something new to ask for."""

    def __init__(self, size: int, born: int, announce: Callable[[], None]) -> None:
        self.born = born
        self.announce = announce
        self.arrived: dict[int, QueuedMessage] = {}  # by number: complete, and not received yet
        self.last = 0  # number of the latest message that was released
        # By rank: how many members that held it have ended, counted when all their messages have
        # been released.
        self.ended = [0] * size
        self.gone = 0  # bits of the ranks from which nothing more will come
        # (rank, node) of a sender -> its first incomplete message, and everything it sent after
        # that.
        self._incoming: dict[tuple[int, int], deque[QueuedMessage | End]] = {}
        # Rank -> (node, version) of a member that is gone since that version and whose End is still
        # due.
        self._due: dict[int, tuple[int, int]] = {}
        self._end_seen = [0] * size  # by rank: version of the latest End that was released
        # Nodes from which no further message is accepted.
        self._lost: set[int] = set()
        self._present, self._formed = 0, False
        self._holds = 0  # why no further rank counts as gone yet

    # -- what arrives --------------------------------------------------------------------------

    def add(self, rank: int, node: int, one: QueuedMessage | End) -> None:
        """Adds the next message of a member, or its End."""
        if isinstance(one, QueuedMessage) and node in self._lost:
            return
        # Ignore the end of a member that had left before this one joined.
        if isinstance(one, End) and one.version <= self.born:
            return
        self._incoming.setdefault((rank, node), deque()).append(one)
        self._advance(rank, node)

    def ready(self, letter: QueuedMessage, node: int) -> None:
        """Marks a message as complete: its value is here or can be fetched."""
        letter.ready = True
        self._advance(letter.source, node)

    def lose(self, rank: int, node: int) -> None:
        """Drops that sender's first incomplete message and all that follow it, but not its End.
        Later messages from its node are not accepted."""
        self._lost.add(node)
        incoming = self._incoming.get((rank, node), deque())
        whole = 0
        while (
            whole < len(incoming)
            and isinstance(one := incoming[whole], QueuedMessage)
            and one.ready
        ):
            whole += 1
        kept = [one for at, one in enumerate(incoming) if at < whole or isinstance(one, End)]
        self._incoming[rank, node] = deque(kept)
        self._advance(rank, node)

    def lose_node(self, node: int) -> None:
        """That host is gone: drops incomplete messages from it and adds the Ends that are due."""
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
            if isinstance(one, QueuedMessage):
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
            self._judge()
        if news:
            self.announce()

    # -- senders -------------------------------------------------------------------------------

    def expect_end(self, rank: int, node: int, version: int) -> None:
        """The member at that rank is gone since that version. Its End is due, unless it has come
        already."""
        if self._end_seen[rank] < version:
            self._due[rank] = node, version

    def end_if_due(self, rank: int, node: int, version: int) -> None:
        """That node says that no member of that rank is left there, by the members of that version.
        It counts only if an End of such a member is due from that node."""
        at, since = self._due.get(rank, (-1, 0))
        if at == node and since <= version:
            self.add(rank, node, End(rank, version))

    def end_unheard(self, knowing: Collection[int | None]) -> None:
        """Adds the Ends that are due from other nodes than these. Such a node is gone, or has never
        heard that it had a member, because the manager that knew it has died."""
        for rank, (node, version) in list(self._due.items()):
            if node not in knowing:
                self.add(rank, node, End(rank, version))

    def know(self, present: int, *, formed: bool) -> None:
        """Sets which ranks have a member at present."""
        self._present, self._formed = present, formed
        before = self.gone
        self._judge()
        if self.gone != before:
            self.announce()

    def hold(self) -> None:
        """Members may have come and left of whom this node has not heard, and what they have sent
        may be on its way: until `release`, no further rank counts as gone."""
        self._holds += 1

    def release(self) -> None:
        """All that they have sent has been added."""
        self._holds -= 1
        before = self.gone
        self._judge()
        if self.gone != before:
            self.announce()

    def _judge(self) -> None:
        due = 0
        for rank in (*self._due, *(rank for rank, _ in self._incoming)):
            due |= 1 << rank
        everybody = (1 << len(self.ended)) - 1
        gone = everybody & ~self._present & ~due if self._formed else 0
        self.gone = gone & self.gone if self._holds else gone

    # -- the reply -----------------------------------------------------------------------------

    def named(self, seen: int) -> tuple[list[tuple[int, int, int, int]], list[int], int, bool]:
        """Released messages after number `seen`, in the form of the reply to GroupInbox."""
        upto = min(self.last, seen + INBOX_MAX)
        found = []
        for number in range(seen + 1, upto + 1):
            letter = self.arrived.get(number)
            if letter is not None:
                found.append((number, letter.source, letter.tag, letter.oid))
        return found, self.ended, self.gone, upto < self.last

    def close(self) -> None:
        """Releases all messages, because the member is gone."""
        self.arrived.clear()
        for incoming in self._incoming.values():
            for one in incoming:
                if isinstance(one, QueuedMessage):
                    one.holds = []
        self._incoming.clear()
