"""Plans along packed trees, and what `explain` tells of plans."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.workloads.programs import HANGS_S

if TYPE_CHECKING:
    from tests.aimed.aim import Aim

__all__ = ["packed", "replanned"]

RATE, NARROW = 125e6, 4e6
ITEMS, SPREADS = 400_000, 5
PACKED_S = 5.0  # by then the trees are packed


def packed(a: Aim) -> None:
    """The paths between receivers of broadcasts are narrow, so later ones go along packed trees;
    meanwhile a receiver dies, or nobody does."""
    A, *others = a.some(4)
    dies = a.rng.choice([None, *others])
    a.must(crawl=4, packed=1, **({} if dies is None else {"die": 1}))
    for one in (A, *others):
        a.crawl(one, RATE, RATE)
    for one in others:
        for other in others:
            if one is not other:
                a.world.network.narrow_path(one.place, other.place, NARROW)
                tell = partial(other.cluster_node.plan_runner.cells.pairs.tell, one.number, NARROW)
                other.loop.run(tell)
    leaves = [a.leaf(ITEMS) for _ in range(SPREADS)]

    def ask(c: Any) -> None:
        refs = [c.put(leaf.array()) for leaf in leaves]
        for at, ref in enumerate(refs):
            dying = dies is not None and at == SPREADS - 1
            if dying:
                a.late(0.02 * a.rng.random(), a.die, dies)
            done = c.broadcast(ref, to=[f"h{host.number}" for host in others])
            done.result(timeout=HANGS_S)
            plans = c.explain(done).plans
            a.struck["packed"] += plans[0].shape == "packed trees"
            if not dying and [plan.state for plan in plans] != ["done"]:
                raise WrongEnd(f"a broadcast is over, and its plan is not: {c.explain(done)}")
            took = plans[-1].elapsed_s, plans[-1].expected_s
            if plans[0].shape == "packed trees" and not dying and took[0] > 2 * took[1]:
                raise WrongEnd(f"a plan took {took[0]} s, and {took[1]} s were expected")
            time.sleep(PACKED_S)
        a.work.board.publish("packed", refs[-1]._id)
        a.say("published")
        for host in others:
            if host is not dies:
                a.hear(f"{host.place} has read")

    def read(host: Any, c: Any) -> None:
        a.hear("published")
        a.read(c, leaves[-1], "packed")
        a.say(f"{host.place} has read")

    a.run(A, "ask", ask)
    for host in others:
        a.run(host, f"read at {host.place}", partial(read, host), host is not dies)


def replanned(a: Aim) -> None:
    """A receiver of a broadcast dies: its plan is replaced, and `explain` shows both."""
    A, *others = a.some(4)
    dies = others[-1]
    a.must(crawl=1, die=1)
    leaf = a.leaf(ITEMS)

    def ask(c: Any) -> None:
        ref = c.put(leaf.array())
        a.crawl(A, 1e6)
        done = c.broadcast(ref, to=[f"h{host.number}" for host in others])
        time.sleep(1.0)
        if [plan.state for plan in c.explain(done).plans] != ["running"]:
            raise WrongEnd(f"a broadcast does not run: {c.explain(done)}")
        a.die(dies)
        done.result(timeout=HANGS_S)
        if [plan.state for plan in c.explain(done).plans] != ["replaced", "done"]:
            raise WrongEnd(f"its plan was replaced: {c.explain(done)}")

    a.run(A, "ask", ask)
