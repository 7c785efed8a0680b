"""Actors whose host is lost, and the hosts that could begin them again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import hoplite_mp
from hoplite_mp._node.objects import ownership_transfer
from hoplite_mp._protocol.copies import OwnersReassigned
from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.oracle.values import make
from hoplite_mp._simulation.workloads.programs import HANGS_S
from hoplite_mp._sync.locks import Lock
from hoplite_mp.errors import ActorLostError, HopliteTimeoutError
from tests.aimed.aim import BIG

if TYPE_CHECKING:
    from tests.aimed.aim import Aim

__all__ = ["held_where_made", "let_go_by_name", "moved_twice", "ownerless", "tried_again"]


class Sleeper:
    """An actor that may be told to sleep."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Keeper:
    """An actor that is given refs, and gives them back."""

    def __init__(self) -> None:
        self.refs: list[Any] = []

    def keep(self, refs: list[Any]) -> None:
        self.refs += refs

    def give(self) -> list[Any]:
        return self.refs


def held_where_made(a: Aim) -> None:
    """An actor on the host where a task has run holds its result alone. The host that has sent the
    task is given the ref back, and so is another one."""
    A, B, C = a.some(3)
    leaf = a.leaf(a.rng.choice([10, BIG]))

    def ask(c: Any) -> None:
        there = c.options(node=f"h{B.number}")
        keeper = there.options(name="keeper").actor(Keeper)
        ref = there.submit(make, leaf, 0.0).ref
        if a.rng.random() < 0.5:
            c.wait([ref])
        keeper.keep([hoplite_mp.by_ref(ref)]).result(timeout=HANGS_S)
        del ref
        time.sleep(a.rng.choice([0.0, 0.1]))
        for _ in range(2):
            (back,) = keeper.give().result(timeout=HANGS_S)
            a.work.oracle.check_leaf(leaf, a.work.value(c, back, "back"))
            del back
            time.sleep(0.1)
        a.say("read")
        a.hear("over")

    def ask_too(c: Any) -> None:
        a.hear("read")
        (back,) = c.get_actor("keeper").give().result(timeout=HANGS_S)
        a.work.oracle.check_leaf(leaf, a.work.value(c, back, "back"))
        a.say("over")

    a.run(A, "ask", ask)
    a.run(C, "ask too", ask_too)


def ownerless(a: Aim) -> None:
    """Calls of an actor end if its host dies and the manager names nobody as the next owner of its
    identity. Here hosts hold more of the dead one than their reports can name."""
    a.must(die=1, nobody=1)
    A, C = a.some(2)
    a.limit(ownership_transfer, "HOLDINGS_MAX", 1)

    def make(c: Any) -> None:
        sleeper = c.options(name="sleeper", restarts=1, retries=1).actor(Sleeper)
        sleeper.sleep(0.0).result(timeout=HANGS_S)
        a.say("made")
        time.sleep(99)

    def call(c: Any) -> None:
        held = a.work.ref(c, "further")  # before the actor's identity, so it is reported first
        a.hear("made")
        last = c.get_actor("sleeper").sleep(99.0)
        time.sleep(0.1)
        a.die(A)
        try:
            last.result(timeout=HANGS_S)
        except ActorLostError:
            cluster_node = C.cluster_node
            (bound,) = cluster_node.remote_actors.bound.values()
            a.struck["nobody"] += (
                cluster_node.host.imports.by_oid[bound.identity].owner == A.host_id
            )
        except HopliteTimeoutError as error:
            raise WrongEnd("a call of an actor that nobody owns hangs") from error
        del held

    a.offer(A, a.leaf(100), "further", strict=False)
    a.run(A, "make", make, False)
    a.run(C, "call", call)


def tried_again(a: Aim) -> None:
    """Calls that may be tried again end when the host of an actor without restarts dies."""
    a.must(die=1)
    A, X = a.some(2)

    def ask(c: Any) -> None:
        actor = c.options(node=f"h{X.number}", retries=2).actor(Sleeper)
        actor.sleep(0.0).result(timeout=HANGS_S)
        calls = [actor.sleep(5.0) for _ in range(3)]
        time.sleep(0.1)
        a.die(X)
        for call in calls:
            try:
                call.result(timeout=HANGS_S)
            except ActorLostError:
                continue
            except HopliteTimeoutError as error:
                raise WrongEnd("a call of an actor that is gone hangs") from error
            raise WrongEnd("a call of an actor that is gone has a result")

    a.run(A, "ask", ask)


def let_go_by_name(a: Aim) -> None:
    """A lock is asked for by its name while the last process that knows it, on another host, lets
    go of it: there is another one."""
    A, B = a.some(2)
    a.must(cut=1)

    def first(c: Any) -> None:
        lock = Lock(name="jobs")
        time.sleep(0.1)
        a.cut(A, B, 0.3)
        a.say("cut")
        time.sleep(0.1)
        del lock
        time.sleep(1.0)

    def second(c: Any) -> None:
        a.hear("cut")
        with Lock(name="jobs"):
            a.say("locked")

    a.run(A, "first", first)
    a.run(B, "second", second)


def moved_twice(a: Aim) -> None:
    """An actor goes on at the host that has its newest state when both hosts where it has run are
    gone, and a new manager hears from one host that the first of them has died, and from others
    that the second one has been named."""
    F, P, Q = a.some(3)
    a.must(die=1)

    def make(c: Any) -> None:
        keeper = c.options(name="keeper", restarts=3, retries=3).actor(Keeper)
        keeper.keep([]).result(timeout=HANGS_S)
        a.say("made")
        time.sleep(99)

    def call(c: Any) -> None:
        a.hear("made")
        keeper = c.get_actor("keeper")
        keeper.keep([]).result(timeout=HANGS_S)
        time.sleep(0.3)
        a.message_fault(OwnersReassigned, named, arrives=False)
        a.die(F)
        time.sleep(0.5)
        if keeper.give().result(timeout=HANGS_S) != []:
            raise WrongEnd("not the actor that was made")
        a.say("over")

    def hold(c: Any) -> None:
        a.hear("made")
        keeper = c.get_actor("keeper")
        a.hear("over")
        if keeper.give().result(timeout=HANGS_S) != []:
            raise WrongEnd("not the actor that was made")

    def named(sender: int, receiver: int) -> None:
        """The manager names the next owners; the host Q does not hear of them."""
        backups = [h for h in a.hosts if h.alive and h.cluster_node.backups.kept and h.place]
        for S in backups:
            if S not in (P, Q):
                a.must(die=1, cut=1, manager=1)
                a.cut(a.hosts[0], Q, 0.6)
                a.late(0.03, a.die, S)
                a.late(0.031, a.kill_manager)

    a.run(F, "make", make, False)
    a.run(P, "call", call)
    a.run(Q, "hold", hold)
