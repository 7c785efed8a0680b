"""The actors on this host: how they start, end, and are restarted.

An actor consists of a pool and an *identity*. The pool has one worker, which creates the user's
object before it runs its first call. The identity is an object in the node's own table.
Handles and running calls on any host hold the identity, as they hold any object. When the last
holder has released the identity, the pool is closed.

Invariant: the number of an actor's pool is not reused before the identity is gone, so a process
that holds a handle may submit to that number without asking the node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp import _serialize, errors
from hoplite_mp._common import ids
from hoplite_mp._common.object_states import KIND_PUT, NODE_SLOT, STATE
from hoplite_mp._node.actors.actor_records import (
    ENDED,
    ActorRecord,
    Asker,
    Client,
    Opening,
    WantedActor,
    ended_calls,
    taken_words,
)
from hoplite_mp._node.tasks.worker_pools import Pool
from hoplite_mp._protocol.actors import BACKLOG_CALLS_MAX
from hoplite_mp._protocol.local import POOL_LEAVING, Reply
from hoplite_mp._protocol.messages import (
    ActorNameClaimed,
    ActorNameQuery,
    ActorNameReleased,
    ActorNameReport,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.tasks.inbound_tasks import InboundTasks
    from hoplite_mp._node.tasks.resources import Resources
    from hoplite_mp._node.tasks.worker_pools import WorkerInfo
    from hoplite_mp._node.tasks.workers import Workers
    from hoplite_mp._protocol.actors import BindActor
    from hoplite_mp._protocol.local import Request
    from hoplite_mp._protocol.messages import NodeToManager

__all__ = ["POOL_ENDED", "LocalActors"]

POOL_OPEN, POOL_CLOSING, POOL_ENDED = 1, 2, 4


class LocalActorsEvents(Protocol):
    """Reports and requests from this component to the components above it."""

    def output_owner_of(self, slot: int) -> int:
        """The driver that receives the output of an actor started by the process in the slot."""

    def keep_granted(self, slot: int, number: int, hold: Any) -> None:
        """Keeps a hold for the process in the slot until the process has acquired its own."""

    def remote_begin(self, asker: Asker, wanted: WantedActor, node: int) -> None:
        """Starts an actor on another node."""

    def remote_end(self, identity: int, kill: bool, unheld: bool) -> None:
        """Ends an actor on another host."""

    def remote_restarts(self, asker: Client, identity: int) -> None:
        """Answers with the number of restarts of an actor on another host."""

    def remote_bind(self, slot: int, number: int, ask: BindActor) -> None:
        """Opens a pool here for calls to an actor on another host."""

    def remote_fail_calls(self, pool: int) -> None:
        """Fails calls that are queued for an actor on another host, if the actor has ended."""

    def remote_freed(self, oid: int) -> None:
        """Called when no process here holds an object, which may be the identity of an actor on
        another host."""

    def keep_backup(self, actor: ActorRecord, done: Callable[[], None] | None) -> None:
        """Sends the data for a restart to the actor's backup. done: see `ActorBackups.keep`."""

    def has_ended(self, actor: ActorRecord) -> None:
        """Called when the actor will not be restarted."""


