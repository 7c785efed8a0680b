"""One Group as the planner knows it: its members, and what is remembered after its end.

It holds the data of one Group, and the changes that concern this Group alone. `groups.py` decides.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hoplite_mp._protocol.fields import RANKS_MAX
from hoplite_mp._protocol.groups import NO_TASK, Founder, GroupEnd

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hoplite_mp._planner.rejoin import Holder, Mates
    from hoplite_mp._protocol.groups import Run
    from hoplite_mp._protocol.messages import GroupMembers

__all__ = [
    "NO_REQUEST",
    "ON_ADMIT",
    "ON_JOIN",
    "TASKS_MAX",
    "GroupRecord",
    "Identity",
    "MemberRecord",
    "MemberStanding",
    "Phase",
]

TASKS_MAX = 2 * RANKS_MAX  # of former members that one group remembers
NO_REQUEST = -1  # of a member whose join was answered by a planner before this one


class Identity(NamedTuple):
    """One use of one client slot of one node: a process that is never taken for the next one."""

    node: int
    client: int
    generation: int


class MemberStanding(enum.Enum):
    ALIVE = "the others count on it"
    JOINING = "it waits to be admitted"


class Phase(enum.Enum):
    FORMING = "some rank has never been held"
    FORMED = "all ranks were held at one time"


# The standing of a new member, and of a member that is admitted. Without a row nothing changes.
ON_JOIN = {Phase.FORMING: MemberStanding.ALIVE, Phase.FORMED: MemberStanding.JOINING}
ON_ADMIT = {MemberStanding.JOINING: MemberStanding.ALIVE}


@dataclass(slots=True)
class MemberRecord:
    """The holder of a rank. `request`: recognises a request that arrives twice. `mates`: the tasks
    that it came back to. `since`: the first version of the members that shows it; 0: none yet.
    `team`: the `spmd` call whose peer it is."""

    identity: Identity
    request: int
    standing: MemberStanding
    task: bytes = NO_TASK
    tries: int = 0
    mates: Mates = None
    since: int = 0
    team: bytes = NO_TASK

    @property
    def run(self) -> Run:
        return (*self.identity, self.tries)


@dataclass(slots=True)
class GroupRecord:
    """A group. Invariant: 0 <= rank < size for every rank in `members`."""

    name: str
    generation: int
    board: int
    size: int
    phase: Phase = Phase.FORMING
    members: dict[int, MemberRecord] = field(default_factory=dict)  # by rank
    nodes: set[int] = field(default_factory=set)  # those that have had members
    shown: GroupMembers | None = None  # the version that these nodes were sent last
    versions: int = 0  # versions that were sent so far
    whole: int = 0  # the first of them that has shown it formed; 0: none yet
    tasks: dict[bytes, Run] = field(default_factory=dict)  # of present and former members
    dead: dict[bytes, None] = field(default_factory=dict)  # of those that died and are not back
    left: bool = False  # has any member left of its own accord?
    open: bool = False  # was a driver a member?
    parent: int = 0  # generation of the group whose members found this one; 0: there is none
    founders: tuple[Founder, ...] = ()  # those members, by their rank in this group
    come: int = 0  # ranks that have ever joined, as bits
    # Until it is formed: rank -> (task, team) of its last member, even if the member is gone.
    holders: dict[int, Holder] = field(default_factory=dict)

    def take(self, rank: int, member: MemberRecord) -> None:
        """Adds a member."""
        self.members[rank] = member
        self.holders[rank] = member.task, member.team
        self.come |= 1 << rank
        self.open = self.open or not member.task
        if member.task:
            self.dead.pop(member.task, None)
            self.tasks[member.task] = member.run
            if len(self.tasks) > TASKS_MAX:
                del self.tasks[next(iter(self.tasks))]

    def lose(self, ranks: Iterable[int]) -> None:
        """These members have died."""
        for rank in ranks:
            self.die(self.members.pop(rank).task)

    def die(self, task: bytes) -> None:
        """A member died without leaving; its task may be tried again."""
        if task:
            self.dead[task] = None
            if len(self.dead) > TASKS_MAX:
                del self.dead[next(iter(self.dead))]

    def hear(self, left: Iterable[int], died: Iterable[int]) -> None:
        """A node reports which ranks there have left or died, of the members last shown."""
        self.left = self.left or not set(left) <= set(died)
        for rank in died:
            self.die(self.task_at(rank))

    def task_at(self, rank: int) -> bytes:
        """The task of the member that was last shown at that rank."""
        tasks = () if self.shown is None else self.shown.tasks
        return tasks[rank] if rank < len(tasks) else NO_TASK

    @property
    def vacated(self) -> dict[int, Holder]:
        """Of a group that is not formed: the free ranks whose last members were tasks, and these
        members. A group that is made from another one waits for its founders by another rule."""
        if self.phase is Phase.FORMED or self.founders:
            return {}
        return {
            rank: holder
            for rank, holder in self.holders.items()
            if holder[0] and rank not in self.members
        }

    @property
    def end(self) -> GroupEnd | None:
        """What is remembered of the group after its end; None: nothing."""
        if not self.tasks:
            return None
        tasks, runs = tuple(self.tasks), tuple(self.tasks.values())
        return GroupEnd(self.name, self.generation, tuple(self.dead), tasks, runs, self.open)

    def mask(self, standing: MemberStanding) -> int:
        """The ranks of that standing as bits."""
        return sum(1 << rank for rank, m in self.members.items() if m.standing is standing)

    def free_rank(self) -> int | None:
        """The lowest free rank."""
        return next((rank for rank in range(self.size) if rank not in self.members), None)
