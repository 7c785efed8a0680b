"""A reduction of another engine's values, which runs in one of the engine's tasks.

A Dask or Ray task begins when all its dependencies are done, but a reduction needs only the first
few of its sources. So one task waits for the sources, has each source put into the store of its
host, and reduces the refs. If that task dies, the engine runs it again. If a host is lost during
the reduction, the engine recomputes that host's values, and the reduction starts again.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from hoplite_mp._api.cluster import current
from hoplite_mp._client.memory import whole
from hoplite_mp._common.reduction import is_function, operation_name
from hoplite_mp.errors import HopliteError, NodeLostError, ObjectLostError, ReduceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp._common.ref import ObjectRef

__all__ = ["Reducing", "check_reduction"]

# Maximum number of attempts when hosts are lost. Higher: the reduction survives more losses.
# Lower: if a cluster loses one host after another, the reduction fails sooner.
ATTEMPTS_MAX = 5


def check_reduction(
    sources: Sequence[Any], op: str | Callable[..., Any], num: int | None, name: str
) -> int:
    """Returns the number of sources to reduce. Raises ValueError if there are no sources, num < 1
    or > len, or op is unknown. name: the engine's word for sources."""
    if not is_function(op):
        operation_name(op)
    if not sources:
        raise ValueError(f"no {name} to reduce: pass at least one")
    wanted = len(sources) if num is None else whole(num)
    if wanted is None or not 1 <= wanted <= len(sources):
        raise ValueError(f"num={num!r}: it must be from 1 to the number of {name}, {len(sources)}")
    return wanted


class Reducing(ABC):
    """One run of a reduction. The subclass waits for the engine's values, and puts them into the
    stores."""

    name = "sources"  # the engine's word for sources, for errors

    def __init__(self, count: int, num: int) -> None:
        """count: the number of sources; num: how many must be reduced."""
        self.count = count
        self.num = num
        self.refs: dict[int, ObjectRef[Any]] = {}  # in the order in which they became ready
        self.failed: dict[int, BaseException] = {}
        self.tries = [0] * count
        self.under_way: set[int] = set()

    @abstractmethod
    def begin_put(self, index: int) -> None:
        """Begins to put the source into the store of its host, as soon as the source is ready."""

    @abstractmethod
    def wait_for_put(self) -> int:
        """Waits until a put has finished or failed. Returns the index of the put's source."""

    @abstractmethod
    def take_put(self, index: int) -> ObjectRef[Any]:
        """The ref to a source whose put has finished. If the source or the put has failed, raises
        its error."""

    def run(self, op: str | Callable[..., Any]) -> tuple[Any, tuple[int, ...]]:
        """Returns the result, and the indices of the reduced sources."""
        for index in range(self.count):
            self._begin(index)
        for attempt in range(ATTEMPTS_MAX):
            self._await_enough()
            chosen = sorted(list(self.refs)[: self.num])
            try:
                return _reduced([self.refs[index] for index in chosen], op), tuple(chosen)
            except (ReduceError, ObjectLostError, NodeLostError):
                lost = [index for index in chosen if _is_lost(self.refs[index])]
                if not lost or attempt + 1 == ATTEMPTS_MAX:
                    raise
                for index in lost:
                    del self.refs[index]
                    self._begin(index)
        raise AssertionError("the last attempt returns or raises")

    def _begin(self, index: int) -> None:
        self.tries[index] += 1
        self.under_way.add(index)
        self.begin_put(index)

    def _await_enough(self) -> None:
        """Waits until there are num refs. Raises ReduceError if too many sources have failed."""
        while len(self.refs) < self.num:
            if len(self.refs) + len(self.under_way) < self.num:
                index, cause = next(iter(self.failed.items()))
                raise ReduceError(
                    f"reduce of {self.count} {self.name}: {len(self.failed)} have failed, so "
                    f"{self.num} cannot be met; source {index}: {type(cause).__name__}: {cause}"
                ) from cause
            index = self.wait_for_put()
            self.under_way.remove(index)
            try:
                ref = self.take_put(index)
                if ref._hold is None:
                    raise ObjectLostError(f"{ref} is lost: the host that had it is gone")
                self.refs[index] = ref
            except Exception as error:  # any error of the user's task
                again = isinstance(error, ObjectLostError)  # the host was lost meanwhile
                if again and self.tries[index] < ATTEMPTS_MAX:
                    self._begin(index)
                else:
                    self.failed[index] = error


def _reduced(refs: list[ObjectRef[Any]], op: Any) -> Any:
    """The result of the reduction. If op is a function, the values are folded in this process,
    because a cluster beside another engine has no workers. The function may change its left
    argument, so the values are copied."""
    c = current()
    if is_function(op):
        return functools.reduce(op, c.get(refs, copy=True))
    return c.get(c.reduce(refs, op))


def _is_lost(ref: ObjectRef[Any]) -> bool:
    """Whether the object is done, but no living node has it."""
    c = current()
    with contextlib.suppress(HopliteError):
        done, _ = c.wait([ref], timeout=0)
        return bool(done) and not c.locations(ref)
    return True
