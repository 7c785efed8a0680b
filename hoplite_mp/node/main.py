"""The node's loop: requests of clients, ends of processes, words of the manager, output, timers.

Why it exists: one place on each host that owns what processes share and survives each of them. It
sleeps in epoll; clients that changed a word it cares about write its eventfd.
It must never know: Python values, user code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp import _shm, _tasks
from hoplite_mp.client.channel import PACKET_BYTES_MAX
from hoplite_mp.config import Config
from hoplite_mp.node.actor_looks import actors_here, track_name
from hoplite_mp.node.actors import Actors
from hoplite_mp.node.context import HostContext
from hoplite_mp.node.counters import Counters
from hoplite_mp.node.delegation import Delegation
from hoplite_mp.node.exports import Exports
from hoplite_mp.node.group_waits import group_waits
from hoplite_mp.node.groups import Groups
from hoplite_mp.node.guests import Guests
from hoplite_mp.node.imports import Imports
from hoplite_mp.node.management import Management
from hoplite_mp.node.notes import Notes
from hoplite_mp.node.operations import Operations
from hoplite_mp.node.output import Output
from hoplite_mp.node.pages import Pages
from hoplite_mp.node.places import Places
from hoplite_mp.node.point_to_point import PointToPoint
from hoplite_mp.node.questions import Questions
from hoplite_mp.node.recording import Recording
from hoplite_mp.node.requests import Requests
from hoplite_mp.node.resources import Resources
from hoplite_mp.node.results import Results
from hoplite_mp.node.roster import Roster
from hoplite_mp.node.rounds import Rounds
from hoplite_mp.node.shell.client_lines import ClientLines
from hoplite_mp.node.shell.epoll_loop import EpollLoop
from hoplite_mp.node.shell.processes import Processes
from hoplite_mp.node.shell.spill_file import SpillFile
from hoplite_mp.node.shell.stacks import Stacks
from hoplite_mp.node.store import Store
from hoplite_mp.node.sweeper import Sweeper
from hoplite_mp.node.tracing import Tracing
from hoplite_mp.node.waits import Waits
from hoplite_mp.node.wiring import Upward
from hoplite_mp.node.workers import Workers
from hoplite_mp.protocol.local import (
    GIVEN_UP,
    Exited,
    FromSupervisor,
    NotSpawned,
    Request,
    Spawned,
    Start,
)
from hoplite_mp.protocol.messages import ClientLost, ClusterEnded, GivenUp, Member

if TYPE_CHECKING:
    from hoplite_mp.node.lan import Lan
    from hoplite_mp.node.pools import WorkerInfo
    from hoplite_mp.protocol.peers import PeerMessage

__all__ = ["Node", "main"]

_log = logging.getLogger("hoplite_mp")

NODE_SLOT, DRIVER_SLOT = 0, 1
OUTPUT_PATIENCE_S = 0.8


class Node:
    """Everything that one host has one of."""

    def __init__(self, start: Start, supervisor_fd: int, manager_fd: int) -> None:
        self.config = Config(**start.config)
        self.start = start
        self.client = _shm.NodeClient(start.control_fd, start.store_fd, NODE_SLOT, start.event_fd)
        self.tasks = _tasks.Tasks(self.client)
        self.loop = EpollLoop()
        self.upward = upward = Upward(self)
        self.notes = Notes(self.loop, upward, self.config.trace_events_max)
        self.supervisor = socket.socket(fileno=supervisor_fd)
        self.management = Management(self, manager_fd)
        self.given_up = False  # this host lives, and the others have lost it, or it them
        self.lan: Lan | None = None
        self.standing = start.lan is None  # has it been said what the number is?
        self.event_fd = start.event_fd
        self.lines = lines = ClientLines(self.loop, self)
        self.clients = lines.by_slot
        self.reply, self.replier = lines.reply, lines.replier
        self.add_client, self.forget_line = lines.add, lines.forget
        self.store = Store(
            self.client,
            self.config,
            start.memory_bytes,
            start.store_fd,
            self.loop,
            SpillFile(self.config.spill_dir, self.config.spill_bytes_max),
            self.notes,
            upward,
        )
        self.store.clients = self.clients
        self.results = Results(self.client, self.tasks, self.store, self.config)
        self.sweeper = Sweeper(self.results, upward)
        self.places = Places(self.results, self.loop, upward)
        self.imports = Imports(self.results, self.places, self.send_peer, upward)
        self.exports = Exports(self.results, self.places, self.send_peer, lambda: self.number)
        self.host = HostContext(
            self.config,
            self.loop,
            self.notes,
            self.client,
            self.tasks,
            self.store,
            self.results,
            self.places,
            self.imports,
            self.exports,
            Roster(),
            self.send_manager,
            self.send_peer,
            self.clients,
            self.reply,
            self.replier,
        )
        self.delegation = Delegation(
            self.results, self.imports, self.places, self.send_peer, upward
        )
        self.guests = Guests(self.results, self.imports, self.send_peer, self.notes, upward)
        processes = Processes(self.supervisor, self.connect, self.leave)
        self.workers = Workers(self.host, processes, self.delegation, self.guests, upward)
        self.resources = Resources(self.host, self.delegation, self.workers)
        self.actors = Actors(self.host, self.workers, self.guests, self.resources, upward)
        threads = self.config.reduce_threads or start.cores
        self.operations = Operations(
            self.results,
            self.places,
            self.send_manager,
            threads,
            self.loop,
            self.notes,
            lambda: self.number,
        )
        self.groups = Groups(
            self.client,
            self.tasks,
            self.send_manager,
            self.reply,
            lambda: self.number,
            upward,
        )
        self.groups.messages = self.messages = PointToPoint(self.host)
        self.output = Output(
            socket.socket(fileno=start.output_fd),
            self.config,
            self.client.home,
            lambda: self.number,
            self.loop,
            None if start.lan is None else self.config.output_wait_s,
            upward,
        )
        self.questions = Questions(self.host)
        self.counters = Counters(self.host, self.questions, self.sweeper, self.workers)
        self.counters.add(self.resources.counts)
        recording = Recording(self.host, self._track_name)
        self.tracing = Tracing(self.host, self.questions, recording)
        self.waits = Waits(
            self.host,
            self.questions,
            recording,
            self.workers,
            self.delegation,
            self.guests,
            self.operations,
            Stacks(self.loop, self.tasks, self.workers),
        )
        about = self.groups, self.messages, self.client, self.tasks
        self.waits.add("groups", lambda: group_waits(*about))
        self.waits.add("actors", lambda: actors_here(self.actors))
        self.rounds = Rounds(self.host, self.workers, self.delegation, self.guests, upward)
        self.requests = Requests(self)
        self._supervisor_decoder = msgspec.msgpack.Decoder(FromSupervisor)
        self._stop = self._orderly = False
        self.pages = Pages(self.host, start.workers)

    # -- wiring --------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Among the nodes of the cluster."""
        return self.client.number

    def send_manager(self, message: Any) -> None:
        self.management.send(message)

    def leave(self) -> None:
        """Nobody needs this node any more, or there is no cluster: the supervisor ends the rest of
        the host."""
        self._stop = True

    @property
    def stopping(self) -> bool:
        """Is this the last turn?"""
        return self._stop

    @property
    def members(self) -> tuple[tuple[Member, ...], int]:
        """All nodes of the cluster, as far as the manager has said, and so many numbers were
        given to some."""
        if self.lan is None:
            return (Member(0, 0, self.client.home, self.start.workers),), 1
        lan = self.lan
        return (*lan.members.values(), *lan.missing.members.values()), lan.numbers

    def send_peer(self, home: int, message: PeerMessage) -> bool:
        """To the node of the host with that id; False if there is none."""
        return self.lan is not None and self.lan.peers.send(home, message)

    def lan_lost(self, member: Member) -> None:
        """Another node cannot be reached any more."""
        if self.lan is not None:
            self.lan.lost(member)

    def local_oid(self, object_id: bytes) -> int | None:
        """Where an object of any host lies on this one."""
        return self.imports.local(object_id) or None

    def freed(self, oid: int) -> None:
        """Nobody on this host holds that object any more."""
        self.actors.freed(oid)
        if self.lan is not None:
            self.lan.freed(oid)
        else:
            self.imports.freed(oid)

    def _track_name(self, slot: int, ended: WorkerInfo | None) -> str:
        """Of a trace, for the process in that slot, which may have ended; "": it is no actor's."""
        worker = ended or self.workers.all.get(slot)
        actor = None if worker is None else self.actors.by_pool.get(worker.pool)
        return "" if actor is None else track_name(actor)

    def driver_name(self, slot: int) -> int:
        """Where lines for the driver in that slot are sent; 0: it is the one of this host."""
        return 0 if self.lan is None else self.lan.drivers.name_of(slot)

    def audience_of(self, slot: int) -> int:
        """Who hears what the client in that slot has others print: as for the task that runs there,
        or the driver that it is."""
        running = self.tasks.running(slot)
        return (running and self.tasks.audience(running)) or self.driver_name(slot)

    def set_number(self, number: int) -> None:
        """The manager has let this node in."""
        self.client.set_number(number)
        if self.lan is not None and self.lan.lan.meets_drivers:
            self.lan.drivers.open()  # first: who is told that this node stands may look for it
        self.standing = True
        self.management.admitted()
        self.requests.answer_standing()

    def connect(
        self, slot: int, line: socket.socket, out: int, err: int, audience: int = 0
    ) -> None:
        """A worker's line and the reading ends of its pipes."""
        for stream, read in enumerate((out, err), 1):
            self.output.add(read, stream, slot, audience, self.pipe_ended)
        self.workers.pipes[slot] = [out, err]
        self.add_client(slot, line)

    # -- what comes in -------------------------------------------------------------------------

    def request(self, slot: int, request: Request, given: list[int]) -> None:
        """A process of this host asks; see shell/client_lines.py."""
        self.requests.take(slot, request, given)

    def line_ended(self, slot: int) -> None:
        """Of a worker, or a driver that has attached; when our parent ends, the supervisor ends
        us."""
        if self.lan is not None:
            self.lan.drivers.line_ended(slot)
        self.workers.line_ended(slot)

    def collective_refused(self, ask: Any, why: str) -> None:
        self.operations.refuse(ask, why)

    def from_supervisor(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.supervisor, PACKET_BYTES_MAX, 1)
        if not data:  # all workers have ended
            self._stop = self._orderly = True
            return
        message = self._supervisor_decoder.decode(data)
        if isinstance(message, Spawned):
            self.workers.spawned(message.slot, message.pid)
        elif isinstance(message, NotSpawned):
            self.workers.not_started(message.why)
            self.exited(Exited(message.slot, 0, 0))
        elif isinstance(message, Exited):
            self.exited(message)
        elif fds:
            self.management.again(fds[0])

    def from_manager(self, message: Any) -> None:
        if isinstance(message, ClusterEnded):
            self.management.ended = True
            return
        if isinstance(message, GivenUp):
            why = f"was silent for {message.silent_s:.1f} s"
            _log.warning("this host %s: given up", why if message.silent_s else "lost another")
            self.given_up = not self._stop  # else it was leaving
            return
        if self.lan is not None and self.lan.receive(message):
            return
        if not (self.operations.receive(message) or self.actors.receive(message)):
            self.groups.receive(message)

    def pipe_ended(self, fd: int) -> None:
        """A worker's pipe has been closed, so its number may come again."""
        for pipes in self.workers.pipes.values():
            if fd in pipes:
                pipes.remove(fd)

    def exited(self, message: Exited) -> None:
        """A worker has ended, of itself or not: everything of its is settled, a new one starts."""
        slot = message.slot
        worker = self.workers.all.pop(slot, None)
        generation = self.client.client_info(slot)["generation"]
        for fd in self.workers.pipes.pop(slot, ()):
            if fd in self.output.pipes:
                self.output.drain(fd)
        self.forget_line(slot)
        self.groups.hold_committed(slot)
        self.tracing.recording.exited(slot, worker)
        again = self.sweeper.sweep(slot, worker, message.code)
        self.groups.forget_client(slot)
        self.send_manager(ClientLost(self.number, slot, generation))
        self.requests.forget_client(slot)
        if self.lan is not None:
            self.lan.given.lose(slot)
        self.resources.worker_gone(slot)
        self.workers.exited(worker, message.code, again)
        self.rounds.exited(slot)
        self.workers.close_owned(slot)
        self.client.unregister(slot)
        self.look()

    # -- the loop ------------------------------------------------------------------------------

    def look(self) -> None:
        """Words in shared memory may have changed."""
        done = self.tasks.drain()
        if done:
            self.sweeper.completed(done)
        if self.resources.held or self.resources.rows.rows:
            self.resources.look()
        if self.lan is not None:
            self.lan.look(done)
        self.exports.look()
        self.operations.look()
        again = self.operations.execute_again()
        if again is not None:
            self.loop.call_later(max(0.0, again - self.loop.now()), lambda: None)
        self.results.look()
        self.groups.look()
        self.workers.look()
        self.tracing.recording.look()
        if self.client.news():
            self.sweeper.collect()

    def run(self) -> None:
        self.loop.watch(self.supervisor.fileno(), self.from_supervisor)
        self.loop.watch(self.event_fd, self._drain_event)
        self.client.register(DRIVER_SLOT, 1, 0)
        self.store.lease_first_span(DRIVER_SLOT)
        self.tasks.set_pid(DRIVER_SLOT, self.start.driver_pid)
        self.tasks.set_pid(NODE_SLOT, os.getpid())
        self.add_client(DRIVER_SLOT, socket.socket(fileno=self.start.rpc_fd))
        if self.start.lan is not None:
            from hoplite_mp.node.lan import Lan

            self.lan = Lan(self, self.start.lan)
        self.management.join()
        self.workers.open_first(
            self.start.workers, DRIVER_SLOT, [slot for slot, *_ in self.start.first_workers]
        )
        for slot, line, out, err in self.start.first_workers:
            self.connect(slot, socket.socket(fileno=line), out, err)
        self.pages.begin()
        try:
            while not self._stop:
                self.turn()
        finally:
            if self.lan is not None:
                self.lan.drivers.close()
        self.finish_output()
        self.management.farewell()
        if self.management.pulse is not None:
            self.management.pulse.stop()

    def finish_output(self) -> None:
        """The host ends: what its workers wrote goes to their drivers, to the last byte, and what
        workers elsewhere have written for its own driver comes; within a bounded time."""
        deadline = self.loop.now() + OUTPUT_PATIENCE_S
        # It has ended, and would say so all the time.
        self.loop.unwatch(self.supervisor.fileno())
        self.output.drain_all()
        if self.lan is not None and self._orderly:
            self.lan.far_output.ask_last_lines(self.lan.peers.met)
        while not (self.output.quiet and (self.lan is None or self.lan.all_said)):
            left = deadline - self.loop.now()
            if left <= 0:
                return
            self.serve(left)
            if self.lan is not None:
                self.lan.far_output.look()

    def turn(self) -> None:
        if self.management.pulse is not None:
            self.management.pulse.turned_at = self.loop.now()
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
    return GIVEN_UP if node.given_up else 0
