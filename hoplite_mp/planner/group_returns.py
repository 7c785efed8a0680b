"""Members that come back to a Group that has ended, and wait for others who may never come.

Why it exists: a task that has left its Group, has died afterwards and is tried again opens a Group
of that name anew. That is right as long as the others may come, too: they use the name again, or
are tried again themselves. When all of their tasks are over nobody will, and it need not wait for
the time that a Group has to become whole. Whether a task is over, the node knows from whose host it
was submitted; it is asked once, and says so when it happens.

This module must never know boards, ranks that are free, how a node finds out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from hoplite_mp import ids
from hoplite_mp.protocol.groups import ASKED_MAX, GroupTasksAsked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from hoplite_mp.planner.plan import Send
    from hoplite_mp.protocol.groups import GroupTasksOver

__all__ = ["Mates", "Returns", "ended_text", "struck_text"]

# The tasks that a member came back to; None: it may wait for anybody.
Mates: TypeAlias = "frozenset[bytes] | None"


def ended_text(name: str) -> str:
    """What the user of such a member reads."""
    return (
        f"group {name!r} has ended: this task, which is tried again, was a member of it before, "
        "and the tasks of the others are over. Nobody will come; what they have finished is in "
        "their results"
    )


def struck_text(name: str) -> str:
    """What the user of a member reads whose host was given up by a manager that then died."""
    return (
        f"group {name!r}: this host was given up by a manager that has died since, and the others "
        "have gone on without its members"
    )


class Returns:
    """What is known of the tasks that somebody waits for."""

    def __init__(self, node_of: Callable[[int], int | None]) -> None:
        """node_of: the living node of a host; None: that host is gone, and its tasks with it."""
        self._node_of = node_of
        self._asked: dict[bytes, int] = {}  # task -> the node that says when it is over
        self._over: set[bytes] = set()

    def ask(self, tasks: Iterable[bytes]) -> list[Send]:
        """The questions about those that nobody has been asked about."""
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
        """Some are over."""
        self._over.update(task for task in message.tasks if task in self._asked)

    def lose_node(self, node: int) -> None:
        """That host is gone: what was submitted there is over."""
        self._over.update(task for task, at in self._asked.items() if at == node)

    def keep(self, tasks: Collection[bytes]) -> None:
        """Nobody waits for any other."""
        self._asked = {task: node for task, node in self._asked.items() if task in tasks}
        self._over.intersection_update(tasks)

    def hopeless(self, members: Mapping[int, tuple[bytes, Mates]]) -> list[int]:
        """The ranks of those who wait in vain, of a Group that is not whole whose members have
        these tasks and mates. A mate that is there gives hope if it is not tried again itself, for
        it may wait for others; one that is not there does as long as its task is not over."""
        back = {task for task, mates in members.values() if mates is not None}
        first = {task for task, mates in members.values() if mates is None}
        return [
            rank
            for rank, (_, mates) in members.items()
            if mates is not None and mates <= (self._over | back) - first
        ]
