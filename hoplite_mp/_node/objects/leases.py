"""Requests from processes for memory in the store: blocks, spans, restored objects.

If a request does not fit in the store, the node retries it briefly and then replies that the store
is full. The process itself decides how long to repeat the request.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._protocol.local import (
    ON_ITS_WAY,
    RESTORED,
    SPILLED_PIECE_BYTES,
    Lease,
    LeaseSpan,
    ReadSpilled,
    Reply,
    Restore,
    ReturnSpans,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.dispatch import Handler, Requests
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._node.store.budget import Pages
    from hoplite_mp._protocol.local import Request

__all__ = ["Deadlines", "ForeignLeases", "Leases"]


PATIENCE_S = 0.2  # how long a request is retried before the reply that the store is full
RETRY_S = 0.01
# Preallocated blocks occupy at most 1/16 of the store. A larger share: more members have a block
# ready for their next contribution, but large objects that need this memory are refused.
SPARES_SHARE = 16


class LeasesEvents(Protocol):
    """Reports from this component to the components above it."""

    def leases(self, slot: int) -> None:
        """Called when the process in the slot is about to write a payload."""


class Leases:
    """Requests to one host's store."""

    def __init__(
        self, host: HostContext, requests: Requests, pages: Pages, events: LeasesEvents
    ) -> None:
        self.client = host.client
        self.store = host.store
        self.remote_objects = host.remote_objects
        self.loop = host.loop
        self.lines = host.clients
        self.reply = host.reply
        self.requests = requests
        self.pages = pages
        self.events = events
        # Preallocated block, which may never be needed -> slot.
        self.preallocated_blocks: dict[int, int] = {}

    @property
    def handlers(self) -> dict[type, Handler]:
        """Handlers by type of request."""
        return {
            Lease: self.lease,
            LeaseSpan: self.lease_span,
            Restore: self.restore,
            ReadSpilled: self.read_spilled,
            ReturnSpans: self.give_spans,
        }

    def lease(self, slot: int, request: Request) -> None:
        ask: Any = request.ask
        nbytes = ask.nbytes
        # Reply immediately, because other processes may be waiting for the error of a task.
        if ask.error or ask.preallocated:
            found = (
                self._preallocated(nbytes, slot)
                if ask.preallocated
                else self.store.lease_error(nbytes, slot)
            )
            if found is not None:
                self._undo_unread(slot, request.number, found)
            why = "" if found is not None else self.store.full_message()
            self.reply(slot, Reply(request.number, found, why, found is None))
            return
        if self.store.impossible(nbytes):
            self.reply(slot, Reply(request.number, "never", self.store.never_message(), True))
            return

        self.events.leases(slot)

        def attempt() -> int | None:
            payload = self.store.lease(nbytes, slot)
            if payload is not None:
                self._undo_unread(slot, request.number, payload)
            return payload

        self._retry_briefly(slot, request, attempt)

    def _preallocated(self, nbytes: int, slot: int) -> int | None:
        """Leases a preallocated block. Returns None if the memory is needed elsewhere."""
        store = self.store
        store.take_returns()
        self.preallocated_blocks = {
            payload: to
            for payload, to in self.preallocated_blocks.items()
            if store.leases.get(payload) == to
        }
        spared = nbytes + sum(map(store.size_of, self.preallocated_blocks))
        if spared > store.limit // SPARES_SHARE or not store.has_spare(nbytes):
            return None
        payload = store.lease(nbytes, slot, preallocated=True)
        if payload is not None:
            self.preallocated_blocks[payload] = slot
        return payload

    def _undo_unread(self, slot: int, number: int, payload: int) -> None:
        free = self.store.free_unused
        self.requests.undo_unread(slot, number, lambda: free(payload, slot))

    def lease_span(self, slot: int, request: Request) -> None:
        def attempt() -> int | None:
            start = self.store.lease_span(slot)
            if start is not None:
                give = self.store.give_span
                self.requests.undo_unread(slot, request.number, lambda: give(start, slot))
            return start

        if request.ask.error:  # type: ignore[union-attr]
            start = attempt()
            why = "" if start is not None else self.store.full_message()
            self.reply(slot, Reply(request.number, start, why, start is None))
            return
        self._retry_briefly(slot, request, attempt)

    def restore(self, slot: int, request: Request) -> None:
        oid = request.ask.oid  # type: ignore[union-attr]

        def attempt() -> int | None:
            remote_objects = self.remote_objects
            if oid in remote_objects:
                wanted = not remote_objects.refusal(oid) and remote_objects.want(oid, _nothing)
                return ON_ITS_WAY if wanted else None
            return None if self.store.restore(oid, slot) is None else RESTORED

        self._retry_briefly(slot, request, attempt, lambda: self.remote_objects.refusal(oid))

    def read_spilled(self, slot: int, request: Request) -> None:
        ask: Any = request.ask
        nbytes = min(ask.nbytes, SPILLED_PIECE_BYTES)
        piece = self.store.read_spilled(ask.oid, ask.offset, nbytes)
        self.reply(slot, Reply(request.number, piece))

    def _retry_briefly(
        self, slot: int, request: Request, attempt: Any, why: Callable[[], str] = lambda: ""
    ) -> None:
        """Replies once `attempt` succeeds, or after PATIENCE_S with an error. why: returns a reason
        other than a full store, or ""."""
        deadline = self.loop.now() + PATIENCE_S
        line = self.lines.get(slot)

        def again() -> None:
            died = line is None or self.lines.get(slot) is not line  # its slot may have been reused
            if died or not self.requests.is_latest(slot, request.number):  # or was interrupted
                self.client.set_hungry(False)  # other waiting requests set it again
                return
            value = attempt()
            if value is not None:
                self.client.set_hungry(False)
                self.pages.watch_idle()
                self.reply(slot, Reply(request.number, value))
            elif self.store.returned_to == slot:  # spilling has freed memory in the process's spans
                self.client.set_hungry(False)
                message = f"{self.store.usage_message()}. Free arrays, or raise memory="
                self.reply(slot, Reply(request.number, None, message, True))
            elif self.loop.now() >= deadline:
                self.client.set_hungry(False)
                message = why() or self.store.full_message()
                self.reply(slot, Reply(request.number, None, message, True))
            else:
                self.client.set_hungry(True)
                self.loop.call_later(RETRY_S, again)

        again()

    def give_spans(self, slot: int, request: Request) -> None:
        for offset in request.ask.offsets:  # type: ignore[union-attr]
            self.store.give_span(offset, slot)


