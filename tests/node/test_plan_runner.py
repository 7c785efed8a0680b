"""Parts of plans on one node: when it reports that it has what it is to have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import STATE
from hoplite_mp._node.execution.plan_runner import MEMORY_POLL_S
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.peers import ReplicaStored
from hoplite_mp.errors import ObjectLostError
from tests.support.node_plans import OWNER, PlanNode, gather_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._node.execution.plan_state import PlanState

FIRST, SECOND = (ids.pack_id(OWNER.host_id, number) for number in (7, 8))
NBYTES = 8


class Gather(PlanNode):
    """Node 1 is to have two objects of node 0; a fetch is bringing the first one already."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.replicas.expect(FIRST, NBYTES, (0,))
        assert self.remote_objects.want(self.first, lambda: None)
        self.loop.call_all()
        self.reports.clear()
        self.taken()

    def gather(self, *objects: bytes, **about: Any) -> None:
        self.from_manager(gather_plan(*objects, **about))

    @property
    def execution(self) -> PlanState:
        (execution,) = self.plan_runner.executions.values()
        return execution


@pytest.fixture
def node() -> Iterator[Gather]:
    made = Gather()
    yield made
    made.close()


def test_plan_waits_for_an_object_of_another_transfer(node: Gather) -> None:
    node.gather(FIRST)
    assert node.reports == []
    node.remote_objects.arrived(node.first)
    assert node.reports == [m.StripesComplete(9, 1, 1)]


def test_copy_lost_by_another_transfer_fails_the_plan(node: Gather) -> None:
    node.gather(FIRST)
    node.remote_objects.fail(node.first, ObjectLostError("it is lost"))
    assert node.node.state(node.first) == STATE["FAILED"]
    (failed,) = [one for one in node.reports if isinstance(one, m.ExecutionFailed)]
    assert (failed.operation, failed.error) == (9, "lost")
    assert not node.plan_runner.executions


def test_plan_waiting_for_space_is_not_complete(node: Gather) -> None:
    node.set_space(False)
    node.gather(FIRST, SECOND)
    node.remote_objects.arrived(node.first)
    assert node.reports == []
    node.set_space(True)
    node.loop.pass_time(2 * MEMORY_POLL_S)
    assert node.reports == []
    (cell,) = node.execution.missing
    node.fill(cell, NBYTES)
    assert node.reports == [m.StripesComplete(9, 1, 1)]


@pytest.mark.parametrize("requester", [0, 1, 2])
def test_results_of_remote_operations_become_replicas(node: Gather, requester: int) -> None:
    node.gather(FIRST, requester=requester, results=(SECOND,))
    payload = node.lease(NBYTES)
    node.execution.blocks = {0: (payload, NBYTES)}
    mine = node.plan_runner.commit(m.Commit(9, 1, (0,)))
    assert mine == ({0: (payload, NBYTES)} if requester == 1 else {})
    told = [] if requester == 1 else [(OWNER.host_id, ReplicaStored(SECOND, NBYTES))]
    assert [one for one in node.sent if isinstance(one[1], ReplicaStored)] == told
    assert (SECOND in node.replicas.holds) is (requester != 1)
    assert not node.plan_runner.executions


def test_commit_of_another_plan_ends_this_one(node: Gather) -> None:
    """The others have gone on without this node, which was given up and did not hear of that."""
    node.gather(FIRST)
    payload = node.lease(NBYTES)
    node.execution.blocks = {0: (payload, NBYTES)}
    assert node.plan_runner.commit(m.Commit(9, 2, (0,))) == {}
    assert not node.plan_runner.executions
    node.store.take_returns()
    assert payload not in node.store.leases


def test_plan_does_not_pull_from_a_lost_node(node: Gather) -> None:
    del node.cluster.peers.by_number[0]
    node.gather(SECOND)
    assert node.pulled == []
    assert SECOND not in node.replicas.holds
    assert not node.execution.copies
    node.plan_runner._maybe_finish(node.execution)
    assert node.reports == []


def test_slow_link_is_reported_during_an_allreduce(node: Gather) -> None:
    node.gather(FIRST)
    execution = node.execution
    node.plan_runner.link_estimator.moved = lambda: (700, 90)
    execution.moved = 200, 100
    node.plan_runner.slowed(30, 40)
    assert node.reports == []  # nothing can be changed for a gather
    execution.plan = msgspec.structs.replace(
        execution.plan,
        kind="allreduce",
        stripes=(m.Stripe(0, 0, m.SHARES),),  # type: ignore[type-var]
    )
    node.plan_runner.slowed(30, 40)
    # A link that has ended is not counted any more, so a count may be less than before.
    assert node.reports == [m.OperationSlow(9, 1, 1, 30, 40, 500, 0)]
    for changed, value in (("reported", True), ("done", lambda *_: None), ("moved", None)):
        before = getattr(execution, changed)
        setattr(execution, changed, value)
        node.plan_runner.slowed(30, 40)
        # Its part is over, or the call is a Group's, or no bytes have moved.
        assert len(node.reports) == 1, changed
        setattr(execution, changed, before)
