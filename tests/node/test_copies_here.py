"""Copies of which a node hears in an unusual order, as happens over different connections."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from hoplite_mp import _serialize
from hoplite_mp._common import ids
from hoplite_mp._common.object_states import STATE
from hoplite_mp._node.execution.plan_cells import PULL_TRIES_MAX, PlanCells
from hoplite_mp._node.execution.plan_runner import PlanRunner
from hoplite_mp._node.execution.transfers import Transfers
from hoplite_mp._node.peers.links import UNREACHABLE
from hoplite_mp._node.store.growing_block import EngineBuffer, Ranges
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.membership import CopyHeld, DistributeHeld
from tests.support.node_hosts import Network, Side
from tests.support.node_ports import ManualLoop

OBJECT = ids.pack_id(1000, 7)
NBYTES = 100_000


class FakeEngine:
    """Writes down which cells it is told to make."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def cell(self, key: Any, memory: Any, begin: int, nbytes: int, filled: Any) -> int:
        self.made.append((key, begin, nbytes, filled))
        return len(self.made)

    def hold(self) -> None:
        """It has no thread."""

    release = hold

    def together(self, cells: Any, vote: Any = None) -> None:
        """Each cell of the test is filled by itself."""

    def watermark(self, cell: int) -> int:
        return 0


class RemoteObjects:
    """Those of one object."""

    def __init__(self) -> None:
        self.by_oid: dict[int, Any] = {}

    def __contains__(self, oid: int) -> bool:
        return oid in self.by_oid

    def refuse(self, oid: int, why: str) -> None:
        self.by_oid[oid].full = why


