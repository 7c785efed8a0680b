"""Failover: this node follows one manager, and votes for the standby when it loses that manager.

In a cluster with a standby a node must never follow two managers. Terms and votes work as in Raft's
elections. The manager's right to decide is a lease (Gray and Cheriton, SOSP 1989). Each answer from
this node to a heartbeat from its manager renews the lease, and binds the node to that manager for a
while. A node that has lost its manager and is no longer bound offers its vote to the standby. If
the manager returns before the vote, the node follows it again. After the vote the node no longer
follows the old manager, and its connection to the standby becomes its connection to the manager. If
the standby does not become the leader, the node also asks the old manager whether it is still in
charge. If so, the cluster has continued without this node, and the node stops.

    following ──► no heartbeat or connection ──► vote offered ──► voted ──► following the new one
        ▲                                              │ ▲               │
        └────────── the manager is back ◄──────────────┘ └─ no leader ───┘

The node on the manager's own host never votes, because that host stops with its manager.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from hoplite_mp._node.io.control_channel import ControlChannel
from hoplite_mp._node.peers.peers import PeerDialing
from hoplite_mp._planner.terms import Voter, promise_s
from hoplite_mp._protocol.codec import encode, node_decoder
from hoplite_mp._protocol.local import StartStandby
from hoplite_mp._protocol.messages import DeclaredDead
from hoplite_mp._protocol.terms import (
    LeaderHeartbeat,
    LeaderHeartbeatAck,
    NoLeader,
    StandbyAnnounced,
    VoteGranted,
    VoterEnded,
    VoteRequest,
    VoterState,
)
from hoplite_mp._transport.addresses import endpoint_at, endpoint_of, parse_address
from hoplite_mp._transport.stream import Silence
from hoplite_mp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.manager_link.connection import ManagerConnection, ManagerNetwork
    from hoplite_mp._node.manager_link.membership import NodeMembership
    from hoplite_mp._node.peers.peers import Peers, Suspects
    from hoplite_mp._node.ports import Connections, LoopPort, OutgoingConnection, ProcessesPort
    from hoplite_mp._node.roster import NodeLifecycle
    from hoplite_mp._protocol.messages import Member
    from hoplite_mp._protocol.terms import Knowledge
    from hoplite_mp._transport.addresses import Address
    from hoplite_mp._transport.conversation import Admission

__all__ = ["Failover", "ManagerDialing"]

# Connections to managers on other hosts: the first one, and its successors.
#
# A node tries the addresses of its cluster's manager until one answers. When a standby has become
# the manager, its addresses replace them.


# The number of rounds over the addresses of a lost manager. They suffice, because its supervisor
# keeps the socket listening during the manager's restart.
MANAGER_ROUNDS_MAX = 3


class ManagerDialing:
    """The implementation of `ManagerNetwork` in _node/manager_link/connection.py."""

    def __init__(
        self,
        loop: LoopPort,
        lifecycle: NodeLifecycle,
        connections: Connections,
        management: ManagerConnection,
        membership: NodeMembership,
        suspects: Suspects,
        peers: Peers,
        processes: ProcessesPort,
        let_in: Callable[[], None],
    ) -> None:
        """let_in: starts to accept other nodes. Called when the cluster's id is known or, with TLS,
        when the node has the cluster's certificate."""
        self.loop = loop
        self.lifecycle = lifecycle
        self.connections = connections
        self.management = management
        self.membership = membership
        self.suspects = suspects
        self.peers = peers
        self.processes = processes
        self.let_in = let_in
        start = membership.start
        self.connect_timeout_s = start.connect_timeout_s
        self.heartbeat_interval_s = start.heartbeat_interval_s
        self.heartbeat_timeout_s = start.heartbeat_timeout_s

    def connect(self) -> Admission:
        """Makes the first connection. Blocks, and raises the errors of
        `OutgoingConnection.wait`."""
        admission = self._calling(self.connect_timeout_s).wait()
        self.membership.cluster = self.peers.cluster = admission.cluster
        if not self.membership.start.tls:
            self.let_in()
        return admission

    def call(self, done: Callable[[Admission | None], None], timeout_s: float) -> None:
        """Calls `done` with a connection to the leading manager, or with None if none is found."""
        level = logging.WARNING if self.management.failover is None else logging.INFO
        make = functools.partial(
            self._calling, timeout_s, MANAGER_ROUNDS_MAX, self.membership.cluster
        )
        PeerDialing(self.loop, make, "the manager", done, level).begin()

    def _calling(
        self, timeout_s: float, rounds_max: int = 0, cluster: bytes = b""
    ) -> OutgoingConnection:
        return self.connections.call(
            [endpoint_at(*where) for where in self.membership.start.manager],
            role="node",
            mine=self.peers.mine,
            timeout_s=timeout_s,
            cluster=cluster,
            rounds_max=rounds_max,
        )

    def failover(self, named: StandbyAnnounced) -> Failover:
        """Creates the Failover after the manager has named a standby."""
        return Failover(
            self.loop,
            self.lifecycle,
            self.connections,
            self.management,
            self,
            self.membership,
            self.suspects,
            self.peers,
            self.processes,
            named,
        )


