"""A reduce_scatter over several nodes of which one would be busy for too long is refused."""

from __future__ import annotations

import pytest

from hoplite_mp._planner import program
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol import messages as m

SOURCES = 4


@pytest.fixture(autouse=True)
def parts_max(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "REDUCE_SCATTER_PARTS_MAX", 15)


def answer(
    holders: tuple[int, ...], to: tuple[int, ...], kind: str = "reduce_scatter"
) -> m.ManagerToNode:
    """What node 0 receives for its request of as many slices as sources."""
    planner = Planner()
    for node in range(3):
        planner.step(m.NodeJoined(70 + node, 1, 2), 0.0)
    ids = tuple(bytes([index]) * 16 for index in range(SOURCES))
    request = m.ReduceRequested(
        operation=7,
        node=0,
        caller=1,
        sources=ids,
        op="sum",
        num=SOURCES,
        results=ids if kind == "reduce_scatter" else (ids[0],),
        kind=kind,
        ready=tuple(range(SOURCES)),
        to=to,
        ready_nbytes=(8,) * SOURCES,
        ready_layouts=(b"x",) * SOURCES,
        ready_holders=tuple((node,) for node in holders),
    )
    sends = planner.step(request, 0.0).sends
    (message,) = [message for node, message in sends if node == 0]
    assert not planner.reductions.needs(0) or isinstance(message, m.ExecuteReduce)
    return message


@pytest.mark.parametrize("to", [(1,) * SOURCES, (0, 1, 0, 1)])
def test_too_many_parts_error_names_limit_and_remedy(to: tuple[int, ...]) -> None:
    message = answer((0,) * SOURCES, to)
    assert isinstance(message, m.OperationFailed)
    assert message.error == "value"
    for words in (
        "into 4 slices over several hosts",
        "node h0 holds 4 of the sources, which makes 16 parts",
        "at most 15 (REDUCE_SCATTER_PARTS_MAX)",
        "reduce() the refs and cut the result",
    ):
        assert words in message.message


def test_members_of_several_nodes_are_counted_for_each_node() -> None:
    assert isinstance(answer((0, 0, 0, 1), (1,) * SOURCES), m.ExecuteReduce)


def test_one_node_alone_makes_no_cells() -> None:
    assert isinstance(answer((0,) * SOURCES, (0,) * SOURCES), m.ExecuteReduce)


@pytest.mark.parametrize("kind", ["reduce", "allreduce"])
def test_other_folds_have_few_slices(kind: str) -> None:
    to = (1,) if kind == "reduce" else (0, 1, 2)
    assert isinstance(answer((0,) * SOURCES, to, kind), m.ExecuteReduce)
