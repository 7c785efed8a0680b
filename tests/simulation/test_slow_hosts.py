"""A host whose links become slow in the middle of an allreduce, on real nodes in virtual time.

Virtual time does not depend on the machine, so these figures may be compared with a bound.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp._node.peers import path_estimator
from hoplite_mp._node.peers.link_estimator import LATER_POLL_S
from hoplite_mp._node.peers.path_estimator import SLOW_S
from hoplite_mp._planner.repair import SLOW_GATHER_S
from tests.support.simulations import LINK_BYTES_PER_S, play_without_faults

if TYPE_CHECKING:
    from hoplite_mp._simulation.workloads.workload import Workload

RATE = LINK_BYTES_PER_S  # bytes per second of each link
MEMBERS = 4
NBYTES = 64 << 20
TRANSFER_S = NBYTES / RATE
BOUND = 2 * (MEMBERS - 1) / MEMBERS  # in transfers, with all links fast
SLOW = 0.25  # part of its rate that a slow link has
CALLS = 6
SLOW_CALL = 2  # the rates of links are known from those before it
FAST_CALL = 4  # the link has its whole rate again


def transfers(
    monkeypatch: pytest.MonkeyPatch, slow_rank: int, after: float, late_s: float = 0.0
) -> list[float]:
    """How long each call takes, in transfers. after: the part of a call that is over when the link
    becomes slow. late_s: by so much one member is late for that call."""
    found = [0.0] * CALLS

    def begin(work: Workload) -> None:
        ports = work.world.network.ports

        def change(place: int, rate: float) -> None:
            ports[place].up = ports[place].down = rate

        def member(rank: int, c: Any) -> None:
            with c.group("slow", MEMBERS, rank) as g:
                mine = np.full(NBYTES // 4, rank + 1, np.float32)
                for call in range(CALLS):
                    g.barrier()
                    begun = time.monotonic()
                    if (rank, call) == (slow_rank, SLOW_CALL):
                        at = after * BOUND * TRANSFER_S
                        work.world.timeline.after(at, change, rank, SLOW * RATE)
                    if (rank, call) == (1, SLOW_CALL):
                        time.sleep(late_s)
                    if (rank, call) == (slow_rank, FAST_CALL):
                        change(rank, RATE)
                    total = g.allreduce(mine)
                    found[call] = max(found[call], (time.monotonic() - begun) / TRANSFER_S)
                    assert np.all(total == MEMBERS * (MEMBERS + 1) / 2)

        for rank, host in enumerate(work.hosts()):
            work.program(host, f"rank {rank}", partial(member, rank))

    play_without_faults(monkeypatch, MEMBERS, begin)
    return found


@pytest.mark.parametrize("slow_rank", [pytest.param(0, marks=pytest.mark.soak), 3])
def test_slow_host_loses_its_stripe_within_the_call(
    monkeypatch: pytest.MonkeyPatch, slow_rank: int
) -> None:
    """With a stripe it would have to move BOUND transfers, without one a single one, besides what
    it has moved until the others know."""
    taken = transfers(monkeypatch, slow_rank, 0.0)
    noticed_s = SLOW_S + 2 * LATER_POLL_S + SLOW_GATHER_S
    slow, next_one, fast_again, last = taken[SLOW_CALL:]
    assert slow < 1 / SLOW + noticed_s / TRANSFER_S
    assert slow < 0.85 * BOUND / SLOW
    assert next_one < 1.03 / SLOW
    assert fast_again < 1.2 * BOUND
    assert last < 1.03 * BOUND
    assert max(taken[:SLOW_CALL]) < 1.03 * BOUND


def test_slow_host_late_in_the_call_keeps_its_stripe(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has received what it needs for its stripe, and others would need that again."""
    taken = transfers(monkeypatch, 2, 0.45)
    assert taken[SLOW_CALL] < 1.03 * BOUND * (0.45 + 0.55 / SLOW)
    assert taken[SLOW_CALL + 1] < 1.03 / SLOW


