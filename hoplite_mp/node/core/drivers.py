"""Drivers that attach to this node: programs of the same user on this host, not its parent.

Why it exists: a host has one store and one set of workers, whoever uses them. A driver finds the
node by the name that `Meeting` keeps, proves that it has the token as a stranger of the network
does, and becomes a client like any other: a slot, a line, and both memories. It goes in two steps.
When its line ends it has left: its tasks stop, its refs go. When its connection ends, or its
process, nothing is read there any more: its pins and blocks go too, and the slot is free.
It must never know: what drivers do; workers, who are started here and whose ends are reported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from hoplite_mp.client.channel import dump, seqpacket_pair
from hoplite_mp.protocol.foreign import UsersOfNode
from hoplite_mp.protocol.local import Attached, NotAttached, Reply
from hoplite_mp.protocol.output import audience_name
from hoplite_mp.transport.door import Door
from hoplite_mp.transport.rendezvous import Meeting, peer_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.core.client_ends import ClientEnds
    from hoplite_mp.node.core.membership import Membership
    from hoplite_mp.node.membership.peers import Peers
    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.objects.given import GivenBlocks
    from hoplite_mp.node.output.far_output import FarOutput
    from hoplite_mp.node.output.output import Output
    from hoplite_mp.node.ports import Lines
    from hoplite_mp.node.requests import Handler
    from hoplite_mp.node.tasks.delegation import Delegation
    from hoplite_mp.node.tasks.workers import Workers
    from hoplite_mp.protocol.greetings import Introduction
    from hoplite_mp.protocol.local import Request, Start

__all__ = ["Drivers"]

DRIVER_KIND, TASK_KIND = 1, 2
# Until the next try to take the cluster's name, which another node of this host may have. Lower
# costs a few system calls that often; higher is how long drivers find nobody after its end.
NAME_AGAIN_S = 2.0
# How long a driver that leaves waits for what its tasks have printed on other hosts, at most; and
# how often it is looked whether all of this host has come: nobody says that a pipe is empty.
OUTPUT_PATIENCE_S = 0.8
OUTPUT_LOOK_S = 0.1
_log = logging.getLogger("hoplite_mp")


@dataclass(slots=True, eq=False)
class Driver:
    """One that is attached, or reads on after it has left."""

    slot: int
    generation: int
    line: socket.socket
    life: socket.socket  # its end: nothing is read there any more
    output: socket.socket
    name: int  # where lines of workers are sent
    process: int  # pidfd
    left: bool = False
    output_until: float = 0.0  # how long its last lines may take
    looked_at: bool = False  # there will be another look at its output


class Drivers:
    """All of this host but the one that has started it."""

    def __init__(
        self,
        host: HostContext,
        start: Start,
        membership: Membership,
        mine: Introduction,
        lines: Lines,
        ends: ClientEnds,
        output: Output,
        far_output: FarOutput,
        peers: Peers,
        workers: Workers,
        delegation: Delegation,
        given: GivenBlocks,
        look: Callable[[], None],
    ) -> None:
        """look: words in shared memory have changed."""
        self.config = host.config
        self.loop = host.loop
        self.client = host.client
        self.tasks = host.tasks
        self.store = host.store
        self.roster = host.roster
        self.reply = host.reply
        self.start = start
        self.membership = membership
        self.mine = mine
        self.lines = lines
        self.ends = ends
        self.output = output
        self.far_output = far_output
        self.peers = peers
        self.workers = workers
        self.delegation = delegation
        self.given = given
        self.look = look
        self.by_slot: dict[int, Driver] = {}
        self.meeting: Meeting | None = None
        self.door: Door | None = None
        self._tried = False
        self._ever = 0  # drivers that have come

    @property
    def handlers(self) -> dict[type, Handler]:
        """By kind of request."""
        return {UsersOfNode: self._asked_users}

    def _asked_users(self, slot: int, request: Request) -> None:
        there = sum(not one.left for one in self.by_slot.values())
        self.reply(slot, Reply(request.number, there))

    def open(self) -> None:
        """Lets drivers find this node, as soon as the name of its cluster is free here."""
        cluster, config = self.membership.cluster, self.membership.start
        level = logging.DEBUG if self._tried else logging.WARNING
        self._tried = True
        try:
            self.meeting = Meeting.open(cluster, level)
        except OSError as error:
            _log.log(level, "drivers of this host cannot attach to its node: %s", error)
        if self.meeting is None:
            self.loop.call_later(NAME_AGAIN_S, self.open)
            return
        self.door = Door(
            self.meeting.socket,
            key=config.key,
            service="node",
            cluster=cluster,
            mine=msgspec.structs.replace(self.mine, node=self.client.number),
            certificate=None,  # no byte leaves this host
            handshake_timeout_s=config.handshake_timeout_s,
            unauthenticated_max=config.unauthenticated_max,
        )
        self.loop.watch(self.door.fileno(), self._admit)

    def close(self) -> None:
        """The node ends: nobody is to find it any more."""
        if self.meeting is not None:
            self.meeting.close()

    def name_of(self, slot: int) -> int:
        """Where lines for that driver are sent; 0: no attached one is in that slot."""
        driver = self.by_slot.get(slot)
        return 0 if driver is None else driver.name

    # -- coming --------------------------------------------------------------------------------

    def _admit(self) -> None:
        assert self.door is not None
        for admission in self.door.turn(self.loop.now()):
            if admission.role != "driver":
                admission.stream.close()
                continue
            sock = admission.stream.detach()
            try:
                self._attach(sock)
            except OSError as error:  # it has gone again, or no descriptor is left
                _log.info("a driver could not be attached: %s", error)
                sock.close()
        if self.door.deadline is not None:
            self.loop.call_later(max(0.0, self.door.deadline - self.loop.now()), self._admit_again)

    def _admit_again(self) -> None:
        deadline = None if self.door is None else self.door.deadline
        if deadline is not None and deadline <= self.loop.now():
            self._admit()

    def _attach(self, life: socket.socket) -> None:
        """One that has proved that it has the token gets a slot, and what belongs to it."""
        pid, uid = peer_of(life)
        reason = ""
        if uid != os.geteuid():
            reason = f"it is user {uid}'s, and this node is user {os.geteuid()}'s"
        elif not pid:
            reason = "the node does not see its process: it is in another container"
        elif self.roster.leaves:
            reason = "the node is leaving"
        slot = -1 if reason else self.client.register(0, DRIVER_KIND, 0)
        if slot < 0:
            reason = reason or "every process slot of the host is in use"
            _log.info("a driver is not attached: %s", reason)
            with contextlib.suppress(OSError):
                life.send(dump(NotAttached(reason)))
            life.close()
            return
        generation = self.client.client_info(slot)["generation"]
        with contextlib.ExitStack() as stack:
            stack.callback(self.client.unregister, slot)
            process = os.pidfd_open(pid)
            stack.callback(os.close, process)
            (line, its_line), (output, its_output) = seqpacket_pair(), socket.socketpair()
            for sock in (line, output):
                stack.callback(sock.close)
            with its_line, its_output:
                config = self.config
                name = audience_name(self.client.home, self._ever)
                told = Attached(
                    slot,
                    generation,
                    self.store.limit,
                    config.small_object_bytes_max,
                    config.span_bytes,
                    name,
                )
                start = self.start
                given = [start.control_fd, start.store_fd, start.event_fd]
                given += [its_line.fileno(), its_output.fileno()]
                socket.send_fds(life, [dump(told)], given)
            stack.pop_all()
        self._ever += 1
        driver = Driver(slot, generation, line, life, output, name, process)
        self.output.attach(name, output)
        self.by_slot[slot] = driver
        self.tasks.set_pid(slot, pid)
        self.lines.add(slot, line)
        self.loop.watch(life.fileno(), lambda: self._life(driver))
        self.loop.watch(process, lambda: self._ended(driver))

    # -- going ---------------------------------------------------------------------------------

    def _life(self, driver: Driver) -> None:
        """The connection has ended; nothing else is ever said over it."""
        try:
            said = driver.life.recv(1)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said:
            _log.error("driver %d says what it must not say: it is sent away", driver.slot)
        self._gone(driver)

    def _ended(self, driver: Driver) -> None:
        """The process has ended, though a child of it may have kept its sockets open."""
        poll = select.poll()
        poll.register(driver.process, select.POLLIN)
        if poll.poll(0):  # else it was another one's descriptor of the same number
            self._gone(driver)

    def line_ended(self, slot: int) -> None:
        """It has left, or died: then the end of its process is on the way."""
        driver = self.by_slot.get(slot)
        if driver is not None and not driver.left:
            self._settle(driver, reads_on=True)
            self.look()

    def _gone(self, driver: Driver) -> None:
        if self.by_slot.get(driver.slot) is not driver:
            return
        slot = driver.slot
        self._settle(driver, reads_on=False)
        with contextlib.suppress(OSError):  # nobody reads it, though a child may hold the other end
            driver.output.shutdown(socket.SHUT_RDWR)
        self._finish_output(driver, 0.0)
        self.given.lose(slot)
        del self.by_slot[slot]
        for fd in (driver.life.fileno(), driver.process):
            self.loop.unwatch(fd)
        driver.life.close()
        os.close(driver.process)
        self.client.unregister(slot)
        self.look()

    def _settle(self, driver: Driver, reads_on: bool) -> None:
        """Everything of its that others need is kept, the rest goes."""
        slot = driver.slot
        if driver.left:
            self.ends.settle_again(slot)
            return
        driver.left = True
        self._stop_tasks(slot)
        self.ends.settle(slot, None, 0, reads_on)
        self.workers.close_owned(slot)
        self.far_output.ask_last_lines(self.peers.met, driver.name)
        driver.output_until = self.loop.now() + OUTPUT_PATIENCE_S
        self._finish_output(driver, driver.output_until)

    def look_at_leaving(self) -> None:
        """Another node has sent its last lines for somebody."""
        for driver in list(self.by_slot.values()):
            if driver.left:
                self._finish_output(driver, driver.output_until)

    def _finish_output(self, driver: Driver, until: float) -> None:
        """The last lines of one that leaves come for a moment; then its output ends."""
        output, far = self.output, self.far_output
        if driver.name not in output.attached:
            return
        if self.loop.now() < until and (
            not output.has_all(driver.name) or far.is_asking(driver.name)
        ):
            if not driver.looked_at:
                driver.looked_at = True
                self.loop.call_later(OUTPUT_LOOK_S, lambda: self._look_again(driver))
            return
        output.detach(driver.name, far.busy)
        far.forget(driver.name)

    def _look_again(self, driver: Driver) -> None:
        driver.looked_at = False
        self._finish_output(driver, driver.output_until)

    def _stop_tasks(self, slot: int) -> None:
        """Its tasks that run are interrupted, unless somebody else waits for the result."""
        for header in self.client.concerned(slot):
            oid = header["id"]
            if header["owner"] != slot or header["kind"] != TASK_KIND:
                continue
            if header["state"] == "CLAIMED" and not set(header["refs"]) - {slot}:
                claimant = self.tasks.claimant(oid)
                if self.tasks.cancel(oid, True) and not self.delegation.cancel(oid):
                    self.workers.interrupt(oid, claimant)
