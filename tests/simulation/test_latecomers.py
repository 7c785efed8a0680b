"""What being late costs, on real nodes in virtual time: the last member of an allreduce, and a
receiver that joins a running broadcast.

Virtual time does not depend on the machine, so these figures may be compared with a bound.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp._node.groups.plan_sources import WAIT_SHARE
from hoplite_mp._node.peers.link_estimator import LinkEstimator
from hoplite_mp._serialize.contributions import section_bounds
from hoplite_mp.config import Config
from tests.support.simulations import LINK_BYTES_PER_S, play_without_faults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hoplite_mp._simulation.workloads.workload import Workload

NBYTES = 16 << 20
CALLS = 2  # later ones are written to the store at a pace, because the speed of the first is known


def transfers(monkeypatch: pytest.MonkeyPatch, late: Sequence[float]) -> list[float]:
    """Of each call, from the last member's call to the last member's result, in times of one
    transfer. late: by how many such times each rank calls late."""
    one_s, hosts = NBYTES / LINK_BYTES_PER_S, len(late)
    found = [0.0] * CALLS

    def member(rank: int, c: Any) -> None:
        with c.group("late", hosts, rank) as g:
            mine = np.full(NBYTES // 4, rank + 1, np.float32)
            for call in range(CALLS):
                g.barrier()
                begun = time.monotonic()
                time.sleep(late[rank] * one_s)
                total = g.allreduce(mine)
                taken = (time.monotonic() - begun) / one_s - max(late)
                found[call] = max(found[call], taken)
                assert np.all(total == hosts * (hosts + 1) / 2)

    def begin(work: Workload) -> None:
        for rank, host in enumerate(work.hosts()):
            work.program(host, f"rank {rank}", partial(member, rank))

    play_without_faults(monkeypatch, hosts, begin)
    return found


@pytest.mark.parametrize(
    ("last", "hosts"),
    [
        ("the first rank", 4),
        pytest.param("the first rank", 5, marks=pytest.mark.soak),
        ("the first rank", 8),
        ("the last rank", 4),
        ("the last rank", 5),
        pytest.param("the last rank", 8, marks=pytest.mark.soak),
    ],
)
def test_allreduce_with_a_late_host_ends_one_transfer_later(
    monkeypatch: pytest.MonkeyPatch, hosts: int, last: str
) -> None:
    """The other hosts own the stripes. The late host sends its array once and receives the result
    once; each owner receives the late host's part of its stripe and sends its result to it."""
    late = [0.0] * (hosts - 1) + [1.3]
    taken = transfers(monkeypatch, late if last == "the last rank" else late[::-1])
    assert max(taken) < 1.07, taken


def test_call_with_one_missing_host_starts_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hosts exchange their stripes for 0.45 of a transfer before the last one calls. Each
    sends two thirds of its array and its result, a third, to three hosts."""
    taken = transfers(monkeypatch, [0.55 * rank for rank in range(4)])
    assert max(taken) < 1.07 * (2 / 3 + 1 - (0.55 - WAIT_SHARE)), taken


@pytest.mark.parametrize("late", [[0, 0, 0, 0], [0, 0.03, 0.06, 0.09], [0, 0, 1, 1], [0, 1, 1, 1]])
def test_simultaneous_calls_reach_the_lower_bound(
    monkeypatch: pytest.MonkeyPatch, late: list[float]
) -> None:
    taken = transfers(monkeypatch, late)
    assert max(taken) / (2 * 3 / 4) < (1.03 if not any(late) else 1.06), taken


@pytest.mark.parametrize("hosts", [4, 8])
def test_broadcast_with_a_late_receiver_ends_one_transfer_later(
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
        time.sleep(NBYTES / LINK_BYTES_PER_S / 3)
        begun = time.monotonic()
        c.broadcast(ref, to=[last]).result(60)
        found.append((time.monotonic() - begun) / (NBYTES / LINK_BYTES_PER_S))
        spread.result(60)

    play_without_faults(
        monkeypatch, hosts, lambda work: work.program(work.hosts()[0], "driver", driver)
    )
    assert found[0] < 1.1


def test_section_bounds_of_each_kind_divide_the_array() -> None:
    assert section_bounds("allgather", 4, 400) == [0, 100, 200, 300, 400]
    assert section_bounds("broadcast", 4, 300) == [0, 100, 200, 300]
    assert section_bounds("allreduce", 4, 1200) == [0, 300, 400, 600, 800, 900, 1200]
    assert section_bounds("allreduce", 2, 10) == [0, 5, 10]
    assert section_bounds("allreduce", 1, 10) == section_bounds("reduce", 1, 10) == [0, 10]
    assert section_bounds("allreduce", 4, 2) == [0, 1, 2]


def test_links_idle_during_a_late_call_count_as_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second call's stripes are as wide as the first one's, whose hosts waited for the last."""
    first, second = transfers(monkeypatch, [0.7 * rank for rank in range(8)])
    assert second < 1.03 * first


def test_call_on_a_full_store_waits_for_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no room for a call that begins early for longer than a call waits for room, and has
    some when the others call."""
    found: list[float] = []
    late_s = Config().put_wait_s + 10

    def member(rank: int, c: Any) -> None:
        with c.group("no room", 4, rank) as g:
            g.barrier()
            time.sleep(late_s * (rank >= 2))
            found.append(g.allreduce(np.full(NBYTES // 4, rank + 1, np.float32))[0])

    def other(c: Any) -> None:
        value = c.get(c.put(np.zeros(2 * NBYTES + (4 << 20), np.uint8)))
        time.sleep(late_s - 5)
        del value

    def begin(work: Workload) -> None:
        for rank, host in enumerate(work.hosts()):
            work.program(host, f"rank {rank}", partial(member, rank))
        work.program(work.hosts()[0], "other", other)

    play_without_faults(monkeypatch, 4, begin, store=4 * NBYTES)
    assert found == [10.0] * 4


def test_transfers_before_late_calls_are_not_link_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of eight exchange their stripes, and then nothing moves for a second."""
    late = [0.0, 0.0, 1.0, 1.02, 1.05, 1.1, 1.15, 2.2]
    known: dict[int, list[float]] = {}  # of each host, bytes per second
    finish = LinkEstimator._finish

    def spied(meter: LinkEstimator) -> None:
        finish(meter)
        known[id(meter)] = meter.known

    def member(rank: int, c: Any) -> None:
        with c.group("late", len(late), rank) as g:
            mine = np.full(NBYTES // 4, rank + 1, np.float32)
            g.allreduce(mine)
            for _ in range(3):
                g.barrier()
                time.sleep(late[rank])
                g.allreduce(mine)

    def begin(work: Workload) -> None:
        for rank, host in enumerate(work.hosts()):
            work.program(host, f"rank {rank}", partial(member, rank))

    monkeypatch.setattr(LinkEstimator, "_finish", spied)
    play_without_faults(monkeypatch, len(late), begin)
    assert len(known) == len(late)
    assert min(map(min, known.values())) > 0.9 * LINK_BYTES_PER_S, known
