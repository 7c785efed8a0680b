"""Lock, RLock, Semaphore, BoundedSemaphore and Event for all processes in a cluster.

The package's docstring describes the design.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from hoplite_mp._client.memory import whole
from hoplite_mp._sync import sync_actors
from hoplite_mp._sync.handles import Handle, Read, Until, run, run_async, waits
from hoplite_mp._sync.waiting import CallAnswer
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from collections.abc import Generator

    from hoplite_mp._client.futures import Future

__all__ = ["BoundedSemaphore", "Event", "Lock", "RLock", "Semaphore", "owner", "task_owner"]

_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_counter = itertools.count(1)


def owner() -> int:
    """Returns the number that identifies this thread as the owner of a recursive lock. Numbers are
    never reused."""
    return _numbers.setdefault(threading.current_thread(), next(_counter))


def task_owner() -> int:
    """Returns the number that identifies the running asyncio task as an owner."""
    import asyncio

    task = asyncio.current_task()
    return owner() if task is None else _numbers.setdefault(task, next(_counter))


class _Acquired(Handle):
    """The base class of locks and semaphores: acquiring and releasing."""

    __slots__ = ()

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Acquires the lock or a permit for this process. Waits until one is free.

        Parameters
        ----------
        block : bool, optional
            Whether to wait. Default: True.
        timeout : float, optional
            Seconds to wait. Default: no limit.

        Returns
        -------
        bool
            Whether the lock or a permit was acquired.

        Examples
        --------
        >>> lock = hoplite_mp.Lock()
        >>> lock.acquire(), lock.acquire(block=False)
        (True, False)
        """
        return run(self._acquiring(block, timeout))

    async def acquire_async(self, block: bool = True, timeout: float | None = None) -> bool:
        """Like `acquire`, but does not block the event loop.

        A cancelled call has not acquired anything."""
        return await run_async(self._acquiring(block, timeout))

    def _acquiring(
        self, block: bool, timeout: float | None, *owner: int
    ) -> Generator[Future[Any] | Until | Read, Any, bool]:
        may_wait, deadline = waits(block, timeout)
        ticket = self._ticket()
        try:
            code, promised = yield self._call("acquire", ticket, may_wait, *owner)
            answer: CallAnswer | None = CallAnswer(code)
            if answer is CallAnswer.WAIT:
                answer = yield from self._until(promised, deadline)
                if answer is None:
                    answer = CallAnswer((yield self._call("stop_waiting", ticket, True)))
        except BaseException:  # Ctrl-C, a signal handler's error, or a cancelled await
            with contextlib.suppress(HopliteError):
                self._call("stop_waiting", ticket, False)
            raise
        return answer is CallAnswer.DONE

    def release(self) -> None:
        """Releases the lock or a permit. The process that has waited the longest acquires it.

        Raises
        ------
        ValueError
            No process holds the lock or a permit. `Semaphore` adds a permit instead.

        Examples
        --------
        >>> lock = hoplite_mp.Lock()
        >>> _ = lock.acquire()
        >>> lock.release()
        """
        self._check(self._call("release", self._process()).result())

    async def release_async(self) -> None:
        """Like `release`, but does not block the event loop."""
        self._check(await self._call("release", self._process()))

    def _check(self, released: bool) -> None:
        if not released:
            kind = type(self).__name__
            raise ValueError(f"{kind} released too many times: no process holds it")

    def locked(self) -> bool:
        """Whether `acquire` would wait now.

        Returns
        -------
        bool

        Examples
        --------
        >>> hoplite_mp.Lock().locked()
        False
        """
        return not self._call("value").result()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()

    async def __aenter__(self) -> None:
        await self.acquire_async()

    async def __aexit__(self, *raised: object) -> None:
        await self.release_async()


