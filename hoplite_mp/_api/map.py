"""map: one function over many arguments, for every executor.

`Cluster`, its views, `c.executor(...)` and `hoplite_mp.Executor` map alike: arguments are cut into
chunks, each chunk is a task, and results come back in order or as they are ready.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, TypeVar

from hoplite_mp._client.chunks import Chunks, Items
from hoplite_mp._client.deadlines import check_timeout
from hoplite_mp._client.function_kind import flags_of
from hoplite_mp._client.functions import FrozenFunction
from hoplite_mp._client.mapping import MapRun, Results
from hoplite_mp._client.option_checks import refuse_unused
from hoplite_mp._client.progress import length_of, open_bar
from hoplite_mp._common import clock
from hoplite_mp._protocol.fields import NUMBER_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hoplite_mp._client.futures import Future
    from hoplite_mp._client.runtime import Runtime

__all__ = ["MapCalls"]

T = TypeVar("T")
# For map(chunksize=None): enough chunks to balance the load, and few enough to be cheap. The
# largest chunks are for items that take next to no time.
CHUNKS_PER_WORKER = 16
CHUNK_ITEMS_FIRST, CHUNK_ITEMS_MAX = 256, 4096


class MapCalls:
    """The part of an executor that has `map`."""

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

        As `concurrent.futures.Executor.map` of Python 3.14, on every Python, with more arguments.
        The iterator raises the first exception of an item and ends there: tasks that have not begun
        are cancelled, and further results are not available. `return_exceptions=True` goes on.

        Parameters
        ----------
        fn : callable
            Takes as many arguments as there are iterables.
        *iterables : iterable
            The map ends with the shortest one.
        timeout : float, optional
            Seconds from this call, after which asking for a result raises. Default: no limit.
        chunksize : int, optional
            Items that are sent as one task. Default: chosen from the number of items and workers;
            chunks grow as long as earlier ones are done at once.
        buffersize : int, optional
            How many results may be under way before the iterables are read further. Default: all
            are read at once.
        ordered : bool, optional
            False yields results as they come. Default: in the order of the items.
        progress : bool or str, optional
            True, or a text to stand before the bar: shows a bar of tqdm on stderr or in the
            notebook, which counts items that are done. It is drawn whenever a result is asked for,
            and needs the extra `progress`. Default: False.
        return_exceptions : bool, optional
            True: the exception of an item takes the place of its result; also that of a result
            that does not pickle, and WorkerLostError for the items of a chunk whose worker has
            died. The timeout of this call and errors of the iterables still raise. Default: False.

        Returns
        -------
        iterator
            Over the results, for `for` and `async for`. Closing it cancels what has not begun.

        Raises
        ------
        ValueError
            `chunksize` or `buffersize` is below 1, or `chunksize` above 2**63 - 1; or above 1 with
            `options(retry_delay=, retry_exceptions=)`.
        HopliteTimeoutError
            From the iterator: a result was not ready in time.
        Exception
            From the iterator: the exception of the first item that failed, unless
            `return_exceptions`.

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
                    "waits for its next try would hold up the others of its chunk; leave chunksize "
                    "out, or make it 1"
                )
        elif self._debugs:
            size = size_max = 1
        elif chunksize is None and items.count and not flags_of(fn):
            size_max = self._chunksize(items.count)  # async calls run side by side instead
            size = min(size_max, CHUNK_ITEMS_FIRST)
        chunked = size > 1
        # All items use the function with its closure and globals as they are now.
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
