"""The results of `map`, one after the other, while more tasks are sent.

Why it exists: `map` is an iterator over Futures that are made as it goes on, for threads and for
event loops; whatever ends it, what has not begun is cancelled, and no Future is held longer than
needed.
It must never know: where tasks run, how they are made.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hoplite_mp.client.completions import Completions
from hoplite_mp.errors import HopliteTimeoutError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterator

    from hoplite_mp.client.futures import Future

__all__ = ["Results", "Run"]

T = TypeVar("T")


class Run:
    """One call of map: the Futures under way, and those that are still to be made."""

    def __init__(
        self,
        futures: Iterator[tuple[Future[Any], int]],
        ahead_max: int | None,
        deadline: float | None,
        ordered: bool,
        executor: object,
        bar: Any,
    ) -> None:
        """futures: each with the number of its items. executor: held. bar: of tqdm, or None."""
        self._more = futures
        self._deadline = deadline
        self._executor = executor
        self._bar = bar
        self._ordered = ordered
        self._ahead: deque[Future[Any]] = deque()  # if ordered: the next one is the first
        self._under_way: dict[Future[Any], int] = {}  # if ends are followed: not seen done
        self._ends: Completions[Future[Any]] | None = None
        try:
            if bar is not None or not ordered:
                self._ends = Completions([], self.left())
            self._send(ahead_max)
        except BaseException:  # an argument that does not pickle, Ctrl-C
            self.end()
            raise

    def left(self) -> float | None:
        """Seconds until the deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _send(self, count: int | None) -> None:
        for future, items in itertools.islice(self._more, count):
            if self._ordered:
                self._ahead.append(future)
            if self._ends is not None:
                self._under_way[future] = items
                self._ends.add(future)

    def __bool__(self) -> bool:
        """Something is under way."""
        return bool(self._ahead or self._under_way)

    def next(self) -> Future[Any]:
        """The next one, which need not be done if nobody follows the ends."""
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
            raise self._late() from None

    async def next_in_loop(self) -> Future[Any]:
        """The next one, when it is done. Cancelling this loses nothing."""
        if self._ends is None:
            from hoplite_mp.client.awaiting import ended

            future = self._ahead[0]
            if not await ended(future._submitter, future._oid, self.left()):
                raise self._late()
            return self._ahead.popleft()
        try:
            while self._ordered:
                self._catch_up()
                if self._ahead[0] not in self._under_way:
                    return self._ahead.popleft()
                self._ended(await anext(self._ends))
            return self._ended(await anext(self._ends))
        except HopliteTimeoutError:
            raise self._late() from None

    def _catch_up(self) -> None:
        """The bar shows what is done by now."""
        assert self._ends is not None
        while (future := self._ends.take()) is not None:
            self._ended(future)

    def _ended(self, future: Future[Any]) -> Future[Any]:
        items = self._under_way.pop(future)
        if self._bar is not None:
            self._bar.update(items)
        return future

    def _late(self) -> HopliteTimeoutError:
        if self._ordered:
            return HopliteTimeoutError(
                "the next result was not ready within the timeout of map(); "
                f"{len(self._ahead)} are under way"
            )
        return HopliteTimeoutError(
            f"none of {len(self._under_way)} results under way was ready within the timeout of "
            "map()"
        )

    def go_on(self) -> None:
        """A result has been read: another task is sent."""
        self._send(1)

    def end(self) -> None:
        """What has not begun is cancelled."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()
        for future in (*self._ahead, *self._under_way):
            future.cancel()
        self._ahead.clear()
        self._under_way.clear()


class Results(Generic[T]):
    """What `map` returns: an iterator over the results, for `for` and for `async for`."""

    def __init__(self, run: Run, chunked: bool) -> None:
        self._run = run
        self._chunked = chunked
        self._results = results = _results_of(run)
        self._turns: list[list[int]] = []  # of the chunk that is read now
        self._iterator: Iterator[T] = results
        if chunked:
            self._iterator = itertools.chain.from_iterable(_poppers(results, self._turns))

    def __iter__(self) -> Iterator[T]:
        return self._iterator  # compiled, so its steps cost less than ours

    def __next__(self) -> T:
        return next(self._iterator)

    def close(self) -> None:
        """Cancels what has not begun."""
        self._results.close()
        for turns in self._turns:
            turns.clear()
        self._run.end()

    def __aiter__(self) -> AsyncIterator[T]:
        return _InLoop(self._run, self._chunked)


def _results_of(run: Run) -> Generator[Any, None, None]:
    """Yields results; whatever ends this, what has not begun is cancelled."""
    try:
        while run:
            future = run.next()
            try:
                result = [future.result(run.left())]
                future._submitter.drain()  # it need not keep the Future, and so the result
            finally:
                future.cancel()  # without effect once it is done
                del future
            run.go_on()
            yield result.pop()  # it is the reader's alone from here on
    finally:
        run.end()


def _poppers(
    results: Generator[list[Any], None, None], turns: list[list[int]]
) -> Generator[Iterator[Any], None, None]:
    """For each chunk an iterator over its items, which takes them out: nothing here holds what the
    reader has been given. It takes no Python code for an item, and ends when the list in `turns`
    has no more of them."""
    for chunk in results:
        chunk.reverse()
        turns[:] = [[-1] * len(chunk)]
        yield map(chunk.pop, turns[0])


class _InLoop(Generic[T]):
    """The results in an event loop. No asynchronous generator, so no loop has to close it."""

    def __init__(self, run: Run, chunked: bool) -> None:
        self._run = run
        self._chunked = chunked
        self._chunk: list[T] = []  # its last item is the next one
        self._future: Future[Any] | None = None  # done, and not read yet
        self._busy = False

    def __aiter__(self) -> _InLoop[T]:
        return self

    async def __anext__(self) -> T:
        import asyncio

        if self._busy:
            raise RuntimeError("another task is waiting for the next result of this map() already")
        self._busy = True
        try:
            while not self._chunk:
                await self._read()
            return self._chunk.pop()
        except asyncio.CancelledError:
            if self._future is not None and self._future.cancelled():
                self._end()
            raise  # else the step was cancelled, and can be taken again
        except BaseException:  # the end, or the error of a task
            self._end()
            raise
        finally:
            self._busy = False

    async def _read(self) -> None:
        from hoplite_mp.client.awaiting import result_of

        run = self._run
        if self._future is None:
            if not run:
                raise StopAsyncIteration
            self._future = await run.next_in_loop()
        result = await result_of(self._future)
        self._future = None
        self._chunk = result[::-1] if self._chunked else [result]
        run.go_on()

    def _end(self) -> None:
        self._future = None
        self._run.end()

    async def aclose(self) -> None:
        """Cancels what has not begun."""
        self._end()

    def __del__(self) -> None:
        self._run.end()
