"""Robust and compressed reductions whose ranks die, are replaced, or lose their slices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import ml
from hoplite_mp._protocol.group_calls import GroupCommit
from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.oracle.values import reduced
from hoplite_mp._simulation.workloads import workload
from hoplite_mp._simulation.workloads.learning import (
    begin_compressed,
    begin_error_reset,
    begin_robust,
)

if TYPE_CHECKING:
    from tests.aimed.aim import Aim

__all__ = ["compressed", "error_reset", "lost_codes", "lost_slices", "reduced_refs", "robust"]

GROUPS, OPERATIONS = 3, 8


def robust(a: Aim) -> None:
    """Ranks of robust reductions are killed, and replaced on other hosts."""
    for _ in range(GROUPS):
        begin_robust(a.work)


def compressed(a: Aim) -> None:
    """Ranks that exchange compressed arrays are killed, and replaced on other hosts."""
    for _ in range(GROUPS):
        begin_compressed(a.work)


def error_reset(a: Aim) -> None:
    """Ranks that train by CSER are killed, and replaced on other hosts."""
    for _ in range(GROUPS):
        begin_error_reset(a.work)


def reduced_refs(a: Aim) -> None:
    """Tasks fold refs by robust operators, while the host of some sources dies."""
    a.must(die=1)
    a.world.environment.learning = True
    a.limit(workload, "ROBUST_EVERY", 1)
    for _ in range(OPERATIONS):
        a.work._collective()
    a.late(0.02 * a.rng.random(), a.die, a.some(1)[0])


def lost_slices(a: Aim) -> None:
    """The host that decides the alltoall of a robust reduction dies when some hosts have their
    slices. Those without begin again, and all get one result of the living ranks."""
    _decider_dies(a, a.rng.choice([ml.Median(), ml.Krum(0)]))


def lost_codes(a: Aim) -> None:
    """The same with compressed slices."""
    _decider_dies(a, ml.TopK(1.0))


def _decider_dies(a: Aim, op: Any) -> None:
    a.must(die=1, cut=1)
    hosts = a.some(4)
    L, others = hosts[0], hosts[1:]
    commits = dict.fromkeys(others, 0)
    before = 1  # calls before the alltoall

    def strike(s: int, r: int) -> bool:
        (to,) = [host for host in hosts if host.place == r]
        if to is not L:
            commits[to] += 1
        if max(commits.values()) <= before:
            return True
        a.cut(L, next(host for host in others if not commits[host] > before), 1.0)
        a.message_fault(GroupCommit, lambda s, r: r != to.place or a.die(L))
        return False

    def member(rank: int, c: Any) -> None:
        rows = [np.arange(12, dtype=np.float32) * (one + 1) for one in range(len(hosts))]
        with c.group("lost slices", len(hosts), rank) as g:
            if isinstance(op, ml.TopK):
                exchange = ml.Feedback(g, op)
                total, ranks = exchange.allreduce("w", rows[rank], "sum"), exchange.contributors
            else:
                total, ranks = g.allreduce(rows[rank], op=op), g.contributors
            expected = reduced("sum" if isinstance(op, ml.TopK) else op, [rows[r] for r in ranks])
            if not np.array_equal(total, expected) or not {*ranks} <= {1, 2, 3}:
                raise WrongEnd(f"{op} of {ranks} is {total}")
            a.work.oracle.note_call(("lost slices", 0), (*ranks, total.tobytes()))

    a.message_fault(GroupCommit, strike, arrives=False)
    for rank, host in enumerate(hosts):
        a.run(host, f"rank {rank}", partial(member, rank), rank > 0)
