"""The members of the cluster, including this node, as announced by the manager.

The manager decides on membership, and announces each member with its initial number of workers.
Nodes notify each other when that number changes. Components that only need the living nodes use the
roster (_node/roster.py).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from hoplite_mp._protocol.local import (
    CountDrivers,
    DepartedNodes,
    DrainNode,
    GroupBlockWritten,
    GroupDoorbell,
    JoinStatus,
    LeavingNodes,
    Locate,
    Members,
    Reply,
)
from hoplite_mp._protocol.messages import Member, NodeJoined
from hoplite_mp._protocol.peers import AddPeerWorkers, WorkersReport

if TYPE_CHECKING:
    from hoplite_mp._node.dispatch import Handler, Requests
    from hoplite_mp._node.manager_link.connection import ManagerConnection
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.roster import NodeLifecycle
    from hoplite_mp._node.tasks.resources import Resources
    from hoplite_mp._node.tasks.workers import Workers
    from hoplite_mp._protocol.local import LanStart, Request

__all__ = ["JoinWaiters", "NodeMembership", "SingleHostMembership"]


NUMBER = 0  # the number of the only node in a cluster of one host
GONE_MAX = 32  # the number of former hosts that are remembered for `status` and `top`
# How long former hosts are remembered. Higher: `status` and `top` list old losses next to new ones.
GONE_SHOWN_S = 600.0


class SingleHostMembership:
    """Answers requests about the members of a cluster of one host."""

    def __init__(
        self,
        host: HostContext,
        workers: Workers,
        resources: Resources,
        workers_at_start: int,
        hostname: str,
    ) -> None:
        self.client = host.client
        self.store = host.store
        self.reply = host.reply
        self.workers = workers
        self.resources = resources
        self.workers_at_start = workers_at_start
        self.hostname = hostname

    @property
    def handlers(self) -> dict[type, Handler]:
        """Handlers by type of request."""

        def replies(value: Any, error: str = "") -> Handler:
            return lambda slot, request: self.reply(slot, Reply(request.number, value, error))

        return {
            Members: self.asked,
            DepartedNodes: replies([]),
            LeavingNodes: replies([]),
            DrainNode: replies(None, "this is the only node"),
            GroupDoorbell: replies(None, "this is the only node"),
            CountDrivers: replies(0),
            Locate: replies([NUMBER]),
            GroupBlockWritten: lambda slot, request: None,  # no other host waits for the blocks
        }

    @property
    def known(self) -> tuple[Member, ...]:
        """All nodes in the cluster."""
        return (Member(NUMBER, 0, self.client.host_id, self.workers_at_start),)

    def joining(self, incarnation: int) -> NodeJoined:
        """The first message to the manager."""
        return NodeJoined(self.client.host_id, incarnation, self.workers_at_start)

    def asked(self, slot: int, request: Request) -> None:
        """Replies to a process with all nodes."""
        workers = len(self.workers.pools[0].workers)
        node = (
            NUMBER,
            "127.0.0.1",
            self.hostname,
            workers,
            self.store.used_bytes(),
            self.store.limit,
            self.resources.totals,
            self.resources.ledger.free(),
        )
        self.reply(slot, Reply(request.number, [node]))


class NodeMembership:
    """The members of a cluster of several hosts."""

    def __init__(
        self,
        host: HostContext,
        workers: Workers,
        resources: Resources,
        workers_at_start: int,
        start: LanStart,
    ) -> None:
        self.loop = host.loop
        self.client = host.client
        self.store = host.store
        self.roster = host.roster
        self.send_peer = host.send_peer
        self.reply = host.reply
        self.workers = workers
        self.resources = resources
        self.workers_at_start = workers_at_start
        self.start = start
        self.cluster = start.cluster
        self.certificate = start.certificate
        self.members: dict[int, Member] = {}  # by number, in order of joining
        # The last hosts that were lost or have left: (number, name, time).
        self.gone: deque[tuple[int, str, float]] = deque(maxlen=GONE_MAX)
        self.left: set[int] = set()  # numbers of gone hosts that had announced their departure
        self.former_workers: set[int] = set()  # numbers of members that have had workers
        self.numbers = 1  # the highest known count of node numbers that the manager has assigned
        # this host's number of workers, if it has changed since the node joined
        self.workers_now: int | None = None

    @property
    def handlers(self) -> dict[type, Handler]:
        """Handlers by type of request."""
        return {Members: self.asked, DepartedNodes: self.asked_gone}

    # -- announcements from this node ----------------------------------------------------------

    def joining(self, incarnation: int) -> NodeJoined:
        """The first message to the manager."""
        return NodeJoined(
            self.client.host_id,
            incarnation,
            self.workers_at_start,
            host=self.start.host,
            addresses=tuple(self.start.addresses),
            memory_total=self.store.limit,
            stays=self.start.accepts_drivers,
            resources=self.resources.totals,
        )

    def tell_workers(self, count: int) -> None:
        """Announces this host's number of workers to all other nodes."""
        self.workers_now = count
        for host_id in self.roster.host_ids:
            self.send_peer(host_id, WorkersReport(count))

    def workers_are(self, count: int) -> None:
        """Announces this host's number of workers if it differs from the last announced number."""
        known = self.workers_at_start if self.workers_now is None else self.workers_now
        if count != known and not self.roster.leaves:
            self.tell_workers(count)

    def grow_remote(self, number: int, count: int) -> bool:
        """Asks another node to start more workers. Returns False if the node is gone."""
        member = self.roster.by_number.get(number)
        return member is not None and self.send_peer(member.host_id, AddPeerWorkers(count))

    def grow(self, host_id: int, message: AddPeerWorkers) -> None:
        """Starts more workers here at another node's request."""
        if not self.roster.leaves:
            self.tell_workers(self.workers.grow(message.count))

    # -- messages from the manager -------------------------------------------------------------

    def peer_joined(self, member: Member) -> None:
        """Adds a member that has joined."""
        self.numbers = max(self.numbers, member.node + 1)
        self.members[member.node] = member

    def remove(self, number: int) -> Member | None:
        """Removes a member that is gone. Returns the member, or None if it was already removed."""
        member = self.members.pop(number, None)
        had_workers = number in self.former_workers  # a leaving host first announces 0 workers
        self.former_workers.discard(number)
        # A program without workers that was connected for a while is not a former host.
        if member is not None and (member.workers or had_workers or member.stays):
            self.gone.append((number, member.host, self.loop.now()))
            self.left &= {gone for gone, *_ in self.gone} - {number}
            if member.host_id in self.roster.leaving:
                self.has_left(number)
        return member

    def has_left(self, number: int) -> None:
        """Records that the member had announced its departure."""
        self.left.add(number)

    def have_workers(self, host_id: int, count: int) -> Member | None:
        """Updates the number of workers in the host's common pool. Returns the updated member, or
        None if the host is not a member."""
        member = self.roster.by_host_id.get(host_id)
        if member is None:
            return None
        before = self.members[member.node]
        if before.workers:
            self.former_workers.add(member.node)
        found = msgspec.structs.replace(before, workers=count)
        self.members[member.node] = found
        self.roster.add(found)
        return found

    def manager_is_at(self, addresses: list[tuple[int, tuple[Any, ...]]]) -> None:
        """Sets the addresses of the new manager, as (address family, socket address)."""
        self.start = msgspec.structs.replace(self.start, manager=addresses)

    # -- processes on this host ----------------------------------------------------------------

    def asked(self, slot: int, request: Request) -> None:
        """Replies to a process with all nodes."""
        number = self.client.number
        workers, free = len(self.workers.pools[0].workers), self.resources.ledger.free()
        found = [
            (
                member.node,
                member.addresses[0].rpartition(":")[0].strip("[]") if member.addresses else "",
                member.host,
                workers if member.node == number else member.workers,
                self.store.used_bytes() if member.node == number else 0,
                member.memory_total,
                member.resources,
                free if member.node == number else member.resources,
            )
            for member in self.members.values()
        ]
        self.reply(slot, Reply(request.number, found))

    def asked_gone(self, slot: int, request: Request) -> None:
        """Replies to a process with a list of the hosts that are gone, with the seconds since each
        loss and whether the host had announced its departure."""
        now = self.loop.now()
        while self.gone and now - self.gone[0][2] > GONE_SHOWN_S:
            self.gone.popleft()
        gone = [(number, host, now - at, number in self.left) for number, host, at in self.gone]
        self.reply(slot, Reply(request.number, gone))


