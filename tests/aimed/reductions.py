"""Reductions that are planned again while bytes move."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from hoplite_mp._protocol.operations import Commit, ExecuteReduce, OperationSlow, StripesComplete
from hoplite_mp._simulation.oracle.oracle import ExpectedOperation
from hoplite_mp._simulation.oracle.values import (
    Leaf,
    WrongBytes,
    contributors_in,
    make_once_more,
)
from hoplite_mp._simulation.workloads.programs import HANGS_S
from hoplite_mp._simulation.workloads.remote import RESOURCE
from hoplite_mp.errors import ReduceError
from tests.aimed.aim import BIG, Aim, with_resource

__all__ = [
    "commit_once", "gone_meanwhile", "halfway", "in_chunks", "left_behind", "left_out", "moved",
    "relieved_of_results", "requester_left_out", "spared", "tree", "two_holders",
]  # fmt: skip


def spared(a: Aim) -> None:
    """What a reduction has received already is right, whoever dies while it is planned
    again."""
    *three, D = a.some(4)
    F, N, M = sorted(three, key=lambda h: h.number)  # owners pull in this order
    way = a.rng.choice(["crawl", "complete", "manager"])
    a.must(die=1, crawl=1, cut=int(way == "complete"), manager=int(way == "manager"))
    salt = a.work.salt()
    leaves = tuple(Leaf(salt, i, BIG) for i in range(4))
    op = ExpectedOperation(1, "reduce", leaves, 3, 3)

    def late(index: int, c: Any) -> None:
        ref = c.options(node=f"h{N.number}").submit(make_once_more, leaves[index], 0.3).ref
        a.work.board.publish(f"s{index}", ref._id)
        c.wait([ref], timeout=HANGS_S)
        a.hear("over")

    def ask(c: Any) -> None:
        refs = [a.work.ref(c, f"s{i}") for i in (0, 1, 3, 2)]
        c.wait(refs[:3])
        if way == "complete":
            c.wait(refs[3:])
        else:
            a.crawl(M)

        def strike(s: int, r: int) -> bool:
            if s != D.place:
                return True
            a.cut(D, a.hosts[0], 0.2)
            a.die(M)
            a.crawl(N)
            return False

        if way == "complete":
            a.message_fault(StripesComplete, strike, arrives=False)
        begun = c.reduce(refs, num=3)
        if way != "complete":
            time.sleep(0.8)
            if way == "manager":
                a.message_fault(ExecuteReduce, lambda s, r: a.kill_manager())
            a.die(M)
        value = a.work.value(c, begun, "spared")
        named = tuple((0, 1, 3, 2)[i] for i in begun.contributors or ())
        a.work.oracle.check_result(op, 0, 1, np.asarray(value), named)
        a.say("over")

    a.offer(N, leaves[0], "s0")
    a.offer(M, leaves[1], "s1", strict=False)
    a.offer(F, leaves[3], "s3")
    a.run(N, "s2", partial(late, 2))
    a.run(D, "ask", ask)


def halfway(a: Aim) -> None:
    """A manager that begins anew while the bytes of a reduction move commits it only when every
    host has its part."""
    a.must(crawl=2, manager=1)
    A, B, C = a.some(3)
    salt = a.work.salt()
    leaves = tuple(Leaf(salt, i, BIG) for i in range(2))
    op = ExpectedOperation(1, "reduce", leaves, 2, 2)

    def ask(c: Any) -> None:
        refs = [a.work.ref(c, f"s{i}") for i in range(2)]
        a.crawl(A)
        a.crawl(B)
        total = c.reduce(refs)
        time.sleep(0.3)
        a.kill_manager()
        value = a.work.value(c, total, "halfway")
        a.work.oracle.check_result(op, 0, 1, np.asarray(value), total.contributors or ())
        a.say("over")

    a.offer(A, leaves[0], "s0")
    a.offer(B, leaves[1], "s1")
    a.run(C, "ask", ask)


def left_behind(a: Aim) -> None:
    """A reduction that is planned again for a new manager still brings its result to who has
    asked."""
    a.must(crawl=2, manager=1)
    A, B, C = a.rng.sample([h for h in a.hosts if h not in with_resource(a) and h.place], 3)
    salt = a.work.salt()
    leaves = tuple(Leaf(salt, i, BIG) for i in range(3))
    op = ExpectedOperation(1, "reduce", leaves, 2, 2)

    def late(index: int, seconds: float, host: Any, c: Any) -> None:
        ref = c.options(node=f"h{host.number}").submit(make_once_more, leaves[index], seconds).ref
        a.work.board.publish(f"s{index}", ref._id)
        c.wait([ref], timeout=HANGS_S)
        a.hear("over")

    def ask(c: Any) -> None:
        one = c.options(resources={RESOURCE: 1}).submit(make_once_more, leaves[0], 0.0).ref
        refs = [one, a.work.ref(c, "s1"), a.work.ref(c, "s2")]
        c.wait([one])
        total = c.reduce(refs, num=2)
        time.sleep(0.02)
        a.work.oracle.check_leaf(leaves[0], a.work.value(c, one, "left"))
        time.sleep(0.5)
        a.crawl(B)
        a.crawl(C)
        time.sleep(0.8)
        a.kill_manager()
        value = a.work.value(c, total, "left behind")
        a.work.oracle.check_result(op, 0, 1, np.asarray(value), total.contributors or ())
        a.say("over")

    a.run(B, "s1", partial(late, 1, 0.6, B))
    a.run(C, "s2", partial(late, 2, 1.1, C))
    a.run(A, "ask", ask)


def tree(a: Aim) -> None:
    """A host that stops for long is left out of the tree of a reduction over many."""
    a.must(stop=1)
    A = a.hosts[0]
    others = a.some(len(a.hosts) - 1)
    P = others[0]
    salt = a.work.salt()
    leaves = tuple(Leaf(salt, i, 20_000) for i in range(2))
    op = ExpectedOperation(1, "allreduce", leaves, 2, 2)

    def ask(c: Any) -> None:
        refs = [c.put(leaf.array()) for leaf in leaves]
        a.stop(P, 8.0)
        total = c.allreduce(refs, to=[f"h{h.number}" for h in a.hosts])
        value = a.work.value(c, total, "tree")
        a.work.oracle.check_result(op, 0, 1, np.asarray(value), total.contributors or ())

    a.run(A, "ask", ask)


def two_holders(a: Aim) -> None:
    """A reduction's source has two holders, of which one dies: it stays among the first that are
    ready."""
    a.must(die=1)
    H, K, D = a.some(3)
    salt = a.work.salt()
    leaves = [Leaf(salt, i, 20_000) for i in range(3)]

    def ask(c: Any) -> None:
        one = a.work.ref(c, "s0")
        here = c.options(node=f"h{D.number}")
        later = [here.submit(make_once_more, leaves[i], 0.5 * i).ref for i in (1, 2)]
        c.wait([one])
        total = c.reduce([one, *later], num=2)
        time.sleep(0.1)
        a.die(K)
        value = a.work.value(c, total, "two holders")
        if contributors_in(np.asarray(value), salt) != {0, 1}:
            raise WrongBytes("two holders")
        c.wait(later)
        a.say("over")

    a.offer(H, leaves[0], "s0", to=K)
    a.run(D, "ask", ask)


def moved(a: Aim) -> None:
    """A reduction's source is moved to a reader before the reduction begins."""
    A = a.rng.choice([h for h in a.hosts if h not in with_resource(a)])
    salt = a.work.salt()
    leaves = [Leaf(salt, i, 20_000) for i in range(2)]

    def ask(c: Any) -> None:
        one = c.options(resources={RESOURCE: 1}).submit(make_once_more, leaves[0], 0.0).ref
        c.wait([one])
        two = c.submit(make_once_more, leaves[1], 0.5).ref
        total = c.reduce([one, two])
        time.sleep(0.05)
        a.work.oracle.check_leaf(leaves[0], a.work.value(c, one, "moved"))
        value = a.work.value(c, total, "moved")
        if contributors_in(np.asarray(value), salt) != {0, 1}:
            raise WrongBytes("moved")

    a.run(A, "ask", ask)


