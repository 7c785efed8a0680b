"""Who waits for what, until it ends.

Why it exists: nobody may wait for ever. A run that has gone quiet while a wait of a living process
is open has failed, and the wait says whose it is.
It must never know: what is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hoplite_mp.simulation.imitated import ImitatedNode
    from hoplite_mp.simulation.timeline import Timeline

__all__ = ["Wait", "Waits"]


@dataclass(slots=True, eq=False)
class Wait:
    """`outcome`: None while it is open, "" for success, else an error in words."""

    node: ImitatedNode
    what: str
    timeline: Timeline
    begun_at: float
    ended_at: float = 0.0
    outcome: str | None = None

    def end(self, outcome: str) -> None:
        """Once."""
        if self.outcome is None:
            self.outcome = outcome
            self.ended_at = self.timeline.now
            self.timeline.note(f"node {self.node.number} {self.what}: {outcome or 'done'}")

    def __str__(self) -> str:
        return f"node {self.node.number} on host {self.node.host}: {self.what}"


class Waits:
    """All of a run."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.all: list[Wait] = []

    def begin(self, node: ImitatedNode, what: str) -> Wait:
        """A new one."""
        wait = Wait(node, what, self._timeline, self._timeline.now)
        self.all.append(wait)
        return wait

    @property
    def open(self) -> list[Wait]:
        """Those that have not ended."""
        return [wait for wait in self.all if wait.outcome is None]
