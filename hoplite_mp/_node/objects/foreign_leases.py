"""Holds for refs that another engine (Ray, Dask, ...) carries as pickled bytes.

Bytes hold nothing, and nobody knows how often they will be unpickled, if ever. So when a process
pickles a ref for an engine, its node holds the object for Config.foreign_hold_s. The hold is the
node's own, so it outlives the process. When an object is pickled again its one hold is extended.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

from hoplite_mp._protocol.local import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._protocol.local import Request

__all__ = ["Deadlines", "ForeignLeases"]

# How long after its deadline a hold may end. Higher: fewer turns of the node's loop when many
# objects are pickled one after the other. Lower: memory is freed sooner.
SLACK_S = 0.1


class Deadlines:
    """Keys with a deadline each, which may be extended. The time is passed in."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        # Invariant: one entry for each key, with its deadline or an earlier one.
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._until)

    def put_off(self, key: int, until: float) -> None:
        """Sets the deadline of a key, unless it has a later one."""
        before = self._until.get(key)
        if before is None:
            heapq.heappush(self._heap, (until, key))
        if before is None or until > before:
            self._until[key] = until

    def next(self) -> float | None:
        """A time before which no key ends; None: there is no key."""
        return self._heap[0][0] if self._heap else None

    def ended(self, now: float) -> list[int]:
        """Removes and returns the keys whose deadline has passed."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            _, key = self._heap[0]
            until = self._until[key]
            if until > now:  # it was extended
                heapq.heapreplace(self._heap, (until, key))
                continue
            heapq.heappop(self._heap)
            del self._until[key]
            found.append(key)
        return found


class ForeignLeases:
    """All holds of this kind on one node."""

    def __init__(
        self,
        hold: Callable[[int], Any],
        seconds: float,
        loop: LoopPort,
        reply: Callable[[int, Reply], None],
    ) -> None:
        """hold: takes a hold on an object; None if it is gone. seconds: how long a hold lasts."""
        self._hold = hold
        self._seconds = seconds
        self._loop = loop
        self._reply = reply
        self.holds: dict[int, Any] = {}
        self._deadlines = Deadlines()
        self._expires_at: float | None = None  # when the timer fires

    def asked(self, slot: int, request: Request) -> None:
        """A process has pickled a ref to an object."""
        oid = request.ask.oid  # type: ignore[union-attr]
        if oid not in self.holds and (hold := self._hold(oid)) is not None:
            self.holds[oid] = hold
        if oid in self.holds:
            self._deadlines.put_off(oid, self._loop.now() + self._seconds)
            self._expire_later()
        if request.number:
            seconds = self._seconds if oid in self.holds else 0.0
            self._reply(slot, Reply(request.number, seconds))

    def _expire_later(self) -> None:
        due = self._deadlines.next()
        if due is None or (self._expires_at is not None and self._expires_at <= due + SLACK_S):
            return
        self._expires_at = due + SLACK_S
        self._loop.call_later(max(0.0, self._expires_at - self._loop.now()), self._expire)

    def _expire(self) -> None:
        for oid in self._deadlines.ended(self._loop.now()):
            del self.holds[oid]
        self._expires_at = None
        self._expire_later()
