"""The manager's connections, and who may be the manager."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hoplite_mp._protocol.membership import MembersChanged, NodeReturned
from hoplite_mp._protocol.terms import LeaderHeartbeat, VoteRequest
from hoplite_mp._simulation.oracle.oracle import WrongEnd

if TYPE_CHECKING:
    from tests.aimed.aim import Aim

__all__ = ["back", "bound", "half_open", "let_in"]


def half_open(a: Aim) -> None:
    """A host that has called its manager again is not affected by the late end of its first
    connection. The manager was started again, and waits for another host meanwhile."""
    a.must(stop=1, manager=1, half_open=1)
    A, Q = a.some(2)

    def strike(s: int, r: int) -> bool:
        if s != A.place:
            return True
        a.late(0.01, a.half_open, A, 0.3)
        return False

    def ask(c: Any) -> None:
        a.stop(Q, 1.2)
        a.message_fault(NodeReturned, strike)
        a.kill_manager()
        time.sleep(8.0)
        if a.world.excluded:
            raise WrongEnd(f"host {a.world.excluded[0].place} was given up, and lives")

    a.run(a.hosts[0], "ask", ask)


def let_in(a: Aim) -> None:
    """A host that joins while a manager is being started again is let in as soon as the others have
    reported."""
    a.must(stop=1, manager=1)
    (Q,) = a.some(1)

    def ask(c: Any) -> None:
        a.stop(Q, 1.2)
        a.kill_manager()
        time.sleep(0.1)
        port = a.world.network.ports[0]
        newcomer = a.world.add_host(port.up, port.down)
        if not a.wait_for(5.0, lambda: newcomer.number >= 0):
            raise WrongEnd("a host waits to be let in, although all others have reported")

    a.run(a.hosts[0], "ask", ask)


def back(a: Aim) -> None:
    """A host that was given up, and whose standby a user then promotes, is asked again for what it
    has not answered. It has never heard the host that asks, so it does not miss that one."""
    a.must(cut=2, die=2)
    M, S, V = a.hosts
    leaf = a.leaf(100)
    a.offer(S, leaf, "x", strict=False)

    def strike(s: int, r: int) -> bool:
        if r != V.place:
            return True
        a.late(0.0, a.die, M)  # before it has heard what this host reports
        a.late(3.0, a.heal, S, V)  # when this host does not call the other one any more
        a.late(6.0, led)
        return False

    def led() -> None:
        if a.world.excluded or not a.world.takeovers:
            raise WrongEnd("the host whose standby was promoted does not lead")

    def ask(c: Any) -> None:
        a.cut(S, M, 30.0)
        a.message_fault(MembersChanged, strike)
        a.read(c, leaf, "x")
        a.say("over")

    a.cut(S, V, 30.0)
    a.again(V)
    a.late(0.5, lambda: a.run(a.world.hosts[V.place], "ask", ask))


def bound(a: Aim) -> None:
    """A host that is asked for its vote when its manager is there again does not give it. The
    standby's own host, which has voted, hears that it was given up."""
    a.must(stop=1, cut=1)
    M, S, V = a.hosts

    def strike(s: int, r: int) -> bool:
        if r != V.place:
            return True
        a.cut(S, V, 5.0)
        a.resume(M)
        a.message_fault(LeaderHeartbeat, heard)
        return False

    def heard(s: int, r: int) -> bool:
        if (s, r) != (M.place, V.place):
            return True
        a.late(0.0005, a.heal, S, V)
        return False

    def ask(c: Any) -> None:
        time.sleep(1.0)
        a.message_fault(VoteRequest, strike, arrives=False)
        a.stop(M, 9.0)
        time.sleep(15.0)
        if S not in a.world.excluded:
            raise WrongEnd(f"host {S.place} has voted in vain, and was not told")

    a.run(V, "ask", ask)
