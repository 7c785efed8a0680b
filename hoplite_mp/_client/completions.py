"""Futures and refs in the order in which they complete, for threads and event loops.

`map`, `as_completed` and progress bars need the next finished item, without checking all items each
time. Each item is therefore watched. When an item is done, its number is put into a queue, from
which items are taken in order of completion.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import queue
import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hoplite_mp import _tasks
from hoplite_mp._client.collector import DoneCallback, begin
from hoplite_mp._client.futures import Future
from hoplite_mp._client.runtime import runtime_of
from hoplite_mp._client.waiting import BLOCKED_AFTER_NS
from hoplite_mp._common import clock, locks
from hoplite_mp._common.clock import check_timeout, deadline_ns
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp.errors import HopliteTimeoutError

if TYPE_CHECKING:
    import asyncio

    from hoplite_mp._client.awaiting import LoopInbox
    from hoplite_mp._client.ports import Submitting

__all__ = ["Completions", "as_completed"]

T = TypeVar("T")
F = TypeVar("F", bound="concurrent.futures.Future[Any] | ObjectRef[Any]")
_NOTHING: Any = object()
_NUDGE = -1  # an entry in the queue that is not an item, but makes waiters check again
SLICE_S = 0.5  # how often a wait checks whether this process is still in its cluster


class Completions(Generic[T]):
    """The iterator that `as_completed` returns, for `for` and `async for`.

    It ends when all items have been yielded. If several threads or tasks iterate, each item is
    yielded to one of them.
    """

    def __init__(self, items: Any, timeout: float | None = None) -> None:
        check_timeout(timeout)
        self._deadline = None if timeout is None else clock.monotonic() + timeout
        self._numbers = itertools.count()
        self._items: dict[int, T] = {}  # items not yet yielded, by number
        self._known: dict[T, int] = {}
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ahead: deque[int] = deque()  # taken out of the queue, but not yet yielded
        self._added = 0
        self._lock = locks.lock("client.completions")
        self._submitters: dict[Submitting, None] = {}
        self._others = False  # whether there are Futures from another library
        self._sleeping = 0  # number of threads that are sleeping on the event word
        self._loops: dict[asyncio.Future[None], LoopInbox] = {}
        self.add(items)

    def add(self, more: Any) -> None:
        """Adds items. Any thread may call this, even while another thread is iterating.

        Parameters
        ----------
        more : Future, ObjectRef, or an iterable of them
            Items that were added before and have not been yielded are ignored.

        Examples
        --------
        >>> running = hoplite_mp.as_completed([c.submit(abs, -1)])
        >>> running.add(c.submit(abs, -2))
        >>> sorted(future.result() for future in running)
        [1, 2]
        """
        if isinstance(more, (concurrent.futures.Future, ObjectRef)):
            more = (more,)
        elif not isinstance(more, Iterable) or isinstance(more, (str, bytes)):
            raise _wrong_type(more)
        more = list(more)
        for item in more:
            if not isinstance(item, (concurrent.futures.Future, ObjectRef)):
                raise _wrong_type(item)
        for item in more:
            with self._lock:
                if item in self._known:
                    continue
                number = self._known[item] = next(self._numbers)
                self._items[number] = item
                self._added += 1
            try:
                self._watch(item, number)
            except BaseException:
                with self._lock:
                    self._items.pop(number, None)
                    self._known.pop(item, None)
                raise

    def _watch(self, item: Any, number: int) -> None:
        if isinstance(item, Future):
            if item._state != "PENDING":
                self._ended.put(number)  # even if its cluster has stopped
                self._wake(None)
                return
            submitter, oid = item._submitter, item._oid
        elif isinstance(item, ObjectRef):
            submitter = runtime_of(item).submitter
            oid = submitter.memory.local_id(item)
        else:
            self._others = True
            weak = weakref.ref(self)
            item.add_done_callback(functools.partial(_tell, weak, number, None))
            return
        submitter.memory.check()
        self._submitters[submitter] = None
        # The watch has only a weak reference to this object, because the program may drop it before
        # the items are done.
        begin(submitter, _Awaited(oid, weakref.ref(self), number, submitter))

    def _wake(self, submitter: Submitting | None) -> None:
        """Wakes all waiters for these items: immediately or, if a submitter is given, in the next
        call to its `wake_waiters`."""
        to_wake: deque[Any] = deque() if submitter is None else submitter.told
        if self._sleeping:
            for one in list(self._submitters):
                to_wake.append(functools.partial(one.tasks.wake, one.client.slot))
        for waiter, inbox in self._loops.copy().items():
            inbox.put(waiter, to_wake)
        while submitter is None and to_wake:
            to_wake.popleft()()

    def _take(self) -> Any:
        """The next finished item, or _NOTHING."""
        while True:
            if not self._ahead and self._ended.empty():
                return _NOTHING
            try:
                number = self._ahead.popleft() if self._ahead else self._ended.get_nowait()
            except (queue.Empty, IndexError):  # another thread has taken it
                return _NOTHING
            with self._lock:
                item = self._items.pop(number, _NOTHING)
                if item is _NOTHING:
                    continue
                self._known.pop(item, None)
                last = not self._items
            if last:  # the other waiters have nothing left to wait for
                self._ended.put(_NUDGE)
                self._wake(None)
            return item

    def take(self) -> T | None:
        """Returns the next item that is known to be done, without waiting; None if there is
        none."""
        item = self._take()
        return None if item is _NOTHING else item

    def __iter__(self) -> Completions[T]:
        return self

    def __next__(self) -> T:
        while (item := self._take()) is _NOTHING:
            if not self._items:
                raise StopIteration
            self._wait()
        return item  # type: ignore[no-any-return]

    def __aiter__(self) -> Completions[T]:
        return self

    async def __anext__(self) -> T:
        while (item := self._take()) is _NOTHING:
            if not self._items:
                raise StopAsyncIteration
            await self._wait_in_loop()
        return item  # type: ignore[no-any-return]

    # -- waiting -------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Processes completions. Returns True if an item can be taken now, or if there is nothing
        left to wait for."""
        for submitter in list(self._submitters):
            if submitter.client.usable:
                submitter.drain()
                submitter.look_at_others()
        return not self._ended.empty() or not self._items

    def _left(self) -> float | None:
        """Returns the seconds until the deadline. Raises HopliteTimeoutError after it."""
        if self._deadline is None:
            return None
        left = self._deadline - clock.monotonic()
        if left <= 0:
            raise HopliteTimeoutError(f"{len(self._items)} (of {self._added}) futures unfinished")
        return left

    def _wait(self) -> None:
        """Waits until there may be an item in the queue."""
        submitters = list(self._submitters)
        with self._own_waits(submitters, False):
            self._wait_for_news(submitters)

    def _own_waits(
        self, submitters: list[Submitting], awaits: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """A context manager around a wait. In an actor, raises RuntimeError if the wait would never
        end, because it is for later calls to the same actor."""
        with contextlib.ExitStack() as stack:
            for submitter in submitters:
                if submitter.waiting.own_calls is not None:
                    oids = self._oids(submitter)
                    stack.enter_context(submitter.waiting.own_waits(oids, awaits))
            return stack.pop_all()

    def _wait_for_news(self, submitters: list[Submitting]) -> None:
        if self._look():
            return
        if self._others or len(submitters) != 1:
            self._wait_counted(submitters)
            return
        (submitter,) = submitters
        tasks, waiting = submitter.tasks, submitter.waiting
        counted, blocked = waiting.run_in_place is None, False
        with self._lock:
            self._sleeping += 1
        try:
            while True:
                seen = tasks.event()
                if self._look():
                    return
                submitter.memory.check()
                left = self._left()
                until = deadline_ns(left)
                if not counted:
                    until = min(until, clock.monotonic_ns() + BLOCKED_AFTER_NS)
                if tasks.wait_event(seen, until, True) == _tasks.CLOSING:
                    self._wait_in_queue()  # the thread that closes the cluster notifies all waiters
                    return
                if not counted and clock.monotonic_ns() >= until:
                    counted = blocked = True
                    waiting.count_blocked(1)
        finally:
            with self._lock:
                self._sleeping -= 1
            if blocked:
                waiting.count_blocked(-1)

    def _wait_counted(self, submitters: list[Submitting]) -> None:
        """Like `_wait_in_queue`, but a worker counts as blocked during the wait."""
        of_workers = [one.waiting for one in submitters if one.waiting.run_in_place is not None]
        for waiting in of_workers:
            waiting.count_blocked(1)
        try:
            self._wait_in_queue()
        finally:
            for waiting in of_workers:
                waiting.count_blocked(-1)

    def _wait_in_queue(self) -> None:
        """Waits until something is put into the queue, for at most SLICE_S. Used for items from
        several clusters or from the standard library, which have no common event word."""
        left = self._left()
        with contextlib.suppress(queue.Empty):
            self._ahead.append(
                self._ended.get(timeout=SLICE_S if left is None else min(left, SLICE_S))
            )
            return
        # No item has arrived for a while. In a forked child, no item would ever arrive.
        if self._submitters and not any(one.client.usable for one in self._submitters):
            next(iter(self._submitters)).memory.check()

    async def _wait_in_loop(self) -> None:
        from hoplite_mp._client.awaiting import counted, inbox_here

        if self._look():
            return
        submitters = list(self._submitters)
        for submitter in submitters:
            submitter.memory.check()
        left = self._left()
        inbox = inbox_here()
        waiter: asyncio.Future[None] = inbox.loop.create_future()
        self._loops[waiter] = inbox
        handle = None if left is None else inbox.loop.call_later(left, inbox.hand_over, waiter)
        try:
            if self._look():  # an item arrived before the waiter was registered
                return
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._own_waits(submitters, True))
                for submitter in submitters:
                    stack.enter_context(counted(submitter.waiting))
                await waiter
        finally:
            if handle is not None:
                handle.cancel()
            del self._loops[waiter]

    def _oids(self, submitter: Submitting) -> list[int]:
        """The local ids of the awaited items that belong to that cluster."""
        items = list(self._items.values())
        oids = [
            one._oid for one in items if isinstance(one, Future) and one._submitter is submitter
        ]
        if len(self._submitters) == 1:
            oids += [submitter.memory.local_id(one) for one in items if isinstance(one, ObjectRef)]
        return oids


