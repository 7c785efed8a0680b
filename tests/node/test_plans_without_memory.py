"""Plans whose results find no room: what an earlier plan has left gives way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp._common import ids
from hoplite_mp._node.execution.plan_runner import MEMORY_POLL_S
from hoplite_mp._protocol import messages as m
from tests.support.node_plans import PlanNode

if TYPE_CHECKING:
    from collections.abc import Iterator

ITEMS = 1 << 20
SLOT = 8 * ITEMS
MORE = 64 << 10  # more than the head of a result, and what a block is rounded up by
SOURCES = (0, 2, 3)  # the node of each source


class Reduction(PlanNode):
    """Node 1 is to have the sum of arrays of two of the nodes 0, 2 and 3. Its store has room for
    what the first plan needs, and for a little more."""

    def __init__(self) -> None:
        super().__init__()
        self.store.limit = self.store.used_bytes() + 3 * SLOT + 3 * MORE

    def execute(self, epoch: int, *nodes: int) -> None:
        members = tuple(SOURCES.index(node) for node in nodes)
        plan = m.ExecuteReduce(
            9, epoch, members, members, (m.Stripe(1, 0, m.SHARES),), "fold", "reduce", "sum", 0,
            tuple(ids.pack_id(1000 + node, 7) for node in nodes), nodes, (1,),
            results=(ids.pack_id(1000, 9),), nbytes=SLOT,
            layout=f"shape ({ITEMS},) and dtype <f8".encode(),
        )  # fmt: skip
        self.from_manager(plan)

    @property
    def slots(self) -> dict[int, int]:
        """Node whose contribution is pulled -> its cell."""
        (execution,) = self.plan_runner.executions.values()
        return {name.node: slot.cell for name, slot in execution.slots.items()}


@pytest.fixture
def reduction() -> Iterator[Reduction]:
    made = Reduction()
    yield made
    made.close()


def test_unusable_blocks_of_an_earlier_plan_are_freed(reduction: Reduction) -> None:
    reduction.execute(1, 0, 2)
    before = reduction.slots
    assert before.keys() == {0, 2}
    reduction.execute(2, 0, 3)
    assert not reduction.slots  # it waits for room
    reduction.release_closed()
    reduction.lease(SLOT)  # somebody else takes the memory of the first result
    reduction.loop.pass_time(2 * MEMORY_POLL_S)
    assert reduction.slots.keys() == {0, 3}
    assert reduction.slots[0] == before[0]  # what it can use has stayed
    reduction.loop.pass_time(2 * reduction.config.put_wait_s)
    assert not reduction.reports
