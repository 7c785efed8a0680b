"""A host dies, and the nodes of other hosts receive the loss in one order.

Each run shows why one component of a node receives it before another one
(_node/runtime/peer_loss.py, tests/simulation/test_peer_loss_order.py).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import hoplite_mp
from hoplite_mp._protocol.actors import RestartsQuery
from hoplite_mp._protocol.peers import LocateReplicas
from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.oracle.values import make
from hoplite_mp._simulation.workloads.programs import HANGS_S

if TYPE_CHECKING:
    from hoplite_mp._protocol.fields import Message
    from tests.aimed.aim import Aim

__all__ = [
    "place_of_the_dead",
    "replica_of_the_dead",
    "restarts_of_the_dead",
    "result_of_the_dead",
]


class Sleeper:
    """An actor that may be told to sleep."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def _read_after_death(a: Aim, owner: Any, reader: Any, leaf: Any) -> None:
    """Runs a program that holds "kept" without reading it, and reads it after its owner's death."""
    a.must(die=1)

    def hold(c: Any) -> None:
        ref = a.work.ref(c, "kept")
        time.sleep(0.1)
        a.die(owner)
        time.sleep(0.3)
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "kept"))
        a.say("over")

    a.run(reader, "hold", hold)


def replica_of_the_dead(a: Aim) -> None:
    """The only copy that is left is a replica that a broadcast has placed, and nobody there holds
    it but the node."""
    A, B, C = a.some(3)
    leaf = a.leaf()
    a.offer(A, leaf, "kept", to=B, strict=False)
    _read_after_death(a, A, C, leaf)


def result_of_the_dead(a: Aim) -> None:
    """The only copy is the result of a task of the dead host, where the task has run."""
    A, B, C = a.some(3)
    leaf = a.leaf()

    def submit(c: Any) -> None:
        ref = c.options(node=f"h{B.number}").submit(make, leaf, 0.0).ref
        c.wait([ref], timeout=HANGS_S)
        a.work.board.publish("kept", ref._id)
        a.hear("over")

    a.run(A, "submit", submit, strict=False)
    _read_after_death(a, A, C, leaf)


def _asked_of_the_dying(a: Aim, host: Any, message: type[Message]) -> None:
    """That host dies while such a question is on its way to it."""
    a.must(die=1)
    a.message_fault(message, lambda sender, receiver: a.die(host), arrives=False)


def restarts_of_the_dead(a: Aim) -> None:
    """The host of an actor is asked how often the actor was started again, and dies."""
    A, B, C = a.some(3)

    def ask(c: Any) -> None:
        options = c.options(node=[f"h{B.number}", f"h{C.number}"], restarts=3)
        sleeper = options.actor(Sleeper)
        sleeper.sleep(0.1).result(timeout=HANGS_S)
        host = next(h for h in (B, C) if h.node.components.actors.by_pool)
        _asked_of_the_dying(a, host, RestartsQuery)
        if (found := hoplite_mp.Actor.restarts(sleeper)) != 1:
            raise WrongEnd(f"it was started again {found} times")

    a.run(A, "ask", ask)


def place_of_the_dead(a: Aim) -> None:
    """An object's owner is asked where the object is, and dies."""
    A, C = a.some(2)
    a.offer(A, a.leaf(), "kept", strict=False)

    def ask(c: Any) -> None:
        ref = a.work.ref(c, "kept")
        time.sleep(0.1)
        _asked_of_the_dying(a, A, LocateReplicas)
        if f"h{A.number}" in c.locations(ref):
            raise WrongEnd("it is found on a host that is gone")

    a.run(C, "ask", ask)