class _Awaited(DoneCallback):
    """The watch for one item."""

    __slots__ = ("completions", "number", "submitter")

    def __init__(
        self, oid: int, completions: weakref.ref[Completions[Any]], number: int, by: Submitting
    ) -> None:
        self.oid = oid
        self.completions = completions
        self.number = number
        self.submitter = by

    def tell(self) -> None:
        _tell(self.completions, self.number, self.submitter)


def _tell(
    weak: weakref.ref[Completions[Any]], number: int, submitter: Submitting | None, *_: Any
) -> None:
    """Called when this item is done, in any thread."""
    completions = weak()
    if completions is not None:
        completions._ended.put(number)
        completions._wake(submitter)


def _wrong_type(given: Any) -> TypeError:
    return TypeError(
        f"expected a Future or a ref, or an iterable of them, not {type(given).__name__}"
    )


def as_completed(futs: F | Iterable[F], timeout: float | None = None) -> Completions[F]:
    """Yields Futures and refs as they complete, whether ready or failed.

    Parameters
    ----------
    futs : Future, ObjectRef, or an iterable of them
        The items. Futures from other executors are allowed. Duplicates are yielded once.
    timeout : float, optional
        Seconds from this call. Default: no limit.

    Returns
    -------
    iterator
        An iterator for `for` and `async for`. Any thread may add items with `.add(more)` while it
        is running.

    Raises
    ------
    HopliteTimeoutError
        From the iterator: some items were not done in time.
    TypeError
        An item is neither a Future nor a ref.

    Examples
    --------
    >>> futures = [c.submit(pow, n, 2) for n in range(4)]
    >>> sorted(future.result() for future in hoplite_mp.as_completed(futures))
    [0, 1, 4, 9]
    """
    return Completions(futs, timeout)


as_completed.__module__ = "hoplite_mp"  # as users import it