# Requests from clients that wait until their node has joined a cluster.
#
# A node serves the processes on its host even before a manager has admitted it, but a program must
# not begin until the node has joined.


class JoinWaitersEvents(Protocol):
    """Requests from this component to the components above it."""

    def cluster(self) -> bytes:
        """The id of the cluster. Empty in a cluster of one host."""


class JoinWaiters:
    """The waiting requests from one host's processes."""

    def __init__(
        self,
        host: HostContext,
        requests: Requests,
        lifecycle: NodeLifecycle,
        management: ManagerConnection,
        events: JoinWaitersEvents,
    ) -> None:
        self.client = host.client
        self.reply = host.reply
        self.lifecycle = lifecycle
        self.management = management
        self.events = events
        self.waiting: list[tuple[int, int]] = []  # (slot, number of its request)
        requests.when_forgotten(self._forget_client)

    @property
    def handlers(self) -> dict[type, Handler]:
        """Handlers by type of request."""
        return {JoinStatus: self.ask}

    def ask(self, slot: int, request: Request) -> None:
        """Handles a process's request, which is answered once this node has joined."""
        self.waiting.append((slot, request.number))
        self.answer()

    def answer(self) -> None:
        """Answers all waiting requests if this node has joined or has failed to join."""
        management = self.management
        if not self.lifecycle.joined and management.join_error is None:
            return
        managed = management.channel is not None
        stands = (self.client.number, self.events.cluster(), *management.standby, managed)
        waiting, self.waiting = self.waiting, []
        for slot, number in waiting:
            self.reply(slot, Reply(number, management.join_error or stands))

    def _forget_client(self, slot: int) -> None:
        self.waiting = [request for request in self.waiting if request[0] != slot]
