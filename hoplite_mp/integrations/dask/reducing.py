"""A reduction of Dask's Futures, as it runs in one of Dask's workers.

Why it exists: a Dask task begins when all of its dependencies are done, but a reduction needs only
the first few of its sources. So one task, which leaves its worker's thread to others, waits for the
sources, has each one put into the store of the worker that has it, and reduces the refs. If the
task dies, Dask runs it again. If a host is lost meanwhile, Dask computes that host's values again,
and the reduction begins again.
It must never know: how arrays are added up.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from distributed import Future, as_completed, worker_client

from hoplite_mp.cluster import current
from hoplite_mp.errors import HopliteError, NodeLostError, ObjectLostError, ReduceError
from hoplite_mp.integrations.carried import CarriedRef
from hoplite_mp.ref import ObjectRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Client

__all__ = ["Sources", "reduce_sources"]

# How often a reduction is tried when hosts are lost. Higher: it survives more deaths. Lower: a
# cluster that loses one host after another gets the error sooner.
ATTEMPTS_MAX = 5


class Sources:
    """Keys of Dask's, wrapped so that Dask does not take them for dependencies."""

    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys


def reduce_sources(
    sources: Sources, op: str | Callable[..., Any], num: int
) -> tuple[Any, tuple[int, ...]]:
    """Returns the result, and the indices of the sources that went in."""
    with worker_client() as client:
        return _Reducing(client, sources.keys, num).run(op)


class _Reducing:
    """One run of the reduction."""

    def __init__(self, client: Client, keys: list[Any], num: int) -> None:
        self.client = client
        self.sources = [Future(key, client) for key in keys]
        self.num = num
        self.refs: dict[int, ObjectRef[Any]] = {}  # in the order in which they became ready
        self.failed: dict[int, BaseException] = {}
        self.tries = [0] * len(keys)
        self.put: dict[int, Any] = {}  # the tasks that have put them, whose results hold them
        self.under_way: dict[Any, int] = {}  # key of a task that puts a source -> its index
        self.completed = as_completed([])

    def run(self, op: str | Callable[..., Any]) -> tuple[Any, tuple[int, ...]]:
        for index in range(len(self.sources)):
            self._publish(index)
        c = current()
        for attempt in range(ATTEMPTS_MAX):
            self._await_enough()
            chosen = sorted(list(self.refs)[: self.num])
            try:
                value = c.get(c.reduce([self.refs[index] for index in chosen], op))
                return value, tuple(chosen)
            except (ReduceError, ObjectLostError, NodeLostError):
                lost = [index for index in chosen if self._is_lost(self.refs[index])]
                if not lost or attempt + 1 == ATTEMPTS_MAX:
                    raise
                for index in lost:
                    del self.refs[index]
                    self._publish(index)
        raise AssertionError("the last attempt returns or raises")

    def _publish(self, index: int) -> None:
        """Submits a task that puts the source into the store, where it is, when it is done."""
        self.tries[index] += 1
        task = self.client.submit(_put, self.sources[index], pure=False)
        self.under_way[task.key] = index
        self.completed.add(task)

    def _await_enough(self) -> None:
        """Waits until there are num refs. ReduceError: there will never be so many."""
        while len(self.refs) < self.num:
            possible = len(self.refs) + len(self.under_way)
            if possible < self.num:
                index, cause = next(iter(self.failed.items()))
                raise ReduceError(
                    f"reduce of {len(self.sources)} futures: {len(self.failed)} have failed, so "
                    f"{self.num} cannot be met; source {index}: {type(cause).__name__}: {cause}"
                ) from cause
            task = next(self.completed)
            index = self.under_way.pop(task.key)
            try:
                ref = task.result().ref
                if ref._hold is None:
                    raise ObjectLostError(f"{ref} is lost: the host that had it is gone")
                self.refs[index] = ref
                self.put[index] = task
            except Exception as error:  # whatever the user's task has raised
                again = isinstance(error, ObjectLostError)  # its host was lost before the ref came
                if again and self.tries[index] < ATTEMPTS_MAX:
                    self._publish(index)
                else:
                    self.failed[index] = error

    def _is_lost(self, ref: ObjectRef[Any]) -> bool:
        """Is the object done, but on no living node?"""
        c = current()
        with contextlib.suppress(HopliteError):
            done, _ = c.wait([ref], timeout=0)
            return bool(done) and not c.locations(ref)
        return True


def _put(value: Any) -> CarriedRef:
    """Runs in the worker that has the value. A value that is in the store already is not copied."""
    return CarriedRef(value if isinstance(value, ObjectRef) else current().put(value))
