"""This node lives: the manager hears it at fixed intervals, and is listened to.

Why it exists: a host that is stopped or cut off closes no connection. The beats of a node come from
a thread, so that a loop which reads a large file is not taken for dead; but not for longer than
HUNG_S after the loop's last turn, so that one that hangs is not taken for alive.
It must never know: what else is said to the manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.protocol.codec import BEAT
from hoplite_mp.transport.silence import Silence

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.ports import Loop

__all__ = ["Pulse"]

# How long the loop may be busy with one thing. Higher: slower disks are not death. Lower: a loop
# that hangs holds the others up for less.
HUNG_S = 30.0


class Pulse:
    """The beats of one node, whose loop writes down in `turned_at` when it last turned."""

    def __init__(
        self,
        send: Callable[[bytes], object],
        loop: Loop,
        lost: Callable[[float], None],
        *,
        interval_s: float,
        patience_s: float,
    ) -> None:
        """send: to the manager, in a thread. lost: the manager has been silent
        for so many seconds."""
        self._send = send
        self._loop = loop
        self._lost = lost
        self._interval_s = interval_s
        self._over = False
        now = loop.now()
        self.turned_at = now
        self._silence = Silence(now, patience_s)
        self._look_at = now + interval_s
        self._end = loop.repeat_in_thread(interval_s, self._beat, "hoplite_mp pulse")
        loop.call_later(interval_s, self._look)

    def received(self) -> None:
        """The manager has said something."""
        self._silence.heard(min(self._loop.now(), self._look_at))  # a late loop finds it late

    def stop(self) -> None:
        """No more beats."""
        self._over = True
        self._end()

    def _beat(self) -> None:
        if self._loop.now() - self.turned_at < HUNG_S:
            self._send(BEAT)

    def _look(self) -> None:
        """In the loop. What has come since its last turn is read only afterwards: of a loop that is
        late that may be much, so the time is excused."""
        if self._over:
            return
        now = self._loop.now()
        late = now - self._look_at
        if late > self._interval_s:
            self._silence.excuse(late)
        elif self._silence.deadline <= now:
            self._lost(now - self._silence.heard_at)
            return
        self._look_at = now + self._interval_s
        self._loop.call_later(self._interval_s, self._look)
