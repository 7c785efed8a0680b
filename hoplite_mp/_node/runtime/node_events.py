"""The events that a node's components report upward, and the component that handles each event.

Components are built bottom up, each from the components below it. A component that calls components
above it declares a protocol in its own file (for example, `ExportsEvents`). This file connects each
method of the protocol with its implementation. In NodeEvents, methods about other hosts return the
answer for a cluster of one host; ClusterNodeEvents overrides them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp import errors
from hoplite_mp._protocol.fields import NO_OBJECT
from hoplite_mp._protocol.groups import NO_TASK
from hoplite_mp._protocol.local import Reply
from hoplite_mp._protocol.membership import NodeReturned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._node.actors.actor_backup import ActorBackups
    from hoplite_mp._node.actors.actor_failover import ActorFailover
    from hoplite_mp._node.actors.actor_records import ActorRecord, Asker, Client, WantedActor
    from hoplite_mp._node.actors.remote_actors import RemoteActors
    from hoplite_mp._node.execution.plan_runner import PlanRunner
    from hoplite_mp._node.execution.transfers import Transfers
    from hoplite_mp._node.lineage.recovery import Recovery
    from hoplite_mp._node.manager_link.membership import NodeMembership, SingleHostMembership
    from hoplite_mp._node.objects.imports import ImportRecord
    from hoplite_mp._node.objects.replicas import Replicas
    from hoplite_mp._node.output.output import Subscriber
    from hoplite_mp._node.output.remote_output import RemoteOutput
    from hoplite_mp._node.peers.peers import Peers, Suspects
    from hoplite_mp._node.runtime.components import Components
    from hoplite_mp._node.runtime.drivers import Drivers
    from hoplite_mp._node.tasks.worker_pools import Pool, WorkerInfo
    from hoplite_mp._planner.resources import Demand
    from hoplite_mp._protocol.actors import BindActor
    from hoplite_mp._protocol.messages import NodeJoined
    from hoplite_mp._protocol.peers import PeerMessage

__all__ = ["ClusterNodeEvents", "NodeEvents"]


class NodeEvents:
    """The events of a node in a cluster of one host. Usable once `components` and `alone` are
    set."""

    components: Components
    alone: SingleHostMembership

    # -- _node/trace_events.py, budget.py, sweeper.py, remote_objects.py, imports.py, exports.py ---

    def public(self, oid: int) -> bytes:
        return self.components.imports.public(oid)

    def restore_elsewhere(self, oid: int) -> bool | None:
        return self.components.remote_objects.restore(oid)

    def unreadable(self, oid: int, why: str) -> None:
        lost = errors.ObjectLostError(f"object {self.public(oid).hex()} is lost: {why}")
        self.components.results.replace_spilled(oid, lost)

    def drop_unneeded(self) -> None: ...

    def freed(self, oid: int) -> None:
        self.components.actors.freed(oid)
        self.components.imports.freed(oid)

    def is_inbound(self, oid: int) -> bool:
        return False

    def lost_actor_call(self, worker: WorkerInfo, how: str) -> Exception | None:
        return self.components.actors.lost_call(worker, how)

    def near(self, object_id: bytes, oid: int) -> memoryview | None:
        return self.components.imports.near(object_id, oid)

    def nobody_named(self, oid: int) -> None: ...

    def ask_for_owner(self, record: ImportRecord) -> bool:
        return False

    def result_held(self, oid: int) -> None: ...

    def extra_holds(self, oid: int) -> int:
        return 0

    # -- _node/manager_link/connection.py, membership.py -----------------------------------------

    def answer_standing(self) -> None:
        self.components.join_waiters.answer()

    def joining(self, incarnation: int) -> NodeJoined:
        return self.alone.joining(incarnation)

    def returning(self, incarnation: int) -> NodeReturned:
        return NodeReturned(
            node=self.components.number(),
            incarnation=incarnation,
            numbers=1,
            members=self.alone.known,
            generations=self.components.groups.generations,
        )

    def report(self) -> Iterator[Any]:
        return self.components.report()

    def cluster(self) -> bytes:
        return b""

    # -- _node/runtime/components.py, leases.py, remote_workers.py ---------------------------------

    def send_peer(self, host_id: int, message: PeerMessage) -> bool:
        return False

    def driver_name(self, slot: int) -> int:
        return 0

    def leases(self, slot: int) -> None: ...
    def tell_workers(self, count: int) -> None: ...

    def grow_remote(self, number: int, count: int) -> bool:
        return False

    # -- _node/output/output.py --------------------------------------------------------------------

    def remote_subscriber(self, output_owner: int) -> Subscriber | None:
        return None

    # -- _node/tasks/outbound_tasks.py -------------------------------------------------------------

    def post(self, oid: int) -> None:
        components, workers = self.components, self.components.workers
        pool = workers.tasks.pool_of(oid)
        if pool not in workers.pools and not self.is_remote_actor(pool):
            workers.fail_closed(oid)  # the pool was closed while the task was at another host
        elif oid in components.resources.held:  # it holds resources on this host or another one
            components.resources.again(oid)
        else:
            components.workers.announce(oid, False)

    def delay(self, oid: int) -> None:
        self.components.delays.begin(oid)

    def pool_deserted(self, pool: int, why: str) -> None:
        self.components.workers.desert(pool, why)

    def remote_workers_lost(self, pool: int) -> None:
        self.components.pool_requests.remote_workers.lost(pool)

    def sends_on(self, output_owner: int, host_id: int) -> None: ...
    def ends_elsewhere(self, oid: int) -> None: ...

    def lost_call(self, oid: int, name: str, number: int) -> Exception | None:
        if not self.is_remote_actor(self.components.host.tasks.pool_of(oid)):
            return None
        return errors.ActorLostError(
            f"the actor has lost its state: node h{number} was lost while {name}() was pending "
            "there, and the call may have begun"
        )

    def holds_inner(self, oid: int, holds: list[Any]) -> None:
        sweeper = self.components.sweeper
        if oid in sweeper.inner:  # its submitter is dead
            sweeper.inner[oid] = holds
        else:
            sweeper.results.untaken[oid] = holds

    def is_remote_actor(self, pool: int) -> bool:
        return False

    def demand_of(self, oid: int) -> Demand:
        return self.components.resources.demand_of(oid)

    def target_of(self, oid: int) -> bytes:
        return b""

    def was_full(self, oid: int, host_id: int) -> None:
        self.components.resources.again(oid, host_id)

    # -- _node/tasks/inbound_tasks.py --------------------------------------------------------------

    def queue_of(self, pool: int) -> int:
        return self.components.workers.queue(pool, here=True)

    def post_inbound(self, oid: int) -> None:
        self.components.workers.announce(oid, here=True)

    def interrupt(self, oid: int, slot: int) -> None:
        self.components.workers.interrupt(oid, slot)

    def is_actor(self, pool: int) -> bool:
        return pool in self.components.actors.by_pool

    def refuse_calls(self, pool: int) -> None:
        self.components.actors.refuse_calls(pool)

    def is_round(self, pool: int) -> bool:
        return pool in self.components.worker_broadcasts

    def counts_on(self, slot: int) -> bool:
        return self.components.worker_broadcasts.counts_on(slot)

    def arrived(self, pool: int) -> None:
        self.components.worker_broadcasts.arrived(pool)

    def task_ends(self, slot: int) -> None:
        for fd in self.components.workers.pipes.get(slot, ()):
            self.components.output.catch_up(fd)

    def admit(self, peer: int, task: bytes, demand: Demand, needed: bool) -> bool:
        return self.components.resources.admit(peer, task, demand, needed)

    def admitted(self, oid: int, task: bytes, demand: Demand) -> None:
        self.components.resources.admitted(oid, task, demand)

    def dropped(self, task: bytes) -> None:
        self.components.resources.dropped(task)

    # -- _node/tasks/workers.py --------------------------------------------------------------------

    def waits_for_resources(self, oid: int) -> bool:
        return oid in self.components.resources.rows

    def has_resources(self, oid: int) -> bool:
        return oid in self.components.resources.held

    def may_leave(self) -> bool:
        return False

    def pools_named(self) -> set[int]:
        return set()

    def pool_forgotten(self, pool: Pool) -> None:
        self.components.pool_requests.remote_workers.forget(pool)
        self.components.worker_broadcasts.forget(pool.number)
        self.components.delays.pool_forgotten(pool.number)
        if pool.demand:
            self.components.resources.wait_workers(pool, 0)

    def fail_delayed(self, pool: int) -> None:
        self.components.delays.pool_forgotten(pool)

    def wait_for_resources(self, pool: Pool, count: int) -> None:
        self.components.resources.wait_workers(pool, count)

    def actor_died(self, pool: Pool, worker: WorkerInfo, how: str) -> None:
        self.components.actors.died(pool, worker, how)

    def workers_are(self, count: int) -> None: ...

    # -- _node/tasks/worker_broadcast.py -----------------------------------------------------------

    def output_owner_of(self, slot: int) -> int:
        """The output owner of tasks submitted by the client in the slot: the output owner of the
        task that is running there, or the client itself if it is a driver."""
        tasks = self.components.host.tasks
        running = tasks.running(slot)
        return (running and tasks.output_owner(running)) or self.driver_name(slot)

    # -- _node/actors/actors.py --------------------------------------------------------------------

    def keep_granted(self, slot: int, number: int, hold: Any) -> None:
        self.components.import_requests.keep_granted(slot, number, hold)

    def remote_begin(self, asker: Asker, wanted: WantedActor, node: int) -> None:
        asker.refused(f"node h{node} is gone", True)

    def remote_end(self, identity: int, kill: bool, unheld: bool) -> None: ...

    def remote_restarts(self, asker: Client, identity: int) -> None:
        asker.answer(0)

    def remote_bind(self, slot: int, number: int, ask: BindActor) -> None:
        self.components.host.reply(
            slot, Reply(number, None, "that actor belongs to another cluster")
        )

    def remote_fail_calls(self, pool: int) -> None: ...
    def remote_freed(self, oid: int) -> None: ...

    def keep_backup(self, actor: ActorRecord, done: Callable[[], None] | None) -> None:
        if done is not None:
            done()

    def has_ended(self, actor: ActorRecord) -> None: ...

    # -- _node/groups/groups.py --------------------------------------------------------------------

    def runs_again(self, oid: int) -> bool:
        return False

    def task_of(self, slot: int, call: int) -> tuple[bytes, int]:
        components = self.components
        oid = call or components.host.tasks.running(slot)
        if not oid:
            return b"", 0
        task = self.target_of(oid) or components.imports.public(oid)
        return task, components.host.client.inspect(oid)["tries"]

    def team_of(self, slot: int, size: int) -> bytes:
        workers = self.components.workers
        worker = workers.all.get(slot)
        pool = None if worker is None else workers.pools.get(worker.pool)
        if pool is None or pool.team == NO_OBJECT or pool.team_size != size:
            return NO_TASK
        return pool.team


# Many events concern other hosts. In a cluster of several hosts the next class handles them, with
# components that a node in a cluster of one host does not have.


class ClusterNodeEvents(NodeEvents):
    """The events of a node in a cluster of several hosts. Usable once `ClusterNode` has set the
    attributes below."""

    actor_failover: ActorFailover
    drivers: Drivers
    remote_actors: RemoteActors
    remote_output: RemoteOutput
    membership: NodeMembership
    suspects: Suspects
    peers: Peers
    plan_runner: PlanRunner
    recovery: Recovery
    replicas: Replicas
    backups: ActorBackups
    transfers: Transfers

    def drop_unneeded(self) -> None:
        self.recovery.lineage.drop_unneeded()

    def freed(self, oid: int) -> None:
        self.components.actors.freed(oid)
        imports = self.components.imports
        record = imports.by_oid.get(oid)
        imports.freed(oid)
        if record is not None and oid not in imports.by_oid:
            self.transfers.dropped(record.object)
            self.recovery.freed(record)

    def is_inbound(self, oid: int) -> bool:
        return self.recovery.is_run_here(oid)

    def nobody_named(self, oid: int) -> None:
        self.recovery.reconstruction.ask_again(oid)

    def ask_for_owner(self, record: ImportRecord) -> bool:
        return self.recovery.owners.ask_for_owner(record)

    def result_held(self, oid: int) -> None:
        self.replicas.watch_result(oid)

    def extra_holds(self, oid: int) -> int:
        return self.recovery.lineage.holds(oid) + (oid in self.components.inbound_tasks)

    def joining(self, incarnation: int) -> NodeJoined:
        return self.membership.joining(incarnation)

    def returning(self, incarnation: int) -> NodeReturned:
        """The first message to a new manager, with the counters that it continues. `epochs` and
        `copied` are the highest numbers that this node has received from earlier managers."""
        return NodeReturned(
            node=self.components.number(),
            incarnation=incarnation,
            numbers=self.membership.numbers,
            members=(*self.membership.members.values(), *self.suspects.members.values()),
            epochs=self.transfers.epochs,
            copied=self.transfers.copied,
            generations=self.components.groups.generations,
        )

    def report(self) -> Iterator[Any]:
        yield from super().report()
        yield from self.backups.report()
        yield from self.transfers.report()
        yield from self.plan_runner.report()
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

    # -- for components that exist only in a cluster of several hosts ------------------------------

    def backup_number(self, object_id: bytes, host_id: int) -> int | None:
        return self.backups.number_of(object_id, host_id)

    def moved(self, record: ImportRecord) -> None:
        self.actor_failover.moved(record)

    def ownerless(self, record: ImportRecord) -> None:
        self.actor_failover.ownerless(record)

    def owners_handled(self) -> None:
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
