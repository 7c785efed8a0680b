"""Results of tasks of other hosts: lost, moved, made again."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from hoplite_mp._protocol.peers import CopiesQuery, TaskEnded
from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.oracle.values import (
    Leaf,
    make,
    make_once_more,
    make_refs,
    make_with_refs,
    rolled,
    runs,
    scaled,
)
from hoplite_mp._simulation.workloads.programs import HANGS_S
from hoplite_mp._simulation.workloads.remote import RESOURCE
from tests.aimed.aim import BIG, Aim, with_resource

__all__ = [
    "ancestors",
    "asked_again",
    "asked_of_the_dead",
    "asked_twice",
    "broken",
    "divided",
    "given_refs",
    "guest_refs",
    "held_twice",
    "read_beside",
    "second_death",
]


def divided(a: Aim) -> None:
    """A result is lost on a host that cannot reach one of its readers: both read one and the
    same value."""
    a.must(cut=1)
    S, K = a.rng.sample([h for h in a.hosts if h.place and h not in with_resource(a)], 2)
    leaf = Leaf(a.work.salt(), 1, 20_000)

    def send(c: Any) -> None:
        ref = c.options(resources={RESOURCE: 1}).submit(rolled, leaf, 0.0).ref
        a.work.board.publish("rolled", ref._id)
        c.wait([ref])
        a.hear("read")
        a.all_again()
        value = a.work.value(c, ref, "rolled")
        a.work.oracle.note_call(("rolled", 0), (int(value[0] - leaf.array()[0]),))
        a.say("over")

    def read(c: Any) -> None:
        ref = a.work.ref(c, "rolled")
        c.wait([ref])
        time.sleep(0.02)
        a.cut(S, K, 1.5)
        value = a.work.value(c, ref, "rolled")
        a.work.oracle.note_call(("rolled", 0), (int(value[0] - leaf.array()[0]),))
        a.say("read")
        a.hear("over")

    a.run(S, "send", send)
    a.run(K, "read", read)


def asked_twice(a: Aim) -> None:
    """Two hosts read a lost result, which its submitter does not: both get it."""
    S, R, T = a.rng.sample([h for h in a.hosts if h not in with_resource(a)], 3)
    leaf = Leaf(a.work.salt(), 1, 20_000)

    def send(c: Any) -> None:
        ref = c.options(resources={RESOURCE: 1}).submit(make_once_more, leaf, 0.3).ref
        a.work.board.publish("twice", ref._id)
        c.wait([ref])
        time.sleep(0.1)
        a.all_again()
        a.say("gone")
        a.hear(f"read {R.place}")
        a.hear(f"read {T.place}")

    def read(c: Any) -> None:
        ref = a.work.ref(c, "twice")
        c.wait([ref])
        a.hear("gone")
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "twice"))
        a.say(f"read {a.world.processes.running.host}")

    a.run(S, "send", send)
    a.run(R, "read", read)
    a.run(T, "read", read)


def asked_of_the_dead(a: Aim) -> None:
    """A lost result is made again although a host dies that was asked whether it has a copy."""
    a.must(die=1)
    S, R, D = a.rng.sample([h for h in a.hosts if h.place and h not in with_resource(a)], 3)
    leaf = Leaf(a.work.salt(), 1, 20_000)

    def send(c: Any) -> None:
        ref = c.options(resources={RESOURCE: 1}).submit(make_once_more, leaf, 0.0).ref
        a.work.board.publish("made", ref._id)
        c.wait([ref])
        time.sleep(0.1)
        a.message_fault(CopiesQuery, lambda s, r: r != D.place or a.die(D), arrives=False)
        a.all_again()
        a.say("gone")
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "made"))
        a.hear("read")

    def read(c: Any) -> None:
        ref = a.work.ref(c, "made")
        c.wait([ref])
        a.hear("gone")
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "made"))
        a.say("read")

    a.run(S, "send", send)
    a.run(R, "read", read)


def asked_again(a: Aim) -> None:
    """A submitter that has not heard yet that a result is lost is asked until it has."""
    S, R = a.rng.sample([h for h in a.hosts if h.place and h not in with_resource(a)], 2)
    leaf = Leaf(a.work.salt(), 1, 20_000)

    def send(c: Any) -> None:
        ref = c.options(resources={RESOURCE: 1}).submit(make_once_more, leaf, 0.0).ref
        a.work.board.publish("again", ref._id)
        c.wait([ref])
        a.hear("read")

    def read(c: Any) -> None:
        ref = a.work.ref(c, "again")
        c.wait([ref])
        time.sleep(0.1)
        gone = with_resource(a)
        for host in (a.hosts[0], *gone):
            a.cut(S, host, 1.0)
        a.must(die=len(gone), cut=1 + len(gone))
        for host in gone:
            a.die(host)
            a.late(1.2, a.world.rejoin, host.place)
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "again"))
        a.say("read")

    a.run(S, "send", send)
    a.run(R, "read", read)


def ancestors(a: Aim) -> None:
    """An argument that several lost results share is made again once, and only while one of
    them is held."""
    S = a.rng.choice([h for h in a.hosts if h not in with_resource(a)])
    counts = a.rng.random() < 0.5
    leaf = a.leaf(20_000)

    def send(c: Any) -> None:
        arg = c.options(node=f"h{S.number}", retries=1).submit(make, leaf, 0.0).ref
        c.wait([arg])
        there = c.options(resources={RESOURCE: 1})
        refs: list[Any] = [there.submit(scaled, arg, f).ref for f in range(3)]
        c.wait(refs)
        del arg
        if counts:
            refs[0] = None
        else:
            refs[0] = refs[1] = None
        c.wait([c.submit(make_once_more, leaf, 0.0)])  # only now the drops are noticed
        time.sleep(0.8)
        a.all_again()
        for f, ref in enumerate(refs):
            if ref is not None:
                a.work.oracle.check_value(a.work.value(c, ref, "anc"), leaf.array() * f, "anc")
                time.sleep(0.8)
        if runs[leaf.salt, leaf.index] > 2:
            raise WrongEnd(f"{runs[leaf.salt, leaf.index]} runs")

    a.run(S, "send", send)


def given_refs(a: Aim) -> None:
    """Refs in a result outlive the worker that has returned them."""
    a.must(kill=1)
    (A,) = a.some(1)
    leaves = [a.leaf(3000), a.leaf(3000)]

    def ask(c: Any) -> None:
        ref = c.options(node=f"h{A.number}").submit(make_refs, leaves).ref
        time.sleep(0.05)
        for process in list(A.processes):
            if process not in A.programs and process.alive:
                a.kill(A, process)
        time.sleep(0.3)
        for leaf, inner in zip(leaves, a.work.value(c, ref, "given"), strict=True):
            a.work.oracle.check_leaf(leaf, a.work.value(c, inner, "given"))

    a.run(A, "ask", ask)


def guest_refs(a: Aim) -> None:
    """Refs in a result outlive a cut between its runner and its submitter."""
    a.must(cut=1)
    X = with_resource(a)[0]
    S = a.rng.choice([h for h in a.hosts if h not in with_resource(a)])
    leaf = a.leaf(3000)

    def ask(c: Any) -> None:
        ref = c.options(resources={RESOURCE: 1}).submit(make_with_refs, [leaf, leaf], 0).ref

        def strike(s: int, r: int) -> bool:
            if r != S.place:
                return True
            a.cut(S, a.world.hosts[s], 0.4)
            return False

        a.message_fault(TaskEnded, strike)
        c.wait([ref])
        time.sleep(0.3)
        _, inner = a.work.value(c, ref, "guest")
        time.sleep(0.3)
        for one in inner:
            a.work.oracle.check_leaf(leaf, a.work.value(c, one, "guest"))

    def other(c: Any) -> None:
        time.sleep(0.2)
        here = c.options(node=f"h{X.number}")
        c.wait([here.submit(make_once_more, leaf, 0.01) for _ in range(8)])

    a.run(S, "ask", ask)
    a.run(X, "other", other)


def broken(a: Aim) -> None:
    """The end of a task is told again when the connection broke while it was told."""
    a.must(reset=1)
    X = max(with_resource(a), key=lambda h: h.number)
    S = a.rng.choice([h for h in a.hosts if h.number < X.number and h not in with_resource(a)])
    leaf = a.leaf(100)

    def ask(c: Any) -> None:
        def strike(s: int, r: int) -> bool:
            if (s, r) != (X.place, S.place):
                return True
            a.reset(a.world.hosts[s], a.world.hosts[r])
            return False

        a.message_fault(TaskEnded, strike, arrives=False)
        there = c.options(resources={RESOURCE: 1})
        refs = [there.submit(make_once_more, leaf, 0.05).ref for _ in range(6)]
        for ref in refs:
            a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "broken"))

    a.run(S, "ask", ask)


def second_death(a: Aim) -> None:
    """A result that was lost, and made again on a host that dies before it was fetched, is made
    once more."""
    a.must(die=2)
    S = a.rng.choice([h for h in a.hosts if h not in with_resource(a) and h.place])
    leaf = a.leaf(BIG)

    def dies(s: int, r: int) -> bool:
        if r != S.place:
            return True
        a.late(0.01, a.again, a.world.hosts[s])
        return False

    def ask(c: Any) -> None:
        ref = c.options(resources={RESOURCE: 1}).submit(make_once_more, leaf, 0.1).ref
        a.message_fault(TaskEnded, dies)
        c.wait([ref])
        for host in with_resource(a):
            a.crawl(host)
        time.sleep(0.1)
        a.message_fault(TaskEnded, dies)
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "second death"))

    a.run(S, "ask", ask)


def read_beside(a: Aim) -> None:
    """A result of a dead host stays at the host to which it was broadcast, although a process there
    has read it and let go."""
    a.must(die=1)
    S, Q, R, K = a.some(4)
    leaf = a.leaf(20_000)

    def send(c: Any) -> None:
        ref = c.options(node=f"h{Q.number}", retries=0).submit(make, leaf, 0.0).ref
        c.wait([ref])
        c.broadcast(ref, to=[f"h{R.number}"]).result(timeout=HANGS_S)
        time.sleep(0.2)
        a.work.board.publish("beside", ref._id)
        a.die(Q)
        time.sleep(0.5)
        a.say("dead")
        a.hear("read there")
        time.sleep(1.0)
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "beside"))

    def read(c: Any, after: str, then: str) -> None:
        a.hear(after)
        a.read(c, leaf, "beside")
        time.sleep(0.8)
        a.say(then)

    a.run(S, "send", send)
    a.run(K, "read", partial(read, after="dead", then="read"))
    a.run(R, "read beside", partial(read, after="read", then="read there"))


def held_twice(a: Aim) -> None:
    """A ref inside what a dead process has put keeps its object, which has a header for that
    process and another one for the task that made it, which came later."""
    a.must(kill=1)
    S, R, K = a.some(3)
    leaf = a.leaf(20_000)

    def send(c: Any) -> None:
        gate = c.submit(make, a.leaf(10), 1.5).ref
        ref = c.options(node=f"h{R.number}").submit(_made_after, leaf, gate).ref
        a.work.board.publish("made", ref._id)
        a.hear("put")
        c.wait([ref])
        time.sleep(0.3)
        a.say("made")
        time.sleep(1.5)
        del ref
        c.wait([c.submit(make, a.leaf(10), 0.0)])
        time.sleep(1.0)
        a.say("let go")

    def hold(c: Any) -> None:
        ref = a.work.ref(c, "made")
        outer = c.put({"made": ref})
        a.work.board.publish("outer", outer._id)
        a.hear("outer is held")
        a.say("put")
        a.hear("made")
        a.kill(R, a.world.processes.running)
        time.sleep(99)

    def read(c: Any) -> None:
        outer = a.work.ref(c, "outer")
        a.say("outer is held")
        a.hear("let go")
        inner = a.work.value(c, outer, "outer")["made"]
        a.work.oracle.check_leaf(leaf, a.work.value(c, inner, "inner"))

    a.run(S, "send", send)
    a.run(R, "hold", hold, False)
    a.run(K, "read", read)


def _made_after(leaf: Leaf, gate: Any) -> Any:
    return make(leaf, 0.0)
