"""Upward calls of a node in a cluster of several hosts.

Why it exists: much of what rooms ask of the rooms above them is about other hosts. This file
connects these calls with rooms that only such a node has. It follows the order of
_node/runtime/node_events.py, which connects all other calls.
It must never know: anything but these connections.
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
    from hoplite_mp._node.groups.posted_calls import PostedCalls
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
    """The upward calls of a node in a cluster of several hosts; usable once Lan (lan.py) has built
    its rooms and set the attributes below."""

    actor_moves: ActorFailover
    drivers: Drivers
    far_actors: RemoteActors
    far_output: RemoteOutput
    membership: NodeMembership
    missing: Suspects
    peers: Peers
    plan_executor: PlanRunner
    posted_calls: PostedCalls
    recovering: Recovery
    replicas: Replicas
    spares: ActorBackups
    transfers: Transfers
    # Handles a message of the manager; False if it is not about other hosts.
    receive_about_hosts: Callable[[Any], bool]

    def make_room(self) -> None:
        self.recovering.lineage.make_room()
        self.posted_calls.make_room()

    def freed(self, oid: int) -> None:
        self.rooms.actors.freed(oid)
        imports = self.rooms.imports
        one = imports.by_oid.get(oid)
        imports.freed(oid)
        if one is not None and oid not in imports.by_oid:
            self.transfers.dropped(one.object)
            self.recovering.freed(one)

    def is_guest(self, oid: int) -> bool:
        return self.recovering.is_run_here(oid)

    def nobody_named(self, oid: int) -> None:
        self.recovering.reconstruction.ask_again(oid)

    def ask_for_owner(self, one: ImportRecord) -> bool:
        return self.recovering.owners.ask_for_owner(one)

    def result_held(self, oid: int) -> None:
        self.replicas.watch_result(oid)

    def extra_holds(self, oid: int) -> int:
        return self.recovering.lineage.holds(oid) + (oid in self.rooms.guests)

    def receive(self, message: Any) -> None:
        if not self.receive_about_hosts(message):
            super().receive(message)

    def joining(self, incarnation: int) -> NodeJoined:
        return self.membership.joining(incarnation)

    def returning(self, incarnation: int) -> NodeReturned:
        """With what a new manager continues to count, as far as this node knows it: numbers of
        nodes, epochs of Distribute, objects that had an operation for their copies."""
        rooms, transfers, numbers = self.rooms, self.transfers, self.membership.numbers
        members = *self.membership.members.values(), *self.missing.members.values()
        counted = numbers, members, transfers.epochs, transfers.copied
        return NodeReturned(rooms.number(), incarnation, *counted, rooms.groups.generations)

    def report(self) -> Iterator[Any]:
        yield from super().report()
        yield from self.spares.report()
        yield from self.transfers.report()
        yield from self.plan_executor.report()
        yield from self.recovering.owners.report_again()

    def cluster(self) -> bytes:
        return self.membership.cluster

    def send_peer(self, host_id: int, message: PeerMessage) -> bool:
        return self.peers.send(host_id, message)

    def driver_name(self, slot: int) -> int:
        return self.drivers.name_of(slot)

    def leases(self, slot: int) -> None:
        self.recovering.leases(slot)

    def tell_workers(self, count: int) -> None:
        self.membership.tell_workers(count)

    def grow_far(self, number: int, count: int) -> bool:
        return self.membership.grow_far(number, count)

    def far_subscriber(self, audience: int) -> Subscriber | None:
        return self.far_output.subscriber(audience)

    def post(self, oid: int) -> None:
        super().post(oid)
        self.far_actors.fail_calls(self.rooms.workers.tasks.pool_of(oid))  # its host may be gone

    def pools_named(self) -> set[int]:
        workers = self.rooms.workers
        return {workers.tasks.pool_of(oid) for oid in workers.delegation.where}

    def pool_forgotten(self, pool: Pool) -> None:
        super().pool_forgotten(pool)
        self.recovering.lineage.close_pool(pool.number)

    def pool_deserted(self, pool: int, why: str) -> None:
        if not self.far_actors.lost(pool, why):
            super().pool_deserted(pool, why)

    def sends_on(self, audience: int, host_id: int) -> None:
        self.far_output.sent_on(audience, host_id)

    def ends_elsewhere(self, oid: int) -> None:
        self.recovering.keep(oid)

    def is_far_actor(self, pool: int) -> bool:
        return pool in self.far_actors.bound

    def target_of(self, oid: int) -> bytes:
        return self.recovering.target_of(oid)

    def may_leave(self) -> bool:
        return True

    def workers_are(self, count: int) -> None:
        self.membership.workers_are(count)

    def far_begin(self, asker: Asker, wanted: WantedActor, node: int) -> None:
        self.far_actors.begin(asker, wanted, node)

    def far_end(self, identity: int, kill: bool, unheld: bool) -> None:
        self.far_actors.end(identity, kill, unheld)

    def far_restarts(self, asker: Client, identity: int) -> None:
        self.far_actors.ask_restarts(asker, identity)

    def far_bind(self, slot: int, number: int, ask: BindActor) -> None:
        self.far_actors.bind(slot, number, ask)

    def far_fail_calls(self, pool: int) -> None:
        self.far_actors.fail_calls(pool)

    def far_freed(self, oid: int) -> None:
        self.far_actors.freed(oid)

    def keep_spare(self, actor: ActorRecord, done: Callable[[], None] | None) -> None:
        self.spares.keep(actor, done)

    def has_ended(self, actor: ActorRecord) -> None:
        self.spares.ended(actor)

    def runs_again(self, oid: int) -> bool:
        return oid in self.recovering.reconstruction.runs

    # -- for rooms that only such a node has -------------------------------------------------------

    def spare_number(self, object_id: bytes, host_id: int) -> int | None:
        return self.spares.number_of(object_id, host_id)

    def moved(self, one: ImportRecord) -> None:
        self.actor_moves.moved(one)

    def ownerless(self, one: ImportRecord) -> None:
        self.actor_moves.ownerless(one)

    def all_heard(self) -> None:
        self.actor_moves.run_ready()

    def leaves_now(self) -> None:
        self.membership.workers_now = 0
        self.rooms.actors.leave()

    def drained(self) -> bool:
        self.rooms.actors.has_left()
        return self.rooms.management.announce_leaving()

    def has_calls(self, host_id: int) -> bool:
        return self.far_actors.has_calls(host_id)

    def when_known(self, identity: bytes, action: Callable[[], None]) -> None:
        self.actor_moves.when_known(identity, action)

    def sought(self, host_id: int, identity: bytes) -> None:
        self.actor_moves.sought(host_id, identity)
