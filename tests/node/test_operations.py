"""Collectives of one node: what becomes of a run that ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import STATE
from hoplite_mp._node.collectives import operations
from hoplite_mp._node.objects.remote_objects import MEMORY_POLL_S
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.local import Collective
from hoplite_mp._protocol.peers import ObjectReport
from tests.support.node_harness import member

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_harness import NodeHarness

SLOT = 2
OWNER = member(2).host_id
MIB = 1 << 20
BLOCK_BYTES = MIB + 4096  # of an array of 1 MiB, with its head


@pytest.fixture
def node(make_node: Callable[..., NodeHarness]) -> NodeHarness:
    return make_node(alone=True, workers=1)


@pytest.fixture
def cluster_node(make_node: Callable[..., NodeHarness]) -> NodeHarness:
    return make_node([member(1), member(2)], workers=1)


class Sum:
    """A process asks for the sum of arrays of 1 MiB; the test is the manager."""

    def __init__(self, node: NodeHarness, sources: int) -> None:
        self.node = node
        self.process = node.process(SLOT)
        self.sources = [self.process.put(np.full(MIB // 8, one + 1.0)) for one in range(sources)]
        self.result = self.process.draft()
        at = [hold.oid for hold in self.sources]
        node.ask(SLOT, Collective([self.result.oid], at, "reduce", "sum", sources, None, False), 0)
        (self.request,) = node.reports

    def plan(self, epoch: int) -> None:
        """A thread folds the next sources at once; the node hears of its end when time passes."""
        every = tuple(range(len(self.sources)))
        at = (0,) * len(every)
        number, objects = self.request.operation, self.request.sources
        whole = (m.Stripe(0, 0, m.SHARES),)
        self.node.from_manager(
            m.ExecuteReduce(
                number, epoch, every, every, whole, "any", "reduce", "sum", 0, objects, at, (0,)
            )
        )

    def folded(self) -> list[int]:
        """Epochs of the plans whose results are complete."""
        self.node.loop.pass_time(0.0)
        return [one.epoch for one in self.node.reports if isinstance(one, m.StripesComplete)]

    def blocks(self) -> int:
        """How many blocks the operation uses, besides its sources."""
        self.node.store.take_returns()
        states = [self.node.node.state(hold.oid) for hold in self.sources]
        return len(self.node.store.leases) - states.count(STATE["SEALED"])

    def commit(self) -> Any:
        """The result as the process reads it."""
        self.node.from_manager(m.Commit(self.request.operation, 1, (0, 1)))
        return self.process.value(self.result.oid)


@pytest.mark.parametrize("then", ["nothing", "planned again", "forgotten"])
def test_end_of_a_fold_of_an_earlier_plan_is_ignored(node: NodeHarness, then: str) -> None:
    total = Sum(node, 2)
    total.plan(1)
    if then == "planned again":
        total.plan(2)
    elif then == "forgotten":
        node.from_manager(m.Forget(total.request.operation))
    assert total.folded() == {"nothing": [1], "planned again": [2], "forgotten": []}[then]
    assert total.blocks() == (then != "forgotten")
    if then != "forgotten":
        assert total.commit()[0] == 1 + 2


@pytest.mark.parametrize("folds", [True, False])
def test_block_of_an_earlier_plan_is_freed_after_its_thread_has_ended(
    node: NodeHarness, folds: bool
) -> None:
    """The operation is planned again while a thread folds a chunk, or between two chunks."""
    node.store.limit = 4 * BLOCK_BYTES  # a chunk pins half of that
    total = Sum(node, 6)
    total.plan(1)
    if not folds:
        assert total.folded() == []
    assert total.blocks() == 1
    total.plan(2)
    assert total.blocks() == 1 + folds
    while not total.folded():
        node.poll()
    assert total.folded() == [2]
    assert total.blocks() == 1
    assert total.commit()[0] == sum(range(7))


def test_plan_without_space_is_not_retried_in_each_turn(
    node: NodeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 1837668: each attempt spilled one object to restore another. That woke processes, these
    the node, and the node tried again: a hundred thousand times a second."""
    attempts = mock.Mock(wraps=operations.prepare)
    monkeypatch.setattr(operations, "prepare", attempts)
    total = Sum(node, 2)
    node.store.limit = 0
    begin = node.loop.now()
    total.plan(1)
    for _ in range(50):
        node.poll()
        node.loop.pass_time(0.004)
    tried = attempts.call_count
    assert tried == pytest.approx((node.loop.now() - begin) / MEMORY_POLL_S, abs=2)
    node.store.limit = 4 * BLOCK_BYTES
    node.loop.pass_time(MEMORY_POLL_S)
    node.poll()
    assert total.folded() == [1]
    node.loop.pass_time(10 * MEMORY_POLL_S)
    node.poll()
    assert attempts.call_count == tried + 1


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


def test_lost_sources_are_found_in_one_pass(
    cluster_node: NodeHarness, compared: type[Counted]
) -> None:
    """A host was lost that held thousands of them; each of them is given twice."""
    node = cluster_node
    process, holds = node.process(SLOT), []
    node.parts.imports.ask([ids.pack_id(OWNER, 1 << 33 | one) for one in range(200)], holds.extend)
    for _, asked in node.taken():
        node.receive(OWNER, ObjectReport(asked.object, asked.number, "ready", 8, holders=(1,)))
    node.lose(1)
    sources = [compared(hold.oid) for hold in holds] * 2
    result = process.draft()
    assert node.node_tasks.take(result.oid)
    node.reports.clear()
    compared.compared = 0
    ask = Collective([result.oid], [*sources], "reduce", "sum", 400, None, False)
    node.parts.operations.begin(ask, SLOT)
    (request,) = node.reports
    assert isinstance(request, m.ReduceRequested)
    assert request.ready == ()
    assert compared.compared < 20 * len(sources)


def test_alltoall_destinations_are_found_without_a_search(
    cluster_node: NodeHarness, compared: type[Counted]
) -> None:
    """Every other column stays on the node that asks, which is no other node."""
    node = cluster_node
    process = node.process(SLOT)
    columns = 400
    holds = [process.put(column) for column in range(columns)]
    destinations = tuple(compared(index % 2) for index in range(columns))
    ask = Collective([], [hold.oid for hold in holds], "alltoall", "sum", columns, None, False)
    commit = m.Commit(1, 1, tuple(range(columns)))
    msgspec.structs.force_setattr(commit, "destinations", destinations)
    compared.compared = 0
    operations.placed(node.cluster.plan_runner, ask, commit)
    assert compared.compared < 20 * columns
    copies = [node.parts.exports.copies_of(hold.oid) for hold in holds]
    assert copies == [(), (1,)] * (columns // 2)
