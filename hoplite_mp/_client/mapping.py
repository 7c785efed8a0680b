"""The results of `map`, one after the other, while further tasks are sent.

`map` iterates over Futures, and submits further tasks as it advances, for threads and for event
loops. However the iteration ends, tasks that have not begun are cancelled. No Future is held longer
than needed.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hoplite_mp import _serialize
from hoplite_mp._client.completions import Completions
from hoplite_mp._client.functions import Raised
from hoplite_mp._common import clock
from hoplite_mp.errors import HopliteTimeoutError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterable, Iterator

    from hoplite_mp._client.futures import Future
    from hoplite_mp._client.memory import Memory

__all__ = ["MapRun", "Results", "bars_aside", "length_of", "open_bar"]

# The progress bar of `map(progress=)`.
#
# The package tqdm draws bars in terminals and notebooks. It is an optional dependency, which is
# imported when the first bar is opened. Workers' lines that arrive while a bar is shown are written
# above it.


_bars: weakref.WeakSet[Any] = weakref.WeakSet()  # tqdm sets `disable` when a bar is closed


def open_bar(progress: bool | str, total: int | None) -> Any:
    """A tqdm bar with a label; None if progress is False. Raises ModuleNotFoundError if tqdm cannot
    be imported."""
    if not isinstance(progress, (bool, str)):
        raise TypeError(f"progress={progress!r}: it must be True, False or a string")
    if progress is False:
        return None
    try:
        with warnings.catch_warnings():
            # Suppresses the warning in notebooks without ipywidgets, where the bar is a line of
            # text.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
    except ImportError as error:
        raise ModuleNotFoundError(
            f"map(progress=) needs tqdm, which cannot be imported ({error}): "
            "pip install 'hoplite-mp[progress]'",
            name="tqdm",
        ) from error
    bar = tqdm(total=total, desc=progress if isinstance(progress, str) else None)
    _bars.add(bar)
    return bar


def bars_aside(file: Any) -> Any:
    """A context manager for writing a line: bars are cleared before the line and redrawn after
    it."""
    bar = next((one for one in list(_bars) if not one.disable), None)
    return contextlib.nullcontext() if bar is None else bar.external_write_mode(file)


def length_of(iterables: Iterable[Any]) -> int | None:
    """The number of items that zip() would yield; None if it is unknown without reading the
    items."""
    lengths = []
    for iterable in iterables:
        try:
            lengths.append(len(iterable))
        except TypeError:
            return None
    return min(lengths, default=0)


T = TypeVar("T")


class MapRun:
    """One call to map: the Futures in progress, and the iterator that submits further tasks."""

    def __init__(
        self,
        futures: Iterator[tuple[Future[Any], int]],
        ahead_max: int | None,
        timeout: float | None,
        deadline: float | None,
        ordered: bool,
        executor: object,
        bar: Any,
        catches: bool,
        chunked: bool,
    ) -> None:
        """futures: pairs (Future, number of its items). timeout: seconds, as given by the user, for
        messages. deadline: the resulting time. executor: an object to keep alive. bar: a tqdm bar,
        or None. catches: whether items' exceptions are returned as results. chunked: whether a
        Future's result is a list of its items' results."""
        self._more = futures
        self._timeout = timeout
        self._deadline = deadline
        self._executor = executor
        self._bar = bar
        self._ordered = ordered
        self.catches = catches
        self.chunked = chunked
        self._sizes: dict[Future[Any], int] = {}  # if `catches`: Future -> number of its items
        # If `ordered`: the Futures in order, the next one first.
        self._ahead: deque[Future[Any]] = deque()
        # If `_ends` is used: each Future that is not known to be done -> number of its items.
        self._under_way: dict[Future[Any], int] = {}
        # Yields Futures as they complete. Used for a bar, and if results are not ordered.
        self._ends: Completions[Future[Any]] | None = None
        try:
            if bar is not None or not ordered:
                self._ends = Completions([], self.left())
            self._send(ahead_max)
        except BaseException:  # an argument that cannot be pickled, or Ctrl-C
            self.end()
            raise

    def left(self) -> float | None:
        """Seconds until the deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - clock.monotonic())

    def _send(self, count: int | None) -> None:
        for future, items in itertools.islice(self._more, count):
            if self._ordered:
                self._ahead.append(future)
            if self.catches:
                self._sizes[future] = items
            if self._ends is not None:
                self._under_way[future] = items
                self._ends.add(future)

    def __bool__(self) -> bool:
        """Whether any Futures are in progress."""
        return bool(self._ahead or self._under_way)

    def next(self) -> Future[Any]:
        """The next Future. If `_ends` is used, the Future is done; otherwise it may be pending."""
        if self._ends is None:
            return self._ahead.popleft()
        try:
            while self._ordered:
                self._catch_up()
                if self._ahead[0] not in self._under_way:
                    return self._ahead.popleft()
                self._ended(next(self._ends))
            return self._ended(next(self._ends))
        except HopliteTimeoutError:
            raise self.late() from None

    async def next_in_loop(self) -> Future[Any]:
        """The next Future, once it is done. Cancelling this call loses no Future."""
        if self._ends is None:
            from hoplite_mp._client.awaiting import ended

            future = self._ahead[0]
            if not await ended(future._submitter, future._oid, self.left()):
                raise self.late()
            return self._ahead.popleft()
        try:
            while self._ordered:
                self._catch_up()
                if self._ahead[0] not in self._under_way:
                    return self._ahead.popleft()
                self._ended(await anext(self._ends))
            return self._ended(await anext(self._ends))
        except HopliteTimeoutError:
            raise self.late() from None

    def _catch_up(self) -> None:
        """Updates the bar with the tasks that are done by now."""
        assert self._ends is not None
        while (future := self._ends.take()) is not None:
            self._ended(future)

    def _ended(self, future: Future[Any]) -> Future[Any]:
        items = self._under_way.pop(future)
        if self._bar is not None:
            self._bar.update(items)
        return future

    def result(self, future: Future[Any], result: Any) -> Any:
        """The result of a successful Future. It contains the exception of each failed item in its
        place."""
        if self.catches:
            del self._sizes[future]
            if self.chunked:
                memory = future._submitter.memory
                return [_of_item(memory, one) for one in result]
        return result

    def instead(self, future: Future[Any], error: BaseException) -> Any:
        """The result of a failed Future. Returns the task's own exception if this map returns
        exceptions; otherwise raises the error."""
        own = future._error
        if not self.catches or own is None:
            raise error
        if error is not own and _serialize.cause_of(error) is not own:  # `error` may wrap `own`
            raise error
        _serialize.drop_traceback(own)
        count = self._sizes.pop(future)
        return [own] * count if self.chunked else own

    def late(self) -> HopliteTimeoutError:
        """The error for a result that is not ready in time."""
        within = f"within the {self._timeout:g} s of map()"
        if self._ordered:
            return HopliteTimeoutError(f"the next result was not ready {within}")
        count = len(self._under_way)
        return HopliteTimeoutError(f"none of {count} running results was ready {within}")

    def go_on(self) -> None:
        """Sends another task, after a result has been read."""
        self._send(1)

    def end(self) -> None:
        """Cancels tasks that have not begun."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()
        for future in (*self._ahead, *self._under_way):
            future._seen()  # the failure of a running task will not be read
            future.cancel()
        self._ahead.clear()
        self._under_way.clear()
        self._sizes.clear()


def _of_item(memory: Memory, result: Any) -> Any:
    if type(result) is not Raised:
        return result
    return memory.to_raise(_serialize.with_text(result.error, result.text))


class Results(Generic[T]):
    """The iterator over results that `map` returns, for `for` and `async for`."""

    def __init__(self, run: MapRun) -> None:
        self._run = run
        self._results = results = _results_of(run)
        # Controls the iterator over the current chunk. Clearing the inner list ends this iterator
        # (see `_poppers`).
        self._turns: list[list[int]] = []
        self._iterator: Iterator[T] = results
        if run.chunked:
            self._iterator = itertools.chain.from_iterable(_poppers(results, self._turns))

    def __iter__(self) -> Iterator[T]:
        return self._iterator  # implemented in C, so it is faster than our __next__

    def __next__(self) -> T:
        return next(self._iterator)

    def close(self) -> None:
        """Cancels tasks that have not begun."""
        self._results.close()
        for turns in self._turns:
            turns.clear()
        self._run.end()

    def __aiter__(self) -> AsyncIterator[T]:
        return _InLoop(self._run)


def _results_of(run: MapRun) -> Generator[Any, None, None]:
    """Yields results. However the generator ends, tasks that have not begun are cancelled."""
    try:
        while run:
            future = run.next()
            try:
                result = [_read(future, run)]
                # Makes the submitter drop the Future, and with it the result.
                future._submitter.drain()
            finally:
                future.cancel()  # has no effect once the task is done
                del future
            run.go_on()
            yield result.pop()  # now only the caller holds the result
    finally:
        run.end()


def _read(future: Future[Any], run: MapRun) -> Any:
    try:
        return run.result(future, future.result(run.left()))
    except HopliteTimeoutError as error:
        if future.done():  # it is the task's own error
            return run.instead(future, error)
        raise run.late() from None
    except BaseException as error:
        if run.catches:
            return run.instead(future, error)
        raise


def _not_an_end(error: StopAsyncIteration) -> RuntimeError:
    """Replaces StopAsyncIteration, as PEP 479 replaces StopIteration: a task must not end the
    `async for` loop silently."""
    made = RuntimeError("a task of map() raised StopAsyncIteration")
    made.__cause__ = error
    return made


def _poppers(
    results: Generator[list[Any], None, None], turns: list[list[int]]
) -> Generator[Iterator[Any], None, None]:
    """Yields an iterator for each chunk. The iterator removes items from the chunk as it yields
    them, so only the caller holds a yielded item. No Python code runs for each item. The iterator
    ends when the list in `turns` is used up or cleared."""
    for chunk in results:
        chunk.reverse()
        turns[:] = [[-1] * len(chunk)]
        yield map(chunk.pop, turns[0])


class _InLoop(Generic[T]):
    """Iterates over the results in an event loop. It is not an asynchronous generator, because the
    event loop would have to close one."""

    def __init__(self, run: MapRun) -> None:
        self._run = run
        self._chunk: list[T] = []  # reversed: its last item is the next one
        self._future: Future[Any] | None = None  # a Future that is done and has not been read
        self._busy = False

    def __aiter__(self) -> _InLoop[T]:
        return self

    async def __anext__(self) -> T:
        import asyncio

        if self._busy:
            raise RuntimeError("another task is already waiting for the next result of this map()")
        self._busy = True
        try:
            while not self._chunk:
                await self._read()
            return self._chunk.pop()
        except asyncio.CancelledError:
            if self._future is not None and self._future.cancelled():
                self._end()
            raise  # if only this `await` was cancelled, the caller may repeat it
        except BaseException:  # the end, or a task's error
            self._end()
            raise
        finally:
            self._busy = False

    async def _read(self) -> None:
        from hoplite_mp._client.awaiting import result_of

        run = self._run
        if self._future is None:
            if not run:
                raise StopAsyncIteration
            self._future = await run.next_in_loop()
        try:
            result = run.result(self._future, await result_of(self._future))
        except StopAsyncIteration as error:
            result = run.instead(self._future, _not_an_end(error))
        except BaseException as error:
            if not run.catches:
                raise
            result = run.instead(self._future, error)
        self._future = None
        self._chunk = result[::-1] if run.chunked else [result]
        run.go_on()

    def _end(self) -> None:
        self._future = None
        self._run.end()

    async def aclose(self) -> None:
        """Cancels tasks that have not begun."""
        self._end()

    def __del__(self) -> None:
        self._run.end()
