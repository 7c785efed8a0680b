"""Actors that end, executors that are closed, and what must not run once more after that."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._api.actor import Actor
from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.workloads.programs import HANGS_S
from hoplite_mp._simulation.workloads.remote import RESOURCE
from hoplite_mp.errors import ActorLostError, HopliteError, ObjectLostError
from tests.aimed.aim import with_resource

if TYPE_CHECKING:
    from tests.aimed.aim import Aim

__all__ = [
    "closed_and_lost", "closed_for_good", "left_for_good", "not_called_again", "not_in_an_actor",
]  # fmt: skip

LARGE = 20_000  # items of a result that stays where it was made


class Counter:
    """An actor that counts its calls."""

    made = 0  # of all processes

    def __init__(self) -> None:
        Counter.made += 1
        self.calls = 0

    def add(self, items: int = 1) -> Any:
        self.calls += 1
        return np.full(items, self.calls)

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def pid(self) -> int:
        return os.getpid()


def host_of(a: Aim, *hosts: Any) -> Any:
    """That of these hosts on which there is an actor."""
    return next(h for h in hosts if h.node.components.actors.by_pool)


def times_100(value: Any) -> Any:
    return np.full(LARGE, int(value[0]) * 100)


def not_called_again(a: Aim) -> None:
    """The result of a call of an actor is lost, and what was made of it: the call is not applied to
    the actor a second time."""
    A, X = a.rng.sample([h for h in a.hosts if h not in with_resource(a)], 2)

    def ask(c: Any) -> None:
        counter = c.options(node=f"h{X.number}", retries=2).actor(Counter)
        first = counter.add(LARGE)
        second = c.options(resources={RESOURCE: 1}).submit(times_100, first)
        c.wait([second.ref])
        del first
        counter.add().result(timeout=HANGS_S)
        time.sleep(1.0)
        a.all_again()
        try:
            value = int(second.result(timeout=HANGS_S)[0])
        except ObjectLostError:
            value = 100
        calls = int(counter.add().result(timeout=HANGS_S)[0])
        if (value, calls) != (100, 3):
            raise WrongEnd(f"it gave {value}, and the actor counts {calls} calls")

    a.run(A, "ask", ask)


ran: list[int] = []


def slow(seconds: float) -> Any:
    ran.append(os.getpid())
    time.sleep(seconds)
    return np.full(LARGE, 1)


def not_in_an_actor(a: Aim) -> None:
    """Tasks of an executor that is closed, and of a program that has died, come back when the host
    is lost where they were. They are not given to actors that have been made meanwhile."""
    ran.clear()
    a.must(die=1, kill=1)
    A, B = a.some(2)

    def dead(c: Any) -> None:
        c.options(node=f"h{B.number}", retries=3).submit(slow, 9.0)
        time.sleep(0.1)
        a.say("sent")
        a.kill(A, a.world.processes.running)
        time.sleep(99)

    def alive(c: Any) -> None:
        with c.options(node=f"h{B.number}", retries=3).executor(1) as pool:
            done = pool.submit(slow, 0.0)
            c.wait([done.ref])
        a.hear("sent")
        time.sleep(0.5)
        counters = [c.options(node=f"h{A.number}").actor(Counter) for _ in range(3)]
        pids = {one.pid().result(timeout=HANGS_S) for one in counters}
        a.die(B)
        time.sleep(1.0)
        try:
            done.result(timeout=HANGS_S)
        except ObjectLostError:
            pass
        else:
            raise WrongEnd("a task of a closed executor was run again")
        if pids & set(ran):
            raise WrongEnd("a task ran in the process of an actor")

    a.run(A, "dead", dead, False)
    a.run(A, "alive", alive)


def left_for_good(a: Aim) -> None:
    """An actor that could begin again elsewhere ends when its host leaves in order."""
    Counter.made = 0
    A, B, C = a.some(3)
    a.must(leave=1)

    def ask(c: Any) -> None:
        options = c.options(node=[f"h{B.number}", f"h{C.number}"], restarts=3)
        counter = options.actor(Counter)
        counter.add().result(timeout=HANGS_S)
        a.leave(host_of(a, B, C))
        time.sleep(3.0)
        try:
            counter.add().result(timeout=HANGS_S)
        except ActorLostError:
            pass
        else:
            raise WrongEnd("an actor whose host has left takes calls")
        if Counter.made > 1:
            raise WrongEnd("its constructor has run again")

    a.run(A, "ask", ask)


def closed_for_good(a: Aim) -> None:
    """An actor that was closed takes no calls after the loss of its host, whoever holds it."""
    A, B, C = a.some(3)
    a.must(die=1)

    def own(c: Any) -> None:
        options = c.options(node=[f"h{B.number}", f"h{C.number}"], restarts=3, name="closed")
        counter = options.actor(Counter)
        while host_of(a, B, C) is not B:  # the nodes of a list take turns
            del counter
            time.sleep(0.5)
            counter = options.actor(Counter)
        counter.add().result(timeout=HANGS_S)
        a.say("made")
        a.hear("held")
        counter.sleep(5.0)
        time.sleep(0.1)
        Actor.close(counter)
        a.say("closed")
        time.sleep(99)

    def hold(c: Any) -> None:
        a.hear("made")
        counter = c.get_actor("closed")
        a.say("held")
        a.hear("closed")
        time.sleep(0.2)
        a.die(B)
        time.sleep(1.5)
        try:
            counter.add().result(timeout=HANGS_S)
        except ActorLostError:
            return
        raise WrongEnd("an actor that was closed takes calls")

    a.run(B, "own", own, False)
    a.run(A, "hold", hold)


def closed_and_lost(a: Aim) -> None:
    """Calls that may be tried again end well if the actor was closed after them and then lost."""
    A, B, C = a.some(3)
    a.must(die=1)

    def own(c: Any) -> None:
        where = [f"h{B.number}", f"h{C.number}"]
        counter = c.options(node=where, restarts=3, retries=3).actor(Counter)
        counter.add().result(timeout=HANGS_S)
        calls = [counter.sleep(0.5) for _ in range(3)]
        time.sleep(0.1)
        Actor.close(counter)
        time.sleep(0.1)
        a.die(host_of(a, B, C))
        for call in calls:
            try:
                call.result(timeout=HANGS_S)
            except HopliteError as error:
                raise WrongEnd(f"a call made before the end: {error}") from error

    a.run(A, "own", own)
