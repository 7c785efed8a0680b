"""Executors: submit and map over a pool of workers, with options.

`Cluster`, `c.options(...)`, `c.executor(...)` and `hoplite_mp.Executor` are
`concurrent.futures.Executor`s over different pools. The arguments of their tasks may be refs.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import operator
from typing import TYPE_CHECKING, Any, TypeVar

from hoplite_mp import _serialize, errors
from hoplite_mp._api.nodes import node_numbers
from hoplite_mp._client.chunks import Chunks, Items
from hoplite_mp._client.demands import check_demands
from hoplite_mp._client.functions import FrozenFunction, check_counts, flags_of
from hoplite_mp._client.mapping import MapRun, Results, length_of, open_bar
from hoplite_mp._client.memory import whole
from hoplite_mp._client.option_checks import UNUSED, check_values, refuse_unused
from hoplite_mp._client.queues import SHUT_DOWN
from hoplite_mp._client.submitter import run_here
from hoplite_mp._common import clock
from hoplite_mp._common.clock import check_timeout
from hoplite_mp._common.object_states import CONCURRENCY_SHIFT
from hoplite_mp._protocol.fields import NUMBER_MAX
from hoplite_mp._protocol.local import POOL_BROKEN, Members
from hoplite_mp.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hoplite_mp._client.futures import Future
    from hoplite_mp._client.option_checks import RetryDelay
    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._planner.resources import Demand
    from hoplite_mp._protocol.spawning import Environment


__all__ = ["MapCalls", "Options", "Sized", "TaskExecutor"]


T = TypeVar("T")
# For map(chunksize=None). With this number of chunks, the load is balanced, and the overhead is
# still small. Chunks grow up to CHUNK_ITEMS_MAX items if the items take almost no time.
CHUNKS_PER_WORKER = 16
CHUNK_ITEMS_FIRST, CHUNK_ITEMS_MAX = 256, 4096


class MapCalls:
    """The method `map` of all executors: arguments are split into chunks, and each chunk is a
    task."""

    _runtime: Runtime
    _pool: int
    _options: Any
    _debugs: bool
    _view: Callable[..., Any]
    submit: Callable[..., Future[Any]]

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
        ordered: bool = True,
        progress: bool | str = False,
        return_exceptions: bool = False,
    ) -> Results[T]:
        """Applies `fn` to items of the iterables, in the workers.

        Like `concurrent.futures.Executor.map` in Python 3.14, with more arguments. The iterator
        stops at the first item that raises an exception, and raises this exception; tasks that
        have not begun are cancelled. With `return_exceptions=True` it continues.

        Parameters
        ----------
        fn : callable
            Takes one argument for each iterable.
        *iterables : iterable
            The map stops at the end of the shortest iterable.
        timeout : float, optional
            Seconds after this call until the iterator raises HopliteTimeoutError. Default: no
            limit.
        chunksize : int, optional
            The number of items in each task. Default: it depends on the numbers of items and
            workers, and chunks grow as long as earlier chunks finish immediately.
        buffersize : int, optional
            Maximum number of pending results; further items are read as results are taken. Default:
            the call reads the iterables completely.
        ordered : bool, optional
            False yields results as they complete. Default: in the order of the items.
        progress : bool or str, optional
            True, or a label: shows a tqdm bar with the number of finished items, on stderr or in
            the notebook. The bar is updated whenever the next result is requested. It needs the
            extra `progress`. Default: False.
        return_exceptions : bool, optional
            True: an exception replaces the result of the item that raised it. The same applies to
            the error of a result that cannot be pickled, and to WorkerLostError for the items of a
            chunk whose worker has died. The timeout of this call and errors from the iterables are
            still raised. Default: False.

        Returns
        -------
        iterator
            An iterator over the results, for `for` and `async for`. Closing it cancels waiting
            tasks.

        Raises
        ------
        ValueError
            `chunksize` or `buffersize` is below 1, or `chunksize` is above 2**63 - 1, or above 1
            with `options(retry_delay=, retry_exceptions=)`.
        HopliteTimeoutError
            From the iterator: a result was not ready in time.
        Exception
            From the iterator: the exception of the first failed item, unless `return_exceptions`
            is true.

        Examples
        --------
        >>> list(c.map(pow, range(5), [2] * 5))
        [0, 1, 4, 9, 16]
        >>> sorted(c.map(abs, [-3, -1, -2], ordered=False))
        [1, 2, 3]
        >>> list(c.map(int, ["1", "x"], return_exceptions=True))
        [1, ValueError("invalid literal for int() with base 10: 'x'")]
        """
        if chunksize is not None:
            try:
                chunksize = operator.index(chunksize)
            except TypeError:
                raise TypeError(f"chunksize={chunksize!r}: it must be an integer or None") from None
            if not 1 <= chunksize <= NUMBER_MAX:
                raise ValueError(f"chunksize={chunksize!r}: it must be from 1 to {NUMBER_MAX}")
        if buffersize is not None:
            try:
                buffersize = operator.index(buffersize)
            except TypeError:
                raise TypeError("buffersize must be an integer or None") from None
        if buffersize is not None and buffersize < 1:
            raise ValueError(f"buffersize={buffersize!r}: it must be 1 or more, or None")
        refuse_unused(self._options, "map")
        check_timeout(timeout)
        deadline = None if timeout is None else clock.monotonic() + timeout
        items = Items(iterables, at_once=buffersize is None)
        total = length_of(iterables) if items.count is None else items.count
        size = size_max = chunksize or 1
        options = self._options
        if options.retry_delay is not None and options.retry_exceptions:
            if size > 1:
                raise ValueError(
                    f"chunksize={size} with options(retry_delay=, retry_exceptions=): an item that "
                    "waits for its next attempt would delay the other items of its chunk; leave "
                    "chunksize out, or make it 1"
                )
        elif self._debugs:
            size = size_max = 1
        elif chunksize is None and items.count and not flags_of(fn):
            size_max = self._chunksize(items.count)  # not for async calls, which run concurrently
            size = min(size_max, CHUNK_ITEMS_FIRST)
        chunked = size > 1
        # All items use the function with its current closure and globals.
        catches = bool(return_exceptions)
        fixed: Any = FrozenFunction(fn, chunked, self._options.retry_exceptions, catches)
        futures: Iterator[tuple[Future[Any], int]]
        if chunked:
            name = self._options.name or getattr(fn, "__name__", "map")
            view = self._view(self._options.override({"name": name}))
            futures = Chunks(items, functools.partial(view.submit, fixed), size, size_max)
            limit = None if buffersize is None else max(1, buffersize // size)
        else:
            futures = ((self.submit(fixed, *args), 1) for args in items.rows())
            limit = buffersize
        bar = open_bar(progress, total)
        run = MapRun(futures, limit, timeout, deadline, ordered, self, bar, catches, chunked)
        return Results(run)

    def _chunksize(self, count: int) -> int:
        workers = self._runtime.pool_sizes.get(self._pool, self._runtime.pool_sizes.get(0, 1))
        return max(1, min(count // (CHUNKS_PER_WORKER * max(1, workers)), CHUNK_ITEMS_MAX))


WORKERS_FIELD = 3  # index in a node's entry in the reply to Members


class Sized:
    """An executor over one pool of workers. Dask and other libraries read an executor's
    `_max_workers` to choose how many tasks they send at a time."""

    _runtime: Runtime
    _pool: int

    @property
    def _max_workers(self) -> int:
        """The size of the executor's dedicated pool, or the number of all common workers; at least
        1."""
        runtime = self._runtime
        known = runtime.pool_sizes.get(self._pool)
        if known is None:
            found = runtime.channel.call(Members()).value
            known = sum(node[WORKERS_FIELD] for node in found)
        return max(1, known)


RETRIES_MAX = 127
COMMON_POOL = 0
NO_WORKERS = (
    "this cluster was created with workers=0, so it cannot run tasks: create it with workers, or "
    "use c.executor(), which has dedicated workers"
)
WORKERS_OF_AN_ENGINE = (
    "this cluster has no workers, because tasks run in the workers of Ray or Dask: use "
    "task.remote() or client.submit() (inside a Dask task, distributed.get_client().submit()), "
    "or hoplite_mp.current().executor(), which has dedicated workers"
)
TIMEOUT_S_MAX = 1e9  # 31 years; a longer timeout is treated as no timeout


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The options of submit, map, executor and actor; see `Cluster.options`."""

    node: Any = None
    retries: int | None = None  # None: Config.retries
    timeout: float | None = None
    copy: bool = False
    name: str | None = None
    restarts: int = 0
    checkpoint: int = 0
    detached: bool = False
    get_if_exists: bool = False
    concurrency: int = 1
    buffersize: int | None = None
    retry_exceptions: tuple[type[Exception], ...] = ()
    retry_delay: RetryDelay | None = None
    env: Environment = ()
    priority: int = 0
    resources: Demand | None = None
    # Whether any option is set that has no effect on `submit`. Precomputed, because `submit` must
    # be fast.
    _unfit: bool = dataclasses.field(init=False, default=False, compare=False)

    def __post_init__(self) -> None:
        unfit = any(getattr(self, name) for name in UNUSED["submit"])
        object.__setattr__(self, "_unfit", unfit)

    def override(self, changes: dict[str, Any]) -> Options:
        """A copy with changed options. Raises TypeError for names that do not exist."""
        known = {field.name for field in dataclasses.fields(self) if field.init}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise TypeError(
                f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}; "
                f"there are {', '.join(sorted(known))}"
            )
        retries, timeout = changes.get("retries"), changes.get("timeout")
        if retries is not None:
            changes["retries"] = whole(retries)
            if changes["retries"] is None or not 0 <= changes["retries"] <= RETRIES_MAX:
                raise ValueError(f"retries={retries!r}: it must be from 0 to {RETRIES_MAX}")
        if timeout is not None:
            check_timeout(timeout)
            if not timeout > 0:
                raise ValueError(f"timeout={timeout!r}: it must be a positive number of seconds")
            changes["timeout"] = None if timeout > TIMEOUT_S_MAX else float(timeout)
        if "restarts" in changes:
            restarts = changes["restarts"]
            changes["restarts"] = whole(restarts)
            if changes["restarts"] is None or not 0 <= changes["restarts"] <= NUMBER_MAX:
                raise ValueError(f"restarts={restarts!r}: it must be from 0 to {NUMBER_MAX}")
        check_counts(changes)
        check_values(changes)
        check_demands(changes)
        if "checkpoint" in changes:
            checkpoint = changes["checkpoint"]
            changes["checkpoint"] = 0 if checkpoint is None else whole(checkpoint)
            if changes["checkpoint"] is None or changes["checkpoint"] < (checkpoint is not None):
                raise ValueError(f"checkpoint={checkpoint!r}: it must be 1 or more calls, or None")
        name = changes.get("name")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name={name!r}: it must be a string, or None")
        return dataclasses.replace(self, **changes)


