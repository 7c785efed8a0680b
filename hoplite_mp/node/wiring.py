"""What rooms of a node say upward: which room above hears it, and answers.

Why it exists: rooms are built in the order of their floors, each from those below it. What one of
them finds out that is a matter of rooms above it goes through a protocol in its own file (`Above`),
and this is the one place that says who is meant.
It must never know: more than that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp import errors, ids
from hoplite_mp.protocol.local import Reply
from hoplite_mp.protocol.peers import CloseFarPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.actor_records import Actor, Asker, Client, Wanted
    from hoplite_mp.node.audiences import Audience
    from hoplite_mp.node.imports import Import
    from hoplite_mp.node.main import Node
    from hoplite_mp.node.pools import Pool, WorkerInfo
    from hoplite_mp.planner.resources import Demand
    from hoplite_mp.protocol.actors import BindActor

__all__ = ["Upward"]

POST_AGAIN_S = 0.05  # after a queue of hints was full


class Upward:
    """Of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    # -- node/notes.py, store.py, sweeper.py, places.py, imports.py ----------------------------

    def public(self, oid: int) -> bytes:
        return self._node.operations.public(oid)

    def restore_elsewhere(self, oid: int) -> bool | None:
        return self._node.places.restore(oid)

    def make_room(self) -> None:
        if self._node.lan is not None:
            self._node.lan.recovering.lineage.make_room()

    def freed(self, oid: int) -> None:
        self._node.freed(oid)

    def is_guest(self, oid: int) -> bool:
        lan = self._node.lan
        return lan is not None and lan.recovering.is_run_here(oid)

    def lost_actor_call(self, worker: WorkerInfo, how: str) -> Exception | None:
        return self._node.actors.lost_call(worker, how)

    def near(self, object_id: bytes, oid: int) -> memoryview | None:
        return None if self._node.lan is None else self._node.imports.near(object_id, oid)

    def nobody_named(self, oid: int) -> None:
        if self._node.lan is not None:
            self._node.lan.recovering.remaking.ask_again(oid)

    def homeless(self, one: Import) -> bool:
        lan = self._node.lan
        return lan is not None and lan.recovering.homes.homeless(one)

    # -- node/homes.py, kept.py ----------------------------------------------------------------

    def extra_holds(self, oid: int) -> int:
        return 0 if self._node.lan is None else self._node.lan.recovering.lineage.holds(oid)

    def spare_number(self, object_id: bytes, home: int) -> int | None:
        lan = self._node.lan
        return None if lan is None else lan.spares.number_of(object_id, home)

    def moved(self, one: Import) -> None:
        if self._node.lan is not None:
            self._node.lan.actor_moves.moved(one)

    def all_heard(self) -> None:
        if self._node.lan is not None:
            self._node.lan.actor_moves.look()

    # -- node/output.py, group_tasks.py --------------------------------------------------------

    def far_audience(self, home: int) -> Audience | None:
        return None if self._node.lan is None else self._node.lan.far_output.audience(home)

    def runs_again(self, oid: int) -> bool:
        return self._node.lan is not None and oid in self._node.lan.recovering.remaking.runs

    # -- node/delegation.py --------------------------------------------------------------------

    def post(self, oid: int) -> None:
        node = self._node
        if oid in node.resources.held:  # it needs resources, here or at another host
            node.resources.again(oid)
        elif not node.workers.post(oid, False):
            node.loop.call_later(POST_AGAIN_S, lambda: self.post(oid))

    def pool_broken(self, pool: int, why: str) -> None:
        self._node.workers.break_bound(pool, why)

    def pool_deserted(self, pool: int, why: str) -> None:
        lan = self._node.lan
        if lan is None or not lan.far_actors.lost(pool, why):
            self._node.workers.desert(pool, why)

    def sends_on(self, audience: int, home: int) -> None:
        if self._node.lan is not None:
            self._node.lan.far_output.sent_on(audience, home)

    def ends_elsewhere(self, oid: int) -> None:
        if self._node.lan is not None:
            self._node.lan.recovering.keep(oid)

    def lost_call(self, oid: int, name: str, number: int) -> Exception | None:
        if not self.is_far_actor(self._node.tasks.pool_of(oid)):
            return None
        return errors.ActorLostError(
            f"the actor has lost its state: node h{number} was lost while {name}() was under way "
            "there, and it may have begun"
        )

    def is_far_actor(self, pool: int) -> bool:
        lan = self._node.lan
        return lan is not None and pool in lan.far_actors.bound

    def demand_of(self, oid: int) -> Demand:
        return self._node.resources.demand_of(oid)

    def target_of(self, oid: int) -> bytes:
        lan = self._node.lan
        return b"" if lan is None else lan.recovering.target_of(oid)

    def was_full(self, oid: int, home: int) -> None:
        self._node.resources.again(oid, home)

    # -- node/guests.py ------------------------------------------------------------------------

    def queue_of(self, pool: int) -> int:
        return self._node.workers.queue(pool, here=True)

    def post_guest(self, oid: int) -> bool:
        return self._node.workers.post(oid, here=True)

    def interrupt(self, oid: int, slot: int) -> None:
        self._node.workers.interrupt(oid, slot)

    def is_actor(self, pool: int) -> bool:
        return pool in self._node.actors.by_pool

    def refuse_calls(self, pool: int) -> None:
        self._node.actors.refuse_calls(pool)

    def is_round(self, pool: int) -> bool:
        return pool in self._node.rounds

    def arrived(self, pool: int) -> None:
        self._node.rounds.arrived(pool)

    def task_ends(self, slot: int) -> None:
        for fd in self._node.workers.pipes.get(slot, ()):
            self._node.output.catch_up(fd)

    def admit(self, peer: int, task: bytes, demand: Demand, needed: bool) -> bool:
        return self._node.resources.admit(peer, task, demand, needed)

    def admitted(self, oid: int, task: bytes, demand: Demand) -> None:
        self._node.resources.admitted(oid, task, demand)

    def dropped(self, task: bytes) -> None:
        self._node.resources.dropped(task)

    # -- node/workers.py -----------------------------------------------------------------------

    def waits_for_resources(self, oid: int) -> bool:
        return oid in self._node.resources.rows

    def has_resources(self, oid: int) -> bool:
        return oid in self._node.resources.held

    def may_leave(self) -> bool:
        return self._node.lan is not None

    def pool_closed(self, pool: int, kill: bool) -> None:
        if self._node.lan is not None:
            self._node.lan.far_pools.close(pool, kill)

    def pool_forgotten(self, pool: Pool) -> None:
        self._node.rounds.forget(pool.number)
        if pool.demand:
            self._node.resources.wait_workers(pool, 0)

    def wait_for_resources(self, pool: Pool, count: int) -> None:
        self._node.resources.wait_workers(pool, count)

    def actor_died(self, pool: Pool, worker: WorkerInfo, how: str) -> None:
        self._node.actors.died(pool, worker, how)

    def workers_are(self, count: int) -> None:
        node, lan = self._node, self._node.lan
        if lan is None or node.host.roster.leaves:
            return
        if count != (node.start.workers if lan.workers_now is None else lan.workers_now):
            lan.tell_workers(count)

    # -- node/rounds.py ------------------------------------------------------------------------

    def audience_of(self, slot: int) -> int:
        return self._node.audience_of(slot)

    def leaves(self) -> bool:
        return self._node.host.roster.leaves

    def close_far_pool(self, home: int, pool: int) -> None:
        if self._node.lan is not None:
            self._node.lan.far_pools.closed(home, CloseFarPool(pool, False))

    # -- node/draining.py ----------------------------------------------------------------------

    def leaves_now(self) -> None:
        assert self._node.lan is not None
        self._node.lan.workers_now = 0
        self._node.actors.leave()

    def has_calls(self, home: int) -> bool:
        return self._node.lan is not None and self._node.lan.far_actors.has_calls(home)

    def is_worker(self, slot: int) -> bool:
        return slot in self._node.workers.all

    # -- node/actors.py ------------------------------------------------------------------------

    def keep_granted(self, slot: int, number: int, hold: Any) -> None:
        self._node.requests.granted.setdefault(slot, {})[number] = [hold]

    def far_begin(self, asker: Asker, wanted: Wanted, node: int) -> None:
        if self._node.lan is None:
            asker.refused(f"node h{node} is gone", True)
        else:
            self._node.lan.far_actors.begin(asker, wanted, node)

    def far_end(self, identity: int, kill: bool, unheld: bool) -> None:
        if self._node.lan is not None:
            self._node.lan.far_actors.end(identity, kill, unheld)

    def far_restarts(self, asker: Client, identity: int) -> None:
        if self._node.lan is None:
            asker.told(0)
        else:
            self._node.lan.far_actors.ask_restarts(asker, identity)

    def far_bind(self, slot: int, number: int, ask: BindActor) -> None:
        if self._node.lan is None:
            self._node.reply(slot, Reply(number, None, "that actor is of another cluster"))
        else:
            self._node.lan.far_actors.bind(slot, number, ask)

    def far_fail_calls(self, pool: int) -> None:
        if self._node.lan is not None:
            self._node.lan.far_actors.fail_calls(pool)

    def far_freed(self, oid: int) -> None:
        if self._node.lan is not None:
            self._node.lan.far_actors.freed(oid)

    def keep_spare(self, actor: Actor, done: Callable[[], None] | None) -> None:
        if self._node.lan is not None:
            self._node.lan.spares.keep(actor, done)
        elif done is not None:
            done()

    def has_ended(self, actor: Actor) -> None:
        if self._node.lan is not None:
            self._node.lan.spares.ended(actor)

    # -- node/far_actors.py --------------------------------------------------------------------

    def when_known(self, identity: bytes, action: Callable[[], None]) -> None:
        assert self._node.lan is not None
        self._node.lan.actor_moves.when_known(identity, action)

    # -- node/actor_spares.py ------------------------------------------------------------------

    def sought(self, home: int, identity: bytes) -> None:
        assert self._node.lan is not None
        self._node.lan.actor_moves.sought(home, identity)

    # -- node/groups.py ------------------------------------------------------------------------

    def task_of(self, slot: int) -> tuple[bytes, int]:
        node = self._node
        oid = node.tasks.running(slot)
        if not oid:
            return b"", 0
        one = node.imports.by_oid.get(oid)  # it comes from another host
        task = self.target_of(oid) or (one.object if one else ids.pack_id(node.client.home, oid))
        return task, node.client.inspect(oid)["tries"]
