"""Executor: a one-line replacement for `concurrent.futures.ProcessPoolExecutor`.

The executor owns a cluster on this host. It has only the methods of the standard library's
executor, and survives the death of a worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp._api.cluster import HiddenCluster
from hoplite_mp._api.executor import Options, TaskExecutor
from hoplite_mp._api.nodes import WORKERS_MAX
from hoplite_mp._api.pools import open_pool
from hoplite_mp._client.demands import refusal
from hoplite_mp._client.memory import whole
from hoplite_mp._common.machine_limits import cpu_count

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Executor"]


class Executor(TaskExecutor):
    """A one-line replacement for `concurrent.futures.ProcessPoolExecutor`.

    It owns a cluster on this host. The death of a worker does not break the executor: the task runs
    again in another worker. Results are writable. If the arguments of a task cannot be pickled, its
    Future fails with the pickling error. A task that raises SystemExit or KeyboardInterrupt fails
    with this exception; with a Cluster it fails with TaskError instead.

    Parameters
    ----------
    max_workers : int, optional
        The number of workers, 1 to 200. Default: the number of CPUs that this process may use.
    initializer : callable, optional
        Runs in each worker before its first task.
    initargs : tuple, optional
        Its arguments.
    max_tasks_per_child : int, optional
        After this number of tasks a worker is replaced. Default: never.
    mp_context : None
        Must be None. The argument exists because the standard library has it; the workers of this
        executor are neither forked nor spawned from this process.

    Raises
    ------
    ValueError
        The number of workers or tasks is out of range.
    TypeError
        `mp_context` is not None, or `initializer` cannot be called.

    Examples
    --------
    >>> with hoplite_mp.Executor(max_workers=1) as pool:
    ...     print(sum(pool.map(abs, range(-3, 0))))
    6
    """

    __module__ = "hoplite_mp"  # as users import it

    _pickles_later = True

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
                f"mp_context={mp_context!r}: this library starts workers from a process of its "
                "own; they are neither forked nor spawned from yours, so leave the argument out"
            )
        count: int | None
        count = min(cpu_count(), WORKERS_MAX) if max_workers is None else max_workers
        count = whole(count)
        if count is None or not 1 <= count <= WORKERS_MAX:
            raise ValueError(refusal(max_workers))
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        plain = initializer is None and max_tasks_per_child is None
        self._cluster = HiddenCluster(count if plain else 0)
        self._runtime = self._cluster._runtime
        self._runtime.memory.raises_exits = True
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
        """Shuts down the executor, as in the standard library.

        Parameters
        ----------
        wait : bool, optional
            True: returns when all tasks are done and all processes have exited. Default: True.
        cancel_futures : bool, optional
            True cancels all tasks that have not begun. Default: False.

        Examples
        --------
        >>> pool = hoplite_mp.Executor(max_workers=1)
        >>> pool.shutdown()
        >>> pool.submit(abs, -1)
        Traceback (most recent call last):
            ...
        hoplite_mp.ClosedError: cannot schedule new futures after shutdown: ...
        """
        self._closed = True
        self._cluster.shutdown(wait, cancel_futures=cancel_futures)

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool | None:
        self._closed = True
        return self._cluster.__exit__(kind, value, traceback)