class OneNode:
    """Node 1 of three, as far as copies need one; it holds OBJECT."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.loop = ManualLoop()
        self.closed: list[int] = []
        self.given_up: list[int] = []
        self.let_go: list[bytes] = []
        self.only_kept = True
        self.state = STATE["SEALED"]
        self.payload: int | None = 3  # where there is room for a copy
        self.engine = FakeEngine()
        node = SimpleNamespace(
            send_manager=self.said.append,
            roster=SimpleNamespace(number_of=lambda host_id: None),
            imports=SimpleNamespace(local=lambda object_id: 7),
            config=SimpleNamespace(put_wait_s=10.0),
            client=SimpleNamespace(
                number=1,
                host_id=1001,
                inspect=lambda oid: {"size": NBYTES},
                state=lambda oid: self.state,
                view=lambda oid: memoryview(bytes(NBYTES)),
                memory=lambda payload, nbytes: memoryview(bytearray(nbytes)),
                give_back=lambda payload: None,
            ),
            remote_objects=RemoteObjects(),
            loop=self.loop,
            store=SimpleNamespace(
                lease=lambda nbytes, slot: self.payload, full_message=lambda: "it is full"
            ),
        )
        node.remote_objects.give_up = self.give_up
        self.has_room = True  # to read it from the disk
        node.results = SimpleNamespace(
            client=node.client, pin=lambda oid: node.client.view(oid) if self.has_room else None
        )
        self.pulled: list[tuple[Any, ...]] = []
        links = SimpleNamespace(
            engine=self.engine,
            trace_events=SimpleNamespace(on=False),
            close=lambda cell, engine_buffer, **_: self.closed.append(cell),
            moved=lambda near: (0, 0),
            flows=dict,
            pull=lambda *about: self.pulled.append(about[:3]),
            peers=SimpleNamespace(
                by_number={0: None},
                by_host_id={1000: SimpleNamespace(member=SimpleNamespace(node=2))},
            ),
        )
        replicas = SimpleNamespace(
            expect=lambda *about: 7,
            tell=lambda *about: None,
            only_kept=lambda object_id: self.only_kept,
            let_go=self.let_go.append,
            imports=SimpleNamespace(owner_of=lambda object_id: 1000),
        )
        self.makes = lambda object_id: False
        self.remote_objects = node.remote_objects.by_oid
        host: Any = node
        anything: Any = replicas
        self.cells = PlanCells(host, links)  # type: ignore[arg-type]
        self.plan_runner = PlanRunner(host, self.cells, anything, None)  # type: ignore[arg-type]
        self.plan_runner.makes = lambda object_id: self.makes(object_id)  # type: ignore[method-assign]
        self.transfers = Transfers(host, anything, self.plan_runner)

    def give_up(self, oid: int) -> None:
        self.given_up.append(oid)
        self.transfers.forget(oid, self.remote_objects[oid])


CHAIN = m.Distribute(
    1 << 63, OBJECT, 5, NBYTES, (0,), (1, 2), (m.Stripe(0, 0, m.SHARES),), "tree:1"
)
SERVED = ((1 << 63, 5, 0, 0), 0, NBYTES, True)


def test_who_has_it_already_serves_by_the_new_plan() -> None:
    """Its report crossed with a plan that makes it a parent: its child waited for ever."""
    one = OneNode()
    one.transfers.distribute(CHAIN)
    assert one.engine.made == [SERVED]
    assert one.said == [m.FetchComplete(1, OBJECT, 5)]
    one.transfers.withdraw(m.Withdraw(1 << 63, OBJECT, 5))
    assert one.closed == [1]


@pytest.mark.parametrize("ours", [False, True])
def test_only_copies_of_other_hosts_objects_are_noted(ours: bool) -> None:
    """Nobody would take the note away again when the owner has let go of its object."""
    one = OneNode()
    made = ids.pack_id(1001, 7) if ours else OBJECT
    one.transfers.distribute(msgspec.structs.replace(CHAIN, object=made))
    assert one.said == [m.FetchComplete(1, made, 5)]
    one.transfers.withdraw(m.Withdraw(1 << 63, made, 5))
    assert list(one.transfers.report()) == ([] if ours else [CopyHeld(1, made, NBYTES)])


@pytest.mark.parametrize(("state", "here"), [("SPILLED", True), ("SPILLING", True),
                                             ("CANCELLED", False), ("FREED", False)])  # fmt: skip
def test_a_receiver_has_what_is_on_its_disk(state: str, here: bool) -> None:
    """A manager that begins anew makes the owner a receiver of its own broadcast."""
    one = OneNode()
    one.state = STATE[state]
    one.transfers.distribute(CHAIN)
    told = m.FetchComplete(1, OBJECT, 5) if here else m.CopyDropped(1, OBJECT)
    assert one.said == [told]


@pytest.mark.parametrize("withdrawn", [False, True])
def test_who_has_it_in_a_moment_serves_then(withdrawn: bool) -> None:
    """A collective is bringing it; unless the plan is over by then."""
    one = OneNode()
    waiting: list[Any] = []
    one.remote_objects[7] = SimpleNamespace(payload=1, waiting=waiting)
    one.transfers.distribute(CHAIN)
    assert one.said == []
    if withdrawn:
        one.transfers.withdraw(m.Withdraw(1 << 63, OBJECT, 5))
    del one.remote_objects[7]
    waiting[0]()
    assert one.engine.made == ([] if withdrawn else [SERVED])
    assert len(one.said) == (not withdrawn)


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_parent_that_lives_is_asked_again(withdrawn: bool) -> None:
    """Before the manager hears that nothing comes from there."""
    one = OneNode()
    plan = m.Distribute(
        1 << 63, OBJECT, 5, NBYTES, (0,), (1,), (m.Stripe(0, 0, m.SHARES),), "stripes"
    )
    one.remote_objects[7] = a_place()
    one.remote_objects[7].payload = 1
    one.transfers.fetching[OBJECT] = 7
    one.transfers.distribute(plan)
    asked = (1, 0, (1 << 63, 5, 0, 0))
    assert one.pulled == [asked]
    for tries in range(PULL_TRIES_MAX):
        one.cells.failed(1, "reset")
        assert one.said == []
        if withdrawn:
            one.transfers.withdraw(m.Withdraw(1 << 63, OBJECT, 5))
        one.loop.call_all()
        if withdrawn:
            assert one.pulled == [asked]
            return
        assert one.pulled == [asked] * (tries + 2)
    one.cells.failed(1, "reset")
    assert one.said == [m.FetchFailed(1, OBJECT, 5, 0, "reset")]
    one.plan_runner.executions[1 << 63 | 5].tries.clear()
    one.cells.failed(1, UNREACHABLE)
    assert one.said[1:] == [m.FetchFailed(1, OBJECT, 5, 0, UNREACHABLE)]


def test_what_is_made_here_is_not_asked_for() -> None:
    one = OneNode()
    remote = SimpleNamespace(object=OBJECT, nbytes=NBYTES, holders=(1,))
    one.makes = lambda object_id: object_id == OBJECT
    one.transfers.fetch(7, remote)  # type: ignore[arg-type]
    assert one.said == []
    one.makes = lambda object_id: False
    one.transfers.fetch(7, remote)  # type: ignore[arg-type]
    assert one.said == [m.FetchRequested(1, OBJECT, NBYTES, (2,))]


LONE = m.Distribute(1 << 63, OBJECT, 5, NBYTES, (0,), (1,), (m.Stripe(0, 0, m.SHARES),), "stripes")


def a_place() -> Any:
    return SimpleNamespace(
        object=OBJECT,
        payload=0,
        nbytes=NBYTES,
        engine_buffer=EngineBuffer(),
        arrived=Ranges(),
        holders=(0,),
        waiting=[],
    )


@pytest.mark.parametrize("asked_again", [False, True])
def test_a_plan_for_a_request_that_was_taken_back(asked_again: bool) -> None:
    """It comes after that, and is withdrawn: whoever wants the object by then waited for ever."""
    one = OneNode()
    one.remote_objects[7] = a_place()
    one.transfers.fetch(7, one.remote_objects[7])
    one.transfers.forget(7, one.remote_objects[7])
    assert one.said == [m.FetchRequested(1, OBJECT, NBYTES, (0,)), m.CopyDropped(1, OBJECT)]
    one.transfers.distribute(LONE)
    one.only_kept = not asked_again
    one.transfers.withdraw(m.Withdraw(1 << 63, OBJECT, 5))
    if asked_again:
        assert one.said[2:] == [m.FetchRequested(1, OBJECT, NBYTES, (0,))]
        assert OBJECT in one.transfers.fetching
    else:
        assert one.said[2:] == []
        assert (one.given_up, one.let_go) == ([7], [OBJECT])


def test_there_is_no_room_for_a_copy_that_a_broadcast_places_here() -> None:
    """It is waited for, and then the manager is told why."""
    one = OneNode()
    one.payload = None
    one.remote_objects[7] = a_place()
    one.transfers.distribute(LONE)
    one.loop.call_all()
    assert one.said == []
    one.loop.time += 10.0
    one.loop.call_all()
    assert one.said == [m.CopyDropped(1, OBJECT, "it is full")]
    assert one.let_go == [OBJECT]


SERVING = m.Distribute(
    1 << 63, OBJECT, 5, NBYTES, (1,), (2,), (m.Stripe(2, 0, m.SHARES),), "stripes"
)


def test_one_object_is_served_by_several_plans_until_each_is_withdrawn() -> None:
    one = OneNode()
    one.transfers.distribute(SERVING)
    one.transfers.distribute(msgspec.structs.replace(SERVING, epoch=6, receivers=(0,)))
    assert [execution.plan.epoch for execution in one.plan_runner.executions.values()] == [5, 6]
    assert one.closed == []
    one.transfers.withdraw(m.Withdraw(1 << 63, OBJECT, 5))
    assert one.closed == [1]
    assert list(one.transfers.report()) == [
        DistributeHeld(1, msgspec.structs.replace(SERVING, epoch=6, receivers=(0,)), False)
    ]
    assert one.plan_runner.collectives() == list(one.plan_runner.report()) == []


@pytest.mark.parametrize("end", ["room", "no room", "withdrawn"])
def test_who_has_it_on_disk_serves_it_when_there_is_room(end: str) -> None:
    """The object is not lost meanwhile; without room for too long the manager is told why."""
    one = OneNode()
    one.has_room = False
    one.transfers.distribute(SERVING)
    one.loop.call_all()
    assert (one.said, one.engine.made) == ([], [])
    if end == "withdrawn":
        one.transfers.withdraw(m.Withdraw(1 << 63, OBJECT, 5))
    one.has_room = end != "no room"
    one.loop.time += 10.0
    one.loop.call_all()
    assert one.engine.made == ([SERVED] if end == "room" else [])
    assert one.said == ([m.CopyDropped(1, OBJECT, "it is full")] if end == "no room" else [])
    one.loop.call_all()
    assert len(one.said) == (end == "no room")


@pytest.mark.parametrize("planned", [True, False])
def test_what_its_holder_has_no_room_to_read_is_asked_for_again(planned: bool) -> None:
    """It is not lost. Once, whether a plan is withdrawn with it or not."""
    one = OneNode()
    one.only_kept = False
    one.remote_objects[7] = a_place()
    one.transfers.fetch(7, one.remote_objects[7])
    asked = m.FetchRequested(1, OBJECT, NBYTES, (0,))
    assert one.said == [asked]
    if planned:
        one.transfers.distribute(LONE)
    one.transfers.refused(m.FetchRefused(OBJECT, "full", "store of h0 is full"))
    if planned:
        one.transfers.withdraw(m.Withdraw(1 << 63, OBJECT, 5))
    one.loop.call_all()
    assert one.said == [asked, asked]
    assert one.remote_objects[7].full == "store of h0 is full"
    assert one.transfers.fetching == {OBJECT: 7}


def test_a_plan_that_waits_for_room_is_not_the_next_manager_s() -> None:
    """Nobody would withdraw it, so what it serves would stay for ever."""
    one = OneNode()
    one.has_room = False
    one.transfers.distribute(SERVING)
    assert list(one.transfers.report()) == []
    one.has_room = True
    one.loop.call_all()
    assert one.engine.made == []
    one.transfers.distribute(SERVING)  # it is said again
    assert one.engine.made == [SERVED]


def test_a_plan_that_takes_the_place_of_another() -> None:
    """It is said before that one is withdrawn: nothing is asked for anew."""
    one = OneNode()
    one.remote_objects[7] = a_place()
    one.transfers.fetch(7, one.remote_objects[7])
    one.transfers.distribute(LONE)
    one.transfers.distribute(msgspec.structs.replace(LONE, epoch=6))
    one.transfers.withdraw(m.Withdraw(1 << 63, OBJECT, 5))
    assert len(one.said) == 1
    assert [execution.plan.epoch for execution in one.plan_runner.executions.values()] == [6]


def test_another_header_asks_for_the_same_object() -> None:
    """The first one is free by then, though this node has not seen it: what was on its way there
    must not be taken for what the second one waits for."""
    one = OneNode()
    one.remote_objects[7], one.remote_objects[8] = a_place(), a_place()
    one.transfers.fetch(7, one.remote_objects[7])
    one.transfers.distribute(LONE)
    one.transfers.fetch(8, one.remote_objects[8])
    assert one.closed == [1]
    asked = m.FetchRequested(1, OBJECT, NBYTES, (0,))
    assert one.said == [asked, m.CopyDropped(1, OBJECT), asked]
    one.transfers.forget(7, one.remote_objects[7])
    assert one.said[3:] == []
    assert one.transfers.fetching == {OBJECT: 8}


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


def test_a_result_that_is_asked_for_where_it_is_made(side: Side) -> None:
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
