"""Numbers of pools are not given to another pool while anything may still name the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp._common.object_states import DRIVER_SLOT
from hoplite_mp._node.tasks.worker_pools import POOLS_MAX, next_number
from hoplite_mp._protocol.local import ClosePool, OpenPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_harness import NodeHarness


def test_pool_numbers_are_assigned_in_turn() -> None:
    last, found = 0, []
    for _ in range(POOLS_MAX):
        number = next_number(last, {3})
        assert number is not None
        found.append(last := number)
    assert found[:3] == [1, 2, 4]
    assert found.index(1, 1) == POOLS_MAX - 2, "the first one comes again after all others"
    assert next_number(last, set(range(1, POOLS_MAX))) is None


@pytest.mark.parametrize(("kind", "again"), [("common", True), ("actor", False), ("gone", False)])
def test_lost_task_is_retried_unless_its_pool_is_closed_or_an_actor(
    make_node: Callable[..., NodeHarness], kind: str, again: bool
) -> None:
    node = make_node(alone=True)
    pools = node.parts.workers.pools
    number = 0 if kind == "common" else node.answer(DRIVER_SLOT, OpenPool(1, 0, 0)).value
    task = node.process(DRIVER_SLOT).submit(number)
    if kind == "actor":
        pools[number].actor = True
    elif kind == "gone":
        node.ask(DRIVER_SLOT, ClosePool(number, kill=True), 0)
        node.worker_exited(node.processes.spawned[0].slot)
        assert number not in pools
    assert node.parts.workers.may_run_again(task.oid) == again
