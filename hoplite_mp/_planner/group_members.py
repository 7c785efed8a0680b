"""The planner's data about one Group: its members, and the records that remain after its end.

The changes in this module concern only one Group. `groups.py` makes the decisions.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from hoplite_mp._common import ids
from hoplite_mp._protocol.fields import RANKS_MAX
from hoplite_mp._protocol.groups import ASKED_MAX, NO_TASK, Founder, GroupEnd, GroupTasksQuery

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from hoplite_mp._planner.step_result import Send
    from hoplite_mp._protocol.groups import GroupTasksEnded, TaskRun
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


# Tombstones record Groups that have ended, because retried tasks of their members may request to
# join them again.
#
# If a member dies in its Group, its task is retried, and requests to join the Group again. If the
# other members have left, none of them will join again, so the request is refused immediately. If
# all members have died, all their tasks are retried and form the Group again, so the request is
# accepted. A request is also accepted from a task that had left the Group, because a task may use
# the name twice, whether it is retried or not (see `mates`).


# Maximum number of dead tasks that are remembered, and of tasks that have left. The oldest task is
# forgotten first; if it is retried, it waits for up to group_wait_s, as for a new Group. Higher:
# the manager needs more memory, up to 4 KiB for each task.
ENDED_TASKS_MAX = 1024


class _End(NamedTuple):
    """The end of a Group for one task. `tasks`: the tasks of all members. `run`: the last run in
    which the task was a member. `various`: the task has used the name with different members, so it
    may be waiting for tasks that are not known yet."""

    generation: int
    tasks: frozenset[bytes]
    run: TaskRun | None
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
                continue  # this end, or the end of a later Group, is already recorded
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

    def mates(self, name: str, task: bytes, run: TaskRun) -> Mates:
        """The other members' tasks in the Group of that name to which this task belonged before it
        was retried. None if the task is not a retry, or may be waiting for any task."""
        known = self._dead.get((name, task)) or self._left.get((name, task))
        if not task or known is None or known.run is None or known.run == run or known.various:
            return None
        return known.tasks - {task}

    def refusal(self, name: str, task: bytes, tasks: Collection[bytes]) -> str:
        """Returns the reason if a task cannot join again, otherwise "". `tasks`: the tasks of the
        present Group of that name, if any. A task that is in both Groups is waiting for this task,
        which can then join."""
        known = self._dead.get((name, task)) if task else None
        if known is None or not known.tasks.isdisjoint(set(tasks) - {task}):
            return ""
        return (
            f"group {name!r} has ended: this task was a member when its process died, and all "
            "others have left since. No other member will join; finished work is in the results of "
            "their tasks"
        )


TASKS_MAX = 2 * RANKS_MAX  # maximum number of members' tasks that one group remembers
NO_REQUEST = -1  # the `request` of a member whose join request an earlier planner answered


class Identity(NamedTuple):
    """One use of a client slot on a node. It identifies a process, even if the slot is reused."""

    node: int
    client: int
    generation: int


class MemberStanding(enum.Enum):
    ALIVE = "calls include this member"
    JOINING = "waits for admission"


class Phase(enum.Enum):
    FORMING = "some rank has never been held"
    FORMED = "all ranks were held at one time"


# The standing of a new member, and of an admitted member. A standing without an entry does not
# change.
ON_JOIN = {Phase.FORMING: MemberStanding.ALIVE, Phase.FORMED: MemberStanding.JOINING}
ON_ADMIT = {MemberStanding.JOINING: MemberStanding.ALIVE}


@dataclass(slots=True)
class MemberRecord:
    """The member at a rank. `request`: the number by which a repeated request is recognized.
    `mates`: the tasks of its peers before its retry. `since`: the first version of the member list
    that includes this member; 0: none yet. `team`: the `spmd` call that started the member."""

    identity: Identity
    request: int
    standing: MemberStanding
    task: bytes = NO_TASK
    tries: int = 0
    mates: Mates = None
    since: int = 0
    team: bytes = NO_TASK

    @property
    def run(self) -> TaskRun:
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
    nodes: set[int] = field(default_factory=set)  # nodes that have or had members
    # The latest version of the member list, as sent to these nodes.
    shown: GroupMembers | None = None
    versions: int = 0  # number of versions sent so far
    whole: int = 0  # the first version in which the group is formed; 0: none yet
    # Task -> its latest run, for present and former members.
    tasks: dict[bytes, TaskRun] = field(default_factory=dict)
    # The tasks of members that have died and have not rejoined.
    dead: dict[bytes, None] = field(default_factory=dict)
    left: bool = False  # a member has closed its Group
    open: bool = False  # a driver was a member
    parent: int = 0  # generation of the group from which this group was split; 0: none
    founders: tuple[Founder, ...] = ()  # members of the parent, by rank in this group
    come: int = 0  # bit mask of the ranks that have ever joined
    # Rank -> (task, team) of the rank's last member, even if it is gone. Used until the group is
    # formed.
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
        """Records the death of these members."""
        for rank in ranks:
            self.die(self.members.pop(rank).task)

    def die(self, task: bytes) -> None:
        """Records the death of a member's task, which may be retried."""
        if task:
            self.dead[task] = None
            if len(self.dead) > TASKS_MAX:
                del self.dead[next(iter(self.dead))]

    def hear(self, left: Iterable[int], died: Iterable[int]) -> None:
        """Handles a node's report of the members that have left or died since the last version."""
        self.left = self.left or not set(left) <= set(died)
        for rank in died:
            self.die(self.task_at(rank))

    def task_at(self, rank: int) -> bytes:
        """The task of the rank's member in the latest version of the member list."""
        tasks = () if self.shown is None else self.shown.tasks
        return tasks[rank] if rank < len(tasks) else NO_TASK

    @property
    def vacated(self) -> dict[int, Holder]:
        """The free ranks whose last members were tasks, with these members. Empty if the group is
        formed, or has a parent (see `awaits_founders`)."""
        if self.phase is Phase.FORMED or self.parent:
            return {}
        return {
            rank: holder
            for rank, holder in self.holders.items()
            if holder[0] and rank not in self.members
        }

    @property
    def end(self) -> GroupEnd | None:
        """The record that remains after the end of the group. None if no member was a task."""
        if not self.tasks:
            return None
        tasks, runs = tuple(self.tasks), tuple(self.tasks.values())
        return GroupEnd(self.name, self.generation, tuple(self.dead), tasks, runs, self.open)

    def mask(self, standing: MemberStanding) -> int:
        """The ranks with that standing, as a bit mask."""
        return sum(1 << rank for rank, m in self.members.items() if m.standing is standing)

    def free_rank(self) -> int | None:
        """The lowest free rank, or None."""
        return next((rank for rank in range(self.size) if rank not in self.members), None)


