"""This node's connection to its manager: joining, sending, and finding the next manager.

If the manager's process dies while the cluster is running, its supervisor starts another one at the
same address. Until the node has found the new manager, only work that needs a new plan (the
manager's list of transfers) is blocked. A new manager starts without state, so each node reports
its objects and open requests.

    joined ──► lost without ClusterEnded ──► called again ──► reported ──► as before
                      │                           └─ no answer: the node stops; its host may rejoin
                      └─ if the manager is on this host: the supervisor provides the connection
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._node.dispatch import complete
from hoplite_mp._node.io.control_channel import ControlChannel
from hoplite_mp._protocol.codec import BEAT, encode, node_decoder
from hoplite_mp._protocol.membership import OperationEnded, ReportComplete
from hoplite_mp._protocol.messages import (
    ClientLost,
    ClusterEnded,
    Commit,
    DeclaredDead,
    ExecutionFailed,
    FetchFailed,
    Forget,
    HostMeasured,
    LinkMeasured,
    ManagerToNode,
    NodeJoined,
    NodeLeaving,
    OperationFailed,
)
from hoplite_mp._protocol.terms import LeaderHeartbeat, StandbyAnnounced, TermsToNode, VoteRequest
from hoplite_mp._transport.stream import Silence
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hoplite_mp import _shm
    from hoplite_mp._node.dispatch import ManagerHandler
    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._node.roster import NodeLifecycle
    from hoplite_mp._protocol.membership import NodeReturned
    from hoplite_mp._protocol.messages import Member
    from hoplite_mp._protocol.terms import VoteGranted, VoterEnded, VoterState
    from hoplite_mp._transport.conversation import Admission
    from hoplite_mp._transport.stream import ByteStream


__all__ = ["HeartbeatSender", "ManagerConnection"]


# Timeout for the manager's silence, as a multiple of a node's heartbeat_timeout_s. It is longer
# than for a node, because this node stops when it loses the manager.
MANAGER_SILENCES = 5.0
# How long a node waits for a lost manager. Higher: slower restarts succeed. Lower: a host that is
# cut off from the manager rejoins sooner.
MANAGER_ABSENT_S = 10.0
# Maximum numbers of messages that are kept for the next manager. SENT_MAX: messages of the types in
# ONCE, which no component reports again. ENDED_MAX: ends of operations, which the last manager may
# not have sent to every node. The messages are small, and a dying manager cannot leave as many of
# them unread.
SENT_MAX = 1024
ENDED_MAX = 1024
ONCE = (
    FetchFailed,
    ExecutionFailed,
    ClientLost,
    NodeLeaving,
)
ENDS = frozenset((Commit, OperationFailed, Forget))

_log = logging.getLogger("hoplite_mp")


class ManagerConnectionEvents(Protocol):
    """Requests from this component to the components above it."""

    def answer_standing(self) -> None:
        """Answers programs that are waiting for this node to join or to fail."""

    def joining(self, incarnation: int) -> NodeJoined:
        """The first message to the manager. incarnation: the number of this attempt to join."""

    def returning(self, incarnation: int) -> NodeReturned:
        """The first message to a new manager, after this node has joined."""

    def report(self) -> Iterator[Any]:
        """Yields the state of this node's components for a new manager."""


class ManagerNetwork(Protocol):
    """Connections to a manager on another host."""

    connect_timeout_s: float
    heartbeat_interval_s: float
    heartbeat_timeout_s: float

    def connect(self) -> Admission:
        """Makes the first connection. Blocks, and raises the errors of
        `OutgoingConnection.wait`."""

    def call(self, done: Callable[[Admission | None], None], timeout_s: float) -> None:
        """Calls `done` with a connection to the leading manager, or with None if none is found."""

    def failover(self, named: StandbyAnnounced) -> FailoverInterface:
        """Creates the Failover after the manager has named a standby."""


class FailoverInterface(Protocol):
    """Terms and votes, in a cluster that has a standby (_node/manager_link/failover.py)."""

    addresses: tuple[str, ...]
    holds: str

    @property
    def keeper(self) -> Member | None:
        """The member whose host has one of the standby's addresses, if it has joined."""

    @property
    def is_electing(self) -> bool:
        """Whether this node has voted for a candidate that does not lead yet."""

    def leads(self, message: LeaderHeartbeat) -> None:
        """Handles the heartbeat with which the manager announces that it leads in a term."""

    def named(self, message: StandbyAnnounced) -> None:
        """Handles a repeated announcement of the standby by the manager."""

    def hold(self) -> None:
        """Starts the standby if this is its host."""

    def lost(self) -> None:
        """Handles the end of the connection to the manager."""

    def ends(self) -> VoterEnded:
        """The last message to a manager."""

    def knows(self) -> VoterState:
        """This node's record of terms, for a restarted manager."""


