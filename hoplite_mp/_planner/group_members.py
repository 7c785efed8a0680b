"""One Group as the planner knows it: its members, and what is remembered after its end.

It holds the data of one Group, and the changes that concern this Group alone. `groups.py` decides.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from hoplite_mp._common import ids
from hoplite_mp._protocol.fields import RANKS_MAX
from hoplite_mp._protocol.groups import ASKED_MAX, NO_TASK, Founder, GroupEnd, GroupTasksAsked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from hoplite_mp._planner.step_result import Send
    from hoplite_mp._protocol.groups import GroupTasksOver, Run
    from hoplite_mp._protocol.messages import GroupMembers

__all__ = [
    "NO_REQUEST",
    "ON_ADMIT",
    "ON_JOIN",
    "TASKS_MAX",
    "GroupRecord",
    "Holder",
    "Identity",
    "Mates",
    "MemberRecord",
    "MemberStanding",
    "Phase",
    "Rejoins",
    "Vacated",
    "ended_text",
    "struck_text",
    "vacated_text",
]


# Remembers Groups that have ended, because tasks of their members may be tried again and ask anew.
#
# The task of a member that has died in its Group is tried again, and asks for the Group again. If
# the other members have left, no other member would ever join, so the request is refused at once.
# It is not refused if all members have died, because then their tasks are tried again together and
# form the Group anew. Nor is it refused to a task that has left the Group, because a task may use a
# name twice, and so may one that is tried again (`mates`).


# How many tasks that have died are remembered, and how many that have left. The oldest one is
# forgotten first; when it is tried again it waits for group_wait_s as if the Group were new.
# Higher: more memory of the manager, up to 4 KiB for each.
ENDED_TASKS_MAX = 1024


class _End(NamedTuple):
    """The end of a Group for one task. `run`: the last one in which the task was a member.
    `various`: its other members were not those of the previous Group of that name, so the task may
    wait for tasks that are not known yet."""

    generation: int
    tasks: frozenset[bytes]
    run: Run | None
    various: bool


class Tombstones:
    """The ends of Groups, by name and task."""

    def __init__(self) -> None:
        self._dead: dict[tuple[str, bytes], _End] = {}
        self._left: dict[tuple[str, bytes], _End] = {}

    def add(self, end: GroupEnd) -> None:
        """Records that a Group has ended."""
        runs = dict(zip(end.tasks, end.runs, strict=True))
        tasks = frozenset(end.tasks)
        for task in {**dict.fromkeys(end.dead), **runs}:
            key = end.name, task
            known = self._dead.get(key) or self._left.get(key)
            if known is not None and known.generation >= end.generation:
                continue  # another node has reported this end, or that of a later Group
            self._dead.pop(key, None)
            self._left.pop(key, None)
            various = end.open or (
                known is not None and (known.various or known.tasks & tasks <= {task})
            )
            table = self._dead if task in end.dead else self._left
            table[key] = _End(end.generation, tasks, runs.get(task), various)
        for table in (self._dead, self._left):
            while len(table) > ENDED_TASKS_MAX:
                del table[next(iter(table))]

    def mates(self, name: str, task: bytes, run: Run) -> Mates:
        """The tasks of the other members of the Group of that name in which this task was a member
        before it was tried again. None: it is not tried again, or may wait for any task."""
        known = self._dead.get((name, task)) or self._left.get((name, task))
        if not task or known is None or known.run is None or known.run == run or known.various:
            return None
        return known.tasks - {task}

    def refusal(self, name: str, task: bytes, tasks: Collection[bytes]) -> str:
        """Why a task cannot be a member again; "": it can. `tasks`: those of the living Group of
        that name, if there is one. Tasks in both Groups are waiting for this task."""
        known = self._dead.get((name, task)) if task else None
        if known is None or not known.tasks.isdisjoint(set(tasks) - {task}):
            return ""
        return (
            f"group {name!r} has ended: this task was a member of it when its process died, and "
            "the others have left since. Nobody will come; what they have finished is in their "
            "results"
        )


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


# Members that wait for others that may never join.
#
# A task that has left its Group, has died afterwards and is tried again opens a Group of that name
# anew. That is right as long as the other members' tasks may join too, because they use the name
# again or are tried again themselves. When all of these tasks are over none of them will, so the
# member need not wait for the whole time that a Group may take to form. The node from whose host a
# task was submitted knows whether the task is over. It is asked once, and answers when the task is
# over.
#
# The same is asked about a task that was a member of a Group that is not whole yet and has left it,
# or has died. As long as this task is not over it may join again, because it is tried again or
# calls `group()` once more. When it is over the Group can never be whole.


# How many (name, team) are remembered for Groups that ended before they were whole. The oldest one
# is forgotten first; its peers wait for group_wait_s. Higher: more memory of the manager, up to
# 2 KiB for each.
VACATED_MAX = 256
# The tasks that a member came back to; None: it may wait for any task.
Mates: TypeAlias = "frozenset[bytes] | None"
Holder: TypeAlias = tuple[bytes, bytes]  # the task of a member, and its team


def ended_text(name: str) -> str:
    """The error text that the user of such a member reads."""
    return (
        f"group {name!r} has ended: this task, which is tried again, was a member of it before, "
        "and the tasks of the others are over. Nobody will come; what they have finished is in "
        "their results"
    )


def vacated_text(name: str, size: int, ranks: Collection[int]) -> str:
    """The error text for the members of a Group that can never be whole. ranks: those whose members
    came and will not come again."""
    some = ", ".join(map(str, ranks))
    who, have, tasks = ("rank", "has", "its task has ended, so it")
    if len(ranks) > 1:
        who, have, tasks = ("ranks", "have", "their tasks have ended, so they")
    return (
        f"group {name!r} can never have all its {size} members: {who} {some} {have} left or died "
        f"before the others had joined, and {tasks} cannot join again"
    )


def struck_text(name: str) -> str:
    """The error text for a member whose host was given up by a manager that died afterwards."""
    return (
        f"group {name!r}: this host was given up by a manager that has died since, and the others "
        "have gone on without its members"
    )


class Vacated:
    """The ranks that members left free in Groups that ended before they were whole, by the name and
    the team of these members. The peers of one `spmd` call that join later belong to the same use
    of the name, so they need not wait for those members."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], tuple[int, dict[int, bytes]]] = {}

    def add(self, name: str, size: int, holders: Mapping[int, Holder]) -> None:
        """A Group has ended that never was whole."""
        for rank, (task, team) in holders.items():
            if team:
                before, tasks = self._known.pop((name, team), (size, {}))
                tasks = tasks if before == size else {}
                self._known[name, team] = size, {**tasks, rank: task}
        while len(self._known) > VACATED_MAX:
            del self._known[next(iter(self._known))]

    def take(self, name: str, size: int, team: bytes) -> dict[int, Holder]:
        """Returns and forgets what is known for a Group that a peer of that team joins."""
        known, tasks = self._known.pop((name, team), (size, {}))
        return {rank: (task, team) for rank, task in tasks.items()} if known == size else {}


