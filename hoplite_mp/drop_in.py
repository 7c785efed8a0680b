"""Executor: what replaces `concurrent.futures.ProcessPoolExecutor` by changing one line.

Why it exists: many programs want nothing but an executor that survives its workers. It owns a
cluster of one host and shows only what the standard library's has.
It must never know: how a cluster works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.cluster import Cluster
from hoplite_mp.executor import Options, TaskExecutor, open_pool
from hoplite_mp.nodes import WORKERS_MAX, refusal
from hoplite_mp.store.limits import cpu_count

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Executor"]


class Executor(TaskExecutor):
    """The one-line replacement of `concurrent.futures.ProcessPoolExecutor`.

    Owns a cluster of this host; survives a worker's death (the task runs again). Results are
    writable. What does not pickle fails its Future, with what pickle raised. Arguments as there,
    but for `mp_context`, which must be None: workers are neither forked nor spawned from this
    process.
    """

    _pickles_later = True
    submit = TaskExecutor.submit  # here too, so that the pages of the API show them
    map = TaskExecutor.map

    def __init__(
        self,
        max_workers: int | None = None,
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        max_tasks_per_child: int | None = None,
        mp_context: None = None,
    ) -> None:
        if mp_context is not None:
            raise TypeError(
                f"mp_context={mp_context!r}: workers are started by a process of this library's "
                "own, neither forked nor spawned from yours; leave the argument out"
            )
        count = cpu_count() if max_workers is None else max_workers
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= WORKERS_MAX:
            raise ValueError(refusal(max_workers))
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        plain = initializer is None and max_tasks_per_child is None
        self._cluster = Cluster(count if plain else 0)
        self._runtime = self._cluster._runtime
        self._options = Options(copy=True)
        self._pool = self._cluster._pool
        if not plain:
            try:
                self._pool = open_pool(
                    self._runtime,
                    count,
                    initializer,
                    initargs,
                    max_tasks_per_child,
                    self._options,
                )._hand_over()
            except BaseException:
                self._cluster.shutdown()
                raise

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As in the standard library."""
        self._closed = True
        self._cluster.shutdown(wait, cancel_futures=cancel_futures)

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool | None:
        self._closed = True
        return self._cluster.__exit__(kind, value, traceback)
