"""Actors across hosts: starting and calling actors on other hosts, and serving other hosts.

An actor's identity is an object of its host's node, so handles are sent like refs. For calls from
this host the node keeps a pool without workers, and forwards all tasks of the pool, in order, to
the actor's pool on its host. The node also starts actors here for other hosts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp import _serialize, errors
from hoplite_mp._common import ids
from hoplite_mp._common.object_states import NODE_SLOT, UNCLAIMED
from hoplite_mp._node.actors.actor_records import WantedActor
from hoplite_mp._node.actors.actors import POOL_CLOSING, POOL_ENDED
from hoplite_mp._protocol.local import POOL_LEAVING, Reply
from hoplite_mp._protocol.peers import (
    ActorPoolQuery,
    ActorPoolReport,
    EndRemoteActor,
    RemoteActorAck,
    RemoteActorStarted,
    RestartsQuery,
    RestartsReport,
    StartRemoteActor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._node.actors.actor_records import Asker, Client
    from hoplite_mp._node.actors.actors import LocalActors
    from hoplite_mp._node.dispatch import PeerHandler
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.objects.imports import ImportRecord
    from hoplite_mp._node.objects.ownership_transfer import OwnershipTransfer
    from hoplite_mp._node.questions import Answer
    from hoplite_mp._node.tasks.inbound_tasks import InboundTasks
    from hoplite_mp._node.tasks.outbound_tasks import OutboundTasks
    from hoplite_mp._node.tasks.workers import Workers
    from hoplite_mp._protocol.actors import BindActor
    from hoplite_mp._protocol.messages import Member

__all__ = ["RemoteActors"]

NO_IDENTITY = bytes(ids.ID_BYTES)
# The number of calls that are sent to an actor on another host ahead of the running call. Higher:
# fewer pauses between calls over a high-latency network. Lower: fewer calls may have begun when
# that host is lost.
ACTOR_AHEAD_CALLS = 64
NO_BACKUP = "its host is gone, and no other host could restart it"


@dataclass(slots=True)
class RemoteAsker:
    """Another node that has requested an actor on this host."""

    remote_actors: RemoteActors
    host_id: int
    number: int

    def granted(self, hold: Any) -> None:
        identity = self.remote_actors.actors.public(hold.oid)
        if self.remote_actors.send(self.host_id, RemoteActorStarted(self.number, identity)):
            self.remote_actors.given[self.host_id, self.number] = hold

    def refused(self, why: str, gone: bool = False) -> None:
        self.remote_actors.send(
            self.host_id, RemoteActorStarted(self.number, NO_IDENTITY, why, gone)
        )


@dataclass(slots=True)
class Bound:
    """A pool of this host whose tasks are calls to an actor on another host."""

    identity: int
    host_id: int  # id of the actor's host
    restarts: int
    retries: int
    places: tuple[int, ...]  # numbers of the nodes to which the actor is bound
    ended: bytes | None = None  # the error payload of all calls after the actor's end

    @property
    def restarts_elsewhere(self) -> bool:
        """Whether the actor's options allow a restart on another host."""
        return self.restarts > 0 and len(self.places) != 1

    @property
    def ahead(self) -> int:
        """The number of calls that are sent ahead of the running call. When the host is lost, sent
        calls may have begun and must fail. A restartable actor without retries therefore receives
        one call at a time, and the remaining calls run after its restart."""
        return 0 if self.restarts_elsewhere and not self.retries else ACTOR_AHEAD_CALLS


@dataclass(slots=True)
class Closing:
    """An actor on another host that a process here has closed. `calls`: the earlier calls, which
    must be sent before the message that ends the actor."""

    host_id: int
    identity: bytes
    calls: list[int]


class RemoteActorsEvents(Protocol):
    """Requests from this component to the components above it."""

    def when_known(self, identity: bytes, action: Callable[[], None]) -> None:
        """Calls `action` once it is known whether the actor is on this host."""


