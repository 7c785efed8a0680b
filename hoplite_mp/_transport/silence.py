"""How long the other side of a connection may be silent before it counts as dead.

A host that is stopped or cut off does not close its connections. Both sides send a beat (an empty
frame) at fixed intervals. How long a silence is tolerated adapts to the longest recent one, so a
loaded host gets more time and a quiet LAN is watched closely.
"""

from __future__ import annotations

__all__ = ["Silence"]

# A silence may last this many times the longest recent one. Higher: a loaded host is less often
# taken for dead, and a dead one is noticed later.
PATIENCE_FACTOR = 4.0
# The longest silence that is ever tolerated, as a multiple of `patience_s`.
PATIENCE_MOST = 8.0
# How far back a silence counts as recent: for at least this long, at most twice as long.
LATELY_S = 30.0


class Silence:
    """The silence of one peer. patience_s: so long a silence is always tolerated."""

    def __init__(self, now: float, patience_s: float) -> None:
        self.patience_s = patience_s
        self.heard_at = now
        self._longest = self._before = 0.0  # of this period, and of the one before
        self._period_ends = now + LATELY_S

    def heard(self, now: float) -> None:
        """Something has arrived."""
        silent = now - self.heard_at
        self.heard_at = now
        if now >= self._period_ends:
            self._before, self._longest = self._longest, 0.0
            self._period_ends = now + LATELY_S
        self._longest = max(self._longest, silent)

    def excuse(self, seconds: float) -> None:
        """The listener itself did not run for so long, which is not counted as silence."""
        self.heard_at += seconds

    @property
    def deadline(self) -> float:
        """When the peer counts as dead if nothing arrives."""
        longest = max(self._longest, self._before)
        most = PATIENCE_MOST * self.patience_s
        return self.heard_at + min(max(self.patience_s, PATIENCE_FACTOR * longest), most)
