"""What the submitter keeps of a task.

Why it exists: a task that waits for its arguments, or for room in a queue, is listed in several
places; this is what stands there. It must never know: who lists it, and when it is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hoplite_mp.client.futures import Future
    from hoplite_mp.planner.resources import Demand
    from hoplite_mp.ref import ObjectRef

__all__ = ["Pending"]


class Pending:
    """One task, until it is done."""

    __slots__ = ("demand", "future", "holds", "missing", "needs", "oid", "queue", "rank")

    def __init__(self, oid: int, queue: int, future: Future[Any] | None, holds: Any) -> None:
        self.oid = oid
        self.queue = queue
        self.future = future
        self.holds = holds
        self.missing: set[int] = set()  # dependencies that are not known to be done
        self.needs: list[ObjectRef[Any]] = []  # all its dependencies
        self.rank: tuple[int, int] | None = None  # (priority, floor): its hint stands in a bag
        self.demand: Demand | None = None  # resources: its node decides when it begins
