"""One call that torch has begun and may wait for, and the thread that makes them in order.

Why it exists: `async_op=True`, and DistributedDataParallel, go on while a call is under way; calls
are matched by their order, so one thread makes all of a process group.
It must never know: what the calls do.
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

from hoplite_mp.errors import HopliteTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

__all__ = ["Caller", "Work"]


class Work(dist.Work):
    """What a call of a process group returns."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs
        self._done: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._future: Future[list[torch.Tensor]] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the outputs are filled; raises what the call raised."""
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
        """Of a receive: the rank that has sent it."""
        return self._done.result()

    _source_rank = source_rank

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A torch.futures.Future of the list of outputs."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                self._done.add_done_callback(self._settle)
            return self._future

    def finish(self, call: Callable[[], int | None]) -> None:
        """Makes the call here and now."""
        try:
            source = call()
        except HopliteTimeoutError as error:  # torch's programs look for its words
            made = HopliteTimeoutError(f"torch.distributed: Timed out waiting: {error}")
            made.__cause__ = error
            self._done.set_exception(made)
            return
        except BaseException as error:
            self._done.set_exception(error)
            return
        self._done.set_result(-1 if source is None else source)

    def _settle(self, done: concurrent.futures.Future[int]) -> None:
        assert self._future is not None
        error = done.exception()
        if error is None:
            self._future.set_result(self._outputs)
        else:
            # torch calls callbacks of a failed Future, too, and prints what they raise.
            self._future.set_exception(error)


class Caller:
    """A thread that makes calls in the order in which they were given."""

    def __init__(self, name: str, at_end: Callable[[], object]) -> None:
        self._calls: queue.SimpleQueue[tuple[Work, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._calls, at_end), name=name, daemon=True
        )
        self._thread.start()

    def make(self, outputs: list[torch.Tensor], call: Callable[[], Any]) -> Work:
        """Makes it later; at once, if a callback of an earlier call asks for it: that one is over,
        and nobody else could make this one before the callback ends."""
        work = Work(outputs)
        if threading.current_thread() is self._thread:
            work.finish(call)
        else:
            self._calls.put((work, call))
        return work

    def end(self, timeout_s: float | None = None) -> None:
        """No more calls; waits for those that were made."""
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


def _serve(calls: Any, at_end: Callable[[], object]) -> None:
    while (one := calls.get()) is not None:
        work, call = one
        work.finish(call)
        del one, work, call
    with contextlib.suppress(Exception):  # the cluster may be gone
        at_end()
