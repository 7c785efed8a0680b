"""Bounded allreduces: ranks that are late, and ranks that die."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.oracle.values import WrongBytes
from tests.support.bounded_threads import start_threads_in

if TYPE_CHECKING:
    from tests.aimed.aim import Aim

__all__ = ["bounded", "bounded_deaths"]

RANKS, CALLS, DEADLINE_S, LATE_S = 4, 5, 0.02, 0.3
RATE = 125e6  # bytes per second of each link


def bounded(a: Aim) -> None:
    """A rank other than the leading one is late for one call, or for two. The others do not wait
    for it, and it gets the result of that call later."""
    hosts = a.some(RANKS)
    late, items = a.rng.randrange(1, RANKS), a.rng.choice([7, 20_000])
    calls = a.rng.choice([(1,), (3,), (1, 2)])
    a.must(crawl=RANKS, in_time=1)

    def pause(rank: int, call: int) -> float:
        return LATE_S if rank == late and call in calls else 0.0

    for rank, host in enumerate(hosts):
        a.crawl(host, RATE, RATE)
        a.run(host, f"rank {rank}", partial(_member, a, rank, items, pause, late))
    start_threads_in(a.work)


def bounded_deaths(a: Aim) -> None:
    """As bounded, and a rank dies, with its host or alone. The others agree on each call."""
    hosts = a.some(RANKS)
    late, dies = a.rng.sample(range(RANKS), 2)
    items = a.rng.choice([7, 20_000])
    kind, when_s = a.rng.choice(["die", "kill"]), 0.1 * a.rng.random()
    late_calls = a.rng.choice([(), (1,), (1, 2)])
    a.must(**{"crawl": RANKS, kind: 1})

    def strike() -> None:
        if kind == "die":
            a.die(hosts[dies])
        for process in hosts[dies].programs:
            if kind == "kill" and process.name == f"rank {dies}" and process.alive:
                a.kill(hosts[dies], process)

    def pause(rank: int, call: int) -> float:
        if rank == late and call in late_calls:
            return LATE_S
        if rank == dies and call == 2:
            a.late(when_s, strike)
        return 0.03 * (call > 2)

    for rank, host in enumerate(hosts):
        a.crawl(host, RATE, RATE)
        # A late rank may not get the result of a rank that has died since.
        strict = rank != dies and (rank != late or not late_calls)
        a.run(host, f"rank {rank}", partial(_member, a, rank, items, pause, late), strict)
    start_threads_in(a.work)


def _member(a: Aim, rank: int, items: int, pause: Any, late: int, c: Any) -> None:
    with c.group("bounded", RANKS, rank) as g:
        for call in range(CALLS):
            time.sleep(pause(rank, call))
            x = np.zeros((RANKS, items), np.float32)
            x[rank] = call + 1
            begun = time.monotonic()
            total = g.allreduce(x, num=1, deadline=DEADLINE_S)
            took_s = time.monotonic() - begun
            expected = np.zeros_like(x)
            expected[list(g.contributors)] = call + 1
            if not np.array_equal(total, expected):
                raise WrongBytes(f"call {call} of {g.contributors} is {total[:, 0]}")
            a.work.oracle.reads += 1
            a.work.oracle.note_call(("bounded", call), g.contributors)
            if late not in g.contributors and rank != late:
                a.struck["in_time"] += 1
                if took_s > LATE_S / 2:
                    raise WrongEnd(f"call {call} of {g.contributors} took {took_s:.2f} s")
