"""Drivers that attach to this node: programs of the same user on this host, not its parent.

Why it exists: a host has one store and one set of workers, whoever uses them. A driver becomes a
client like any other: a slot, a line, and both memories. It goes in two steps. When its line ends
it has left: its tasks stop, its refs go. When its process ends, or needs the memory no more,
nothing is read there any more: its pins and blocks go too, and the slot is free.
It must never know: how drivers find this node (node/shell/driver_door.py), what they do; workers,
who are started here and whose ends are reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hoplite_mp.headers import CLIENT_DRIVER, KIND_TASK
from hoplite_mp.protocol.foreign import UsersOfNode
from hoplite_mp.protocol.local import Reply
from hoplite_mp.protocol.output import audience_name

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from hoplite_mp.node.core.client_ends import ClientEnds
    from hoplite_mp.node.membership.peers import Peers
    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.objects.streaming_source import StreamingSources
    from hoplite_mp.node.output.far_output import FarOutput
    from hoplite_mp.node.output.output import Output
    from hoplite_mp.node.ports import Lines
    from hoplite_mp.node.requests import Handler
    from hoplite_mp.node.tasks.delegation import Delegation
    from hoplite_mp.node.tasks.workers import Workers
    from hoplite_mp.protocol.local import Request

__all__ = ["Drivers"]

# How long a driver that leaves waits for what its tasks have printed on other hosts, at most; and
# how often it is looked whether all of this host has come: nobody says that a pipe is empty.
OUTPUT_PATIENCE_S = 0.8
OUTPUT_LOOK_S = 0.1


@dataclass(slots=True, eq=False)
class Driver:
    """One that is attached, or reads on after it has left. close: what it was reached by ends."""

    slot: int
    name: int  # where lines of workers are sent
    close: Callable[[], None]
    left: bool = False
    output_until: float = 0.0  # how long its last lines may take
    looked_at: bool = False  # there will be another look at its output


class Drivers:
    """All of this host but the one that has started it."""

    def __init__(
        self,
        host: HostContext,
        lines: Lines,
        ends: ClientEnds,
        output: Output,
        far_output: FarOutput,
        peers: Peers,
        workers: Workers,
        delegation: Delegation,
        streaming_sources: StreamingSources,
        look: Callable[[], None],
    ) -> None:
        """look: words in shared memory have changed."""
        self.loop = host.loop
        self.client = host.client
        self.tasks = host.tasks
        self.roster = host.roster
        self.reply = host.reply
        self.lines = lines
        self.ends = ends
        self.output = output
        self.far_output = far_output
        self.peers = peers
        self.workers = workers
        self.delegation = delegation
        self.streaming_sources = streaming_sources
        self.look = look
        self.by_slot: dict[int, Driver] = {}
        self._ever = 0  # drivers that have come

    @property
    def handlers(self) -> dict[type, Handler]:
        """By kind of request."""
        return {UsersOfNode: self._asked_users}

    def _asked_users(self, slot: int, request: Request) -> None:
        there = sum(not one.left for one in self.by_slot.values())
        self.reply(slot, Reply(request.number, there))

    def name_of(self, slot: int) -> int:
        """Where lines for that driver are sent; 0: no attached one is in that slot."""
        driver = self.by_slot.get(slot)
        return 0 if driver is None else driver.name

    # -- coming --------------------------------------------------------------------------------

    def register(self) -> tuple[int, int, int, str]:
        """(slot, its generation, the driver's name, ""), or (-1, 0, 0, why there is none)."""
        if self.roster.leaves:
            return -1, 0, 0, "the node is leaving"
        slot = self.client.register(0, CLIENT_DRIVER, 0)
        if slot < 0:
            return -1, 0, 0, "every process slot of the host is in use"
        generation = self.client.client_info(slot)["generation"]
        return slot, generation, audience_name(self.client.home, self._ever), ""

    def unregister(self, slot: int) -> None:
        """It could not be told of its slot."""
        self.client.unregister(slot)

    def came(
        self,
        slot: int,
        name: int,
        pid: int,
        line: Any,
        output: socket.socket,
        close: Callable[[], None],
    ) -> None:
        """It has its slot. line: over which it asks. output: for the lines of its tasks.
        close: ends what it was reached by."""
        self._ever += 1
        self.output.attach(name, output)
        self.by_slot[slot] = Driver(slot, name, close)
        self.tasks.set_pid(slot, pid)
        self.lines.add(slot, line)

    # -- going ---------------------------------------------------------------------------------

    def line_ended(self, slot: int) -> None:
        """It has left, or died: then the end of its process is on the way."""
        driver = self.by_slot.get(slot)
        if driver is not None and not driver.left:
            self._settle(driver, reads_on=True)
            self.look()

    def gone(self, slot: int) -> None:
        """It reads nothing any more."""
        driver = self.by_slot.get(slot)
        if driver is None:
            return
        self._settle(driver, reads_on=False)
        driver.close()
        self._finish_output(driver, 0.0)
        self.streaming_sources.lose(slot)
        del self.by_slot[slot]
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
        if driver.name not in output.drivers:
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
            if header["owner"] != slot or header["kind"] != KIND_TASK:
                continue
            if header["state"] == "CLAIMED" and not set(header["refs"]) - {slot}:
                claimant = self.tasks.claimant(oid)
                if self.tasks.cancel(oid, True) and not self.delegation.cancel(oid):
                    self.workers.interrupt(oid, claimant)