class TaskExecutor(MapCalls, Sized, concurrent.futures.Executor):
    """An executor that submits tasks to one pool of a cluster."""

    _runtime: Runtime
    _options: Options
    _pool: int
    _closed: bool = False
    _parent: TaskExecutor | None = None  # the executor of which this one is a view
    _debugs = False  # True: submit and map run their tasks immediately, in this process
    _places: Sequence[tuple[int, int]] = ()  # (node, number of dedicated workers there)
    _pickles_later = False  # True: a pickling error fails the Future, as in the stdlib

    def __reduce__(self) -> Any:
        raise TypeError(
            "an executor belongs to the process that opened it, and cannot be sent to another "
            "process; in a task, use hoplite_mp.current() to submit tasks or to open another "
            "executor"
        )

    def _was_closed(self) -> bool:
        return self._closed or (self._parent is not None and self._parent._was_closed())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shuts down the executor, as in the standard library. A view shuts down its executor.

        Parameters
        ----------
        wait : bool, optional
            True returns when all tasks are done. Default: True.
        cancel_futures : bool, optional
            True cancels all tasks that have not begun. Default: False.

        Examples
        --------
        >>> pool = c.executor(1)
        >>> pool.shutdown()
        """
        if self._parent is not None:
            self._parent.shutdown(wait, cancel_futures=cancel_futures)

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool | None:
        if self._parent is not None:
            return self._parent.__exit__(kind, value, traceback)
        return super().__exit__(kind, value, traceback)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Runs `fn(*args, **kwargs)` in a worker.

        Parameters
        ----------
        fn : callable
            A function that can be imported from a module is sent by name, any other function by
            value. An `async def` function runs in the event loop of its worker.
        *args, **kwargs
            A ref or Future among the arguments, or inside a list, tuple, dict or set, is replaced
            by its value; the task waits for it. Arrays passed by value belong to the task, and are
            writable.

        Returns
        -------
        Future
            Its `.ref` refers to the result, and is valid immediately. Arrays in the result, and in
            the values of refs among the arguments, are read-only unless `options(copy=True)` is
            used.

        Raises
        ------
        ClosedError
            The cluster or executor was shut down.
        TypeError
            `fn` cannot be called, or is a generator function (use `stream`).
        RuntimeError
            The cluster has no workers.

        Notes
        -----
        A task whose worker or host dies is retried up to `options(retries=)` times, so
        it may run more than once. After an exception it is retried only if the exception is listed
        in `options(retry_exceptions=)`. `options(retry_delay=)` is the pause before each retry.

        Examples
        --------
        >>> data = c.put(np.arange(10))
        >>> total = c.submit(np.sum, data)
        >>> int(c.submit(np.multiply, total, 2).result())
        90
        """
        if self._was_closed():
            raise ClosedError(SHUT_DOWN)
        options = self._options
        if options._unfit:
            refuse_unused(options, "submit")
        if options.retry_exceptions and not isinstance(fn, FrozenFunction):
            fn = FrozenFunction(fn, again=options.retry_exceptions)  # type: ignore[assignment]
        flags = fn.flags if isinstance(fn, FrozenFunction) else flags_of(fn)
        if flags:
            flags |= options.concurrency << CONCURRENCY_SHIFT
        retries = options.retries
        runtime = self._runtime
        if self._debugs:
            runtime.memory.check_lost()
            return run_here(
                runtime.submitter,
                fn,
                args,
                kwargs,
                copy=options.copy,
                retries=runtime.config.retries if retries is None else retries,
                delay=options.retry_delay,
            )
        pool, demand, nodes = self._pool, options.resources, options.node
        if demand is not None:  # never in executors, whose workers hold resources permanently
            pool, nodes = COMMON_POOL, runtime.demands.nodes_for_task(demand, nodes)
        if nodes is not None:
            pool = self._bound(nodes)
        inherited_priority = runtime.submitter.inherited_priority
        ranked = inherited_priority > 0 or options.priority or demand is not None
        if runtime.pool_sizes.get(max(pool, 0)) == 0:
            raise RuntimeError(NO_WORKERS if runtime.foreign is None else WORKERS_OF_AN_ENGINE)
        if pool > COMMON_POOL and runtime.tasks.pool_state(pool) == POOL_BROKEN:
            raise self._why_broken(pool, fn)
        try:
            future: Future[T] = runtime.submitter.submit(
                fn,
                args,
                kwargs,
                pool,
                runtime.config.retries if retries is None else retries,
                options.timeout,
                options.copy,
                options.name,
                more_flags=flags,
                rank=(options.priority, inherited_priority) if ranked else None,
                demand=demand,
                delay=options.retry_delay,
            )
        except _serialize.NotPicklable as error:
            if not self._pickles_later:
                raise
            return runtime.submitter.fail_at_once(error.reason, options.copy)
        if self._was_closed() and future.cancel():  # closed by another thread meanwhile
            raise ClosedError(SHUT_DOWN)
        return future

    def _why_broken(self, pool: int, fn: Any) -> BaseException:
        """The error for tasks in a broken pool. To get the error, this method submits another task,
        and the node lets it fail."""
        name = self._options.name or getattr(fn, "__name__", type(fn).__name__)
        probe = self._runtime.submitter.submit(abs, (0,), {}, pool, 0, None, False, name)
        return probe.exception() or errors.WorkerLostError("the initializer of its workers failed")

    def _resolved(self, changes: dict[str, Any]) -> dict[str, Any]:
        """The changed options, with node numbers in place of nodes. Raises ValueError if there is
        no such node, or if this executor also has workers on other nodes."""
        if changes.get("node") is None:
            return changes
        common = self._pool == COMMON_POOL
        numbers = tuple(node_numbers(self._runtime, changes["node"], workers=common))
        if not common and not set(numbers) >= {number for number, _ in self._places}:
            raise ValueError(
                f"node={changes['node']!r}: this executor also has workers on other nodes; open "
                "another executor with c.executor(node=...)"
            )
        return {**changes, "node": numbers}

    def _bound(self, numbers: tuple[int, ...]) -> int:
        """The pool for tasks that are bound to these nodes. All workers of this executor's pool
        are on them."""
        return self._pool

    def _view(self, options: Options) -> TaskExecutor:
        view = TaskExecutor()
        view._runtime, view._pool, view._options = self._runtime, self._pool, options
        view._parent, view._pickles_later = self, self._pickles_later
        return view

    def _pending(self) -> list[int]:
        """The ids of this process's unfinished tasks in this pool."""
        submitter = self._runtime.submitter
        queues = submitter.queues.all_to(self._pool)
        if self._pool == COMMON_POOL:
            for pool in self._runtime.bound.values():
                queues |= submitter.queues.all_to(pool)
        return [oid for oid, task in submitter.pending.copy().items() if task.queue in queues]

    def _cancel_pending(self, force: bool) -> None:
        """Cancels this process's waiting tasks and, with `force`, its running tasks. Waiting tasks
        are cancelled first, because otherwise an interrupted worker would begin them."""
        for forced in (False, True)[: 1 + force]:
            for oid in self._pending():
                self._runtime.submitter.cancel(oid, forced)
