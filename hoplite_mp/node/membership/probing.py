"""How long a message takes to other nodes, measured once when this one joins.

Why it exists: the planner weighs a tree's depth against its streams, and for that it must know the
latency. A node that has joined asks some of those that were there: a few short messages each, one
after another, the first of which only makes the connection. Rates are never probed
(node/membership/meter.py).
It must never know: what the manager does with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hoplite_mp.protocol.messages import LinkMeasured
from hoplite_mp.protocol.peers import Probe, Probed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from hoplite_mp.node.ports import Loop
    from hoplite_mp.protocol.messages import Member
    from hoplite_mp.protocol.peers import PeerMessage

__all__ = ["Probing"]

# Nodes that are asked by one that joins. Higher: connections that nothing else may need.
PEERS_MAX = 8
# Messages to each: the quickest counts. The first one waits for the connection, and counts not.
ROUNDS = 4


@dataclass(slots=True)
class _Probed:
    node: int
    rounds: int = 0
    sent_at: float = 0.0
    quickest_s: float = float("inf")


class Probing:
    """The probes of one node."""

    def __init__(
        self,
        number: Callable[[], int],
        send: Callable[[int, PeerMessage], bool],
        tell: Callable[[Any], None],
        loop: Loop,
    ) -> None:
        """number: of this node. send: to the node of that home. tell: the manager."""
        self.number = number
        self.send = send
        self.tell = tell
        self.loop = loop
        self.asked: dict[int, _Probed] = {}  # home -> what has been found so far

    def begin(self, members: Iterable[Member]) -> None:
        """This node has joined these; the last ones are the most likely to know few others."""
        for member in list(members)[-PEERS_MAX:]:
            self.asked[member.home] = _Probed(member.node)
            self._ask(member.home)

    def _ask(self, home: int) -> None:
        probed = self.asked[home]
        probed.sent_at = self.loop.now()
        self.send(home, Probe(probed.rounds))

    def answered(self, home: int, message: Probed) -> None:
        """Another node's answer."""
        probed = self.asked.get(home)
        if probed is None or message.number != probed.rounds:
            return
        if probed.rounds:
            probed.quickest_s = min(probed.quickest_s, self.loop.now() - probed.sent_at)
        probed.rounds += 1
        if probed.rounds < ROUNDS:
            self._ask(home)
            return
        del self.asked[home]
        self.tell(LinkMeasured(self.number(), probed.node, probed.quickest_s / 2))

    def lose_peer(self, home: int) -> None:
        """It will not answer."""
        self.asked.pop(home, None)
