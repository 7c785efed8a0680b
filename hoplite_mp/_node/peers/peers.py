"""The other nodes of the cluster, and a control channel to each of them.

A connection is opened when the first message is sent. Messages wait in order until the
connection is ready. A node answers over a connection that the other node has opened, so two nodes
usually share one. Only the manager decides which nodes are members. A peer that cannot be reached
is treated as lost.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp._node.io.control_channel import ControlChannel, Traffic
from hoplite_mp._node.peers.relays import Relays, endpoints_of
from hoplite_mp._protocol.codec import Decoder, encode
from hoplite_mp._protocol.messages import PeerLost
from hoplite_mp._protocol.output import same_host
from hoplite_mp._protocol.peers import PeerMessage
from hoplite_mp._transport.addresses import parse_address
from hoplite_mp._transport.sockets import OUT_OF
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.ports import Connections, LoopPort, OutgoingConnection
    from hoplite_mp._protocol.greetings import Introduction
    from hoplite_mp._protocol.local import LanStart
    from hoplite_mp._protocol.messages import Member, NodeToManager
    from hoplite_mp._transport.addresses import Endpoint
    from hoplite_mp._transport.conversation import Admission

__all__ = ["PeerDialing", "Peers", "Suspects"]


# The number of rounds over a node's addresses before other nodes are asked to relay. Higher: a lost
# packet leads to a relay less often, but a partition is detected later (2 s for each round and
# address).
DIRECT_ROUNDS_MAX = 2
# Minimum timeout for connections between nodes, even if the timeout for the manager is shorter.
CONNECT_S_MIN = 10.0
STARVED_S = 0.2  # retry interval while no descriptor is free
_log = logging.getLogger("hoplite_mp")


class Peer:
    """One other node. `waiting`: the frames to send once there is a control channel."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.channel: ControlChannel | None = None
        # Further control channels, if both nodes have connected. This node only reads from them.
        self.extra: list[ControlChannel] = []
        self.waiting: list[bytes] = []
        self.calling = False


class PeerDialing:
    """One outgoing connection. The node's loop calls `turn` when its descriptor is ready and at its
    deadline."""

    caller: OutgoingConnection

    def __init__(
        self,
        loop: LoopPort,
        make: Callable[[], OutgoingConnection],
        target: str,
        done: Callable[[Admission | None], None],
        level: int = logging.WARNING,
        *,
        waits: bool = True,
    ) -> None:
        """target: the other side's name in log messages. done: called with the connection, or with
        None. level: the level of the log message if `target` cannot be reached. waits: whether to
        retry instead of failing while this process has no free descriptor."""
        self._level = level
        self._make = make
        self._waits = waits
        self._starved = False
        self.loop, self.target, self.done = loop, target, done
        self.fd = -1
        self.over = False

    def begin(self) -> None:
        """Makes the first attempt immediately."""
        try:
            self.caller = self._make()
        except OSError as error:
            if error.errno not in OUT_OF:
                raise
            self._wait_for_descriptor(str(error))
            return
        self.fd, self.over = self.caller.fileno(), False
        self.loop.watch(self.fd, self.turn)
        self.turn()

    def _wait_for_descriptor(self, why: str) -> None:
        if not self._starved:
            _log.error("no connection to %s is possible now: %s", self.target, why)
        self._starved = True
        if self._waits:
            self.loop.call_later(STARVED_S, self.begin)
        else:
            self.done(None)

    def turn(self) -> None:
        """Makes all progress that is possible without blocking."""
        if self.over:
            return  # the timer is outdated
        try:
            admission = self.caller.turn(self.loop.now())
        except (HopliteError, OSError) as error:
            if self.caller.starved:
                self.over = True
                self.loop.unwatch(self.fd)
                self._wait_for_descriptor(str(error))
                return
            _log.log(self._level, "%s cannot be reached: %s", self.target, error)
            self._end(None)
            return
        if admission is not None:
            self._end(admission)
            return
        self.loop.call_later(max(0.0, self.caller.deadline - self.loop.now()), self.turn)

    def _end(self, admission: Admission | None) -> None:
        self.over = True
        self.loop.unwatch(self.fd)
        self.done(admission)


