"""Lets an event loop wait for objects without a thread for each object.

`await future` and `await ref` must neither block the loop nor cancel the awaited task. The code
that processes completions puts waiters into the loop's inbox, which wakes the loop once for all
objects that completed together. A value that can be read immediately is then read in the loop. A
value that is on another host or on disk, or that takes long to read, is read in one of a few
threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hoplite_mp import _serialize
from hoplite_mp._client.collector import watch, withdraw
from hoplite_mp._client.waiting import BLOCKED_AFTER_NS
from hoplite_mp._common import clock
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.object_states import AWAY, is_cancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._client.ports import Submitting, WaitsPort
    from hoplite_mp._common.ref import ObjectRef

__all__ = [
    "LoopInbox",
    "counted",
    "ended",
    "in_thread",
    "inbox_here",
    "result_of",
    "result_of_thread",
    "value_of",
]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_VIEWED = (_serialize.ARRAY, _serialize.NUMBER)  # kinds that are read without a copy
_here = threading.local()


class Awaited(Protocol[T_co]):
    """A Future in this process's cluster."""

    _oid: int
    _writable: bool

    @property
    def _submitter(self) -> Submitting: ...
    @property
    def _is_unread(self) -> bool: ...
    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def result(self) -> T_co: ...


class OfThread(Protocol[T_co]):
    """A ThreadFuture."""

    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def result(self) -> T_co: ...
    def add_done_callback(self, fn: Callable[[Any], object]) -> None: ...
    def forget(self, callback: Callable[[Any], object]) -> None: ...
    def patience_s(self, since: float) -> float | None: ...


class LoopInbox:
    """The waiters in one event loop whose objects are done. Other threads add them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._news: deque[asyncio.Future[None]] = deque()
        self._scheduled = False  # whether a call that reads the inbox is scheduled

    def put(self, waiter: asyncio.Future[None], to_wake: deque[Callable[[], None]]) -> None:
        """Adds a waiter. May be called in any thread. After the caller has added all finished
        waiters, it calls the functions in `to_wake`."""
        self._news.append(waiter)
        to_wake.append(self.wake)

    def hand_over(self, waiter: asyncio.Future[None]) -> None:
        """Like `put`, for a single waiter."""
        self._news.append(waiter)
        self.wake()

    def wake(self) -> None:
        """Schedules a call in the loop that reads the inbox, unless one is already scheduled."""
        if self._scheduled or not self._news:
            return
        try:
            self._scheduled = True
            self.loop.call_soon_threadsafe(self._take)
        except RuntimeError:  # the loop is closed, so it has no waiters any more
            self._news.clear()
        except BaseException:  # for example Ctrl-C: the next `wake` must try again
            self._scheduled = False
            raise

    def _take(self) -> None:
        # Reset first: a waiter that is added afterwards is either seen here, or wakes the loop
        # again.
        self._scheduled = False
        while self._news:
            waiter = self._news.popleft()
            if not waiter.done():
                waiter.set_result(None)


def _loop_here() -> asyncio.AbstractEventLoop:
    """The asyncio loop that runs in this thread. Raises RuntimeError if there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "only asyncio coroutines can await this, and no asyncio loop is running in this "
            "thread. Under trio: await trio.to_thread.run_sync(future.result), or "
            "run_sync(c.get, ref)"
        ) from None


def inbox_here() -> LoopInbox:
    """The running loop's inbox. The inbox exists as long as it has waiters."""
    loop = _loop_here()
    known: weakref.ref[LoopInbox] | None = getattr(_here, "inbox", None)
    inbox = None if known is None else known()
    if inbox is None or inbox.loop is not loop:
        inbox = LoopInbox(loop)
        _here.inbox = weakref.ref(inbox)
    return inbox


@contextlib.contextmanager
def counted(waiting: WaitsPort) -> Iterator[None]:
    """A context manager around an `await` in a worker. As in `result()`, the worker counts as
    blocked after a while, and another worker is started in its place."""
    if waiting.run_in_place is None:
        yield
        return
    blocked = False

    def count() -> None:
        nonlocal blocked
        blocked = True
        waiting.count_blocked(1)

    handle = _loop_here().call_later(BLOCKED_AFTER_NS / 1e9, count)
    try:
        yield
    finally:
        handle.cancel()
        if blocked:
            waiting.count_blocked(-1)


async def ended(submitter: Submitting, oid: int, seconds: float | None = None) -> bool:
    """Waits until the object is done or its cluster has stopped. Returns False after `seconds`.
    Cancelling this wait does not cancel the task."""
    if submitter.tasks.done(oid):
        return True
    with submitter.waiting.own_waits([oid], True):
        return await _until_done(submitter, oid, seconds)


