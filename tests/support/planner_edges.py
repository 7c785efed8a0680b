"""The edges of a plan, computed from its stripes, and the invariants that they keep.

The reference says slowly what `hoplite_mp._planner.program` derives for each node: from whom every
node of a plan has every piece. It is used to check plans (no circle of waiting, each contributor
once) and programs (what one node pulls is what the other serves).
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from hoplite_mp._planner.program import (
    CONTRIBUTION,
    MEMBER,
    RESULT,
    Cell,
    Program,
    participants,
    program_of,
    waits_for,
)
from hoplite_mp._protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Mapping

COPYING = ("gather", "allgather", "alltoall")


def programs_of(plan: m.Distribute | m.ExecuteReduce) -> dict[int, Program]:
    return {node: program_of(plan, node) for node in participants(plan)}


def check_edges(
    plan: m.Distribute | m.ExecuteReduce, growing: frozenset[int] = frozenset()
) -> None:
    """All that must hold of a plan. `growing`: nodes that receive by an earlier plan."""
    programs = programs_of(plan)
    check_served(plan, programs)
    check_no_circle(programs)
    if isinstance(plan, m.Distribute):
        check_copies_of_one(plan, programs, growing)
    elif plan.kind in COPYING:
        check_copies_of_many(plan, programs)
    else:
        check_folds(plan, programs)


def check_served(plan: m.Distribute | m.ExecuteReduce, programs: Mapping[int, Program]) -> None:
    """Every pull of every node is served at its parent, in the same range; nothing else is."""
    asked: set[Cell] = set()
    for node, program in programs.items():
        assert not program.is_empty or program.reports, (plan, node)
        assert program.reports == (node in waits_for(plan))
        for pull in program.pulls:
            assert pull.parent != node
            offers = {serve.cell: serve for serve in programs[pull.parent].serves}
            assert pull.cell in offers, (plan, node, pull)
            offer = offers[pull.cell]
            assert (offer.begin_share, offer.end_share) == (pull.begin_share, pull.end_share)
            asked.add(pull.cell)
        cells = [pull.cell for pull in program.pulls]
        assert len(set(cells)) == len(cells)
    offered = {serve.cell for program in programs.values() for serve in program.serves}
    assert offered == asked, plan
    assert program_of(plan, 99).is_empty


def made_of(programs: Mapping[int, Program]) -> dict[tuple[int, Cell], list[tuple[int, Cell]]]:
    """(node, cell) -> the (node, cell)s that it needs: over folds and over links."""
    needs: dict[tuple[int, Cell], list[tuple[int, Cell]]] = {}
    for node, program in programs.items():
        for pull in program.pulls:
            needs[node, pull.cell] = [(pull.parent, pull.cell)]
        for fold in program.folds:
            assert fold.cell.node == node
            assert (node, fold.cell) not in needs
            needs[node, fold.cell] = [(node, source) for source in fold.sources]
    return needs


def check_no_circle(programs: Mapping[int, Program]) -> None:
    needs = made_of(programs)
    done: set[tuple[int, Cell]] = set()

    def visit(cell: tuple[int, Cell], trail: list[tuple[int, Cell]]) -> None:
        assert cell not in trail, trail
        if cell in done:
            return
        for other in needs.get(cell, ()):
            visit(other, [*trail, cell])
        done.add(cell)

    for cell in needs:
        visit(cell, [])


def check_copies_of_one(
    plan: m.Distribute, programs: Mapping[int, Program], growing: frozenset[int]
) -> None:
    """Every receiver gets every share once, in the end from who holds it or is getting it."""
    needs = made_of(programs)
    able = {*plan.sources, *growing}
    for node in plan.receivers:
        program = programs[node]
        ranges = sorted((pull.begin_share, pull.end_share) for pull in program.pulls)
        assert ranges[0][0] == 0
        assert ranges[-1][1] == m.SHARES
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
        for pull in program.pulls:
            cell = (pull.parent, pull.cell)
            while cell in needs:
                (cell,) = needs[cell]
            assert cell[0] in able, (plan, node, cell)


def check_copies_of_many(plan: m.ExecuteReduce, programs: Mapping[int, Program]) -> None:
    for place, destination in enumerate(plan.destinations):
        if destination not in programs:
            continue
        program = programs[destination]
        wanted = {
            index
            for index, member in enumerate(plan.members)
            if plan.kind != "alltoall"
            or plan.destinations[member % len(plan.destinations)] == destination
        }
        assert {cell.stripe for cell in program.result} == wanted, (plan, place)
        given = {cell for cell, _ in program.given}
        pulled = {pull.cell for pull in program.pulls}
        assert set(program.result) <= given | pulled
        assert pulled <= set(program.result)


def contributors(
    plan: m.ExecuteReduce, programs: Mapping[int, Program], node: int, cell: Cell
) -> list[int]:
    """The source indices that are folded into a cell, in folding order."""
    program = programs[node]
    for fold in program.folds:
        if fold.cell == cell:
            return [
                index for one in fold.sources for index in contributors(plan, programs, node, one)
            ]
    if cell.part >= MEMBER and cell.node == node:
        return [dict(program.given)[cell]]
    assert cell.node != node
    assert cell in [pull.cell for pull in program.pulls]
    assert cell.part in (RESULT, CONTRIBUTION) or plan.rule == "fold"
    return contributors(plan, programs, cell.node, cell)


def check_folds(plan: m.ExecuteReduce, programs: Mapping[int, Program]) -> None:
    """Each destination has every stripe, with each member exactly once, and in order if asked."""
    for destination in plan.destinations:
        program = programs[destination]
        stripes = [cell.stripe for cell in program.result]
        if plan.kind == "reduce_scatter":
            mine = [i for i, node in enumerate(plan.destinations) if node == destination]
            assert stripes == mine
        else:
            assert stripes == list(range(len(plan.stripes)))
        for cell in program.result:
            order = contributors(plan, programs, destination, cell)
            assert Counter(order) == Counter(plan.members), (plan, cell)
            if plan.rule == "fold":
                assert order == list(plan.order)
