"""The real planner, and around it what manager/loop.py is: connections, lives, the clock.

Why it exists: which messages reach the planner, and in which order, is part of what is tested. The
end of a node's connection is the end of its life; what a former life still had under way is not
read; who is silent for too long is given up.
It must never know: what a message is about.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from hoplite_mp.planner.machine import Planner
from hoplite_mp.planner.packing import pack
from hoplite_mp.planner.plan import describe
from hoplite_mp.protocol.codec import encode
from hoplite_mp.protocol.messages import GivenUp, NodeAdmitted, NodeJoined, NodeLost
from hoplite_mp.protocol.reports import NodeReturned

if TYPE_CHECKING:
    from hoplite_mp.planner.plan import Plan
    from hoplite_mp.protocol.messages import NodeToManager
    from hoplite_mp.protocol.reports import Report
    from hoplite_mp.simulation.host import Node
    from hoplite_mp.simulation.timeline import Timeline

__all__ = ["Manager"]

# Packing trees takes a thread of the manager seconds for many nodes; so many are packed here, and
# the answer comes after so long.
PACKED_NODES_MAX = 5
PACKING_S = 0.05


class Manager:
    """One for the whole run, on host 0."""

    host = 0

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.planner = Planner()
        self.routes: dict[int, Node] = {}  # node -> the life that is spoken to
        self.lost_ever: set[int] = set()  # numbers of which a life has ended
        self.messages: Counter[str] = Counter()  # in and out, by name
        self.bytes_out = 0
        self.steps = 0
        self.step_s = self.step_s_max = 0.0  # of real time, in the planner
        self.notes: list[str] = []
        self._wake_at: float | None = None
        self._newcomers: list[tuple[Node, NodeJoined]] = []  # until those of before are known
        self.is_there = True

    def die(self) -> None:
        """The process is gone, and what it knew."""
        self.is_there = False
        self.routes.clear()
        self._newcomers.clear()
        self._wake_at = None

    def begin_again(self) -> None:
        """Another one, whose nodes come back and report."""
        self.planner = Planner(again=True)
        self.is_there = True

    def forget_figures(self) -> None:
        """What is counted is counted from here on."""
        self.messages.clear()
        self.notes.clear()
        self.bytes_out = self.steps = 0
        self.step_s = self.step_s_max = 0.0

    @property
    def forest(self) -> str:
        """What the planner chose last, in its own words; "-" if there was nothing to choose."""
        if not self.notes:
            return "-"
        words = self.notes[-1].rpartition(": ")[2].split(",")[0].split()
        return " ".join(words[:4])

    # ---- connections

    def take(self, node: Node, message: NodeToManager | Report) -> None:
        """A message has come over the connection of that life."""
        if isinstance(message, NodeReturned):
            self._returned(node, message)
        elif isinstance(message, NodeJoined):
            if self.planner.restoring is not None:
                self._newcomers.append((node, message))
                return
            plan = self._step(message)
            for number, answer in plan.sends:
                if isinstance(answer, NodeAdmitted) and answer.incarnation == message.incarnation:
                    if number in self.routes:
                        self.lost_ever.add(number)
                    self.routes[number] = node
                    node.number = number
            self._carry_out(plan)
        elif self.routes.get(node.number) is node:
            self._carry_out(self._step(message))

    def _returned(self, node: Node, message: NodeReturned) -> None:
        """A node that the manager before this one has let in."""
        if self.planner.restoring is None:  # the others have gone on without it
            self._send(node, GivenUp(0.0), 16)
            self.lost_ever.add(node.number)
            return
        self.routes[node.number] = node
        self._carry_out(self._step(message))

    def lose(self, node: Node) -> None:
        """Its connection has ended, or is ended."""
        if self.routes.get(node.number) is node:
            del self.routes[node.number]
            self.lost_ever.add(node.number)
            self._carry_out(self._step(NodeLost(node.number, node.incarnation)))

    def give_up(self, node: Node, silent_s: float) -> None:
        """It has been silent for too long."""
        if self.routes.get(node.number) is node:
            self._send(node, GivenUp(silent_s), 16)
            self.lose(node)

    # ---- the planner

    def _step(self, message: NodeToManager | Report) -> Plan:
        self.messages[type(message).__name__] += 1
        self.timeline.note(f"> {message!r}" if self.steps < 10_000 else type(message).__name__)
        began = time.perf_counter()  # for the table alone: nothing in the run depends on it
        plan = self.planner.step(message, self.timeline.now)
        self._took(time.perf_counter() - began)
        return plan

    def _took(self, seconds: float) -> None:
        self.steps += 1
        self.step_s += seconds
        self.step_s_max = max(self.step_s_max, seconds)

    def _carry_out(self, plan: Plan) -> None:
        encoded: tuple[object, int] = (None, 0)
        for number, message in plan.sends:
            node = self.routes.get(number)
            if node is None:
                continue
            if encoded[0] is not message:  # the same plan goes to many nodes
                encoded = (message, len(encode(message)))
                self.timeline.note(f"< {number}: {'; '.join(describe(message))}")
            self._send(node, message, encoded[1])
            if isinstance(message, GivenUp):  # that was the last word
                self.timeline.after(0.0, self.lose, node)
        self.notes += plan.notes
        for wanted in plan.packing:
            if len(wanted.nodes) <= PACKED_NODES_MAX:
                self.timeline.after(PACKING_S, self._packed, wanted)
        if plan.wake_at is not None and plan.wake_at != self._wake_at:
            self.timeline.at(plan.wake_at, self._wake, plan.wake_at)
        self._wake_at = plan.wake_at
        while self._newcomers and self.planner.restoring is None:
            self.take(*self._newcomers.pop(0))

    def _packed(self, wanted: object) -> None:
        self._carry_out(self.planner.step(pack(wanted), self.timeline.now))  # type: ignore[arg-type]

    def _wake(self, at: float) -> None:
        if self._wake_at is not None and self._wake_at <= self.timeline.now:
            self._carry_out(self.planner.tick(self.timeline.now))

    def _send(self, node: Node, message: object, nbytes: int) -> None:
        self.messages[type(message).__name__] += 1
        self.bytes_out += nbytes
        node.down.send(message, nbytes)
