"""Bounded allreduces on simulated hosts, with and without faults: late ranks, killed processes, and
lost hosts. All ranks that finish a call get the same value of the same contributors."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp._simulation import runs
from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp.errors import PeerLostError
from tests.support.bounded_threads import simulated_threads, start_threads_in

if TYPE_CHECKING:
    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp._simulation.workloads.workload import Workload

GROUPS, CALLS, SIZE_MAX = 2, 5, 6
DEADLINE_S, LATE_S = 0.003, 0.02
ITEMS = 7
LARGE_ITEMS = 20_000  # each slice is fetched, and does not travel inside the message


def member(
    work: Workload, about: tuple[int, int, int, int, int], pauses: list[float], results: Any,
    c: Cluster,
) -> None:  # fmt: skip
    group, size, rank, num, items = about
    with c.group(f"bounded {group}", size, rank) as g:
        for call in range(CALLS):
            time.sleep(pauses[call])
            x = np.zeros((size, items), np.float32)
            x[rank] = call + 1
            try:
                total = g.allreduce(x, num=num, deadline=DEADLINE_S)
            except PeerLostError:
                results["lost"] += 1
                raise
            its = tuple(int(one) for one in np.flatnonzero(total[:, 0]))
            expected = np.zeros_like(x)
            expected[list(its)] = call + 1
            first = results.setdefault((group, call), its)
            if not np.array_equal(total, expected) or its != g.contributors or first != its:
                raise WrongEnd(f"call {call} of {group}: {total[:, 0]} of {g.contributors}")
            results["late"] += len(its) < size
            work.oracle.reads += 1


def begin(results: dict[Any, Any], work: Workload) -> None:
    start_threads_in(work)
    rng, hosts = work.rng, work.hosts()
    for group in range(GROUPS):
        size = rng.randint(2, SIZE_MAX)
        num, items = rng.randint(1, size), rng.choice([ITEMS, LARGE_ITEMS])
        places = [rng.choice(hosts) for _ in range(size)]
        holds = work.no_errors_on(*places)
        work.groups += 1
        for rank, place in enumerate(places):
            pauses = [rng.choice([0.0, 0.0, LATE_S]) * rng.random() for _ in range(CALLS)]
            about = group, size, rank, num, items
            body = partial(member, work, about, pauses, results)
            work.program(place, f"rank {rank} of bounded {group}", body, holds)


@pytest.mark.parametrize("faults", [False, True])
def test_bounded_groups_with_late_or_dead_ranks_have_correct_results(faults: bool) -> None:
    late = 0
    for seed in range(4):
        results: dict[Any, Any] = {"late": 0, "lost": 0}
        with simulated_threads():
            outcome = runs.run_seed(
                5100 + seed, faults=faults, begin=partial(begin, results), collectors=True
            )
        assert not outcome.failure, f"seed {outcome.seed}: {outcome.failure}"
        late += results["late"]
        if not faults:
            assert len(results) == 2 + GROUPS * CALLS
            assert not results["lost"]
    assert late > 3