def _nothing() -> None:
    """Does nothing: waiting readers are woken through the object's header."""


# Holds for refs that another engine (Ray, Dask, ...) carries as pickled bytes.
#
# A pickled ref is not a hold, and the number of times that it will be unpickled is unknown. When a
# process pickles a ref for an engine, its node therefore holds the object for the requested time.
# The hold is the node's own, so it outlives the process. Each object has a single hold, which is
# extended when another ref to the object is pickled.


# How long after its deadline a hold may be released. Higher: the node's loop wakes less often when
# many objects are pickled in a row. Lower: memory is freed sooner.
SLACK_S = 0.1


class Deadlines:
    """Keys with deadlines that can be extended. The caller passes all times."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        # Invariant: one entry for each key, with its deadline or an earlier one.
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._until)

    def put_off(self, key: int, until: float) -> None:
        """Sets the deadline of a key, unless the key has a later one."""
        before = self._until.get(key)
        if before is None:
            heapq.heappush(self._heap, (until, key))
        if before is None or until > before:
            self._until[key] = until

    def next(self) -> float | None:
        """A lower bound for the next deadline, or None if there is no key."""
        return self._heap[0][0] if self._heap else None

    def ended(self, now: float) -> list[int]:
        """Removes and returns the keys whose deadline has passed."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            _, key = self._heap[0]
            until = self._until[key]
            if until > now:  # the deadline was extended
                heapq.heapreplace(self._heap, (until, key))
                continue
            heapq.heappop(self._heap)
            del self._until[key]
            found.append(key)
        return found


class ForeignLeases:
    """All holds for foreign engines on one node."""

    def __init__(
        self,
        hold: Callable[[int], Any],
        loop: LoopPort,
        reply: Callable[[int, Reply], None],
    ) -> None:
        """hold: returns a hold on an object, or None if the object is gone."""
        self._hold = hold
        self._loop = loop
        self._reply = reply
        self.holds: dict[int, Any] = {}
        self._deadlines = Deadlines()
        self._expires_at: float | None = None  # time at which the timer fires

    def asked(self, slot: int, request: Request) -> None:
        """Holds the object of a ref that a process has pickled."""
        ask: Any = request.ask
        oid, seconds = ask.oid, ask.seconds
        if oid not in self.holds and (hold := self._hold(oid)) is not None:
            self.holds[oid] = hold
        if oid in self.holds:
            self._deadlines.put_off(oid, self._loop.now() + seconds)
            self._expire_later()
        if request.number:
            self._reply(slot, Reply(request.number, seconds if oid in self.holds else 0.0))

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
