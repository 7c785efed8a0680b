"""The loss of another host: the components that handle it, in order.

Each component handles the loss in its method `peer_lost(member)`. The order matters for the pairs
in `ORDERS`, which states the reasons. Any other two neighbours in `PHASES` may be swapped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._protocol.messages import ClientLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hoplite_mp._node.diagnostics.tracing import Recording
    from hoplite_mp._node.dispatch import Requests
    from hoplite_mp._node.groups.groups import HostGroups
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.tasks.sweeper import Sweeper
    from hoplite_mp._node.tasks.worker_pools import WorkerInfo
    from hoplite_mp._protocol.messages import Member

__all__ = ["ORDERS", "PHASES", "ClientCleanup", "pass_on"]


PHASES = (
    "peers",
    "backups",
    "recovery",
    "resources",
    "outbound_tasks",
    "inbound_tasks",
    "links",
    "paths",
    "replicas",
    "messages",
    "group_calls",
    "draining",
    "workers",
    "remote_actors",
    "backups elsewhere",
    "remote_output",
    "worker_recycling",
    "tracing",
    "exports",
    "remote_objects",
    "questions",
)
# (earlier component, later component) -> the reason for this order.
# tests/simulation/test_peer_loss_order.py breaks each order, and swaps all other neighbours.
ORDERS = {
    ("recovery", "inbound_tasks"): "the host's results are held before its tasks are forgotten",
    ("recovery", "replicas"): "recovery holds the host's objects before replicas are released",
    ("recovery", "remote_objects"): "lost objects are handled once the owner is known to be dead",
    ("recovery", "questions"): "an unanswered question may have to wait for the next owner",
    ("remote_objects", "questions"): "unanswered questions are handled with living holders only",
}


def pass_on(member: Member, receivers: Mapping[str, Callable[[Member], None]]) -> None:
    """Passes the loss of a host to all components in the order of PHASES."""
    for name in PHASES:
        receivers[name](member)


# The cleanup of all components after a process on this host has exited or left.
#
# Most components treat an exited worker and a departed driver alike. The order of the steps
# matters: the node first takes holds on the results of Group calls that the process had committed,
# then sweeps its objects and tasks, and then notifies the manager.


class ClientCleanup:
    """The cleanup on one node."""

    def __init__(
        self,
        host: HostContext,
        groups: HostGroups,
        recording: Recording,
        sweeper: Sweeper,
        requests: Requests,
        forget_line: Callable[[int], None],
    ) -> None:
        self.client = host.client
        self.send_manager = host.send_manager
        self.groups = groups
        self.recording = recording
        self.sweeper = sweeper
        self.requests = requests
        self.forget_line = forget_line

    def settle(
        self, slot: int, worker: WorkerInfo | None, code: int, reads_on: bool = False
    ) -> list[int]:
        """Keeps the objects of an exited process that other processes need, and releases the rest.
        worker: the worker in the process, if there was one. code: its exit code. reads_on: the
        process has left the cluster but still reads shared memory. Returns the tasks to run
        again."""
        generation = self.client.client_info(slot)["generation"]
        self.forget_line(slot)
        self.groups.hold_committed(slot)
        self.recording.exited(slot, worker)
        again = self.sweeper.sweep(slot, worker, code, reads_on)
        self.groups.forget_client(slot, reads_on)
        self.send_manager(ClientLost(self.client.number, slot, generation))
        self.requests.forget_client(slot)
        return again

    def settle_again(self, slot: int) -> None:
        """Releases the memory that `settle` has kept because the departed process was still reading
        it. Called when the process no longer reads shared memory."""
        self.groups.hold_committed(slot)
        self.groups.buffers.forget_client(slot)
        self.sweeper.sweep(slot, None, 0, False)