class ManagerConnection:
    """The connection from this node to its manager."""

    def __init__(
        self,
        loop: LoopPort,
        client: _shm.NodeClient,
        lifecycle: NodeLifecycle,
        manager: ByteStream | None,
        events: ManagerConnectionEvents,
    ) -> None:
        """manager: the connection to a manager on this host, or None if the manager is on another
        host."""
        self.loop = loop
        self.client = client
        self.lifecycle = lifecycle
        self.events = events
        self._handlers: dict[type, ManagerHandler] = {}
        self.network: ManagerNetwork | None = None  # None in a cluster of one host
        self.is_near = manager is not None
        self._near = manager
        self.channel: ControlChannel | None = None
        self.heartbeat_sender: HeartbeatSender | None = None
        self.failover: FailoverInterface | None = None  # None if there is no standby
        self.other_host_id: int | None = None  # id of the manager's host; None: this host
        self.join_error: tuple[str, str] | None = None
        self._losses = 0
        self._incarnation = 0  # counts attempts to join
        self._join_until = 0.0
        self.ended = False  # the manager has announced the end of the cluster
        self._sent: deque[Any] = deque(maxlen=SENT_MAX)
        self._measured: dict[int, Any] = {}  # latest measurements by peer; -1: this host's own link
        self._ends: deque[Commit | OperationFailed | Forget] = deque(maxlen=ENDED_MAX)

    # -- messages ------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Sends a message to the manager. If no manager is connected, drops the message, because
        the next manager receives a report. Messages not covered by the report are kept for the next
        manager."""
        if isinstance(message, ONCE):
            self._sent.append(message)
        elif isinstance(message, HostMeasured):
            self._measured[-1] = message
        elif isinstance(message, LinkMeasured) and message.bytes_per_s is None:
            # Rates between pairs of hosts are not kept, because the next manager would mistake old
            # rates for new ones. They are measured again.
            self._measured[message.peer] = message
        if self.channel is not None:
            self.channel.send(encode(message))

    def serve(self, *parts: Mapping[type, ManagerHandler]) -> None:
        """Sets the handlers of all messages from managers to nodes."""
        self._handlers = complete(ManagerToNode | TermsToNode, *parts)

    @property
    def manager_handlers(self) -> dict[type, ManagerHandler]:
        """Handlers of messages about the manager and about terms."""
        return {
            ClusterEnded: self._cluster_ended,
            DeclaredDead: self._given_up,
            LeaderHeartbeat: self._led,
            StandbyAnnounced: self._standby_named,
            VoteRequest: self._vote_asked,
        }

    def _take(self, message: Any) -> None:
        kind = type(message)
        if kind in ENDS:
            self._ends.append(message)
        self._handlers[kind](message)

    def _cluster_ended(self, _: ClusterEnded) -> None:
        self.ended = True

    def _given_up(self, message: DeclaredDead) -> None:
        why = f"was silent for {message.silent_s:.1f} s"
        _log.warning(
            "the manager has excluded this host, which %s",
            why if message.silent_s else "lost contact with another host",
        )
        # A leaving node is not considered lost.
        self.lifecycle.given_up = not self.lifecycle.stopping

    def _led(self, message: LeaderHeartbeat) -> None:
        if self.failover is not None:
            self.failover.leads(message)

    def _vote_asked(self, _: VoteRequest) -> None:
        """Ignores a standby's repeated request for a vote that this node has already given it: the
        node follows that standby."""

    def _standby_named(self, message: StandbyAnnounced) -> None:
        if self.failover is not None:
            self.failover.named(message)
        elif self.network is not None:
            self.failover = self.network.failover(message)

    # -- joining -------------------------------------------------------------------------------

    def join(self) -> None:
        """Joins the cluster. If the manager is on another host, blocks until it has answered."""
        stream = self._near
        if stream is None:
            assert self.network is not None
            self._join_until = self.loop.now() + self.network.connect_timeout_s
            try:
                admission = self.network.connect()
            except HopliteError as error:
                self.join_error = type(error).__name__, str(error)
                self.events.answer_standing()
                return
            self.other_host_id, stream = admission.peer.host_id, admission.stream
        self._speak(stream, [self.events.joining(self._incarnation)])

    def announce_leaving(self) -> bool:
        """Notifies the manager that this host is no longer needed. Returns False if that is not
        possible yet because no manager has admitted this node."""
        if self.lifecycle.joined:
            self.send(NodeLeaving(self.client.number, self._incarnation))
        return self.lifecycle.joined

    def _join_again(self, reason: str) -> bool:
        """Asks the next manager for admission, because the first one died before it admitted this
        node. Returns False if there will be no other manager or the time for joining has run
        out."""
        left, network = self._join_until - self.loop.now(), self.network
        if network is None or self.is_near or self.ended or self.lifecycle.given_up or left <= 0:
            return False
        _log.info("the manager has not admitted this node: %s", reason)
        self._incarnation += 1

        def called(admission: Admission | None) -> None:
            if admission is None:
                self._admission_failed(reason)
            else:
                self.other_host_id = admission.peer.host_id
                self._speak(admission.stream, [self.events.joining(self._incarnation)])

        network.call(called, left)
        return True

    def _admission_failed(self, reason: str) -> None:
        self.join_error = "ManagerLostError", f"the manager has not admitted this node: {reason}"
        self.events.answer_standing()
        self.lifecycle.leave()

    def admitted(self) -> None:
        """Called when the manager has admitted this node."""
        if self.failover is not None and not self.is_near:
            self.failover.hold()

    @property
    def host_id(self) -> int:
        """The id of the manager's host."""
        return self.client.host_id if self.other_host_id is None else self.other_host_id

    @property
    def standby(self) -> tuple[tuple[str, ...], str, int, bool]:
        """Describes the standby for `status`, as a tuple of four values: its addresses; its address
        on this host, or ""; the number of the member whose host has one of the addresses, or -1;
        and whether that host runs the manager."""
        failover = self.failover
        if failover is None:
            return (), "", -1, False
        member = failover.keeper
        at, leads = (-1, False) if member is None else (member.node, member.host_id == self.host_id)
        return failover.addresses, failover.holds, at, leads

    def _speak(self, stream: ByteStream, messages: list[Any]) -> None:
        channel = ControlChannel(
            self.loop,
            stream,
            node_decoder(),
            self._take,
            self._lost,
            shared=not self.is_near,
        )
        self._use(channel, messages)

    def _use(self, channel: ControlChannel, messages: list[Any]) -> None:
        self.channel = channel
        if not self.is_near:
            assert self.network is not None
            self.heartbeat_sender = HeartbeatSender(
                channel.beat,
                self.loop,
                self._silent,
                interval_s=self.network.heartbeat_interval_s,
                patience_s=MANAGER_SILENCES * self.network.heartbeat_timeout_s,
            )
            channel.received = self.heartbeat_sender.received
        for message in messages:
            channel.send(encode(message))
        # Handle bytes that arrived together with the end of the handshake: they do not wake the
        # loop.
        if channel.open:
            channel.ready()

    # -- loss of the manager -------------------------------------------------------------------

    def _lost(self, reason: str) -> None:
        """Handles the end of the connection. Unless the manager has announced the end of the
        cluster, the node waits for another manager."""
        lifecycle, channel = self.lifecycle, self.channel
        self.channel = None
        if self.heartbeat_sender is not None:
            self.heartbeat_sender.stop()
        if not lifecycle.joined and self._join_again(reason):
            return
        if not lifecycle.joined and not self.ended:
            self._admission_failed(reason)
        elif self.ended or lifecycle.stopping or not lifecycle.joined or lifecycle.given_up:
            lifecycle.leave()
        elif self.is_near:
            _log.info("the manager is gone: %s", reason)
            self._losses += 1
            losses = self._losses
            self.loop.call_later(MANAGER_ABSENT_S, lambda: self._still_alone(losses))
        elif self.failover is not None:
            _log.info("the connection to the manager ended: %s", reason)
            self.failover.lost()
        else:
            _log.info("the connection to the manager ended: %s", reason)
            assert self.network is not None
            broken = channel is None or channel.stream.failure is not None
            self.network.call(lambda found: self._called(found, broken), MANAGER_ABSENT_S)

    def _still_alone(self, losses: int) -> None:
        if self.channel is None and self._losses == losses:
            _log.error("the manager was not restarted")
            self.lifecycle.leave()

    def _called(self, admission: Admission | None, broken: bool) -> None:
        if admission is None:
            # If the connection is broken, perhaps only this host is cut off, and it may rejoin.
            self.lifecycle.given_up = broken
            self.lifecycle.leave()
        else:
            self.found(admission)

    def found(self, admission: Admission) -> None:
        """Follows a restarted manager, and reports to it."""
        self.other_host_id = admission.peer.host_id
        self._return(admission.stream)

    def follow(self, channel: ControlChannel, vote: VoteGranted, host_id: int) -> None:
        """Makes the standby at the other end of this channel the manager of this node. host_id: the
        id of the standby's host."""
        self.other_host_id = host_id
        self.drop("another manager leads")
        channel.hand_over(self._take, self._lost)
        self._use(channel, [vote, *self._report()])

    @property
    def is_here(self) -> bool:
        """Whether the manager is on this host."""
        return self.host_id == self.client.host_id

    @property
    def waits_for_votes(self) -> bool:
        """Whether a standby may take over and then decide which hosts are lost. This is so if this
        node has no manager, or has voted for a candidate that does not lead yet."""
        failover = self.failover
        return failover is not None and (self.channel is None or failover.is_electing)

    def drop(self, why: str) -> None:
        """Stops following this manager. The node will follow the next manager that it finds."""
        channel, self.channel = self.channel, None
        if self.heartbeat_sender is not None:  # stop its failure detector
            self.heartbeat_sender.stop()
        if channel is not None:
            channel.hand_over(lambda message: None, lambda reason: None)
            channel.close(why)

    def farewell(self) -> None:
        """Announces that this node is stopping, so that the node is not considered lost, and the
        manager's lease no longer depends on it."""
        if self.lifecycle.orderly and not self.is_here:
            self.announce_leaving()
        if self.failover is not None:
            self.send(self.failover.ends())

    def again(self, stream: ByteStream) -> None:
        """Called when the supervisor has restarted the manager on this host."""
        if self.channel is not None:  # first handle the dead manager's last messages
            self.channel.drain()
        self._return(stream)

    def _silent(self, seconds: float) -> None:
        """Handles a manager that has been silent for too long. Its host or this one is cut off."""
        # With a standby, `_lost` looks for another manager.
        if self.failover is not None and self.channel is not None:
            self.channel.close(f"it has been silent for {seconds:.1f} s")
            return
        self.cut_off(f"it has been silent for {seconds:.1f} s")

    def cut_off(self, why: str) -> None:
        """Ends this incarnation of the node. The host may join again."""
        self.lifecycle.given_up = True
        if self.channel is not None:
            self.channel.close(why)
        else:
            self.lifecycle.leave()

    # -- a new manager -------------------------------------------------------------------------

    def _return(self, stream: ByteStream) -> None:
        begun = self.loop.now()
        messages = list(self._report())
        self._speak(stream, messages)
        _log.info(
            "reported this node's state to another manager in %.3f s", self.loop.now() - begun
        )

    def _report(self) -> Iterator[Any]:
        number = self.client.number
        yield self.events.returning(self._incarnation)
        yield from self.events.report()
        for end in self._ends:
            yield OperationEnded(number, end)
        yield from self._measured.values()
        yield from self._sent
        if self.failover is not None:
            yield self.failover.knows()
        yield ReportComplete(number)


