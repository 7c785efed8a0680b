"""Suspects: nodes that only this node has lost contact with, until the manager decides.

A connection between two nodes may end although both live. The manager is connected to both, so it
decides which one is excluded; until then the other node is still a member.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hoplite_mp._protocol.messages import PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._protocol.messages import Member, NodeToManager

__all__ = ["Suspects"]

# How long the manager has to notice by itself that the node is dead, as a multiple of
# heartbeat_timeout_s, before this node reports it. Lower: a living node is excluded sooner because
# another one has lost contact with it.
PEER_LOST_SILENCES = 2.0
_log = logging.getLogger("hoplite_mp")


class Suspects:
    """The missing nodes by number, from the loss of contact until the manager's decision."""

    def __init__(
        self,
        heartbeat_timeout_s: float,
        loop: LoopPort,
        tell: Callable[[NodeToManager], None],
        number: Callable[[], int],
        most: Callable[[int], None],
    ) -> None:
        """tell: sends to the manager. number: returns this node's number. most: called some time
        after a loss with how many nodes are missing, because many may mean that this host is the
        one that is cut off."""
        self.members: dict[int, Member] = {}
        self._silence_s = heartbeat_timeout_s
        self._loop = loop
        self._tell = tell
        self._number = number
        self._most = most

    def add(self, member: Member) -> None:
        """This node has just lost contact with that member."""
        self.members[member.node] = member
        half_s = PEER_LOST_SILENCES / 2 * self._silence_s
        self._loop.call_later(half_s, lambda: self._most(len(self.members)))
        self._complain_later(member.node)

    def confirm(self, gone: Iterable[int]) -> None:
        """The manager has declared these nodes gone."""
        for number in gone:
            self.members.pop(number, None)

    def again(self) -> None:
        """Starts the timers anew, because a new manager may not know of any of these losses."""
        for number in self.members:
            self._complain_later(number)

    def _complain_later(self, number: int) -> None:
        self._loop.call_later(PEER_LOST_SILENCES * self._silence_s, lambda: self._complain(number))

    def _complain(self, number: int) -> None:
        """Reports the loss if the manager has not decided yet, because then both nodes are still
        connected to it and it must choose one. If there is no manager now, `again` makes sure that
        the next one gets a report."""
        if number in self.members:
            _log.warning("node h%d is lost to this host; the manager hears it", number)
            self._tell(PeerLost(self._number(), number))
