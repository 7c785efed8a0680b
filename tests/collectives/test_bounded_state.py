"""The state of bounded allreduces: ranks that are late, die and come back, in any order of events.

The property: all ranks that finish a call get the same value, which is the sum of the arrays of the
contributors; and every living rank finishes every call.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoplite_mp._group.bounded_calls import (
    ArrayWork,
    BoundedCalls,
    BoundedRequest,
    Finish,
    Post,
    SendReport,
)
from hoplite_mp.errors import PeerLostError

ITEMS = 11
OPERATION = ArrayWork(
    cut=lambda array, begin, end: array[begin:end].copy(),
    size=len,
    fold=lambda op, arrays: np.sum(arrays, axis=0),
    join=np.concatenate,
)


def array_of(call: int, rank: int) -> Any:
    return np.arange(ITEMS) + (1000 * call << rank)


class Member:
    """A living rank: its state, its undelivered messages and its finished calls."""

    def __init__(self, rank: int) -> None:
        self.core = BoundedCalls(rank, OPERATION)
        self.inbox: dict[int, deque[Any]] = {}  # by source
        self.made: list[Finish] = []
        self.entered: Any = None  # its report in the round
        self.over: Any = None  # the reports of the round that it has not processed
        self.left = 0  # calls that its program still makes


class Ranks:
    """A Group whose messages are delivered, and whose rounds take place, in a random order."""

    def __init__(self, size: int, num: int, calls: int, rng: random.Random, gathers: bool) -> None:
        self.rng, self.num, self.calls, self.gathers = rng, num, calls, gathers
        self.now = 0.0
        self.members = {rank: Member(rank) for rank in range(size)}
        self.slow: set[int] = set()
        self.dead = 0
        self.results: dict[int, tuple[Any, Any]] = {}
        for member in self.members.values():
            member.left = calls

    def ask(self, rank: int) -> None:
        member = self.members[rank]
        member.left -= 1
        request = BoundedRequest("sum", "sum", self.num, 1.0, self.gathers)
        member.core.ask(request, array_of(member.core.next, rank), self.now)

    def can_ask(self, rank: int) -> bool:
        member = self.members[rank]
        core = member.core
        return core.request is None and core.state is not None and core.next < self.calls

    def act(self, rank: int) -> None:
        """Carries out the actions of a rank."""
        member = self.members[rank]
        member.core.lead(self.now)
        member.core.turn(lambda call, other: not self._pending(rank, other))
        member.core.lead(self.now)
        member.core.turn(lambda call, other: not self._pending(rank, other))
        for action in member.core.take():
            if isinstance(action, Finish):
                member.made.append(action)
                self.check(rank, action)
            elif action.to in self.members:
                self.members[action.to].inbox.setdefault(rank, deque()).append(action)

    def _pending(self, rank: int, source: int) -> bool:
        return source in self.members or bool(self.members[rank].inbox.get(source))

    def check(self, rank: int, action: Finish) -> None:
        if action.error is not None:
            assert isinstance(action.error, PeerLostError), action.error
            assert self.dead
            return
        ended = action.ended
        assert ended is not None
        assert ended.plan is not None
        members = ended.plan.members
        assert len(members) >= min(self.num, len(ended.plan.owners))
        arrays = [array_of(action.call, one) for one in members]
        if self.gathers:
            np.testing.assert_array_equal(action.value, arrays)
        else:
            np.testing.assert_array_equal(action.value, np.sum(arrays, axis=0))
        first = self.results.setdefault(action.call, (members, action.value))
        assert first[0] == members

    # -- events --------------------------------------------------------------------------------

    def deliver(self, rank: int, source: int) -> None:
        member = self.members[rank]
        one = member.inbox[source].popleft()
        if isinstance(one, Post):
            member.core.receive(source, *one[1:])
        else:
            assert isinstance(one, SendReport)
            member.core.receive_report(source, one.report, self.now)
        self.act(rank)

    def enter(self, rank: int) -> None:
        member = self.members[rank]
        member.entered = member.core.report()
        self.end_round()

    def end_round(self) -> None:
        """Ends the round if all living ranks have entered it."""
        if not self.members or any(one.entered is None for one in self.members.values()):
            return
        reports = {rank: one.entered for rank, one in self.members.items()}
        if all(one.state is None for one in reports.values()):
            self.results.clear()  # nobody knows earlier calls
        for one in self.members.values():
            one.over, one.entered = reports, None

    def conclude(self, rank: int) -> None:
        member = self.members[rank]
        reports, member.over = member.over, None
        member.core.decide(reports, self.now)
        self.act(rank)

    def kill(self, rank: int) -> None:
        del self.members[rank]
        self.dead += 1
        for member in self.members.values():
            queue = member.inbox.get(rank, deque())
            for _ in range(self.rng.randint(0, len(queue))):
                queue.pop()
        self.end_round()

    def replace(self, rank: int) -> None:
        self.members[rank] = Member(rank)

    # -- the schedule ----------------------------------------------------------------------------

    def steps(self, lazy: bool) -> list[Any]:
        """What may happen next. lazy: slow ranks do nothing, and nothing reaches them."""
        found: list[Any] = []
        alive = sum(1 << rank for rank in self.members)
        is_round = any(one.entered is not None for one in self.members.values())
        for rank, member in self.members.items():
            slow = lazy and rank in self.slow
            if member.over is not None:
                found.append((self.conclude, rank))
                continue
            if member.entered is not None:
                continue
            if is_round or member.core.wants_round(alive):
                found.append((self.enter, rank))
            for source, queue in member.inbox.items():
                if queue and not slow and not (lazy and source in self.slow):
                    found.append((self.deliver, rank, source))
            due = member.core.due()
            if due is not None and due <= self.now:
                found.append((self.act, rank))
            if self.can_ask(rank) and not slow:
                found.append((self.ask_and_act, rank))
        return found

    def ask_and_act(self, rank: int) -> None:
        self.ask(rank)
        self.act(rank)

    def run(self, steps: int, deaths: int, returns: bool) -> None:
        size, rng = len(self.members), self.rng
        for _ in range(steps):
            if rng.random() < 0.02:
                self.slow = {rank for rank in range(size) if rng.random() < 0.3}
            if rng.random() < 0.05:
                self.now += 0.3
            if deaths and len(self.members) > 1 and rng.random() < 0.02:
                deaths -= 1
                self.kill(rng.choice(sorted(self.members)))
            gone = sorted(set(range(size)) - set(self.members))
            if returns and gone and rng.random() < 0.02:
                self.replace(rng.choice(gone))
            some = self.steps(lazy=True)
            if some:
                event, *about = rng.choice(some)
                event(*about)
        for _ in range(5000):  # now nothing is slow, and all calls come to their end
            some = self.steps(lazy=False)
            if all(one.core.next >= self.calls for one in self.members.values()):
                return
            if some:
                event, *about = rng.choice(some)
                event(*about)
            self.now += 0.05
        raise AssertionError(f"stuck: { {r: m.core.state for r, m in self.members.items()} }")


@pytest.mark.parametrize("gathers", [False, True])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32), size=st.integers(1, 6), num=st.integers(1, 6),
    deaths=st.integers(0, 3), returns=st.booleans(),
)  # fmt: skip
def test_bounded_calls_of_late_and_dying_ranks_give_equal_sums_everywhere(
    gathers: bool, seed: int, size: int, num: int, deaths: int, returns: bool
) -> None:
    ranks = Ranks(size, min(num, size), 6, random.Random(seed), gathers)
    ranks.run(600, deaths, returns)
    if not deaths:
        assert sorted(ranks.results) == list(range(6))
        for member in ranks.members.values():
            assert [one.call for one in member.made] == list(range(6))


def test_deadline_that_passes_after_the_leader_has_acted_is_not_missed() -> None:
    cores = [BoundedCalls(rank, OPERATION) for rank in range(2)]
    reports = {core.rank: core.report() for core in cores}
    for core in cores:
        core.decide(reports, 0.0)
    leader = cores[0]
    leader.ask(BoundedRequest("sum", "sum", 2, 1.0), array_of(0, 0), 0.0)
    leader.turn()
    leader.lead(0.9)
    assert leader.wakes_at() == 1.0  # also if the process stands still here until 2.0
    leader.lead(2.0)
    assert leader.wakes_at() is None  # it waits for the other rank, because num is 2
