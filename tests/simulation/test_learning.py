"""Robust and compressed reductions on simulated hosts, with and without faults: ranks die in the
middle, leave, and are replaced, so slices get other owners."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._group.slice_folds import SliceFolds
from hoplite_mp._simulation import runs
from hoplite_mp._simulation.workloads import learning
from hoplite_mp.ml._member_operations import MemberOperations

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._simulation.workloads.programs import Programs
    from hoplite_mp._simulation.workloads.workload import Workload

GROUPS, SEEDS = 3, 4
SIZE_MAX = learning.SIZE_MAX


def count(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, counts: Counter[str]) -> None:
    """Counts the calls of a method, and their exceptions by type."""
    method = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        try:
            return method(*args, **kwargs)
        except Exception as error:
            counts[type(error).__name__] += 1
            raise

    monkeypatch.setattr(owner, name, counted)


def play(begin: Callable[[Programs], None], faults: bool) -> int:
    """The number of values that were checked, in several runs that hold."""

    def begin_all(work: Workload) -> None:
        for _ in range(GROUPS):
            work.world.timeline.after(work.rng.random() * work.span_s, begin, work)

    reads = 0
    for seed in range(SEEDS):
        outcome = runs.run_seed(9100 + seed, faults=faults, begin=begin_all)
        assert not outcome.failure, f"seed {outcome.seed}: {outcome.failure}"
        reads += outcome.reads
    return reads


@pytest.mark.parametrize("faults", [False, True])
def test_robust_reductions_equal_numpy_over_their_contributors(
    monkeypatch: pytest.MonkeyPatch, faults: bool
) -> None:
    counts: Counter[str] = Counter()
    count(monkeypatch, SliceFolds, "_step", counts)
    assert play(learning.begin_robust, faults) > 50
    assert counts["_Again"] > 1  # owners have moved in the middle
    assert counts["ValueError"] > 1  # a replaced rank has come in the middle


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("begin", [learning.begin_compressed, learning.begin_error_reset])
def test_nothing_is_lost_in_compressed_reductions(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[[Programs], None], faults: bool
) -> None:
    counts: Counter[str] = Counter()
    count(monkeypatch, MemberOperations, "call", counts)
    count(monkeypatch, MemberOperations, "join", counts)
    assert play(begin, faults) > 50
    assert counts["_Again"] > 1
    assert counts["join"] > SIZE_MAX * GROUPS  # not only at the beginning
