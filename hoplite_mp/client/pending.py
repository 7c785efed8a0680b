"""What the submitter keeps of a task.

Why it exists: a task that waits for its arguments, or for room in a queue, is listed in several
places; this is what stands there. It must never know: who lists it, and when it is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hoplite_mp.planner.resources import Demand
    from hoplite_mp.ref import ObjectRef

__all__ = ["Pending"]


class Settles(Protocol):
    """A Future, for what looks after the end of its task."""

    _oid: int
    _kept: memoryview | None  # its payload, of a cluster that has closed since
    _unkept: str  # why there is none

    def cancelled(self) -> bool:
        """Was the task cancelled?"""

    def _complete(self, cancelled: bool, failed: bool = False) -> None:
        """The task has ended."""

    def _settle(self, cancelled: bool, failed: bool, error: BaseException | None = None) -> bool:
        """The same, or it never will; True: callbacks are to be called."""

    def _tell(self) -> None:
        """Calls them."""

    @property
    def unread(self) -> bool:
        """The result is not in this process for good."""


class Pending:
    """One task, until it is done."""

    __slots__ = ("demand", "future", "holds", "missing", "needs", "oid", "queue", "rank")

    def __init__(self, oid: int, queue: int, future: Settles | None, holds: Any) -> None:
        self.oid = oid
        self.queue = queue
        self.future = future
        self.holds = holds
        self.missing: set[int] = set()  # dependencies that are not known to be done
        self.needs: list[ObjectRef[Any]] = []  # all its dependencies
        self.rank: tuple[int, int] | None = None  # (priority, floor): its hint stands in a bag
        self.demand: Demand | None = None  # resources: its node decides when it begins