def commit_once(a: Aim) -> None:
    """The commit of a result elsewhere is known to the next manager, though only its receiver
    has heard it."""
    a.must(manager=1)
    A, D, N = a.some(3)
    salt = a.work.salt()
    leaves = [Leaf(salt, i, 20_000) for i in range(2)]

    def ask(c: Any) -> None:
        refs = [a.work.ref(c, f"s{i}") for i in range(2)]
        c.wait(refs)
        a.message_fault(Commit, lambda s, r: r != A.place or a.kill_manager())
        total = c.reduce(refs, to=f"h{D.number}")
        value = a.work.value(c, total, "commit")
        if contributors_in(np.asarray(value), salt) != {0, 1}:
            raise WrongBytes("commit")
        a.say("over")

    a.offer(N, leaves[0], "s0")
    a.offer(D, leaves[1], "s1")
    a.run(A, "ask", ask)


def left_out(a: Aim) -> None:
    """A host that has no part in the new plan of a reduction frees what it held for the old one: a
    manager that was started again takes the sources in another order."""
    _left_out(a, requests=False)


def requester_left_out(a: Aim) -> None:
    """As left_out, of the host that has requested the reduction, which only hears the commit."""
    _left_out(a, requests=True)


def _left_out(a: Aim, requests: bool) -> None:
    """requests: whether the host that is left out has requested the reduction."""
    a.must(crawl=2, manager=1, die=1)
    A, B, C, E, F = a.some(5)
    salt = a.work.salt()
    leaves = tuple(Leaf(salt, i, BIG) for i in range(3))
    op = ExpectedOperation(1, "allreduce", leaves, 2, 2)

    def ask(c: Any) -> None:
        early = [a.work.ref(c, name) for name in ("s1", "s2")]
        c.wait(early)
        late = c.options(node=f"h{A.number}").submit(make_once_more, leaves[0], 0.3).ref
        for host in (B, C):
            a.crawl(host)
        total = c.allreduce([late, *early], num=2, to=[f"h{E.number}", f"h{F.number}"])
        c.wait([late])
        a.kill_manager()
        time.sleep(0.5)
        a.die(E)
        value = a.work.value(c, total, "left out")
        a.work.oracle.check_result(op, 0, 1, np.asarray(value), total.contributors or ())
        a.say("over")

    a.offer(B, leaves[1], "s1")
    a.offer(C, leaves[2], "s2")
    a.run(C if requests else a.hosts[0], "ask", ask)


