"""This node among others: joining, members, and who takes which message of a peer.

Why it exists: on a LAN a node listens for peers, knows the members by the manager's word, and joins
what comes from other hosts with the rooms for it. On one host none of this is imported.
It must never know: what objects contain, how bytes move, how a handshake goes.
"""

from __future__ import annotations

import functools
import logging
import socket
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp.node.actor_looks import calls_from_here
from hoplite_mp.node.actor_moves import ActorMoves
from hoplite_mp.node.actor_spares import Spares
from hoplite_mp.node.dispatch import take
from hoplite_mp.node.draining import Draining
from hoplite_mp.node.drivers import Drivers
from hoplite_mp.node.far_actors import FarActors
from hoplite_mp.node.far_output import FarOutput
from hoplite_mp.node.far_pools import FarPools
from hoplite_mp.node.forests import Forests
from hoplite_mp.node.given import GivenBlocks
from hoplite_mp.node.group_calls import GroupCalls
from hoplite_mp.node.group_results import GroupResults
from hoplite_mp.node.kept import KeptCopies
from hoplite_mp.node.links import Links
from hoplite_mp.node.locations import Locations
from hoplite_mp.node.missing import Missing
from hoplite_mp.node.peers import Call, Peers
from hoplite_mp.node.probing import Probing
from hoplite_mp.node.recovering import Recovering
from hoplite_mp.node.transfer_waits import transfer_waits
from hoplite_mp.node.transfers import Transfers
from hoplite_mp.protocol.greetings import Introduction
from hoplite_mp.protocol.messages import (
    Credentials,
    Distribute,
    FetchRefused,
    Leave,
    MembersChanged,
    NodeAdmitted,
    Withdraw,
)
from hoplite_mp.protocol.peers import (
    AddWorkers,
    RemoveNode,
    WorkersNow,
)
from hoplite_mp.protocol.versions import software_versions
from hoplite_mp.transport.addresses import Endpoint
from hoplite_mp.transport.caller import Caller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp.node.main import Node
    from hoplite_mp.protocol.local import LanStart
    from hoplite_mp.protocol.messages import Member, NodeToManager
    from hoplite_mp.protocol.reports import Report
    from hoplite_mp.transport.conversation import Admission
    from hoplite_mp.transport.door import Door

__all__ = ["Lan"]

GONE_MAX = 32  # hosts that have gone, for who asks what has become of them
# How long a task may wait although a worker is idle elsewhere. Lower: more turns of the node.
STEAL_LOOK_S = 0.02
# Rounds over a lost manager's addresses: while there may be another one, its supervisor listens.
MANAGER_ROUNDS_MAX = 3
_log = logging.getLogger("hoplite_mp")


