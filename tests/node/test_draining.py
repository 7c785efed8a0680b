"""A node that leaves: when it says that nothing of it is needed any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp._common.object_states import DRIVER_SLOT, FIRST_SLOT
from hoplite_mp._node.tasks.draining import POLL_S
from hoplite_mp._protocol.messages import NodeLeaving
from hoplite_mp._protocol.peers import Evacuated, PeerLeaving, RemoveNode
from tests.support.node_harness import member

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_harness import NodeHarness

OTHER = member(1).host_id


@pytest.fixture
def node(make_node: Callable[..., NodeHarness]) -> NodeHarness:
    return make_node([member(1, 0)], number=3, workers=1, played=True)


def begin(node: NodeHarness) -> None:
    """The node leaves, and the other one needs nothing of it."""
    node.receive(OTHER, RemoveNode())
    assert (OTHER, PeerLeaving()) in node.taken()
    node.receive(OTHER, Evacuated())


def has_left(node: NodeHarness) -> bool:
    node.poll()
    node.loop.pass_time(2 * POLL_S)
    return node.reports == [NodeLeaving(3, 0)]


def test_node_removed_before_admission_leaves_after_it(
    make_node: Callable[..., NodeHarness],
) -> None:
    """The manager died after it had told the others of this node, one of which removes it."""
    node = make_node(number=3, workers=1, joined=False)
    node.receive(OTHER, RemoveNode())
    node.loop.pass_time(3 * POLL_S)
    assert node.reports == []
    node.admit()
    assert has_left(node)


def test_node_leaves_after_other_nodes_have_copied_their_objects(node: NodeHarness) -> None:
    node.receive(OTHER, RemoveNode())
    assert not has_left(node)
    node.receive(OTHER, Evacuated())
    assert has_left(node)


@pytest.mark.parametrize("runs_here", [True, False])
def test_leaving_node_does_not_wait_for_a_returned_task(node: NodeHarness, runs_here: bool) -> None:
    """Its header stays for those who hold its result here, and it may run for hours elsewhere."""
    oid = node.run_task(OTHER)
    reader, worker = node.process(), node.process(FIRST_SLOT)
    hold = reader.client.hold(oid)
    if runs_here:
        assert worker.next() == oid
    begin(node)
    node.describe("a result")
    assert has_left(node) is not runs_here
    del hold


@pytest.mark.parametrize("state", ["WAITING", "QUEUED", "CLAIMED"])
def test_leaving_node_waits_for_tasks_of_its_processes(node: NodeHarness, state: str) -> None:
    driver, worker = node.process(DRIVER_SLOT), node.process(FIRST_SLOT)
    hold = driver.submit(ready=state != "WAITING")
    if state == "CLAIMED":
        assert worker.next() == hold.oid
    begin(node)
    assert not has_left(node)
    if state == "CLAIMED":
        worker.finish(hold.oid, "done")
    else:
        driver.tasks.cancel(hold.oid)
    assert has_left(node)


def test_finished_tasks_and_other_objects_do_not_delay_a_leave(node: NodeHarness) -> None:
    driver, worker = node.process(DRIVER_SLOT), node.process(FIRST_SLOT)
    holds = [driver.submit(), driver.draft(), worker.draft()]
    worker.finish(worker.next(), "done")
    begin(node)
    assert has_left(node)
    del holds


@pytest.mark.parametrize(("slot", "waits"), [(DRIVER_SLOT, False), (FIRST_SLOT, True)])
def test_leaving_node_waits_for_late_tasks_of_workers_but_not_drivers(
    node: NodeHarness, slot: int, waits: bool
) -> None:
    """Unlike what a worker sends, which some task may wait for."""
    worker = node.process(FIRST_SLOT)
    oid = node.run_task(OTHER)
    assert worker.next() == oid
    begin(node)
    node.loop.pass_time(1.0)
    late = node.process(slot).submit()
    worker.finish(oid, "done")
    assert has_left(node) is not waits
    del late
