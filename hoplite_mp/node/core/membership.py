"""The members of the cluster as the manager has named them, this node among them.

Why it exists: who is there, and with how many workers, only the manager says; each node tells the
others when its own number of workers changes. Rooms that only want to know which other nodes live
ask the roster (node/roster.py), which is filled from here.
It must never know: what is lost with a node, how messages get to it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp.protocol.foreign import UsersOfNode
from hoplite_mp.protocol.local import (
    DrainNode,
    GoneNodes,
    GroupWritten,
    LeavingNodes,
    Locate,
    Members,
    Reply,
)
from hoplite_mp.protocol.messages import Member, NodeJoined
from hoplite_mp.protocol.peers import AddWorkers, WorkersNow

if TYPE_CHECKING:
    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.requests import Handler
    from hoplite_mp.node.tasks.resources import Resources
    from hoplite_mp.node.tasks.workers import Workers
    from hoplite_mp.protocol.local import LanStart, Request

__all__ = ["Alone", "Membership"]

NUMBER = 0  # of the only node
GONE_MAX = 32  # hosts that have gone, for programs that ask what has become of them


class Alone:
    """The cluster of one host: what its node says of itself, without any other."""

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
        """By kind of request."""

        def says(value: Any, error: str = "") -> Handler:
            return lambda slot, request: self.reply(slot, Reply(request.number, value, error))

        return {
            Members: self.asked,
            GoneNodes: says([]),
            LeavingNodes: says([]),
            DrainNode: says(None, "this is the only node"),
            UsersOfNode: says(0),
            Locate: says([NUMBER]),
            GroupWritten: lambda slot, request: None,  # nobody elsewhere waits for these blocks
        }

    @property
    def known(self) -> tuple[Member, ...]:
        """All nodes."""
        return (Member(NUMBER, 0, self.client.home, self.workers_at_start),)

    def joining(self, incarnation: int) -> NodeJoined:
        """What this node says of itself to its first manager."""
        return NodeJoined(self.client.home, incarnation, self.workers_at_start)

    def asked(self, slot: int, request: Request) -> None:
        """A process wants to know all nodes."""
        mine = len(self.workers.pools[0].workers)
        resources, free = self.resources.totals, self.resources.ledger.free()
        place = NUMBER, "127.0.0.1", self.hostname
        used = mine, self.store.used_bytes(), self.store.limit
        self.reply(slot, Reply(request.number, [(*place, *used, resources, free)]))


class Membership:
    """Of one node among others."""

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
        # Hosts that this node has seen go, lost or in order: (number, name, when), the last ones.
        self.gone: deque[tuple[int, str, float]] = deque(maxlen=GONE_MAX)
        self.numbers = 1  # so many were given, as far as this node knows
        self.workers_now: int | None = None  # if it is not what this node has joined with

    @property
    def handlers(self) -> dict[type, Handler]:
        """By kind of request."""
        return {Members: self.asked, GoneNodes: self.asked_gone}

    # -- what this node says of itself ---------------------------------------------------------

    def joining(self, incarnation: int) -> NodeJoined:
        """To its first manager."""
        return NodeJoined(
            self.client.home,
            incarnation,
            self.workers_at_start,
            host=self.start.host,
            addresses=tuple(self.start.addresses),
            memory_total=self.store.limit,
            stays=self.start.meets_drivers,
            resources=self.resources.totals,
        )

    def tell_workers(self, count: int) -> None:
        """This host has another number of workers than it had when it joined."""
        self.workers_now = count
        for home in self.roster.homes:
            self.send_peer(home, WorkersNow(count))

    def workers_are(self, count: int) -> None:
        """This host has so many workers now; the others are told if they think otherwise."""
        known = self.workers_at_start if self.workers_now is None else self.workers_now
        if count != known and not self.roster.leaves:
            self.tell_workers(count)

    def grow_far(self, number: int, count: int) -> bool:
        """More workers on another host; False: it is gone."""
        member = self.roster.by_number.get(number)
        return member is not None and self.send_peer(member.home, AddWorkers(count))

    def grow(self, home: int, message: AddWorkers) -> None:
        """Another node asks for more workers here."""
        if not self.roster.leaves:
            self.tell_workers(self.workers.grow(message.count))

    # -- the manager's word --------------------------------------------------------------------

    def came(self, member: Member) -> None:
        """It has joined."""
        self.numbers = max(self.numbers, member.node + 1)
        self.members[member.node] = member

    def went(self, number: int) -> Member | None:
        """It is gone, and was still there."""
        member = self.members.pop(number, None)
        # A program that has only looked in is no host that anybody asks for.
        if member is not None and (member.workers or member.stays):
            self.gone.append((number, member.host, self.loop.now()))
        return member

    def have_workers(self, home: int, count: int) -> Member | None:
        """That host has so many workers for everybody's tasks; None: it is no member."""
        member = self.roster.by_home.get(home)
        if member is None:
            return None
        found = msgspec.structs.replace(self.members[member.node], workers=count)
        self.members[member.node] = found
        self.roster.add(found)
        return found

    def manager_is_at(self, addresses: list[tuple[int, tuple[Any, ...]]]) -> None:
        """Where the manager is that leads from now on: (address family, socket address)."""
        self.start = msgspec.structs.replace(self.start, manager=addresses)

    # -- processes of this host ----------------------------------------------------------------

    def asked(self, slot: int, request: Request) -> None:
        """A process wants to know all nodes."""
        number = self.client.number
        mine, free = len(self.workers.pools[0].workers), self.resources.ledger.free()
        found = [
            (
                member.node,
                member.addresses[0].rpartition(":")[0].strip("[]") if member.addresses else "",
                member.host,
                mine if member.node == number else member.workers,
                self.store.used_bytes() if member.node == number else 0,
                member.memory_total,
                member.resources,
                free if member.node == number else member.resources,
            )
            for member in self.members.values()
        ]
        self.reply(slot, Reply(request.number, found))

    def asked_gone(self, slot: int, request: Request) -> None:
        """A process wants to know which hosts have gone, and how many seconds ago."""
        now = self.loop.now()
        gone = [(number, host, now - at) for number, host, at in self.gone]
        self.reply(slot, Reply(request.number, gone))