def test_slow_host_with_a_late_member_loses_its_stripe_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slow link is reported first while a member is still missing, and then again."""
    late_s = 0.7
    taken = transfers(monkeypatch, 3, 0.0, late_s)
    assert taken[SLOW_CALL] - late_s / TRANSFER_S < 0.9 * BOUND / SLOW


@pytest.mark.parametrize("fast", [4.0, pytest.param(10.0, marks=pytest.mark.soak)])
def test_fast_host_limited_by_others_is_not_slow(
    monkeypatch: pytest.MonkeyPatch, fast: float
) -> None:
    """Other kinds of calls have shown what its link can do, and the others' links take less."""
    slow_rate = 20e6

    def calls(reports: bool) -> list[float]:
        found = [0.0] * CALLS

        def member(rank: int, c: Any) -> None:
            with c.group("fast", MEMBERS, rank) as g:
                mine = np.full(NBYTES // 8, rank + 1, np.float32)
                g.scatter([mine] * MEMBERS if rank == 0 else None, root=0)
                g.gather(mine, root=0)
                for call in range(CALLS):
                    g.barrier()
                    begun = time.monotonic()
                    g.allreduce(mine)
                    found[call] = max(found[call], time.monotonic() - begun)

        def begin(work: Workload) -> None:
            for rank, host in enumerate(work.hosts()):
                work.program(host, f"rank {rank}", partial(member, rank))

        monkeypatch.setattr(path_estimator, "SLOW", path_estimator.SLOW if reports else 0.0)
        rates = [fast * slow_rate] + [slow_rate] * (MEMBERS - 1)
        play_without_faults(monkeypatch, MEMBERS, begin, rates)
        return found

    with_reports, without = calls(True), calls(False)
    assert all(a < 1.03 * b for a, b in zip(with_reports, without, strict=True))


def full(number: int) -> Any:
    """What one host gives to an allreduce of results."""
    return np.full(NBYTES // 4, number, np.float32)


def transfers_of_results(monkeypatch: pytest.MonkeyPatch, slow_place: int) -> list[float]:
    """As `transfers`, for allreduces of the results of tasks, one on each host."""
    found = [0.0] * CALLS

    def begin(work: Workload) -> None:
        ports = work.world.network.ports
        names = [f"h{host.number}" for host in work.hosts()]

        def change(rate: float) -> None:
            ports[slow_place].up = ports[slow_place].down = rate

        def ask(c: Any) -> None:
            for call in range(CALLS):
                tasks = [c.options(node=name).submit(full, n + 1) for n, name in enumerate(names)]
                refs = [task.ref for task in tasks]
                c.wait(refs)
                if call == SLOW_CALL:
                    change(SLOW * RATE)
                if call == FAST_CALL:
                    change(RATE)
                begun = time.monotonic()
                total = c.allreduce(refs, to=names)
                c.wait([total])
                found[call] = (time.monotonic() - begun) / TRANSFER_S
                assert np.all(c.get(total) == MEMBERS * (MEMBERS + 1) / 2)

        work.program(work.hosts()[0], "ask", ask)

    play_without_faults(monkeypatch, MEMBERS, begin)
    return found


@pytest.mark.parametrize("slow_place", [0, pytest.param(3, marks=pytest.mark.soak)])
def test_slow_host_loses_its_stripe_of_results(
    monkeypatch: pytest.MonkeyPatch, slow_place: int
) -> None:
    """The manager, which plans these, hears of the slow link as the leading node of a Group does,
    and has heard how slow it is before the next one."""
    taken = transfers_of_results(monkeypatch, slow_place)
    noticed_s = SLOW_S + 2 * LATER_POLL_S + SLOW_GATHER_S
    slow, next_one, fast_again, last = taken[SLOW_CALL:]
    assert slow < 1 / SLOW + noticed_s / TRANSFER_S
    assert next_one < 1.03 / SLOW
    assert fast_again < 1.2 * BOUND
    assert last < 1.03 * BOUND
    assert max(taken[:SLOW_CALL]) < 1.03 * BOUND
