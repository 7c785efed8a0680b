"""A Group's background calls, made one after the other in a thread of the Group.

The ranks' calls are matched by their order, so a queued call cannot be cancelled. The Group's
`timeout` counts from the time at which the thread begins the call. If a wait for the Future is
interrupted or times out earlier, the call continues. A signal handler may raise an exception
between any two steps, so a call is queued in a single step (the queue's `put`).
"""

from __future__ import annotations

import contextvars
import functools
import logging
import queue
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from hoplite_mp._client.thread_futures import ThreadFuture
from hoplite_mp._common import clock
from hoplite_mp._common.locks import starting_thread
from hoplite_mp.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Background", "CallFuture"]

T = TypeVar("T")
# The longest step of a wait. If a thread is interrupted while it holds the Future's turnstile,
# other waiting threads are delayed by up to this time.
SLICE_S = 0.5
_log = logging.getLogger("hoplite_mp")


class CallFuture(ThreadFuture[T]):
    """The Future of a background call. Waits do not acquire the condition of the standard library's
    Future: an exception raised by a signal handler could leave the condition locked, and then the
    Group's thread could not settle the Future."""

    def __init__(self, background: Background) -> None:
        # A task that waits for this Future does not count as blocked, because the Group's thread
        # already does.
        super().__init__()
        self._background = background
        # Locked until the call is over. It is a plain lock without a place in the lock order,
        # because one thread acquires it and another thread, which makes the call, releases it.
        self._turnstile = turnstile = threading.Lock()
        turnstile.acquire()

        def over(_: object) -> None:
            turnstile.release()

        self.add_done_callback(over)  # the first callback, so that no other callback delays a wait
        self.set_running_or_notify_cancel()  # `cancel` returns False: the call keeps its place

    def result(self, timeout: float | None = None) -> T:
        """Like `concurrent.futures.Future.result`."""
        try:
            self.wait(timeout)
            return self.outcome()
        finally:
            self = None  # type: ignore[assignment]  # no reference cycle through the traceback

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Like `concurrent.futures.Future.exception`."""
        self.wait(timeout)
        return self._exception

    def outcome(self) -> T:
        """Returns or raises the result of the finished call."""
        error = self._exception
        if error is not None:
            try:
                raise error
            finally:
                del self, error  # no reference cycle through the traceback
        return self._result  # type: ignore[return-value]

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the call is over. Raises TimeoutError after `timeout` seconds, and
        RuntimeError in the thread that makes the call."""
        since = clock.monotonic()
        if not self.is_settled and timeout != 0 and self._background.is_here():
            raise RuntimeError(self._background.waits_for_itself)
        while not self.is_settled:
            left = SLICE_S if timeout is None else since + timeout - clock.monotonic()
            if left <= 0:
                raise TimeoutError
            if self._turnstile.acquire(timeout=min(left, SLICE_S)):
                self._turnstile.release()


class Background:
    """A Group's thread, and its queue of calls."""

    def __init__(self, name: str) -> None:
        """name: the Group's name. Each Future keeps this object alive, so this object must not keep
        the Group alive."""
        self._name = name
        self._jobs: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._ending = False  # whether no more calls are accepted
        # A daemon thread, because at exit Python waits for all other threads before the cluster is
        # shut down, and only the shutdown aborts calls that are still waiting.
        self._thread = threading.Thread(target=self._serve, name="hoplite_mp group", daemon=True)
        with starting_thread("makes a Group's calls in the background"):
            self._thread.start()

    # -- the thread that makes calls ---------------------------------------------------------------

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._run(job)
            except BaseException:  # an exception in a Future's callback must not stop the thread
                _log.exception("group %r: a callback of a call in the background", self._name)
            del job

    @staticmethod
    def _run(job: list[Any]) -> None:
        """Makes a call. job: [Future, function]. The list is emptied, because the traceback of an
        error keeps this frame, which must not refer to the Future that holds the error."""
        future, call = job
        job.clear()
        try:
            future.fill(call, (), {})
        finally:
            del future, call

    def is_here(self) -> bool:
        """Whether the caller runs in this thread, as the Futures' callbacks do."""
        return threading.current_thread() is self._thread

    @property
    def waits_for_itself(self) -> str:
        """The error text for a callback that would wait indefinitely."""
        return (
            f"group {self._name!r}: callbacks of its Futures run in the thread that makes its "
            "calls, so they cannot wait for such a call; they may make blocking calls"
        )

    # -- all other threads -------------------------------------------------------------------------

    def begin(self, call: Callable[..., T], *args: Any) -> CallFuture[T]:
        """Queues a call. The thread makes the call in the caller's context."""
        future: CallFuture[T] = CallFuture(self)
        run = functools.partial(contextvars.copy_context().run, call, *args)
        if self._ending:  # a callback has begun this call while `end` is waiting
            raise ClosedError(f"group {self._name!r}: this member is leaving")
        self._jobs.put([future, run])
        return future

    def end(self, wait: bool) -> None:
        """Refuses further calls, and waits for the queued calls if `wait` is True."""
        self._ending = True
        self.stop()
        while wait and self._thread.is_alive():
            self._thread.join(SLICE_S)

    def stop(self) -> None:
        """Stops the thread after the queued calls."""
        self._jobs.put(None)