class Lock(_Acquired):
    """A lock for processes on all hosts; `with lock:` and `async with lock:`.

    Like `multiprocessing.Lock`, it is not recursive, and any process may release it (ValueError if
    it is not held). The lock belongs to the process that has acquired it, not to a thread or a
    task. When that process or its host dies, the process that has waited the longest gets the lock;
    the data that it protects may then be inconsistent. A task that ends without releasing the lock
    leaves it locked. Processes get the lock in the order of their calls.

    Parameters
    ----------
    name, node, detached
        As for `Queue`.

    Examples
    --------
    >>> lock = hoplite_mp.Lock()
    >>> def append(lock, line):
    ...     with lock, open("log.txt", "a") as log:
    ...         log.write(line)
    >>> done, _ = c.wait([c.submit(append, lock, "a line") for _ in range(2)])
    >>> len(done)
    2
    """

    __module__ = "hoplite_mp"  # as users import it

    __slots__ = ()

    _served = sync_actors.LockActor

    def __init__(
        self, *, name: str | None = None, node: Any = None, detached: bool = False
    ) -> None:
        self._make((), name, node, detached)


class Semaphore(_Acquired):
    """A number of permits for processes on all hosts; `with semaphore:`, `async with semaphore:`.

    As with `multiprocessing.Semaphore`, any process may call `release`, even more often than
    `acquire`; additional calls add permits. `release` frees a permit held by the calling process.
    If that process holds none, `release` frees the permit that another process has held the
    longest; if no process holds a permit, one is added. When a process or its host dies, its
    permits are passed to the processes that have waited the longest.

    Parameters
    ----------
    value : int, optional
        The initial number of permits, at least 0. Default: 1.
    name, node, detached
        As for `Queue`.

    Examples
    --------
    >>> two_at_a_time = hoplite_mp.Semaphore(2)
    >>> with two_at_a_time:
    ...     two_at_a_time.get_value()
    1
    """

    __module__ = "hoplite_mp"  # as users import it

    __slots__ = ()

    _served: ClassVar[type] = sync_actors.SemaphoreActor

    def __init__(
        self,
        value: int | None = None,
        *,
        name: str | None = None,
        node: Any = None,
        detached: bool = False,
    ) -> None:
        permits = whole(1 if value is None else value)
        if permits is None:
            raise TypeError(f"value={value!r}: it must be a whole number, or None")
        if permits < 0:
            raise ValueError(f"value={value!r}: it must be at least 0")
        self._make((permits,), name, node, detached)
        if name and value is not None:
            found = self._call("first_value").result()
            if found != permits:
                raise ValueError(
                    f"value={value!r}: the semaphore named {name!r} was created with "
                    f"value={found}; omit value= to open it, or choose another name"
                )

    def get_value(self) -> int:
        """Returns the number of free permits.

        Returns
        -------
        int

        Examples
        --------
        >>> hoplite_mp.Semaphore(3).get_value()
        3
        """
        return int(self._call("value").result())


class BoundedSemaphore(Semaphore):
    """A semaphore that never has more permits than initially.

    Like `Semaphore`, but `release` raises ValueError if no process holds a permit.

    Parameters
    ----------
    value, name, node, detached
        As for `Semaphore`.

    Examples
    --------
    >>> semaphore = hoplite_mp.BoundedSemaphore(2)
    >>> with semaphore:
    ...     semaphore.get_value()
    1
    >>> semaphore.release()
    Traceback (most recent call last):
        ...
    ValueError: BoundedSemaphore released too many times: no process holds it
    """

    __module__ = "hoplite_mp"  # as users import it

    __slots__ = ()

    _served = sync_actors.BoundedSemaphoreActor


