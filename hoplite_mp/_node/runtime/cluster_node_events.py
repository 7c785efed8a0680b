"""Events that components of a node report upward, in a cluster of several hosts.

Many events concern other hosts. This file passes these events to components that only such a node
has. It follows the order of _node/runtime/node_events.py, which passes on all other events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp._node.runtime.node_events import NodeEvents
from hoplite_mp._protocol.reports import NodeReturned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._node.actors.actor_backup import ActorBackups
    from hoplite_mp._node.actors.actor_failover import ActorFailover
    from hoplite_mp._node.actors.actor_records import ActorRecord, Asker, Client, WantedActor
    from hoplite_mp._node.actors.remote_actors import RemoteActors
    from hoplite_mp._node.execution.plan_runner import PlanRunner
    from hoplite_mp._node.execution.transfers import Transfers
    from hoplite_mp._node.lineage.recovery import Recovery
    from hoplite_mp._node.manager_link.membership import NodeMembership
    from hoplite_mp._node.objects.imports import ImportRecord
    from hoplite_mp._node.objects.replicas import Replicas
    from hoplite_mp._node.output.remote_output import RemoteOutput
    from hoplite_mp._node.output.subscriber import Subscriber
    from hoplite_mp._node.peers.peers import Peers
    from hoplite_mp._node.peers.suspects import Suspects
    from hoplite_mp._node.runtime.drivers import Drivers
    from hoplite_mp._node.tasks.pools import Pool
    from hoplite_mp._protocol.actors import BindActor
    from hoplite_mp._protocol.messages import NodeJoined
    from hoplite_mp._protocol.peers import PeerMessage

__all__ = ["ClusterNodeEvents"]


class ClusterNodeEvents(NodeEvents):
    """The events of a node in a cluster of several hosts; usable once `ClusterNode` has built its
    components and set the attributes below."""

    actor_failover: ActorFailover
    drivers: Drivers
    remote_actors: RemoteActors
    remote_output: RemoteOutput
    membership: NodeMembership
    missing: Suspects
    peers: Peers
    plan_executor: PlanRunner
    recovery: Recovery
    replicas: Replicas
    backups: ActorBackups
    transfers: Transfers
    # Handles a message of the manager; False if it is not about other hosts.
    receive_about_hosts: Callable[[Any], bool]

    def make_room(self) -> None:
        self.recovery.lineage.make_room()

    def freed(self, oid: int) -> None:
        self.components.actors.freed(oid)
        imports = self.components.imports
        one = imports.by_oid.get(oid)
        imports.freed(oid)
        if one is not None and oid not in imports.by_oid:
            self.transfers.dropped(one.object)
            self.recovery.freed(one)

    def is_inbound(self, oid: int) -> bool:
        return self.recovery.is_run_here(oid)

    def nobody_named(self, oid: int) -> None:
        self.recovery.reconstruction.ask_again(oid)

    def ask_for_owner(self, one: ImportRecord) -> bool:
        return self.recovery.owners.ask_for_owner(one)

    def result_held(self, oid: int) -> None:
        self.replicas.watch_result(oid)

    def extra_holds(self, oid: int) -> int:
        return self.recovery.lineage.holds(oid) + (oid in self.components.inbound_tasks)

    def receive(self, message: Any) -> None:
        if not self.receive_about_hosts(message):
            super().receive(message)

    def joining(self, incarnation: int) -> NodeJoined:
        return self.membership.joining(incarnation)

    def returning(self, incarnation: int) -> NodeReturned:
        """With what a new manager continues to count, as far as this node knows it: numbers of
        nodes, epochs of Distribute, objects that had an operation for their copies."""
        components, transfers, numbers = self.components, self.transfers, self.membership.numbers
        members = *self.membership.members.values(), *self.missing.members.values()
        counted = numbers, members, transfers.epochs, transfers.copied
        return NodeReturned(
            components.number(), incarnation, *counted, components.groups.generations
        )

    def report(self) -> Iterator[Any]:
        yield from super().report()
        yield from self.backups.report()
        yield from self.transfers.report()
        yield from self.plan_executor.report()
        yield from self.recovery.owners.report_again()

    def cluster(self) -> bytes:
        return self.membership.cluster

    def send_peer(self, host_id: int, message: PeerMessage) -> bool:
        return self.peers.send(host_id, message)

    def driver_name(self, slot: int) -> int:
        return self.drivers.name_of(slot)

    def leases(self, slot: int) -> None:
        self.recovery.leases(slot)

    def tell_workers(self, count: int) -> None:
        self.membership.tell_workers(count)

    def grow_remote(self, number: int, count: int) -> bool:
        return self.membership.grow_remote(number, count)

    def remote_subscriber(self, output_owner: int) -> Subscriber | None:
        return self.remote_output.subscriber(output_owner)

    def post(self, oid: int) -> None:
        super().post(oid)
        pool = self.components.workers.tasks.pool_of(oid)
        self.remote_actors.fail_calls(pool)  # its host may be gone

    def pools_named(self) -> set[int]:
        workers = self.components.workers
        return {workers.tasks.pool_of(oid) for oid in workers.outbound_tasks.where}

    def pool_forgotten(self, pool: Pool) -> None:
        super().pool_forgotten(pool)
        self.recovery.lineage.close_pool(pool.number)

    def pool_deserted(self, pool: int, why: str) -> None:
        if not self.remote_actors.lost(pool, why):
            super().pool_deserted(pool, why)

    def sends_on(self, output_owner: int, host_id: int) -> None:
        self.remote_output.sent_on(output_owner, host_id)

    def ends_elsewhere(self, oid: int) -> None:
        self.recovery.keep(oid)

    def is_remote_actor(self, pool: int) -> bool:
        return pool in self.remote_actors.bound

    def target_of(self, oid: int) -> bytes:
        return self.recovery.target_of(oid)

    def may_leave(self) -> bool:
        return True

    def workers_are(self, count: int) -> None:
        self.membership.workers_are(count)

    def remote_begin(self, asker: Asker, wanted: WantedActor, node: int) -> None:
        self.remote_actors.begin(asker, wanted, node)

    def remote_end(self, identity: int, kill: bool, unheld: bool) -> None:
        self.remote_actors.end(identity, kill, unheld)

    def remote_restarts(self, asker: Client, identity: int) -> None:
        self.remote_actors.ask_restarts(asker, identity)

    def remote_bind(self, slot: int, number: int, ask: BindActor) -> None:
        self.remote_actors.bind(slot, number, ask)

    def remote_fail_calls(self, pool: int) -> None:
        self.remote_actors.fail_calls(pool)

    def remote_freed(self, oid: int) -> None:
        self.remote_actors.freed(oid)

    def keep_backup(self, actor: ActorRecord, done: Callable[[], None] | None) -> None:
        self.backups.keep(actor, done)

    def has_ended(self, actor: ActorRecord) -> None:
        self.backups.ended(actor)

    def runs_again(self, oid: int) -> bool:
        return oid in self.recovery.reconstruction.runs

    # -- for components that only such a node has --------------------------------------------------

    def backup_number(self, object_id: bytes, host_id: int) -> int | None:
        return self.backups.number_of(object_id, host_id)

    def moved(self, one: ImportRecord) -> None:
        self.actor_failover.moved(one)

    def ownerless(self, one: ImportRecord) -> None:
        self.actor_failover.ownerless(one)

    def all_heard(self) -> None:
        self.actor_failover.run_ready()

    def leaves_now(self) -> None:
        self.membership.workers_now = 0
        self.components.actors.leave()

    def drained(self) -> bool:
        self.components.actors.has_left()
        return self.components.management.announce_leaving()

    def has_calls(self, host_id: int) -> bool:
        return self.remote_actors.has_calls(host_id)

    def when_known(self, identity: bytes, action: Callable[[], None]) -> None:
        self.actor_failover.when_known(identity, action)

    def sought(self, host_id: int, identity: bytes) -> None:
        self.actor_failover.sought(host_id, identity)
