"""Actors whose host is lost, and the hosts that could begin them again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hoplite_mp.errors import ActorLostError, HopliteTimeoutError
from hoplite_mp.node.recovery import holdings
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
    identity. Here hosts hold more of the dead one than their reports can name."""
    a.must(die=1, nobody=1)
    A, C = a.some(2)
    a.limit(holdings, "HOLDINGS_MAX", 1)

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
            lan = C.lan
            (bound,) = lan.far_actors.bound.values()
            a.struck["nobody"] += lan.host.imports.by_oid[bound.identity].owner == A.host_id
        except HopliteTimeoutError as error:
            raise WrongEnd("a call of an actor that nobody owns hangs") from error
        del held

    a.offer(A, a.leaf(100), "further", strict=False)
    a.run(A, "make", make, False)
    a.run(C, "call", call)