class RLock(_Acquired):
    """A recursive lock for processes on all hosts; `with lock:` and `async with lock:`.

    Like `multiprocessing.RLock`, it belongs to the thread that has acquired it. This thread may
    acquire the lock again, and must release it as many times. With the coroutine functions and
    `async with`, the lock belongs to the asyncio task instead. When the owner's process or host
    dies, the thread that has waited the longest gets the lock.

    Parameters
    ----------
    name, node, detached
        As for `Queue`.

    Examples
    --------
    >>> lock = hoplite_mp.RLock()
    >>> with lock, lock:
    ...     c.submit(lock.acquire, block=False).result()
    False
    """

    __module__ = "hoplite_mp"  # as users import it

    __slots__ = ()

    _served = sync_actors.RLockActor

    def __init__(
        self, *, name: str | None = None, node: Any = None, detached: bool = False
    ) -> None:
        self._make((), name, node, detached)

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Acquires the lock for this thread, which may already hold it.

        Parameters
        ----------
        block, timeout
            As for `Lock.acquire`.

        Returns
        -------
        bool
            Whether the lock was acquired.

        Examples
        --------
        >>> lock = hoplite_mp.RLock()
        >>> lock.acquire(), lock.acquire()
        (True, True)
        """
        return run(self._acquiring(block, timeout, owner()))

    async def acquire_async(self, block: bool = True, timeout: float | None = None) -> bool:
        """Like `acquire`, but for the running asyncio task. Does not block the event loop.

        A cancelled call has not acquired anything."""
        return await run_async(self._acquiring(block, timeout, task_owner()))

    def release(self) -> None:
        """Undoes one `acquire`.

        Raises
        ------
        AssertionError
            This thread does not own the lock.

        Examples
        --------
        >>> lock = hoplite_mp.RLock()
        >>> _ = lock.acquire()
        >>> lock.release()
        """
        self._check(self._call("release", self._process(), owner()).result())

    async def release_async(self) -> None:
        """Like `release`, but does not block the event loop."""
        self._check(await self._call("release", self._process(), task_owner()))

    def _check(self, released: bool) -> None:
        if not released:
            raise AssertionError("attempt to release an RLock that this thread does not own")

    def locked(self) -> bool:
        """Whether any thread owns the lock now.

        Returns
        -------
        bool

        Examples
        --------
        >>> hoplite_mp.RLock().locked()
        False
        """
        return super().locked()


class Event(Handle):
    """A flag that processes on all hosts can wait for. The flag is initially not set.

    Parameters
    ----------
    name, node, detached
        As for `Queue`.

    Examples
    --------
    >>> ready = hoplite_mp.Event()
    >>> answer = c.submit(ready.wait, 60)
    >>> ready.set()
    >>> answer.result()
    True
    """

    __module__ = "hoplite_mp"  # as users import it

    __slots__ = ()

    _served = sync_actors.EventActor

    def __init__(
        self, *, name: str | None = None, node: Any = None, detached: bool = False
    ) -> None:
        self._make((), name, node, detached)

    def set(self) -> None:
        """Sets the flag: waiting processes continue, and `wait` returns immediately.

        Examples
        --------
        >>> hoplite_mp.Event().set()
        """
        self._call("set").result()

    async def set_async(self) -> None:
        """Like `set`, but does not block the event loop."""
        await self._call("set")

    def clear(self) -> None:
        """Clears the flag, so that later calls to `wait` block until it is set again.

        Examples
        --------
        >>> hoplite_mp.Event().clear()
        """
        self._call("clear").result()

    async def clear_async(self) -> None:
        """Like `clear`, but does not block the event loop."""
        await self._call("clear")

    def is_set(self) -> bool:
        """Whether the flag is set now.

        Returns
        -------
        bool

        Examples
        --------
        >>> hoplite_mp.Event().is_set()
        False
        """
        return bool(self._call("is_set").result())

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the flag is set.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait. Default: no limit.

        Returns
        -------
        bool
            Whether the flag is set.

        Examples
        --------
        >>> hoplite_mp.Event().wait(timeout=0)
        False
        """
        return run(self._waiting(timeout))

    async def wait_async(self, timeout: float | None = None) -> bool:
        """Like `wait`, but does not block the event loop."""
        return await run_async(self._waiting(timeout))

    def _waiting(self, timeout: float | None) -> Generator[Future[Any] | Until | Read, Any, bool]:
        may_wait, deadline = waits(True, timeout)
        code, promised = yield self._call("wait", may_wait)
        if code == CallAnswer.WAIT:
            return (yield from self._until(promised, deadline)) is not None
        return bool(code == CallAnswer.DONE)
