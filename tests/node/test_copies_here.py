"""Copies of which a node hears in an unusual order, as happens over different connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from hoplite_mp import _serialize
from hoplite_mp._common import ids
from hoplite_mp._common.object_states import KIND_OPERATION, NODE_SLOT, STATE
from hoplite_mp._node.execution.plan_cells import PULL_TRIES_MAX
from hoplite_mp._node.peers.links import UNREACHABLE
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.membership import ReportedCopy, ReportedDistribute
from hoplite_mp._protocol.peers import ObjectReport
from tests.support.node_harness import member
from tests.support.node_hosts import Network, Side
from tests.support.node_plans import PlanNode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._node.execution.transfers import Transfers
    from hoplite_mp._node.objects.remote_objects import RemoteObject

OWNER = member(2)
OBJECT = ids.pack_id(OWNER.host_id, 1 << 33)
NBYTES = 100_000


class OneNode(PlanNode):
    """Node 1 of four. OBJECT is node 2's."""

    @property
    def transfers(self) -> Transfers:
        return self.cluster.transfers

    def place(self) -> None:
        """A collective has placed a copy of OBJECT here."""
        self.replicas.seal(OBJECT, self.lease(NBYTES), NBYTES)

    def own(self) -> bytes:
        """An object of this host."""
        oid = self.node.new(KIND_OPERATION, STATE["CLAIMED"], NODE_SLOT, 0)
        self.own_hold = self.node.hold(oid, False)
        self.parts.results.store_block(oid, self.lease(NBYTES), NBYTES)
        return ids.pack_id(self.host_id, oid)

    def meet(self, *holders: int) -> RemoteObject:
        """A process here gets a ref to OBJECT."""
        holds: list[Any] = []
        self.parts.imports.ask([OBJECT], holds.extend)
        ((_, asked),) = self.taken()
        answer = ObjectReport(OBJECT, asked.number, "ready", NBYTES, None, holders)
        self.receive(OWNER.host_id, answer)
        (self.hold,) = holds
        return self.remote_objects.by_oid[self.hold.oid]

    def want(self) -> RemoteObject:
        """A process here asks for the value of OBJECT, which node 0 has."""
        remote = self.meet(0)
        assert self.remote_objects.want(self.hold.oid, lambda: None)
        return remote


@pytest.fixture
def one() -> Iterator[OneNode]:
    made = OneNode()
    yield made
    made.close()


ONE_STRIPE = (m.Stripe(0, 0, m.SHARES),)
CHAIN = m.Distribute(1 << 63, OBJECT, 5, NBYTES, (0,), (1, 2), ONE_STRIPE, "tree:1")
LONE = msgspec.structs.replace(CHAIN, receivers=(1,), rule="stripes")
SERVING = m.Distribute(
    1 << 63, OBJECT, 5, NBYTES, (1,), (2,), (m.Stripe(2, 0, m.SHARES),), "stripes"
)
WITHDRAWN = m.Withdraw(1 << 63, OBJECT, 5)
SERVED = ((1 << 63, 5, 0, 0), 0, NBYTES, True)
ASKED = m.FetchRequested(1, OBJECT, NBYTES, (0,))


def test_node_with_a_copy_serves_under_the_new_plan(one: OneNode) -> None:
    """Its report crossed with a plan that makes it a parent: its child waited for ever."""
    one.place()
    one.from_manager(CHAIN)
    assert one.made == [SERVED]
    assert one.reports == [m.FetchComplete(1, OBJECT, 5)]
    one.from_manager(WITHDRAWN)
    assert one.closed == [1]


@pytest.mark.parametrize("ours", [False, True])
def test_copies_of_own_objects_are_not_recorded(one: OneNode, ours: bool) -> None:
    """Nobody would take the note away again when the owner has let go of its object."""
    made = one.own() if ours else OBJECT
    if not ours:
        one.place()
    one.from_manager(msgspec.structs.replace(CHAIN, object=made))
    assert one.reports == [m.FetchComplete(1, made, 5)]
    one.from_manager(msgspec.structs.replace(WITHDRAWN, object=made))
    assert list(one.transfers.report()) == ([] if ours else [ReportedCopy(1, made, NBYTES)])


@pytest.mark.parametrize(("state", "here"), [("SPILLED", True), ("SPILLING", True),
                                             ("CANCELLED", False), ("FREED", False)])  # fmt: skip
