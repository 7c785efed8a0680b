"""A random walk with a planner and its naive model: what all walks share, nodes and clients.

planner_walk_reduce.py and planner_walk_group.py add what can happen to collectives and to groups.
tests/planner/test_machine.py walks each alone, which comes deep, and both together. Doubled, late
and misdirected messages are as likely as proper ones. After every step the plan is the one that
the model expects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol import messages as m

if TYPE_CHECKING:
    from hoplite_mp._planner.step_result import StepResult
    from tests.support.planner_naive import NaiveGroup, NaiveOperation

# Weighted, so that walks of fifty steps come deep: the end of a node or a late message is rarer
# than what makes an operation or a group live on.
NODES = st.sampled_from([0, 0, 0, 1, 2])
HOST_IDS = (700, 701, 702)  # of nodes 0, 1, 2
CLIENTS = st.integers(1, 3)
USES = st.sampled_from([1, 1, 1, 0, 2])  # uses of a slot after the last that is known to be over
NAMES = st.sampled_from(["g", "g", "g", "h", "i"])
SIZES = st.sampled_from([2, 2, 2, 2, 1, 3, 4, 0])
RANKS = st.integers(0, 1) | st.integers(0, 2)
PICKS = st.integers(0, 7)  # an open operation; 7: one that is over
LATE = st.sampled_from([0, 0, 0, 1])
RARELY = st.sampled_from([False] * 5 + [True])
INDICES = st.integers(0, 3) | st.integers(0, 5)
BOARDS_MAX = 2
OPERATIONS_MAX = 3


class Walk(RuleBasedStateMachine):
    """One planner and its model, driven by the same events."""

    def __init__(self) -> None:
        super().__init__()
        self.planner = Planner(boards_max=BOARDS_MAX, operations_max=OPERATIONS_MAX)
        self.now = 0.0
        self.wake_at: float | None = None
        self.living: dict[int, int] = {}
        self.lives = 0
        self.operations: dict[int, NaiveOperation] = {}
        self.operation_ids = 0
        self.groups: dict[str, NaiveGroup] = {}
        self.generations: dict[str, int] = {}  # of the last group of that name that was seen
        self.gone: dict[tuple[int, int], int] = {}  # client slot -> highest generation gone
        self.requests = 0
        self.leaving: set[int] = set()  # nodes that wait for Leave
        self.asked_to_leave: set[int] = set()
        self.joined: list[int] = []  # host ids in order of their first joining: places are numbers

    # ---- what the tests do to a planner

    def step(
        self, message: m.NodeToManager, dies: int | None = None
    ) -> list[tuple[int, m.ManagerToNode]]:
        if dies is not None:
            del self.living[dies]
            self.leaving.discard(dies)
            self.asked_to_leave.discard(dies)
        return self.see(self.planner.step(message, self.now))

    def see(self, plan: StepResult) -> list[tuple[int, m.ManagerToNode]]:
        """Only the living are spoken to. Who may leave is noted here, and not passed on."""
        assert all(node in self.living for node, _ in plan.sends)
        deadlines = [op.deadline_at for op in self.operations.values() if not op.passed]
        self.wake_at = plan.wake_at
        if plan.wake_at is not None:
            assert plan.wake_at in deadlines
        for node, message in plan.sends:
            if isinstance(message, m.Leave):
                assert node in self.leaving
                assert (message.node, message.incarnation) == (node, self.living[node])
                self.leaving.discard(node)  # it is said once
        for _, message in plan.sends:
            if isinstance(message, m.GroupMembers):
                self.generations[message.name] = message.generation
        return [send for send in plan.sends if not isinstance(send[1], m.Leave)]

    def pick(self, number: int) -> int:
        open_ones = sorted(self.operations)
        if number == 7 or not open_ones:
            return max(0, self.operation_ids - OPERATIONS_MAX)
        return open_ones[number % len(open_ones)]

    # ---- nodes and clients

    @initialize()
    def begin(self) -> None:
        self.join(0)

    @rule(node=NODES, again=RARELY)
    def join(self, node: int, again: bool = False) -> None:
        if node in self.living and not again:
            return
        if node > len(self.joined):
            return  # a number cannot be had before the ones below it
        if node == len(self.joined):
            self.joined.append(HOST_IDS[node])
        self.lives += 1
        removed = (node,) if node in self.living else ()
        self.living.pop(node, None)
        self.living[node] = self.lives
        self.leaving.discard(node)
        self.asked_to_leave.discard(node)
        admitted, *sends = self.step(m.NodeJoined(HOST_IDS[node], self.lives, 2))
        assert admitted[0] == node
        answer = admitted[1]
        assert isinstance(answer, m.NodeAdmitted)
        assert (answer.node, answer.incarnation) == (node, self.lives)
        assert [one.node for one in answer.members] == list(self.living)
        others = [other for other in self.living if other != node]
        self.check_members_changed(sends[: len(others)], others, (node,), removed)
        sends = sends[len(others) :]
        if removed:
            self.end(node, sends)
        else:
            assert sends == []

    def check_members_changed(
        self,
        sends: list[tuple[int, m.ManagerToNode]],
        others: list[int],
        added: tuple[int, ...],
        removed: tuple[int, ...],
    ) -> None:
        assert [node for node, _ in sends] == others
        for _, message in sends:
            assert isinstance(message, m.MembersChanged)
            assert tuple(one.node for one in message.added) == added
            assert message.removed == removed

    @rule(node=NODES, late=st.booleans(), rarely=RARELY)
    def lose(self, node: int, late: bool, rarely: bool) -> None:
        if not late and not rarely:
            return
        incarnation = self.living.get(node, 0) - late
        if incarnation <= 0:
            return
        sends = self.step(m.NodeLost(node, incarnation), dies=None if late else node)
        if late:
            assert sends == []
            return
        others = list(self.living)
        self.check_members_changed(sends[: len(others)], others, (), (node,))
        self.end(node, sends[len(others) :])

    @rule(node=NODES)
    def late_join(self, node: int) -> None:
        if node in self.living:
            ((to, again),) = self.step(m.NodeJoined(HOST_IDS[node], self.living[node], 2))
            assert to == node
            assert isinstance(again, m.NodeAdmitted)
            assert self.step(m.NodeJoined(HOST_IDS[node], self.living[node] - 1, 2)) == []

    def end(self, node: int, sends: list[tuple[int, m.ManagerToNode]]) -> None:
        """The node is gone from the model too; `sends` is what the planner said of it."""
        sends = self.end_copies(node, sends)
        sends = self.end_operations(node, sends)
        self.gone = {slot: generation for slot, generation in self.gone.items() if slot[0] != node}
        for group in self.groups.values():
            group.seen_by.discard(node)
            group.stand_up(*[rank for rank, who in group.seats.items() if who[0] == node])
        self.check_groups(sends)

    def end_operations(
        self, node: int, sends: list[tuple[int, m.ManagerToNode]]
    ) -> list[tuple[int, m.ManagerToNode]]:
        """Checks what is about operations, and gives back the rest."""
        self.operations = {i: op for i, op in self.operations.items() if op.node != node}
        return sends

    def end_copies(
        self, node: int, sends: list[tuple[int, m.ManagerToNode]]
    ) -> list[tuple[int, m.ManagerToNode]]:
        """The same for copies."""
        return sends

    @rule(node=NODES, late=LATE, rarely=RARELY)
    def leave_cluster(self, node: int, late: int, rarely: bool) -> None:
        incarnation = self.living.get(node, 0) - late
        if not rarely or incarnation <= 0 or node in self.asked_to_leave:
            return
        if not late:
            self.leaving.add(node)
            self.asked_to_leave.add(node)
        assert self.step(m.NodeLeaving(node, incarnation)) == []

    @rule(node=NODES, client=CLIENTS, use=USES)
    def client_dies(self, node: int, client: int, use: int) -> None:
        generation = max(1, self.gone.get((node, client), 0) + use)
        if node in self.living:
            slot = (node, client)
            self.gone[slot] = max(generation, self.gone.get(slot, 0))
            for group in self.groups.values():
                group.stand_up(
                    *[r for r, w in group.seats.items() if w[:2] == slot and w[2] <= generation]
                )
        self.check_groups(self.step(m.ClientLost(node, client, generation)))

    def check_groups(self, sends: list[tuple[int, m.ManagerToNode]]) -> None:
        """Exactly the groups that have changed are told, to all their nodes."""
        expected: list[tuple[int, str, object]] = []
        for name, group in list(self.groups.items()):
            if not group.seats:
                expected += [(node, name, None) for node in group.seen_by]
                del self.groups[name]
            elif (group.masks(), group.former()) != group.shown:
                group.shown = group.masks(), group.former()
                expected += [(node, name, group.shown) for node in group.seen_by]
        told: list[tuple[int, str, object]] = []
        for node, message in sends:
            if isinstance(message, m.GroupClosed):
                told.append((node, message.name, None))
            else:
                assert isinstance(message, m.GroupMembers)
                masks = message.alive, message.joining, message.formed
                told.append((node, message.name, (masks, message.former)))
        assert sorted(told, key=str) == sorted(expected, key=str)

    def teardown(self) -> None:
        """When all nodes are gone nothing is left at all."""
        for node, incarnation in list(self.living.items()):
            self.planner.step(m.NodeLost(node, incarnation), self.now)
        assert not self.planner.reductions.operations
        assert self.planner.reductions.wake_at is None
        assert not self.planner.reductions._broadcasts
        assert not self.planner.copies.entries
        assert not self.planner.copies._busy
        assert not self.planner.groups.groups
        assert self.planner.membership.nodes == ()
