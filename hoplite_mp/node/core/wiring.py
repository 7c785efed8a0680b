"""Upward calls: which room implements what the rooms below it ask for.

Why it exists: rooms are built in the order of their floors, each from those below it. A room that
needs something from rooms above it declares a protocol in its own file (`Above`), and this file
alone connects each of these methods with the room that implements it.
It must never know: anything but these connections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp import errors
from hoplite_mp.protocol.local import Reply
from hoplite_mp.protocol.reports import NodeReturned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp.node.actors.actor_moves import ActorMoves
    from hoplite_mp.node.actors.actor_records import Actor, Asker, Client, Wanted
    from hoplite_mp.node.core.lan import Lan
    from hoplite_mp.node.core.membership import Alone
    from hoplite_mp.node.core.rooms import Rooms
    from hoplite_mp.node.objects.imports import Import
    from hoplite_mp.node.output.subscriber import Subscriber
    from hoplite_mp.node.tasks.pools import Pool, WorkerInfo
    from hoplite_mp.planner.resources import Demand
    from hoplite_mp.protocol.actors import BindActor
    from hoplite_mp.protocol.messages import NodeJoined
    from hoplite_mp.protocol.peers import PeerMessage

__all__ = ["Upward"]


class Upward:
    """The upward calls of one node; usable once its rooms are built."""

    rooms: Rooms
    alone: Alone

    def __init__(self) -> None:
        # Set if there are other hosts.
        self.lan: Lan | None = None
        self.actor_moves: ActorMoves | None = None

    # -- node/notes.py, store.py, sweeper.py, remote_objects.py, imports.py --------------------

    def public(self, oid: int) -> bytes:
        return self.rooms.imports.public(oid)

    def restore_elsewhere(self, oid: int) -> bool | None:
        return self.rooms.remote_objects.restore(oid)

    def unreadable(self, oid: int, why: str) -> None:
        lost = errors.ObjectLostError(f"object {self.public(oid).hex()} is lost: {why}")
        self.rooms.results.replace_spilled(oid, lost)

    def make_room(self) -> None:
        if self.lan is not None:
            self.lan.recovering.lineage.make_room()

    def freed(self, oid: int) -> None:
        self.rooms.actors.freed(oid)
        if self.lan is not None:
            self.lan.freed(oid)
        else:
            self.rooms.imports.freed(oid)

    def is_guest(self, oid: int) -> bool:
        lan = self.lan
        return lan is not None and lan.recovering.is_run_here(oid)

    def lost_actor_call(self, worker: WorkerInfo, how: str) -> Exception | None:
        return self.rooms.actors.lost_call(worker, how)

    def near(self, object_id: bytes, oid: int) -> memoryview | None:
        return None if self.lan is None else self.rooms.imports.near(object_id, oid)

    def nobody_named(self, oid: int) -> None:
        if self.lan is not None:
            self.lan.recovering.reconstruction.ask_again(oid)

    def homeless(self, one: Import) -> bool:
        lan = self.lan
        return lan is not None and lan.recovering.owners.homeless(one)

    # -- node/recovery/owners.py, exports.py -------------------------------------------------------

    def extra_holds(self, oid: int) -> int:
        return 0 if self.lan is None else self.lan.recovering.lineage.holds(oid)

    def spare_number(self, object_id: bytes, home: int) -> int | None:
        lan = self.lan
        return None if lan is None else lan.spares.number_of(object_id, home)

    def moved(self, one: Import) -> None:
        if self.actor_moves is not None:
            self.actor_moves.moved(one)

    def ownerless(self, one: Import) -> None:
        if self.actor_moves is not None:
            self.actor_moves.ownerless(one)

    def all_heard(self) -> None:
        if self.actor_moves is not None:
            self.actor_moves.look()

    # -- node/core/management.py, standing.py ------------------------------------------------------

    def receive(self, message: Any) -> None:
        rooms = self.rooms
        if self.lan is not None and self.lan.receive(message):
            return
        if not (rooms.operations.receive(message) or rooms.actors.receive(message)):
            rooms.groups.receive(message)

    def answer_standing(self) -> None:
        self.rooms.standing.answer()

    def joining(self, incarnation: int) -> NodeJoined:
        if self.lan is None:
            return self.alone.joining(incarnation)
        return self.lan.membership.joining(incarnation)

    def returning(self, incarnation: int) -> NodeReturned:
        number, generations = self.rooms.number(), self.rooms.groups.generations
        if self.lan is None:
            about = 1, self.alone.known
            return NodeReturned(number, incarnation, *about, generations=generations)
        return NodeReturned(number, incarnation, *self.lan.counted(), generations)

    def report(self) -> Iterator[Any]:
        yield from self.rooms.report()
        if self.lan is not None:
            yield from self.lan.report()

    def cluster(self) -> bytes:
        return b"" if self.lan is None else self.lan.membership.cluster

    # -- node/core/rooms.py, leases.py, pool_requests.py -------------------------------------------

    def send_peer(self, home: int, message: PeerMessage) -> bool:
        return self.lan is not None and self.lan.peers.send(home, message)

    def driver_name(self, slot: int) -> int:
        return 0 if self.lan is None else self.lan.drivers.name_of(slot)

    def leases(self, slot: int) -> None:
        if self.lan is not None:
            self.lan.recovering.leases(slot)

    def tell_workers(self, count: int) -> None:
        if self.lan is not None:
            self.lan.membership.tell_workers(count)

    def grow_far(self, number: int, count: int) -> bool:
        return self.lan is not None and self.lan.membership.grow_far(number, count)

    # -- node/output/output.py ---------------------------------------------------------------------

    def far_subscriber(self, home: int) -> Subscriber | None:
        return None if self.lan is None else self.lan.far_output.subscriber(home)

    # -- node/tasks/delegation.py ------------------------------------------------------------------

    def post(self, oid: int) -> None:
        rooms, workers = self.rooms, self.rooms.workers
        pool = workers.tasks.pool_of(oid)
        if pool not in workers.pools and not self.is_far_actor(pool):
            workers.fail_closed(oid)  # it was closed while another host had the task
        elif oid in rooms.resources.held:  # it holds resources, of this host or of another one
            rooms.resources.again(oid)
        else:
            rooms.workers.announce(oid, False)

    def pool_deserted(self, pool: int, why: str) -> None:
        lan = self.lan
        if lan is None or not lan.far_actors.lost(pool, why):
            self.rooms.workers.desert(pool, why)

    def sends_on(self, audience: int, home: int) -> None:
        if self.lan is not None:
            self.lan.far_output.sent_on(audience, home)

    def ends_elsewhere(self, oid: int) -> None:
        if self.lan is not None:
            self.lan.recovering.keep(oid)

    def lost_call(self, oid: int, name: str, number: int) -> Exception | None:
        if not self.is_far_actor(self.rooms.host.tasks.pool_of(oid)):
            return None
        return errors.ActorLostError(
            f"the actor has lost its state: node h{number} was lost while {name}() was under way "
            "there, and it may have begun"
        )

    def holds_inner(self, oid: int, holds: list[Any]) -> None:
        sweeper = self.rooms.sweeper
        if oid in sweeper.inner:  # its submitter is dead
            sweeper.inner[oid] = holds
        else:
            sweeper.results.untaken[oid] = holds

    def is_far_actor(self, pool: int) -> bool:
        lan = self.lan
        return lan is not None and pool in lan.far_actors.bound

    def demand_of(self, oid: int) -> Demand:
        return self.rooms.resources.demand_of(oid)

    def target_of(self, oid: int) -> bytes:
        lan = self.lan
        return b"" if lan is None else lan.recovering.target_of(oid)

    def was_full(self, oid: int, home: int) -> None:
        self.rooms.resources.again(oid, home)

    # -- node/tasks/guests.py ----------------------------------------------------------------------

    def queue_of(self, pool: int) -> int:
        return self.rooms.workers.queue(pool, here=True)

    def post_guest(self, oid: int) -> None:
        self.rooms.workers.announce(oid, here=True)

    def interrupt(self, oid: int, slot: int) -> None:
        self.rooms.workers.interrupt(oid, slot)

    def is_actor(self, pool: int) -> bool:
        return pool in self.rooms.actors.by_pool

    def refuse_calls(self, pool: int) -> None:
        self.rooms.actors.refuse_calls(pool)

    def is_round(self, pool: int) -> bool:
        return pool in self.rooms.rounds

    def arrived(self, pool: int) -> None:
        self.rooms.rounds.arrived(pool)

    def task_ends(self, slot: int) -> None:
        for fd in self.rooms.workers.pipes.get(slot, ()):
            self.rooms.output.catch_up(fd)

    def admit(self, peer: int, task: bytes, demand: Demand, needed: bool) -> bool:
        return self.rooms.resources.admit(peer, task, demand, needed)

    def admitted(self, oid: int, task: bytes, demand: Demand) -> None:
        self.rooms.resources.admitted(oid, task, demand)

    def dropped(self, task: bytes) -> None:
        self.rooms.resources.dropped(task)

    # -- node/tasks/workers.py ---------------------------------------------------------------------

    def waits_for_resources(self, oid: int) -> bool:
        return oid in self.rooms.resources.rows

    def has_resources(self, oid: int) -> bool:
        return oid in self.rooms.resources.held

    def may_leave(self) -> bool:
        return self.lan is not None

    def pool_forgotten(self, pool: Pool) -> None:
        self.rooms.rounds.forget(pool.number)
        if pool.demand:
            self.rooms.resources.wait_workers(pool, 0)

    def wait_for_resources(self, pool: Pool, count: int) -> None:
        self.rooms.resources.wait_workers(pool, count)

    def actor_died(self, pool: Pool, worker: WorkerInfo, how: str) -> None:
        self.rooms.actors.died(pool, worker, how)

    def workers_are(self, count: int) -> None:
        if self.lan is not None:
            self.lan.membership.workers_are(count)

    # -- node/tasks/rounds.py ----------------------------------------------------------------------

    def audience_of(self, slot: int) -> int:
        """The audience (the driver to which output is sent) of tasks that the client in that slot
        submits: that of the task which runs in the slot, or the client itself if it is a driver."""
        tasks = self.rooms.host.tasks
        running = tasks.running(slot)
        return (running and tasks.audience(running)) or self.driver_name(slot)

    # -- node/tasks/draining.py --------------------------------------------------------------------

    def leaves_now(self) -> None:
        assert self.lan is not None
        self.lan.membership.workers_now = 0
        self.rooms.actors.leave()

    def drained(self) -> bool:
        return self.rooms.management.announce_leaving()

    def has_calls(self, home: int) -> bool:
        return self.lan is not None and self.lan.far_actors.has_calls(home)

    # -- node/actors/actors.py ---------------------------------------------------------------------

    def keep_granted(self, slot: int, number: int, hold: Any) -> None:
        self.rooms.import_requests.keep_granted(slot, number, hold)

    def far_begin(self, asker: Asker, wanted: Wanted, node: int) -> None:
        if self.lan is None:
            asker.refused(f"node h{node} is gone", True)
        else:
            self.lan.far_actors.begin(asker, wanted, node)

    def far_end(self, identity: int, kill: bool, unheld: bool) -> None:
        if self.lan is not None:
            self.lan.far_actors.end(identity, kill, unheld)

    def far_restarts(self, asker: Client, identity: int) -> None:
        if self.lan is None:
            asker.answer(0)
        else:
            self.lan.far_actors.ask_restarts(asker, identity)

    def far_bind(self, slot: int, number: int, ask: BindActor) -> None:
        if self.lan is None:
            self.rooms.host.reply(slot, Reply(number, None, "that actor is of another cluster"))
        else:
            self.lan.far_actors.bind(slot, number, ask)

    def far_fail_calls(self, pool: int) -> None:
        if self.lan is not None:
            self.lan.far_actors.fail_calls(pool)

    def far_freed(self, oid: int) -> None:
        if self.lan is not None:
            self.lan.far_actors.freed(oid)

    def keep_spare(self, actor: Actor, done: Callable[[], None] | None) -> None:
        if self.lan is not None:
            self.lan.spares.keep(actor, done)
        elif done is not None:
            done()

    def has_ended(self, actor: Actor) -> None:
        if self.lan is not None:
            self.lan.spares.ended(actor)

    # -- node/actors/far_actors.py -----------------------------------------------------------------

    def when_known(self, identity: bytes, action: Callable[[], None]) -> None:
        assert self.actor_moves is not None
        self.actor_moves.when_known(identity, action)

    # -- node/actors/actor_spares.py ---------------------------------------------------------------

    def sought(self, home: int, identity: bytes) -> None:
        assert self.actor_moves is not None
        self.actor_moves.sought(home, identity)

    # -- node/groups/groups.py ---------------------------------------------------------------------

    def runs_again(self, oid: int) -> bool:
        return self.lan is not None and oid in self.lan.recovering.reconstruction.runs

    def task_of(self, slot: int) -> tuple[bytes, int]:
        rooms = self.rooms
        oid = rooms.host.tasks.running(slot)
        if not oid:
            return b"", 0
        task = self.target_of(oid) or rooms.imports.public(oid)
        return task, rooms.host.client.inspect(oid)["tries"]
