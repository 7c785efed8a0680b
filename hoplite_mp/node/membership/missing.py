"""Nodes that this one has lost by itself, and of which the manager has not said anything yet.

Why it exists: a connection between two nodes may end although both live. The manager hears both, so
it decides who is out; until then the other one is a member still, whatever this node thinks of it.
It must never know: what is lost with a node.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hoplite_mp.protocol.messages import PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp.node.ports import Loop
    from hoplite_mp.protocol.messages import Member, NodeToManager

__all__ = ["Missing"]

# How long the manager has to notice a death that this node has noticed, in silences. Lower: a node
# that lives is sooner given up because one other has lost it.
PEER_LOST_SILENCES = 2.0
_log = logging.getLogger("hoplite_mp")


class Missing:
    """By number, from the loss until the manager's word."""

    def __init__(
        self,
        silence_s: float,
        loop: Loop,
        tell: Callable[[NodeToManager], None],
        number: Callable[[], int],
        most: Callable[[int], None],
    ) -> None:
        """tell: the manager. number: this node's. most: called with how many are missing, when they
        may have been lost by the fault of this host."""
        self.members: dict[int, Member] = {}
        self._silence_s = silence_s
        self._loop = loop
        self._tell = tell
        self._number = number
        self._most = most

    def add(self, member: Member) -> None:
        """It has just been lost."""
        self.members[member.node] = member
        half_s = PEER_LOST_SILENCES / 2 * self._silence_s
        self._loop.call_later(half_s, lambda: self._most(len(self.members)))
        self._complain_later(member.node)

    def confirm(self, gone: Iterable[int]) -> None:
        """The manager says so, too."""
        for number in gone:
            self.members.pop(number, None)

    def again(self) -> None:
        """Another manager may not have heard of any of them."""
        for number in self.members:
            self._complain_later(number)

    def _complain_later(self, number: int) -> None:
        self._loop.call_later(PEER_LOST_SILENCES * self._silence_s, lambda: self._complain(number))

    def _complain(self, number: int) -> None:
        """Both live: the manager must choose. If there is none now, the next one is told."""
        if number in self.members:
            _log.warning("node h%d is lost to this host; the manager hears it", number)
            self._tell(PeerLost(self._number(), number))
