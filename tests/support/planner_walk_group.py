"""What can happen to groups, against `NaiveGroup`."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from hoplite_mp._planner.groups import MemberStanding
from hoplite_mp._protocol import messages as m
from tests.support.planner_naive import NaiveGroup
from tests.support.planner_walk import (
    BOARDS_MAX,
    CLIENTS,
    LATE,
    NAMES,
    NODES,
    RANKS,
    RARELY,
    SIZES,
    USES,
    Walk,
)


class GroupWalk(Walk):
    """Joins, admissions and leavings."""

    @rule(
        node=NODES,
        client=CLIENTS,
        use=USES,
        name=NAMES,
        size=SIZES,
        rank=st.none() | st.none() | st.integers(-1, 3),
    )
    def group_join(
        self, node: int, client: int, use: int, name: str, size: int, rank: int | None
    ) -> None:
        self.requests += 1
        generation = max(1, self.gone.get((node, client), 0) + use)
        message = m.GroupJoinRequested(
            self.requests, node, client, generation, name, size, rank, members_max=3
        )
        sends = self.step(message)
        if node not in self.living or generation <= self.gone.get((node, client), 0):
            assert sends == []
        else:
            self.check_join(sends, message)

    def check_join(
        self, sends: list[tuple[int, m.ManagerToNode]], message: m.GroupJoinRequested
    ) -> None:
        group = self.groups.get(message.name)
        seats = {} if group is None else group.seats
        free = [rank for rank in range(message.size) if rank not in seats]
        wanted = message.rank if message.rank is not None else (free[0] if free else -1)
        possible = 1 <= message.size <= 3 and wanted in free
        possible &= group is None or group.size == message.size
        if group is None and len(self.groups) == BOARDS_MAX:
            possible = False
        node, answer = sends[-1]
        assert node == message.node
        if not possible:
            assert len(sends) == 1
            assert isinstance(answer, m.GroupRefused)
            assert answer.request == message.request
            return
        group = self.groups.setdefault(message.name, NaiveGroup(message.size))
        group.sit((message.node, message.client, message.client_generation), wanted)
        self.check_groups(sends[:-1])
        assert isinstance(answer, m.GroupJoined)
        assert (answer.request, answer.rank) == (message.request, wanted)
        assert answer.admitted == (wanted not in group.joining)
        assert self.step(message) == [(node, answer)]  # a doubled call has the same answer

    @rule(name=NAMES, rank=RANKS, late=LATE)
    def admit(self, name: str, rank: int, late: int) -> None:
        group = self.groups.get(name)
        if group is not None and not late:
            group.joining.discard(rank)
        generation = self.generations.get(name, 1) - late
        self.check_groups(self.step(m.GroupAdmitted(name, generation, rank)))

    @rule(name=NAMES, rank=RANKS, late=LATE, stranger=RARELY)
    def leave(self, name: str, rank: int, late: int, stranger: bool) -> None:
        group = self.groups.get(name)
        who = (0, 1, 1) if group is None else group.seats.get(rank, (0, 1, 1))
        node, client, client_generation = who[0], who[1], who[2] + stranger
        if group is not None and rank in group.seats and not late and not stranger:
            group.stand_up(rank)
        generation = self.generations.get(name, 1) - late
        message = m.GroupLeft(name, generation, rank, node, client, client_generation)
        self.check_groups(self.step(message))

    # ---- what always holds

    @invariant()
    def one_holder_per_rank_and_one_group_per_board(self) -> None:
        groups = self.planner.groups.groups
        assert set(groups) == set(self.groups)
        boards = [group.board for group in groups.values()]
        assert len(set(boards)) == len(boards)
        assert all(0 <= board < BOARDS_MAX for board in boards)
        for name, group in groups.items():
            alive, joining = group.mask(MemberStanding.ALIVE), group.mask(MemberStanding.JOINING)
            assert alive & joining == 0
            assert alive
            assert (alive, joining, group.shown.formed if group.shown else None) == (
                self.groups[name].masks()
            )
            holders = {rank: member.identity for rank, member in group.members.items()}
            assert holders == self.groups[name].seats
            assert all(node in self.living for node in group.nodes)