def test_receiver_with_a_spilled_copy_reports_it_complete(
    one: OneNode, state: str, here: bool
) -> None:
    """A manager that begins anew makes the owner a receiver of its own broadcast."""
    one.place()
    client: Any = mock.Mock(wraps=one.node, number=1, host_id=one.host_id)
    client.state.return_value = STATE[state]
    one.transfers.client = client
    one.from_manager(CHAIN)
    told = m.FetchComplete(1, OBJECT, 5) if here else m.CopyDropped(1, OBJECT)
    assert one.reports == [told]


@pytest.mark.parametrize("withdrawn", [False, True])
def test_node_whose_copy_is_arriving_serves_when_it_is_complete(
    one: OneNode, withdrawn: bool
) -> None:
    """A collective is bringing it; unless the plan is over by then."""
    remote = one.meet(0)
    remote.payload = one.lease(NBYTES)
    one.from_manager(CHAIN)
    assert one.reports == []
    if withdrawn:
        one.from_manager(WITHDRAWN)
    one.remote_objects.arrived(one.hold.oid)
    assert one.made == ([] if withdrawn else [SERVED])
    assert len(one.reports) == (not withdrawn)


@pytest.mark.parametrize("withdrawn", [False, True])
def test_pull_from_a_living_parent_is_retried(one: OneNode, withdrawn: bool) -> None:
    """Before the manager hears that nothing comes from there."""
    one.want()
    one.reports.clear()
    one.from_manager(LONE)
    asked = (1, 0, (1 << 63, 5, 0, 0))
    assert one.pulled == [asked]
    for tries in range(PULL_TRIES_MAX):
        one.cells.failed(1, "reset")
        assert one.reports == []
        if withdrawn:
            one.from_manager(WITHDRAWN)
        one.loop.call_all()
        if withdrawn:
            assert one.pulled == [asked]
            return
        assert one.pulled == [asked] * (tries + 2)
    one.cells.failed(1, "reset")
    assert one.reports == [m.FetchFailed(1, OBJECT, 5, 0, "reset")]
    one.plan_runner.executions[1 << 63 | 5].tries.clear()
    one.cells.failed(1, UNREACHABLE)
    assert one.reports[1:] == [m.FetchFailed(1, OBJECT, 5, 0, UNREACHABLE)]


