"""Members of Groups leave by timeouts and interruptions, on simulated hosts, with and without
faults; the others go on, and nothing is left at the end."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._group.call_protocol import CallProtocol
from hoplite_mp._simulation import runs
from hoplite_mp._simulation.workloads import groups
from hoplite_mp._simulation.workloads.groups import SPLIT, TIMED, begin_group

if TYPE_CHECKING:
    from hoplite_mp._simulation.workloads.workload import Workload

GROUPS = 4  # in each run


def begin(work: Workload) -> None:
    salts = iter(range(1, 1000))
    work.salt = lambda: SPLIT * next(salts) + TIMED  # type: ignore[method-assign]
    for _ in range(GROUPS):
        begin_group(work)


@pytest.mark.parametrize("faults", [False, True])
def test_members_leaving_during_calls_do_not_affect_others(
    monkeypatch: pytest.MonkeyPatch, faults: bool
) -> None:
    ends: Counter[str] = Counter()
    end_after = CallProtocol.end_after

    def counted(calls: CallProtocol, error: BaseException) -> None:
        end_after(calls, error)
        if calls._member.closed:
            ends[type(error).__name__] += 1

    monkeypatch.setattr(CallProtocol, "end_after", counted)
    for seed in range(5):
        outcome = runs.run_seed(4200 + seed, faults=faults, begin=begin)
        assert not outcome.failure, f"seed {outcome.seed}: {outcome.failure}"
    assert ends[groups.Interrupted.__name__] > 3
    assert ends["HopliteTimeoutError"] > 3
