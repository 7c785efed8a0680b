"""Cells of plans: which pulls begin, when they are tried again, what a plan takes over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import NODE_SLOT
from hoplite_mp._node.execution.plan_cells import NOBODY, PULL_TRIES_MAX
from hoplite_mp._node.execution.plan_state import CarriedCopy
from hoplite_mp._node.peers.links import UNREACHABLE
from hoplite_mp._node.store.growing_block import GrowingBlock, Ranges
from hoplite_mp._planner.program import INBOUND_PARENTS_MAX
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.peers import DropReplica
from tests.support.node_plans import (
    NBYTES,
    OBJECT,
    OWNER,
    PlanNode,
    RecordedOwner,
    copy_plan,
    gather_plan,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP = 1 << 62  # its operations are of no other node that could give the bytes as well


@pytest.fixture
def one() -> Iterator[PlanNode]:
    made = PlanNode()
    yield made
    made.close()


@pytest.mark.parametrize("operation", [GROUP, 1 << 63])
def test_only_missing_ranges_are_pulled(one: PlanNode, operation: int) -> None:
    """Of a copy that is planned anew with holes in it; whoever reads it from here reads one cell,
    which grows with those that fill the holes."""
    begun = CarriedCopy(one.lease(NBYTES), NBYTES, Ranges([(0, 10), (20, 30)]))
    owner = RecordedOwner(one, begun)
    execution = owner.submit(copy_plan(operation, "tree:1"))
    key = (operation, 5, 0, 0)
    assert one.made == [(key, 0, NBYTES, 10), (None, 0, 20, 10), (None, 0, NBYTES, 30)]
    assert one.pulled == [(2, 0, key), (3, 0, key)]
    one.engine.come[3] = 50
    one.loop.call_all()
    assert one.engine.come[1] == 10  # the first hole is still there
    one.engine.come[2] = 20
    one.loop.call_all()
    assert one.engine.come[1] == 50
    one.plan_runner.drop(execution.number)
    assert owner.left == [[(0, 50)]]
    assert one.closed == [1, 2, 3]
    one.engine.come[3] = 60
    one.loop.call_all()
    assert one.engine.come[1] == 50


@pytest.mark.parametrize("operation", [GROUP, 1 << 63])
def test_failed_pull_is_retried(one: PlanNode, operation: int) -> None:
    """As often for a Group as for a copy, but only a copy has other nodes that might be reached."""
    owner = RecordedOwner(one)
    execution = owner.submit(copy_plan(operation))
    asked = (1, 0, (operation, 5, 0, 0))
    for tries in range(PULL_TRIES_MAX):
        one.fail(1, "reset")
        one.loop.call_all()
        assert one.pulled == [asked] * (tries + 2)
    assert owner.failures == []
    one.fail(1, "reset")
    assert owner.failures == [(0, "reset")]
    execution.tries.clear()
    one.fail(1, UNREACHABLE)
    assert owner.failures[1:] == ([] if operation == GROUP else [(0, UNREACHABLE)])


def test_pull_of_a_dropped_plan_is_not_retried(one: PlanNode) -> None:
    execution = RecordedOwner(one).submit(copy_plan(GROUP))
    one.fail(1, "reset")
    one.plan_runner.drop(execution.number)
    one.loop.call_all()
    assert len(one.pulled) == 1


def test_failed_fold_is_not_retried(one: PlanNode) -> None:
    owner = RecordedOwner(one)
    execution = owner.submit(copy_plan(GROUP))
    cell = one.cells.make(execution, None, memoryview(bytearray(8)), 0, 8, False)
    one.cells.failed(cell, "a source was closed")
    assert owner.failures == [(NOBODY, "a source was closed")]


def test_queued_pulls_start_when_others_are_dropped(one: PlanNode) -> None:
    """All those under way may be deleted at once: the others waited for ever."""
    objects = [ids.pack_id(OWNER.host_id, 8 + index) for index in range(INBOUND_PARENTS_MAX + 2)]
    one.from_manager(gather_plan(*objects))
    assert [cell for cell, *_ in one.pulled] == [1, 2, 3, 4]
    for object_id in objects[:4]:
        one.receive(OWNER.host_id, DropReplica(object_id))
    one.poll()
    one.loop.call_all()
    assert one.closed == [1, 2, 3, 4]
    assert [cell for cell, *_ in one.pulled] == [1, 2, 3, 4, 5, 6]


def test_cell_of_a_growing_block_has_its_written_bytes(
    one: PlanNode,
) -> None:
    """They lie behind the head of the member's payload, and behind the stripes before."""
    execution = RecordedOwner(one).submit(copy_plan(GROUP))
    source = GrowingBlock(one.lease(228), 228, NODE_SLOT, Ranges([(0, 140)]))
    execution.streaming[0] = source
    elements = memoryview(bytearray(200))
    for begin, there in ((0, 100), (100, 12), (150, 0)):
        cell = one.cells.own(execution, None, 0, elements, begin, 50, at=28)
        assert one.made[-1] == (None, begin, 50, min(there, 50))
        assert source.cells[cell] == (28 + begin, 50)


@pytest.mark.parametrize("known", [False, True])
def test_pull_is_logged_with_its_object_and_first_byte(one: PlanNode, known: bool) -> None:
    """What was here before is not counted again."""
    begun = CarriedCopy(one.lease(NBYTES), NBYTES, Ranges([(0, 40)])) if known else None
    RecordedOwner(one, begun).submit(copy_plan(1 << 63))
    offset = 40 if known else 0
    expected = {"object": OBJECT, "bytes": NBYTES - offset, "offset": offset}
    assert one.cells.describe(1) == expected
    assert one.cells.describe(2) == {}


def test_known_rates_are_reported_to_the_manager(one: PlanNode) -> None:
    one.cells._measured(100, 0)
    one.cells._measured(0, 50)
    assert one.reports == [m.HostMeasured(1, 100.0, None), m.HostMeasured(1, None, 50.0)]
