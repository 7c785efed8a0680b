"""The judge can say no: planner, programs and nodes are broken on purpose, and runs must fail.

Each mutation is one that somebody could make by mistake. What is asserted is also why a run fails:
a judge that fails everything would be as useless as one that passes everything.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp.planner.operation import Operation
from hoplite_mp.planner.program import program_of
from hoplite_mp.planner.reduce import Reductions
from hoplite_mp.protocol.messages import Commit, Withdraw
from hoplite_mp.simulation import copies, parts
from hoplite_mp.simulation.keeping import Ranges
from hoplite_mp.simulation.manager import Manager
from hoplite_mp.simulation.runs import run_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from hoplite_mp.planner.program import Program

SEEDS = range(150)


def fails(why: str, seeds: range = SEEDS, *, faults: bool = True, **more: Any) -> bool:
    """Does a run fail for that reason? One mistake can show in several ways."""
    for seed in seeds:
        failure = run_seed(seed, faults=faults, **more).failure
        if why in failure:
            return True
        assert failure == "" or failure.startswith("Wrong"), failure
    return False


def change_programs(monkeypatch: pytest.MonkeyPatch, change: Callable[[Program], Program]) -> None:
    monkeypatch.setattr(parts, "program_of", lambda plan, node: change(program_of(plan, node)))


def change_folds(program: Program, which: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Program:
    folds = tuple(dataclasses.replace(fold, sources=which(fold.sources)) for fold in program.folds)
    return dataclasses.replace(program, folds=folds)


def test_a_contributor_that_is_in_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    change_programs(
        monkeypatch, lambda program: change_folds(program, lambda all_: (*all_, all_[0]))
    )
    assert fails("WrongBytes: contributors", faults=False)


def test_a_contributor_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    change_programs(
        monkeypatch,
        lambda program: change_folds(program, lambda all_: all_[1:] if len(all_) > 1 else all_),
    )
    assert fails("WrongBytes: contributors", faults=False)


def test_contributors_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is wrong only where an order was asked for: sums of floats differ."""
    change_programs(monkeypatch, lambda program: change_folds(program, lambda all_: all_[::-1]))
    assert fails("WrongBytes: contributors are folded as", faults=False)


def test_bytes_of_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node cuts objects a little differently."""
    bounds_of = parts._bounds_of

    def shifted(plan: Any) -> list[tuple[int, int]]:
        bounds = bounds_of(plan)
        if len(bounds) < 2 or plan.kind == "reduce_scatter":
            return bounds
        (begin, edge), (_, end), *others = bounds
        return [(begin, edge), (edge - 4, end - 4), *others]

    monkeypatch.setattr(parts, "_bounds_of", shifted)
    assert fails("WrongBytes", faults=False)


def test_a_commit_that_names_others(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Operation.commit

    def fewer(op: Operation) -> Commit:
        right = commit(op)
        return msgspec.structs.replace(right, contributors=right.contributors[:1])

    monkeypatch.setattr(Operation, "commit", fewer)
    assert fails("is about other members", faults=False)


def leave_out(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    send = Manager._send

    def some(self: Manager, node: Any, message: object, nbytes: int) -> None:
        if not isinstance(message, kind):
            send(self, node, message, nbytes)

    monkeypatch.setattr(Manager, "_send", some)


def test_a_withdraw_that_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, Withdraw)
    assert fails("still has {'plans of copies'", faults=False)


def test_a_commit_that_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, Commit)
    assert fails("waits for ever", faults=False)


def test_an_operation_that_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reductions, "_forget", lambda self, op: None)
    assert fails("the planner has not forgotten", range(15), faults=False)


def test_a_death_that_the_planner_does_not_hear_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reductions, "lose_holder", lambda self, node, now: [])
    assert fails("waits for ever", range(150))


def test_slots_that_are_kept_whoever_was_in_them() -> None:
    """The next epoch has other members, and a node keeps what it had from the same host."""

    class Careless(Ranges):
        def slot(self, slots: Any, name: Any) -> Any:
            if name is None:
                return None
            alike = (one for one in slots if (one.node, one.begin) == (name.node, name.begin))
            return slots.get(next(alike, None))

    def prepare(world: Any) -> None:
        world.keeping = Careless()

    assert fails("WrongBytes", range(120, 400), prepare=prepare)


def test_a_receiver_that_has_it_already_and_serves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report has crossed with a new plan, by which others get it from there. The first of these
    seeds shows it; the others are there for the day when a change gives seeds another meaning."""
    monkeypatch.setattr(copies.Copies, "_is_here", copies.Copies._say_complete)
    assert fails("Wrong", range(1089, 3000))
