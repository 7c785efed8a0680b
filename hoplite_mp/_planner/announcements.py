"""When joins are announced to the other nodes: at once, or many joins together.

A node that joins is announced to all others. If many nodes join at the same time, separate
announcements would cost as many messages as the cluster has pairs. So announcements are sent at
once only as long as few were sent just before; the joins after that are announced together, at most
ANNOUNCE_S later.

A member is never sent another message of the planner before the joins that came first: `before`
puts them in front. So no message names a node that its receiver does not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._protocol.messages import GivenUp, MembersChanged, NodeAdmitted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hoplite_mp._planner.step_result import Send
    from hoplite_mp._protocol.messages import Member

__all__ = ["ANNOUNCE_S", "AT_ONCE_MAX", "Announcements"]

# The longest delay of an announcement. Higher: fewer messages while many join;
# lower: nodes know each other sooner then.
ANNOUNCE_S = 0.25
# How many messages within ANNOUNCE_S announce joins without delay; with 64, the first eleven nodes
# of a new cluster are announced at once. Higher: more nodes join without delay; lower: fewer
# messages.
AT_ONCE_MAX = 64


class Announcements:
    """The joins that are still to be announced."""

    def __init__(self) -> None:
        self._came: list[Member] = []  # in order of joining
        # Node -> how many of these joins it knows. A node without an entry knows none.
        self._known: dict[int, int] = {}
        self._began = float("-inf")  # of the interval in which messages are counted
        self._sent = 0  # in this interval

    @property
    def wake_at(self) -> float | None:
        """When the pending announcements are due."""
        return self._began + ANNOUNCE_S if self._came else None

    def join(self, member: Member, others: Iterable[int], now: float) -> list[Send]:
        """A node has joined and has been sent all members. Returns what is sent at once."""
        others = list(others)
        self._came.append(member)
        self._known[member.node] = len(self._came)
        if now - self._began >= ANNOUNCE_S:
            self._began, self._sent = now, 0
        if self._sent and self._sent + len(others) > AT_ONCE_MAX:
            return []
        return self._announce(others)

    def tick(self, nodes: Iterable[int], now: float) -> list[Send]:
        """The messages that are due now."""
        if not self._came or now < self._began + ANNOUNCE_S:
            return []
        self._began, self._sent = now, 0
        return self._announce(nodes)

    def before(self, sends: list[Send]) -> list[Send]:
        """The same messages; each node first gets the joins that it does not know. Not before
        NodeAdmitted, which has all members and comes first, nor before GivenUp, after which a node
        takes part no more."""
        if not self._came:
            return sends
        found: list[Send] = []
        for node, message in sends:
            if isinstance(message, NodeAdmitted):
                self.knows_all(node)
            elif not isinstance(message, GivenUp):
                found += self._missing(node)
            found.append((node, message))
        return found

    def knows_all(self, node: int) -> None:
        """The node has been sent all members."""
        if self._came:
            self._known[node] = len(self._came)

    def lose(self, node: int) -> None:
        """The node is gone. If its host comes back, it is sent all members."""
        self._known.pop(node, None)

    def _announce(self, nodes: Iterable[int]) -> list[Send]:
        sends: list[Send] = []
        encoded_once: dict[int, MembersChanged] = {}
        for node in nodes:
            sends += self._missing(node, encoded_once)
        self._came.clear()
        self._known.clear()
        self._sent += len(sends)
        return sends

    def _missing(self, node: int, made: dict[int, MembersChanged] | None = None) -> list[Send]:
        known = self._known.get(node, 0)
        if known == len(self._came):
            return []
        message = None if made is None else made.get(known)
        if message is None:
            message = MembersChanged(tuple(self._came[known:]), ())
            if made is not None:
                made[known] = message
        self._known[node] = len(self._came)
        return [(node, message)]