class LocalActors:
    """All actors on this host."""

    def __init__(
        self,
        host: HostContext,
        workers: Workers,
        inbound_tasks: InboundTasks,
        resources: Resources,
        events: LocalActorsEvents,
    ) -> None:
        self.client = host.client
        self.tasks = host.tasks
        self.imports = host.imports
        self.results = host.results
        self.clients = host.clients
        self.reply = host.reply
        self.replier = host.replier
        self.send_manager = host.send_manager
        self.workers = workers
        self.inbound_tasks = inbound_tasks
        self.resources = resources
        self.events = events
        self.by_pool: dict[int, ActorRecord] = {}
        self.by_identity: dict[int, ActorRecord] = {}
        self.openings: dict[int, Opening] = {}  # by number of the request to the manager
        self.leaving = False  # this node will leave the cluster when all pending calls have ended
        self._requests = 0

    # -- requests from clients -----------------------------------------------------------------

    def asker(self, slot: int, request: Request) -> Client:
        line = self.clients.get(slot)

        def keep(hold: Any) -> bool:
            if line is None or self.clients.get(slot) is not line:
                return False
            self.events.keep_granted(slot, request.number, hold)
            return True

        return Client(slot, request.number, self.replier(slot), keep)

    def open(self, slot: int, request: Request) -> None:
        ask: Any = request.ask
        asker = self.asker(slot, request)
        output_owner = self.events.output_owner_of(slot)
        wanted = WantedActor.of(ask, output_owner=output_owner)
        if ask.node == self.client.number:
            self.begin(asker, wanted)
        else:
            self.events.remote_begin(asker, wanted, ask.node)

    def begin(self, asker: Asker, wanted: WantedActor) -> None:
        """Starts an actor on this host, unless another actor has its name."""
        if self.leaving:
            asker.refused(self._why_leaving(), True)
            return
        if wanted.only_now and not self.resources.is_available(wanted.demand):
            asker.refused(f"node h{self.client.number} has too few free resources now", True)
            return
        identity = self.client.new(KIND_PUT, STATE["CLAIMED"], NODE_SLOT, 0)
        opening = Opening(asker, wanted, identity)
        opening.holds = [self.client.hold(identity, False), self.client.hold(wanted.setup)]
        if wanted.name:
            node, public = self.client.number, self.public(identity)
            self._ask_manager(
                opening,
                lambda number: ActorNameClaimed(
                    number, node, wanted.name, public, can_fail_over=wanted.restarts > 0
                ),
            )
        else:
            self._start(opening, wanted)

    def find(self, slot: int, request: Request) -> None:
        name = request.ask.name  # type: ignore[union-attr]
        self._ask_manager(
            Opening(self.asker(slot, request), None),
            lambda number: ActorNameQuery(number, self.client.number, name),
        )

    def public(self, oid: int) -> bytes:
        """The cluster-wide id of an object with a header here."""
        record = self.imports.by_oid.get(oid)
        return ids.pack_id(self.client.host_id, oid) if record is None else record.object

    def _ask_manager(self, opening: Opening, make: Callable[[int], NodeToManager]) -> None:
        self._requests += 1
        opening.asked = make(self._requests)
        self.openings[self._requests] = opening
        self.send_manager(opening.asked)

    def name_held(self, message: ActorNameReport) -> None:
        """Handles the manager's answer that states which actor has a name."""
        opening = self.openings.pop(message.request, None)
        if opening is None:
            return
        wanted, holder = opening.wanted, message.identity
        if opening.refusal:
            opening.asker.refused(opening.refusal, opening.gone)
        elif wanted is not None and holder == self.public(opening.identity):
            self._start(opening, wanted)
        else:
            self._discard(opening)
            if holder is None:
                opening.asker.refused("")
            elif wanted is None or wanted.get_if_exists:
                self._grant(opening.asker, holder)
            else:
                opening.asker.refused(taken_words(wanted.name))

    def _discard(self, opening: Opening) -> None:
        """Discards an identity for which no actor was started."""
        if opening.identity:
            self.results.store_value(opening.identity, _serialize.encode(None), False)
            opening.holds.clear()

    def report(self) -> Iterator[NodeToManager]:
        """Yields the state of actors for a new manager."""
        for actor in self.by_identity.values():
            if actor.name:
                identity, moves = self.public(actor.identity), actor.wanted.restarts > 0
                yield ActorNameClaimed(0, self.client.number, actor.name, identity, moves)
        for opening in self.openings.values():
            yield opening.asked

    def _start(self, opening: Opening, wanted: WantedActor) -> None:
        """Starts the actor's process."""
        workers, identity = self.workers, opening.identity
        opened = Pool(
            number=0,
            target=1,
            owner=NODE_SLOT,
            setup=wanted.setup,
            actor=True,
            output_owner=wanted.output_owner,
            env=wanted.env,
            demand=wanted.demand,
        )
        if self.leaving or not workers.open(opened):
            self._refuse(opening, wanted)
            return
        pool = opened.number
        known = _serialize.encode((pool, wanted.about, self.public(identity)))
        self.results.store_value(identity, known, False)
        name, restarts = wanted.name, wanted.restarts
        actor = ActorRecord(identity, pool, name, wanted.class_name, restarts, wanted, label=name)
        self.by_pool[pool] = self.by_identity[identity] = actor
        if wanted.detached:
            actor.hold = self.client.hold(identity)
        opening.asker.granted(self.client.hold(identity))
        self.keep(actor)

    def _refuse(self, opening: Opening, wanted: WantedActor) -> None:
        """Replies to the asker with the reason why its actor does not start, after the manager has
        freed the actor's name. Otherwise the asker could claim the name again through another node
        before the manager has freed it."""
        name, why = wanted.name, self._why_leaving() if self.leaving else self.workers.why_none
        self._release_name(name, opening.identity)
        self._discard(opening)
        if name:
            later = Opening(opening.asker, None, refusal=why, gone=self.leaving)
            self._ask_manager(later, lambda n: ActorNameQuery(n, self.client.number, name))
        else:
            opening.asker.refused(why, self.leaving)

    def keep(self, actor: ActorRecord, done: Callable[[], None] | None = None) -> None:
        """Updates the actor's backup. done: see `ActorBackups.keep`."""
        self.events.keep_backup(actor, done)

    def _grant(self, asker: Asker, identity: bytes) -> None:
        """Answers with an existing actor on any host."""

        def done(holds: list[Any]) -> None:
            # There is no hold, or the object has failed, if the last handle was just released.
            hold = holds[0]
            if hold is None or self.client.state(hold.oid) == STATE["FAILED"]:
                return asker.refused("")
            asker.granted(hold)

        self.imports.ask([identity], done)

    def end(self, slot: int, request: Request) -> None:
        ask: Any = request.ask
        here = self.end_here(ask.identity, ask.kill, ask.unheld)
        if not here:
            self.events.remote_end(ask.identity, ask.kill, ask.unheld)
        if not ask.unheld:
            self.reply(slot, Reply(request.number))

    def of(self, identity: int) -> ActorRecord | None:
        """The actor on this host with that identity. It may have started on another host."""
        return self.by_identity.get(identity) or self.by_identity.get(
            self.imports.own(self.public(identity))
        )

    def end_here(
        self, identity: int, kill: bool, unheld: bool = False, remote: bool = False
    ) -> bool:
        """Ends an actor on this host. Returns False if there is no such actor. remote: the request
        is from another host, which repeats it if the actor moves."""
        actor = self.of(identity)
        if actor is not None and unheld:
            actor.killed_unheld = True
        elif actor is not None:
            self._end(actor, kill, remote)
        return actor is not None

    def _end(self, actor: ActorRecord, kill: bool, remote: bool) -> None:
        self._forget_name(actor)
        actor.hold = None
        if kill:
            if actor.ended is None:
                error = errors.ActorLostError(f"{actor.title} was ended by Actor.kill")
                self.end_with(actor, error)
            pool = self.workers.pools[actor.pool]
            pool.broken = ENDED
            if pool.demand:  # its process may still be waiting for resources
                self.resources.wait_workers(pool, 0)
            for worker in list(pool.workers.values()):
                self.workers.kill(worker, "closing")
        elif actor.ended is None:
            self.client.open_pool(actor.pool, POOL_CLOSING)
            self.tasks.wake_pool(actor.pool)
            if remote:
                # The backup records that the actor has no name and is not detached.
                self.keep(actor)
            else:  # no other host could notify the backup if this host were lost
                actor.closed = True
                self.events.has_ended(actor)

    def restarts(self, slot: int, request: Request) -> None:
        identity = request.ask.identity  # type: ignore[union-attr]
        actor = self.of(identity)
        if actor is None:
            self.events.remote_restarts(self.asker(slot, request), identity)
        else:
            self.reply(slot, Reply(request.number, actor.restarts))

    def bind(self, slot: int, request: Request) -> None:
        self.events.remote_bind(slot, request.number, request.ask)  # type: ignore[arg-type]

    def refuse_calls(self, pool: int) -> None:
        """Fails calls that were queued for an actor after its end."""
        actor = self.by_pool.get(pool)
        if actor is not None and actor.ended is not None:
            self._fail_queued(actor)

    def fail_calls(self, slot: int, request: Request) -> None:
        pool = request.ask.pool  # type: ignore[union-attr]
        self.refuse_calls(pool)
        if pool not in self.by_pool:
            self.events.remote_fail_calls(pool)

    # -- requests from actors' own processes ---------------------------------------------------

    def _of_worker(self, slot: int) -> ActorRecord | None:
        worker = self.workers.all.get(slot)
        return None if worker is None else self.by_pool.get(worker.pool)

    def begins(self, slot: int, request: Request) -> None:
        """Records that the actor's process has created its object. If the process started from a
        checkpoint, it runs calls only when the backup also has that checkpoint."""
        actor = self._of_worker(slot)
        asker = self.asker(slot, request)

        def go_on() -> None:
            asker.answer(self._backlog(actor))

        if actor is not None:
            actor.begun = True
            self.keep(actor, go_on if actor.state is not None else None)
        if actor is None or actor.state is None:
            go_on()

    def backlog(self, slot: int, request: Request) -> None:
        """Replies with more queued calls, because the process has begun all calls in the last
        reply."""
        self.reply(slot, Reply(request.number, self._backlog(self._of_worker(slot))))

    def _backlog(self, actor: ActorRecord | None) -> list[int]:
        return [] if actor is None else self.client.queued_in(actor.pool)[:BACKLOG_CALLS_MAX]

    def state_asked(self, slot: int, request: Request) -> None:
        actor = self._of_worker(slot)
        if actor is None or actor.state is None:
            self.reply(slot, Reply(request.number, 0))
        else:
            self.asker(slot, request).granted(actor.state)

    def keep_state(self, slot: int, request: Request) -> None:
        actor = self._of_worker(slot)
        asker = self.asker(slot, request)
        hold = self.client.hold(request.ask.state)  # type: ignore[union-attr]
        if actor is None or hold is None:
            asker.answer(None)
            return
        actor.state = hold
        self.keep(actor, lambda: asker.answer(None))

    def constructor_raised(self, slot: int, request: Request) -> None:
        actor = self._of_worker(slot)
        ask: Any = request.ask
        if actor is not None and actor.ended is None:
            self._end_with_payload(actor, ask.payload)
        self.reply(slot, Reply(request.number))

    def may_end(self, slot: int, request: Request) -> None:
        """Replies to the process of a closed, idle actor whether it may exit. It may not while
        calls to the actor are still waiting for arguments."""
        actor = self._of_worker(slot)
        if actor is None:
            ends = True
        elif self.tasks.pool_state(actor.pool) == POOL_LEAVING:
            ends = False  # other hosts may still send calls
        else:
            ends = not (
                self.client.queued_in(actor.pool, True)
                or self.inbound_tasks.has_pending_calls(actor.pool)
            )
        if ends and actor is not None and actor.ended is None:
            self.end_with(actor, errors.ActorLostError(f"{actor.title} was closed"))
        self.reply(slot, Reply(request.number, ends))

    # -- ends and restarts ---------------------------------------------------------------------

    def leave(self) -> None:
        """Refuses new calls and actors, and releases names, because this node is leaving the
        cluster."""
        self.leaving = True
        for actor in self.by_pool.values():
            self._forget_name(actor)
            if actor.ended is None and self.tasks.pool_state(actor.pool) == POOL_OPEN:
                self.client.open_pool(actor.pool, POOL_LEAVING)
                self.keep(actor)  # the backup records that the actor has no name

    def has_left(self) -> None:
        """Ends all actors, because their calls have ended and this node leaves. No other host
        restarts them."""
        for actor in self.by_pool.values():
            if actor.ended is None:
                self.end_with(actor, errors.ActorLostError(f"{actor.title}: {self._why_leaving()}"))

    def _why_leaving(self) -> str:
        return f"node h{self.client.number} is leaving the cluster"

    def died(self, pool: Pool, worker: WorkerInfo, how: str) -> None:
        """Restarts or ends an actor whose process has exited. The call that it was running has
        already been settled."""
        actor = self.by_pool.get(pool.number)
        if actor is None:  # the identity is gone, so no call is left
            pool.broken = ENDED
            return
        actor.begun = False
        actor.calls_done += ended_calls(self.client, worker.slot)
        if actor.ended is None and actor.restarts_left > 0:
            actor.restarts_left -= 1
            actor.restarts += 1
            self.keep(actor)
            return
        if actor.ended is None:
            self.end_with(actor, self.loss(actor, worker, how))
        pool.broken = ENDED
        self._fail_queued(actor)

    def lost_call(self, worker: WorkerInfo, how: str) -> Exception | None:
        """The error for a call that was running when the actor's process exited, or None if the
        worker is not an actor."""
        actor = self.by_pool.get(worker.pool)
        return None if actor is None else self.loss(actor, worker, how)

    def loss(self, actor: ActorRecord, worker: WorkerInfo, how: str) -> Exception:
        return actor.loss(f"worker {worker.slot}@h{self.client.number}", how)

    def freed(self, oid: int) -> None:
        """Handles an object without holders. If it is an identity, ends the actor."""
        actor = self.by_identity.pop(oid, None)
        if actor is None:
            self.events.remote_freed(oid)
            return
        self._forget_name(actor)
        self.events.has_ended(actor)
        self.by_pool.pop(actor.pool, None)
        self.workers.close(actor.pool, actor.killed_unheld)

    def end_with(self, actor: ActorRecord, error: BaseException) -> None:
        self._end_with_payload(actor, _serialize.encode_error(error, "").tobytes())

    def _end_with_payload(self, actor: ActorRecord, payload: bytes) -> None:
        """Ends the actor. Every call raises this error from then on. The pool's state is set before
        queued calls are failed. A process that posts a call after that reads the state and asks the
        node to fail the call."""
        actor.ended = payload
        self._forget_name(actor)
        self.events.has_ended(actor)
        self.client.open_pool(actor.pool, POOL_ENDED)
        self._fail_queued(actor)

    def _fail_queued(self, actor: ActorRecord) -> None:
        assert actor.ended is not None
        self.fail_all(actor.pool, actor.ended)

    def fail_all(self, pool: int, payload: bytes) -> None:
        """Fails all queued calls with the error."""
        error = _serialize.Encoded(payload, [], [], len(payload), [])
        for oid in self.client.queued_in(pool):
            if self.client.take_over(oid, NODE_SLOT):
                self.workers.tasks_failed += 1
                self.results.store_value(oid, error, True)

    def _forget_name(self, actor: ActorRecord) -> None:
        name, actor.name = actor.name, ""
        self._release_name(name, actor.identity)

    def _release_name(self, name: str, identity: int) -> None:
        if name:
            released = ActorNameReleased(self.client.number, name, self.public(identity))
            self.send_manager(released)

    # -- for users -----------------------------------------------------------------------------

    def describe(self) -> Iterator[dict[str, Any]]:
        """Describes each actor on this host for `status`, `top` and `dump`, with the numbers of
        waiting, running and finished calls on this host."""
        waiting = self.client.queued_counts()
        for actor in list(self.by_identity.values()):
            pool = self.workers.pools.get(actor.pool)
            running, done, pids = 0, actor.calls_done, []
            for slot, worker in pool.workers.items() if pool is not None else ():
                running += bool(self.tasks.running(slot))
                done += ended_calls(self.client, slot)
                pids.append(worker.pid)
            yield {
                "identity": self.public(actor.identity).hex(),
                "name": actor.label,
                "class": actor.class_name,
                "pids": pids,
                "state": actor.state_name,
                "waiting": waiting.get(actor.pool, 0),
                "running": running,
                "done": done,
                "restarts": actor.restarts,
                "restarts_left": actor.restarts_left,
            }
