"""One host's node: its components, and one turn of its loop.

The node accesses the outside world only through ports. On a real host it runs in its own process
(main.py), where epoll wakes it. In a simulation many nodes run in one process, and a schedule wakes
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp._common.object_states import CLIENT_DRIVER, DRIVER_SLOT, NODE_SLOT
from hoplite_mp._node.manager_link.membership import SingleHostMembership
from hoplite_mp._node.runtime import tables
from hoplite_mp._node.runtime.components import Components
from hoplite_mp._node.runtime.node_events import ClusterNodeEvents

if TYPE_CHECKING:
    from hoplite_mp import _shm, _tasks
    from hoplite_mp._node.output.output import Output
    from hoplite_mp._node.ports import NodePorts
    from hoplite_mp._node.runtime.cluster_node import ClusterNode
    from hoplite_mp._node.runtime.node_events import NodeEvents
    from hoplite_mp._protocol.local import Request, Start
    from hoplite_mp._protocol.spawning import Exited
    from hoplite_mp.config import Config

__all__ = ["HostNode"]


class NoOtherHosts:
    """Replaces `ClusterNode` in a cluster of one host, and until `ClusterNode` is built."""

    all_sent = True

    def line_ended(self, slot: int) -> None: ...
    def worker_exited(self, slot: int) -> None: ...
    def poll(self, done: list[int]) -> None: ...
    def close_listener(self) -> None: ...
    def ask_last_lines(self) -> None: ...
    def poll_output(self) -> None: ...


class HostNode:
    """One node. Assigns its components to `node_events`, which is a ClusterNodeEvents if and only
    if `start.lan` is given."""

    def __init__(
        self,
        start: Start,
        config: Config,
        ports: NodePorts,
        client: _shm.NodeClient,
        tasks: _tasks.Tasks,
        output: Output,
        node_events: NodeEvents,
    ) -> None:
        self.start = start
        self.ports = ports
        self.client = client
        self.tasks = tasks
        self.output = output
        self.node_events = node_events
        self.other_hosts: NoOtherHosts | ClusterNode = NoOtherHosts()
        self.components = node_events.components = Components(
            start, config, ports, client, tasks, output, node_events
        )
        ports.lines.serve(self)

    def begin(self, process: int, driver: Any) -> None:
        """Joins the cluster and starts the first workers. process: the pid of the node's process.
        driver: the connection to the program that started this host."""
        start, components, ports = self.start, self.components, self.ports
        self.client.register(DRIVER_SLOT, CLIENT_DRIVER, 0)
        components.store.lease_first_span(DRIVER_SLOT)
        self.tasks.set_pid(DRIVER_SLOT, start.driver_pid)
        self.tasks.set_pid(NODE_SLOT, process)
        ports.lines.add(DRIVER_SLOT, driver)
        if start.lan is not None:
            from hoplite_mp._node.runtime.cluster_node import ClusterNode

            assert isinstance(self.node_events, ClusterNodeEvents)
            assert ports.connections is not None
            assert ports.engine is not None
            assert ports.driver_listener is not None
            self.other_hosts = cluster = ClusterNode(
                components,
                start,
                start.lan,
                ports.connections,
                ports.engine,
                ports.driver_listener,
                self.node_events,
                ports.lines,
                self.poll,
            )
            of_hosts, of_manager = cluster.handlers, cluster.manager_handlers
        else:
            alone = SingleHostMembership(
                components.host,
                components.workers,
                components.resources,
                start.workers,
                ports.hostname,
            )
            self.node_events.alone = alone
            of_hosts, of_manager = alone.handlers, tables.ignored_alone()
        of_clients = tables.client_table(components, self.node_events.driver_name)
        components.requests.serve(of_clients, of_hosts)
        components.management.serve(tables.manager_table(components), of_manager)
        components.management.join()
        first = [slot for slot, *_ in start.first_workers]
        components.workers.open_first(start.workers, DRIVER_SLOT, first)

    # -- events --------------------------------------------------------------------------------

    def request(self, slot: int, request: Request, given: list[int]) -> None:
        """Handles a request from a process on this host. given: descriptors sent with the
        request."""
        self.components.requests.take(slot, request, given)

    def line_ended(self, slot: int) -> None:
        """Handles the closed connection of a worker or an attached driver. When the driver that
        started this host exits, the supervisor stops the node instead."""
        self.other_hosts.line_ended(slot)
        self.components.workers.line_ended(slot)

    def refuse_collective(self, ask: Any, why: str) -> None:
        """Fails a collective whose request could not be decoded or handled."""
        self.components.operations.refuse(ask, why)

    def worker_joins(self, slot: int, line: Any, out: int, err: int, output_owner: int = 0) -> None:
        """Adds a worker's connection and the read ends of its output pipes."""
        for stream, read in enumerate((out, err), 1):
            self.output.add(read, stream, slot, output_owner, self._pipe_ended)
        self.components.workers.pipes[slot] = [out, err]
        self.ports.lines.add(slot, line)

    def _pipe_ended(self, fd: int) -> None:
        """Forgets a closed pipe, because its descriptor may be reused for another file."""
        for pipes in self.components.workers.pipes.values():
            if fd in pipes:
                pipes.remove(fd)

    def worker_exited(self, message: Exited) -> None:
        """Cleans up after a worker that has exited for any reason, and starts another if needed."""
        slot, components = message.slot, self.components
        worker = components.workers.all.pop(slot, None)
        for fd in components.workers.pipes.pop(slot, ()):
            if fd in self.output.pipes:
                self.output.drain(fd)
        again = components.ends.settle(slot, worker, message.code)
        self.other_hosts.worker_exited(slot)
        components.resources.worker_gone(slot)
        components.workers.exited(worker, message.code, again)
        components.worker_broadcasts.exited(slot)
        components.workers.close_owned(slot)
        self.client.unregister(slot)
        self.poll()

    # -- one turn ------------------------------------------------------------------------------

    def poll(self) -> None:
        """Polls all components once, because words in shared memory may have changed."""
        done = self.components.begin_turn()
        self.other_hosts.poll(done)
        self.components.end_turn()
