"""What being late costs, on real nodes in virtual time: the last member of an allreduce, and a
receiver that joins a running broadcast.

Virtual time does not depend on the machine, so these figures may be compared with a bound.
"""

from __future__ import annotations

import time
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp.contributions import section_bounds
from hoplite_mp.node.groups.speculative_start import WAIT_SHARE
from hoplite_mp.simulation.cluster import runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp.simulation.cluster.workload import Workload

RATE = 125e6  # bytes per second of each link
MEMBERS = 4
NBYTES = 8 << 20
CALLS = 2  # later ones are written to the store at a pace, because the speed of the first is known


def play(
    monkeypatch: pytest.MonkeyPatch,
    hosts: int,
    begin: Callable[[Workload], None],
    rates: Sequence[float] = (),
) -> None:
    """One run without faults. rates: bytes per second of each host's link, if not RATE."""
    monkeypatch.setattr(runs, "_rates", lambda chance, count: iter(rates or [RATE] * count))
    monkeypatch.setattr(runs, "STORES", runs.STORES[:1])
    monkeypatch.setattr(runs, "DISKS", runs.DISKS[:1])
    monkeypatch.setattr(runs, "NARROW_RUNS", 0.0)
    outcome = runs.run_seed(3, nodes=hosts, faults=False, begin=begin)
    assert not outcome.failure, outcome.failure


def seconds(monkeypatch: pytest.MonkeyPatch, apart_s: float) -> list[float]:
    """Of each call, from the last member's call to the last member's result."""
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

    play(monkeypatch, MEMBERS, begin)
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


@pytest.mark.parametrize("hosts", [4, 8])
def test_a_late_receiver_of_a_broadcast_costs_one_transfer(
    monkeypatch: pytest.MonkeyPatch, hosts: int
) -> None:
    """Each owner of a stripe has a part of its link to spare, and all of them together serve the
    one that comes when a third of the bytes is there."""
    found: list[float] = []

    def driver(c: Any) -> None:
        value = np.arange(NBYTES // 4, dtype=np.float32)
        *others, last = c.nodes
        ref = c.put(value)
        spread = c.broadcast(ref, to=others)
        time.sleep(NBYTES / RATE / 3)
        begun = time.monotonic()
        c.broadcast(ref, to=[last]).result(60)
        found.append((time.monotonic() - begun) / (NBYTES / RATE))
        spread.result(60)

    play(monkeypatch, hosts, lambda work: work.program(work.hosts()[0], "driver", driver))
    assert found[0] < 1.1


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


def test_links_that_were_idle_while_a_member_was_late_count_as_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second call's stripes are as wide as the first one's, whose hosts waited for the last."""
    monkeypatch.setattr(f"{__name__}.MEMBERS", 8)
    first, second = seconds(monkeypatch, 0.7 * NBYTES / RATE)
    assert second < 1.03 * first
