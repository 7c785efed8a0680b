"""Detects dead nodes by means of heartbeats.

The manager sends heartbeats to all nodes on other hosts at fixed intervals, and expects heartbeats
from them. Periods in which the manager itself did not run do not count as silence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from hoplite_mp._transport.stream import Silence

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["Heartbeats"]

Key = TypeVar("Key", bound="Hashable")


class Heartbeats(Generic[Key]):
    """The monitored nodes, identified by any hashable keys."""

    def __init__(self, interval_s: float, patience_s: float) -> None:
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._silences: dict[Key, Silence] = {}
        self._due = 0.0

    def add(self, key: Key, now: float) -> None:
        """Starts monitoring a node."""
        if not self._silences:
            self._due = now + self._interval_s
        self._silences[key] = Silence(now, self._patience_s)

    def drop(self, key: Key) -> None:
        """Stops monitoring a node."""
        self._silences.pop(key, None)

    def data_received(self, key: Key, now: float) -> None:
        """Records that data has arrived from that node."""
        silence = self._silences.get(key)
        if silence is not None:
            silence.heard(min(now, self._due))  # data that is read late may have arrived in time

    @property
    def wake_at(self) -> float | None:
        """The time of the next call to `poll`; None if no node is monitored."""
        return self._due if self._silences else None

    def poll(self, now: float) -> tuple[list[Key], dict[Key, float]]:
        """Returns the nodes to which a heartbeat must be sent, and for each dead node the seconds
        since data last arrived from it. Must be called after all received data was read, because
        the arrival of unread data is not recorded."""
        if not self._silences or now < self._due:
            return [], {}
        late, self._due = now - self._due, now + self._interval_s
        if late > self._interval_s:  # this process did not run
            for silence in self._silences.values():
                silence.excuse(late)
        lost = {
            key: now - silence.heard_at
            for key, silence in self._silences.items()
            if silence.deadline <= now
        }
        return [key for key in self._silences if key not in lost], lost
