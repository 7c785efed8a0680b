"""Large calls of Groups that engines commit by votes: the compiled machine, stepped in every order.

The nodes, and what Python does beside them, are those of test_coll_calls.py. Here Python also
begins to move a call by a plan, votes when all nodes have begun the same one, and names a result.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoplite_mp import _engine, _tasks
from tests.support.engine_calls import (
    ALLREDUCE,
    BARRIER,
    BOARD,
    FIRST,
    GROUP,
    PART,
    TAKEN,
    EngineNode,
    EngineRun,
    EngineWorld,
)

MOVED = _engine.COLL_MOVED
PLAN, OTHER = 641, 642


@pytest.fixture
def world() -> Any:
    made: list[EngineWorld] = []

    def make(*about: Any) -> EngineWorld:
        made.append(EngineWorld(*about))
        return made[-1]

    yield make
    for one in made:
        one.close()


def board(node: EngineNode) -> tuple[int, int]:
    """(calls that are over, result of the last one) as members see them."""
    *_, calls, result = _tasks.Board(node.host.node_tasks, BOARD).look()
    return calls, result


def begin(node: EngineNode, call: int, plan: int = PLAN) -> None:
    node.engine.coll_begin(GROUP, call, plan)
    node.step()


def vote(node: EngineNode, call: int, plan: int = PLAN, result: int = 0) -> None:
    node.engine.coll_vote(GROUP, call, plan)
    if result:
        node.engine.coll_result(GROUP, call, result)
    node.step()


def kinds(node: EngineNode) -> list[int]:
    return [event[0] for event in node.told]


def test_all_votes_commit_the_result(world: Any) -> None:
    all_ = world(3)
    all_.open(1, 4)
    for node in all_.nodes:
        begin(node, 4)
    all_.carry_all()
    for node in all_.nodes[:2]:
        vote(node, 4, result=70 + node.number)
    all_.carry_all()
    assert [board(node) for node in all_.nodes] == [(0, 0)] * 3
    vote(all_.nodes[2], 4)
    all_.carry_all()
    assert [board(node) for node in all_.nodes] == [(5, 70), (5, 71), (0, 0)], "one has no result"
    all_.nodes[2].engine.coll_result(GROUP, 4, 72)
    all_.nodes[2].step()
    assert board(all_.nodes[2]) == (5, 72)
    assert [node.told for node in all_.nodes] == [[(MOVED, GROUP, 4, b"")]] * 3


def test_a_group_that_has_ended_writes_nothing_on_the_board_of_another(world: Any) -> None:
    """The last vote may come while Python's word that the Group is over is on its way to the
    engine's thread, and its board may be another Group's by then."""
    all_ = world(2)
    all_.open(1, 4)
    for node in all_.nodes:
        begin(node, 4)
    all_.carry_all()
    for node in all_.nodes:
        vote(node, 4, result=70)
        _tasks.Board(node.host.node_tasks, BOARD).reset(2, GROUP + 1)
    all_.carry_all()
    assert [board(node) for node in all_.nodes] == [(0, 0)] * 2


def test_small_calls_before_and_after(world: Any) -> None:
    all_ = world(2)
    all_.open(1, 0)
    for call in (0, 2, 3):
        if call == 2:
            for node in all_.nodes:
                begin(node, 1)
                vote(node, 1, result=9)
            all_.carry_all()
        for node in all_.nodes:
            node.give(node.number, call, BARRIER)
        all_.carry_all()
    for node in all_.nodes:
        assert (board(node), node.board.done()) == ((2, 9), 4)
        assert kinds(node) == [FIRST, MOVED, FIRST]
        node.engine.coll_close(GROUP)
        node.step()
        assert node.told[-1][2] == 4


def test_after_a_voted_call_no_record_is_told(world: Any) -> None:
    all_ = world(2)
    all_.open(1, 0)
    for node in all_.nodes:
        node.give(node.number, 0, BARRIER)
    all_.carry_all()
    for node in all_.nodes:
        begin(node, 1)
        vote(node, 1, result=9)
    all_.carry_all()
    for node in all_.nodes:
        node.engine.coll_close(GROUP)
        node.step()
        assert node.told[-2:] == [(MOVED, GROUP, 1, b""), (TAKEN, GROUP, 2, b"")]


@pytest.mark.parametrize("first", [0, 1])
def test_who_moves_by_another_plan_yields(world: Any, first: int) -> None:
    all_ = world(3)
    all_.open(1, 0)
    order = [all_.nodes[first], all_.nodes[1 - first]]
    for node in order:
        begin(node, 0, PLAN + node.number)
    all_.carry_all()
    begin(all_.nodes[2], 0)
    all_.carry_all()
    assert [kinds(node) for node in all_.nodes] == [[TAKEN]] * 3
    assert [board(node)[0] for node in all_.nodes] == [0] * 3


def test_who_moves_while_another_gives_parts_yields(world: Any) -> None:
    for parts_first in (False, True):
        all_ = world(2)
        all_.open(1, 0)
        mover, giver = all_.nodes
        if parts_first:
            giver.give(1, 0, ALLREDUCE, np.zeros(2))
            all_.carry_all()
        begin(mover, 0)
        if not parts_first:
            giver.give(1, 0, ALLREDUCE, np.zeros(2))
        all_.carry_all()
        assert kinds(mover) == [TAKEN]
        assert kinds(giver) == [TAKEN, PART]


def test_a_small_part_after_the_call_was_begun_does_not_count(world: Any) -> None:
    """The member was interrupted, and makes another call; its first try counts."""
    all_ = world(2)
    all_.open(1, 0)
    first, second = all_.nodes
    begin(first, 0)
    first.give(0, 0, BARRIER)
    second.give(1, 0, BARRIER)
    all_.carry_all()
    assert kinds(first) == kinds(second) == [TAKEN, PART]
    assert [node.board.done() for node in all_.nodes] == [0, 0]


def test_only_what_somebody_waits_for_is_told_at_once(world: Any) -> None:
    for awaited in (False, True):
        all_ = world(2)
        all_.open(1, 0)
        for node in all_.nodes:
            begin(node, 0)
            node.engine.coll_result(GROUP, 0, 5, awaited)
            node.step()
        for node in all_.nodes:
            node.engine.coll_vote(GROUP, 0, PLAN)
            node.step()
        (frame,) = all_.nodes[0].out[-1:]
        second = all_.nodes[1]
        second.engine.coll_frame(GROUP, 0, *frame[2:])
        assert (second.engine.step(), second.engine.is_quiet()) == (awaited, not awaited)
        second.engine.coll_close(GROUP)  # what follows is told, and all that came before it
        assert (second.engine.step(), second.engine.is_quiet()) == (True, False)


def test_votes_for_two_plans_are_found_by_all(world: Any) -> None:
    all_ = world(2)
    all_.open(1, 0)
    for node, plan in zip(all_.nodes, (PLAN, OTHER), strict=True):
        vote(node, 0, plan, result=5)  # each had voted before it has heard of the other
    all_.carry_all()
    assert [kinds(node) for node in all_.nodes] == [[TAKEN]] * 2


def test_votes_and_parts_are_found_by_all(world: Any) -> None:
    all_ = world(2)
    all_.open(1, 0)
    vote(all_.nodes[0], 0, result=5)
    all_.nodes[1].give(1, 0, BARRIER)
    all_.carry_all()
    assert kinds(all_.nodes[0]) == [TAKEN]
    assert kinds(all_.nodes[1]) == [TAKEN, PART]


def test_who_has_voted_does_not_yield(world: Any) -> None:
    all_ = world(2)
    all_.open(1, 0)
    voter, other = all_.nodes
    vote(voter, 0, result=5)
    voter.engine.coll_yield(GROUP, 0)
    voter.step()
    assert not voter.told
    vote(other, 0, result=6)
    all_.carry_all()
    assert [board(node) for node in all_.nodes] == [(1, 5), (1, 6)]


def test_who_has_begun_yields_and_all_hear_it(world: Any) -> None:
    all_ = world(3)
    all_.open(1, 0)
    for node in all_.nodes:
        begin(node, 0)
    all_.carry_all()
    vote(all_.nodes[0], 0, result=5)
    all_.nodes[1].engine.coll_yield(GROUP, 0)
    all_.nodes[1].step()
    all_.carry_all()
    assert [kinds(node) for node in all_.nodes] == [[TAKEN]] * 3
    vote(all_.nodes[2], 0, result=5)  # Python had not heard yet
    all_.carry_all()
    assert [board(node)[0] for node in all_.nodes] == [0] * 3


def test_a_vote_counts_whatever_is_lost_or_late_before_it(world: Any) -> None:
    all_ = world(2)
    all_.open(1, 0)
    first, second = all_.nodes
    begin(first, 0)
    (begun,) = first.out
    vote(first, 0, result=5)
    first.out = first.out[1:]  # the link has lost the first frame
    begin(second, 0)
    vote(second, 0, result=6)
    all_.carry_all()
    all_.carry(begun)
    assert [board(node) for node in all_.nodes] == [(1, 5), (1, 6)]


def test_a_result_of_an_earlier_try_is_not_committed(world: Any) -> None:
    all_ = world(2)
    all_.open(1, 0)
    first, second = all_.nodes
    begin(first, 0)
    first.engine.coll_result(GROUP, 0, 5)
    for node in all_.nodes:
        node.engine.coll_close(GROUP)
        node.step()
    all_.open(2, 0)
    for node in all_.nodes:
        begin(node, 0)
    vote(first, 0)
    vote(second, 0, result=6)
    all_.carry_all()
    assert [board(node) for node in all_.nodes] == [(0, 0), (1, 6)]


def test_the_engine_votes_when_the_last_of_these_cells_is_full(world: Any) -> None:
    all_ = world(2)
    all_.open(1, 0)
    first, second = all_.nodes
    begin(first, 0)
    buffers = [bytearray(8), bytearray(8)]
    cells = [first.engine.cell(None, one) for one in buffers]
    first.engine.together(cells, (GROUP, 0, PLAN))
    first.engine.coll_result(GROUP, 0, 5)
    vote(second, 0, result=6)
    all_.carry_all()
    first.engine.advance(cells[0], 8)
    first.step()
    all_.carry_all()
    assert (board(first)[0], board(second)[0]) == (0, 0)
    first.engine.advance(cells[1], 8)
    first.step()
    all_.carry_all()
    assert [board(node) for node in all_.nodes] == [(1, 5), (1, 6)]
    assert kinds(first) == [MOVED, _engine.FILLED, _engine.FILLED]


def test_no_vote_for_cells_of_which_one_was_closed(world: Any) -> None:
    all_ = world(2)
    all_.open(1, 0)
    first, second = all_.nodes
    cells = [first.engine.cell(None, bytearray(8)) for _ in range(2)]
    first.engine.together(cells, (GROUP, 0, PLAN))
    first.engine.coll_result(GROUP, 0, 5)
    vote(second, 0, result=6)
    first.engine.close(cells[0])
    first.engine.advance(cells[1], 8)
    first.step()
    all_.carry_all()
    assert [board(node)[0] for node in all_.nodes] == [0, 0]


def test_the_engine_votes_at_once_where_nothing_is_to_come(world: Any) -> None:
    all_ = world(2)
    all_.open(1, 0)
    for node in all_.nodes:
        begin(node, 0)
        node.engine.together([], (GROUP, 0, PLAN))
        node.engine.coll_result(GROUP, 0, 5)
        node.step()
    all_.carry_all()
    assert [board(node) for node in all_.nodes] == [(1, 5)] * 2


def test_what_cannot_be_said_is_refused(world: Any) -> None:
    engine = world(1).nodes[0].engine
    for wrong in (engine.coll_begin, engine.coll_vote):
        with pytest.raises(ValueError, match="plan must not be 0"):
            wrong(GROUP, 0, 0)
    with pytest.raises(ValueError, match="result must not be 0"):
        engine.coll_result(GROUP, 0, 0)
    with pytest.raises(OverflowError):
        engine.coll_begin(GROUP, 0, 1 << 32)


class Voted(EngineRun):
    """As Played; some calls are large. Python begins them, votes once all members' nodes have begun
    the same one, and makes the result before or after its vote; or it cannot go on, and yields. A
    result's number is the version of the members who are in it."""

    def __init__(self, count: int, calls: int, chance: random.Random) -> None:
        super().__init__(count, calls, chance)
        self.large = {call for call in range(calls) if chance.random() < 0.6}
        self.begun: dict[int, int] = {}  # node -> the call that its Python moves
        self.voted: dict[int, int] = {}
        self.resulted: dict[int, int] = {}
        self.of_version = {1: tuple(range(count))}
        self.committed = 0
        self.opened = dict.fromkeys(range(count), 1)  # the version with which each engine is open

    def hear(self, node: EngineNode) -> None:
        for event in node.told:
            if event[0] == MOVED:
                assert self.owned[node.number], "TAKEN came first"
                assert event[2] >= self.decided[node.number]
                self.decided[node.number] = event[2] + 1
                self.committed += 1
        super().hear(node)

    def read(self, number: int) -> None:
        node, call = self.world.nodes[number], self.next[number]
        calls, version = board(node)
        if calls == call + 1:
            assert self.voted.get(number) == call
            self.over(number, call, self.of_version[version])
        else:
            super().read(number)

    def choices(self) -> list[Any]:
        found = super().choices()
        for number in sorted(self.alive & self.members):
            call = self.next[number]
            if self.begun.get(number) != call or not self.owned[number]:
                continue
            places = self.of_version[self.opened[number]]
            moved = all(self.begun.get(n, -1) >= call or self.next[n] > call for n in places)
            if moved and self.voted.get(number) != call:
                found.append(("vote", number))
            if self.resulted.get(number) != call:
                found.append(("result", number))
            if self.voted.get(number) != call and self.chance.random() < 0.05:
                found.append(("fail", number))
        return found

    def do(self, what: tuple[Any, ...]) -> None:
        kind, *about = what
        nodes = self.world.nodes
        if kind == "call" and self.next[about[0]] in self.large and self.chance.random() < 0.9:
            (number,) = about
            call = self.next[number]
            self.given[number] = self.asked[number] = call
            if self.owned[number]:
                self.begun[number] = call
                begin(nodes[number], call, PLAN if self.chance.random() < 0.95 else OTHER)
        elif kind == "vote":
            (number,) = about
            self.voted[number] = self.next[number]
            vote(nodes[number], self.next[number])
        elif kind == "result":
            (number,) = about
            self.resulted[number] = self.next[number]
            nodes[number].engine.coll_result(GROUP, self.next[number], self.opened[number])
            nodes[number].step()
        elif kind == "fail":
            (number,) = about
            nodes[number].engine.coll_yield(GROUP, self.next[number])
            nodes[number].step()
        else:
            super().do(what)
            return
        for number in sorted(self.alive):
            self.hear(nodes[number])
            if number in self.members:
                self.read(number)

    def decide(self) -> None:
        before = dict(self.owned)
        super().decide()
        for number, owned in self.owned.items():
            if owned and not before[number]:
                self.opened[number] = self.version
                self.of_version[self.version] = tuple(sorted(self.members))

    def known(self, call: int) -> tuple[int, ...]:
        for number in self.alive:
            calls, version = board(self.world.nodes[number])
            if calls == call + 1:
                return self.of_version[version]
        return super().known(call)


@settings(max_examples=50, deadline=None)
@given(count=st.integers(2, 5), calls=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_any_order_with_freezes_failures_and_deaths(count: int, calls: int, seed: int) -> None:
    played = Voted(count, calls, random.Random(seed))
    try:
        played.play()
    finally:
        played.world.close()


def test_the_orders_have_voted_calls_in_them() -> None:
    committed = 0
    for seed in range(20):
        played = Voted(3, 8, random.Random(seed))
        try:
            played.play()
        finally:
            played.world.close()
        committed += played.committed
    assert committed > 50
