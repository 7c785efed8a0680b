"""The real planner, and around it what manager/loop.py is, as far as thousands of nodes need it.

Why it exists: it counts messages and bytes, and the time that the planner takes.
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

if TYPE_CHECKING:
    from hoplite_mp.planner.plan import Plan
    from hoplite_mp.protocol.messages import NodeToManager
    from hoplite_mp.protocol.reports import Report
    from hoplite_mp.simulation.imitated import ImitatedNode
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
        self.routes: dict[int, ImitatedNode] = {}  # node -> the life that is spoken to
        self.messages: Counter[str] = Counter()  # in and out, by name
        self.bytes_out = 0
        self.steps = 0
        self.step_s = self.step_s_max = 0.0  # of real time, in the planner
        self.notes: list[str] = []
        self._wake_at: float | None = None

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

    def take(self, node: ImitatedNode, message: NodeToManager) -> None:
        """A message of that node."""
        self._carry_out(self._step(message))

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
        self.notes += plan.notes
        for wanted in plan.packing:
            if len(wanted.nodes) <= PACKED_NODES_MAX:
                self.timeline.after(PACKING_S, self._packed, wanted)
        if plan.wake_at is not None and plan.wake_at != self._wake_at:
            self.timeline.at(plan.wake_at, self._wake, plan.wake_at)
        self._wake_at = plan.wake_at

    def _packed(self, wanted: object) -> None:
        self._carry_out(self.planner.step(pack(wanted), self.timeline.now))  # type: ignore[arg-type]

    def _wake(self, at: float) -> None:
        if self._wake_at is not None and self._wake_at <= self.timeline.now:
            self._carry_out(self.planner.tick(self.timeline.now))

    def _send(self, node: ImitatedNode, message: object, nbytes: int) -> None:
        self.messages[type(message).__name__] += 1
        self.bytes_out += nbytes
        node.down.send(message, nbytes)
