"""Condition and Barrier for all processes in a cluster."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from hoplite_mp._client.memory import whole
from hoplite_mp._common import clock
from hoplite_mp._common.clock import FOREVER_NS, check_timeout
from hoplite_mp._sync import sync_actors
from hoplite_mp._sync.handles import Handle, Read, Until, run, run_async, waits
from hoplite_mp._sync.locks import Lock, RLock, owner, task_owner
from hoplite_mp._sync.waiting import CallAnswer
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hoplite_mp._client.futures import Future

__all__ = ["Barrier", "Condition"]

T = TypeVar("T")
Steps: TypeAlias = "Generator[Future[Any] | Until | Read, Any, T]"
EVERYBODY = 1 << 62
LOCK_NAME = "{} (lock)"  # the lock of a named condition


class Condition(Handle):
    """A condition variable for processes on all hosts; `with condition:`, `async with condition:`.

    It has the methods of `multiprocessing.Condition`. If a waiting call is interrupted, or its
    process dies, the call does not consume a notification: another waiting call is notified
    instead. If the process that holds the lock dies, the lock is released.

    Parameters
    ----------
    lock : Lock or RLock, optional
        The lock that protects the condition. Default: a new RLock.
    name, node, detached
        As for `Queue`. If the condition has a name, the new RLock gets a name, too.

    Examples
    --------
    >>> changed, queue = hoplite_mp.Condition(), hoplite_mp.Queue()
    >>> def give(changed, queue):
    ...     with changed:
    ...         queue.put("a value")
    ...         changed.notify()
    >>> with changed:
    ...     done = c.submit(give, changed, queue)
    ...     changed.wait_for(lambda: not queue.empty(), timeout=60)
    True
    """

    __module__ = "hoplite_mp"  # as users import it

    __slots__ = ("_lock",)

    _served = sync_actors.ConditionActor
    _lock: Lock | RLock

    def __init__(
        self,
        lock: Lock | RLock | None = None,
        *,
        name: str | None = None,
        node: Any = None,
        detached: bool = False,
    ) -> None:
        if lock is not None and not isinstance(lock, (Lock, RLock)):
            raise TypeError(f"lock={lock!r}: it must be a hoplite_mp.Lock or RLock")
        if lock is None:
            of_lock = None if name is None else LOCK_NAME.format(name)
            lock = RLock(name=of_lock, node=node, detached=detached)
        self._lock = lock
        self._make((), name, node, detached)

    def _extras(self) -> tuple[Any, ...]:
        return (self._lock,)

    def _take_extras(self, lock: Any = None) -> None:
        self._lock = lock

    # -- the lock ------------------------------------------------------------------------------

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Acquires the lock.

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
        >>> condition = hoplite_mp.Condition()
        >>> condition.acquire()
        True
        >>> condition.release()
        """
        return self._lock.acquire(block, timeout)

    async def acquire_async(self, block: bool = True, timeout: float | None = None) -> bool:
        """Like `acquire`, but does not block the event loop."""
        return await self._lock.acquire_async(block, timeout)

    def release(self) -> None:
        """Releases the lock.

        Examples
        --------
        >>> condition = hoplite_mp.Condition()
        >>> with condition:
        ...     pass
        """
        self._lock.release()

    async def release_async(self) -> None:
        """Like `release`, but does not block the event loop."""
        await self._lock.release_async()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    async def __aenter__(self) -> None:
        await self._lock.acquire_async()

    async def __aexit__(self, *raised: object) -> None:
        await self._lock.release_async()

    # -- waiting -------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> bool:
        """Releases the lock, waits for a notification, and acquires the lock again.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the notification. Default: no limit.

        Returns
        -------
        bool
            Whether the call was notified.

        Raises
        ------
        AssertionError
            The caller does not hold the lock.

        Examples
        --------
        >>> condition = hoplite_mp.Condition()
        >>> with condition:
        ...     condition.wait(timeout=0.01)
        False
        """
        return run(self._waiting(timeout, owner()))

    async def wait_async(self, timeout: float | None = None) -> bool:
        """Like `wait`, but does not block the event loop.

        A cancelled call holds the lock again when it raises CancelledError."""
        return await run_async(self._waiting(timeout, task_owner()))

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """Waits until the predicate returns a true value.

        Parameters
        ----------
        predicate : callable
            Called while the lock is held, immediately and after each notification.
        timeout : float, optional
            Seconds to wait. Default: no limit.

        Returns
        -------
        object
            The predicate's last value.

        Examples
        --------
        >>> condition = hoplite_mp.Condition()
        >>> with condition:
        ...     condition.wait_for(lambda: 3)
        3
        """
        return run(self._waiting_for(predicate, timeout, owner()))

    async def wait_for_async(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """Like `wait_for`, but does not block the event loop."""
        return await run_async(self._waiting_for(predicate, timeout, task_owner()))

    def notify(self, n: int = 1) -> None:
        """Notifies the `n` calls that have waited the longest.

        Parameters
        ----------
        n : int, optional
            The number of calls. Default: 1.

        Raises
        ------
        AssertionError
            The caller does not hold the lock.

        Examples
        --------
        >>> condition = hoplite_mp.Condition()
        >>> with condition:
        ...     condition.notify()
        """
        run(self._notifying(n, owner()))

    async def notify_async(self, n: int = 1) -> None:
        """Like `notify`, but does not block the event loop."""
        await run_async(self._notifying(n, task_owner()))

    def notify_all(self) -> None:
        """Notifies all waiting calls.

        Examples
        --------
        >>> condition = hoplite_mp.Condition()
        >>> with condition:
        ...     condition.notify_all()
        """
        self.notify(EVERYBODY)

    async def notify_all_async(self) -> None:
        """Like `notify_all`, but does not block the event loop."""
        await self.notify_async(EVERYBODY)

    def _notifying(self, n: int, number: int) -> Steps[None]:
        count = whole(n)
        if count is None or count < 0:
            raise ValueError(f"n={n!r}: it must be a whole number, at least 0")
        if not (yield self._lock._call("is_held", self._lock._process(), number)):
            raise AssertionError("notify() needs the lock: acquire() the condition first")
        yield self._call("notify", self._process(), count)

    def _waiting_for(
        self, predicate: Callable[[], T], timeout: float | None, number: int
    ) -> Steps[T]:
        check_timeout(timeout)
        until = None if timeout is None else clock.monotonic() + timeout
        while not (found := predicate()):
            left = None if until is None else until - clock.monotonic()
            if left is not None and left <= 0:
                break
            yield from self._waiting(left, number)
        return found

    def _waiting(self, timeout: float | None, number: int) -> Steps[bool]:
        """The steps of `wait`. Registers for notifications before it releases the lock, so that no
        notification is missed."""
        _, deadline = waits(True, timeout)
        ticket, lock = self._ticket(), self._lock
        released: Future[Any] | None = None
        try:
            try:
                promised = yield self._call("wait", ticket)
                released = lock._call("release_all", lock._process(), number)
                if not (yield released):
                    raise AssertionError("wait() needs the lock: acquire() the condition first")
                answer = yield from self._until(promised, deadline)
                if answer is None:
                    answer = CallAnswer((yield self._call("stop_waiting", ticket, True)))
            finally:
                if released is not None and (times := (yield released)):
                    yield from self._acquiring_again(number, times)
        except BaseException:
            with contextlib.suppress(HopliteError):
                self._call("stop_waiting", ticket, False)
            raise
        if answer is CallAnswer.DONE:
            self._call("returned", ticket)
        return answer is CallAnswer.DONE

    def _acquiring_again(self, number: int, times: int) -> Steps[None]:
        """Acquires the lock as many times as it was released. If the `await` is cancelled
        meanwhile, CancelledError is raised afterwards, as in asyncio. Ctrl-C interrupts the
        method."""
        lock = self._lock
        ticket = lock._ticket()
        request = lock._call("acquire_again", ticket, number, times)
        cancelled: BaseException | None = None
        while True:
            try:
                code, promised = yield request
                if code == CallAnswer.WAIT:
                    yield from lock._until(promised, FOREVER_NS)
                break
            except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
                with contextlib.suppress(HopliteError):
                    lock._call("stop_waiting", ticket, False)
                raise
            except BaseException as error:
                cancelled = error
        try:
            if cancelled is not None:
                raise cancelled
        finally:
            cancelled = None  # no reference cycle through its traceback


class Barrier(Handle):
    """A barrier for processes on all hosts, with the methods of `multiprocessing.Barrier`.

    When `parties` calls to `wait` have arrived, all of them return, and the next call begins a new
    round. If a waiting call times out, or its process or host dies, the barrier is broken: all
    calls raise `threading.BrokenBarrierError` until `reset()`. An interrupted or cancelled call
    leaves the round, and the other calls wait for a call that replaces it.

    Parameters
    ----------
    parties : int
        The number of calls to `wait` in a round, at least 1.
    action : callable, optional
        Called by one of the parties when all have arrived, before any of them returns. If it raises
        an exception, the barrier is broken. It is pickled with the handle.
    timeout : float, optional
        The default timeout of `wait`, in seconds. Default: no limit.
    name, node, detached
        As for `Queue`.

    Examples
    --------
    >>> barrier = hoplite_mp.Barrier(2)
    >>> other = c.submit(barrier.wait)
    >>> sorted([barrier.wait(60), other.result()])
    [0, 1]
    """

    __module__ = "hoplite_mp"  # as users import it

    __slots__ = ("_action", "_timeout")

    _served = sync_actors.BarrierActor
    _action: Callable[[], object] | None
    _timeout: float | None

    def __init__(
        self,
        parties: int,
        action: Callable[[], object] | None = None,
        timeout: float | None = None,
        *,
        name: str | None = None,
        node: Any = None,
        detached: bool = False,
    ) -> None:
        count = whole(parties)
        if count is None:
            raise TypeError(f"parties={parties!r}: it must be a whole number")
        if count < 1:
            raise ValueError(f"parties={parties!r}: it must be at least 1")
        if action is not None and not callable(action):
            raise TypeError(f"action={action!r}: it must be callable")
        check_timeout(timeout)
        self._action, self._timeout = action, timeout
        self._make((count,), name, node, detached)
        if name is not None and self.parties != count:
            raise ValueError(
                f"the barrier named {name!r} has {self.parties} parties, not {count}: pass "
                f"parties={self.parties}, or choose another name"
            )

    def _extras(self) -> tuple[Any, ...]:
        return self._action, self._timeout

    def _take_extras(self, action: Any = None, timeout: float | None = None) -> None:
        self._action, self._timeout = action, timeout

    def wait(self, timeout: float | None = None) -> int:
        """Waits until all parties have arrived.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait, after which the barrier is broken. Default: the barrier's timeout.

        Returns
        -------
        int
            The number of calls that arrived earlier in this round. It is different for each call.

        Raises
        ------
        threading.BrokenBarrierError
            The barrier is broken, or was reset meanwhile.

        Examples
        --------
        >>> hoplite_mp.Barrier(1).wait()
        0
        """
        return run(self._waiting(timeout))

    async def wait_async(self, timeout: float | None = None) -> int:
        """Like `wait`, but does not block the event loop.

        A cancelled call leaves the round, and does not break the barrier."""
        return await run_async(self._waiting(timeout))

    def _waiting(self, timeout: float | None) -> Steps[int]:
        may_wait, deadline = waits(True, self._timeout if timeout is None else timeout)
        ticket = self._ticket()
        try:
            acts = self._action is not None
            code, found = yield self._call("arrive", ticket, may_wait, acts)
            if code == CallAnswer.WAIT:
                promised = found
                kept = yield from self._kept(promised, deadline)
                if kept is None:
                    code = yield self._call("give_up", ticket)
                    if code == CallAnswer.DONE:  # the call was answered before the timeout
                        kept = yield from self._kept(promised, FOREVER_NS)
                if kept is not None:
                    code, found = kept
            if code == CallAnswer.ACT:
                code = yield from self._acting(ticket)
        except BaseException:  # a signal handler may raise any exception
            with contextlib.suppress(HopliteError):
                self._call("leave", ticket)
            raise
        if code != CallAnswer.DONE:
            raise threading.BrokenBarrierError
        return int(found)  # the index

    def _acting(self, ticket: Any) -> Steps[CallAnswer]:
        try:
            if self._action is not None:  # a handle that was opened by name may have no action
                self._action()
        except Exception:
            yield self._call("abort")
            raise
        return CallAnswer.DONE if (yield self._call("acted", ticket)) else CallAnswer.ENDED

    def reset(self) -> None:
        """Begins a new round; waiting calls raise BrokenBarrierError.

        Examples
        --------
        >>> hoplite_mp.Barrier(2).reset()
        """
        self._call("reset").result()

    async def reset_async(self) -> None:
        """Like `reset`, but does not block the event loop."""
        await self._call("reset")

    def abort(self) -> None:
        """Breaks the barrier: waiting and later calls raise BrokenBarrierError.

        Examples
        --------
        >>> barrier = hoplite_mp.Barrier(2)
        >>> barrier.abort()
        >>> barrier.broken
        True
        """
        self._call("abort").result()

    async def abort_async(self) -> None:
        """Like `abort`, but does not block the event loop."""
        await self._call("abort")

    @property
    def parties(self) -> int:
        """The number of calls to `wait` in a round.

        Returns
        -------
        int

        Examples
        --------
        >>> hoplite_mp.Barrier(3).parties
        3
        """
        return int(self._call("state").result()[0])

    @property
    def n_waiting(self) -> int:
        """The number of calls that are waiting.

        Returns
        -------
        int

        Examples
        --------
        >>> hoplite_mp.Barrier(3).n_waiting
        0
        """
        return int(self._call("state").result()[1])

    @property
    def broken(self) -> bool:
        """Whether the barrier is broken.

        Returns
        -------
        bool

        Examples
        --------
        >>> hoplite_mp.Barrier(3).broken
        False
        """
        return bool(self._call("state").result()[2])
