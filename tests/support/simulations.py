"""Runs of the simulation without faults, in which time can be compared with a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._simulation import runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from hoplite_mp._simulation.workloads.workload import Workload


LINK_BYTES_PER_S = 125e6  # bytes per second of each link


def play_without_faults(
    monkeypatch: pytest.MonkeyPatch,
    hosts: int,
    begin: Callable[[Workload], None],
    rates: Sequence[float] = (),
    store: int | None = None,
) -> None:
    """One run without faults. rates: bytes per second of each host's link, if not LINK_BYTES_PER_S.
    store: bytes of each host's store, if they are few."""
    monkeypatch.setattr(
        runs, "_rates", lambda rng, count: iter(rates or [LINK_BYTES_PER_S] * count)
    )
    monkeypatch.setattr(runs, "STORES", runs.STORES[:1])
    monkeypatch.setattr(runs, "DISKS", runs.DISKS[:1])
    monkeypatch.setattr(runs, "NARROW_RUNS", 0.0)
    outcome = runs.run_seed(3, nodes=hosts, faults=False, begin=begin, store=store)
    assert not outcome.failure, outcome.failure
