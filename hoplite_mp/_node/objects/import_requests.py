"""Requests of processes for objects of other hosts, and the holds that they are granted.

A process takes a hold of its own after it has read the reply. Until the process has confirmed that,
the node keeps a hold for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp._node.objects.foreign_leases import ForeignLeases
from hoplite_mp._protocol.local import DropForeign, HoldForeign, Import, Imported, Reply

if TYPE_CHECKING:
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.requests import Handler, Requests
    from hoplite_mp._protocol.local import Request

__all__ = ["ImportRequests"]


class ImportRequests:
    """The requests of one host's processes."""

    def __init__(self, host: HostContext, requests: Requests) -> None:
        self.imports = host.imports
        self.lines = host.clients
        self.reply = host.reply
        self.granted: dict[int, dict[int, Any]] = {}  # slot -> number -> holds not yet taken over
        self.foreign_holds = ForeignLeases(
            host.client.hold, host.config.foreign_hold_s, host.loop, host.reply
        )
        requests.when_forgotten(lambda slot: self.granted.pop(slot, None))

    @property
    def handlers(self) -> dict[type, Handler]:
        """Handlers by type of request."""
        return {
            Import: self.import_,
            Imported: self.imported,
            HoldForeign: self.foreign_holds.asked,
            DropForeign: self.drop_foreign,
        }

    def import_(self, slot: int, request: Request) -> None:
        """A process asks for objects; `granted` keeps them until the process has its own holds."""
        line = self.lines.get(slot)
        objects = request.ask.objects  # type: ignore[union-attr]

        def done(holds: list[Any]) -> None:
            if line is None or self.lines.get(slot) is not line:
                return  # the process has died
            self.granted.setdefault(slot, {})[request.number] = holds
            oids = [0 if hold is None else hold.oid for hold in holds]
            self.reply(slot, Reply(request.number, oids))

        self.imports.ask(objects, done)

    def imported(self, slot: int, request: Request) -> None:
        """The process has its own holds on all objects of replies up to that number."""
        number = request.ask.number  # type: ignore[union-attr]
        granted = self.granted.get(slot, {})
        # A process that Ctrl-C has interrupted may never confirm some of the earlier replies.
        for old in [old for old in granted if old <= number]:
            del granted[old]

    def keep_granted(self, slot: int, number: int, hold: Any) -> None:
        """Keeps a hold that another component grants in the reply of that number."""
        self.granted.setdefault(slot, {})[number] = [hold]

    def drop_foreign(self, slot: int, request: Request) -> None:
        """A process of this host has deleted an object of another host."""
        self.imports.drop(request.ask.oid)  # type: ignore[union-attr]
