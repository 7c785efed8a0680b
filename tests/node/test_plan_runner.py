"""Parts of plans on one node: when it reports that it has what it is to have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import STATE
from hoplite_mp._node.execution.plan_runner import MEMORY_POLL_S, PlanRunner
from hoplite_mp._protocol import messages as m
from tests.support.node_plans import OBJECT, PlanNode, copy_plan

FIRST, SECOND = (ids.pack_id(1000, number) for number in (7, 8))
NBYTES = 8


class Gather:
    """Node 1 is to have two objects of node 0; the first one is being brought already."""

    def __init__(self, *, room: bool) -> None:
        self.node = one = PlanNode()
        self.loop = one.loop
        self.room = room
        self.state = STATE["SEALED"]
        self.sent: list[Any] = []
        self.oids = {FIRST: 70, SECOND: 80}
        self.remotes = {
            oid: SimpleNamespace(
                object=object_id, payload=0, filler=None, waiting=[], engine_buffer=None, nbytes=8
            )
            for object_id, oid in self.oids.items()
        }
        self.remotes[70].payload = 4096
        host = one.host
        host.config = SimpleNamespace(put_wait_s=10.0)
        host.send_manager = self.sent.append
        host.client.give_back = lambda payload: None
        host.client.state = lambda oid: self.state
        host.store = SimpleNamespace(lease=lambda nbytes, slot: 8192 if self.room else None)
        host.remote_objects = SimpleNamespace(by_oid=self.remotes)
        replicas: Any = SimpleNamespace(
            expect=lambda object_id, nbytes, holders: self.oids[object_id],
            keep=lambda object_id, nbytes: None,
            tell=lambda object_id, nbytes: None,
        )
        nobody: Any = None
        self.plan_runner = PlanRunner(host, one.cells, replicas, nobody)
        one.cells.remote_objects = host.remote_objects
        one.cells.links.trace_events = SimpleNamespace(on=False)  # type: ignore[assignment]

    def execute(self, *objects: bytes) -> None:
        members = tuple(range(len(objects)))
        plan = m.ExecuteReduce(
            9, 1, members, members, (), "any", "gather", "sum", 0,
            objects, (0,) * len(objects), (1,), sizes=(NBYTES,) * len(objects),
        )  # fmt: skip
        self.plan_runner.execute(plan)

    def brought(self) -> None:
        """Who was bringing the first one has ended."""
        (action,) = self.remotes[70].waiting
        action()


def test_what_another_transfer_brings_is_awaited() -> None:
    gather = Gather(room=True)
    gather.execute(FIRST)
    assert gather.sent == []
    gather.brought()
    assert gather.sent == [m.StripesComplete(9, 1, 1)]


def test_a_copy_that_another_transfer_has_lost_fails_the_part() -> None:
    gather = Gather(room=True)
    gather.execute(FIRST)
    gather.state = STATE["FAILED"]
    gather.brought()
    (failed,) = gather.sent
    assert (failed.operation, failed.error) == (9, "lost")
    assert not gather.plan_runner.executions


def test_a_part_that_waits_for_room_has_not_got_all() -> None:
    gather = Gather(room=False)
    gather.execute(FIRST, SECOND)
    gather.brought()
    assert gather.sent == []
    gather.room = True
    gather.loop.pass_time(2 * MEMORY_POLL_S)
    assert gather.sent == []
    (execution,) = gather.plan_runner.executions.values()
    (cell,) = execution.missing
    execution.copies.clear()
    execution.missing.discard(cell)
    gather.plan_runner._filled(execution, cell)
    assert gather.sent == [m.StripesComplete(9, 1, 1)]


@pytest.mark.parametrize("requester", [0, 1, 2])
def test_results_of_other_nodes_operations_become_copies(requester: int) -> None:
    gather = Gather(room=True)
    sealed: list[Any] = []
    gather.plan_runner.replicas.seal = lambda *about: sealed.append(about)  # type: ignore[method-assign]
    gather.execute(FIRST)
    (execution,) = gather.plan_runner.executions.values()
    execution.plan = msgspec.structs.replace(
        execution.plan,
        requester=requester,
        results=(SECOND,),  # type: ignore[type-var]
    )
    execution.blocks = {0: (4096, NBYTES)}
    mine = gather.plan_runner.commit(m.Commit(9, 1, (0,)))
    assert mine == ({0: (4096, NBYTES)} if requester == 1 else {})
    assert sealed == ([] if requester == 1 else [(SECOND, 4096, NBYTES)])
    assert not gather.plan_runner.executions


def test_the_commit_of_another_plan_ends_this_one() -> None:
    """The others have gone on without this node, which was given up and did not hear of that."""
    gather = Gather(room=True)
    gather.execute(FIRST)
    (execution,) = gather.plan_runner.executions.values()
    execution.blocks = {0: (4096, NBYTES)}
    assert gather.plan_runner.commit(m.Commit(9, 2, (0,))) == {}
    assert not gather.plan_runner.executions


def test_nothing_is_on_its_way_from_a_node_that_is_gone() -> None:
    gather = Gather(room=True)
    del gather.node.cells.links.peers.by_number[0]
    gather.execute(SECOND)
    assert gather.remotes[80].payload == 0
    (execution,) = gather.plan_runner.executions.values()
    assert not execution.copies
    gather.plan_runner._maybe_finish(execution)
    assert gather.sent == []


def test_the_manager_is_told_of_rates_that_are_known() -> None:
    gather = Gather(room=True)
    gather.node.cells.send_manager = gather.sent.append
    gather.node.cells._measured(100, 0)
    gather.node.cells._measured(0, 50)
    assert gather.sent == [m.HostMeasured(1, 100.0, None), m.HostMeasured(1, None, 50.0)]


@pytest.mark.parametrize("known", [False, True])
def test_a_pull_says_of_which_object_and_from_which_byte(known: bool) -> None:
    """What was here before is not counted again."""
    one = PlanNode()
    execution = one.execution(copy_plan(1 << 63))
    cell = one.cells.make(execution, None, memoryview(bytearray(50)), 30, 50, False)
    if known:
        execution.fills[cell] = OBJECT, 30, 40
    offset, nbytes = (40, 40) if known else (0, 50)
    assert one.cells.describe(cell) == {"object": OBJECT, "bytes": nbytes, "offset": offset}
    assert one.cells.describe(cell + 1) == {}


def test_the_manager_hears_of_a_slow_link_while_an_allreduce_is_executed() -> None:
    gather = Gather(room=True)
    gather.execute(FIRST)
    (execution,) = gather.plan_runner.executions.values()
    gather.plan_runner.link_estimator.moved = lambda: (700, 90)
    execution.moved = 200, 100
    gather.plan_runner.slowed(30, 40)
    assert gather.sent == []  # nothing can be changed for a gather
    execution.plan = msgspec.structs.replace(
        execution.plan,
        kind="allreduce",
        stripes=(m.Stripe(0, 0, m.SHARES),),  # type: ignore[type-var]
    )
    gather.plan_runner.slowed(30, 40)
    # A link that has ended is not counted any more, so a count may be less than before.
    assert gather.sent == [m.OperationSlow(9, 1, 1, 30, 40, 500, 0)]
    for changed, value in (("reported", True), ("done", lambda *_: None), ("moved", None)):
        before = getattr(execution, changed)
        setattr(execution, changed, value)
        gather.plan_runner.slowed(30, 40)
        # Its part is over, or the call is a Group's, or no bytes have moved.
        assert len(gather.sent) == 1, changed
        setattr(execution, changed, before)
