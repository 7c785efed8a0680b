"""What begins an actor again when its host is gone: kept on a second host, and used there.

Why it exists: an actor with restarts left must outlive its host. Its node tells one other host what
it was made from and what state its process has kept last; that host, its *spare*, holds these
objects with all that they name. When the actor's host is lost the manager names the spare as the
home of the actor's identity (node/homes.py); the spare starts a process, and calls of all hosts go
there from then on.

Invariant: no other host takes the place of a spare before the manager has said that this one is
gone. Else a host that is cut off could go on with states that its former spare, which has begun the
actor meanwhile, has never seen.

An identity has no header at the spare as long as its host lives, so a spare keeps no actor alive.
It must never know: what calls do, how their order is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp import errors, serial
from hoplite_mp.client.memory import STATE
from hoplite_mp.node.actor_records import Actor, Wanted
from hoplite_mp.node.guests import NO_OBJECT
from hoplite_mp.node.places import ROOM_LOOK_S
from hoplite_mp.node.store import NODE_SLOT
from hoplite_mp.planner.resources import Ledger
from hoplite_mp.protocol.fields import NODES_MAX
from hoplite_mp.protocol.messages import ActorNameClaimed
from hoplite_mp.protocol.peers import ActorFound, ActorKept, ActorSought, DropActor, KeepActor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from hoplite_mp.node.imports import Import
    from hoplite_mp.node.lan import Lan
    from hoplite_mp.node.main import Node
    from hoplite_mp.protocol.messages import Member, NodeToManager

__all__ = ["Spares"]


@dataclass(slots=True)
class Spare:
    """An actor of another host that this one can begin again."""

    home: int  # of the actor's host
    number: int  # of its node
    what: KeepActor
    holds: list[Any] = field(default_factory=list)
    before: Spare | None = None  # until all that this one names is here
    whole: bool = False  # it is


class Spares:
    """Both sides of it, on one node."""

    def __init__(self, node: Node, lan: Lan) -> None:
        self.node = node
        self.lan = lan
        self.client = node.client
        self.send = lan.peers.send
        self.at: dict[int, int] = {}  # identity of an actor of this host -> home of its spare
        # Identity -> the last KeepActor's number, and who waits for its answer.
        self.asked: dict[int, tuple[int, list[Callable[[], None]]]] = {}
        # Identity -> number of its spare, which this node has lost, and the manager perhaps not.
        self.unsure: dict[int, int] = {}
        self.kept: dict[bytes, Spare] = {}  # by identity
        self.sought: dict[bytes, list[int]] = {}  # homes of the hosts that wait for an answer
        self._last = 0

    # -- actors of this host -------------------------------------------------------------------

    def keep(self, actor: Actor, done: Callable[[], None] | None = None) -> None:
        """The actor has begun, or has another state: `done` when its spare has all it needs, or
        when there can be no spare."""
        _, waiting = self.asked.pop(actor.identity, (0, []))
        if done is not None:
            waiting.append(done)
        if actor.identity in self.unsure and actor.ended is None:
            self.asked[actor.identity] = (0, waiting)
            return
        before = self.at.get(actor.identity)
        home = self._spare_of(actor)
        if home is None:
            _call(waiting)
            return
        identity = self.node.actors.public(actor.identity)
        if before is not None and before != home:  # when the new one has it
            waiting.append(lambda: _drop(self.send, before, identity))
        self._last += 1
        self.at[actor.identity] = home
        self.asked[actor.identity] = (self._last, waiting)
        wanted, state = actor.wanted, actor.state
        self.send(
            home,
            KeepActor(
                self._last,
                identity,
                self.node.actors.public(wanted.setup),
                NO_OBJECT if state is None else self.node.actors.public(state.oid),
                wanted.about,
                actor.class_name,
                actor.name,
                actor.label,
                actor.restarts_left,
                actor.restarts,
                wanted.detached,
                actor.begun,
                wanted.audience,
                wanted.places,
                wanted.demand,
            ),
        )

    def _spare_of(self, actor: Actor) -> int | None:
        """The host that keeps it, or will: the next one after this that it may run on."""
        lan, wanted = self.lan, actor.wanted
        if not wanted.restarts or actor.ended is not None:
            return None
        now = self.at.pop(actor.identity, None)
        if now in lan.peers.by_home and now not in lan.draining.leaving:
            return now
        able = [
            member
            for member in lan.members.values()
            if member.home != self.client.home
            and (member.workers or member.stays)
            and member.home not in lan.draining.leaving
            and (not wanted.places or member.node in wanted.places)
            and Ledger(member.resources).could_ever(wanted.demand)
        ]
        here = self.node.number
        able.sort(key=lambda member: (member.node - here) % NODES_MAX)
        return able[0].home if able else None

    def ended(self, actor: Actor) -> None:
        """It will not begin again."""
        self.unsure.pop(actor.identity, None)
        home = self.at.pop(actor.identity, None)
        _, waiting = self.asked.pop(actor.identity, (0, []))
        if home is not None:
            self.send(home, DropActor(self.node.actors.public(actor.identity)))
        _call(waiting)

    def came(self) -> None:
        """There is another node: those that have no spare get one."""
        for actor in list(self.node.actors.by_identity.values()):
            if actor.identity not in self.at and actor.identity not in self.unsure:
                self.keep(actor)

    # -- actors of other hosts -----------------------------------------------------------------

    def receive(self, home: int, message: Any) -> bool:
        """False: it is not about spares."""
        match message:
            case KeepActor():
                self._take(home, message)
            case ActorKept():
                for identity, (number, waiting) in list(self.asked.items()):
                    if number == message.number:
                        del self.asked[identity]
                        _call(waiting)
            case DropActor():
                spare = self.kept.get(message.identity)
                if spare is not None and spare.home == home:
                    del self.kept[message.identity]
            case ActorSought():
                self._seek(home, message.identity)
            case _:
                return False
        return True

    def _take(self, home: int, message: KeepActor) -> None:
        before = self.kept.get(message.identity)
        number = self.lan.peers.number_of(home)
        if before is not None and not before.whole:
            before = before.before
        spare = Spare(home, -1 if number is None else number, message, before=before)
        self.kept[message.identity] = spare

        named = [one for one in (message.setup, message.state) if one != NO_OBJECT]

        def done() -> None:
            # If its host has died meanwhile, what was on the way has failed.
            if all(self._with_payload(one) for one in named):
                spare.before, spare.whole = None, True
            self.send(home, ActorKept(message.number))

        _Bringing(self.node, spare.holds, done).bring(named)

    def number_of(self, identity: bytes, home: int) -> int | None:
        """Of what is here of an actor of that host: the highest one is the newest. None: there is
        nothing; 0: not all of it is here."""
        spare = self.kept.get(identity)
        if spare is None or spare.home != home:
            return None
        if not spare.whole:
            spare = spare.before
        return 0 if spare is None else spare.what.number

    def report(self) -> Iterator[NodeToManager]:
        """To a manager that begins anew: names of actors whose host may have gone with the last
        one. Whether they move here is found out later."""
        for identity, spare in self.kept.items():
            there = self.lan.peers.number_of(spare.home) is not None
            if spare.what.name and (there or self.lan.recovering.homes.is_open(spare.home)):
                yield ActorNameClaimed(0, spare.number, spare.what.name, identity, True)

    # -- deaths --------------------------------------------------------------------------------

    def lose_host(self, member: Member) -> None:
        """That host is gone. Called before it is said what is here of its objects: the identities
        of the actors that this node can begin again are."""
        imports = self.node.imports
        for identity, spare in self.kept.items():
            if spare.home != member.home:
                continue
            payload = serial.encode((0, spare.what.about, identity)).tobytes()
            one = imports.by_object.get(identity)
            if one is None:
                spare.holds.append(imports.keep(identity))
                one = imports.by_object[identity]
                one.home = spare.home
            else:
                spare.holds.append(self.client.hold(one.oid))
            if self.client.state(one.oid) == STATE["CLAIMED"]:
                imports.store(one, payload, False)
                imports.answer(one)

    def lose_peer(self, home: int, number: int) -> None:
        """That host is gone, as far as this node knows."""
        for identity in [one for one, at in self.at.items() if at == home]:
            del self.at[identity]
            self.unsure[identity] = number
        for waiting in self.sought.values():
            waiting[:] = [one for one in waiting if one != home]

    def are_gone(self, numbers: Collection[int]) -> None:
        """The manager says so: actors whose spares they were get others."""
        for identity in [one for one, number in self.unsure.items() if number in numbers]:
            del self.unsure[identity]
            actor = self.node.actors.by_identity.get(identity)
            if actor is not None:
                self.keep(actor)

    def moved(self, one: Import) -> None:
        """That object, an identity perhaps, has another home."""
        spare = self.kept.get(one.object)
        if one.home == self.client.home:
            if spare is not None:
                del self.kept[one.object]
                if spare.what.detached or self._is_held(one.oid):
                    self._begin_again(one, spare)
            for home in self.sought.pop(one.object, ()):
                self._seek(home, one.object)
        elif spare is not None and spare.home != one.home:
            del self.kept[one.object]
        self.lan.far_actors.moved(one)

    def _begin_again(self, one: Import, spare: Spare) -> None:
        """This host is the actor's from now on."""
        what, actors, workers = spare.what, self.node.actors, self.node.workers
        setup = self._with_payload(what.setup)
        state = self._with_payload(what.state) if what.state != NO_OBJECT else 0
        if spare.before is not None and not (setup and (state or what.state == NO_OBJECT)):
            self._begin_again(one, spare.before)  # the last one was not all here yet
            return
        wanted = Wanted(
            setup,
            what.about,
            what.class_name,
            what.name,
            what.restarts_left,
            False,
            what.detached,
            self.lan.guests.audience_here(spare.home, what.audience),
            what.places,
            what.demand,
        )
        pool = self.lan.far_actors.give_up(one.oid) or workers.open_bound(NODE_SLOT, 0)
        if pool is None:
            return  # who calls it hears that it is gone
        self.lan.delegation.forget_pool(pool)
        actor = Actor(
            one.oid,
            pool,
            what.name,
            what.class_name,
            max(0, what.restarts_left - 1),
            wanted,
            label=what.label,
            restarts=what.restarts,
        )
        actors.by_pool[pool] = actors.by_identity[one.oid] = actor
        if what.detached:
            actor.hold = self.client.hold(one.oid)
        if what.name:
            claim = ActorNameClaimed(0, self.node.number, what.name, one.object, True)
            self.node.send_manager(claim)
        lost = f"node h{spare.number}, on which it ran, was lost"
        why = "" if setup else ", and its constructor's arguments are gone"
        if state == 0 and what.state != NO_OBJECT:
            why = ", and the state that it had kept is gone"
        if not what.restarts_left:
            why = f"; it had been restarted {what.restarts} times"
        if why:
            error = errors.ActorLostError(f"{actor.title} has lost its state: {lost}{why}")
            actors.end_with(actor, error)
            return
        actor.restarts += 1
        actor.state = self.client.hold(state) if state else None
        local = workers.pools[pool]
        local.actor, local.target, local.setup, local.audience = True, 1, setup, wanted.audience
        local.setup_hold = self.client.hold(setup)
        local.demand = wanted.demand
        workers.start_missing(local)
        self.keep(actor)

    def _is_held(self, identity: int) -> bool:
        """Does anybody want the actor, here or elsewhere?"""
        export = self.node.exports.exports.get(identity)
        if export is not None and export.importers:
            return True
        return bool({*self.client.inspect(identity)["refs"]} - {NODE_SLOT})

    def _with_payload(self, object_id: bytes) -> int:
        """Where that object is here; 0: not at all, or without its bytes, or failed."""
        oid = self.node.imports.local(object_id)
        if not oid or oid in self.node.places or self.client.hold(oid) is None:
            return 0
        return oid if self.client.state(oid) in _WHOLE else 0

    # -- where calls are to go -----------------------------------------------------------------

    def _seek(self, home: int, identity: bytes) -> None:
        """Another host's calls of that actor are to come here."""
        oid = self.node.exports.own(identity)
        actor = self.node.actors.by_identity.get(oid)
        if actor is not None:
            self.send(home, ActorFound(identity, actor.pool))
        elif oid:
            self.send(home, ActorFound(identity, 0))
        else:  # that host has heard before this one where it is
            self.sought.setdefault(identity, []).append(home)


