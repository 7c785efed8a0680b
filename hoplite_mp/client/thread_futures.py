"""ThreadFuture: the result of a call that a thread of this process makes in the background.

Why it exists: a `concurrent.futures.Future` cannot be awaited, and `asyncio.wrap_future` would pass
the cancellation of an `await` on to a call for which the other members of a Group wait.
It must never know: which thread settles it, what a Group is.
"""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hoplite_mp.client.ports import Waits

__all__ = ["ThreadFuture"]

T = TypeVar("T")


class ThreadFuture(concurrent.futures.Future[T]):
    """A `concurrent.futures.Future` of this process. `await future` gives its value, in any event
    loop; cancelling the `await` cancels nothing else."""

    def __init__(self, blocks: Waits | None = None) -> None:
        """blocks: in a worker, its waits: the task counts as blocked while it awaits this, because
        the thread that settles it does not count."""
        super().__init__()
        self._blocks = blocks

    def fill(self, call: Callable[..., T], args: Any, kwargs: Any) -> None:
        """Makes the call, unless this Future was cancelled before, and stores its result or
        error."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            value = call(*args, **kwargs)
        except BaseException as error:
            self.set_exception(error)
            self = None  # type: ignore[assignment]  # no reference cycle through the traceback
        else:
            self.set_result(value)

    def __await__(self) -> Generator[Any, None, T]:
        """The value, without blocking the event loop; cancelling the `await` cancels nothing
        else."""
        from hoplite_mp.client.awaiting import result_of_thread

        return result_of_thread(self, self._blocks).__await__()
