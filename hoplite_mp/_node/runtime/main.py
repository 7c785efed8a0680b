"""The node's process: its sockets and its loop.

One process on each host owns the host's shared resources, and survives the death of a worker or an
attached driver. It sleeps in epoll. A client that has changed a word in shared memory for the node
wakes the node by writing to the node's eventfd.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import TYPE_CHECKING

import msgspec

from hoplite_mp import _shm, _tasks
from hoplite_mp._client.channel import PACKET_BYTES_MAX
from hoplite_mp._common.object_states import NODE_SLOT
from hoplite_mp._node.io.client_sockets import ClientSockets
from hoplite_mp._node.io.epoll_loop import EpollLoop
from hoplite_mp._node.io.processes import SupervisedProcesses, WorkerStacks
from hoplite_mp._node.io.spill_file import SpillFile
from hoplite_mp._node.output.output import Output
from hoplite_mp._node.ports import NodePorts
from hoplite_mp._node.runtime.node import HostNode
from hoplite_mp._node.runtime.node_events import ClusterNodeEvents, NodeEvents
from hoplite_mp._protocol.local import (
    GIVEN_UP,
    Exited,
    FromSupervisor,
    Spawned,
    SpawnFailed,
    Start,
)
from hoplite_mp._transport.stream import TcpStream
from hoplite_mp.config import Config

if TYPE_CHECKING:
    from hoplite_mp import _engine
    from hoplite_mp._node.io.driver_listener import DriverListener
    from hoplite_mp._node.io.tcp_connections import TcpConnections
    from hoplite_mp._protocol.local import LanStart

__all__ = ["NodeProcess", "main"]

BLOCK_BYTES = 256 << 10  # 2 ms at 1 Gbit/s
OUTPUT_PATIENCE_S = 0.8


class NodeProcess:
    """The process of one node."""

    def __init__(self, start: Start, supervisor_fd: int, manager_fd: int) -> None:
        self.start = start
        config = Config(**start.config)
        self.client = _shm.NodeClient(start.control_fd, start.store_fd, NODE_SLOT, start.event_fd)
        self.tasks = tasks = _tasks.Tasks(self.client)
        self.loop = loop = EpollLoop()
        self.supervisor = socket.socket(fileno=supervisor_fd)
        node_events = NodeEvents() if start.lan is None else ClusterNodeEvents()
        self.output = Output(
            socket.socket(fileno=start.output_fd),
            config,
            self.client.host_id,
            lambda: self.client.number,
            loop,
            None if start.lan is None else config.output_wait_s,
            node_events,
        )
        ports = NodePorts(
            loop,
            ClientSockets(loop),
            SupervisedProcesses(self.supervisor, self.connect, self.leave),
            lambda workers: WorkerStacks(loop, tasks, workers),
            SpillFile(config.spill_dir, config.spill_bytes_max),
            socket.gethostname(),
            None if manager_fd < 0 else TcpStream(socket.socket(fileno=manager_fd)),
            *(() if start.lan is None else _to_hosts(loop, start, start.lan)),
        )
        self.node = HostNode(start, config, ports, self.client, tasks, self.output, node_events)
        self.components = self.node.components
        self._supervisor_decoder = msgspec.msgpack.Decoder(FromSupervisor)

    def leave(self) -> None:
        """Stops the node because the supervisor is gone."""
        self.components.lifecycle.leave()

    def connect(
        self, slot: int, line: socket.socket, out: int, err: int, output_owner: int = 0
    ) -> None:
        """Adds a worker that the supervisor is starting or has started. line: this node's end of
        the worker's connection. out, err: the read ends of its output pipes."""
        self.node.worker_joins(slot, line, out, err, output_owner)

    def from_supervisor(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.supervisor, PACKET_BYTES_MAX, 1)
        if not data:
            self.components.lifecycle.workers_ended()
            return
        message = self._supervisor_decoder.decode(data)
        if isinstance(message, Spawned):
            self.components.workers.spawned(message.slot, message.pid)
        elif isinstance(message, SpawnFailed):
            self.components.workers.not_started(message.reason)
            self.node.worker_exited(Exited(message.slot, 0, 0))
        elif isinstance(message, Exited):
            self.node.worker_exited(message)
        elif fds:
            self.components.management.again(TcpStream(socket.socket(fileno=fds[0])))

    # -- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs the loop until the host shuts down."""
        start, components, node = self.start, self.components, self.node
        self.loop.watch(self.supervisor.fileno(), self.from_supervisor)
        self.loop.watch(start.event_fd, self._drain_event)
        node.begin(os.getpid(), socket.socket(fileno=start.rpc_fd))
        for slot, line, out, err in start.first_workers:
            self.connect(slot, socket.socket(fileno=line), out, err)
        components.pages.begin()
        try:
            while not components.lifecycle.stopping:
                self.turn()
        finally:
            node.other_hosts.close_listener()
        self.finish_output()
        components.management.farewell()
        if components.management.heartbeat_sender is not None:
            components.management.heartbeat_sender.stop()

    def finish_output(self) -> None:
        """Forwards the remaining output of this host's workers to their drivers when the host shuts
        down, and waits a bounded time for other hosts' output for this host's driver."""
        deadline = self.loop.now() + OUTPUT_PATIENCE_S
        # The supervisor has exited, so its socket would be ready in every turn.
        self.loop.unwatch(self.supervisor.fileno())
        self.output.drain_all()
        other_hosts = self.node.other_hosts
        if self.components.lifecycle.orderly:
            other_hosts.ask_last_lines()
        while not (self.output.quiet and other_hosts.all_sent):
            left = deadline - self.loop.now()
            if left <= 0:
                return
            self.serve(left)
            other_hosts.poll_output()

    def turn(self) -> None:
        """Runs one turn of the loop."""
        heartbeat_sender = self.components.management.heartbeat_sender
        if heartbeat_sender is not None:
            heartbeat_sender.turned_at = self.loop.now()
        self.loop.call_due()
        self.client.set_sleeping(True)
        self.node.poll()
        due = self.loop.due
        self.serve(None if due is None else max(0.0, due - self.loop.now()))

    def serve(self, timeout: float | None) -> None:
        """Waits at most `timeout` seconds for descriptors, and calls the handlers of the ready
        ones."""
        ready = self.loop.wait(timeout)
        self.client.set_sleeping(False)
        self.loop.serve(ready)

    def _drain_event(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.start.event_fd, 8)


def _to_hosts(
    loop: EpollLoop, start: Start, lan: LanStart
) -> tuple[TcpConnections, _engine.Engine, DriverListener]:
    """The ports to other hosts."""
    from hoplite_mp import _engine
    from hoplite_mp._node.io.driver_listener import DriverListener
    from hoplite_mp._node.io.tcp_connections import TcpConnections

    # With TLS, Python code handles every block, so few large blocks are cheaper.
    block_bytes = _engine.BLOCK_BYTES_MOST if lan.tls else BLOCK_BYTES
    engine = _engine.Engine(lan.host_id, block_bytes)
    return TcpConnections(loop, lan), engine, DriverListener(loop, start, lan)


def main(start: Start, supervisor_fd: int, manager_fd: int) -> int:
    """Runs the node in the forked child until the host shuts down. Returns the exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    process = NodeProcess(start, supervisor_fd, manager_fd)
    process.run()
    return GIVEN_UP if process.components.lifecycle.given_up else 0
