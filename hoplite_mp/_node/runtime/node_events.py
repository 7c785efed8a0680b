"""Events that components of a node report upward, and which component handles each of them.

Components are built bottom up, each from those below it. A component that needs something from
components above it declares a protocol in its own file (`ExportsEvents`), and this file connects
each of these methods with the component that implements it. What is about other hosts gets the
answer of a node without other hosts; _node/runtime/cluster_node_events.py overrides it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp import errors
from hoplite_mp._protocol.fields import NO_OBJECT
from hoplite_mp._protocol.groups import NO_TASK
from hoplite_mp._protocol.local import Reply
from hoplite_mp._protocol.reports import NodeReturned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._node.actors.actor_records import ActorRecord, Asker, Client, WantedActor
    from hoplite_mp._node.manager_link.membership import SingleHostMembership
    from hoplite_mp._node.objects.imports import ImportRecord
    from hoplite_mp._node.output.subscriber import Subscriber
    from hoplite_mp._node.runtime.components import Components
    from hoplite_mp._node.tasks.pools import Pool, WorkerInfo
    from hoplite_mp._planner.resources import Demand
    from hoplite_mp._protocol.actors import BindActor
    from hoplite_mp._protocol.messages import NodeJoined
    from hoplite_mp._protocol.peers import PeerMessage

__all__ = ["NodeEvents"]


class NodeEvents:
    """The events of a node in a cluster of one host; usable once its components are built."""

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

    def make_room(self) -> None: ...

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

    def ask_for_owner(self, one: ImportRecord) -> bool:
        return False

    def result_held(self, oid: int) -> None: ...

    def extra_holds(self, oid: int) -> int:
        return 0

    # -- _node/manager_link/connection.py, join_waiters.py -----------------------------------------

    def receive(self, message: Any) -> None:
        components = self.components
        if not (components.operations.receive(message) or components.actors.receive(message)):
            components.groups.receive(message)

    def answer_standing(self) -> None:
        self.components.standing.answer()

    def joining(self, incarnation: int) -> NodeJoined:
        return self.alone.joining(incarnation)

    def returning(self, incarnation: int) -> NodeReturned:
        about = self.components.number(), incarnation, 1, self.alone.known
        return NodeReturned(*about, generations=self.components.groups.generations)

    def report(self) -> Iterator[Any]:
        return self.components.report()

    def cluster(self) -> bytes:
        return b""

    # -- _node/runtime/components.py, leases.py, pool_requests.py ----------------------------------

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
            workers.fail_closed(oid)  # it was closed while another host had the task
        elif oid in components.resources.held:  # it holds resources, of this host or of another one
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
            f"the actor has lost its state: node h{number} was lost while {name}() was under way "
            "there, and it may have begun"
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
        return pool in self.components.rounds

    def counts_on(self, slot: int) -> bool:
        return self.components.rounds.counts_on(slot)

    def arrived(self, pool: int) -> None:
        self.components.rounds.arrived(pool)

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
        self.components.rounds.forget(pool.number)
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
        """The output owner of tasks that the client in that slot submits: that of the task that
        runs in the slot, or the client itself if it is a driver."""
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
        self.components.host.reply(slot, Reply(number, None, "that actor is of another cluster"))

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
