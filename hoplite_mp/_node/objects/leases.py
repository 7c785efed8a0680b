"""Requests of processes for memory of the store: blocks, spans, restored objects.

A request that cannot be granted because the store is full is retried for a short while, and then
answered "full"; the process itself decides how long it goes on asking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._protocol.local import (
    ON_ITS_WAY,
    RESTORED,
    SPILLED_PIECE_BYTES,
    GiveSpans,
    Lease,
    LeaseSpan,
    ReadSpilled,
    Reply,
    Restore,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.requests import Handler, Requests
    from hoplite_mp._node.store.pages import Pages
    from hoplite_mp._protocol.local import Request

__all__ = ["Leases"]

PATIENCE_S = 0.2  # after this the answer is "full"
RETRY_S = 0.01
# Preallocated blocks take at most this part of the store. A larger part: calls of more members find
# the block of their next part ready, but a large object that needs that room is refused.
SPARES_SHARE = 16


class LeasesEvents(Protocol):
    """What this component reports to components above it, and asks of them."""

    def leases(self, slot: int) -> None:
        """The process in that slot is about to write a payload."""


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
        self.preallocated_blocks: dict[
            int, int
        ] = {}  # payloads of blocks that may never be needed -> slot

    @property
    def handlers(self) -> dict[type, Handler]:
        """Handlers by type of request."""
        return {
            Lease: self.lease,
            LeaseSpan: self.lease_span,
            Restore: self.restore,
            ReadSpilled: self.read_spilled,
            GiveSpans: self.give_spans,
        }

    def lease(self, slot: int, request: Request) -> None:
        ask: Any = request.ask
        nbytes = ask.nbytes
        if (
            ask.error or ask.preallocated
        ):  # answered at once: of an error others may wait for the task
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

        self.patiently(slot, request, attempt)

    def _preallocated(self, nbytes: int, slot: int) -> int | None:
        """A block that is not needed yet; None: others need the room."""
        store = self.store
        store.take_returns()
        self.preallocated_blocks = {
            one: to for one, to in self.preallocated_blocks.items() if store.leases.get(one) == to
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
        self.patiently(slot, request, attempt)

    def restore(self, slot: int, request: Request) -> None:
        oid = request.ask.oid  # type: ignore[union-attr]

        def attempt() -> int | None:
            remote_objects = self.remote_objects
            if oid in remote_objects:
                wanted = not remote_objects.refusal(oid) and remote_objects.want(oid, _nothing)
                return ON_ITS_WAY if wanted else None
            return None if self.store.restore(oid, slot) is None else RESTORED

        self.patiently(slot, request, attempt, lambda: self.remote_objects.refusal(oid))

    def read_spilled(self, slot: int, request: Request) -> None:
        ask: Any = request.ask
        nbytes = min(ask.nbytes, SPILLED_PIECE_BYTES)
        piece = self.store.read_spilled(ask.oid, ask.offset, nbytes)
        self.reply(slot, Reply(request.number, piece))

    def patiently(
        self, slot: int, request: Request, attempt: Any, why: Callable[[], str] = lambda: ""
    ) -> None:
        """Answers as soon as `attempt` succeeds; retries for PATIENCE_S, then answers "full". why:
        returns a reason other than that this store is full, or ""."""
        deadline = self.loop.now() + PATIENCE_S
        line = self.lines.get(slot)

        def again() -> None:
            died = line is None or self.lines.get(slot) is not line  # its slot may be another's
            if died or not self.requests.is_latest(slot, request.number):  # or Ctrl-C
                self.client.set_hungry(False)  # whoever else waits for room sets it again
                return
            value = attempt()
            if value is not None:
                self.client.set_hungry(False)
                self.pages.watch_idle()
                self.reply(slot, Reply(request.number, value))
            elif self.store.returned_to == slot:  # spilling has made room in the process' own spans
                self.client.set_hungry(False)
                message = f"{self.store.room_message()}. Free arrays, or raise memory="
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
    """Readers that wait for an object are woken through its header, not by this callback."""
