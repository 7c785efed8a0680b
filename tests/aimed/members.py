"""Members of Groups, and of the cluster."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._protocol.group_calls import GroupCommit, GroupDone, GroupSlow, GroupSync
from hoplite_mp._protocol.groups import GroupJoinRequested
from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.oracle.values import (
    WrongBytes,
)
from hoplite_mp.errors import HopliteTimeoutError, PeerLostError, StoreFullError
from tests.aimed.aim import BIG

if TYPE_CHECKING:
    from tests.aimed.aim import Aim

__all__ = [
    "doze",
    "former",
    "founder",
    "left_early",
    "letters",
    "newest",
    "one_late",
    "other_plans",
    "part_of_the_dead",
    "relieved",
    "reopened",
    "repeated_full",
    "survives_leader",
    "unheard",
    "varied",
    "voted",
]


def left_early(a: Aim) -> None:
    """What a member has sent before it left is received, also on a host that has never heard that
    it was a member, because the manager has died."""
    a.must(cut=1, manager=1)
    R, S = a.some(2)

    def come(s: int, r: int) -> bool:
        if s != S.place:
            return True
        a.cut(a.hosts[0], R, 0.3)
        a.late(0.1, a.kill_manager)
        return False

    def receive(c: Any) -> None:
        with c.group("left early", 2, 0) as g:
            if g.recv(source=1) != "a letter":
                raise WrongEnd("another letter")

    def send(c: Any) -> None:
        time.sleep(0.2)
        a.message_fault(GroupJoinRequested, come)
        with c.group("left early", 2, 1) as g:
            g.send("a letter", to=0)

    a.run(R, "rank 0", receive)
    a.run(S, "rank 1", send)


def letters(a: Aim) -> None:
    """After a message of a dead sender that is lost, no later one of that sender may be
    received."""
    a.must(crawl=1, die=1)
    F, R = a.some(2)

    def send(c: Any) -> None:
        with c.group("sizes", 2, 0) as g:
            a.crawl(F)
            g.send((0, bytes(800_000)), to=1)
            g.send((1, b""), to=1)
            g.send((2, b""), to=1)
            a.late(0.5, a.die, F)
            time.sleep(99)

    def receive(c: Any) -> None:
        with c.group("sizes", 2, 1) as g:
            expected = 0
            while True:
                try:
                    number, _ = g.recv(source=0)
                except PeerLostError:
                    return
                if number != expected:
                    raise WrongEnd(f"letter {number} instead of {expected}")
                expected += 1

    a.run(F, "send", send, False)
    a.run(R, "receive", receive)


def founder(a: Aim) -> None:
    """A part of a Group does not wait for a founder that has died before it joined."""
    a.must(die=1)
    A, B, F = a.some(3)

    def member(rank: int, c: Any) -> None:
        with c.group("parent", 3, rank) as g:
            g.barrier()
            if rank == 2:
                a.message_fault(
                    GroupJoinRequested, lambda s, r: s != F.place or a.die(F), arrives=False
                )
            g.barrier()
            try:
                with g.split(0) as part:
                    part.allreduce(np.ones(1))
            except PeerLostError:
                pass
            except HopliteTimeoutError as error:
                raise WrongEnd("a founder that has died is waited for") from error

    for rank, host in enumerate((A, B, F)):
        a.run(host, f"rank {rank}", partial(member, rank), rank < 2)


def former(a: Aim) -> None:
    """A Group does not wait for the last host of a member that has left."""
    a.must(die=1)
    A, B, F = a.some(3)

    def member(rank: int, c: Any) -> None:
        with c.group("former", 3, rank) as g:
            g.allreduce(np.ones(3000))
            if rank == 2:
                a.message_fault(GroupSync, lambda s, r: s != F.place or a.die(F), arrives=False)
                return
            time.sleep(0.2)
            for _ in range(3):
                with contextlib.suppress(PeerLostError):
                    g.allreduce(np.ones(3000))

    for rank, host in enumerate((A, B, F)):
        a.run(host, f"rank {rank}", partial(member, rank), rank < 2)


def survives_leader(a: Aim) -> None:
    """The sum of a small call that was committed reaches its root, though its leader dies."""
    a.must(die=1)
    L, B, R = a.some(3)
    lost: list[int] = []

    def member(rank: int, c: Any) -> None:
        with c.group("leader", 3, rank) as g:
            if rank == 0:
                a.message_fault(GroupCommit, lambda s, r: r != B.place or a.die(L))
            try:
                g.reduce(np.ones(10), root=2)
            except PeerLostError as error:
                lost.append(rank)
                if rank == 2 and "was lost before it sent this host's result" in str(error):
                    raise WrongEnd(f"the sum is lost: {error}") from error

    for rank, host in enumerate((L, B, R)):
        a.run(host, f"rank {rank}", partial(member, rank), rank > 0)


def part_of_the_dead(a: Aim) -> None:
    """Parts of a rank that dies are kept until all have read them: the leading host has not heard
    of the death when it commits the call. What is large stays on the dead rank's host, so no cell
    of the plan needs these parts, and nothing but the call itself keeps them."""
    a.must(crawl=1, kill=1, cut=2, heard=1, taken=1)
    L, X, Y = a.some(3)
    large = {(1, 2), (2, 1), (3, 0)}  # (giver, taker); the last one takes a while
    dies = 2

    def strike(s: int, r: int) -> bool:
        if s != X.place:
            return True
        for process in X.programs:
            if process.name == f"rank {dies}" and process.alive:
                for host in (L, Y):
                    a.cut(a.hosts[0], host, 1.5)
                a.kill(X, process)
                a.say("killed")
        return False

    def part(giver: int, taker: int) -> Any:
        items = 20_000 if (giver, taker) in large else 2
        return np.full(items, 4 * giver + taker)

    def member(rank: int, c: Any) -> None:
        with c.group("dead", 4, rank) as g:
            g.barrier()
            if rank == 0:
                a.crawl(Y)
                a.message_fault(GroupDone, strike, arrives=False)
            got = g.alltoall([part(rank, taker) for taker in range(4)])
            for giver in g.contributors:
                if got[giver] is None or (got[giver] != part(giver, rank)).any():
                    raise WrongBytes(f"{g.contributors} but {got}")
            if rank == 1:
                a.struck["taken"] += dies in g.contributors

    def look(c: Any) -> None:
        a.hear("killed")
        time.sleep(0.3)
        (state,) = X.cluster_node.group_calls.states.values()
        a.struck["heard"] += state.calls == 1 and not state.members.alive >> dies & 1

    for rank, host in enumerate((L, X, X, Y)):
        a.run(host, f"rank {rank}", partial(member, rank), rank != dies)
    a.run(X, "look", look)


def doze(a: Aim) -> None:
    """A manager that did not run does not take the others for dead."""
    a.must(stop=1)
    A = a.hosts[0]

    def ask(c: Any) -> None:
        a.stop(a.hosts[0], 2.2 + 2.0 * a.rng.random())
        time.sleep(6.0)
        if a.world.excluded:
            raise WrongEnd(f"host {a.world.excluded[0].place} was given up for the manager's pause")

    a.run(A, "ask", ask)


def newest(a: Aim) -> None:
    """A manager that is started again goes on with the newest list of a Group's members, though a
    host reports an older one, because it was cut off when the last member came."""
    a.must(cut=1, manager=1)
    A, B, C = a.some(3)

    def member(rank: int, c: Any) -> None:
        if rank == 2:
            time.sleep(0.5)
            a.cut(a.hosts[0], A, 0.3)
            a.late(0.2, a.kill_manager)
        with c.group("newest", 3, rank) as g:
            got = g.allreduce(np.ones(1))
            if g.contributors != (0, 1, 2) or got[0] != 3:
                raise WrongEnd(f"members {g.contributors}, though nobody has died")

    for rank, host in enumerate((A, B, C)):
        a.run(host, f"rank {rank}", partial(member, rank))


def unheard(a: Aim) -> None:
    """Nobody waits for messages of a member that has died before its host heard that it was one,
    because the manager died as well."""
    a.must(cut=1, kill=1, manager=1)
    A, B = a.some(2)

    def come(s: int, r: int) -> bool:
        if s != B.place:
            return True
        a.cut(a.hosts[0], B, 0.3)
        a.late(0.1, a.kill_manager)
        for process in B.programs:
            if process.name == "rank 1":
                a.late(0.2, a.kill, B, process)
        return False

    def receive(c: Any) -> None:
        with c.group("unheard", 2, 0) as g, contextlib.suppress(PeerLostError):
            g.recv(source=1)

    def send(c: Any) -> None:
        time.sleep(0.2)
        a.message_fault(GroupJoinRequested, come)
        with c.group("unheard", 2, 1):
            time.sleep(99)

    a.run(A, "rank 0", receive)
    a.run(B, "rank 1", send, False)


def reopened(a: Aim) -> None:
    """A Group that was opened again goes on under the next manager, although a host has never heard
    that the one before of that name has ended, and reports first."""
    a.must(cut=3, manager=1)
    A, B, C = a.some(3)

    def leave(c: Any) -> None:
        with c.group("again", 2, 0) as g:
            g.barrier()
        a.say("left")

    def member(rank: int, c: Any) -> None:
        if rank == 0:
            with c.group("again", 2, 1) as g:
                g.barrier()
                a.hear("left")
                time.sleep(0.05)
                a.cut(a.hosts[0], A, 0.3)
            a.say("ended")
        a.hear("ended")
        time.sleep(0.05)
        with c.group("again", 2, rank) as g:
            g.barrier()
            if rank == 0:
                for host in (B, C):
                    a.cut(a.hosts[0], host, 0.6)
                a.kill_manager()
            time.sleep(1.5)
            got = g.allreduce(np.ones(1))
            if g.contributors != (0, 1) or got[0] != 2:
                raise WrongEnd(f"members {g.contributors}, though nobody has left")

    a.run(A, "leave", leave)
    for rank, host in enumerate((B, C)):
        a.run(host, f"rank {rank}", partial(member, rank))


def other_plans(a: Aim) -> None:
    """Members begin by the plans of different calls: the root of a broadcast knows how much it
    gives, and the others only that they get something. All wait for one plan then."""

    def member(rank: int, c: Any) -> None:
        with c.group("other plans", 3, rank) as g:
            for items in (20_000, 30_000, 20_000, 30_000):
                got = g.broadcast(np.full(items, items) if rank == 0 else None, root=0)
                if (len(got), got[-1]) != (items, items):
                    raise WrongEnd(f"{len(got)} items instead of {items}")

    for rank, host in enumerate(a.some(3)):
        a.run(host, f"rank {rank}", partial(member, rank))


def varied(a: Aim) -> None:
    """Members make a call that was made before, so they begin by its plan; one that comes late
    gives more than before. What the others have received by then is kept or freed."""
    names = a.some(3)

    def member(rank: int, c: Any) -> None:
        with c.group("varied", 3, rank) as g:
            for _ in range(5):
                g.allgather(np.full(20_000, rank))
            if rank == 2:
                time.sleep(0.3)
            parts = g.allgather(np.full(20_000 + 5_000 * (rank == 2), rank))
            if [(one[0], len(one)) for one in parts] != [(0, 20_000), (1, 20_000), (2, 25_000)]:
                raise WrongEnd("wrong parts")

    for rank, host in enumerate(names):
        a.run(host, f"rank {rank}", partial(member, rank))


def repeated_full(a: Aim) -> None:
    """Members begin by the plan of an earlier call, for which one store has no space now. The
    leading node makes another plan, which waits for space. The last member is late, or not."""
    hosts = a.some(3)
    items, calls, late_s = 20_000, 5, a.rng.choice([0.0, 0.1])
    a.must(full=2)

    def member(rank: int, c: Any) -> None:
        with c.group("repeated full", 3, rank) as g:
            for call in range(calls):
                mine = g.empty(items, np.int64)
                mine[...] = 10 * call + rank
                if call == calls - 1:
                    a.say(f"{rank} is ready")
                    a.hear("full")
                    time.sleep(late_s * (rank == 2))
                parts = g.allgather(mine)
                if [(one[0], len(one)) for one in parts] != [
                    (10 * call + r, items) for r in (0, 1, 2)
                ]:
                    raise WrongEnd(f"wrong parts of call {call}")
                del parts

    def fill(c: Any) -> None:
        for rank in range(3):
            a.hear(f"{rank} is ready")
        views: list[Any] = []
        for some in (BIG, 1 << 13):
            try:
                while True:
                    views.append(c.get(c.put(np.full(some, len(views)))))
            except StoreFullError:
                a.struck["full"] += 1
        a.say("full")
        time.sleep(late_s + 0.2)
        views.clear()

    for rank, host in enumerate(hosts):
        a.run(host, f"rank {rank}", partial(member, rank))
    a.run(hosts[1], "fill", fill)


def relieved(a: Aim) -> None:
    """A host is relieved of its stripe in the middle of an allreduce, because its link has become
    slow; at that moment a member dies, or a host, or nobody does."""
    a.must(crawl=6, die=1)
    hosts = a.some(5)
    L, S, D = hosts[0], hosts[3], a.rng.choice(hosts)
    fast, slow, items = 60e6, 6e6, 1 << 21

    def strike(s: int, r: int) -> None:
        if s == S.place:
            a.late(a.rng.choice([0.0, 0.09, 0.11]), a.die, D)

    def member(rank: int, c: Any) -> None:
        with c.group("relieved", len(hosts), rank) as g:
            for call in range(4):
                g.barrier()
                if (call, rank) == (1, 3):
                    a.message_fault(GroupSlow, strike, arrives=S is not L)
                    a.crawl(S, slow, slow)
                total = g.allreduce(np.full(items, 1 << rank, np.int64))
                if (total != sum(1 << one for one in g.contributors)).any():
                    raise WrongEnd(f"call {call} of {g.contributors} gave {set(total.tolist())}")

    for rank, host in enumerate(hosts):
        a.crawl(host, fast, fast)
        a.run(host, f"rank {rank}", partial(member, rank), host is not D)


def one_late(a: Aim) -> None:
    """A large allreduce begins before its last host has called. Meanwhile a host dies, or stops for
    a while, or the late one gives something else, or nothing happens."""
    hosts = a.some(5)
    late = a.rng.choice(hosts)
    fault = a.rng.choice(["die", "stop", "other", "none"])
    D = late if fault == "other" else a.rng.choice(hosts)
    a.must(crawl=5, **({fault: 1} if fault in ("die", "stop") else {}))
    items, calls, other = 1 << 20, 4, 2
    one_s = 8 * items / 60e6
    waits = [[0.1 * a.rng.random() for _ in hosts] for _ in range(calls)]
    for call in waits:
        call[hosts.index(late)] = 0.3 + a.rng.random()
    when_s = 1.5 * one_s * a.rng.random()

    def member(rank: int, c: Any) -> None:
        with c.group("one late", len(hosts), rank) as g:
            for call in range(calls):
                g.barrier()
                if (call, hosts[rank]) == (1, D) and fault == "die":
                    a.late(when_s, a.die, D)
                if (call, hosts[rank]) == (1, D) and fault == "stop":
                    a.late(when_s, a.stop, D, 0.3)
                time.sleep(waits[call][rank] * one_s)
                differs = call == other and fault == "other"
                try:
                    mine = np.full(items + (differs and hosts[rank] is D), 1 << rank, np.int64)
                    total = g.allreduce(mine)
                except ValueError:
                    if not differs:
                        raise
                    continue
                if differs or (total != sum(1 << one for one in g.contributors)).any():
                    raise WrongEnd(f"call {call} of {g.contributors} gave {set(total.tolist())}")

    for rank, host in enumerate(hosts):
        a.crawl(host, 60e6, 60e6)
        a.run(host, f"rank {rank}", partial(member, rank), host is not D or fault == "other")


def voted(a: Aim) -> None:
    """Members make the same few calls again and again, so engines commit them by votes, and small
    ones in between by their parts. In the middle of that a host dies, stops, leaves or is cut off
    for a while, the connections between two are reset, a process dies, the manager is lost, a
    member gives something else or leaves the Group, or nothing happens."""
    hosts = a.some(4)
    D, E = a.rng.sample(hosts, 2)
    faults = ["die", "stop", "leave", "cut", "reset", "kill", "manager", "other", "goes", "none"]
    fault = a.rng.choice(faults)
    if fault not in ("other", "goes", "none"):
        a.must(**{fault: 1})
    kinds, root = a.rng.choices(["allreduce", "broadcast", "allgather"], k=2), 1
    strikes_at, calls, items = a.rng.randint(4, 14), 24, 20_000
    after_s = a.rng.choice([0.0, 1e-3, 3e-3]) * a.rng.random()
    lasts_s = a.rng.choice([0.05, 0.3, 3.0])  # a host that says nothing for so long is given up
    steady, every = a.rng.random() < 0.5, a.rng.choice([1, 2, 5])
    # Of all of them, and of one, before each call.
    pause_s, late_s = a.rng.choice([0.0, 0.01]), a.rng.choice([0.0, 2e-3, 0.02])
    # So is one of two that have lost what was on its way between them.
    gone = fault in ("die", "leave", "kill", "goes", "reset")
    gone |= fault == "stop" and lasts_s > 1.0

    def strike(c: Any) -> None:
        away = {"stop": (a.stop, D, lasts_s), "cut": (a.cut, D, E, min(lasts_s, 0.3)),
                "reset": (a.reset, D, E), "manager": (a.kill_manager,), "die": (a.die, D),
                "leave": (a.leave, D)}  # fmt: skip
        if fault == "kill":
            away["kill"] = a.kill, D, a.world.processes.running
        if fault in away:
            a.late(after_s, *away[fault])

    def given(call: int, rank: int) -> Any:
        other = fault == "other" and call == strikes_at and hosts[rank] is D
        return np.full(items + 5 * other, (1 << rank) + 100 * call, np.int64)

    def right(kind: str, call: int, rank: int, got: Any, ranks: Any) -> bool:
        parts = {one: given(call, one) for one in ranks}
        if kind == "allreduce":
            return np.array_equal(got, sum(parts.values()))
        if kind == "broadcast":
            return np.array_equal(got, given(call, root))
        return all(np.array_equal(got[one], parts[one]) for one in ranks)

    def member(rank: int, c: Any) -> None:
        with c.group("voted", len(hosts), rank) as g:
            for call in range(calls):
                if hosts[rank] is D and call == strikes_at:
                    strike(c)
                    if fault == "goes":
                        return
                kind, mine = kinds[call % 3 == 2 and not steady], given(call, rank)
                time.sleep(pause_s + late_s * (call % len(hosts) == rank))
                try:
                    if call % every == every - 1 and every != 2:
                        g.barrier()
                    if kind == "broadcast":
                        got = g.broadcast(mine if rank == root else None, root)
                    else:
                        got = getattr(g, kind)(mine)
                except (ValueError, PeerLostError):
                    if fault == "other" and call == strikes_at and kind == "allreduce":
                        continue
                    if not gone or kind != "broadcast":  # its root
                        raise
                    continue
                if not right(kind, call, rank, got, g.contributors):
                    raise WrongEnd(f"{kind} {call} of {g.contributors} is wrong at rank {rank}")
                got[0] = -1  # it is this rank's own

    for rank, host in enumerate(hosts):
        struck = (host is D and fault in ("die", "stop", "leave", "kill")) or (
            host in (D, E) and fault == "reset"
        )
        a.run(host, f"rank {rank}", partial(member, rank), not struck)
