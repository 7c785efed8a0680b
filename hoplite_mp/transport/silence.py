"""How long the other side of a connection may be silent before it counts as dead.

Why it exists: a host that is stopped, or cut off, closes nothing. Both sides send a beat (an empty
frame) at fixed intervals; how long none may come follows the longest silence that was seen lately,
so a loaded host gets more time and a quiet LAN is watched closely.

This module must never know clocks nor connections: times are given.
"""

from __future__ import annotations

__all__ = ["Silence"]

# Of the longest silence that was seen lately, so many times may pass. Higher: a loaded host is less
# often taken for dead, and a dead one is noticed later.
PATIENCE_FACTOR = 4.0
# However long it was: so many times the least patience.
PATIENCE_MOST = 8.0
# The longest silence of that time, at least, and of twice that at most, counts.
LATELY_S = 30.0


class Silence:
    """One who is listened to. patience_s: the least."""

    def __init__(self, now: float, patience_s: float) -> None:
        self.patience_s = patience_s
        self.heard_at = now
        self._longest = self._before = 0.0  # silence of this period, and of the one before
        self._period_ends = now + LATELY_S

    def heard(self, now: float) -> None:
        """Something has come."""
        silent = now - self.heard_at
        self.heard_at = now
        if now >= self._period_ends:
            self._before, self._longest = self._longest, 0.0
            self._period_ends = now + LATELY_S
        self._longest = max(self._longest, silent)

    def excuse(self, seconds: float) -> None:
        """Who listens did not run for so long: that is nobody else's silence."""
        self.heard_at += seconds

    @property
    def deadline(self) -> float:
        """When it is over if nothing comes."""
        longest = max(self._longest, self._before)
        most = PATIENCE_MOST * self.patience_s
        return self.heard_at + min(max(self.patience_s, PATIENCE_FACTOR * longest), most)
