"""One incarnation of a simulated host: real shared memory, the shipped node and client code.

It passes the simulated ports to the node, as _node/runtime/main.py passes the ports of the system,
and acts as the host's supervisor.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from hoplite_mp import _shm, _tasks
from hoplite_mp._client.runtime import Runtime
from hoplite_mp._common.object_states import DRIVER_SLOT, FIRST_SLOT, NODE_SLOT
from hoplite_mp._node.output.output import Output
from hoplite_mp._node.ports import NodePorts
from hoplite_mp._node.runtime.cluster_node import ClusterNode
from hoplite_mp._node.runtime.node import HostNode
from hoplite_mp._node.runtime.node_events import ClusterNodeEvents
from hoplite_mp._protocol.local import SETUP_FAILED, Start
from hoplite_mp._protocol.secret import Secret
from hoplite_mp._protocol.spawning import InheritedContext, LanStart, Spawn
from hoplite_mp._simulation.virtual.connections import VirtualConnections
from hoplite_mp._simulation.virtual.engine import VirtualEngine
from hoplite_mp._simulation.virtual.environment import PORT, address_of
from hoplite_mp._simulation.virtual.host_ports import (
    LOCAL_DELAY_S,
    NoDriverListener,
    NoStacks,
    VirtualClientSockets,
    VirtualDisk,
    VirtualWorkers,
)
from hoplite_mp._simulation.virtual.loop import VirtualLoop
from hoplite_mp._simulation.virtual.processes import VirtualChannel, VirtualCollector
from hoplite_mp._transport.addresses import Address
from hoplite_mp._worker.main import prepare
from hoplite_mp._worker.task_loop import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._protocol.local import Request
    from hoplite_mp._protocol.spawning import Exited, StartStandby
    from hoplite_mp._simulation.virtual.connections import VirtualStream
    from hoplite_mp._simulation.virtual.environment import RunEnvironment
    from hoplite_mp._simulation.virtual.processes import VirtualProcess

__all__ = ["VirtualHost"]

KEY = Secret(b"k" * 32)
FIRST_PID = 10_000  # pids of programs begin here
LEAVE_S = 0.001  # seconds from the end of a program's connection to the end of its process


class _NullOutput:
    """Discards a worker's output; see _worker/stdio.py."""

    def turn_to(self, output_owner: int) -> None: ...

    def finish(self) -> None: ...

    def flush(self) -> None: ...


