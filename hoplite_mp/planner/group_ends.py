"""Groups that have ended while the task of a dead member was still to be tried again.

Why it exists: when that task asks for its Group again, nobody would ever come, because the others
have left. It is told so at once. A Group whose members have all died is not one of these: their
tasks are tried again together, and form it anew. Nor is it one for whoever has left: a task may use
a name twice.

This module must never know processes, boards, why a task is tried again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from hoplite_mp.protocol.groups import GroupEnd

# Tasks that are remembered, the oldest is forgotten first: its replacement waits for group_wait_s
# as if the Group were new. Higher: more memory of the manager, up to 2 KiB for each.
ENDED_TASKS_MAX = 1024


class _End(NamedTuple):
    end: GroupEnd
    tasks: frozenset[bytes]


class GroupEnds:
    """By name and task."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, bytes], _End] = {}

    def add(self, end: GroupEnd) -> None:
        """That Group is over."""
        for task in end.dead:
            known = self._ends.pop((end.name, task), None)
            if known is not None and known.end.generation > end.generation:
                end = known.end
            self._ends[end.name, task] = _End(end, frozenset(end.tasks))
        while len(self._ends) > ENDED_TASKS_MAX:
            del self._ends[next(iter(self._ends))]

    def refusal(self, name: str, task: bytes, tasks: Collection[bytes]) -> str:
        """Why a task cannot be a member again; "": it can. `tasks`: of the living Group of that
        name, if there is one; where others go on who were in the ended one, they wait for it."""
        known = self._ends.get((name, task)) if task else None
        if known is None or not known.tasks.isdisjoint(set(tasks) - {task}):
            return ""
        return (
            f"group {name!r} has ended: this task was a member of it when its process died, and "
            "the others have left since. Nobody will come; what they have finished is in their "
            "results"
        )
