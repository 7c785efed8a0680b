"""Holds for refs that another engine carries, in virtual time: never, late and often loaded."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoplite_mp._common.object_states import DRIVER_SLOT, STATE
from hoplite_mp._node.objects.leases import SLACK_S, Deadlines
from hoplite_mp._protocol.local import HoldForeign
from tests.support.node_harness import NodeHarness

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 600.0


class Leases:
    """Objects that no process holds any more, but perhaps another engine carries refs to them."""

    def __init__(self, node: NodeHarness, count: int) -> None:
        self.node, self.loop = node, node.loop
        self.process = node.process(DRIVER_SLOT)
        self.holds = [self.process.put("value") for _ in range(count)]
        self.oids = [hold.oid for hold in self.holds]

    def pickled(self, index: int, number: int | None = 0) -> list[Any]:
        """A ref is pickled; returns the replies."""
        self.node.ask(DRIVER_SLOT, HoldForeign(self.oids[index], SECONDS), number)
        return [reply.value for _, reply in self.node.replies()]

    @property
    def held(self) -> set[int]:
        """Objects that are still there, after the process has let go of all."""
        self.holds.clear()
        self.process.client.collect()
        self.node.poll()
        alive = [self.node.node.state(oid) == STATE["SEALED"] for oid in self.oids]
        return {index for index, lives in enumerate(alive) if lives}


@pytest.fixture
def leases(make_node: Callable[..., NodeHarness]) -> Leases:
    return Leases(make_node(alone=True), 3)


def test_object_is_held_for_the_lease_time_only(leases: Leases) -> None:
    assert leases.pickled(1, None) == [SECONDS]
    leases.loop.pass_time(SECONDS - 0.001)
    assert leases.held == {1}
    leases.loop.pass_time(3 * SLACK_S)
    assert leases.held == set()
    assert not leases.loop.timers  # nothing is looked at when nothing is held


def test_repeated_pickling_extends_one_hold(leases: Leases) -> None:
    for _ in range(20):
        leases.loop.pass_time(100.0)
        assert leases.pickled(1) == []  # nobody waits for a reply
    assert len(leases.loop.timers) == 1
    leases.loop.pass_time(SECONDS - 0.001)
    assert leases.held == {1}
    leases.loop.pass_time(3 * SLACK_S)
    assert leases.held == set()


def test_missing_object_is_not_held(leases: Leases) -> None:
    assert leases.held == set()
    assert leases.pickled(2, None) == [0.0]
    assert not leases.loop.timers


def test_object_pickled_after_its_lease_is_held_again(leases: Leases) -> None:
    leases.pickled(1)
    leases.loop.pass_time(1000.0)
    leases.pickled(1)
    assert leases.held == {1}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300)), max_size=60))
def test_random_picklings_match_a_table_of_deadlines(steps: list[tuple[int, int]]) -> None:
    """Each as long as its latest pickling demands, and not much longer."""
    with contextlib.closing(NodeHarness(alone=True)) as node:
        leases = Leases(node, 5)
        latest: dict[int, float] = {}
        for index, pause in steps:
            leases.loop.pass_time(pause)
            leases.pickled(index)
            latest[index] = leases.loop.time
        now = leases.loop.time
        while latest:
            must = {one for one, at in latest.items() if now < at + SECONDS}
            may = {one for one, at in latest.items() if now <= at + SECONDS + 2 * SLACK_S}
            assert must <= leases.held <= may
            if not may:
                break
            leases.loop.pass_time(50.0)
            now = leases.loop.time
        assert leases.held == set()
        assert not leases.loop.timers


def test_deadline_heap_has_one_entry_for_each_key() -> None:
    deadlines = Deadlines()
    for until in range(100):
        deadlines.put_off(1, until)
    deadlines.put_off(2, 50)
    assert len(deadlines._heap) == len(deadlines) == 2
    assert deadlines.ended(98) == [2]
    deadlines.put_off(1, 10)  # earlier than before: it stays
    assert deadlines.ended(98.5) == []
    assert deadlines.ended(99) == [1]
    assert deadlines.next() is None
