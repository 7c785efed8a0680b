"""Groups that have ended whose members' tasks may still be tried again, and ask for them.

Why it exists: when the task of a member that has died in its Group asks for it again, nobody would
ever come, because the others have left. It is told so at once. A Group whose members have all died
is not one of these: their tasks are tried again together, and form it anew. Nor is it one for
whoever has left: a task may use a name twice, and so may one that is tried again (`mates`).

This module must never know processes, boards, why a task is tried again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from hoplite_mp.planner.group_returns import Mates
    from hoplite_mp.protocol.groups import GroupEnd, Run

# Tasks that are remembered, so many that have died and so many that have left; the oldest is
# forgotten first: its replacement waits for group_wait_s as if the Group were new. Higher: more
# memory of the manager, up to 4 KiB for each.
ENDED_TASKS_MAX = 1024


class _End(NamedTuple):
    """Of one task. `run`: in which it was a member last. `various`: with others than in the Group
    of that name before, so it may wait for tasks that nobody has heard of yet."""

    generation: int
    tasks: frozenset[bytes]
    run: Run | None
    various: bool


class GroupEnds:
    """By name and task."""

    def __init__(self) -> None:
        self._dead: dict[tuple[str, bytes], _End] = {}
        self._left: dict[tuple[str, bytes], _End] = {}

    def add(self, end: GroupEnd) -> None:
        """That Group is over."""
        runs = dict(zip(end.tasks, end.runs, strict=True))
        tasks = frozenset(end.tasks)
        for task in {**dict.fromkeys(end.dead), **runs}:
            key = end.name, task
            known = self._dead.get(key) or self._left.get(key)
            if known is not None and known.generation >= end.generation:
                continue  # several nodes have told it, or a later one was told before
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
        """The others of the Group of that name that this task was in before it was tried again.
        None: it is not tried again, or may wait for anybody."""
        known = self._dead.get((name, task)) or self._left.get((name, task))
        if not task or known is None or known.run is None or known.run == run or known.various:
            return None
        return known.tasks - {task}

    def refusal(self, name: str, task: bytes, tasks: Collection[bytes]) -> str:
        """Why a task cannot be a member again; "": it can. `tasks`: of the living Group of that
        name, if there is one; where others go on who were in the ended one, they wait for it."""
        known = self._dead.get((name, task)) if task else None
        if known is None or not known.tasks.isdisjoint(set(tasks) - {task}):
            return ""
        return (
            f"group {name!r} has ended: this task was a member of it when its process died, and "
            "the others have left since. Nobody will come; what they have finished is in their "
            "results"
        )
