"""Remembers Groups that have ended, because tasks of their members may be tried again and ask anew.

The task of a member that has died in its Group is tried again, and asks for the Group again. If the
other members have left, no other member would ever join, so the request is refused at once. It is
not refused if all members have died, because then their tasks are tried again together and form the
Group anew. Nor is it refused to a task that has left the Group, because a task may use a name
twice, and so may one that is tried again (`mates`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from hoplite_mp._planner.rejoin import Mates
    from hoplite_mp._protocol.groups import GroupEnd, Run

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