class Lan:
    """What a node has more when there are other hosts."""

    def __init__(self, node: Node, lan: LanStart) -> None:
        self.node = node
        self.lan = lan
        self.cluster = lan.cluster
        self.certificate = lan.certificate
        self.members: dict[int, Member] = {}  # by number, in order of joining
        # Hosts that this node has seen go, lost or in order: (number, name, when), the last ones.
        self.gone: deque[tuple[int, str, float]] = deque(maxlen=GONE_MAX)
        self.numbers = 1  # so many were given, as far as this node knows
        self.door: Door | None = None
        self.missing = Missing(
            lan.silence_s, node.loop, node.send_manager, lambda: node.number, self._lost_many
        )
        self._stealing = False  # there will be another look
        self.workers_now: int | None = None  # if it is not what this node has joined with
        self.mine = Introduction(node.client.home, software_versions())
        self.peers = Peers(node.host, lan, self.take, node.lan_lost, self.mine)
        self.far_output = FarOutput(
            node.output,
            self.peers.send,
            self.peers.number_of,
            self.peers.home_of,
            lambda slot: bool(node.tasks.running(slot)),
        )
        self.kept: KeptCopies = KeptCopies(
            node.results, node.imports, node.places, self.peers.send, node.loop, node.upward
        )
        self.links = Links(node.host, self.peers)
        self.given = GivenBlocks(node.store, node.client, self.links.engine)
        self.forests = Forests(node.host, self.links, self.kept, self.given)
        self.transfers = Transfers(node.host, self.links, self.kept, self.forests)
        self.group_calls = GroupCalls(node.host, self.peers, GroupResults(node.host, self.forests))
        node.groups.hosts = self.group_calls
        node.places.fetcher = self.transfers
        node.operations.forests = self.forests
        self.draining = Draining(node.host, node.guests, node.upward)
        self.drivers = Drivers(node, self)
        self.far_pools = FarPools(
            node.host, node.delegation, node.guests, node.workers, node.resources
        )
        self.locations: Locations = Locations(node.host, self.peers, self.kept)
        self.probing = Probing(lambda: node.number, self.peers.send, node.send_manager, node.loop)
        node.exports.elsewhere = self.locations.kept_at
        self.recovering = Recovering(
            node.host,
            self.kept,
            self.node.guests,
            self.missing,
            node.resources,
            node.workers.queue_for,
            self.locations.kept_at,
            node.upward,
        )
        homes, rooms = self.recovering.homes, (node.workers, node.delegation, node.guests)
        self.far_actors = FarActors(node.host, node.actors, *rooms, homes, node.upward)
        self.spares = Spares(node.host, node.actors, homes, node.upward)
        self.actor_moves = ActorMoves(
            node.host, node.actors, self.far_actors, self.spares, *rooms, homes
        )
        node.counters.add(self._counts)
        node.waits.add("transfers", lambda: transfer_waits(self.links, self.transfers))
        node.waits.add("actor calls", lambda: calls_from_here(self.far_actors))
        if not lan.manager:
            self._open()

    def _counts(self) -> dict[str, int]:
        sent, received = self.links.moved()
        retried = self.node.delegation.retried + self.recovering.remaking.begun
        return {"bytes_sent": sent, "bytes_received": received, "tasks_retried": retried}

    def connect(self) -> Admission:
        """The connection to a manager on another host; blocks, and raises what `Caller` does."""
        admission = self._caller(self.lan.connect_timeout_s).wait()
        self.cluster = self.peers.cluster = admission.cluster
        if not self.lan.tls:
            self._open()
        return admission

    def _caller(self, timeout_s: float, rounds_max: int = 0, cluster: bytes = b"") -> Caller:
        return Caller(
            [Endpoint(socket.AddressFamily(f), tuple(where)) for f, where in self.lan.manager],
            key=self.lan.key,
            role="node",
            mine=self.mine,
            tls=self.lan.tls,
            now=self.node.loop.now(),
            timeout_s=timeout_s,
            handshake_timeout_s=self.lan.handshake_timeout_s,
            cluster=cluster,
            rounds_max=rounds_max,
        )

    def _open(self) -> None:
        """Lets other nodes in."""
        from hoplite_mp.transport.certificates import Certificate
        from hoplite_mp.transport.door import Door

        self.door = Door(
            socket.socket(fileno=self.lan.peer_fd),
            key=self.lan.key,
            service="node",
            cluster=self.cluster,
            mine=self.mine,
            certificate=Certificate(self.certificate) if self.certificate else None,
            handshake_timeout_s=self.lan.handshake_timeout_s,
            unauthenticated_max=self.lan.unauthenticated_max,
        )
        self.peers.listens_at = self.door.address.host
        self.node.loop.watch(self.door.fileno(), self._admit)

    def _admit(self) -> None:
        assert self.door is not None
        for admission in self.door.turn(self.node.loop.now()):
            if admission.role == "peer":
                self.peers.admitted(admission)
            elif admission.role == "data":
                self.peers.admitted(admission, self.links.admitted)
            else:
                admission.stream.close()
        if self.door.deadline is not None:
            self.node.loop.call_later(
                max(0.0, self.door.deadline - self.node.loop.now()), self._admit_again
            )

    def _admit_again(self) -> None:
        deadline = None if self.door is None else self.door.deadline
        if deadline is not None and deadline <= self.node.loop.now():
            self._admit()

    # -- the manager's word --------------------------------------------------------------------

    def receive(self, message: Any) -> bool:
        """A message from the manager; False if it is not about other hosts."""
        match message:
            case Credentials():
                if self.door is None:  # else by another manager than the one that let this node in
                    self.certificate = message.pem
                    self._open()
            case NodeAdmitted() if self.node.standing and self.members:
                self._again(message)
            case NodeAdmitted():
                self.node.set_number(message.node)
                for member in message.members:
                    self._came(member)
                self.probing.begin(m for m in message.members if m.node != message.node)
            case MembersChanged():
                self.missing.heard(message.went)
                for number in message.went:
                    self._went(number)
                    self.recovering.report(number)
                self.spares.are_gone(message.went)
                for member in message.came:
                    self._came(member)
            case Distribute():
                self.transfers.distribute(message)
            case Withdraw():
                self.transfers.withdraw(message)
            case FetchRefused():
                self.transfers.refused(message)
            case Leave():
                self.node.leave()
            case _:
                return self.recovering.receive(message)
        return True

    def _again(self, message: NodeAdmitted) -> None:
        """Another manager has taken over; it may know of others who came, or are lost."""
        found = {member.node: member for member in message.members}
        for number, member in list(self.members.items()):
            if number not in found or found[number].incarnation != member.incarnation:
                self._went(number)
        gone = set(range(self.numbers)) - set(found)
        self.missing.heard(gone)
        self.missing.again()
        for number in gone:  # it may wait to hear of any of them
            self.recovering.report(number)
        self.spares.are_gone(gone)
        for number, member in found.items():
            if number not in self.members and number not in self.missing.members:
                self._came(member)

    def report(self) -> Iterator[NodeToManager | Report]:
        """What a manager must know."""
        yield from self.spares.report()
        yield from self.transfers.report()
        yield from self.forests.report()
        yield from self.recovering.homes.report_again()

    def call_manager(self, done: Callable[[Admission | None], None], timeout_s: float) -> None:
        """A connection to the manager that takes over; None: there is none."""
        level = logging.WARNING if self.node.management.succession is None else logging.INFO
        make = functools.partial(self._caller, timeout_s, MANAGER_ROUNDS_MAX, self.cluster)
        Call(self.node.loop, make, "the manager", done, level).begin()

    def _came(self, member: Member) -> None:
        self.numbers = max(self.numbers, member.node + 1)
        self.members[member.node] = member
        self.peers.came(member)
        if member.home != self.node.client.home:
            self.node.delegation.set_runner(member.home, member.node, member.workers)
            self.node.resources.came(member)
            if self.workers_now is not None:
                self.peers.send(member.home, WorkersNow(self.workers_now))
            self.draining.tell(member.home)
            self.node.tracing.came(member.home)
            self.peers.let_in(member.home)
            self.spares.came()

    def tell_workers(self, count: int) -> None:
        """This host has another number of workers than it had when it joined."""
        self.workers_now = count
        for home in list(self.peers.by_home):
            self.peers.send(home, WorkersNow(count))

    def grow_far(self, number: int, count: int) -> bool:
        """More workers on another host; False: it is gone."""
        peer = self.peers.by_number.get(number)
        return peer is not None and self.peers.send(peer.member.home, AddWorkers(count))

    def drain(self, number: int) -> str:
        """Asks a node to leave; returns why it cannot, or ""."""
        if number not in self.members:
            return f"node h{number} is gone"
        if self.members[number].home == self.node.management.home:
            return f"node h{number} is that of the manager: the whole cluster ends with it"
        if number == self.node.number:
            self.draining.begin()
        else:
            self.peers.send(self.members[number].home, RemoveNode())
        return ""

    def have_workers(self, home: int, count: int) -> None:
        """That host has so many workers for everybody's tasks."""
        peer = self.peers.by_home.get(home)
        if peer is not None:
            number = peer.member.node
            self.members[number] = msgspec.structs.replace(self.members[number], workers=count)
            self.node.host.roster.add(self.members[number])
            self.node.delegation.set_runner(home, number, count)
            self.node.resources.came(self.members[number])

    def _went(self, number: int) -> None:
        member = self.members.pop(number, None)
        if member is None:
            return
        if member.workers or member.stays:  # no program that has only looked in
            self.gone.append((number, member.host, self.node.loop.now()))
        self.peers.went(number)
        self.spares.lose_host(member)
        self.recovering.begin(member)
        self.node.resources.went(member.home)
        self.node.delegation.lose_runner(member.home)
        self.node.guests.lose_peer(member.home)
        self.links.lose_node(number)
        self.kept.lose_peer(member.home)
        self.node.messages.lose_node(number)
        self.draining.lose_peer(member.home)
        self.far_pools.lose_peer(member.home)
        self.node.rounds.lose_peer(member.home)
        self.far_actors.lose_peer(member.home)
        self.spares.lose_peer(member.home, number)
        self.far_output.lose_peer(member.home)
        self.locations.lose_peer(member.home)
        self.probing.lose_peer(member.home)
        self.node.tracing.went(member.home, number, member.workers)
        self.node.questions.lose_peer(member.home)
        self.node.exports.lose_peer(member.home)
        self.node.places.lose_node(number)

    def lost(self, member: Member) -> None:
        """This node has noticed by itself."""
        if member.node in self.members:
            self._went(member.node)
            self.missing.add(member)

    def _lost_many(self, count: int) -> None:
        """Who has lost most of the others is the one that is cut off: the others need not go."""
        to = self.node.management
        most = count > max(1, len(self.peers.by_home))
        if most and not (to.is_here or to.waits_for_votes):
            to.cut_off(f"this host has lost {count} others")

    def freed(self, oid: int) -> None:
        """A header of the node's own has been collected."""
        one = self.node.imports.by_oid.get(oid)
        self.node.imports.freed(oid)
        if one is not None and oid not in self.node.imports.by_oid:
            self.transfers.dropped(one.object)
            self.recovering.freed(one)

    # -- peers ---------------------------------------------------------------------------------

    def take(self, home: int, message: Any) -> None:
        """A message of another node; its mistake is not the end of this host."""
        try:
            take(self, home, message)
        except Exception:
            _log.exception("%s of node %#x", type(message).__name__, home)

    @property
    def all_said(self) -> bool:
        """Lines of workers elsewhere have come, and what was sent to other nodes has left."""
        return self.far_output.quiet and self.peers.flushed

    def look(self, done: list[int]) -> None:
        """Words in shared memory may have changed; these tasks of the node's are done."""
        self.node.guests.completed(done)
        self.node.guests.look()
        self.node.delegation.look()
        if self.far_actors.closing:
            self.far_actors.look()
        if self.node.delegation.steal() and not self._stealing:
            self._stealing = True
            self.node.loop.call_later(STEAL_LOOK_S, self._look_for_idle)
        self.far_output.look()
        self.node.places.purge()
        self.recovering.look()

    def _look_for_idle(self) -> None:
        """Nobody tells this node that a worker has become idle; its next turn steals."""
        self._stealing = False