class Rejoins:
    """What is known of the tasks that members wait for."""

    def __init__(self, node_of: Callable[[int], int | None]) -> None:
        """node_of: the living node of a host; None: that host has died, and its tasks are over."""
        self._node_of = node_of
        self._asked: dict[bytes, int] = {}  # task -> the node that reports when it is over
        self._over: set[bytes] = set()

    def ask(self, tasks: Iterable[bytes]) -> list[Send]:
        """The questions about those tasks about which no node has been asked yet."""
        asked: dict[int, list[bytes]] = {}
        for task in sorted(set(tasks) - self._over - self._asked.keys()):
            node = self._node_of(ids.unpack_id(task)[0])
            if node is None:
                self._over.add(task)
            else:
                self._asked[task] = node
                asked.setdefault(node, []).append(task)
        return [
            (node, GroupTasksAsked(tuple(some[begin : begin + ASKED_MAX])))
            for node, some in sorted(asked.items())
            for begin in range(0, len(some), ASKED_MAX)
        ]

    def told(self, message: GroupTasksOver) -> None:
        """A node reports that some tasks are over."""
        self._over.update(task for task in message.tasks if task in self._asked)

    def lose_node(self, node: int) -> None:
        """That host has died, so the tasks that were submitted there are over."""
        self._over.update(task for task, at in self._asked.items() if at == node)

    def keep(self, tasks: Collection[bytes]) -> None:
        """Forgets all other tasks, because no member waits for them."""
        self._asked = {task: node for task, node in self._asked.items() if task in tasks}
        self._over.intersection_update(tasks)

    def is_over(self, task: bytes) -> bool:
        """Is it known that this task is over?"""
        return task in self._over

    def hopeless(self, members: Mapping[int, tuple[bytes, Mates]]) -> list[int]:
        """The ranks of the members that wait in vain. `members`: the task and the mates of each
        member of a Group that is not formed. A mate that is a member gives hope unless it came back
        itself and waits for its own mates; a mate that is not gives hope until its task is over."""
        back = {task for task, mates in members.values() if mates is not None}
        first = {task for task, mates in members.values() if mates is None}
        return [
            rank
            for rank, (_, mates) in members.items()
            if mates is not None and mates <= (self._over | back) - first
        ]
