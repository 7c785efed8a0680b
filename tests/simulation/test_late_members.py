"""How long an allreduce takes after its last member has called, on real nodes in virtual time.

Virtual time does not depend on the machine, so these figures may be compared with a bound.
"""

from __future__ import annotations

import time
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp.contributions import section_bounds
from hoplite_mp.node.groups.speculative_start import WAIT_SHARE
from hoplite_mp.simulation.cluster import runs

if TYPE_CHECKING:
    import pytest

    from hoplite_mp.simulation.cluster.workload import Workload

RATE = 125e6  # bytes per second of each link
MEMBERS = 4
NBYTES = 8 << 20
CALLS = 2  # later ones are written to the store at a pace, because the speed of the first is known


def seconds(monkeypatch: pytest.MonkeyPatch, apart_s: float) -> list[float]:
    """Of each call, from the last member's call to the last member's result."""
    monkeypatch.setattr(runs, "_rates", lambda chance, count: iter([RATE] * count))
    monkeypatch.setattr(runs, "STORES", runs.STORES[:1])
    monkeypatch.setattr(runs, "DISKS", runs.DISKS[:1])
    monkeypatch.setattr(runs, "NARROW_RUNS", 0.0)
    found = [0.0] * CALLS

    def member(rank: int, c: Any) -> None:
        with c.group("late", MEMBERS, rank) as g:
            mine = np.full(NBYTES // 4, rank + 1, np.float32)
            for call in range(CALLS):
                g.barrier()
                begun = time.monotonic()
                time.sleep(rank * apart_s)
                total = g.allreduce(mine)
                taken = time.monotonic() - begun - (MEMBERS - 1) * apart_s
                found[call] = max(found[call], taken)
                assert np.all(total == MEMBERS * (MEMBERS + 1) / 2)

    def begin(work: Workload) -> None:
        for rank, host in enumerate(work.hosts()):
            work.program(host, f"rank {rank}", partial(member, rank))

    outcome = runs.run_seed(3, nodes=MEMBERS, faults=False, begin=begin)
    assert not outcome.failure, outcome.failure
    return found


def test_late_members_cost_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who were there early own the stripes, so the last one sends its array once and receives
    the result once. Besides, the others send each other what was left when it came."""
    share = 0.55
    taken = seconds(monkeypatch, share * NBYTES / RATE)
    left = (MEMBERS - 2) / (MEMBERS - 1) - (share - WAIT_SHARE)
    assert max(taken) / (NBYTES / RATE) < 1.03 * (1 + left), taken


def test_members_that_call_together_reach_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = seconds(monkeypatch, 0.0)
    assert max(taken) / (2 * 3 / 4 * NBYTES / RATE) < 1.03, taken


def test_every_host_begins_to_read_where_a_section_begins() -> None:
    assert section_bounds("allgather", 4, 400) == [0, 100, 200, 300, 400]
    assert section_bounds("broadcast", 4, 300) == [0, 100, 200, 300]
    assert section_bounds("allreduce", 4, 1200) == [0, 300, 400, 600, 800, 900, 1200]
    assert section_bounds("allreduce", 2, 10) == [0, 5, 10]
    assert section_bounds("allreduce", 1, 10) == section_bounds("reduce", 1, 10) == [0, 10]
    assert section_bounds("allreduce", 4, 2) == [0, 1, 2]
    # Of eight hosts two may be late.
    parts = {Fraction(i, owners) for owners in (8, 7, 6) for i in range(owners + 1)}
    assert section_bounds("allreduce", 8, 168) == sorted(168 * part for part in parts)
