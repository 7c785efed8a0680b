"""Heartbeats to the manager, and a failure detector for the manager.

A host that is stopped or cut off closes no connection. A node's beats are sent by a thread, so that
a loop that is busy reading a large file does not look dead; but only for HUNG_S after the loop's
last turn, so that a loop that hangs does not look alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._protocol.codec import BEAT
from hoplite_mp._transport.silence import Silence

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.ports import LoopPort

__all__ = ["HeartbeatSender"]

# How long one turn of the loop may take. Higher: a host with a slow disk is not given up. Lower: a
# loop that hangs blocks the other hosts for a shorter time.
HUNG_S = 30.0


class HeartbeatSender:
    """The beats of one node. Its loop sets `turned_at` to the time of its latest turn."""

    def __init__(
        self,
        send: Callable[[bytes], object],
        loop: LoopPort,
        lost: Callable[[float], None],
        *,
        interval_s: float,
        patience_s: float,
    ) -> None:
        """send: sends a beat to the manager; called in a thread. lost: called with the seconds for
        which the manager has been silent."""
        self._send = send
        self._loop = loop
        self._lost = lost
        self._interval_s = interval_s
        self._over = False
        now = loop.now()
        self.turned_at = now
        self._silence = Silence(now, patience_s)
        self._poll_at = now + interval_s
        self._end = loop.repeat_in_thread(interval_s, self._beat, "hoplite_mp heartbeats")
        loop.call_later(interval_s, self._poll)

    def received(self) -> None:
        """Something has arrived from the manager."""
        # A late loop reads the message late, and its own delay is not the manager's silence.
        self._silence.heard(min(self._loop.now(), self._poll_at))

    def stop(self) -> None:
        """Stops the beats and the failure detector."""
        self._over = True
        self._end()

    def _beat(self) -> None:
        if self._loop.now() - self.turned_at < HUNG_S:
            self._send(BEAT)

    def _poll(self) -> None:
        """Checks for silence, in the loop. A late loop reads the beats that have arrived meanwhile
        only after this timer, so its delay does not count as silence."""
        if self._over:
            return
        now = self._loop.now()
        late = now - self._poll_at
        if late > self._interval_s:
            self._silence.excuse(late)
        elif self._silence.deadline <= now:
            self._lost(now - self._silence.heard_at)
            return
        self._poll_at = now + self._interval_s
        self._loop.call_later(self._interval_s, self._poll)
