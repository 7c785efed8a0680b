"""The components of one host's node, built bottom up.

The constructor of each component receives only components below it. This file builds the components
that a cluster of any size needs. The components for clusters of several hosts are built on top of
them in _node/runtime/cluster_node.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._node import trace_events
from hoplite_mp._node.actors import actors
from hoplite_mp._node.collectives.operations import Operations
from hoplite_mp._node.diagnostics.counters import Counters
from hoplite_mp._node.diagnostics.plans import PlanRequests
from hoplite_mp._node.diagnostics.tracing import Recording, Tracing
from hoplite_mp._node.diagnostics.waits import WaitReports
from hoplite_mp._node.dispatch import Requests
from hoplite_mp._node.groups import groups
from hoplite_mp._node.groups.groups import group_waits
from hoplite_mp._node.groups.mailbox import PointToPoint
from hoplite_mp._node.manager_link import connection, membership
from hoplite_mp._node.objects import exports, imports, leases, remote_objects
from hoplite_mp._node.objects.context import HostContext
from hoplite_mp._node.objects.import_requests import ImportRequests
from hoplite_mp._node.objects.results import ResultWriter
from hoplite_mp._node.questions import Questions
from hoplite_mp._node.roster import NodeLifecycle, Roster
from hoplite_mp._node.runtime.peer_loss import ClientCleanup
from hoplite_mp._node.store import budget
from hoplite_mp._node.store.budget import Pages
from hoplite_mp._node.tasks import (
    inbound_tasks,
    outbound_tasks,
    remote_workers,
    sweeper,
    worker_broadcast,
    workers,
)
from hoplite_mp._node.tasks.resources import Resources
from hoplite_mp._node.tasks.retry_delays import RetryDelays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp import _shm, _tasks
    from hoplite_mp._node.output.output import Output
    from hoplite_mp._node.ports import NodePorts
    from hoplite_mp._node.tasks.worker_pools import WorkerInfo
    from hoplite_mp._protocol.peers import PeerMessage
    from hoplite_mp._protocol.spawning import Start
    from hoplite_mp.config import Config

__all__ = ["Components"]


class ComponentsEvents(
    actors.LocalActorsEvents,
    outbound_tasks.OutboundTasksEvents,
    groups.HostGroupsEvents,
    inbound_tasks.InboundTasksEvents,
    exports.ExportsEvents,
    imports.ImportsEvents,
    leases.LeasesEvents,
    connection.ManagerConnectionEvents,
    trace_events.ObjectNames,
    remote_objects.RemoteObjectsEvents,
    remote_workers.PoolRequestsEvents,
    worker_broadcast.WorkerBroadcastsEvents,
    membership.JoinWaitersEvents,
    budget.StoreEvents,
    sweeper.SweeperEvents,
    workers.WorkersEvents,
    Protocol,
):
    """All events and requests that these components send to the components above them."""

    def send_peer(self, host_id: int, message: PeerMessage) -> bool:
        """Sends a message to the node of the host `host_id`. Returns False if there is no such
        node."""


class Components:
    """The components of one node."""

    def __init__(
        self,
        start: Start,
        config: Config,
        ports: NodePorts,
        client: _shm.NodeClient,
        tasks: _tasks.Tasks,
        output: Output,
        events: ComponentsEvents,
    ) -> None:
        loop, lines, processes = ports.loop, ports.lines, ports.processes
        self.output = output
        self.processes = processes
        self.lifecycle = NodeLifecycle(start.lan is None)
        self.requests = Requests()
        self.management = connection.ManagerConnection(
            loop, client, self.lifecycle, ports.manager, events
        )
        self.trace_events = trace_events.TraceEvents(loop, events, config.trace_events_max)
        self.store = budget.Store(
            client,
            config,
            start.memory_bytes,
            start.store_fd,
            loop,
            ports.disk,
            self.trace_events,
            events,
        )
        self.store.clients = lines.by_slot
        self.results = ResultWriter(client, tasks, self.store, config)
        self.sweeper = sweeper.Sweeper(self.results, events)
        self.remote_objects = remote_objects.RemoteObjects(self.results, loop, events)
        self.imports = imports.Imports(self.results, self.remote_objects, events.send_peer, events)
        roster = Roster()
        self.exports = exports.Exports(
            self.results, self.remote_objects, events.send_peer, self.number, loop, roster, events
        )
        self.questions = Questions(loop, roster, events.send_peer)
        # time at which a timer wakes the loop for operations that are waiting for memory; 0.0: none
        self._next_turn_at = 0.0
        self.host = host = HostContext(
            config,
            loop,
            self.trace_events,
            client,
            tasks,
            self.store,
            self.results,
            self.remote_objects,
            self.imports,
            self.exports,
            roster,
            self.questions,
            self.management.send,
            events.send_peer,
            lines.by_slot,
            lines.reply,
            lines.replier,
        )
        self._make_tasks(events)
        self.operations = Operations(host, config.reduce_threads or start.cores)
        self.messages = PointToPoint(host)
        self.groups = groups.HostGroups(host, self.requests, self.messages, events)
        self._make_diagnostics(ports)
        self._make_requests(start.workers, lines.forget, events)

    def _make_tasks(self, events: ComponentsEvents) -> None:
        """Creates the components for tasks, workers and actors."""
        host = self.host
        self.outbound_tasks = outbound_tasks.OutboundTasks(
            self.results, self.imports, self.remote_objects, events.send_peer, events
        )
        self.inbound_tasks = inbound_tasks.InboundTasks(
            self.results, self.imports, events.send_peer, self.trace_events, events
        )
        self.workers = workers.Workers(
            host, self.processes, self.outbound_tasks, self.inbound_tasks, events
        )
        self.resources = Resources(host, self.outbound_tasks, self.workers)
        self.delays = RetryDelays(host, self.workers, self.inbound_tasks, self.resources)
        self.actors = actors.LocalActors(
            host, self.workers, self.inbound_tasks, self.resources, events
        )
        self.worker_broadcasts = worker_broadcast.WorkerBroadcasts(
            host, self.workers, self.outbound_tasks, self.inbound_tasks, events
        )
        self.pool_requests = remote_workers.PoolRequests(
            host,
            self.requests,
            self.sweeper,
            self.workers,
            self.outbound_tasks,
            self.inbound_tasks,
            self.resources,
            events,
        )

    def _make_diagnostics(self, ports: NodePorts) -> None:
        """Creates the components for counters, traces, and reports of waits."""
        host = self.host
        self.counters = Counters(host, self.sweeper, self.workers)
        self.counters.add(self.resources.counts)
        self.plan_requests = PlanRequests(host)
        self.recording = Recording(host, self._track_name)
        self.tracing = Tracing(host, self.recording)
        self.waits = WaitReports(
            host,
            self.recording,
            self.workers,
            self.outbound_tasks,
            self.inbound_tasks,
            self.operations,
            self.delays,
            ports.stacks(self.workers),
        )
        self.waits.add(
            "groups", lambda: group_waits(self.groups, self.messages, host.client, host.tasks)
        )
        self.waits.add("actors", self.actors.describe)

    def _make_requests(
        self, workers: int, forget: Callable[[int], None], events: ComponentsEvents
    ) -> None:
        """Creates the components for requests from processes. forget: called with the slot of a
        process that has exited."""
        host = self.host
        self.pages = Pages(host.config, host.loop, host.client, host.store, workers)
        self.join_waiters = membership.JoinWaiters(
            host, self.requests, self.lifecycle, self.management, events
        )
        self.import_requests = ImportRequests(host, self.requests)
        self.ends = ClientCleanup(
            host, self.groups, self.recording, self.sweeper, self.requests, forget
        )
        self.leases = leases.Leases(host, self.requests, self.pages, events)
        self.requests.when_forgotten(self.tracing.forget_client)
        self.requests.when_forgotten(self.waits.forget_client)

    def number(self) -> int:
        """The number of this node in its cluster."""
        return self.host.client.number

    def _track_name(self, slot: int, ended: WorkerInfo | None) -> str:
        """The name of the trace track for the actor in the slot, or "" if the slot's process is not
        an actor. ended: the slot's worker, if it has exited."""
        worker = ended or self.workers.all.get(slot)
        actor = None if worker is None else self.actors.by_pool.get(worker.pool)
        return "" if actor is None else actor.track_name

    def report(self) -> Iterator[Any]:
        """Yields the messages that a new manager needs from these components."""
        yield from self.operations.report()
        yield from self.groups.report()
        yield from self.actors.report()

    def begin_turn(self) -> list[int]:
        """Reads the words in shared memory that may have changed. Returns the tasks in the node's
        own tables that have ended."""
        done = self.host.tasks.drain()
        if done:
            self.sweeper.completed(done)
        if self.resources.held or self.resources.rows.rows:
            self.resources.poll()
        return done

    def _turn_is_due(self) -> None:
        """Only wakes the loop: the turn itself checks for free memory. A rounding error may start
        that turn slightly too early, and `end_turn` must then set another timer."""
        self._next_turn_at = 0.0

    def end_turn(self) -> None:
        """Polls the components that depend on changes made by `ClusterNode` in this turn."""
        loop = self.host.loop
        self.exports.poll()
        self.operations.poll()
        again, now = self.operations.execute_again(), loop.now()
        if again is not None and not now < self._next_turn_at <= again:  # one timer at a time
            self._next_turn_at = again
            loop.call_later(max(0.0, again - now), self._turn_is_due)
        self.results.poll()
        self.groups.poll()
        self.workers.poll()
        self.recording.poll()
        if self.host.client.news():
            self.sweeper.collect()