async def _until_done(submitter: Submitting, oid: int, seconds: float | None) -> bool:
    """Like `ended`, for an object that is not known to be done."""
    inbox = inbox_here()
    waiter: asyncio.Future[None] = inbox.loop.create_future()
    made = watch(submitter, oid, functools.partial(inbox.put, waiter, submitter.told))
    try:
        if seconds is None and submitter.waiting.run_in_place is None:
            await waiter
            return True
        with counted(submitter.waiting):
            done, _ = await asyncio.wait([waiter], timeout=seconds)
            return bool(done)
    finally:
        if waiter.cancelled() or not waiter.done():
            withdraw(submitter, made)


async def result_of(future: Awaited[T]) -> T:
    """The result of `await future`. Returns the value or raises the task's exception; raises
    asyncio.CancelledError if the task was cancelled, like `asyncio.wrap_future`."""
    submitter = future._submitter
    try:
        if not future.done():
            await ended(submitter, future._oid)
        if future.cancelled():
            raise asyncio.CancelledError("the task was cancelled")
        if not future._is_unread or _at_hand(submitter, future._oid, future._writable):
            return future.result()
        return await in_thread(submitter, future.result)
    finally:
        del future  # no reference cycle through its error's traceback


async def result_of_thread(future: OfThread[T], blocks: WaitsPort | None) -> T:
    """Like `result_of`, for a Future that a thread in this process settles. `blocks`: the worker's
    `Waiting` if the worker counts as blocked meanwhile; otherwise None."""
    try:
        if not future.done():
            inbox = inbox_here()
            waiter: asyncio.Future[None] = inbox.loop.create_future()
            since = clock.monotonic()

            def settled(_: object) -> None:
                inbox.hand_over(waiter)

            future.add_done_callback(settled)
            try:
                with contextlib.nullcontext() if blocks is None else counted(blocks):
                    await asyncio.sleep(0)  # the loop must run even with a timeout of 0
                    while not waiter.done():
                        await asyncio.wait([waiter], timeout=future.patience_s(since))
            finally:
                if not waiter.done() or waiter.cancelled():
                    future.forget(settled)
        if future.cancelled():
            raise asyncio.CancelledError("the call was cancelled")
        return future.result()
    finally:
        del future  # no reference cycle, as in `result_of`


async def value_of(submitter: Submitting, ref: ObjectRef[T]) -> T:
    """The result of `await ref`; see `result_of`."""
    memory = submitter.memory
    oid = memory.local_id(ref)
    await ended(submitter, oid)
    memory.check()
    if is_cancelled(memory.client, oid, memory.client.state(oid)):
        raise asyncio.CancelledError("the task was cancelled")
    if _at_hand(submitter, oid, False):
        return memory.read(oid, FOREVER_NS, False)  # type: ignore[no-any-return]
    return await in_thread(submitter, memory.read, oid, FOREVER_NS, False)


def _at_hand(submitter: Submitting, oid: int, writable: bool) -> bool:
    """Whether the object can be read without a request to another process or a large copy."""
    client = submitter.client
    if not client.usable:
        return True  # the value is in this process's memory, or reading fails immediately
    got = client.view(oid)
    if isinstance(got, int):
        return got not in AWAY
    if client.flags(oid)[0]:  # it contains refs, which may need requests to other hosts
        return False
    mem = memoryview(got)
    if mem.nbytes <= submitter.memory.config.await_read_bytes_max:
        return True
    return _serialize.payload_kind(mem) in _VIEWED and not writable


async def in_thread(submitter: Submitting, call: Callable[..., T], *args: Any) -> T:
    """Runs `call(*args)` in one of a few threads in this process."""
    readers = submitter.readers
    if readers is None:
        most = submitter.memory.config.await_threads_max
        readers = submitter.readers = concurrent.futures.ThreadPoolExecutor(
            most, thread_name_prefix="hoplite_mp await"
        )
    inbox = inbox_here()
    waiter: asyncio.Future[None] = inbox.loop.create_future()
    found: concurrent.futures.Future[Any] = readers.submit(_outcome, call, args)
    del call, args
    found.add_done_callback(lambda _: inbox.hand_over(waiter))
    await waiter
    value, error = found.result()
    if error is None:
        return value  # type: ignore[no-any-return]
    try:
        raise error
    finally:
        del found, error  # no reference cycle through the traceback


def _outcome(
    call: Callable[..., T], args: tuple[Any, ...]
) -> tuple[T | None, BaseException | None]:
    """(value, error) of a call. The error has no traceback, because the thread pool's frames in the
    traceback would refer to the call, and so to the error itself."""
    try:
        return call(*args), None
    except BaseException as error:
        return None, BaseException.with_traceback(error, None)
