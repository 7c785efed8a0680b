"""A registry of Groups whose members on two nodes join, leave, die and come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp._planner.groups import GroupRegistry
from hoplite_mp._planner.link_speeds import LinkSpeeds
from hoplite_mp._protocol import messages as m

if TYPE_CHECKING:
    from hoplite_mp._protocol.groups import GroupEnd


def task_id(number: int) -> bytes:
    return number.to_bytes(16, "little")


@dataclass
class RegistryWorld:
    """Two nodes; every member is a process of its own, that of task `t` at first in slot `t`."""

    groups: GroupRegistry = field(default_factory=lambda: GroupRegistry(8, LinkSpeeds()))
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
            elif isinstance(message, m.GroupTasksQuery):
                self.asked += [(node, one) for one in message.tasks]
            elif isinstance(message, m.GroupMemberRemoved):
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
        about: Any = (
            slot,
            who % 2,
            slot,
            1,
            "g",
            size,
            rank,
            64,
            task_id(who) if who else b"",
            0,
            (),
        )
        about += tries, task_id(team) if team else b""
        return self.take(self.groups.join(m.GroupJoinRequested(*about)))

    def leave(self, who: int, slot: int, rank: int) -> None:
        self.take(self.groups.leave(m.GroupLeft("g", self.generation, rank, who % 2, slot, 1)))

    def die(self, who: int, slot: int) -> None:
        self.take(self.groups.lose_client(who % 2, slot, 1))

    def form(self, *whos: int) -> None:
        for rank, who in enumerate(whos):
            assert isinstance(self.join(who, who, rank, len(whos)), m.GroupJoined)


def is_refused_as_ended(answer: Any) -> bool:
    return isinstance(answer, m.GroupRefused) and answer.error == "ended"


def end_tasks(world: RegistryWorld, *whos: int) -> None:
    world.take(world.groups.tasks_over(m.GroupTasksEnded(0, tuple(task_id(who) for who in whos))))


def member_ranks(world: RegistryWorld) -> list[int]:
    return sorted(world.groups.groups["g"].members) if world.groups.groups else []