# Members that wait for other members that may never join.
#
# If a task has left its Group, has died and is retried, it opens a new Group of the same name. The
# new Group can be formed only as long as the tasks of the other members may join: they may use the
# name again, or be retried, too. When all of these tasks are over, none of them will join, and the
# member need not wait for the full group_wait_s. The planner sends one request about each task to
# the node of the host that submitted the task. That node answers when the task is over.
#
# The planner sends the same request about a task that has left a Group, or died, before the Group
# was formed. Until the task is over, it may join again, as a retry or by another call to `group()`.
# After that, the Group can never be formed.


# Maximum number of (name, team) pairs of Groups that ended before they were formed. The oldest pair
# is forgotten first; members that join later then wait for group_wait_s. Higher: the manager needs
# more memory, up to 2 KiB for each pair.
VACATED_MAX = 256
# The tasks of a rejoining member's former peers. None: the member may be waiting for any task.
Mates: TypeAlias = "frozenset[bytes] | None"
Holder: TypeAlias = tuple[bytes, bytes]  # the task of a member, and its team


def ended_text(name: str) -> str:
    """The error text for a rejoining member if the tasks of all its former peers are over."""
    return (
        f"group {name!r} has ended: this task was a member before its retry, and the other "
        "members' tasks are over. No other member will join; finished work is in the results of "
        "those tasks"
    )


