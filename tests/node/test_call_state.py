"""The phases of a Group's call, and what the leading node decides in any order of events."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hoplite_mp._node.groups.call_state import (
    FOLLOWER,
    LEADER,
    CallEvent,
    CallPhase,
    CallState,
    IllegalCallEvent,
    PhaseOfCall,
)
from hoplite_mp._node.groups.leader import GroupLeader, SendToNode, WakeLater
from hoplite_mp._planner.link_speeds import HostRates
from hoplite_mp._protocol.group_calls import (
    GroupAttempt,
    GroupCommit,
    GroupDone,
    GroupPart,
    GroupSkip,
    GroupSlow,
    GroupStart,
    GroupSync,
)
from tests.support.node_group_calls import GENERATION, PART_ELEMENTS, group_members, group_part

HERE, NODES = 0, 4  # the leading node has rank 0


@pytest.mark.parametrize("table", [FOLLOWER, LEADER], ids=["follower", "leader"])
@given(events=st.lists(st.sampled_from(CallEvent), max_size=30))
def test_phase_any_event_follows_the_table_or_raises(table: Any, events: list[CallEvent]) -> None:
    phase = PhaseOfCall(table)
    for event in events:
        before = phase.now
        try:
            phase.take(event)
        except IllegalCallEvent:
            assert event not in table[before]
            assert phase.now is before
        else:
            assert phase.now is table[before][event]


@pytest.mark.parametrize("table", [FOLLOWER, LEADER], ids=["follower", "leader"])
def test_phase_table_ends_only_by_the_end_of_the_group(table: Any) -> None:
    assert set(table) == set(CallPhase)
    for before, row in table.items():
        for event, after in row.items():
            ends = event is CallEvent.CLOSED or before is CallPhase.ENDED
            assert (after is CallPhase.ENDED) == ends
        assert before is CallPhase.ENDED or row[CallEvent.CLOSED] is CallPhase.ENDED


def test_leader_moves_only_bytes_of_a_call_that_it_collects() -> None:
    before = {phase for phase, row in LEADER.items() if CallEvent.ATTEMPT in row}
    assert before == {CallPhase.COLLECTING, CallPhase.PLANNED}
    decides = {phase for phase, row in LEADER.items() if CallEvent.DECIDED in row}
    assert decides == before


@functools.cache
def part_of(rank: int, large: bool, other: bool) -> GroupPart:
    """What a rank gives. other: than the other ranks do."""
    if large:
        return group_part(rank, PART_ELEMENTS + other)
    return msgspec.structs.replace(group_part(rank, 10, "barrier", ""), pieces=())


class LeadingNode(RuleBasedStateMachine):
    """The component of the leading node. Other nodes are what hypothesis chooses; the leading node
    itself follows its own messages at once."""

    @initialize(large=st.booleans())
    def begin(self, large: bool) -> None:
        self.large, self.now = large, 0.0
        self.gave: dict[int, set[int]] = {}  # call -> ranks
        self.parts: dict[int, Any] = {}  # rank -> its last part
        self.decided: dict[int, tuple[Any, ...]] = {}
        self.go: GroupAttempt | None = None
        self.reported: set[int] = set()
        self.timers: list[Any] = []
        self.group = CallState(group_members(*range(NODES), version=1, first=True))
        self.leader = GroupLeader(self.group, HERE, engines=False)
        self.leader.rates.update({node: HostRates(1e8, 1e8) for node in range(NODES)})
        for rank in range(NODES):
            self.group.start(rank, 0)
        self.leader.changed()
        self.report(HERE)

    # -- what the node does --------------------------------------------------------------------

    def follow(self) -> None:
        own: deque[Any] = deque()
        while True:
            for one in self.leader.take():
                if isinstance(one, WakeLater):
                    self.timers.append(one.event)
                elif isinstance(one, SendToNode):
                    self.see(one.message)
                    own.extend([one.message] if one.node == HERE else [])
            if not own:
                return
            self.take(own.popleft())

    def see(self, message: Any) -> None:
        if isinstance(message, GroupAttempt):
            if message != self.go:
                self.go, self.reported = message, set()
            assert message.call == self.group.calls
            assert message.attempt >> 8 == self.group.members.version
        elif isinstance(message, GroupCommit):
            about = message.ranks, message.error, message.attempt
            assert self.decided.setdefault(message.call, about) == about, "decided twice"
            assert set(message.ranks) <= self.gave[message.call], "a rank has not called"

    def take(self, message: Any) -> None:
        if isinstance(message, GroupAttempt):
            self.group.begin(message)
        elif isinstance(message, GroupCommit) and message.call == self.group.calls:
            self.group.last, self.group.attempt, self.go = message, None, None
            self.group.end_call(message.call + 1)
            self.leader.committed()
            self.leader.lead()
        else:
            assert isinstance(message, GroupCommit | GroupSkip | GroupStart)

    # -- what may happen -----------------------------------------------------------------------

    @property
    def living(self) -> list[int]:
        return [node for node in self.group.members.nodes if node is not None]

    @rule(rank=st.integers(0, NODES - 1), other=st.booleans())
    def give(self, rank: int, other: bool) -> None:
        call, given = self.group.calls, self.gave.setdefault(self.group.calls, set())
        if rank not in self.living:
            return
        if rank not in given:
            self.parts[rank] = part_of(rank, self.large, other and rank == 2)
            given.add(rank)
        version = self.group.members.version
        about = {"generation": GENERATION, "version": version, "call": call}
        self.leader.part(rank, msgspec.structs.replace(self.parts[rank], **about))
        self.follow()

    @precondition(lambda self: self.go is not None)
    @rule(node=st.integers(0, NODES - 1), failure=st.sampled_from(["", "", "", "full", "gone"]))
    def moved(self, node: int, failure: str) -> None:
        go = self.go
        if go is None or node not in go.waits or node in self.reported:
            return
        self.reported.add(node)
        text = "it failed" if failure else ""
        done = GroupDone(GENERATION, go.call, go.attempt, text, 10**8, 10**8, failure)
        self.leader.done(node, done, self.now)
        self.follow()

    @precondition(lambda self: self.go is not None)
    @rule(node=st.integers(0, NODES - 1))
    def slowed(self, node: int) -> None:
        assert self.go is not None
        slow = GroupSlow(GENERATION, self.go.call, self.go.attempt, 10**6, 10**6, 0, 0)
        self.leader.slow(node, slow, self.now)
        self.follow()

    @precondition(lambda self: self.timers)
    @rule()
    def wake(self) -> None:
        self.now += 0.1
        self.timers.pop(0)(self.now)
        self.follow()

    @rule(dies=st.booleans())
    def change(self, dies: bool) -> None:
        nodes = list(self.group.members.nodes)
        if dies and len(self.living) > 2:
            nodes[max(self.living)] = None
        self.group.members = group_members(*nodes, version=self.group.members.version + 1)
        self.group.starts = dict.fromkeys(self.living, 0)
        self.leader.changed()
        self.report(HERE)

    @rule(node=st.integers(0, NODES - 1))
    def report(self, node: int) -> None:
        """A node says what it knows: no more than the leading one."""
        if node in self.living:
            about = GENERATION, self.group.members.version, self.group.calls, self.group.last
            self.leader.sync(node, GroupSync(*about))
            self.follow()

    # -- what must be --------------------------------------------------------------------------

    @invariant()
    def attempt_belongs_to_its_phase(self) -> None:
        if hasattr(self, "leader"):
            now = self.leader.phase.now
            assert (self.leader.attempt is not None) == (now is CallPhase.PLANNED)
            assert now is not CallPhase.COMMITTING, "the decision has not come back"
            assert set(self.decided) == set(range(self.group.calls))

    def teardown(self) -> None:
        """Whatever has happened, the call comes to an end when all have done their part."""
        if not hasattr(self, "leader"):
            return
        call = self.group.calls
        for node in self.living:
            self.report(node)
        for rank in self.living:
            self.give(rank, other=False)
        for _ in range(2 * NODES):
            for node in self.living:
                if self.group.calls == call:
                    self.moved(node, "")
        assert self.group.calls > call


LeadingNode.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLeadingNode = LeadingNode.TestCase


def test_failed_early_attempt_is_decided_when_all_members_have_called() -> None:
    """A node fails while its bytes move, and the last member has not called yet."""
    state = LeadingNode()
    state.begin(large=True)
    for node in (3, 0, 1, 2):
        state.report(node)
    for rank in (0, 1, 2):
        state.give(rank, other=False)
    state.wake()
    assert state.leader.attempt is not None
    assert state.leader.attempt.early
    state.moved(node=0, failure="gone")
    assert not state.decided
    state.teardown()
    assert state.decided
