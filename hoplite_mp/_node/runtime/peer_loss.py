"""The loss of another host: the components that handle it, in order.

Each component has one method for the loss, `peer_lost(member)`. The order matters for the pairs in
`ORDERS`, which states the reasons. Any other two neighbours may be swapped.
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
# (earlier component, later one) -> why. tests/simulation/test_peer_loss_order.py breaks each order,
# and swaps all other neighbours.
ORDERS = {
    ("recovery", "inbound_tasks"): "results of its tasks are held before the tasks are forgotten",
    ("recovery", "replicas"): "replicas of its objects are held before they are released",
    ("recovery", "remote_objects"): "the owner is known to be dead when it is decided what is lost",
    ("recovery", "questions"): "a question that ends without an answer may wait for the next owner",
    ("remote_objects", "questions"): "what a question asked for is looked up among the living",
}


def pass_on(member: Member, receivers: Mapping[str, Callable[[Member], None]]) -> None:
    """Passes the loss of a host to all components, which PHASES names."""
    for name in PHASES:
        receivers[name](member)


# The cleanup of all components after a process of this host has ended or left.
#
# Most components treat a worker that has ended and a driver that has left alike, and the order of
# the steps matters: the node first takes holds on the results of Group calls that the process had
# committed, then sweeps its objects and tasks, and then notifies the manager.


class ClientCleanup:
    """The clean-up on one node."""

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
        """Keeps the objects that others need of a process that has ended, and releases the rest.
        worker: the worker that ran in the process, if there was one. code: its exit code. reads_on:
        the process has left the cluster, but still reads shared memory. Returns the tasks that are
        to run again."""
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
        """Releases what `settle` has kept for a process that had left and still read shared memory,
        because it does not read it any more."""
        self.groups.hold_committed(slot)
        self.groups.buffers.forget_client(slot)
        self.sweeper.sweep(slot, None, 0, False)