class Peers:
    """All other living nodes, by host id."""

    def __init__(
        self,
        host: HostContext,
        network: LanStart,
        connections: Connections,
        take: Callable[[int, Any], None],
        lose: Callable[[Member], None],
        mine: Introduction,
    ) -> None:
        """take: called with a host id and a message from that host. lose: called with a member that
        can no longer be reached."""
        self.loop = host.loop
        self.roster = host.roster
        self.start = network
        self.connections = connections
        self.take = take
        self.lose_member = lose
        self.mine = mine
        self.cluster = network.cluster
        self.by_host_id: dict[int, Peer] = {}
        self.traffic = Traffic()  # over all control channels
        self.by_number: dict[int, Peer] = {}
        # Host id -> connections from a node that this node does not yet know to be a member.
        self.unknown: dict[int, list[tuple[Admission, Callable[[Peer, Admission], None]]]] = {}
        self.own: set[str] = set()  # addresses of this host, without ports
        self.listens_at = ""  # the address at which this node accepts others, without a port
        self.relays = Relays(host, connections, self)

    def peer_joined(self, member: Member) -> None:
        """Adds a node that has joined, which may be this one."""
        if member.host_id == self.mine.host_id:
            self.own = _hosts(member)
            return
        peer = Peer(member)
        self.by_host_id[member.host_id] = self.by_number[member.node] = peer
        self.roster.add(member)

    def peer_lost(self, member: Member) -> None:
        """Removes a lost node, and closes its connections."""
        peer = self.by_number.pop(member.node, None)
        if peer is None:
            return
        del self.by_host_id[peer.member.host_id]
        self.roster.remove(member.node)
        for channel in (peer.channel, *peer.extra):
            if channel is not None:
                channel.close("the node is gone")
        self.relays.lose_peer(peer.member.host_id)

    def host_id_of(self, output_owner: int) -> int | None:
        """The id of the host of the driver with this name, or None if the host is gone."""
        if output_owner in self.by_host_id:
            return output_owner
        return next(
            (host_id for host_id in self.by_host_id if same_host(output_owner, host_id)), None
        )

    def is_near(self, number: int) -> bool:
        """Whether the node advertises an address of this host, so that traffic to it uses no
        network."""
        peer = self.by_number.get(number)
        return peer is not None and not self.own.isdisjoint(_hosts(peer.member))

    def is_member(self, host: str) -> bool:
        """Whether a living node has the address. May be called in any thread."""
        return any(host in _hosts(peer.member) for peer in list(self.by_host_id.values()))

    def send(self, host_id: int, message: PeerMessage) -> bool:
        """Sends a message to the node of the host, connecting to it if needed. Returns False if
        there is no such node."""
        peer = self.by_host_id.get(host_id)
        if peer is None:
            return False
        frame = encode(message)  # type: ignore[arg-type]
        if peer.channel is not None and peer.channel.open:
            return peer.channel.send(frame)
        peer.waiting.append(frame)
        self._call(peer)
        return True

    @property
    def met(self) -> list[int]:
        """The ids of the hosts whose nodes have a control channel to this one."""
        return [host_id for host_id, peer in self.by_host_id.items() if peer.channel is not None]

    @property
    def flushed(self) -> bool:
        """Whether all sent messages have left this process."""
        return not any(
            peer.waiting
            or (peer.channel is not None and peer.channel.open and peer.channel.sending)
            for peer in self.by_host_id.values()
        )

    def _call(self, peer: Peer) -> None:
        if peer.calling:
            return
        peer.calling = True
        self.call(peer.member, "peer", lambda admission: self._answered(peer, admission))

    def call(
        self,
        member: Member,
        role: str,
        done: Callable[[Admission | None], None],
        link: tuple[int, int] = (0, 0),
    ) -> None:
        """Connects to a node, over a relay if necessary. Calls `done` with the connection, or with
        None if the node cannot be reached. link: Introduction.link and Introduction.answers."""
        route = self.relays.route(member.host_id)
        others = len(self.by_host_id) > 1

        def met() -> bool:
            peer = self.by_host_id.get(member.host_id)
            return (
                role == "peer"
                and peer is not None
                and peer.channel is not None
                and peer.channel.open
            )

        def called(admission: Admission | None) -> None:
            lost = admission is None and member.host_id in self.by_host_id
            if lost and others and not route and not met():
                self.relays.find(member, found)
            else:
                done(admission)

        def found(route: list[Endpoint]) -> None:
            if met():  # the other node has connected in the meantime
                done(None)
                return
            # If there is no relay, call the other node directly and for longer, because it may not
            # be listening yet. If that node is gone, the manager will announce its loss.
            self._call_at(route or endpoints_of(member.addresses), member, role, done, link)

        rounds = DIRECT_ROUNDS_MAX if others and not route else 0
        endpoints = route or endpoints_of(member.addresses)
        self._call_at(endpoints, member, role, called, link, rounds)

    def _call_at(
        self,
        endpoints: list[Endpoint],
        member: Member,
        role: str,
        done: Callable[[Admission | None], None],
        link: tuple[int, int],
        rounds_max: int = 0,
    ) -> None:
        make = functools.partial(
            self.connections.call,
            endpoints,
            role=role,
            mine=msgspec.structs.replace(self.mine, link=link[0], answers=link[1]),
            timeout_s=max(self.start.connect_timeout_s, CONNECT_S_MIN),
            cluster=self.cluster,
            host_id=member.host_id,
            rounds_max=rounds_max,
        )
        PeerDialing(self.loop, make, f"node h{member.node}", done, waits=role == "peer").begin()

    def _answered(self, peer: Peer, admission: Admission | None) -> None:
        peer.calling = False
        if self.by_host_id.get(peer.member.host_id) is not peer:
            if admission is not None:
                admission.stream.close()
        elif admission is not None:
            self._attach(peer, admission)
        # The other node has not connected, either.
        elif peer.channel is None or not peer.channel.open:
            self.lose_member(peer.member)

    def admitted(
        self, admission: Admission, attach: Callable[[Peer, Admission], None] | None = None
    ) -> None:
        """Handles a connection from another node. An unknown node may have joined before the
        manager's message about it has arrived here, so the connection waits for that message until
        the handshake timeout. attach: receives the connection; None: the connection becomes a
        control channel."""
        host_id, attach = admission.peer.host_id, attach or self._attach
        peer = self.by_host_id.get(host_id)
        if peer is not None:
            attach(peer, admission)
            return
        self.unknown.setdefault(host_id, []).append((admission, attach))
        self.loop.call_later(
            self.start.handshake_timeout_s, lambda: self._too_late(host_id, admission)
        )

    def let_in(self, host_id: int) -> None:
        """Attaches a node's waiting connections, after all components know the node as a member."""
        peer = self.by_host_id.get(host_id)
        if peer is not None:
            for admission, attach in self.unknown.pop(host_id, ()):
                attach(peer, admission)

    def _too_late(self, host_id: int, admission: Admission) -> None:
        waiting = self.unknown.get(host_id, [])
        for entry in [entry for entry in waiting if entry[0] is admission]:
            waiting.remove(entry)
            admission.stream.close()
        if not waiting:
            self.unknown.pop(host_id, None)

    def _attach(self, peer: Peer, admission: Admission) -> None:
        host_id = peer.member.host_id
        channel = ControlChannel(
            self.loop,
            admission.stream,
            Decoder(PeerMessage),
            lambda message: self.take(host_id, message),
            lambda reason: self._ended(peer, reason),
            traffic=self.traffic,
        )
        if peer.channel is None or not peer.channel.open:
            peer.channel = channel
            waiting, peer.waiting = peer.waiting, []
            for frame in waiting:
                channel.send(frame)
        else:
            peer.extra.append(channel)
        # Handle bytes that arrived together with the end of the handshake: they do not wake the
        # loop.
        if channel.open:
            channel.ready()

    def _ended(self, peer: Peer, reason: str) -> None:
        if self.by_host_id.get(peer.member.host_id) is peer:
            _log.info("the connection to node h%d ended: %s", peer.member.node, reason)
            self.lose_member(peer.member)


