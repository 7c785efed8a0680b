"""Future: a real `concurrent.futures.Future` over a header in shared memory.

A task's state is in its header, and a Future only reads it. A standard Future creates a condition
and lists in `__init__`. Here they are created when they are first used. From then on, the collector
(a thread of the library) must watch for this result.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, TypeVar

from hoplite_mp import _serialize
from hoplite_mp._client.thread_futures import for_asyncio, outcome
from hoplite_mp._common import locks
from hoplite_mp._common.clock import FOREVER_NS, deadline_ns
from hoplite_mp._common.object_states import CANCELLED, STATE, is_cancelled
from hoplite_mp._common.ref import NotAnArray, ObjectRef
from hoplite_mp._common.signals import is_interruption
from hoplite_mp.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hoplite_mp._client.ports import Submitting, WaitsPort

__all__ = ["Future"]

T = TypeVar("T")
# Held while a Future's condition is created, and while a Future is completed: otherwise a new
# condition could miss the completion. Reentrant, because the garbage collector may run while it is
# held, and drop an object (for example a map) that cancels other Futures.
_making = locks.rlock("client.making_conditions")


def _forked() -> None:
    """Replaces the lock in a forked child, because a thread that does not exist there may hold
    it."""
    global _making
    _making = locks.rlock("client.making_conditions")


os.register_at_fork(after_in_child=_forked)
_log = logging.getLogger("concurrent.futures")  # like the standard library's Future
_NOTHING: Any = object()
_PENDING, _FINISHED, _CANCELLED = "PENDING", "FINISHED", "CANCELLED_AND_NOTIFIED"


class _Lent(weakref.ref[Any]):
    """A weak reference to an array in the store that `result` has returned. As long as the array
    exists, `result` returns it again. A strong reference would pin the array's bytes, so a list of
    Futures could fill the store."""

    __slots__ = ()


class _Waiters(list[Any]):
    """The waiters for a Future in `concurrent.futures.wait` or `as_completed`, in a worker. The
    worker counts as blocked as long as there are waiters."""

    def __init__(self, waiting: WaitsPort) -> None:
        super().__init__()
        self._waiting = waiting

    def append(self, waiter: Any) -> None:
        super().append(waiter)
        self._waiting.count_blocked(1)

    def remove(self, waiter: Any) -> None:
        super().remove(waiter)
        self._waiting.count_blocked(-1)


class _Condition(threading.Condition):
    """The condition of a pending Future, with the Future's waiters and callbacks. It consists of
    fewer objects for the garbage collector than a standard condition, which binds five methods of
    its lock. This matters because `concurrent.futures.wait` creates a condition for each Future."""

    def __init__(self, waiters: list[Any]) -> None:
        self._lock = locks.rlock("client.future")
        self._sleepers: deque[Any] | None = None
        self.waiters = waiters
        self.callbacks: list[Any] | None = None

    @property
    def _waiters(self) -> deque[Any]:
        """The locks of the waiting threads; the caller has acquired the condition."""
        if self._sleepers is None:
            self._sleepers = deque()
        return self._sleepers

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        return self._lock.acquire(*args, **kwargs)

    def release(self) -> None:
        self._lock.release()

    def _release_save(self) -> Any:
        return self._lock._release_save()  # type: ignore[attr-defined]

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)  # type: ignore[attr-defined]

    def _is_owned(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined,no-any-return]


class _Settled(threading.Condition):
    """The condition of every Future that was done before its condition was needed. Such a Future
    never changes, so this condition needs no lock and no waits."""

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def release(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        return True

    def notify(self, n: int = 1) -> None:
        pass

    def notify_all(self) -> None:
        pass


class _NoWaiters(list[Any]):
    """The waiters for a Future that was done before any waiter was added."""

    def append(self, waiter: Any) -> None:
        pass

    def remove(self, waiter: Any) -> None:
        pass


_SETTLED = _Settled()
_NO_WAITERS = _NoWaiters()


class Future(NotAnArray, concurrent.futures.Future[T]):
    """The result of a submitted task; a `concurrent.futures.Future`.

    `await future` returns its value, in any asyncio event loop. Dropping a Future cancels nothing.
    When the cluster is closed, the logger `hoplite_mp` reports failed tasks whose Futures have not
    been read.

    Examples
    --------
    >>> future = c.submit(pow, 2, 5)
    >>> future.add_done_callback(lambda done: None)
    >>> future.result(), future.done()
    (32, True)
    """

    __module__ = "hoplite_mp"  # as users import it
    HOW = "c.get(future) or future.result()"

    # The base class's __init__ is not called: see `_condition`.
    def __init__(self, submitter: Submitting, oid: int, hold: object, writable: bool) -> None:
        self._submitter = submitter
        self._oid = oid
        self._hold = hold
        self._writable = writable
        self._state = _PENDING
        self._made: threading.Condition | None = None
        self._value: Any = _NOTHING
        self._error: BaseException | None = None
        self._kept: memoryview | None = None  # the payload, kept when the cluster closed
        self._unkept = ""  # the reason why the payload could not be kept

    _reports = True  # whether an unread failure is reported when the cluster is closed

    @property
    def _is_unread(self) -> bool:
        """Whether this process still needs the store to read the result: the result has not been
        fetched, or is an array in the store."""
        if self._error is not None:
            return False
        return self._value is _NOTHING or type(self._value) is _Lent

    # -- attributes that the standard library uses ------------------------------------------------

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        made = self._made
        if made is None:
            if self._state is _PENDING:
                self._submitter.memory.check()
                self._settle_if_done()
            made = self._make_condition()
        return made

    def _make_condition(self) -> threading.Condition:
        if self._state is not _PENDING:
            with _making:
                made = self._made = self._made or _SETTLED
            return made
        # The collector is armed (it starts to watch for results) without the lock, and before any
        # thread can find the condition. `_settle` disarms it only if it finds the condition, so an
        # interrupt cannot cause a second disarm.
        collector, waiting = self._submitter.collector, self._submitter.waiting
        fresh = _Condition(_Waiters(waiting) if waiting.run_in_place else [])
        collector.arm()
        try:
            with _making:
                if self._made is None:
                    self._made = fresh if self._state is _PENDING else _SETTLED
                made = self._made
        finally:
            if self._made is not fresh:
                collector.disarm()
        return made

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Calls `fn(future)` when the task has ended, as in `concurrent.futures.Future`.

        Callbacks run one after another, in a thread of the library; `cancel` runs them before it
        returns.

        Parameters
        ----------
        fn : callable
            Called with this Future. It may wait for other Futures with `result` or `Cluster.wait`.
            It must not call `concurrent.futures.wait` or `as_completed`, because these need the
            thread that runs the callback. `ProcessPoolExecutor` has the same restriction.

        Examples
        --------
        >>> future = c.submit(abs, -1)
        >>> future.result()
        1
        >>> future.add_done_callback(lambda done: print(done.result()))
        1
        """
        super().add_done_callback(for_asyncio(fn))

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        """The waiters in `concurrent.futures.wait` and `as_completed`. Read while the condition is
        held."""
        made = self._made
        return made.waiters if type(made) is _Condition else _NO_WAITERS

    @property
    def _done_callbacks(self) -> list[Any]:
        """The callbacks. Read while the condition is held, or after the Future is done."""
        made = self._made
        if type(made) is not _Condition:
            return []
        if made.callbacks is None:
            made.callbacks = []
        return made.callbacks

    def _get_snapshot(self) -> tuple[bool, bool, Any, BaseException | None]:
        """(done, cancelled, value, error), like the standard library's Future since Python 3.15."""
        if not self.done():
            return False, False, None, None
        if self.cancelled():
            return True, True, None, None
        return True, False, *outcome(self)

    def _settle_if_done(self) -> None:
        """Completes a Future without waiters if its header is done. The submitter still processes
        the completion later."""
        submitter, oid = self._submitter, self._oid
        if submitter.tasks.done(oid):
            client = submitter.client
            state = client.state(oid)
            self._settle(state in CANCELLED and is_cancelled(client, oid, state), False)

    def _complete(self, cancelled: bool, failed: bool = False) -> None:
        """Completes this Future. Called by the submitter when the header is done."""
        if self._settle(cancelled, failed):
            self._tell()

    def _settle(self, cancelled: bool, failed: bool, error: BaseException | None = None) -> bool:
        """Completes this Future, and wakes its waiters. If this method returns True, the caller
        must then call `_tell` for the callbacks. `error`: the reason why there will never be a
        result."""
        with _making:
            if self._state is not _PENDING:
                return False
            if error is not None and self._is_unread:
                self._error = error
            made = self._made
            if made is None:
                self._state = _CANCELLED if cancelled else _FINISHED
                return False
        with made:
            if self._state is not _PENDING:  # another thread has completed it
                return False
            self._state = _CANCELLED if cancelled else _FINISHED
            for waiter in self._waiters:
                if cancelled:
                    waiter.add_cancelled(self)
                elif failed:
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
            made.notify_all()
        self._submitter.collector.disarm()
        return True

    def _tell(self) -> None:
        callbacks = self._done_callbacks
        if callbacks:
            locks.calls_user_code("callbacks of a Future are")
        interrupt: BaseException | None = None
        for callback in callbacks:
            try:
                callback(self)
            except BaseException as error:  # for example SystemExit; the others must run
                _log.exception("exception calling callback for %r", self)
                if issubclass(type(error), KeyboardInterrupt) or is_interruption(error):
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    # -- the public API -------------------------------------------------------------------------

    @property
    def ref(self) -> ObjectRef[T]:
        """A ref to the result. It is valid immediately, and even after cancellation or failure.

        Examples
        --------
        >>> future = c.submit(np.ones, 3)
        >>> c.get(future.ref)
        array([1., 1., 1.])
        """
        memory = self._submitter.memory
        return ObjectRef(memory.public_id(self._oid), self._hold)

    def done(self) -> bool:
        """Whether the task has ended: with a value, by an exception, or cancelled.

        Examples
        --------
        >>> future = c.submit(abs, -1)
        >>> c.wait(future)[1], future.done()
        ([], True)
        """
        return self._state is not _PENDING or self._submitter.is_done(self._oid)

    def running(self) -> bool:
        """Whether a worker is running the task now.

        Examples
        --------
        >>> future = c.submit(abs, -1)
        >>> future.result(), future.running()
        (1, False)
        """
        return (
            self._state is _PENDING
            and self._submitter.memory.client.state(self._oid) == STATE["CLAIMED"]
        )

    def cancelled(self) -> bool:
        """Whether the task was cancelled.

        Examples
        --------
        >>> future = c.submit(abs, -1)
        >>> future.result(), future.cancelled()
        (1, False)
        """
        if self._state is _PENDING:
            client = self._submitter.memory.client
            state = client.state(self._oid)
            return state in CANCELLED and is_cancelled(client, self._oid, state)
        return self._state is _CANCELLED

    def cancel(self, *, force: bool = False) -> bool:
        """Cancels the task.

        Parameters
        ----------
        force : bool, optional
            If True, a running task is interrupted, too: the Future is cancelled immediately, and
            the worker receives a KeyboardInterrupt. If the task has not ended after
            `Config.cancel_grace_s` seconds, the worker is killed and replaced. Tasks that the
            worker is running while the cancelled task waits are also interrupted, and run again if
            they have retries left. Default: False, as in the standard library. Running actor calls
            are never interrupted; `Actor.kill` kills an actor.

        Returns
        -------
        bool
            False if the task has ended, is running and `force` is False, or is a running actor
            call.

        Examples
        --------
        >>> import time
        >>> future = c.submit(time.sleep, 60)
        >>> future.cancel(force=True)
        True
        >>> future.cancelled()
        True
        """
        self._seen()  # the result is no longer needed, so a failure is not reported
        if self.cancelled():
            return True
        if self._state is not _PENDING:
            return False
        return self._submitter.cancel(self._oid, force)

    def result(self, timeout: float | None = None) -> T:
        """Waits for the task's value, and returns it.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; 0 polls. Default: no limit.

        Returns
        -------
        object
            The value. Its arrays are read-only ("assignment destination is read-only") unless the
            task was submitted with `c.options(copy=True)`. The Future does not pin an array in the
            store: if the program drops the array, the next call reads it again.

        Raises
        ------
        HopliteTimeoutError
            The task has not ended in time.
        CancelledError
            The task was cancelled.
        Exception
            The task's exception. Its `__cause__` is the remote traceback.

        Examples
        --------
        >>> c.submit(int, "x").result()
        Traceback (most recent call last):
            ...
        ValueError: invalid literal for int() with base 10: 'x'
        """
        value = self._fetch(timeout)
        if self._error is not None:
            try:
                raise self._error
            finally:
                self = None  # type: ignore[assignment]  # no reference cycle through the traceback
        return value  # type: ignore[no-any-return]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end of the task, and returns its exception.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; 0 polls. Default: no limit.

        Returns
        -------
        BaseException or None
            None if the task returned a value.

        Raises
        ------
        HopliteTimeoutError
            The task has not ended in time.
        CancelledError
            The task was cancelled.

        Examples
        --------
        >>> c.submit(int, "x").exception()
        ValueError("invalid literal for int() with base 10: 'x'")
        """
        self._fetch(timeout)
        return self._error

    def _fetch(self, timeout: float | None) -> Any:
        """The value. If the task raised an exception, sets `_error` and returns None."""
        if self._error is not None:
            self._seen()
            return None
        if (value := self._value) is not _NOTHING:
            if type(value) is not _Lent:
                return value
            if (value := value()) is not None:
                return value
        memory = self._submitter.memory
        mem = self._kept
        if mem is None:
            if self._state is _CANCELLED:
                raise CancelledError
            if self._unkept:
                raise ClosedError(self._unkept)
            memory.check()
            deadline = FOREVER_NS if timeout is None else deadline_ns(timeout)
            self._submitter.waiting.wait_done(self._oid, deadline)
            if self.cancelled():
                raise CancelledError
            mem = memory.payload(self._oid, deadline)
            if memory.client.printed != memory.printed:
                memory.show_printed(deadline)
        kind = _serialize.payload_kind(mem)
        if kind == _serialize.ERROR:
            self._error = memory.failure(mem)
            self._seen()
            return None
        try:
            value = _serialize.decode(mem, make_ref=memory.make_ref, writable=self._writable)
        except (KeyboardInterrupt, MemoryError):  # the next attempt may succeed
            raise
        except BaseException as error:  # for example, the value cannot be unpickled here
            if is_interruption(error):
                raise
            name = self._submitter.tasks.name(self._oid) if memory.client.usable else "task"
            self._error = memory.not_loaded(error, f"the result of {name}()")
            return None
        self._value = _Lent(value) if kind == _serialize.ARRAY and not self._writable else value
        return value

    def _seen(self) -> None:
        """Records that the failure was read, or need not be read."""
        if self._reports:
            self._reports = False
            self._submitter.failures.read(self._oid)

    def __await__(self) -> Generator[Any, None, T]:
        """Waits for the value without blocking the event loop. Cancelling the `await` does not
        cancel the task. (`asyncio.wrap_future` and `run_in_executor` propagate a cancellation to
        the task, as with every executor.)"""
        from hoplite_mp._client.awaiting import result_of

        return result_of(self).__await__()

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled() else "finished" if self.done() else "pending"
        if state == "finished":
            with contextlib.suppress(ClosedError):  # for example in a forked child
                state += self._raised()
        return f"<Future {self._submitter.memory.public_id(self._oid).hex()} {state}>"

    def _raised(self) -> str:
        """ " raised ValueError" for a failed task, if this process can find the error without
        waiting."""
        if self._error is not None:
            return f" raised {type(self._error).__name__}"
        client = self._submitter.client
        mem = self._kept
        if mem is None:
            if self._value is not _NOTHING or not client.usable:
                return ""
            if client.state(self._oid) != STATE["FAILED"]:
                return ""
            got = client.view(self._oid)
            if isinstance(got, int):  # the state has changed since it was read
                return ""
            mem = memoryview(got)
        try:
            failed = _serialize.payload_kind(mem) == _serialize.ERROR
            return f" raised {_serialize.error_name(mem)}" if failed else ""
        except Exception:  # the bytes are not a valid error, and a repr must not raise one
            return ""

    def __reduce__(self) -> Any:
        raise TypeError("a Future does not pickle; send its .ref")

    # The standard library's executors call these methods. Here a worker stores the result.
    def set_result(self, result: Any) -> None:
        raise concurrent.futures.InvalidStateError("the result of a task is set by its worker")

    def set_exception(self, exception: BaseException | None) -> None:
        raise concurrent.futures.InvalidStateError("the result of a task is set by its worker")

    def set_running_or_notify_cancel(self) -> bool:
        raise concurrent.futures.InvalidStateError("a task's state is set by its worker")