class _Bringing:
    """Objects of any host, with all that they name, on their way here."""

    def __init__(self, node: Node, holds: list[Any], done: Callable[[], None]) -> None:
        self.node = node
        self.holds = holds
        self.done = done
        self.seen: set[bytes] = set()
        self.left = 0

    def bring(self, objects: list[bytes]) -> None:
        new = [one for one in objects if one not in self.seen]
        self.seen.update(new)
        self.left += 1
        self.node.imports.ask(new, self._held)

    def _held(self, holds: list[Any]) -> None:
        for hold in holds:
            if hold is not None:
                self.holds.append(hold)
                self._bring_bytes(hold.oid)
        self._one_less()

    def _bring_bytes(self, oid: int) -> None:
        places = self.node.places
        if oid not in places:
            self._look(oid)
            return

        def here() -> None:
            self._look(oid)
            self._one_less()

        self.left += 1
        if places.want(oid, here):
            return
        if self.node.store.impossible(places.places[oid].nbytes):
            self._one_less()  # then only the other host has it
            return

        def again() -> None:
            self._bring_bytes(oid)
            self._one_less()

        self.node.after(ROOM_LOOK_S, again)  # no room now

    def _look(self, oid: int) -> None:
        """What it names is brought, too. What is pending is so later, when its reader is."""
        client = self.node.client
        got = client.view(oid)
        if isinstance(got, int) and oid not in self.node.places and self.node.store.restore(oid):
            got = client.view(oid)
        if not isinstance(got, int):
            self.bring([*serial.read_refs(memoryview(got))])

    def _one_less(self) -> None:
        self.left -= 1
        if not self.left:
            self.done()


def _drop(send: Callable[[int, DropActor], bool], home: int, identity: bytes) -> None:
    send(home, DropActor(identity))


def _call(waiting: list[Callable[[], None]]) -> None:
    for done in waiting:
        done()


_WHOLE = (STATE["SEALED"], STATE["SPILLING"], STATE["SPILLED"])
