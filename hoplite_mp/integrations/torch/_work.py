"""A pending torch call, and the thread that makes such calls in order.

With `async_op=True`, and in DistributedDataParallel, the program continues during a call. Ranks
match calls by their order, so each process group has one thread that makes these calls. If the
program waits for its call, the program's thread makes the call itself, because passing the call to
another thread and back takes longer than a small call.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.futures import Future

from hoplite_mp._common import locks
from hoplite_mp.errors import HopliteTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

__all__ = ["Work", "WorkThread"]


class Work(dist.Work):
    """The handle that a process group's call returns."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs
        self._done: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._future: Future[list[torch.Tensor]] | None = None
        self._lock = locks.lock("torch.work")

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the outputs are filled. Raises the call's exception if the call has
        failed."""
        seconds = timeout.total_seconds() if timeout else None  # torch's "no timeout" is zero
        try:
            self._done.result(seconds)
        except concurrent.futures.TimeoutError:
            if self._done.done():
                raise
            raise HopliteTimeoutError(f"Timed out after waiting {seconds} s") from None
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def is_success(self) -> bool:
        return self._done.done() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        return self._done.exception() if self._done.done() else None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """The rank of the sender, for a receive."""
        return self._done.result()

    _source_rank = source_rank

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A torch.futures.Future whose result is the list of outputs."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                self._done.add_done_callback(self._settle)
            return self._future

    def finish(self, call: Callable[[], int | None]) -> None:
        """Makes the call in this thread, and completes this Work with the call's result or
        exception."""
        try:
            source = call()
        except HopliteTimeoutError as error:  # torch programs search for torch's text
            made = HopliteTimeoutError(f"torch.distributed: Timed out waiting: {error}")
            made.__cause__ = error
            self._done.set_exception(made)
        except BaseException as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(-1 if source is None else source)

    def _settle(self, done: concurrent.futures.Future[int]) -> None:
        assert self._future is not None
        error = done.exception()
        if error is None:
            self._future.set_result(self._outputs)
        else:
            # torch calls callbacks even if the Future has failed, and prints the exceptions that
            # the callbacks raise.
            self._future.set_exception(error)


class WorkThread:
    """Makes calls in the given order: in a thread of its own, or in the program's thread if that
    thread waits for the call and no earlier call is pending."""

    def __init__(self, name: str, at_end: Callable[[], object]) -> None:
        """at_end: a function that leaves the Group; it may be called more than once."""
        self._queued = Queued()
        self._at_end = at_end
        self._thread = threading.Thread(
            target=_serve, args=(self._queued, at_end), name=name, daemon=True
        )
        self._thread.start()

    def make(self, outputs: list[torch.Tensor], call: Callable[[], Any], opts: Any = None) -> Work:
        """Makes the call, or has the thread make it. opts: torch's options, which determine
        whether the program continues during the call; None: it does. A call from a callback, which
        runs in the thread, is made immediately, because waiting for it would block the thread."""
        work = Work(outputs)
        if threading.current_thread() is self._thread:
            work.finish(call)
        elif getattr(opts, "asyncOp", True) or not self._queued.make_now(work, call):
            self._queued.put((work, call))
        return work

    def end(self, timeout_s: float | None = None) -> None:
        """Stops the thread after its pending calls, and waits until it has stopped."""
        self._queued.put(None)
        if self._queued.is_made_here():  # a signal handler has interrupted that call
            self._at_end()
        elif threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


class Queued:
    """The calls for the thread of a WorkThread. The thread refers to this object, not to the
    WorkThread, so that an unused WorkThread can be freed. Then the thread is stopped."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Work, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._turn = locks.lock("torch.turn")  # held while a program's thread makes a call
        self._maker = 0  # the id of that thread
        self._counting = locks.lock("torch.counting")  # guards `_left`
        self._left = 0  # calls that the thread has not finished

    def put(self, one: tuple[Work, Callable[[], Any]] | None) -> None:
        """Queues a call for the thread. None: the thread must stop."""
        with self._counting:
            self._left += 1
        self._calls.put(one)

    def is_made_here(self) -> bool:
        """Whether the calling thread is inside a call that it makes itself. Used in signal
        handlers."""
        return self._maker == threading.get_ident()

    def make_now(self, work: Work, call: Callable[[], Any]) -> bool:
        """Makes a call in this thread. Returns False if earlier calls are pending, so that the
        call must be queued. Raises RuntimeError if a signal handler makes a call while it
        interrupts another call."""
        if self.is_made_here():
            raise RuntimeError("a signal handler cannot wait for a call while it interrupts one")
        if self._is_busy() or self._turn.locked():
            return False
        with self._turn:
            if self._is_busy():
                return False
            try:
                self._maker = threading.get_ident()
                work.finish(call)
            finally:
                self._maker = 0
        return True

    def _is_busy(self) -> bool:
        return self._left > 0

    def serve(self) -> bool:
        """Makes the next call. Returns False if the thread must stop."""
        one = self._calls.get()
        try:
            # Waits until a program's thread has finished its call. `_left` prevents that thread
            # from making another call.
            with self._turn:
                pass
            if one is not None:
                one[0].finish(one[1])
        finally:
            with self._counting:
                self._left -= 1
        return one is not None


def _serve(queued: Queued, at_end: Callable[[], object]) -> None:
    while queued.serve():
        pass
    with contextlib.suppress(Exception):  # the cluster may be gone
        at_end()
