"""What the submitter keeps for each task that is not done.

A task that waits for its arguments, or for room in a queue, is listed in several places; all of
them list this record.
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
    _reports: bool  # a failure that nobody reads is reported at the end

    def cancelled(self) -> bool:
        """Was the task cancelled?"""

    def _complete(self, cancelled: bool, failed: bool = False) -> None:
        """The task has ended."""

    def _settle(self, cancelled: bool, failed: bool, error: BaseException | None = None) -> bool:
        """The task has ended, or never will. True: the caller must then call `_tell`."""

    def _tell(self) -> None:
        """Calls the Future's callbacks."""

    @property
    def _is_unread(self) -> bool:
        """Does this process still need the store to read the result?"""


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
        # Resources that it needs: its node decides when it begins.
        self.demand: Demand | None = None
