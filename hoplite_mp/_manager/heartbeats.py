"""A failure detector by heartbeats: it reports nodes that have been silent for too long.

The manager sends a beat to every node on the network at fixed intervals and waits for theirs. Time
in which this process itself did not run does not count as silence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from hoplite_mp._transport.stream import Silence

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["Heartbeats"]

Who = TypeVar("Who", bound="Hashable")


class Heartbeats(Generic[Who]):
    """The monitored nodes, each identified by any hashable value."""

    def __init__(self, interval_s: float, patience_s: float) -> None:
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._silences: dict[Who, Silence] = {}
        self._due = 0.0

    def add(self, who: Who, now: float) -> None:
        """Starts monitoring a node."""
        if not self._silences:
            self._due = now + self._interval_s
        self._silences[who] = Silence(now, self._patience_s)

    def drop(self, who: Who) -> None:
        """Stops monitoring a node."""
        self._silences.pop(who, None)

    def heard(self, who: Who, now: float) -> None:
        """Data has arrived from that node."""
        silence = self._silences.get(who)
        if silence is not None:
            silence.heard(min(now, self._due))  # data that is read late may have arrived in time

    @property
    def wake_at(self) -> float | None:
        """When the next call of `look` is due."""
        return self._due if self._silences else None

    def look(self, now: float) -> tuple[list[Who], dict[Who, float]]:
        """Returns the nodes to send a beat to, and the duration of the silence of each node that
        was silent for too long. Call it after reading all data that has arrived, because unread
        data counts as silence."""
        if not self._silences or now < self._due:
            return [], {}
        late, self._due = now - self._due, now + self._interval_s
        if late > self._interval_s:  # this process did not run
            for silence in self._silences.values():
                silence.excuse(late)
        lost = {
            who: now - silence.heard_at
            for who, silence in self._silences.items()
            if silence.deadline <= now
        }
        return [who for who in self._silences if who not in lost], lost