class RemoteActors:
    """Actors across hosts, on one node: as the caller and as the actor's host."""

    def __init__(
        self,
        host: HostContext,
        actors: LocalActors,
        workers: Workers,
        outbound_tasks: OutboundTasks,
        inbound_tasks: InboundTasks,
        owners: OwnershipTransfer,
        events: RemoteActorsEvents,
    ) -> None:
        self.client = host.client
        self.tasks = host.tasks
        self.imports = host.imports
        self.roster = host.roster
        self.reply = host.reply
        self.send = host.send_peer
        self.questions = host.questions
        self.actors = actors
        self.workers = workers
        self.outbound_tasks = outbound_tasks
        self.inbound_tasks = inbound_tasks
        self.owners = owners
        self.events = events
        # Identity of an actor whose host is lost -> processes that request its number of restarts.
        self.counting: dict[int, list[Client]] = {}
        # Identities of actors that a process here has ended -> whether it killed them.
        self.ends: dict[int, bool] = {}
        # (host id, number of its request) -> hold on the identity until that host has its own.
        self.given: dict[tuple[int, int], Any] = {}
        self.by_identity: dict[int, int] = {}  # identity -> pool
        self.bound: dict[int, Bound] = {}  # by pool
        self.closing: list[Closing] = []

    # -- for processes on this host --------------------------------------------------------------

    def begin(self, asker: Asker, wanted: WantedActor, node: int) -> None:
        """Starts an actor on another node."""
        member = self.roster.by_number.get(node)
        if member is None:
            asker.refused(f"node h{node} is gone", True)
            return

        def make(number: int) -> StartRemoteActor:
            fields = wanted._asdict() | {"setup": self.actors.public(wanted.setup)}
            return StartRemoteActor(number=number, **fields)

        self.questions.ask(
            member.host_id, make, functools.partial(self._begun, member.host_id, asker)
        )

    def _begun(self, host_id: int, asker: Asker, answer: Answer | None) -> None:
        """Handles the other node's answer, or its loss."""
        if answer is None:
            asker.refused("its host was lost while the actor was starting there", True)
            return
        message: RemoteActorStarted = answer.message
        if message.identity == NO_IDENTITY:
            asker.refused(message.error, message.gone)
            return

        def done(holds: list[Any]) -> None:
            self.send(host_id, RemoteActorAck(message.number))
            if holds[0] is None:
                asker.refused("its host was lost just after the actor had started", True)
            else:
                asker.granted(holds[0])

        self.imports.ask([message.identity], done)

    def bind(self, slot: int, number: int, ask: BindActor) -> None:
        """Answers with the pool of this host for calls to the actor. Opens the pool if needed."""
        identity = ask.identity
        actor = self.actors.of(identity)
        pool = self.by_identity.get(identity) if actor is None else actor.pool
        if pool is None:
            record = self.imports.by_oid.get(identity)
            pool = None if record is None else self.workers.open_bound(NODE_SLOT, 0)
            if pool is None or record is None:
                why = "that actor has ended" if record is None else self.workers.why_none
                self.reply(slot, Reply(number, None, why))
                return
            self.workers.pools[pool].actor = True
            self.by_identity[identity] = pool
            bound = Bound(identity, record.owner, ask.restarts, ask.retries, ask.places)
            self.bound[pool] = bound
            if record.owner in self.roster.leaving:
                self._end(pool, bound, "its host is leaving the cluster")
            elif record.owner != ids.unpack_id(record.object)[0]:
                self._seek(pool, bound)  # the actor has moved to another host
            elif record.owner in self.outbound_tasks.runners:
                self.outbound_tasks.add_remote(pool, record.owner, ask.pool, 1, bound.ahead)
            elif self.owners.is_decided(record.owner):
                self._end(pool, bound, NO_BACKUP)
            else:
                self.lost(pool, "its host is gone")
        self.reply(slot, Reply(number, pool))

    def end(self, identity: int, kill: bool, unheld: bool) -> None:
        record = self.imports.by_oid.get(identity)
        if record is None:
            return
        if not unheld:
            self.ends[identity] = kill or self.ends.get(identity, False)
        if kill or unheld:
            self.send(record.owner, EndRemoteActor(record.object, kill, unheld))
            return
        pool, calls = self.by_identity.get(identity), []
        if pool is not None and self.bound[pool].ended is None:
            self.client.open_pool(pool, POOL_CLOSING)  # first, so that later calls are refused
            calls = self.client.queued_in(pool, True)
        self.closing.append(Closing(record.owner, record.object, calls))
        self.poll()

    def poll(self) -> None:
        """Forwards the end of closed actors once all earlier calls have been sent."""
        for closing in list(self.closing):
            closing.calls = [oid for oid in closing.calls if self.client.state(oid) in UNCLAIMED]
            if not closing.calls:
                self.closing.remove(closing)
                if closing.host_id == self.client.host_id:  # the actor has moved to this host
                    self.actors.end_here(self.imports.own(closing.identity), False)
                else:
                    self.send(closing.host_id, EndRemoteActor(closing.identity, False))

    def _restarts_elsewhere(self, closing: Closing) -> bool:
        """Whether calls that are waiting for the actor can be sent to another host after a
        restart."""
        found = self.imports.by_object.get(closing.identity)
        pool = None if found is None else self.by_identity.get(found.oid)
        return (
            pool is not None
            and self.bound[pool].ended is None
            and self.bound[pool].restarts_elsewhere
        )

    def ask_restarts(self, asker: Client, identity: int) -> None:
        record = self.imports.by_oid.get(identity)
        if record is None:
            asker.answer(0)
            return
        owner, object_id = record.owner, record.object

        def restarts_known(answer: Answer | None) -> None:
            if answer is not None:
                asker.answer(answer.message.restarts)
            elif self.owners.is_open(owner):  # the new host is asked once it is known
                self.counting.setdefault(identity, []).append(asker)
            else:
                asker.answer(0)

        self.questions.ask(owner, lambda number: RestartsQuery(number, object_id), restarts_known)

    def fail_calls(self, pool: int) -> None:
        """Fails the calls in a pool whose actor has ended."""
        bound = self.bound.get(pool)
        if bound is not None and bound.ended is not None:
            self.actors.fail_all(pool, bound.ended)

    def lost(self, pool: int, why: str) -> bool:
        """Ends a pool whose actor's host is gone, unless the actor can restart on another host.
        Returns False if the pool does not belong to a remote actor."""
        bound = self.bound.get(pool)
        if bound is None:
            return False
        if bound.ended is None and bound.restarts_elsewhere:
            return True  # calls wait until the actor's next host is known
        self._end(pool, bound, why)
        return True

    def _end(self, pool: int, bound: Bound, why: str) -> None:
        if bound.ended is None:
            if bound.restarts and not bound.restarts_elsewhere:
                why += f", and options(node=) binds it to node h{bound.places[0]}"
            error = errors.ActorLostError(f"the actor has lost its state: {why}")
            bound.ended = _serialize.encode_error(error, "").tobytes()
            self.client.open_pool(pool, POOL_ENDED)
        self.actors.fail_all(pool, bound.ended)

    # -- actors whose host was lost --------------------------------------------------------------

    def moved(self, record: ImportRecord) -> None:
        """Handles the new owner of an object, which may be an actor's identity. The owner restarts
        the actor if possible."""
        waits = [other for other in self.closing if other.identity == record.object]
        if not waits and self.ends.get(record.oid) is False and record.oid in self.by_identity:
            # These calls will be retried.
            calls = self.client.queued_in(self.by_identity[record.oid], True)
            if calls:
                waits = [Closing(record.owner, record.object, calls)]
                self.closing += waits
        for other in waits:  # earlier calls must still be sent before the end is forwarded
            other.host_id = record.owner
        if record.owner == self.client.host_id:
            self.events.when_known(record.object, lambda: self._is_here(record, bool(waits)))
        else:
            self._is_there(record, bool(waits))

    def _is_here(self, record: ImportRecord, closes: bool) -> None:
        """Called when this host is the new owner of the identity. Either the actor has restarted
        here, or no host can restart it."""
        if self._ends(record, closes):
            self.actors.end_here(record.oid, self.ends[record.oid])
        self.ownerless(record)

    def ownerless(self, record: ImportRecord) -> None:
        """Called when no other host will restart the actor."""
        actor = self.actors.by_identity.get(record.oid)
        for client in self.counting.pop(record.oid, ()):
            client.answer(actor.restarts if actor else 0)
        pool = self.by_identity.get(record.oid)
        if pool is not None and self.bound[pool].ended is None:
            self._end(pool, self.bound[pool], NO_BACKUP)

    def _is_there(self, record: ImportRecord, closes: bool) -> None:
        """Called when another host is the new owner of the identity. That host may have restarted
        the actor."""
        if self._ends(record, closes):
            self.send(record.owner, EndRemoteActor(record.object, self.ends[record.oid]))
        for client in self.counting.pop(record.oid, ()):
            self.ask_restarts(client, record.oid)
        pool = self.by_identity.get(record.oid)
        if pool is not None and self.bound[pool].ended is None:
            self._seek(pool, self.bound[pool])

    def _ends(self, record: ImportRecord, closes: bool) -> bool:
        """Whether the actor's end must be forwarded to its new host immediately, because the actor
        was killed or no earlier calls are waiting here."""
        return record.oid in self.ends and (self.ends[record.oid] or not closes)

    def _seek(self, pool: int, bound: Bound) -> None:
        """Asks the new owner of the identity for the pool to which calls are sent."""
        record = self.imports.by_oid.get(bound.identity)
        if record is None:
            return
        bound.host_id = record.owner
        if record.owner == self.client.host_id:
            self.events.when_known(record.object, lambda: self._is_here(record, False))
        elif not (
            self.send(record.owner, ActorPoolQuery(record.object))
            or self.owners.is_open(record.owner)  # another owner will be named
        ):
            self._end(pool, bound, NO_BACKUP)

    def _found(self, host_id: int, message: ActorPoolReport) -> None:
        for record in self.imports.all_of(message.identity):
            pool = self.by_identity.get(record.oid)
            bound = None if pool is None else self.bound[pool]
            if pool is None or bound is None or bound.host_id != host_id or bound.ended is not None:
                continue
            if not message.pool:
                self._end(pool, bound, NO_BACKUP)
            elif (
                host_id in self.outbound_tasks.runners
                and pool not in self.outbound_tasks.remote_runners
            ):
                first = self.client.queued_in(pool)
                outbound_tasks = self.outbound_tasks
                outbound_tasks.add_remote(pool, host_id, message.pool, 1, bound.ahead, first)

    def give_up(self, identity: int) -> int | None:
        """Removes and returns the pool in which calls from here are waiting, because the actor
        restarts on this host and uses that pool."""
        pool = self.by_identity.pop(identity, None)
        if pool is not None:
            del self.bound[pool]
        return pool

    def leaves(self, host_id: int) -> None:
        """Refuses new calls to actors on a leaving host. Earlier calls are still sent there."""
        for pool, bound in self.bound.items():
            if bound.host_id == host_id and bound.ended is None:
                self.client.open_pool(pool, POOL_LEAVING)

    def has_calls(self, host_id: int) -> bool:
        """Whether calls to actors on the host are still pending."""
        under_way = map(self.tasks.pool_of, self.outbound_tasks.where)
        pools = {pool for pool, bound in self.bound.items() if bound.host_id == host_id}
        return not pools.isdisjoint(under_way) or any(
            self.client.queued_in(pool, True) for pool in pools
        )

    def freed(self, oid: int) -> None:
        """Closes the pool for calls to an actor whose identity has no holder left here."""
        self.ends.pop(oid, None)
        pool = self.by_identity.pop(oid, None)
        if pool is not None:
            del self.bound[pool]
            self.workers.close(pool, False)

    # -- for other hosts -------------------------------------------------------------------------

    def asked(self, host_id: int, message: StartRemoteActor) -> None:
        """Starts an actor on this host for another node."""
        asker = RemoteAsker(self, host_id, message.number)
        if self.roster.leaves:
            asker.refused(f"node h{self.client.number} is leaving the cluster", True)
            return

        def ready(holds: list[Any]) -> None:
            if holds[0] is None:
                asker.refused("its constructor's arguments are gone")
                return
            output_owner = self.inbound_tasks.output_owner_here(host_id, message.output_owner)
            wanted = WantedActor.of(message, setup=holds[0].oid, output_owner=output_owner)
            self.actors.begin(asker, wanted)

        self.imports.ask([message.setup], ready)

    @property
    def peer_handlers(self) -> dict[type, PeerHandler]:
        """Handlers of messages from other hosts about actors."""

        def ends(host_id: int, message: EndRemoteActor) -> None:
            self.events.when_known(message.identity, lambda: self._end_here(message))

        def restarts(host_id: int, message: RestartsQuery) -> None:
            self.events.when_known(message.identity, lambda: self._tell_restarts(host_id, message))

        return {
            StartRemoteActor: self.asked,
            RemoteActorAck: lambda host_id, message: self.given.pop(
                (host_id, message.number), None
            ),
            EndRemoteActor: ends,
            RestartsQuery: restarts,
            ActorPoolReport: self._found,
        }

    def _end_here(self, message: EndRemoteActor) -> None:
        oid = self.imports.own(message.identity)
        self.actors.end_here(oid, message.kill, message.unheld, remote=True)

    def _tell_restarts(self, host_id: int, message: RestartsQuery) -> None:
        actor = self.actors.by_identity.get(self.imports.own(message.identity))
        self.send(host_id, RestartsReport(message.number, actor.restarts if actor else 0))

    def peer_lost(self, member: Member) -> None:
        """Forgets the closings of actors that were on a lost host and cannot restart. Drops the
        holds kept for that host."""
        self.closing = [
            closing
            for closing in self.closing
            if closing.host_id != member.host_id or self._restarts_elsewhere(closing)
        ]
        for key in [key for key in self.given if key[0] == member.host_id]:
            del self.given[key]

    def waits(self) -> Iterator[dict[str, Any]]:
        """Describes the calls from this host that are waiting here for actors on other hosts."""
        waiting = self.client.queued_counts()
        for pool, bound in list(self.bound.items()):
            if waiting.get(pool):
                found = pool in self.outbound_tasks.remote_runners
                peer = self.roster.number_of(bound.host_id) if found else None
                yield {
                    "identity": self.actors.public(bound.identity).hex(),
                    "waiting": waiting[pool],
                    "at": "" if peer is None else f"h{peer}",
                }
