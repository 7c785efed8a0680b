"""The additional components of a node in a cluster of several hosts.

In such a cluster a node listens for peers, receives the list of members from the manager, and
passes messages from other hosts to their components. A cluster of one host imports none of this.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from hoplite_mp._node.actors.actor_backup import ActorBackups
from hoplite_mp._node.actors.actor_failover import ActorFailover
from hoplite_mp._node.actors.remote_actors import RemoteActors
from hoplite_mp._node.dispatch import complete
from hoplite_mp._node.execution.plan_cells import PlanCells
from hoplite_mp._node.execution.plan_runner import PlanRunner
from hoplite_mp._node.execution.transfers import Transfers
from hoplite_mp._node.groups.attempts import AttemptBytes
from hoplite_mp._node.groups.engine_commit import EngineCallsOwner
from hoplite_mp._node.groups.group_calls import MultiHostCalls
from hoplite_mp._node.groups.group_results import GroupResults
from hoplite_mp._node.lineage.recovery import Recovery
from hoplite_mp._node.manager_link.failover import ManagerDialing
from hoplite_mp._node.manager_link.membership import NodeMembership
from hoplite_mp._node.objects.import_requests import Locations
from hoplite_mp._node.objects.replicas import Replicas
from hoplite_mp._node.output.remote_output import RemoteOutput
from hoplite_mp._node.peers.link_estimator import Probing
from hoplite_mp._node.peers.links import Links
from hoplite_mp._node.peers.peers import Peers, Suspects
from hoplite_mp._node.runtime import tables
from hoplite_mp._node.runtime.drivers import Drivers
from hoplite_mp._node.runtime.peer_loss import pass_on
from hoplite_mp._node.store.growing_block import GrowingBlocks
from hoplite_mp._node.tasks.draining import Draining
from hoplite_mp._node.tasks.worker_recycling import WorkerRecycling
from hoplite_mp._protocol.greetings import Introduction, software_versions
from hoplite_mp._protocol.group_calls import GroupMessage
from hoplite_mp._protocol.local import (
    DrainNode,
    GroupBlockWritten,
    GroupDoorbell,
    LeavingNodes,
    Locate,
    Reply,
)
from hoplite_mp._protocol.local_groups import PointToPoint
from hoplite_mp._protocol.messages import (
    Credentials,
    Distribute,
    FetchRefused,
    Leave,
    MembersChanged,
    NodeAdmitted,
    Withdraw,
)
from hoplite_mp._protocol.peers import (
    Evacuated,
    OutputFlushed,
    OutputFlushRequest,
    PathCongested,
    PeerLeaving,
    PeerMessage,
    Probe,
    ProbeResponse,
    RemoveNode,
    WorkersReport,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.dispatch import Handler, ManagerHandler, PeerHandler
    from hoplite_mp._node.ports import (
        ClientSocketsPort,
        Connections,
        DriverListenerPort,
        EnginePort,
    )
    from hoplite_mp._node.runtime.components import Components
    from hoplite_mp._node.runtime.node_events import ClusterNodeEvents
    from hoplite_mp._protocol.local import LanStart, Request, Start
    from hoplite_mp._protocol.messages import Member
    from hoplite_mp._transport.conversation import Admission

__all__ = ["ClusterNode"]

# How long a task may wait while a worker on another host is idle. Lower: the loop runs more often.
STEAL_POLL_S = 0.02
_log = logging.getLogger("hoplite_mp")


class ClusterNode:
    """The components that only a node in a cluster of several hosts has."""

    def __init__(
        self,
        local: Components,
        start: Start,
        network: LanStart,
        connections: Connections,
        engine: EnginePort,
        driver_listener: DriverListenerPort,
        node_events: ClusterNodeEvents,
        lines: ClientSocketsPort,
        poll: Callable[[], None],
    ) -> None:
        """node_events: this constructor stores in it the components to which it passes events.
        poll: called after words in shared memory have changed."""
        self.local = local
        self.host = host = local.host
        self.connections = connections
        self.driver_listener = driver_listener
        self.membership = NodeMembership(
            host, local.workers, local.resources, start.workers, network
        )
        self.suspects = Suspects(
            network.heartbeat_timeout_s, host.loop, host.send_manager, local.number, self._lost_many
        )
        self._stealing = False  # a timer for `_steal_again` is running
        introduction = Introduction(host.client.host_id, software_versions())
        self.peers = Peers(host, network, connections, self.take, self.lost, introduction)
        self.remote_output = RemoteOutput(
            local.output,
            self.peers.send,
            host.roster.number_of,
            self.peers.host_id_of,
            lambda slot: bool(host.tasks.running(slot)),
            host.client.note_printed,
        )
        self._make_transfers(engine)
        self.draining = Draining(host, local.inbound_tasks, local.workers, node_events)
        self._make_drivers(lines, poll)
        self.locations = Locations(host)
        self.probing = Probing(local.number, local.questions, host.send_manager)
        self.recovery = Recovery(
            host,
            self.replicas,
            local.inbound_tasks,
            self.suspects,
            local.resources,
            local.workers,
            node_events,
        )
        self._make_actors(node_events)
        node_events.membership, node_events.suspects = self.membership, self.suspects
        node_events.peers, node_events.remote_output = self.peers, self.remote_output
        node_events.drivers, node_events.recovery = self.drivers, self.recovery
        node_events.replicas, node_events.transfers = self.replicas, self.transfers
        node_events.plan_runner = self.plan_runner
        # HostNode calls these methods, too. In a cluster of one host it calls NoOtherHosts
        # (node.py).
        self.line_ended = self.drivers.line_ended
        self.worker_exited = self.streaming_sources.lose
        self.poll_output = self.remote_output.poll
        self.close_listener = driver_listener.close
        local.counters.add(self._counts)
        local.waits.add("transfers", self.transfers.waits)
        local.waits.add("actor calls", self.remote_actors.waits)
        self._peer_handlers = complete(PeerMessage, self._peer_table())
        local.management.network = self._dialing()
        if not network.manager:
            self._open()

    def _dialing(self) -> ManagerDialing:
        local = self.local
        return ManagerDialing(
            self.host.loop,
            local.lifecycle,
            self.connections,
            local.management,
            self.membership,
            self.suspects,
            self.peers,
            local.processes,
            self._open,
        )

    def _make_transfers(self, engine: EnginePort) -> None:
        """Creates the components that move bytes between hosts, for copies, collectives and
        Groups."""
        local, host = self.local, self.host
        self.replicas = Replicas(
            local.results,
            local.imports,
            local.exports,
            local.remote_objects,
            self.peers.send,
            host.loop,
        )
        self.links = Links(host, self.peers, engine)
        self.streaming_sources = GrowingBlocks(local.store, host.client, self.links.engine)
        cells = PlanCells(host, self.links)
        self.plan_runner = PlanRunner(host, cells, self.replicas, self.streaming_sources)
        self.transfers = Transfers(host, self.replicas, self.plan_runner)
        self.engine_calls = EngineCallsOwner(host, self.links)
        results = GroupResults(host, self.plan_runner)
        attempt_bytes = AttemptBytes(host, results)
        self.group_calls = MultiHostCalls(host, results, attempt_bytes, self.engine_calls)
        cells.pairs.when_slow(self.group_calls.attempts.slowed)
        cells.pairs.when_slow(self.plan_runner.slowed)
        local.groups.hosts = self.group_calls
        local.remote_objects.fetcher = self.transfers
        local.operations.plan_runner = self.plan_runner

    def _make_drivers(self, lines: ClientSocketsPort, poll: Callable[[], None]) -> None:
        """Creates the components for attached drivers and their workers."""
        local, host = self.local, self.host
        self.worker_recycling = WorkerRecycling(
            host, local.output, local.workers, local.worker_broadcasts
        )
        self.drivers = Drivers(
            host,
            lines,
            local.ends,
            local.output,
            self.remote_output,
            self.peers,
            local.workers,
            local.outbound_tasks,
            self.streaming_sources,
            self.worker_recycling,
            poll,
        )

    def _make_actors(self, node_events: ClusterNodeEvents) -> None:
        """Creates the components for actors on other hosts and for actor failover."""
        local, host = self.local, self.host
        owners = self.recovery.owners
        self.remote_actors = RemoteActors(
            host,
            local.actors,
            local.workers,
            local.outbound_tasks,
            local.inbound_tasks,
            owners,
            node_events,
        )
        self.backups = ActorBackups(host, local.actors, owners, node_events)
        node_events.actor_failover = ActorFailover(
            host,
            local.actors,
            self.remote_actors,
            self.backups,
            local.workers,
            local.outbound_tasks,
            local.inbound_tasks,
            owners,
        )
        node_events.remote_actors, node_events.backups = self.remote_actors, self.backups

    @property
    def handlers(self) -> dict[type, Handler]:
        """Handlers of requests that only a node in a cluster of several hosts handles."""
        return {
            **self.membership.handlers,
            **self.drivers.handlers,
            LeavingNodes: self._asked_leaving,
            DrainNode: self._asked_to_drain,
            Locate: lambda slot, request: self.locations.ask(slot, request.number, request.ask.oid),
            GroupDoorbell: self._doorbell,
            GroupBlockWritten: lambda slot, request: self.streaming_sources.write(
                slot, request.ask.payload, request.ask.ranges
            ),
        }

    @property
    def manager_handlers(self) -> dict[type, ManagerHandler]:
        """Handlers of messages from the manager about other hosts."""
        return {
            **self.recovery.owners.manager_handlers,
            Credentials: self._take_credentials,
            NodeAdmitted: self._admitted,
            MembersChanged: self._members_changed,
            Distribute: self.transfers.distribute,
            Withdraw: self.transfers.withdraw,
            FetchRefused: self.transfers.refused,
            Leave: self._leave,
        }

    def _peer_table(self) -> dict[type, PeerHandler]:
        local = self.local
        return {
            **tables.object_table(
                local.exports,
                local.imports,
                local.inbound_tasks,
                self.replicas,
                self.locations,
                self.recovery,
            ),
            **tables.task_table(
                local.inbound_tasks,
                local.outbound_tasks,
                local.workers,
                local.pool_requests,
                local.worker_broadcasts,
                local.resources,
                self.membership,
            ),
            **tables.inspection_table(
                local.counters,
                local.tracing,
                local.waits,
                self.remote_output,
                self.peers.relays,
            ),
            **dict.fromkeys(tables.ANSWERS, local.questions.answered),
            Probe: lambda host_id, message: self.peers.send(host_id, ProbeResponse(message.number)),
            PathCongested: lambda host_id, message: self.plan_runner.cells.congested(host_id),
            OutputFlushRequest: self._driver_leaves,
            OutputFlushed: self._last_lines,
            WorkersReport: lambda host_id, message: self._have_workers(host_id, message.count),
            RemoveNode: lambda host_id, message: self.draining.begin(),
            PeerLeaving: self._leaves,
            Evacuated: lambda host_id, message: self.draining.evacuated(host_id),
            **self.remote_actors.peer_handlers,
            **self.backups.peer_handlers,
            **dict.fromkeys(get_args(GroupMessage), self._by_number(self.group_calls.receive)),
            **dict.fromkeys(get_args(PointToPoint), self._by_number(local.messages.receive)),
        }

    def _by_number(self, receive: Callable[[int, Any], None]) -> PeerHandler:
        """Returns a handler that passes the sender's node number, not its host id, to
        `receive`."""

        def handler(host_id: int, message: Any) -> None:
            number = self.host.roster.number_of(host_id)
            if number is not None:
                receive(number, message)

        return handler

    def _driver_leaves(self, host_id: int, message: OutputFlushRequest) -> None:
        self.remote_output.last_lines_asked(host_id, message)
        self.worker_recycling.driver_ended(message.output_owner or host_id)

    def _doorbell(self, slot: int, request: Request) -> None:
        ask: Any = request.ask
        self.engine_calls.doorbell(slot, ask.generation, ask.rank, self.local.requests.given)
        self.host.reply(slot, Reply(request.number))

    def _counts(self) -> dict[str, int]:
        sent, received = self.links.moved()
        sent, received = sent + self.peers.traffic.sent, received + self.peers.traffic.received
        retried = self.local.outbound_tasks.retried + self.recovery.reconstruction.begun
        return {"bytes_sent": sent, "bytes_received": received, "tasks_retried": retried}

    def _open(self) -> None:
        """Starts to accept connections from other nodes."""
        membership, peers = self.membership, self.peers
        roles: dict[str, Callable[[Admission], None]] = {
            "peer": peers.admitted,
            "data": lambda admission: peers.admitted(admission, self.links.admitted),
        }
        peers.listens_at = self.connections.listen(
            membership.cluster, membership.certificate, peers.mine, roles
        )

    # -- messages from the manager -------------------------------------------------------------

    def _take_credentials(self, message: Credentials) -> None:
        # A new manager sends the credentials again, although this node is already listening.
        if not self.peers.listens_at:
            self.membership.certificate = message.pem
            self._open()

    def _admitted(self, message: NodeAdmitted) -> None:
        if self.local.lifecycle.joined and self.membership.members:
            self._update_members(message)
            return
        self._set_number(message.node)
        self.membership.numbers = message.given
        for member in message.members:
            self._member_joined(member)
        self.probing.begin(m for m in message.members if m.node != message.node)

    def _members_changed(self, message: MembersChanged) -> None:
        self.suspects.confirm(message.removed)
        for number in message.removed:
            self._member_gone(number)
            if number in message.left:
                self.membership.has_left(number)
            self.recovery.report(number)
        self.backups.are_gone(message.removed)
        for member in message.added:
            self._member_joined(member)

    def _leave(self, _: Leave) -> None:
        self.host.client.set_removed()
        self.local.lifecycle.leave()

    def _update_members(self, message: NodeAdmitted) -> None:
        """Updates the members from a new manager's list, which may differ from this node's."""
        found = {member.node: member for member in message.members}
        members = self.membership.members
        for number, member in list(members.items()):
            if number not in found or found[number].incarnation != member.incarnation:
                self._member_gone(number)
        self.membership.numbers = message.given  # includes nodes that this node has never met
        gone = set(range(message.given)) - set(found)
        self.suspects.confirm(gone)
        self.suspects.again()
        for number in gone:  # the manager may be waiting for this report
            self.recovery.report(number)
        self.backups.are_gone(gone)
        for number, member in found.items():
            if number not in members and number not in self.suspects.members:
                self._member_joined(member)

    def _set_number(self, number: int) -> None:
        """Handles this node's admission to the cluster. number: as assigned by the manager."""
        self.host.client.set_number(number)
        if self.membership.start.accepts_drivers:
            introduction = msgspec.structs.replace(self.peers.mine, node=number)
            # Open the listener before answering the join waiters, because programs may attach
            # immediately afterwards.
            self.driver_listener.open(self.drivers, self.membership.cluster, introduction)
        self.local.lifecycle.joined = True
        self.local.management.admitted()
        self.local.join_waiters.answer()

    def _member_joined(self, member: Member) -> None:
        self.membership.peer_joined(member)
        self.peers.peer_joined(member)
        if member.host_id != self.host.client.host_id:
            self.local.outbound_tasks.set_runner(member.host_id, member.node, member.workers)
            self.local.resources.peer_joined(member)
            if self.membership.workers_now is not None:
                self.peers.send(member.host_id, WorkersReport(self.membership.workers_now))
            self.draining.tell(member.host_id)
            self.local.tracing.peer_joined(member.host_id)
            self.peers.let_in(member.host_id)
            self.backups.peer_joined()
            self.recovery.peer_joined(member.host_id)

    def _have_workers(self, host_id: int, count: int) -> None:
        """Records that the host `host_id` has `count` workers in its common pool."""
        member = self.membership.have_workers(host_id, count)
        if member is not None:
            self.local.outbound_tasks.set_runner(host_id, member.node, count)
            self.local.resources.peer_joined(member)

    def _member_gone(self, number: int) -> None:
        member = self.membership.remove(number)
        if member is None:
            return
        pass_on(member, self.loss_receivers())

    def loss_receivers(self) -> dict[str, Callable[[Member], None]]:
        """The method of each component that handles the loss of a host. `PHASES` (peer_loss.py)
        defines their order."""
        local = self.local
        return {
            "peers": self.peers.peer_lost,
            "backups": self.backups.peer_lost,
            "recovery": self.recovery.peer_lost,
            "resources": local.resources.peer_lost,
            "outbound_tasks": local.outbound_tasks.peer_lost,
            "inbound_tasks": local.inbound_tasks.peer_lost,
            "links": self.links.peer_lost,
            "paths": self.plan_runner.cells.pairs.peer_lost,
            "replicas": self.replicas.peer_lost,
            "messages": local.messages.peer_lost,
            "group_calls": self.group_calls.peer_lost,
            "draining": self.draining.peer_lost,
            "workers": local.workers.peer_lost,
            "remote_actors": self.remote_actors.peer_lost,
            "backups elsewhere": self.backups.backup_peer_lost,
            "remote_output": self.remote_output.peer_lost,
            "worker_recycling": self.worker_recycling.peer_lost,
            "tracing": local.tracing.peer_lost,
            "questions": local.questions.peer_lost,
            "exports": local.exports.peer_lost,
            "remote_objects": local.remote_objects.peer_lost,
        }

    def lost(self, member: Member) -> None:
        """Treats a member as lost because this node has lost contact with it. The manager later
        decides which of the two nodes is excluded."""
        if member.node in self.membership.members:
            self._member_gone(member.node)
            self.suspects.add(member)

    def _lost_many(self, count: int) -> None:
        """Stops this node if it has lost most of the other nodes, because this node is then
        probably the one that is cut off. The manager then need not decide which to exclude."""
        management = self.local.management
        most = count > max(1, len(self.peers.by_host_id))
        if most and not (management.is_here or management.waits_for_votes):
            management.cut_off(f"this host has lost contact with {count} others")

    # -- peers ---------------------------------------------------------------------------------

    def take(self, host_id: int, message: Any) -> None:
        """Handles a message from another node. An exception is only logged, so that a faulty peer
        does not stop this host."""
        try:
            self._peer_handlers[type(message)](host_id, message)
        except Exception:
            _log.exception("cannot handle %s from node %#x", type(message).__name__, host_id)

    def _last_lines(self, host_id: int, message: OutputFlushed) -> None:
        self.remote_output.last_lines_sent(host_id, message)
        self.drivers.poll_leaving()

    def _leaves(self, host_id: int, message: PeerLeaving) -> None:
        self._have_workers(host_id, 0)
        self.local.outbound_tasks.drain(host_id)
        self.remote_actors.leaves(host_id)
        self.draining.leaves(host_id)

    # -- shutdown of the node ------------------------------------------------------------------

    def ask_last_lines(self) -> None:
        """Asks the other nodes for the remaining output of their workers for this host's driver."""
        self.remote_output.ask_last_lines(self.peers.met)

    @property
    def all_sent(self) -> bool:
        """Whether all output from other hosts has arrived, and all messages to other nodes have
        left this process."""
        return self.remote_output.quiet and self.peers.flushed

    # -- processes on this host ----------------------------------------------------------------

    def _asked_leaving(self, slot: int, request: Request) -> None:
        self.host.reply(slot, Reply(request.number, self.draining.numbers))

    def _asked_to_drain(self, slot: int, request: Request) -> None:
        """Handles a local process's request to remove a node from the cluster."""
        number = request.ask.node  # type: ignore[union-attr]
        member = self.membership.members.get(number)
        why = ""
        if member is None:
            why = f"node h{number} is gone"
        elif member.host_id == self.local.management.host_id:
            why = f"node h{number} runs the manager, without which the whole cluster shuts down"
        elif number == self.local.number():
            self.draining.begin()
        else:
            self.peers.send(member.host_id, RemoveNode())
        self.host.reply(slot, Reply(request.number, None, why, gone=member is None))

    def poll(self, done: list[int]) -> None:
        """Polls these components, because words in shared memory may have changed. done: the tasks
        in the node's own tables that have ended."""
        local = self.local
        local.inbound_tasks.completed(done)
        local.outbound_tasks.hand_out()
        if self.remote_actors.closing:
            self.remote_actors.poll()
        if local.outbound_tasks.steal() and not self._stealing:
            self._stealing = True
            self.host.loop.call_later(STEAL_POLL_S, self._steal_again)
        self.remote_output.poll()
        local.remote_objects.purge()
        self.recovery.poll()

    def _steal_again(self) -> None:
        """Wakes the loop, so that its next turn tries again to move waiting tasks to idle workers
        on other hosts. No message notifies this node that a worker has become idle."""
        self._stealing = False
