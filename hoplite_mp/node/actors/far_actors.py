"""Actors of other hosts: begun there for processes of this host, and called from here.

Why it exists: an actor's identity is an object of its host's node, so handles travel as refs do.
For calls from this host the node keeps a pool without workers, whose tasks all go to the actor's
pool over there, in their order; and it begins actors here for other hosts.
It must never know: what calls do, how messages travel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from hoplite_mp import errors, ids, serial
from hoplite_mp.headers import NODE_SLOT, UNCLAIMED
from hoplite_mp.node.actors.actor_records import Wanted
from hoplite_mp.node.actors.actors import POOL_CLOSING, POOL_ENDED
from hoplite_mp.protocol.local import POOL_LEAVING, Reply
from hoplite_mp.protocol.peers import (
    ActorBegun,
    ActorFound,
    ActorHeld,
    ActorSought,
    BeginActor,
    EndActorThere,
    RestartsAsked,
    RestartsTold,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.actors.actor_records import Asker, Client
    from hoplite_mp.node.actors.actors import Actors
    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.objects.imports import Import
    from hoplite_mp.node.questions import Answer
    from hoplite_mp.node.recovery.owners import Owners
    from hoplite_mp.node.tasks.delegation import Delegation
    from hoplite_mp.node.tasks.guests import Guests
    from hoplite_mp.node.tasks.workers import Workers
    from hoplite_mp.protocol.actors import BindActor

__all__ = ["FarActors"]

NO_IDENTITY = bytes(ids.ID_BYTES)
# Calls under way to an actor of another host beyond the one that runs. Higher: calls follow each
# other without a pause on a long way; lower: fewer may have begun when that host is lost.
ACTOR_AHEAD_CALLS = 64
NO_SPARE = "its host is gone, and no other one could begin it again"


@dataclass(slots=True)
class FarAsker:
    """Another node that asks for an actor on this host."""

    far: FarActors
    home: int
    number: int

    def granted(self, hold: Any) -> None:
        identity = self.far.actors.public(hold.oid)
        if self.far.send(self.home, ActorBegun(self.number, identity)):
            self.far.given[self.home, self.number] = hold

    def refused(self, why: str, gone: bool = False) -> None:
        self.far.send(self.home, ActorBegun(self.number, NO_IDENTITY, why, gone))


@dataclass(slots=True)
class Bound:
    """A pool of this host whose tasks are calls of an actor of another one."""

    identity: int
    home: int
    restarts: int
    retries: int
    places: tuple[int, ...]  # to which it is bound
    ended: bytes | None = None

    @property
    def moves(self) -> bool:
        """Will it begin again elsewhere when its host is lost, as far as its options say?"""
        return self.restarts > 0 and len(self.places) != 1

    @property
    def ahead(self) -> int:
        """Calls under way beyond the one that runs. What is under way when the host is lost may
        have begun: of an actor that begins again no call fails that surely has not."""
        return 0 if self.moves and not self.retries else ACTOR_AHEAD_CALLS


@dataclass(slots=True)
class Closing:
    """An actor of another host that was closed here, after calls that are still to be sent."""

    home: int
    identity: bytes
    calls: list[int]


class Above(Protocol):
    """What rooms above this one know."""

    def when_known(self, identity: bytes, action: Callable[[], None]) -> None:
        """Calls it as soon as it is known whether that actor is on this host."""


class FarActors:
    """Both sides of it, on one node."""

    def __init__(
        self,
        host: HostContext,
        actors: Actors,
        workers: Workers,
        delegation: Delegation,
        guests: Guests,
        owners: Owners,
        above: Above,
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
        self.delegation = delegation
        self.guests = guests
        self.owners = owners
        self.above = above
        # Identity of an actor whose host is lost -> who waits for the number of its restarts.
        self.counting: dict[int, list[Client]] = {}
        self.ends: dict[int, bool] = {}  # identity -> a process here has ended it: by kill?
        self.given: dict[tuple[int, int], Any] = {}  # holds until the other host has its own
        self.by_identity: dict[int, int] = {}  # -> pool
        self.bound: dict[int, Bound] = {}  # by pool
        self.closing: list[Closing] = []

    # -- for processes of this host --------------------------------------------------------------

    def begin(self, asker: Asker, wanted: Wanted, node: int) -> None:
        """An actor on another node."""
        member = self.roster.by_number.get(node)
        if member is None:
            asker.refused(f"node h{node} is gone", True)
            return

        def make(number: int) -> BeginActor:
            return BeginActor(number, self.actors.public(wanted.setup), *wanted[1:])

        self.questions.ask(member.home, make, functools.partial(self._begun, member.home, asker))

    def _begun(self, home: int, asker: Asker, answer: Answer | None) -> None:
        """What the node says that was asked."""
        if answer is None:
            asker.refused("its host was lost while the actor was to begin there", True)
            return
        message: ActorBegun = answer.message
        if message.identity == NO_IDENTITY:
            asker.refused(message.error, message.gone)
            return

        def done(holds: list[Any]) -> None:
            self.send(home, ActorHeld(message.number))
            if holds[0] is None:
                asker.refused("its host was lost when the actor had just begun", True)
            else:
                asker.granted(holds[0])

        self.imports.ask([message.identity], done)

    def bind(self, slot: int, number: int, ask: BindActor) -> None:
        """The pool on this host for calls of that actor."""
        identity = ask.identity
        actor = self.actors.of(identity)
        pool = self.by_identity.get(identity) if actor is None else actor.pool
        if pool is None:
            one = self.imports.by_oid.get(identity)
            pool = None if one is None else self.workers.open_bound(NODE_SLOT, 0)
            if pool is None or one is None:
                why = "that actor has ended" if one is None else self.workers.why_none
                self.reply(slot, Reply(number, None, why))
                return
            self.workers.pools[pool].actor = True
            self.by_identity[identity] = pool
            bound = Bound(identity, one.home, ask.restarts, ask.retries, ask.places)
            self.bound[pool] = bound
            if one.home in self.roster.leaving:
                self._end(pool, bound, "its host is leaving the cluster")
            elif one.home != ids.unpack_id(one.object)[0]:
                self._seek(pool, bound)  # it has begun again on another host
            elif one.home in self.delegation.runners:
                self.delegation.add_far(pool, one.home, ask.pool, 1, bound.ahead)
            else:
                self.lost(pool, "its host is gone")
        self.reply(slot, Reply(number, pool))

    def end(self, identity: int, kill: bool, unheld: bool) -> None:
        one = self.imports.by_oid.get(identity)
        if one is None:
            return
        if not unheld:
            self.ends[identity] = kill or self.ends.get(identity, False)
        if kill or unheld:
            self.send(one.home, EndActorThere(one.object, kill, unheld))
            return
        pool, calls = self.by_identity.get(identity), []
        if pool is not None and self.bound[pool].ended is None:
            self.client.open_pool(pool, POOL_CLOSING)  # first: later calls are refused
            calls = self.client.queued_in(pool, True)
        self.closing.append(Closing(one.home, one.object, calls))
        self.look()

    def look(self) -> None:
        """Closes those actors to which all calls that were made before have been sent."""
        for one in list(self.closing):
            one.calls = [oid for oid in one.calls if self.client.state(oid) in UNCLAIMED]
            if not one.calls:
                self.closing.remove(one)
                if one.home == self.client.home:  # it has begun again here
                    self.actors.end_here(self.imports.own(one.identity), False)
                else:
                    self.send(one.home, EndActorThere(one.identity, False))

    def _moves(self, one: Closing) -> bool:
        """Will what waits to be sent to that actor go to another host?"""
        found = self.imports.by_object.get(one.identity)
        pool = None if found is None else self.by_identity.get(found.oid)
        return pool is not None and self.bound[pool].ended is None and self.bound[pool].moves

    def ask_restarts(self, asker: Client, identity: int) -> None:
        one = self.imports.by_oid.get(identity)
        if one is None:
            asker.answer(0)
            return
        home, object_id = one.home, one.object

        def told(answer: Answer | None) -> None:
            if answer is not None:
                asker.answer(answer.message.restarts)
            elif self.owners.is_open(home):  # the next host of the actor says it
                self.counting.setdefault(identity, []).append(asker)
            else:
                asker.answer(0)

        self.questions.ask(home, lambda number: RestartsAsked(number, object_id), told)

    def fail_calls(self, pool: int) -> None:
        """A call was posted to an actor whose host is gone."""
        bound = self.bound.get(pool)
        if bound is not None and bound.ended is not None:
            self.actors.fail_all(pool, bound.ended)

    def lost(self, pool: int, why: str) -> bool:
        """Calls from here reach that pool's actor no more. False: it is no actor's."""
        bound = self.bound.get(pool)
        if bound is None:
            return False
        if bound.ended is None and bound.moves:
            return True  # until it is known which host begins it again
        self._end(pool, bound, why)
        return True

    def _end(self, pool: int, bound: Bound, why: str) -> None:
        if bound.ended is None:
            if bound.restarts and not bound.moves:
                why += f", and options(node=) binds it to node h{bound.places[0]}"
            error = errors.ActorLostError(f"the actor has lost its state: {why}")
            bound.ended = serial.encode_error(error, "").tobytes()
            self.client.open_pool(pool, POOL_ENDED)
        self.actors.fail_all(pool, bound.ended)

    # -- one whose host was lost -----------------------------------------------------------------

    def moved(self, one: Import) -> None:
        """The holders of that object, an identity perhaps, are counted by another host now: if it
        can, that one begins the actor again."""
        waits = [other for other in self.closing if other.identity == one.object]
        for other in waits:  # calls that are to be sent before that
            other.home = one.home
        if one.home == self.client.home:
            self.above.when_known(one.object, lambda: self._is_here(one, bool(waits)))
        else:
            self._is_there(one, bool(waits))

    def _is_here(self, one: Import, closes: bool) -> None:
        """This host has begun it again, or nobody can."""
        if self._ends(one, closes):
            self.actors.end_here(one.oid, self.ends[one.oid])
        actor = self.actors.by_identity.get(one.oid)
        for client in self.counting.pop(one.oid, ()):
            client.answer(actor.restarts if actor else 0)
        pool = self.by_identity.get(one.oid)
        if pool is not None and self.bound[pool].ended is None:
            self._end(pool, self.bound[pool], NO_SPARE)

    def _is_there(self, one: Import, closes: bool) -> None:
        """Another host has, perhaps."""
        if self._ends(one, closes):
            self.send(one.home, EndActorThere(one.object, self.ends[one.oid]))
        for client in self.counting.pop(one.oid, ()):
            self.ask_restarts(client, one.oid)
        pool = self.by_identity.get(one.oid)
        if pool is not None and self.bound[pool].ended is None:
            self._seek(pool, self.bound[pool])

    def _ends(self, one: Import, closes: bool) -> bool:
        """Is its end to be told to its new host, other than behind calls that are still here?"""
        return one.oid in self.ends and (self.ends[one.oid] or not closes)

    def _seek(self, pool: int, bound: Bound) -> None:
        """Asks the host that counts the holders now where calls are to go."""
        one = self.imports.by_oid.get(bound.identity)
        if one is None:
            return
        bound.home = one.home
        if one.home == self.client.home:
            self.above.when_known(one.object, lambda: self._is_here(one, False))
        elif not (
            self.send(one.home, ActorSought(one.object))
            or self.owners.is_open(one.home)  # then another one will be named
        ):
            self._end(pool, bound, NO_SPARE)

    def _found(self, home: int, message: ActorFound) -> None:
        for one in self.imports.all_of(message.identity):
            pool = self.by_identity.get(one.oid)
            bound = None if pool is None else self.bound[pool]
            if pool is None or bound is None or bound.home != home or bound.ended is not None:
                continue
            if not message.pool:
                self._end(pool, bound, NO_SPARE)
            elif home in self.delegation.runners and pool not in self.delegation.far:
                first = self.client.queued_in(pool)
                delegation = self.delegation
                delegation.add_far(pool, home, message.pool, 1, bound.ahead, first)

    def give_up(self, identity: int) -> int | None:
        """The actor is begun again on this host: the pool that its calls from here wait in."""
        pool = self.by_identity.pop(identity, None)
        if pool is not None:
            del self.bound[pool]
        return pool

    def leaves(self, home: int) -> None:
        """That host leaves: calls made so far are sent there, and no new ones are made."""
        for pool, bound in self.bound.items():
            if bound.home == home and bound.ended is None:
                self.client.open_pool(pool, POOL_LEAVING)

    def has_calls(self, home: int) -> bool:
        """Are there calls to actors of that host that have not ended?"""
        under_way = map(self.tasks.pool_of, self.delegation.where)
        pools = {pool for pool, bound in self.bound.items() if bound.home == home}
        return not pools.isdisjoint(under_way) or any(
            self.client.queued_in(pool, True) for pool in pools
        )

    def freed(self, oid: int) -> None:
        """Nobody here holds that identity any more."""
        self.ends.pop(oid, None)
        pool = self.by_identity.pop(oid, None)
        if pool is not None:
            del self.bound[pool]
            self.workers.close(pool, False)

    # -- for other hosts -------------------------------------------------------------------------

    def asked(self, home: int, message: BeginActor) -> None:
        """Another node wants an actor here."""
        asker = FarAsker(self, home, message.number)
        if self.roster.leaves:
            asker.refused(f"node h{self.client.number} is leaving the cluster", True)
            return

        def ready(holds: list[Any]) -> None:
            if holds[0] is None:
                asker.refused("its constructor's arguments are gone")
                return
            _, _, *options = msgspec.structs.astuple(message)
            audience = self.guests.audience_here(home, message.audience)
            wanted = Wanted(holds[0].oid, *options)._replace(audience=audience)
            self.actors.begin(asker, wanted)

        self.imports.ask([message.setup], ready)

    def receive(self, home: int, message: Any) -> bool:
        """False: it is not about actors."""
        match message:
            case BeginActor():
                self.asked(home, message)
            case ActorHeld():
                self.given.pop((home, message.number), None)
            case EndActorThere():
                self.above.when_known(message.identity, lambda: self._end_here(message))
            case RestartsAsked():
                self.above.when_known(message.identity, lambda: self._tell_restarts(home, message))
            case ActorFound():
                self._found(home, message)
            case _:
                return False
        return True

    def _end_here(self, message: EndActorThere) -> None:
        oid = self.imports.own(message.identity)
        self.actors.end_here(oid, message.kill, message.unheld)

    def _tell_restarts(self, home: int, message: RestartsAsked) -> None:
        actor = self.actors.by_identity.get(self.imports.own(message.identity))
        self.send(home, RestartsTold(message.number, actor.restarts if actor else 0))

    def lose_peer(self, home: int) -> None:
        """That host is gone."""
        self.closing = [one for one in self.closing if one.home != home or self._moves(one)]
        for key in [key for key in self.given if key[0] == home]:
            del self.given[key]
