"""What is remembered of a Group that has ended without a member that died: by which tasks, how
long, and by the next planner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from hoplite_mp._planner.group_members import TASKS_MAX
from hoplite_mp._planner.groups import GroupRegistry
from hoplite_mp._planner.tombstones import ENDED_TASKS_MAX, Tombstones
from hoplite_mp._planner.topology import Topology
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol import reports as r
from hoplite_mp._protocol.groups import GroupEnd


def task(number: int) -> bytes:
    return number.to_bytes(16, "little")


RUN = 0, 1, 1, 0


@dataclass
class World:
    """Two nodes; every member is a process of its own, that of task `t` at first in slot `t`."""

    groups: GroupRegistry = field(default_factory=lambda: GroupRegistry(8, Topology()))
    slots: int = 100
    generation: int = 0
    board: int = 0
    shown: dict[int, m.GroupMembers] = field(default_factory=dict)  # by node
    ends: list[GroupEnd] = field(default_factory=list)
    asked: list[tuple[int, bytes]] = field(default_factory=list)  # (node, task)
    given_up: list[tuple[int, int]] = field(default_factory=list)  # (slot, rank)

    def take(self, sends: list[tuple[int, Any]]) -> Any:
        """The answer to a join, if there is one."""
        answer = None
        for node, message in sends:
            if isinstance(message, m.GroupMembers):
                self.shown[node] = message
                self.generation = message.generation
            elif isinstance(message, m.GroupClosed):
                self.shown.pop(node, None)
                if message.end is not None:
                    self.ends.append(message.end)
            elif isinstance(message, m.GroupTasksAsked):
                self.asked += [(node, one) for one in message.tasks]
            elif isinstance(message, m.GroupGivenUp):
                self.given_up.append((message.client, message.rank))
            else:
                answer = message
        return answer

    def join(
        self,
        who: int,
        slot: int,
        rank: int | None = None,
        size: int = 3,
        tries: int = 0,
        team: int = 0,
    ) -> Any:
        about: Any = slot, who % 2, slot, 1, "g", size, rank, 64, task(who) if who else b"", 0, ()
        about += tries, task(team) if team else b""
        return self.take(self.groups.join(m.GroupJoinRequested(*about)))

    def leave(self, who: int, slot: int, rank: int) -> None:
        self.take(self.groups.leave(m.GroupLeft("g", self.generation, rank, who % 2, slot, 1)))

    def die(self, who: int, slot: int) -> None:
        self.take(self.groups.lose_client(who % 2, slot, 1))

    def form(self, *whos: int) -> None:
        for rank, who in enumerate(whos):
            assert isinstance(self.join(who, who, rank, len(whos)), m.GroupJoined)


def ended(answer: Any) -> bool:
    return isinstance(answer, m.GroupRefused) and answer.error == "ended"


@pytest.mark.parametrize("dies", ["first", "between", "last"])
def test_who_died_is_refused_when_the_others_have_left(dies: str) -> None:
    world = World()
    world.form(1, 2, 3)
    order = {"first": "xab", "between": "axb", "last": "abx"}[dies]
    for one in order:
        if one == "x":
            world.die(3, 3)
        else:
            world.leave(*{"a": (1, 1, 0), "b": (2, 2, 1)}[one])
    assert ended(world.join(3, 33, 2))
    assert ended(world.join(3, 34, None)), "tried again once more"
    assert isinstance(world.join(1, 1, 0), m.GroupJoined), "who has left may use the name again"
    assert isinstance(world.join(3, 35, 2), m.GroupJoined), "where it is, this one is waited for"


def test_others_may_use_the_name_and_the_late_one_does_not_take_their_rank() -> None:
    world = World()
    world.form(1, 2, 3)
    world.die(3, 3)
    world.leave(1, 1, 0)
    world.leave(2, 2, 1)
    assert isinstance(world.join(4, 4, 0), m.GroupJoined)
    assert ended(world.join(3, 33, 2))
    assert isinstance(world.join(5, 5, 2), m.GroupJoined)
    assert isinstance(world.join(0, 6, 1), m.GroupJoined), "a thread of a driver"


def test_when_nobody_has_left_they_form_it_anew() -> None:
    world = World()
    world.form(1, 2, 3)
    for who in (1, 2, 3):
        world.die(who, who)
    world.form(1, 2, 3)


def test_who_came_back_and_left_is_not_refused() -> None:
    world = World()
    world.form(1, 2, 3)
    world.die(3, 3)
    assert isinstance(world.join(3, 33, 2), m.GroupJoined)
    for who, slot, rank in ((1, 1, 0), (2, 2, 1), (3, 33, 2)):
        world.leave(who, slot, rank)
    assert isinstance(world.join(3, 34, 2), m.GroupJoined)


def test_a_group_that_never_was_whole_is_not_over() -> None:
    world = World()
    world.join(1, 1, 0)
    world.join(2, 2, 1)
    world.die(2, 2)
    world.leave(1, 1, 0)
    assert isinstance(world.join(2, 22, 1), m.GroupJoined)


def test_a_host_that_is_lost() -> None:
    """Its tasks are tried again elsewhere, under the same ids."""
    world = World()
    world.form(2, 1, 4)
    world.take(world.groups.lose_node(1))
    world.leave(2, 2, 0)
    world.leave(4, 4, 2)
    about = 7, 0, 7, 1, "g", 3, 1, 64, task(1)
    assert ended(world.take(world.groups.join(m.GroupJoinRequested(*about))))


@pytest.mark.parametrize("when", ["before all", "after the death", "after the end"])
def test_the_next_planner_knows_it_from_the_nodes(when: str) -> None:
    world = World()
    world.form(1, 2, 3)

    def next_planner(here: dict[int, list[int]]) -> None:
        ranks = {1: 0, 2: 1, 3: 2}
        held = [
            r.GroupHeld(node, world.shown[node], tuple((ranks[w], w, 1) for w in here[node]))
            for node in sorted(world.shown)
        ]
        world.groups = GroupRegistry(8, Topology())
        world.groups.remember(world.ends)
        world.take(world.groups.restore(held, [], range(100)))

    if when == "before all":
        next_planner({0: [2], 1: [1, 3]})
    world.die(3, 3)
    if when == "after the death":
        next_planner({0: [2], 1: [1]})
    world.leave(1, 1, 0)
    world.leave(2, 2, 1)
    assert world.ends, "every node that had a member is told, for the next planner"
    if when == "after the end":
        next_planner({})
    assert ended(world.join(3, 33, 2))


@pytest.mark.parametrize("died", [True, False])
def test_what_happened_while_there_was_no_planner(died: bool) -> None:
    world = World()
    world.form(1, 2, 3)
    first = r.GroupHeld(0, world.shown[0], (), (1,))
    other = r.GroupHeld(1, world.shown[1], (), (0, 2), (2,) if died else ())
    world.groups = GroupRegistry(8, Topology())
    world.take(world.groups.restore([first, other], [], range(100)))
    assert ended(world.join(3, 33, 2)) == died


def test_what_is_forgotten() -> None:
    ends = Tombstones()
    for number in range(ENDED_TASKS_MAX + 1):
        ends.add(GroupEnd("g", number + 1, (task(number),), (task(number),), (RUN,)))
    assert not ends.refusal("g", task(0), ())
    assert ends.refusal("g", task(1), ())
    assert ends.refusal("g", task(ENDED_TASKS_MAX), ())
    assert not ends.refusal("h", task(1), ())
    world = World()
    world.form(1, 2)
    for number in range(10, 10 + 3 * TASKS_MAX):
        world.die(number - 1 if number > 10 else 2, number - 1 if number > 10 else 2)
        assert isinstance(world.join(number, number, None, 2), m.GroupJoined)
    assert len(world.groups.groups["g"].tasks) == TASKS_MAX
    assert len(world.groups.groups["g"].dead) <= TASKS_MAX
