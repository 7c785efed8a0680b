"""Cells of plans: which pulls begin, when they are tried again, what a plan takes over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hoplite_mp._common import ids
from hoplite_mp._node.execution.plan_cells import NOBODY, PULL_TRIES_MAX
from hoplite_mp._node.execution.plan_runner import PlanRunner
from hoplite_mp._node.execution.plan_state import CarriedCopy, Carryover, PlanState
from hoplite_mp._node.peers.links import UNREACHABLE
from hoplite_mp._node.store.growing_block import Ranges
from hoplite_mp._planner.program import INBOUND_PARENTS_MAX, program_of
from hoplite_mp._protocol import messages as m
from tests.support.node_plans import NBYTES, OBJECT, PlanNode, copy_plan

GROUP = 1 << 62  # its operations are of no other node that could give the bytes as well


@pytest.mark.parametrize("operation", [GROUP, 1 << 63])
def test_only_what_is_missing_is_pulled(operation: int) -> None:
    """Of a copy that is planned anew with holes in it; whoever reads it from here reads one cell,
    which grows with those that fill the holes."""
    one = PlanNode()
    come = Ranges([(0, 10), (20, 30)])
    plan = copy_plan(operation, "tree:1")
    execution = one.execution(plan)
    execution.carryover = Carryover(copies={OBJECT: CarriedCopy(3, NBYTES, come)})
    one.filling.fill(execution)
    one.cells.begin(execution)
    key = (operation, 5, 0, 0)
    assert one.engine.made == [
        (key, 0, NBYTES, 10),
        (None, 0, 20, 10),
        (None, 0, NBYTES, 30),
    ]
    assert one.pulled == [(2, 0, key), (3, 0, key)]
    one.engine.come[3] = 50
    one.loop.call_all()
    assert one.engine.come[1] == 10  # the first hole is still there
    one.engine.come[2] = 20
    one.loop.call_all()
    assert one.engine.come[1] == 50
    carryover = one.cells.end(execution)
    assert carryover.copies[OBJECT].arrived.found == [(0, 50)]
    assert one.closed == [1, 2, 3]
    one.loop.call_all()
    assert not one.loop.timers or one.engine.come[1] == 50


@pytest.mark.parametrize("operation", [GROUP, 1 << 63])
def test_a_pull_is_tried_again(operation: int) -> None:
    """As often for a Group as for a copy, but only a copy has other nodes that might be reached."""
    one = PlanNode()
    execution = one.execution(copy_plan(operation))
    one.filling.fill(execution)
    one.cells.begin(execution)
    asked = (1, 0, (operation, 5, 0, 0))
    for tries in range(PULL_TRIES_MAX):
        one.cells.failed(1, "reset")
        one.loop.call_all()
        assert one.pulled == [asked] * (tries + 2)
    assert one.failures == []
    one.cells.failed(1, "reset")
    assert one.failures == [(0, "reset")]
    execution.tries.clear()
    one.cells.failed(1, UNREACHABLE)
    assert one.failures[1:] == ([] if operation == GROUP else [(0, UNREACHABLE)])


def test_a_pull_is_not_tried_again_when_its_plan_is_over() -> None:
    one = PlanNode()
    execution = one.execution(copy_plan(GROUP))
    one.filling.fill(execution)
    one.cells.begin(execution)
    one.cells.failed(1, "reset")
    one.cells.end(execution)
    one.loop.call_all()
    assert len(one.pulled) == 1


def test_a_fold_that_ends_early_is_not_tried_again() -> None:
    one = PlanNode()
    execution = one.execution(copy_plan(GROUP))
    cell = one.cells.make(execution, None, memoryview(bytearray(8)), 0, 8, False)
    one.cells.failed(cell, "a source was closed")
    assert one.failures == [(NOBODY, "a source was closed")]


def test_pulls_that_wait_for_their_turn_begin_when_others_are_given_up() -> None:
    """All those under way may be deleted at once: the others waited for ever."""
    one = PlanNode()
    count = INBOUND_PARENTS_MAX + 2
    members = tuple(range(count))
    plan = m.ExecuteReduce(
        9,
        1,
        members,
        members,
        (),
        "any",
        "gather",
        "sum",
        1,
        tuple(ids.pack_id(1000, 8 + index) for index in members),
        (0,) * count,
        (1,),
        sizes=(8,) * count,
    )
    replicas: Any = None
    streaming_sources: Any = None
    plan_runner = PlanRunner(one.host, one.cells, replicas, streaming_sources)
    execution = PlanState(plan, program_of(plan, 1), plan_runner, 0)
    plan_runner.executions[9] = execution
    for pull in execution.program.pulls:
        cell = one.cells.make(execution, None, memoryview(bytearray(8)), 0, 8, False)
        execution.copies[cell] = 100 + cell
        execution.pulls[cell] = pull.parent, (9, 1, pull.cell.stripe, 0)
        execution.queue.append(cell)
        execution.missing.add(cell)
    one.cells.begin(execution)
    assert [cell for cell, *_ in one.pulled] == [1, 2, 3, 4]
    remote: Any = None
    for cell in (1, 2, 3, 4):
        plan_runner.forget(100 + cell, remote)
    one.loop.call_all()
    assert [cell for cell, *_ in one.pulled] == [1, 2, 3, 4, 5, 6]


def test_of_a_member_that_is_being_written_a_cell_has_what_is_written_of_its_own_bytes() -> None:
    """They lie behind the head of the member's payload, and behind the stripes before."""
    one = PlanNode()
    execution = one.execution(copy_plan(GROUP))
    source: Any = SimpleNamespace(written=Ranges([(0, 140)]), cells={})
    execution.streaming[0] = source
    elements = memoryview(bytearray(200))
    for begin, there in ((0, 100), (100, 12), (150, 0)):
        cell = one.cells.own(execution, None, 0, elements, begin, 50, at=28)
        assert one.engine.made[-1] == (None, begin, 50, min(there, 50))
        assert source.cells[cell] == (28 + begin, 50)
