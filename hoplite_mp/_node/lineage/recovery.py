"""Recovery of values that were lost with a host: the common interface of four components.

`Lineage` keeps the inputs for the results of this host's tasks. `Reconstruction` computes lost
results again on request. `ReplicaQuery` asks all hosts for the original value before a recomputed
value is used. `OwnershipTransfer` finds new owners for objects of dead owners.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._common import ids
from hoplite_mp._node.lineage.lineage import Lineage
from hoplite_mp._node.lineage.reconstruction import Reconstruction, ReplicaQuery
from hoplite_mp._node.objects.ownership_transfer import OwnershipTransfer, OwnershipTransferEvents

if TYPE_CHECKING:
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.objects.imports import ImportRecord
    from hoplite_mp._node.objects.replicas import Replicas
    from hoplite_mp._node.peers.peers import Suspects
    from hoplite_mp._node.tasks.hints import Hints
    from hoplite_mp._node.tasks.inbound_tasks import InboundTasks
    from hoplite_mp._node.tasks.resources import Resources
    from hoplite_mp._protocol.messages import Member
    from hoplite_mp._protocol.peers import Release

__all__ = ["Recovery"]


class Recovery:
    """The recovery of one node."""

    def __init__(
        self,
        host: HostContext,
        replicas: Replicas,
        inbound_tasks: InboundTasks,
        suspects: Suspects,
        resources: Resources,
        hints: Hints,
        events: OwnershipTransferEvents,
    ) -> None:
        self.client = host.client
        self.tasks = host.tasks
        self.remote_objects = host.remote_objects
        self.imports = host.imports
        self.roster = host.roster
        self.inbound_tasks = inbound_tasks
        self.lineage = Lineage(
            host.results,
            host.remote_objects,
            host.config.lineage_bytes_max,
            host.loop,
            resources.demand_of,
        )
        self.owners = OwnershipTransfer(
            host.imports,
            host.exports,
            host.remote_objects,
            replicas,
            lambda: host.client.number,
            host.send_manager,
            host.send_peer,
            self._host_id_at,
            self._number_of,
            events,
        )
        self.replica_query = ReplicaQuery(
            host.imports,
            host.remote_objects,
            replicas,
            host.questions,
            host.send_peer,
            lambda: host.roster.host_ids,
            lambda: bool(suspects.members),
        )
        self.reconstruction = Reconstruction(
            host.results,
            host.imports,
            host.remote_objects,
            self.lineage,
            self.replica_query,
            host.send_peer,
            host.loop,
            hints,
            self.owners,
            host.roster,
            host.exports.copies_of,
            resources.wait,
        )
        host.remote_objects.maker = self.reconstruction
        host.exports.own = self.owners.own

    def _host_id_at(self, number: int) -> int | None:
        if number == self.client.number:
            return self.client.host_id
        member = self.roster.by_number.get(number)
        return None if member is None else member.host_id

    def _number_of(self, host_id: int) -> int | None:
        if host_id == self.client.host_id:
            return self.client.number
        return self.roster.number_of(host_id)

    # -- lineage -------------------------------------------------------------------------------

    def keep(self, oid: int) -> None:
        """Creates a lineage entry for a task. Calls to actors, second runs, and inbound tasks (for
        which the submitting host keeps an entry) have none."""
        again = self.reconstruction.hints.may_run_again(oid)
        if again and oid not in self.inbound_tasks and oid not in self.reconstruction.by_run:
            self.lineage.keep(oid)

    def leases(self, slot: int) -> None:
        """Called when the process in the slot requests a block, because the block may be for the
        result of its task."""
        running = self.tasks.running(slot)
        if running and self.roster.by_host_id:
            self.keep(running)

    def target_of(self, oid: int) -> bytes:
        """The lost result that this task reconstructs, or b"" if there is none."""
        inbound_task, run = self.inbound_tasks.by_oid.get(oid), self.reconstruction.by_run.get(oid)
        if inbound_task is not None:
            return inbound_task.target
        return b"" if run is None else ids.pack_id(self.client.host_id, run.target)

    def is_run_here(self, oid: int) -> bool:
        """Whether this task in the node's own tables is an inbound task or a second run. Such a
        task is needed even though no process on this host has submitted it."""
        return oid in self.inbound_tasks or oid in self.reconstruction.by_run

    def poll(self) -> None:
        """Called once in each turn of the loop."""
        self.reconstruction.poll()

    # -- lost hosts ----------------------------------------------------------------------------

    def peer_lost(self, member: Member) -> None:
        """Handles the loss of a host. Must be called before any component releases objects of that
        host."""
        self.owners.begin(member.host_id, member.node)

    def peer_joined(self, host_id: int) -> None:
        """Called when a host joins. This node may have considered it lost. All other components
        have already been notified."""
        self.owners.back(host_id)

    def report(self, number: int) -> None:
        """Sends this node's report about a node that the manager has declared dead. The manager is
        waiting for it."""
        self.owners.report(number)

    def released(self, peer: int, message: Release) -> None:
        """Handles another host's release of an object that this host owns."""
        self.owners.released(peer, message)
        number = self._number_of(peer)
        if number is not None and not message.keeps:
            self.remote_objects.lose_copy(self.imports.own(message.object), number)

    def freed(self, record: ImportRecord) -> None:
        """Handles the freed header of an import."""
        self.owners.freed(record)