def _hosts(member: Member) -> set[str]:
    return {parse_address(text).host for text in member.addresses}


# Suspects: nodes with which only this node has lost contact, until the manager decides.
#
# A connection between two nodes may end even if both are alive. The manager is connected to both,
# so it decides which node is excluded. Until it has decided, the other node is still a member.


# The time for the manager to detect a dead node before this node reports it, as a multiple of
# heartbeat_timeout_s. Lower: a living node is excluded sooner because another node has lost contact
# with it.
PEER_LOST_SILENCES = 2.0


class Suspects:
    """The suspects by number, from the loss of contact until the manager's decision."""

    def __init__(
        self,
        heartbeat_timeout_s: float,
        loop: LoopPort,
        tell: Callable[[NodeToManager], None],
        number: Callable[[], int],
        most: Callable[[int], None],
    ) -> None:
        """tell: sends a message to the manager. number: returns this node's number. most: called
        some time after a loss with the number of suspects, because this host itself may be cut off
        if there are many."""
        self.members: dict[int, Member] = {}
        self._silence_s = heartbeat_timeout_s
        self._loop = loop
        self._tell = tell
        self._number = number
        self._most = most

    def add(self, member: Member) -> None:
        """Adds a member with which this node has just lost contact."""
        self.members[member.node] = member
        half_s = PEER_LOST_SILENCES / 2 * self._silence_s
        self._loop.call_later(half_s, lambda: self._most(len(self.members)))
        self._report_later(member.node)

    def confirm(self, gone: Iterable[int]) -> None:
        """Removes nodes that the manager has declared gone."""
        for number in gone:
            self.members.pop(number, None)

    def again(self) -> None:
        """Restarts the timers, because these losses may not have been reported to a new manager."""
        for number in self.members:
            self._report_later(number)

    def _report_later(self, number: int) -> None:
        self._loop.call_later(PEER_LOST_SILENCES * self._silence_s, lambda: self._report(number))

    def _report(self, number: int) -> None:
        """Reports the loss if the manager has not decided yet. Both nodes are then still connected
        to the manager, which must exclude one of them. If no manager is running, `again` repeats
        the report to the next one."""
        if number in self.members:
            _log.warning("lost contact with node h%d; reporting it to the manager", number)
            self._tell(PeerLost(self._number(), number))
