"""Real nodes, managers and programs in virtual time, under random faults, each run from a seed.

`make seeds` plays thousands more, and `make mutants` shows that mistakes are seen. A seed that has
failed once is kept by name; which run a seed draws changes when the drawing does, so what was found
has a test of its own where it was mended, too.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from hoplite_mp.node.collectives import forests
from hoplite_mp.node.objects.exports import Exports
from hoplite_mp.planner.operation import Operation
from hoplite_mp.planner.program import program_of
from hoplite_mp.simulation.cluster.runs import run_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.planner.program import Program
    from hoplite_mp.protocol.messages import Commit
    from hoplite_mp.simulation.cluster.runs import Outcome

ROOT = Path(__file__).resolve().parents[2]
SEEDS, SEEDS_AT_A_TIME = 60, 10
REPLAYED = (7, 25)
CODE = f"""
from hoplite_mp.simulation.cluster.runs import run_seed
print(*(run_seed(seed).digest for seed in {REPLAYED}))
"""

FOUND = {
    140: "a copy that the new owner of an object kept for the old one",
    240: "a kept copy in whose place is an error",
    742: "a copy that was to come when its collective ended",
    791: "a Group that became whole as the manager died",
}


def play(seeds: range) -> list[Outcome]:
    outcomes = [run_seed(seed) for seed in seeds]
    failed = [one for one in outcomes if one.failure]
    told = "\n".join(f"seed {one.seed}, {one.nodes} nodes: {one.failure}" for one in failed)
    assert not failed, f"{told}\nhoplite-mp simulate --faults random --seed {failed[0].seed}"
    return outcomes


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_AT_A_TIME))
def test_random_faults(first: int) -> None:
    outcomes = play(range(first, first + SEEDS_AT_A_TIME))
    assert sum(one.reads for one in outcomes) > 10


@pytest.mark.parametrize("seed", FOUND, ids=lambda seed: f"{seed}: {FOUND[seed]}")
def test_what_has_failed_once(seed: int) -> None:
    play(range(seed, seed + 1))


def elsewhere(hash_seed: str) -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True
    )
    return ended.stdout.split()


def test_one_seed_is_one_run() -> None:
    """In this process, and in others that hash in another order."""
    here = [run_seed(seed).digest for seed in REPLAYED]
    assert len(set(here)) == len(REPLAYED)
    assert elsewhere("1") == elsewhere("2") == here


def fails(why: str, seeds: range, **more: Any) -> bool:
    return any(why in run_seed(seed, **more).failure for seed in seeds)


def test_a_release_that_is_forgotten_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exports, "release", lambda self, peer, message: True)
    assert fails("still has", range(20), faults=False)


def change_folds(
    monkeypatch: pytest.MonkeyPatch, which: Callable[[tuple[Any, ...]], tuple[Any, ...]]
) -> None:
    """What each node folds is another choice of what the plan says."""

    def changed(plan: Any, node: int) -> Program:
        program = program_of(plan, node)
        folds = (dataclasses.replace(fold, sources=which(fold.sources)) for fold in program.folds)
        return dataclasses.replace(program, folds=tuple(folds))

    monkeypatch.setattr(forests, "program_of", changed)


def test_a_contributor_that_is_in_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    change_folds(monkeypatch, lambda all_: (*all_, all_[0]))
    assert fails("WrongBytes", range(40), faults=False)


def test_a_contributor_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    change_folds(monkeypatch, lambda all_: all_[1:] if len(all_) > 1 else all_)
    assert fails("WrongBytes", range(40), faults=False)


def test_contributors_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is wrong only where an order was asked for: sums of floats differ."""
    change_folds(monkeypatch, lambda all_: all_[::-1])
    assert fails("other bits", range(20, 170), faults=False)


def test_a_commit_that_names_others_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Operation.commit

    def fewer(op: Operation) -> Commit:
        right = commit(op)
        return msgspec.structs.replace(right, contributors=right.contributors[:1])

    monkeypatch.setattr(Operation, "commit", fewer)
    assert fails("Wrong", range(20), faults=False)
