"""The node's process: its sockets, its loop, and what wakes it.

Why it exists: one place on each host that owns what processes share and survives each of them. It
sleeps in epoll; clients that changed a word it cares about write its eventfd.
It must never know: Python values, user code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp import _shm, _tasks
from hoplite_mp.client.channel import PACKET_BYTES_MAX
from hoplite_mp.config import Config
from hoplite_mp.node.core.membership import Alone
from hoplite_mp.node.core.rooms import Rooms
from hoplite_mp.node.core.wiring import Upward
from hoplite_mp.node.output.output import Output
from hoplite_mp.node.shell.client_lines import ClientLines
from hoplite_mp.node.shell.epoll_loop import EpollLoop
from hoplite_mp.node.shell.processes import Processes
from hoplite_mp.node.shell.spill_file import SpillFile
from hoplite_mp.node.shell.stacks import Stacks
from hoplite_mp.protocol.local import (
    GIVEN_UP,
    Exited,
    FromSupervisor,
    NotSpawned,
    Request,
    Spawned,
    Start,
)

if TYPE_CHECKING:
    from hoplite_mp.node.core.lan import Lan

__all__ = ["Node", "main"]

NODE_SLOT, DRIVER_SLOT = 0, 1
OUTPUT_PATIENCE_S = 0.8


class Node:
    """Of one host."""

    def __init__(self, start: Start, supervisor_fd: int, manager_fd: int) -> None:
        self.start = start
        self.config = config = Config(**start.config)
        self.client = _shm.NodeClient(start.control_fd, start.store_fd, NODE_SLOT, start.event_fd)
        self.tasks = _tasks.Tasks(self.client)
        self.loop = EpollLoop()
        self.supervisor = socket.socket(fileno=supervisor_fd)
        self.event_fd = start.event_fd
        self.lines = ClientLines(self.loop, self)
        self.upward = Upward()
        self.lan: Lan | None = None
        self.output = Output(
            socket.socket(fileno=start.output_fd),
            config,
            self.client.home,
            lambda: self.client.number,
            self.loop,
            None if start.lan is None else config.output_wait_s,
            self.upward,
        )
        self.rooms = self.upward.rooms = Rooms(
            start,
            config,
            manager_fd,
            self.loop,
            self.client,
            self.tasks,
            self.lines,
            Processes(self.supervisor, self.connect, self.leave),
            lambda workers: Stacks(self.loop, self.tasks, workers),
            SpillFile(config.spill_dir, config.spill_bytes_max),
            self.output,
            self.upward,
        )
        self._supervisor_decoder = msgspec.msgpack.Decoder(FromSupervisor)

    def leave(self) -> None:
        """The supervisor is gone."""
        self.rooms.life.leave()

    def connect(
        self, slot: int, line: socket.socket, out: int, err: int, audience: int = 0
    ) -> None:
        """A worker's line and the reading ends of its pipes."""
        for stream, read in enumerate((out, err), 1):
            self.output.add(read, stream, slot, audience, self.pipe_ended)
        self.rooms.workers.pipes[slot] = [out, err]
        self.lines.add(slot, line)

    # -- what comes in -------------------------------------------------------------------------

    def request(self, slot: int, request: Request, given: list[int]) -> None:
        """A process of this host asks; see shell/client_lines.py."""
        self.rooms.requests.take(slot, request, given)

    def line_ended(self, slot: int) -> None:
        """Of a worker, or a driver that has attached; when our parent ends, the supervisor ends
        us."""
        if self.lan is not None:
            self.lan.drivers.line_ended(slot)
        self.rooms.workers.line_ended(slot)

    def collective_refused(self, ask: Any, why: str) -> None:
        self.rooms.operations.refuse(ask, why)

    def from_supervisor(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.supervisor, PACKET_BYTES_MAX, 1)
        if not data:
            self.rooms.life.workers_ended()
            return
        message = self._supervisor_decoder.decode(data)
        if isinstance(message, Spawned):
            self.rooms.workers.spawned(message.slot, message.pid)
        elif isinstance(message, NotSpawned):
            self.rooms.workers.not_started(message.why)
            self.exited(Exited(message.slot, 0, 0))
        elif isinstance(message, Exited):
            self.exited(message)
        elif fds:
            self.rooms.management.again(fds[0])

    def pipe_ended(self, fd: int) -> None:
        """A worker's pipe has been closed, so its number may come again."""
        for pipes in self.rooms.workers.pipes.values():
            if fd in pipes:
                pipes.remove(fd)

    def exited(self, message: Exited) -> None:
        """A worker has ended, of itself or not: everything of its is settled, a new one starts."""
        slot, rooms = message.slot, self.rooms
        worker = rooms.workers.all.pop(slot, None)
        for fd in rooms.workers.pipes.pop(slot, ()):
            if fd in self.output.pipes:
                self.output.drain(fd)
        again = rooms.ends.settle(slot, worker, message.code)
        if self.lan is not None:
            self.lan.given.lose(slot)
        rooms.resources.worker_gone(slot)
        rooms.workers.exited(worker, message.code, again)
        rooms.rounds.exited(slot)
        rooms.workers.close_owned(slot)
        self.client.unregister(slot)
        self.look()

    # -- the loop ------------------------------------------------------------------------------

    def look(self) -> None:
        """Words in shared memory may have changed."""
        done = self.rooms.begin_turn()
        if self.lan is not None:
            self.lan.look(done)
        self.rooms.end_turn()

    def run(self) -> None:
        """Until the host ends."""
        start, rooms = self.start, self.rooms
        self.loop.watch(self.supervisor.fileno(), self.from_supervisor)
        self.loop.watch(self.event_fd, self._drain_event)
        self.client.register(DRIVER_SLOT, 1, 0)
        rooms.store.lease_first_span(DRIVER_SLOT)
        self.tasks.set_pid(DRIVER_SLOT, start.driver_pid)
        self.tasks.set_pid(NODE_SLOT, os.getpid())
        self.lines.add(DRIVER_SLOT, socket.socket(fileno=start.rpc_fd))
        if start.lan is not None:
            from hoplite_mp.node.core.lan import Lan

            ends = self.lines, self.look
            self.lan = self.upward.lan = Lan(rooms, start, start.lan, self.upward, *ends)
        else:
            at_start = start.workers, socket.gethostname()
            alone = Alone(rooms.host, rooms.workers, rooms.resources, *at_start)
            self.upward.alone = alone
            rooms.requests.add(alone.handlers)
        rooms.management.join()
        rooms.workers.open_first(
            start.workers, DRIVER_SLOT, [slot for slot, *_ in start.first_workers]
        )
        for slot, line, out, err in start.first_workers:
            self.connect(slot, socket.socket(fileno=line), out, err)
        rooms.pages.begin()
        try:
            while not rooms.life.stopping:
                self.turn()
        finally:
            if self.lan is not None:
                self.lan.drivers.close()
        self.finish_output()
        rooms.management.farewell()
        if rooms.management.pulse is not None:
            rooms.management.pulse.stop()

    def finish_output(self) -> None:
        """The host ends: what its workers wrote goes to their drivers, to the last byte, and what
        workers elsewhere have written for its own driver comes; within a bounded time."""
        deadline = self.loop.now() + OUTPUT_PATIENCE_S
        # It has ended, and would say so all the time.
        self.loop.unwatch(self.supervisor.fileno())
        self.output.drain_all()
        if self.lan is not None and self.rooms.life.orderly:
            self.lan.far_output.ask_last_lines(self.lan.peers.met)
        while not (self.output.quiet and (self.lan is None or self.lan.all_said)):
            left = deadline - self.loop.now()
            if left <= 0:
                return
            self.serve(left)
            if self.lan is not None:
                self.lan.far_output.look()

    def turn(self) -> None:
        """Once round."""
        pulse = self.rooms.management.pulse
        if pulse is not None:
            pulse.turned_at = self.loop.now()
        self.loop.call_due()
        self.client.set_sleeping(True)
        self.look()
        due = self.loop.due
        self.serve(None if due is None else max(0.0, due - self.loop.now()))

    def serve(self, timeout: float | None) -> None:
        """What comes in; waits for it at most so many seconds."""
        ready = self.loop.wait(timeout)
        self.client.set_sleeping(False)
        self.loop.serve(ready)

    def _drain_event(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.event_fd, 8)


def main(start: Start, supervisor_fd: int, manager_fd: int) -> int:
    """Runs in the forked child until the host ends."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    node = Node(start, supervisor_fd, manager_fd)
    node.run()
    return GIVEN_UP if node.rooms.life.given_up else 0
