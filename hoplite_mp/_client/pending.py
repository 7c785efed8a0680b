"""The submitter's record of each unfinished task.

A task that waits for its arguments, or for space in a queue, is listed in several places, all of
which list this record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hoplite_mp._common.ref import ObjectRef
    from hoplite_mp._planner.resources import Demand

__all__ = ["Pending"]


class Settles(Protocol):
    """A Future, as seen by the code that processes the end of its task."""

    _oid: int
    _kept: memoryview | None  # the payload, kept when its cluster closed
    _unkept: str  # why it could not be kept
    _reports: bool  # an unread failure is reported at the end

    def cancelled(self) -> bool:
        """Whether the task was cancelled."""

    def _complete(self, cancelled: bool, failed: bool = False) -> None:
        """Called when the task has ended."""

    def _settle(self, cancelled: bool, failed: bool, error: BaseException | None = None) -> bool:
        """Called when the task has ended, or never will. True: the caller must then call
        `_tell`."""

    def _tell(self) -> None:
        """Calls the Future's callbacks."""

    @property
    def _is_unread(self) -> bool:
        """Whether this process still needs the store to read the result."""


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
        # (priority, floor) of a task whose hint is in a bag
        self.rank: tuple[int, int] | None = None
        # Resources that the task needs: its node decides when it begins.
        self.demand: Demand | None = None