def in_chunks(a: Aim) -> None:
    """A reduction over more than fits into memory contains every source: half of the store has room
    for one of them at a time."""
    (A,) = a.some(1)
    salt, items = a.work.salt(), 230_000
    leaves = tuple(Leaf(salt, i, items) for i in range(4))
    op = ExpectedOperation(1, "reduce", leaves, 4, 4)

    def ask(c: Any) -> None:
        refs = [c.put(leaf.array()) for leaf in leaves]
        total = c.reduce(refs)
        value = a.work.value(c, total, "in chunks")
        a.work.oracle.check_result(op, 0, 1, np.asarray(value), total.contributors or ())

    has_room = a.world.environment.sizes.disk > 6 * 8 * items  # else the store may be full
    a.run(A, "ask", ask, has_room)


def gone_meanwhile(a: Aim) -> None:
    """A source was ready, and its host dies while it is fetched for an operator that has no
    kernel: the reduction goes on with the others, or says that there are too few."""
    S, R = a.some(2)
    salt, num = a.work.salt(), a.rng.choice([1, 2])
    gone, stays = Leaf(salt, 0, BIG), Leaf(salt, 1, BIG)
    a.must(die=1, crawl=1)

    def reduce(c: Any) -> None:
        x, y = a.work.ref(c, "x"), c.put(stays.array())
        c.wait([x])
        a.crawl(S)
        total = c.reduce([x, y], num=num, op=np.hypot)
        time.sleep(0.2)
        a.die(S)
        try:
            value = c.get(total, timeout=HANGS_S)
        except ReduceError:
            if num == 1:
                raise
            return
        if num == 2 or not np.array_equal(value, stays.array()):
            raise WrongBytes(f"not the sources that are left: {value[:3]}")

    a.offer(S, gone, "x", strict=False)
    a.run(R, "reduce", reduce)


def power(rank: int, items: int) -> Any:
    """What the host of that rank gives: its bit in each item."""
    return np.full(items, 1 << rank, np.int64)


def relieved_of_results(a: Aim) -> None:
    """A host is relieved of its stripe in the middle of an allreduce of results, because its link
    has become slow; at that moment a host dies, stops for a while, or is cut off from another one,
    or the manager is lost, or nothing happens."""
    fault = a.rng.choice(["die", "stop", "cut", "manager", "none"])
    a.must(crawl=6, **({} if fault == "none" else {fault: 1}))
    hosts = a.some(5)
    A, S, D = hosts[0], hosts[3], a.rng.choice(hosts[1:])
    fast, slow, items = 60e6, 6e6, 1 << 21

    def strike(s: int, r: int) -> bool:
        if s != S.place:
            return True
        faults: dict[str, tuple[Any, ...]] = {
            "die": (a.die, D),
            "stop": (a.stop, D, 1.0),
            "cut": (a.cut, D, A, 0.4),
            "manager": (a.kill_manager,),
        }
        if fault != "none":
            a.late(a.rng.choice([0.0, 0.09, 0.11, 0.3]), *faults[fault])
        return False

    def ask(c: Any) -> None:
        for call in range(4):
            there = [h for h in hosts if h.alive]
            tasks = [
                c.options(node=f"h{h.number}").submit(power, rank, items)
                for rank, h in enumerate(hosts)
                if h.alive
            ]
            refs = [task.ref for task in tasks]
            c.wait(refs)
            if call == 1:
                a.message_fault(OperationSlow, strike, arrives=False)
                a.crawl(S, slow, slow)
            num = len(refs) - (fault == "die")
            total = c.allreduce(refs, num=num, to=[f"h{h.number}" for h in there])
            value = np.asarray(a.work.value(c, total, f"call {call}"))
            given = [rank for rank, h in enumerate(hosts) if h in there]
            named = sum(1 << given[one] for one in total.contributors or ())
            if named.bit_count() < num or (value != named).any():
                raise WrongBytes(f"call {call} of {named:b} gave {set(value.tolist())}")

    for host in hosts:
        a.crawl(host, fast, fast)
    a.run(A, "ask", ask)
