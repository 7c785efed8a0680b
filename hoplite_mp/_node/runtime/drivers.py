"""Drivers that attach to this node: programs of the same user that did not start this host.

Several programs on one host share its store and its workers. Each program becomes a client with a
slot, a connection for its requests, and access to the store and the control memory. A driver leaves
in two steps. When its request connection is closed, it has left the cluster: its tasks are stopped
and its refs are released. When its process exits or no longer needs the shared memory, its pins and
blocks are released as well, and the slot becomes free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hoplite_mp._common.object_states import CLIENT_DRIVER, KIND_TASK
from hoplite_mp._protocol.local import CountDrivers, Reply
from hoplite_mp._protocol.output import output_owner_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.dispatch import Handler
    from hoplite_mp._node.io.driver_socket import Socket
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.output.output import Output
    from hoplite_mp._node.output.remote_output import RemoteOutput
    from hoplite_mp._node.peers.peers import Peers
    from hoplite_mp._node.ports import ClientSocketsPort
    from hoplite_mp._node.runtime.peer_loss import ClientCleanup
    from hoplite_mp._node.store.growing_block import GrowingBlocks
    from hoplite_mp._node.tasks.outbound_tasks import OutboundTasks
    from hoplite_mp._node.tasks.worker_recycling import WorkerRecycling
    from hoplite_mp._node.tasks.workers import Workers
    from hoplite_mp._protocol.local import Request

__all__ = ["Drivers"]

# OUTPUT_PATIENCE_S limits how long the node waits for the last output of a leaving driver's tasks.
# The output on this host is polled every OUTPUT_POLL_S, because nothing signals that a pipe has
# become empty.
OUTPUT_PATIENCE_S = 0.8
OUTPUT_POLL_S = 0.1


@dataclass(slots=True, eq=False)
class Driver:
    """A driver that is attached, or has left but still reads shared memory. `close`: closes the
    connection over which the driver was admitted."""

    slot: int
    name: int  # its output owner: lines printed by its tasks are sent to the driver with this name
    close: Callable[[], None]
    left: bool = False
    output_until: float = 0.0  # time until which the node waits for its tasks' last lines
    is_polled: bool = False  # a timer for `_poll_again` is running


class Drivers:
    """The attached drivers on this host, excluding the driver that started the host."""

    def __init__(
        self,
        host: HostContext,
        lines: ClientSocketsPort,
        ends: ClientCleanup,
        output: Output,
        remote_output: RemoteOutput,
        peers: Peers,
        workers: Workers,
        outbound_tasks: OutboundTasks,
        streaming_sources: GrowingBlocks,
        former: WorkerRecycling,
        poll: Callable[[], None],
    ) -> None:
        """poll: called after words in shared memory have changed."""
        self.loop = host.loop
        self.client = host.client
        self.tasks = host.tasks
        self.roster = host.roster
        self.reply = host.reply
        self.lines = lines
        self.ends = ends
        self.output = output
        self.remote_output = remote_output
        self.peers = peers
        self.workers = workers
        self.outbound_tasks = outbound_tasks
        self.streaming_sources = streaming_sources
        self.former = former
        self.poll = poll
        self.by_slot: dict[int, Driver] = {}
        self._ever = 0  # number of drivers that have ever attached

    @property
    def handlers(self) -> dict[type, Handler]:
        """Handlers by type of request."""
        return {CountDrivers: self._asked_users}

    def _asked_users(self, slot: int, request: Request) -> None:
        count = sum(not driver.left for driver in self.by_slot.values())
        self.reply(slot, Reply(request.number, count))

    def name_of(self, slot: int) -> int:
        """The output owner of the attached driver in the slot; 0 if there is none."""
        driver = self.by_slot.get(slot)
        return 0 if driver is None else driver.name

    # -- attaching -----------------------------------------------------------------------------

    def register(self) -> tuple[int, int, int, str]:
        """Reserves a slot. Returns (slot, its generation, the driver's name, ""), or (-1, 0, 0,
        reason) if that is impossible."""
        if self.roster.leaves:
            return -1, 0, 0, "the node is leaving"
        slot = self.client.register(0, CLIENT_DRIVER, 0)
        if slot < 0:
            return -1, 0, 0, "every process slot of the host is in use"
        generation = self.client.client_info(slot)["generation"]
        return slot, generation, output_owner_name(self.client.host_id, self._ever), ""

    def unregister(self, slot: int) -> None:
        """Frees the slot of a driver to which the slot could not be sent."""
        self.client.unregister(slot)

    def attached(
        self,
        slot: int,
        name: int,
        pid: int,
        line: Any,
        output: Socket,
        close: Callable[[], None],
    ) -> None:
        """Adds a driver to which its slot has been sent. line: the connection for its requests.
        output: the socket for lines printed by its tasks. close: closes the connection over which
        the driver was admitted."""
        self._ever += 1
        self.output.attach(name, output)
        self.by_slot[slot] = Driver(slot, name, close)
        self.tasks.set_pid(slot, pid)
        self.lines.add(slot, line)

    # -- leaving -------------------------------------------------------------------------------

    def line_ended(self, slot: int) -> None:
        """Cleans up after a driver that has left or died. If it has died, `detached` is called soon
        afterwards."""
        driver = self.by_slot.get(slot)
        if driver is not None and not driver.left:
            self._settle(driver, reads_on=True)
            self.poll()

    def detached(self, slot: int) -> None:
        """Removes a driver that no longer reads shared memory."""
        driver = self.by_slot.get(slot)
        if driver is None:
            return
        self._settle(driver, reads_on=False)
        driver.close()
        self._finish_output(driver, 0.0)
        self.streaming_sources.lose(slot)
        del self.by_slot[slot]
        self.client.unregister(slot)
        self.poll()

    def _settle(self, driver: Driver, reads_on: bool) -> None:
        """Keeps the driver's objects that other processes need, and releases the rest. reads_on:
        the driver still reads shared memory, so its pins and blocks are kept, too."""
        slot = driver.slot
        if driver.left:
            self.ends.settle_again(slot)
            return
        driver.left = True
        self._stop_tasks(slot)
        self.ends.settle(slot, None, 0, reads_on)
        self.workers.close_owned(slot)
        self.remote_output.ask_last_lines(self.peers.met, driver.name)
        self.former.driver_ended(driver.name)
        driver.output_until = self.loop.now() + OUTPUT_PATIENCE_S
        self._finish_output(driver, driver.output_until)

    def poll_leaving(self) -> None:
        """Closes the output of each driver that has left and whose lines are complete. Called when
        another node has sent its last lines for a driver."""
        for driver in list(self.by_slot.values()):
            if driver.left:
                self._finish_output(driver, driver.output_until)

    def _finish_output(self, driver: Driver, until: float) -> None:
        """Closes the output of a leaving driver if its last lines have been sent or the time
        `until` has come. Otherwise sets a timer to check again."""
        output, remote = self.output, self.remote_output
        if driver.name not in output.drivers:
            return
        if self.loop.now() < until and (
            not output.has_all(driver.name) or remote.is_asking(driver.name)
        ):
            if not driver.is_polled:
                driver.is_polled = True
                self.loop.call_later(OUTPUT_POLL_S, lambda: self._poll_again(driver))
            return
        output.detach(driver.name, remote.busy)
        remote.forget(driver.name)

    def _poll_again(self, driver: Driver) -> None:
        driver.is_polled = False
        self._finish_output(driver, driver.output_until)

    def _stop_tasks(self, slot: int) -> None:
        """Interrupts the driver's running tasks, except those whose result another client holds."""
        for header in self.client.concerned(slot):
            oid = header["id"]
            if header["owner"] != slot or header["kind"] != KIND_TASK:
                continue
            if header["state"] == "CLAIMED" and not set(header["refs"]) - {slot}:
                claimant = self.tasks.claimant(oid)
                if self.tasks.cancel(oid, True) and not self.outbound_tasks.cancel(oid):
                    self.workers.interrupt(oid, claimant)