class VirtualHost:
    """One incarnation of a host. `alive`: whether its node is alive."""

    def __init__(
        self,
        environment: RunEnvironment,
        place: int,
        host_id: int,
        ended: Callable[[VirtualHost, str], None],
        standby: Callable[[VirtualHost, StartStandby], None],
        manager: VirtualStream | None = None,
    ) -> None:
        """place: the number of the machine. host_id: the id of this incarnation. ended: called with
        the reason when the node has ended. standby: called to start a standby here. manager: the
        connection to a manager on the same machine."""
        self.environment = environment
        self.ended = ended
        self.standby = standby
        self.place = place
        self.host_id = host_id
        self.config = config = environment.config_of(place)
        self.alive = True
        self.processes: list[VirtualProcess] = []
        self.programs: dict[VirtualProcess, Callable[[], None]] = {}  # program -> called at its end
        self._request_at = 0.0
        network, descriptors = environment.network, environment.descriptors
        self._open_store(host_id)
        environment.processes.map(self.client, host_id)
        self.loop = VirtualLoop(environment.timeline, network, place, descriptors, self._turn)
        if manager is not None:
            manager.loop = self.loop
        self.client_sockets = VirtualClientSockets(environment.timeline)
        self.workers = VirtualWorkers(environment.timeline, self)
        self.disk = VirtualDisk(environment.sizes.disk)
        self.engine = VirtualEngine(
            network, self.loop, descriptors, host_id, environment.sizes.block
        )
        ours, theirs = socket.socketpair()
        self._sockets = [ours, theirs]
        node_events = ClusterNodeEvents()
        output = Output(
            theirs,
            config,
            host_id,
            lambda: self.client.number,
            self.loop,
            config.output_wait_s,
            node_events,
        )
        ports = NodePorts(
            self.loop,
            self.client_sockets,
            self.workers,
            lambda workers: NoStacks(),
            self.disk,
            f"host{place}",
            manager,
            VirtualConnections(environment.board, self.loop, place, host_id, address_of(place)),
            self.engine,
            NoDriverListener(),
        )
        start = self._start(manager is not None)
        self.node = HostNode(start, config, ports, self.client, self.tasks, output, node_events)
        self._watch_memory()
        self.loop.run(self._begin)

    def _open_store(self, host_id: int) -> None:
        """Creates the shared memory of the host."""
        self.control_fd, self.store_fd = os.memfd_create("control"), os.memfd_create("store")
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        _shm.create(
            self.control_fd,
            self.store_fd,
            host_id,
            store_bytes=self.environment.sizes.store,
            cores=2,
            spin_us_max=0,  # spinning in virtual time would never end
            small_object_bytes_max=self.config.small_object_bytes_max,
            span_bytes=self.config.span_bytes,
        )
        self.client = _shm.NodeClient(self.control_fd, self.store_fd, NODE_SLOT, self.event_fd)
        self.tasks = _tasks.Tasks(self.client)

    def _start(self, leads: bool) -> Start:
        config, environment = self.config, self.environment
        address = address_of(self.place)
        managers = [environment.manager_at, *environment.standby_at]
        lan = LanStart(
            key=KEY,
            host_id=self.host_id,
            host=f"host{self.place}",
            peer_fd=-1,
            addresses=[str(address)],
            ports=(PORT + 1, PORT + 2, 1),
            handshake_timeout_s=config.handshake_timeout_s,
            pending_handshakes_max=config.pending_handshakes_max,
            connect_timeout_s=config.connect_timeout_s,
            heartbeat_interval_s=config.heartbeat_interval_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            tls=False,
            cluster=environment.cluster if leads else b"",
            standby=[str(Address(*at)) for at in environment.standby_at] if leads else [],
            manager=[] if leads else [(int(socket.AF_INET), at) for at in managers],
            accepts_drivers=bool(environment.standby_at),
        )
        inherited_settings = InheritedContext(
            pid=1, authkey=b"", argv=[], faulthandler=False, start_method=""
        )
        return Start(
            sys_path=[],
            control_fd=self.control_fd,
            store_fd=self.store_fd,
            event_fd=self.event_fd,
            supervisor_fd=-1,
            rpc_fd=-1,
            output_fd=-1,
            driver_pid=0,
            workers=environment.workers,
            cores=2,
            memory_bytes=environment.sizes.store,
            config=asdict(config),
            host_id=self.host_id,
            inherited_settings=inherited_settings,
            lan=lan,
            first_workers=[
                (slot, -1, -1, -1) for slot in range(FIRST_SLOT, FIRST_SLOT + environment.workers)
            ],
        )

    def _watch_memory(self) -> None:
        """Makes the run fail if a block is freed that the engine may still use."""
        arena, base = self.node.components.store.arena, self.client.store_address
        free = arena.free

        def watched(start: int, warm: bool = True) -> None:
            self.engine.check_free(base + start, base + start + arena.size_of(start))
            free(start, warm)

        arena.free = watched  # type: ignore[method-assign]

    def _begin(self) -> None:
        self.node.begin(self.host_id, self.channel(DRIVER_SLOT))
        for slot in range(FIRST_SLOT, FIRST_SLOT + self.environment.workers):
            self.workers.start(Spawn(slot, 0, 0, 0))

    def channel(self, slot: int) -> VirtualChannel:
        """Creates a connection for the process in the slot."""
        return VirtualChannel(self, slot, self.environment.processes)

    def runtime(self, slot: int, channel: VirtualChannel, label: str) -> Runtime:
        """Creates the Runtime of a process in the slot."""
        line: Any = channel
        runtime = Runtime(
            self.control_fd, self.store_fd, self.event_fd, slot, line, self.config, label
        )
        self.environment.processes.map(runtime.client, self.host_id)
        if self.environment.collectors:
            submitter, processes = runtime.submitter, self.environment.processes
            submitter.collector = VirtualCollector(submitter, processes, self.run)
        else:
            runtime.submitter.collector.stay_away()
        return runtime

    # -- processes -----------------------------------------------------------------------------

    def request(self, slot: int, request: Request) -> None:
        """Sends a request of a process to the node. Requests arrive in order."""
        timeline = self.environment.timeline
        self._request_at = max(self._request_at, timeline.now + LOCAL_DELAY_S)

        def take() -> None:
            if slot in self.client_sockets.by_slot:
                self.node.request(slot, request, [])

        timeline.at(self._request_at, self.loop.run, take)

    def run(self, name: str, body: Callable[[], object]) -> VirtualProcess:
        """Starts a process on this host."""
        process = self.environment.processes.begin(self.place, name, body, self._process_turned)
        self.processes.append(process)
        return process

    def attach(self, name: str, body: Callable[[Runtime], object]) -> None:
        """Runs a program that attaches to this host's node, calls `body`, and leaves."""
        self.loop.run(partial(self._attach, name, body))

    def _attach(self, name: str, body: Callable[[Runtime], object]) -> None:
        assert self.cluster_node is not None
        drivers = self.cluster_node.drivers
        slot, generation, output_owner, why = drivers.register()
        if slot < 0:
            self.environment.timeline.note(f"host {self.place} does not take {name}: {why}")
            return
        channel = VirtualChannel(self, slot, self.environment.processes, generation << 32)
        output, theirs = socket.socketpair()
        self._sockets += [output, theirs]

        def run_program() -> None:
            runtime = self.runtime(slot, channel, "driver")
            try:
                body(runtime)
            finally:
                if not self.environment.processes.over:
                    runtime.close()
                    runtime.submitter.call_back_at_end()

        def leave() -> None:
            drivers.line_ended(slot)
            self.loop.call_later(LEAVE_S, lambda: drivers.detached(slot))

        process = self.run(name, run_program)
        drivers.attached(slot, output_owner, FIRST_PID + slot, channel, output, theirs.close)

        def ended() -> None:
            self.environment.timeline.note(f"{name} on host {self.place} has ended")
            self.loop.run_soon(leave)

        process.ended = ended
        self.programs[process] = leave

    def kill(self, process: VirtualProcess) -> None:
        """Kills a process, as SIGKILL does."""
        if process in self.programs:
            process.kill()
            self.loop.run_soon(self.programs[process])
        else:
            self.workers.kill_process(process)

    # Called by `VirtualWorkers`.

    def begin_worker(self, request: Spawn) -> VirtualProcess:
        channel = self.channel(request.slot)

        def run_program() -> None:
            runtime = self.runtime(request.slot, channel, f"worker {request.slot}@h")
            output_routing: Any = _NullOutput()
            worker = Worker(runtime, request.pool, request.max_tasks, output_routing)
            process.interrupted = lambda: worker.on_signal(0, None)
            if request.setup and not prepare(worker, request.setup):
                process.code = SETUP_FAILED
            else:
                worker.loop()

        process = self.run(f"worker {request.slot} of host {self.place}", run_program)
        (out, its_out), (err, its_err) = os.pipe(), os.pipe()
        os.close(its_out)
        os.close(its_err)
        self.node.worker_joins(request.slot, channel, out, err, request.output_owner)
        return process

    def worker_started(self, slot: int, pid: int) -> None:
        self.loop.run(partial(self.node.components.workers.spawned, slot, pid))

    def request_standby(self, request: StartStandby) -> None:
        if self.alive:
            self.standby(self, request)

    def worker_ended(self, message: Exited) -> None:
        self.loop.run_soon(partial(self.node.worker_exited, message))

    def _process_turned(self) -> None:
        """Called after a process of this host has run. Runs a turn of the node if the process has
        woken it."""
        if self.alive:
            self.engine.process_turned()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.event_fd)
                self.loop.run_soon(_nothing)

    # -- the node's turns ------------------------------------------------------------------------

    def _turn(self, action: Callable[[], object]) -> None:
        self.client.set_sleeping(False)
        action()
        if not self.alive:
            return
        self.client.set_sleeping(True)
        self.node.poll()
        heartbeat_sender = self.node.components.management.heartbeat_sender
        if heartbeat_sender is not None:
            heartbeat_sender.turned_at = self.loop.now()
        if self.node.components.lifecycle.stopping:
            self.node.components.management.farewell()
            self.ended(self, "its node has ended")

    @property
    def cluster_node(self) -> ClusterNode | None:
        """The node's components for other hosts; None before they are created."""
        found = self.node.other_hosts
        return found if isinstance(found, ClusterNode) else None

    # -- the end -------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The node's number in the cluster; -1 before the node is admitted."""
        return self.client.number if self.node.components.lifecycle.joined else -1

    def die(self) -> None:
        """Ends all processes. `World.end` resets their connections to other hosts."""
        self.alive = False
        self.loop.ended = True
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """Frees everything after the run."""
        with contextlib.suppress(RuntimeError):
            self.engine.end()
        for fd in (self.control_fd, self.store_fd, self.event_fd):
            os.close(fd)
        for fd in self.node.output.pipes:
            if fd >= 0:
                os.close(fd)
        for sock in self._sockets:
            sock.close()


def _nothing() -> None:
    """A turn that only polls shared memory."""
