"""Members that wait for others that may never join.

A task that has left its Group, has died afterwards and is tried again opens a Group of that name
anew. That is right as long as the other members' tasks may join too, because they use the name
again or are tried again themselves. When all of these tasks are over none of them will, so the
member need not wait for the whole time that a Group may take to form. The node from whose host a
task was submitted knows whether the task is over. It is asked once, and answers when the task is
over.

The same is asked about a task that was a member of a Group that is not whole yet and has left it,
or has died. As long as this task is not over it may join again, because it is tried again or calls
`group()` once more. When it is over the Group can never be whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from hoplite_mp._common import ids
from hoplite_mp._protocol.groups import ASKED_MAX, GroupTasksAsked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from hoplite_mp._planner.step_result import Send
    from hoplite_mp._protocol.groups import GroupTasksOver

__all__ = ["Holder", "Mates", "Rejoins", "Vacated", "ended_text", "struck_text", "vacated_text"]

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
