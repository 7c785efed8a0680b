"""One operation on many simulated nodes: a plan that brings wrong bytes is refused.

Each test makes one mistake in what nodes derive from a plan.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._planner.packing import EPSILON, KEEP_RATE, PackingWanted, pack
from hoplite_mp._planner.program import Cell, program_of
from hoplite_mp._planner.tree_shapes import cut
from hoplite_mp._protocol.messages import Distribute
from hoplite_mp._simulation.scale import node
from hoplite_mp._simulation.scale.scale import OPERATIONS, ScaleWorld, Size, measure
from hoplite_mp._simulation.scale.streams import WrongCompletion, WrongPlace

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._planner.program import Program
    from hoplite_mp._protocol.messages import ExecuteReduce

FOLDS = ("reduce", "allreduce", "reduce_scatter")


def played(operation: str, nodes: int = 8, nbytes: int = 1 << 20) -> float:
    return measure(operation, Size(nodes, nbytes, 1.25e8, 1e-4, 0)).seconds


IN_SHORT = ((33, 64), (2, 100_000), (3, 1 << 20))
SIZES = [
    pytest.param(nodes, nbytes, marks=() if (nodes, nbytes) in IN_SHORT else pytest.mark.soak)
    for nodes in (2, 3, 33)
    for nbytes in (64, 100_000, 1 << 20)
]


@pytest.mark.parametrize(("nodes", "nbytes"), SIZES)
def test_planned_operation_delivers_all_data(nodes: int, nbytes: int) -> None:
    for operation in OPERATIONS:
        assert 0 < played(operation, nodes, nbytes) < 1


def test_missing_source_on_many_nodes_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch, _forget_a_source)
    with pytest.raises(WrongPlace, match="contributors"):
        played("reduce_scatter", 130, 16 << 10)


def test_packed_trees_avoid_narrow_paths_that_stripes_use() -> None:
    """Half of the paths have an eighth of the rate of the hosts' links."""
    hosts, rate = 6, 1.25e8
    narrow = [(a, b) for a in range(hosts) for b in range(hosts) if a != b and (a + b) % 2]
    wanted = PackingWanted(
        tuple(range(hosts)), (rate,) * hosts, (rate,) * hosts, tuple((*p, rate / 8) for p in narrow)
    )
    packed = pack(wanted)
    receivers, weights = tuple(range(1, hosts)), [weight for weight, _ in packed.trees]
    stripes = Distribute(
        1 << 63, b"x" * 16, 1, 8 << 20, (0,), receivers, cut([(n, 1) for n in receivers]), "stripes"
    )
    trees = Distribute(
        1 << 63, b"x" * 16, 1, 8 << 20, (0,), receivers, cut([(0, one) for one in weights]),
        "parents", tuple(parents for _, parents in packed.trees),
    )  # fmt: skip
    seconds = []
    for plan in (stripes, trees):
        world = ScaleWorld(hosts, rate)
        for pair in narrow:
            world.network.narrow_path(*pair, rate / 8)
        seconds.append(world.play(plan))
    assert seconds[0] > 1.5 * seconds[1]
    assert seconds[1] > trees.nbytes / (packed.rate / KEEP_RATE * (1 + EPSILON))


def mistake(monkeypatch: pytest.MonkeyPatch, change: Callable[[Program], Program]) -> None:
    def wrong(plan: Distribute | ExecuteReduce, node: int) -> Program:
        return change(program_of(plan, node))

    monkeypatch.setattr(node, "program_of", wrong)


def _forget_a_source(program: Program) -> Program:
    folds = (
        dataclasses.replace(fold, sources=fold.sources[:-1]) if len(fold.sources) > 2 else fold
        for fold in program.folds
    )
    return dataclasses.replace(program, folds=tuple(folds))


def _take_a_source_twice(program: Program) -> Program:
    folds = (
        dataclasses.replace(fold, sources=(*fold.sources, fold.sources[-1]))
        if len(fold.sources) > 1
        else fold
        for fold in program.folds
    )
    return dataclasses.replace(program, folds=tuple(folds))


@pytest.mark.parametrize("operation", FOLDS)
@pytest.mark.parametrize("change", [_forget_a_source, _take_a_source_twice])
def test_result_with_a_contributor_twice_is_detected(
    operation: str, change: Callable[[Program], Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch, change)
    with pytest.raises(WrongPlace, match="contributors"):
        played(operation)


# A get is one stripe here.
@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one != "get"])
def test_stripe_pulled_with_a_wrong_key_is_detected(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = node.ScalePart.key

    def next_one(part: node.ScalePart, name: Cell) -> tuple[int, int, int, int]:
        operation, epoch, stripe, kind = real(part, name)
        return operation, epoch, (stripe + (part.program.node == 2)) % len(part.bounds), kind

    monkeypatch.setattr(node.ScalePart, "key", next_one)
    with pytest.raises((WrongPlace, WrongCompletion)):
        played(operation, 4)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_missing_bytes_are_detected(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(program: Program) -> Program:
        return dataclasses.replace(program, serves=program.serves[1:])

    mistake(monkeypatch, forget)
    with pytest.raises((WrongPlace, WrongCompletion)):
        played(operation)
