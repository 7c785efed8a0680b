"""Latencies to other nodes, measured once when this node joins.

The planner weighs the depth of a tree against the number of its streams, and needs the latency for
that. A node that has joined sends a few short messages, one after the other, to some of the nodes
that were there before. Rates are never probed (_node/peers/link_estimator.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._protocol.messages import LinkMeasured
from hoplite_mp._protocol.peers import Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from hoplite_mp._node.questions import Answer, Questions
    from hoplite_mp._protocol.messages import Member

__all__ = ["Probing"]

# How many nodes are probed. Higher: more connections that nothing else may need.
PEERS_MAX = 8
# Number of round trips to each node. The first one includes connection setup and is discarded; of
# the others the quickest counts.
ROUNDS = 4


class Probing:
    """The probes of one node."""

    def __init__(
        self, number: Callable[[], int], questions: Questions, tell: Callable[[Any], None]
    ) -> None:
        """number: returns this node's number. tell: sends to the manager."""
        self.number = number
        self.questions = questions
        self.tell = tell

    def begin(self, members: Iterable[Member]) -> None:
        """Probes the members that have joined last, because they probably have the fewest
        connections to others."""
        for member in list(members)[-PEERS_MAX:]:
            self._ask(member.host_id, ())

    def _ask(self, host_id: int, trips_ns: tuple[int, ...]) -> None:
        """Sends the next probe to that host. trips_ns: the round trips so far."""

        def answered(answer: Answer | None) -> None:
            if answer is None:
                return  # that host is gone
            trips = *trips_ns, answer.came_ns - answer.asked_ns
            if len(trips) < ROUNDS:
                self._ask(host_id, trips)
            else:
                self.tell(LinkMeasured(self.number(), answer.node, min(trips[1:]) / 2e9))

        self.questions.ask(host_id, Probe, answered)
