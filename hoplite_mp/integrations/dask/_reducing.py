"""Reduces Dask Futures inside a Dask worker; see `integrations/_sidecar/reducing.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed import Future, as_completed, worker_client

from hoplite_mp._api.cluster import current
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp.integrations._sidecar.reducing import Reducing
from hoplite_mp.integrations._sidecar.sidecar import CarriedRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Client

__all__ = ["Sources", "reduce_sources"]


class Sources:
    """Keys of Dask tasks, wrapped so that Dask does not treat them as dependencies."""

    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys


def reduce_sources(
    sources: Sources, op: str | Callable[..., Any], num: int
) -> tuple[Any, tuple[int, ...]]:
    """Returns the result, and the indices of the reduced sources. While this task waits, its
    worker's thread is free for other tasks."""
    with worker_client() as client:
        return _DaskReducing(client, sources.keys, num).run(op)


class _DaskReducing(Reducing):
    """A reduction whose sources are put into the stores by Dask tasks."""

    name = "futures"

    def __init__(self, client: Client, keys: list[Any], num: int) -> None:
        super().__init__(len(keys), num)
        self._client = client
        self._sources = [Future(key, client) for key in keys]
        # Index of a source -> its latest put, a Dask task whose result keeps the object alive.
        self._puts: dict[int, Any] = {}
        self._index_of: dict[Any, int] = {}  # key of a put's task -> index of its source
        self._completed = as_completed([])

    def begin_put(self, index: int) -> None:
        task = self._client.submit(_put, self._sources[index], pure=False)
        self._puts[index] = task
        self._index_of[task.key] = index
        self._completed.add(task)

    def wait_for_put(self) -> int:
        return self._index_of.pop(next(self._completed).key)

    def take_put(self, index: int) -> ObjectRef[Any]:
        return self._puts[index].result().ref  # type: ignore[no-any-return]


def _put(value: Any) -> CarriedRef:
    """Puts the value into the store, in the Dask worker that holds it. A value that is already in
    the store is not copied."""
    return CarriedRef(value if isinstance(value, ObjectRef) else current().put(value))