def test_result_of_a_local_operation_is_not_fetched(
    one: OneNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = one.meet(1)
    with monkeypatch.context() as made_here:
        made_here.setattr(one.plan_runner, "makes", lambda object_id: object_id == OBJECT)
        assert one.remote_objects.want(one.hold.oid, lambda: None)
    assert one.reports == []
    one.transfers.fetch(one.hold.oid, remote)
    assert one.reports == [m.FetchRequested(1, OBJECT, NBYTES, (2,))]


@pytest.mark.parametrize("asked_again", [False, True])
def test_plan_for_a_withdrawn_request_does_not_block_the_next_request(
    one: OneNode, asked_again: bool
) -> None:
    """It comes after that, and is withdrawn: whoever wants the object by then waited for ever."""
    remote = one.want()
    one.remote_objects.give_up(one.hold.oid)
    assert one.reports == [ASKED, m.CopyDropped(1, OBJECT)]
    one.from_manager(LONE)
    assert remote.payload
    if not asked_again:
        one.replicas.keep_on(OBJECT, one.hold)
        del one.hold
    one.from_manager(WITHDRAWN)
    assert one.reports[2:] == ([ASKED] if asked_again else [])
    assert (OBJECT in one.transfers.fetching) is asked_again
    assert bool(remote.payload) is asked_again
    assert asked_again or OBJECT not in one.replicas.holds


def test_broadcast_copy_without_space_is_reported_after_a_wait(one: OneNode) -> None:
    """It is waited for, and then the manager is told why."""
    one.set_space(False)
    one.from_manager(LONE)
    assert OBJECT in one.replicas.holds
    one.loop.call_all()
    assert one.reports == []
    one.loop.time += one.config.put_wait_s
    one.loop.call_all()
    assert one.reports == [m.CopyDropped(1, OBJECT, "it is full")]
    assert OBJECT not in one.replicas.holds


def test_object_is_served_by_several_plans_until_each_is_withdrawn(one: OneNode) -> None:
    one.place()
    one.from_manager(SERVING)
    second = msgspec.structs.replace(SERVING, epoch=6, receivers=(0,))
    one.from_manager(second)
    assert [execution.plan.epoch for execution in one.plan_runner.executions.values()] == [5, 6]
    assert one.closed == []
    one.from_manager(WITHDRAWN)
    assert one.closed == [1]
    assert list(one.transfers.report()) == [ReportedDistribute(1, second, False)]
    assert one.plan_runner.collectives() == list(one.plan_runner.report()) == []


@pytest.mark.parametrize("end", ["space", "no space", "withdrawn"])
def test_spilled_copy_is_served_when_there_is_space(one: OneNode, end: str) -> None:
    """The object is not lost. After too long a wait for space, the manager is informed."""
    one.place()
    one.set_space(False)
    one.from_manager(SERVING)
    one.loop.call_all()
    assert (one.reports, one.made) == ([], [])
    if end == "withdrawn":
        one.from_manager(WITHDRAWN)
    if end != "no space":
        one.set_space(True)
    one.loop.time += one.config.put_wait_s
    one.loop.call_all()
    assert one.made == ([SERVED] if end == "space" else [])
    assert one.reports == ([m.CopyDropped(1, OBJECT, "it is full")] if end == "no space" else [])
    one.loop.call_all()
    assert len(one.reports) == (end == "no space")


@pytest.mark.parametrize("planned", [True, False])
def test_fetch_from_a_full_holder_is_requested_again(one: OneNode, planned: bool) -> None:
    """It is not lost. Once, whether a plan is withdrawn with it or not."""
    remote = one.want()
    assert one.reports == [ASKED]
    if planned:
        one.from_manager(LONE)
    one.from_manager(m.FetchRefused(OBJECT, "full", "store of h0 is full"))
    if planned:
        one.from_manager(WITHDRAWN)
    one.loop.call_all()
    assert one.reports == [ASKED, ASKED]
    assert remote.full == "store of h0 is full"
    assert one.transfers.fetching == {OBJECT: one.hold.oid}


def test_plan_waiting_for_space_is_not_reported_to_the_next_manager(one: OneNode) -> None:
    """Nobody would withdraw it, so what it serves would stay for ever."""
    one.place()
    one.set_space(False)
    one.from_manager(SERVING)
    assert list(one.transfers.report()) == []
    one.set_space(True)
    one.loop.call_all()
    assert one.made == []
    one.from_manager(SERVING)  # it is said again
    assert one.made == [SERVED]


def test_replacement_plan_continues_without_a_new_request(one: OneNode) -> None:
    """It is said before that one is withdrawn: nothing is asked for anew."""
    one.want()
    one.from_manager(LONE)
    one.from_manager(msgspec.structs.replace(LONE, epoch=6))
    assert [execution.plan.epoch for execution in one.plan_runner.executions.values()] == [6]
    one.from_manager(WITHDRAWN)
    assert one.reports == [ASKED]
    assert len(one.plan_runner.executions) == 1


def test_second_header_for_an_object_gets_its_own_copy(one: OneNode) -> None:
    """The first one is free by then, though this node has not seen it: what was on its way there
    must not be taken for what the second one waits for."""
    remote, first = one.want(), one.hold.oid
    one.from_manager(LONE)
    second = one.node.new(KIND_OPERATION, STATE["CLAIMED"], NODE_SLOT, 0)
    hold = one.node.hold(second, False)
    assert one.remote_objects.complete(second, OBJECT, NBYTES, (0,))
    assert one.remote_objects.want(second, lambda: None)
    assert one.closed == [1]
    assert not remote.payload
    assert one.reports == [ASKED, m.CopyDropped(1, OBJECT), ASKED]
    one.transfers.forget(first, remote)
    assert one.reports[3:] == []
    assert one.transfers.fetching == {OBJECT: second}
    del hold


@pytest.fixture
def side() -> Any:
    network = Network(2)
    yield network.nodes[1]
    network.close()


def a_result(side: Side) -> tuple[int, int, bytes]:
    """(payload, bytes, what it holds) of a block that a collective has filled."""
    encoded = _serialize.encode(np.arange(5000))
    payload = side.results.lease(encoded.nbytes)
    assert payload is not None
    side.node.write(payload, encoded.head, encoded.buffers, encoded.offsets)
    return payload, encoded.nbytes, bytes(side.node.memory(payload, encoded.nbytes))


def test_reader_waits_for_the_commit_of_a_result_made_on_its_host(side: Side) -> None:
    """The owner says that it is done, and here, before the commit has come: who reads it waits for
    that, instead of being told that nobody holds it."""
    replicas = side.replicas
    payload, nbytes, expected = a_result(side)
    object_id = ids.pack_id(side.network.nodes[0].host_id, 1 << 32 | 5)
    oid = replicas.expect(object_id, nbytes, (1,))
    ended: list[int] = []
    assert side.remote_objects.want(oid, lambda: ended.append(1))
    assert oid in side.fetching
    replicas.seal(object_id, payload, nbytes)
    assert ended == [1]
    assert oid not in side.fetching
    got = side.node.view(oid)
    assert not isinstance(got, int)
    assert bytes(got) == expected