def vacated_text(name: str, size: int, ranks: Collection[int]) -> str:
    """The error text for the members of a Group that can never be formed. ranks: the ranks that
    stay vacant."""
    listed = ", ".join(map(str, ranks))
    noun, have, tasks = ("rank", "has", "its task has ended, so it")
    if len(ranks) > 1:
        noun, have, tasks = ("ranks", "have", "their tasks have ended, so they")
    return (
        f"group {name!r} can never have all its {size} members: {noun} {listed} {have} left or "
        f"died before the others had joined, and {tasks} cannot join again"
    )


def struck_text(name: str) -> str:
    """The error text for a member whose host was declared dead by a previous manager."""
    return (
        f"group {name!r}: this host was declared dead by a manager that has died since, and the "
        "group has continued without this host's members"
    )


class Vacated:
    """The vacant ranks of Groups that ended before they were formed, by name and team. Peers from
    the same `spmd` call (team) that join later use the name for the same Group. They need not wait
    if the last members of these ranks cannot join again."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], tuple[int, dict[int, bytes]]] = {}

    def add(self, name: str, size: int, holders: Mapping[int, Holder]) -> None:
        """Records the end of a Group that was never formed."""
        for rank, (task, team) in holders.items():
            if team:
                known, tasks = self._known.pop((name, team), (size, {}))
                tasks = tasks if known == size else {}
                self._known[name, team] = size, {**tasks, rank: task}
        while len(self._known) > VACATED_MAX:
            del self._known[next(iter(self._known))]

    def take(self, name: str, size: int, team: bytes) -> dict[int, Holder]:
        """Removes and returns the entry for a Group that a member of that team joins."""
        known, tasks = self._known.pop((name, team), (size, {}))
        return {rank: (task, team) for rank, task in tasks.items()} if known == size else {}


class Rejoins:
    """The tasks that members are waiting for, and the nodes that will report the tasks' ends."""

    def __init__(self, node_of: Callable[[int], int | None]) -> None:
        """node_of: returns the living node of a host, or None if the host is dead. All tasks that a
        dead host submitted are over."""
        self._node_of = node_of
        self._asked: dict[bytes, int] = {}  # task -> the node that reports when it is over
        self._over: set[bytes] = set()

    def ask(self, tasks: Iterable[bytes]) -> list[Send]:
        """Returns the requests about these tasks, except for tasks with an earlier request."""
        asked: dict[int, list[bytes]] = {}
        for task in sorted(set(tasks) - self._over - self._asked.keys()):
            node = self._node_of(ids.unpack_id(task)[0])
            if node is None:
                self._over.add(task)
            else:
                self._asked[task] = node
                asked.setdefault(node, []).append(task)
        return [
            (node, GroupTasksQuery(tuple(some[begin : begin + ASKED_MAX])))
            for node, some in sorted(asked.items())
            for begin in range(0, len(some), ASKED_MAX)
        ]

    def told(self, message: GroupTasksEnded) -> None:
        """Handles a node's report that some tasks are over."""
        self._over.update(task for task in message.tasks if task in self._asked)

    def lose_node(self, node: int) -> None:
        """Records the loss of a node. The tasks that its host submitted are over."""
        self._over.update(task for task, at in self._asked.items() if at == node)

    def keep(self, tasks: Collection[bytes]) -> None:
        """Forgets all other tasks, because no member is waiting for them."""
        self._asked = {task: node for task, node in self._asked.items() if task in tasks}
        self._over.intersection_update(tasks)

    def is_over(self, task: bytes) -> bool:
        """Whether this task is known to be over."""
        return task in self._over

    def hopeless(self, members: Mapping[int, tuple[bytes, Mates]]) -> list[int]:
        """The ranks whose Group can no longer be formed. `members`: the task and the mates of each
        member of a Group that is not formed. For a member, the Group cannot be formed if each of
        its mates is over, or has itself rejoined and waits for its own mates."""
        back = {task for task, mates in members.values() if mates is not None}
        first = {task for task, mates in members.values() if mates is None}
        return [
            rank
            for rank, (_, mates) in members.items()
            if mates is not None and mates <= (self._over | back) - first
        ]
