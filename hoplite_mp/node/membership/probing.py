"""How long a message takes to other nodes, measured once when this one joins.

Why it exists: the planner weighs a tree's depth against its streams, and for that it must know the
latency. A node that has joined asks some of those that were there: a few short messages each, one
after another, the first of which only makes the connection. Rates are never probed
(node/membership/meter.py).
It must never know: what the manager does with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.protocol.messages import LinkMeasured
from hoplite_mp.protocol.peers import Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from hoplite_mp.node.questions import Answer, Questions
    from hoplite_mp.protocol.messages import Member

__all__ = ["Probing"]

# Nodes that are asked by one that joins. Higher: connections that nothing else may need.
PEERS_MAX = 8
# Messages to each: the quickest counts. The first one waits for the connection, and counts not.
ROUNDS = 4


class Probing:
    """The probes of one node."""

    def __init__(
        self, number: Callable[[], int], questions: Questions, tell: Callable[[Any], None]
    ) -> None:
        """number: of this node. tell: the manager."""
        self.number = number
        self.questions = questions
        self.tell = tell

    def begin(self, members: Iterable[Member]) -> None:
        """This node has joined these; the last ones are the most likely to know few others."""
        for member in list(members)[-PEERS_MAX:]:
            self._ask(member.home, ())

    def _ask(self, home: int, trips_ns: tuple[int, ...]) -> None:
        """trips_ns: of the messages before."""

        def answered(answer: Answer | None) -> None:
            if answer is None:
                return  # that host is gone
            trips = *trips_ns, answer.came_ns - answer.asked_ns
            if len(trips) < ROUNDS:
                self._ask(home, trips)
            else:
                self.tell(LinkMeasured(self.number(), answer.node, min(trips[1:]) / 2e9))

        self.questions.ask(home, Probe, answered)