# Heartbeats to the manager, and a failure detector for the manager.
#
# A stopped or disconnected host does not close its connections. A thread sends the heartbeats, so
# that a loop that is busy reading a large file does not appear dead. The thread stops sending
# HUNG_S after the loop's last turn, so that a hanging loop does not appear alive.


# Maximum duration of one turn of the loop. Higher: a host with a slow disk is not declared lost.
# Lower: a hanging loop blocks the other hosts for a shorter time.
HUNG_S = 30.0


class HeartbeatSender:
    """The heartbeats of one node. The node's loop sets `turned_at` to the time of its latest
    turn."""

    def __init__(
        self,
        send: Callable[[bytes], object],
        loop: LoopPort,
        lost: Callable[[float], None],
        *,
        interval_s: float,
        patience_s: float,
    ) -> None:
        """send: sends a heartbeat to the manager; called in a thread. lost: called with the seconds
        for which the manager has been silent."""
        self._send = send
        self._loop = loop
        self._lost = lost
        self._interval_s = interval_s
        self._over = False
        now = loop.now()
        self.turned_at = now
        self._silence = Silence(now, patience_s)
        self._poll_at = now + interval_s
        self._end = loop.repeat_in_thread(interval_s, self._beat, "hoplite_mp heartbeats")
        loop.call_later(interval_s, self._poll)

    def received(self) -> None:
        """Called when a message from the manager has arrived."""
        # A late loop reads the message late. This delay does not count as the manager's silence.
        self._silence.heard(min(self._loop.now(), self._poll_at))

    def stop(self) -> None:
        """Stops the heartbeats and the failure detector."""
        self._over = True
        self._end()

    def _beat(self) -> None:
        if self._loop.now() - self.turned_at < HUNG_S:
            self._send(BEAT)

    def _poll(self) -> None:
        """Checks for silence. A late loop calls this timer before it reads the heartbeats that have
        arrived, so the loop's delay does not count as silence."""
        if self._over:
            return
        now = self._loop.now()
        late = now - self._poll_at
        if late > self._interval_s:
            self._silence.excuse(late)
        elif self._silence.deadline <= now:
            self._lost(now - self._silence.heard_at)
            return
        self._poll_at = now + self._interval_s
        self._loop.call_later(self._interval_s, self._poll)
