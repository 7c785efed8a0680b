"""Priorities of tasks: a task's level, and the order of tasks that wait for room.

Tasks with a priority are posted to bags (cext/shm_bag.h) instead of the ordinary queues. A bag has
limited room; what does not fit waits in its process, the highest first.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

from hoplite_mp import _tasks
from hoplite_mp._client.memory import whole

if TYPE_CHECKING:
    from hoplite_mp._client.pending import Pending
    from hoplite_mp._planner.resources import Demand

__all__ = ["NO_FLOOR", "PRIORITY_MAX", "Best", "checked_priority", "level_of", "rank_of"]

NO_FLOOR: int = _tasks.NO_FLOOR
PRIORITY_MAX = (1 << 31) - 1  # the lowest is its negative


def checked_priority(given: Any) -> int:
    """The priority as int. ValueError if it is not an integer in range."""
    priority = whole(given)
    if priority is None or not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise ValueError(
            f"priority={given!r}: it must be a whole number from -{PRIORITY_MAX} to {PRIORITY_MAX}"
        )
    return priority


def rank_of(
    priority: int, inherited_priority: int, demand: Demand | None
) -> tuple[int, int] | None:
    """(priority, floor) of a task that is submitted now; None if it needs no rank. floor: the level
    of the task that submits it, or NO_FLOOR."""
    return (
        (priority, inherited_priority)
        if priority or inherited_priority > 0 or demand is not None
        else None
    )


def level_of(rank: tuple[int, int]) -> int:
    """The task's level: its priority, but at least the level of the task that submitted it, because
    that task may be waiting for it."""
    return max(rank)


class Best:
    """A priority queue with the interface of a deque: the first item has the highest priority."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], Pending]] = []
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __getitem__(self, at: int) -> Pending:
        return self._heap[at][1]

    def append(self, pending: Pending) -> None:
        assert pending.rank is not None
        self._count += 1
        # A task with a demand is only announced to the node and needs no room, so it goes first.
        first = pending.demand is None
        key = (first, -level_of(pending.rank), -pending.rank[0], self._count)
        heapq.heappush(self._heap, (key, pending))

    def popleft(self) -> Pending:
        return heapq.heappop(self._heap)[1]
