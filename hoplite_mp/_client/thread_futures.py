"""ThreadFuture: the result of a call that a thread in this process performs in the background.

A `concurrent.futures.Future` cannot be awaited, and `asyncio.wrap_future` would propagate the
cancellation of an `await` to a call that the other members of a Group are waiting for.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from hoplite_mp._common import clock
from hoplite_mp._common.ref import NotAnArray

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hoplite_mp._client.ports import WaitsPort

__all__ = ["ThreadFuture", "for_asyncio", "outcome"]


T = TypeVar("T")
BLOCKED_AFTER_NS = 2_000_000
_PENDING, _RUNNING = "PENDING", "RUNNING"  # states in the standard library


def outcome(future: concurrent.futures.Future[Any]) -> tuple[Any, BaseException | None]:
    """(value, error) of a finished Future that was not cancelled. If reading the value raises an
    error, the error is returned, too, because otherwise the awaiting coroutine would stay
    pending."""
    try:
        error = future.exception()
        return future.result() if error is None else None, error
    except Exception as failure:
        return None, failure


class _AsyncioView:
    """A done Future for asyncio, which calls `exception` and then `result`, or `_get_snapshot`
    since Python 3.15."""

    def __init__(self, future: concurrent.futures.Future[Any]) -> None:
        self._future = future
        self._value: Any = None
        self.done, self.cancelled = future.done, future.cancelled

    def exception(self) -> BaseException | None:
        self._value, error = outcome(self._future)
        if not issubclass(type(error), StopIteration):
            return error
        made = RuntimeError("the task raised StopIteration")  # PEP 479
        made.__cause__ = error
        return made

    def result(self) -> Any:
        return self._value

    def _get_snapshot(self) -> tuple[bool, bool, Any, BaseException | None]:
        if self.cancelled():
            return True, True, None, None
        error = self.exception()
        return True, False, self._value, error


def for_asyncio(fn: Callable[[Any], object]) -> Callable[[Any], object]:
    """The done-callback to register for `fn`. The callback of `asyncio.wrap_future` receives an
    `_AsyncioView`, because an exception while it reads the Future would leave its coroutine
    pending."""
    if getattr(fn, "__module__", None) != "asyncio.futures":
        return fn
    return lambda future: fn(_AsyncioView(future))


class ThreadFuture(NotAnArray, concurrent.futures.Future[T]):
    """A `concurrent.futures.Future` in this process. `await future` returns its value, in any event
    loop. Cancelling the `await` does not cancel the call."""

    HOW = "future.result()"

    def __init__(self, blocks: WaitsPort | None = None) -> None:
        """blocks: the worker's waits if the worker counts as blocked while its task waits for this
        Future; None if the thread that settles the Future counts as blocked instead."""
        super().__init__()
        self._blocks = blocks

    @property
    def is_settled(self) -> bool:
        """Like `done`, but without a lock that an exception in a signal handler could leave
        held."""
        return self._state not in (_PENDING, _RUNNING)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Like `concurrent.futures.Future.add_done_callback`."""
        super().add_done_callback(for_asyncio(fn))

    def forget(self, callback: Callable[[Any], object]) -> None:
        """Removes a done-callback that is no longer needed."""
        with self._condition, contextlib.suppress(ValueError):
            self._done_callbacks.remove(callback)  # type: ignore[attr-defined]

    def result(self, timeout: float | None = None) -> T:
        """Like `concurrent.futures.Future.result`."""
        error = self.exception(timeout)
        try:
            if error is not None:  # `result` of Python 3.11 ignores an error that is false
                raise error
            return super().result(0)
        finally:
            # No reference cycle through the traceback.
            self = error = None  # type: ignore[assignment]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Like `concurrent.futures.Future.exception`."""
        return super().exception(self._wait(timeout))

    def _wait(self, timeout: float | None) -> float | None:
        """In a worker, waits, and counts as blocked after a while. Returns the remaining
        timeout."""
        blocks = self._blocks
        if blocks is None or blocks.run_in_place is None or self.done():
            return timeout
        first_s = (
            BLOCKED_AFTER_NS / 1e9 if timeout is None else min(BLOCKED_AFTER_NS / 1e9, timeout)
        )
        until = None if timeout is None else clock.monotonic() + timeout
        if self._settles(first_s):
            return 0
        left = None if until is None else max(0.0, until - clock.monotonic())
        blocks.count_blocked(1)
        try:
            self._settles(left)
        finally:
            blocks.count_blocked(-1)
        return 0

    def _settles(self, timeout: float | None) -> bool:
        """Waits until the Future is done or cancelled. Returns False after the timeout."""
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            super().exception(timeout)
        return self.done()

    def patience_s(self, since: float) -> float | None:
        """How many seconds an `await` that began at `since` (monotonic clock) may wait before it
        calls this method again; None for no limit. Raises HopliteTimeoutError if the limit has
        passed."""
        return None

    def __reduce__(self) -> Any:
        raise TypeError("a Group's Future cannot be pickled, and has no ref; send its result()")

    def fill(self, call: Callable[..., T], args: Any, kwargs: Any) -> None:
        """Makes the call, and stores its result or error. The Future must already be running, so
        that it cannot be cancelled."""
        try:
            value = call(*args, **kwargs)
        except BaseException as error:
            self.set_exception(error)
            self = None  # type: ignore[assignment]  # no reference cycle through the traceback
        else:
            self.set_result(value)

    def __await__(self) -> Generator[Any, None, T]:
        """Waits for the value without blocking the event loop. Cancelling the `await` does not
        cancel the call."""
        from hoplite_mp._client.awaiting import result_of_thread

        return result_of_thread(self, self._blocks).__await__()
