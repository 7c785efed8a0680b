"""A failure detector by heartbeats.

The manager sends heartbeats to all nodes of other hosts at fixed intervals, and expects theirs.
Periods in which this process did not run do not count as silence.
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
        """Resets the silence of that node."""
        silence = self._silences.get(key)
        if silence is not None:
            silence.heard(min(now, self._due))  # data read late may have arrived in time

    @property
    def wake_at(self) -> float | None:
        """When the next call of `poll` is due."""
        return self._due if self._silences else None

    def poll(self, now: float) -> tuple[list[Key], dict[Key, float]]:
        """Returns the nodes that are due a heartbeat, and the seconds of silence of each dead node.
        Call it after reading all received data, because unread data counts as silence."""
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
