"""Holds for refs that another engine carries, in virtual time: never, late and often loaded."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hoplite_mp._node.objects.leases import SLACK_S, Deadlines, ForeignLeases
from hoplite_mp._protocol.local import HoldForeign, Reply, Request
from tests.support.node_ports import ManualLoop

SECONDS = 600.0
SLOT = 3


class World:
    """A node's clock, its timers, and a store in which some objects are there."""

    def __init__(self, *objects: int) -> None:
        self.loop = ManualLoop(1000.0)
        self.objects = {*objects}
        self.replies: list[Any] = []
        self.asked = 0
        self.room = ForeignLeases(self.hold, self.loop, self.reply)

    def hold(self, oid: int) -> object:
        self.asked += 1
        return object() if oid in self.objects else None

    def reply(self, slot: int, reply: Reply) -> None:
        assert slot == SLOT
        self.replies.append((reply.number, reply.value))

    def pickled(self, oid: int, number: int = 0) -> None:
        self.room.asked(SLOT, Request(number, 0, HoldForeign(oid, SECONDS)))

    def pass_to(self, time: float) -> None:
        self.loop.pass_to(time)

    @property
    def held(self) -> set[int]:
        return {*self.room.holds}


def test_it_is_held_for_the_time_and_no_longer() -> None:
    world = World(1, 2)
    world.pickled(1, 7)
    assert world.replies == [(7, SECONDS)]
    world.pass_to(1000 + SECONDS - 0.001)
    assert world.held == {1}
    world.pass_to(1000 + SECONDS + 2 * SLACK_S)
    assert world.held == set()
    assert not world.loop.timers  # nothing is looked at when nothing is held


def test_many_picklings_are_one_hold_until_the_latest_end() -> None:
    world = World(1)
    for time in range(1000, 3000, 100):
        world.pass_to(time)
        world.pickled(1)
    assert world.asked == 1
    assert world.replies == []  # nobody waited for one
    assert len(world.loop.timers) == 1
    world.pass_to(2900 + SECONDS - 0.001)
    assert world.held == {1}
    world.pass_to(2900 + SECONDS + 2 * SLACK_S)
    assert world.held == set()


def test_what_is_gone_is_not_held() -> None:
    world = World(1)
    world.pickled(2, 5)
    assert world.replies == [(5, 0.0)]
    assert not world.held
    assert not world.loop.timers


def test_one_pickled_again_after_its_time_is_held_again() -> None:
    world = World(1)
    world.pickled(1)
    world.pass_to(2000)
    assert not world.held
    world.pickled(1)
    assert world.asked == 2
    assert world.held == {1}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300)), max_size=60))
def test_as_a_table_of_latest_picklings_says(steps: list[tuple[int, int]]) -> None:
    """Each object is held as long as its latest pickling demands, and not much longer."""
    world = World(*range(5))
    latest: dict[int, float] = {}
    for oid, pause in steps:
        world.pass_to(world.loop.time + pause)
        world.pickled(oid)
        latest[oid] = world.loop.time
        must = {one for one, at in latest.items() if world.loop.time < at + SECONDS}
        may = {one for one, at in latest.items() if world.loop.time <= at + SECONDS + 2 * SLACK_S}
        assert must <= world.held <= may
    world.pass_to(world.loop.time + SECONDS + 2 * SLACK_S)
    assert not world.held
    assert not world.loop.timers


def test_the_heap_has_one_entry_for_each_key() -> None:
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
