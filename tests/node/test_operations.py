"""Collectives of one node: what becomes of a run that ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hoplite_mp._common import ids
from hoplite_mp._node.collectives.chunked_reduce import ChunkedReduce
from hoplite_mp._node.collectives.operations import Operations, placed
from hoplite_mp._node.objects.remote_objects import MEMORY_POLL_S
from hoplite_mp._protocol import messages as m


@pytest.mark.parametrize("epoch", [1, 2, None])
def test_a_run_of_an_earlier_plan_is_dropped(epoch: int | None) -> None:
    """The operation was planned again, or dropped, while a thread folded by the earlier plan."""
    operation = SimpleNamespace(epoch=epoch, execution=None, chunked_reduce=None)
    sent: list[Any] = []
    room: Any = SimpleNamespace(
        operations={} if epoch is None else {7: operation},
        client=SimpleNamespace(number=0),
        send=sent.append,
    )
    execution: Any = mock.Mock()
    Operations._ran(room, 7, 1, execution, None)
    assert (operation.execution is execution) == (epoch == 1) == bool(sent)
    assert execution.drop.called == (epoch != 1)


@pytest.mark.parametrize("runs", [True, False])
def test_what_a_thread_writes_into_is_freed_when_it_has_ended(runs: bool) -> None:
    """The operation is planned again between two chunks, or while a thread folds one."""
    chunked: Any = mock.Mock(spec=ChunkedReduce)
    old: Any = SimpleNamespace(operation=7, epoch=1)
    operation: Any = SimpleNamespace(
        number=7, epoch=1, execution=None, chunked_reduce=chunked, plan=None if runs else old,
        planned_ns=1,
    )  # fmt: skip
    room: Any = mock.Mock(spec=Operations)
    room.configure_mock(
        operations={7: operation},
        client=SimpleNamespace(number=0),
        plan_runner=None,
        loop=SimpleNamespace(now_ns=lambda: 2, now=lambda: 0.0),
        config=SimpleNamespace(put_wait_s=1.0),
    )
    room._drop_chunked = lambda one: Operations._drop_chunked(room, one)
    stripes = (m.Stripe(0, 0, m.SHARES),)
    source = (ids.pack_id(1000, 7),)
    plan = m.ExecuteReduce(
        7, 2, (0,), (0,), stripes, "fold", "reduce", "sum", 0, source, (0,), (0,)
    )  # fmt: skip
    Operations._planned(room, plan)
    assert operation.chunked_reduce is None
    assert chunked.drop.called != runs
    Operations._ran(room, 7, 1, chunked, None)
    assert chunked.drop.called
    assert operation.plan.epoch == 2


def test_a_plan_without_memory_is_not_tried_in_each_turn() -> None:
    """Seed 1837668: each attempt spilled one object to restore another. That woke processes, these
    the node, and the node tried again: a hundred thousand times a second."""
    tried: list[float] = []
    now = 100.0
    operation: Any = SimpleNamespace(plan=object(), try_again_at=0.0, space_deadline=110.0)
    room: Any = mock.Mock(spec=Operations)
    room.configure_mock(
        operations={7: operation}, loop=SimpleNamespace(now=lambda: now), store=mock.Mock()
    )

    def execute(one: Any) -> None:
        tried.append(now)
        Operations._no_memory(room, one, "no memory")

    room.execute = execute
    for _ in range(50):
        again = Operations.execute_again(room)
        assert again is not None
        now = max(now + 0.001, min(again, now + 0.007))  # other things happen meanwhile
    assert len(tried) == pytest.approx((now - 100) / MEMORY_POLL_S, abs=1)
    operation.plan = None
    assert Operations.execute_again(room) is None


class Counted(int):
    """A number whose comparisons with others are counted."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int(self) == other


@pytest.fixture
def compared() -> type[Counted]:
    Counted.compared = 0
    return Counted


def test_sources_that_are_to_be_made_again_are_found_in_one_pass(compared: type[Counted]) -> None:
    """A host was lost that held thousands of them; each of them is given twice."""
    sources = [compared(100 + index) for index in range(200)] * 2
    ask: Any = mock.Mock(sources=sources, results=[7], to=[], kind="reduce", op="sum", num=400)
    ask.deadline_s, ask.reproducible = None, False
    operation: Any = SimpleNamespace(number=7, ask=ask, waiting={}, slot=1)
    room: Any = mock.Mock(spec=Operations)
    room.configure_mock(
        client=SimpleNamespace(number=0, host_id=1000),
        plan_runner=None,
        imports=SimpleNamespace(public=lambda oid: ids.pack_id(1000, oid)),
        remote_objects=SimpleNamespace(needs_making=lambda oid: True),
        _deadline_s=lambda operation: None,
    )
    (request,) = Operations._request(room, operation)
    assert isinstance(request, m.ReduceRequested)
    assert request.ready == ()
    assert operation.waiting == {100 + index: [index, 200 + index] for index in range(200)}
    assert compared.compared < 20 * len(sources)


def test_places_of_an_alltoall_are_looked_up_and_not_searched(compared: type[Counted]) -> None:
    """Every other column stays on the node that asks, which is no other node."""
    columns = 400
    destinations = tuple(compared(index % 2) for index in range(columns))
    kept: list[Any] = []
    executor: Any = SimpleNamespace(
        links=SimpleNamespace(
            peers=SimpleNamespace(
                by_number={1: SimpleNamespace(member=SimpleNamespace(host_id=1001))}
            )
        ),
        imports=SimpleNamespace(public=lambda oid: ids.pack_id(1000, oid)),
        replicas=SimpleNamespace(say=kept.append),
    )
    ask: Any = SimpleNamespace(kind="alltoall", sources=range(columns))
    commit: Any = SimpleNamespace(contributors=tuple(range(columns)), destinations=destinations)
    placed(executor, ask, commit)
    assert {one.hosts for one in kept} == {(1001,)}
    assert [one.object for one in kept] == [ids.pack_id(1000, at) for at in range(1, columns, 2)]
    assert compared.compared < 20 * columns
