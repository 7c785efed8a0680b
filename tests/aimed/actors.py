"""Actors whose host is lost, and the hosts that could begin them again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp.errors import ActorLostError, HopliteTimeoutError
from hoplite_mp.simulation.cluster.programs import HANGS_S
from hoplite_mp.simulation.cluster.truth import WrongEnd

if TYPE_CHECKING:
    from tests.aimed.aim import Aim

__all__ = ["ownerless"]


class Sleeper:
    """An actor that may be told to sleep."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def ownerless(a: Aim) -> None:
    """Calls of an actor end if its host dies and the manager names nobody as the next owner of its
    identity. The spare S has lost contact with the caller C, and C alone still holds the actor. The
    manager names S, and dies before C hears that. S counts no holder, so it lets go of the actor
    and says so to the next manager, which is still asking all hosts what they hold."""
    a.must(reset=1, die=1, cut=1, manager=1, spare=1, nobody=1)
    others = sorted((host for host in a.hosts if host.place), key=lambda host: host.number)
    at = a.chance.randrange(1, len(others) - 1)
    A, S = others[at : at + 2]  # the spare is the next host by number
    C = a.chance.choice(others[:at])  # of C and S, the manager will give up the later one: S

    def make(c: Any) -> None:
        sleeper = c.options(name="sleeper", restarts=1, retries=1).actor(Sleeper)
        sleeper.sleep(0.0).result(timeout=HANGS_S)
        time.sleep(0.2)
        a.struck["spare"] += S.home in A.lan.spares.at.values()
        a.say("made")
        time.sleep(99)

    reported: set[int] = set()

    def named(s: int, r: int) -> bool:
        reported.add(s)
        if len(reported) < len(a.hosts) - 1:
            return True
        a.cut(a.hosts[0], C, 0.5)  # the manager's answer does not get through
        a.late(0.01, a.lose_manager)
        return False

    def call(c: Any) -> None:
        a.hear("made")
        sleeper = c.get_actor("sleeper")
        c.broadcast(c.put(np.ones(10)), to=[f"h{S.number}"]).result(timeout=HANGS_S)
        last = sleeper.sleep(99.0)
        time.sleep(0.1)
        a.reset(C, S)
        a.trap("HoldingsReported", named)
        a.die(A)
        try:
            last.result(timeout=HANGS_S)
        except ActorLostError:
            lan = C.lan
            (bound,) = lan.far_actors.bound.values()
            a.struck["nobody"] += lan.host.imports.by_oid[bound.identity].home == A.home
        except HopliteTimeoutError as error:
            raise WrongEnd("a call of an actor that nobody owns hangs") from error

    a.run(A, "make", make, False)
    a.run(C, "call", call)