# How long a node without a manager waits for a user to promote the standby, if the node is
# connected to the standby. Higher: more time for the user. Lower: programs fail sooner if no user
# intervenes.
PROMOTE_WAIT_S = 300.0
# How long a node without a manager waits for a connection to the standby, and how long it then
# waits for the standby to lead after the vote. Higher: a standby may start later.
ALONE_S = 10.0
US = 1_000_000
# In clusters of at most this many hosts, the death of a peer cannot be distinguished from the loss
# of this host's connection. There is no majority, so a user must decide.
ALONE_MAX = 2
# Timeout for a connection to the standby or the former manager, and for the latter's answer. The
# node calls again afterwards.
CALL_S = 2.0

_log = logging.getLogger("hoplite_mp")


class Failover:
    """The failover on one node, created when the manager names a standby."""

    def __init__(
        self,
        loop: LoopPort,
        lifecycle: NodeLifecycle,
        connections: Connections,
        management: ManagerConnection,
        network: ManagerNetwork,
        membership: NodeMembership,
        suspects: Suspects,
        peers: Peers,
        processes: ProcessesPort,
        named: StandbyAnnounced,
    ) -> None:
        self.loop = loop
        self.lifecycle = lifecycle
        self.connections = connections
        self.management = management
        self.network = network
        self.membership = membership
        self.suspects = suspects
        self.peers = peers
        self.processes = processes
        self.addresses = named.addresses
        now = self.loop.now()
        self.voter = Voter(promise_s(network.heartbeat_timeout_s), now)
        self.voter.bind(named.lease_us / US)
        self.holds = ""  # address of the standby, if it runs on this host
        # This node looks for another manager only after this failure detector has fired. The lease
        # expires earlier, even if the manager is merely late.
        self._silence = Silence(now, network.heartbeat_timeout_s)
        self._poll_at = now
        self.channel: ControlChannel | None = None  # channel to the standby until it leads
        self._host_id = 0  # id of the standby's host
        self._offered = False
        self._calling = False
        self._alone_since: float | None = None
        self._found_at = -ALONE_S  # time at which a manager was last found
        # time of the vote, until the candidate leads
        self._voted_at: float | None = None
        self._endpoints = [endpoint_of(parse_address(address)) for address in named.addresses]
        # Addresses of the manager that this node follows before it votes. The standby's address may
        # be among them, and the standby ignores NoLeader, so the addresses are tried in sequence.
        self._former = tuple(endpoint_at(*where) for where in membership.start.manager)
        self._asked = 0  # number of requests to the former manager
        self._is_unled = False  # no manager has led for a long time since this node voted
        self._asking = False
        if not management.is_near:
            self._poll()

    # -- messages from the manager -------------------------------------------------------------

    def named(self, message: StandbyAnnounced) -> None:
        """Handles a repeated announcement of the standby by the manager."""
        self.voter.bind(message.lease_us / US)

    def leads(self, message: LeaderHeartbeat) -> None:
        """Handles the heartbeat with which the manager announces that it leads in a term."""
        voter, now = self.voter, self.loop.now()
        # A late loop reads the message late. This delay does not count as the manager's silence.
        self._silence.heard(min(now, self._poll_at))
        if not voter.hear(message.term, message.at, message.lists, now):
            _log.warning("ignoring a manager with an older term")
            self.management.drop("its term is over")
            self.lost()
            return
        if self._voted_at is not None:
            self._voted_at, self._is_unled = None, False
            words = "the cluster's manager is now at %s: join there"
            _log.warning(words, " or ".join(self.addresses))
        answer = LeaderHeartbeatAck(
            self.management.client.number, voter.term, message.sent_us, voter.version
        )
        self.management.send(answer)

    def knows(self) -> VoterState:
        """This node's record of terms, for a restarted manager and for the standby."""
        return VoterState(self.management.client.number, self._knowledge)

    @property
    def _knowledge(self) -> Knowledge:
        known = self.voter.knowledge
        if known.latest is None:
            return known
        here = {self.management.client.number, *self.membership.members, *self.suspects.members}
        return known._replace(gone=tuple(node for node in known.latest.nodes if node not in here))

    def ends(self) -> VoterEnded:
        """The last message from this node. It promises that the node never votes again, so that the
        manager's lease no longer depends on the node."""
        return VoterEnded(self.management.client.number)

    @property
    def has_voted(self) -> bool:
        """Whether this node has voted for a standby, and therefore never follows its first manager
        again."""
        return bool(self.voter.voted_for)

    @property
    def is_electing(self) -> bool:
        """Whether this node has voted for a candidate that does not lead yet."""
        return self._voted_at is not None

    # -- without a manager ---------------------------------------------------------------------

    def lost(self) -> None:
        """Handles the end of the connection to the manager."""
        now = self.loop.now()
        if self._alone_since is None:
            self._alone_since = now
        if self.has_voted:
            return
        # A manager that was suspended for a long time is no longer in charge, and immediately
        # closes each connection. Pause before calling it again.
        pause_s = self._found_at + self.network.heartbeat_interval_s - now
        if pause_s > 0:
            self.loop.call_later(pause_s, self._call_again)
        else:
            self._call_manager()

    def _call_manager(self) -> None:
        """Calls the manager, which its supervisor may restart at the same address."""
        self.network.call(self._manager_called, ALONE_S)

    def _manager_called(self, admission: Admission | None) -> None:
        alone = self._alone_since is not None and not self.lifecycle.stopping
        if admission is None:
            if alone and not self.has_voted:
                self.loop.call_later(self.network.heartbeat_interval_s, self._call_again)
        elif alone and not self.has_voted:
            self.voter.heard_at = self.loop.now()
            self._found()
            self.management.found(admission)
        else:
            admission.stream.close()

    def _found(self) -> None:
        """Records that a manager was found, and starts a new failure detector for it."""
        self._alone_since, self._found_at = None, self.loop.now()
        self._silence = Silence(self._found_at, self.network.heartbeat_timeout_s)

    def _call_again(self) -> None:
        if self._alone_since is not None and not self.has_voted:
            self._call_manager()

    def _poll(self) -> None:
        """Called once in each heartbeat interval."""
        if self.lifecycle.stopping:
            return
        now = self.loop.now()
        interval_s = self.network.heartbeat_interval_s
        if now - self._poll_at > interval_s:  # the loop is late, and heartbeats may still be unread
            self._silence.excuse(now - self._poll_at)
        wanted = self._wants_another(now)
        if not wanted and self.channel is not None:
            self.channel.close("the manager has returned")
        elif wanted and self.channel is None and not self._calling:
            self._call()
        else:
            self._offer(now)
        if self._voted_at is not None and now - self._voted_at > ALONE_S:
            _log.warning("term %d has no leader: this node votes again", self.voter.term)
            self._voted_at, self._is_unled = None, True
            self.management.drop("it does not lead")
            self.lost()
        if self._is_unled and self._alone_since is not None and not self._asking:
            self._ask_former()
        if self._alone_since is not None:
            # The standby refuses a promotion unless a voting node has a list of the hosts.
            may_follow = self.channel is not None and bool(self.voter.lists)
            patience_s = PROMOTE_WAIT_S if may_follow else ALONE_S
            if now - self._alone_since > patience_s:
                _log.error("no manager was found for %.3g s", now - self._alone_since)
                self.lifecycle.given_up = True
                self.lifecycle.leave()
                return
        free_in = self.voter.free_at - now
        next_in = free_in if 0 < free_in < interval_s else interval_s
        self._poll_at = now + next_in
        self.loop.call_later(next_in, self._poll)

    def _wants_another(self, now: float) -> bool:
        """Whether this node considers the manager lost."""
        return self._alone_since is not None or self._silence.deadline <= now

    def _offer(self, now: float) -> None:
        if self.channel is None or self._offered:
            return
        if self.voter.is_free(now) and self._wants_another(now):
            self._offered = True
            self.channel.send(encode(self.knows()))

    def _call(self) -> None:
        self._calling = True
        make = functools.partial(
            self.connections.call,
            self._endpoints,
            role="voter",
            mine=self.peers.mine,
            timeout_s=CALL_S,
            cluster=self.membership.cluster,
            rounds_max=1,
        )
        PeerDialing(self.loop, make, "the standby", self._called, logging.INFO).begin()

    def _called(self, admission: Admission | None) -> None:
        self._calling = False
        if admission is None:
            return
        self._offered, self._host_id = False, admission.peer.host_id
        latest = self.voter.knowledge.latest
        if self._alone_since is not None and latest is not None and len(latest.nodes) <= ALONE_MAX:
            words = (
                "no manager is running: if its host is lost, run `hoplite-mp promote %s` within "
                "%.0f s"
            )
            _log.warning(words, " or ".join(self.addresses), PROMOTE_WAIT_S)
        self.channel = ControlChannel(
            self.loop,
            admission.stream,
            node_decoder(),
            self._from_standby,
            self._standby_lost,
            shared=True,
        )
        # Handle bytes that arrived together with the end of the handshake: they do not wake the
        # loop.
        self.channel.ready()
        self._offer(self.loop.now())

    def _standby_lost(self, reason: str) -> None:
        _log.info("the connection to the standby ended: %s", reason)
        self.channel = None

    def _from_standby(self, message: Any) -> None:
        if not isinstance(message, VoteRequest) or self.channel is None:
            return
        before = self._knowledge
        if not self.voter.vote(message.term, message.candidate, self.loop.now()):
            self.channel.close("this node is not free to vote")
            return
        _log.warning("this node votes for the standby, in term %d", message.term)
        channel, self.channel = self.channel, None
        self._found()
        self._voted_at = self.loop.now()
        where = [(int(end.family), tuple(end.sockaddr)) for end in self._endpoints]
        self.membership.manager_is_at(where)
        self.management.follow(
            channel, VoteGranted(self.management.client.number, message.term, before), self._host_id
        )

    def _ask_former(self) -> None:
        """Asks the manager from before the vote whether it is still in charge. If so, it has
        declared this node lost, but could not notify the node, because the vote has ended their
        connection."""
        self._asking = True
        endpoint = self._former[self._asked % len(self._former)]
        self._asked += 1
        make = functools.partial(
            self.connections.call,
            [endpoint],
            role="voter",
            mine=self.peers.mine,
            timeout_s=CALL_S,
            cluster=self.membership.cluster,
            rounds_max=1,
        )
        PeerDialing(
            self.loop, make, "the former manager", self._former_called, logging.DEBUG
        ).begin()

    def _former_called(self, admission: Admission | None) -> None:
        if admission is None:
            self._asking = False
            return
        channel = ControlChannel(
            self.loop, admission.stream, node_decoder(), self._from_former, self._former_lost
        )
        self.loop.call_later(CALL_S, lambda: channel.close("it has not answered"))
        channel.send(encode(NoLeader(self.voter.term)))

    def _former_lost(self, reason: str) -> None:
        self._asking = False

    def _from_former(self, message: Any) -> None:
        # If this node has voted again, it first waits for that candidate.
        if isinstance(message, DeclaredDead) and self._alone_since is not None:
            _log.warning(
                "the manager has continued without this host, which has voted: this node stops"
            )
            self.management.cut_off("the manager has excluded this host")

    # -- the standby itself --------------------------------------------------------------------

    def hold(self) -> None:
        """Lets the supervisor start the standby if one of its addresses belongs to this host."""
        if not self.membership.start.accepts_drivers:
            return  # this node stops with its driver, so the standby must not be on its host
        here = set(self.connections.own_addresses()) | {self.peers.listens_at}
        for address in map(parse_address, self.addresses):
            if address.host in here:
                self._hold_at(address)
                return

    @property
    def keeper(self) -> Member | None:
        """The member whose host has one of the standby's addresses, if it has joined."""
        wanted = {parse_address(address).host for address in self.addresses}
        for member in self.membership.members.values():
            if member.stays and wanted & {
                parse_address(address).host for address in member.addresses
            }:
                return member
        return None

    def _hold_at(self, address: Address) -> None:
        ask = StartStandby(
            node=self.management.client.number,
            addresses=list(self.addresses),
            cluster=self.membership.cluster,
            certificate=self.membership.certificate,
        )
        try:
            self.processes.start_standby(ask, address)
        except ConfigError as error:
            _log.error("the standby cannot start on this host at %s: %s", address, error)
            return
        self.holds = str(address)
