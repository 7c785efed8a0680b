"""Whether a task that is given resources of this host finds a worker here."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import pytest

from hoplite_mp._common.object_states import DRIVER_SLOT
from hoplite_mp._node.tasks.resources import AHEAD_TASKS, HeldResources, _Turn
from tests.support.node_harness import member

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_harness import NodeHarness

OTHER = member(1)


@pytest.mark.parametrize("idle", [0, 1, 3])
def test_tasks_waiting_for_a_local_worker_are_counted(
    make_node: Callable[..., NodeHarness], idle: int
) -> None:
    """Beside what runs here, and what waits elsewhere. A few may wait, for the next worker that is
    free; more had better go to another host."""
    node = make_node([OTHER])
    resources, driver, tasks = node.parts.resources, node.process(DRIVER_SLOT), []
    resources.tasks = mock.Mock(wraps=node.node_tasks, **{"idle.return_value": idle})

    def hold(host_id: int, *, claimed: bool = False) -> None:
        tasks.append(driver.submit())
        oid = tasks[-1].oid
        assert not claimed or driver.tasks.claim(oid)
        resources.held[oid] = HeldResources((), host_id, oid)

    hold(node.host_id, claimed=True)
    hold(OTHER.host_id)
    hold(OTHER.host_id, claimed=True)
    for waits in range(idle + AHEAD_TASKS + 2):
        wanted = None if waits >= idle + AHEAD_TASKS else waits < idle
        assert _Turn(resources)._has_free_worker(node.host_id) is wanted
        hold(node.host_id)
