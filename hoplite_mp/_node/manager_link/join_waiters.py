"""Requests of clients that wait until their node has joined a cluster.

A node serves the processes of its host before a manager has let it in, but a program must not begin
its work before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hoplite_mp._protocol.local import JoinStatus, Reply

if TYPE_CHECKING:
    from hoplite_mp._node.manager_link.connection import ManagerConnection
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.requests import Handler, Requests
    from hoplite_mp._node.roster import Life
    from hoplite_mp._protocol.local import Request

__all__ = ["JoinWaiters"]


class JoinWaitersEvents(Protocol):
    """What this component reports to components above it, and asks of them."""

    def cluster(self) -> bytes:
        """The id of the cluster; empty in a cluster of one host."""


class JoinWaiters:
    """The requests of one host's processes."""

    def __init__(
        self,
        host: HostContext,
        requests: Requests,
        life: Life,
        management: ManagerConnection,
        events: JoinWaitersEvents,
    ) -> None:
        self.client = host.client
        self.reply = host.reply
        self.life = life
        self.management = management
        self.events = events
        self.waiting: list[tuple[int, int]] = []  # (slot, number of its request)
        requests.when_forgotten(self._forget_client)

    @property
    def handlers(self) -> dict[type, Handler]:
        """Handlers by type of request."""
        return {JoinStatus: self.ask}

    def ask(self, slot: int, request: Request) -> None:
        """A process asks to be answered when this node has joined."""
        self.waiting.append((slot, request.number))
        self.answer()

    def answer(self) -> None:
        """Answers all waiting requests if this node has joined or has failed to join."""
        management = self.management
        if not self.life.standing and management.join_error is None:
            return
        managed = management.channel is not None
        stands = (self.client.number, self.events.cluster(), *management.standby, managed)
        waiting, self.waiting = self.waiting, []
        for slot, number in waiting:
            self.reply(slot, Reply(number, management.join_error or stands))

    def _forget_client(self, slot: int) -> None:
        self.waiting = [one for one in self.waiting if one[0] != slot]
