"""The collector, a thread that processes completions while no call is waiting for them.

A thread that waits for a result, or submits a task, processes completions itself. Callbacks, the
standard library's waiters and dependencies between tasks have no such thread: the collector runs
for them, and otherwise sleeps. The collector calls all callbacks of Futures, because a thread that
waits for a result may hold a user's lock that a callback needs. It survives errors in callbacks and
a full store. Ctrl-C may interrupt a thread that wakes the collector at any point, and could leave
the inner locks of the standard library's Condition, Event and Thread locked indefinitely. So this
module does not use these classes.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import queue
import threading
from typing import TYPE_CHECKING

from hoplite_mp._common import clock, locks
from hoplite_mp._common.locks import starting_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._client.ports import Submitting


__all__ = ["Collector", "DoneCallback", "begin", "watch", "withdraw"]


STOP_PATIENCE_S = 1.0
AWAY = -1  # value of `_thread` if no thread may be started
_log = logging.getLogger("hoplite_mp")


class Collector:
    """The collector of one process. Its thread is started when it is first needed."""

    def __init__(self, submitter: Submitting) -> None:
        self._submitter = submitter
        self._armed = 0
        self._tell: Callable[[int], None] | None = None
        self._look_again = False
        self._resting = False  # whether the thread sleeps without a deadline
        self._closed = False
        # Reentrant, because the garbage collector may run while the lock is held, and call a method
        # that acquires it.
        self._lock = locks.rlock("client.collector")
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = 0  # the thread's ident; 0: not started

    def arm(self) -> None:
        """Records a waiter from the standard library, for which completions must be checked."""
        with self._lock:
            self._armed += 1
            if self._armed == 1 and self._tell is not None:
                self._tell(1)
        self.start()
        self.notice()

    def disarm(self) -> None:
        with self._lock:
            self._armed -= 1
            if not self._armed and self._tell is not None:
                self._tell(-1)

    def tell_armed(self, tell: Callable[[int], None]) -> None:
        """Registers `tell`. The collector calls tell(1) when the first waiter from the standard
        library begins, and tell(-1) when the last one ends. Such waiters are callbacks,
        `concurrent.futures.wait` and `asyncio.wrap_future`, but not `await future`."""
        with self._lock:
            if self._tell is None and self._armed:
                tell(1)
            self._tell = tell

    def look_again(self) -> None:
        """Makes the thread check all pending objects. Called when completions were taken from the
        queue, but perhaps not processed."""
        self._look_again = True
        self.start()
        self.notice()

    def start(self) -> None:
        """Starts the thread if it is not running."""
        if not self._thread:
            with self._lock:
                if not self._thread and not self._closed:
                    with starting_thread("looks for completions"):
                        self._thread = _thread.start_new_thread(self._run, ())

    def stay_away(self) -> None:
        """Prevents the start of the thread. Called in a process that processes completions
        itself."""
        self._thread = AWAY
        self._ended.put(None)

    def notice(self) -> None:
        """Wakes the thread from a sleep without a deadline, because it must now check for
        completions periodically."""
        if self._woken.empty():
            self._woken.put(None)

    def look_soon(self) -> None:
        """Makes sure that completions are processed within drain_interval_s, even if no call is
        waiting for them."""
        self.start()
        if self._resting:
            self.notice()

    def wake(self) -> None:
        """Wakes the thread unconditionally, because it must wait for a new object."""
        self.notice()
        self._submitter.tasks.wake(self._submitter.client.slot)

    @property
    def _serves(self) -> bool:
        """Whether the thread is running, and will continue."""
        memory = self._submitter.memory
        return self._thread > 0 and not self._closed and memory.lost is None

    @property
    def _is_here(self) -> bool:
        return self._thread == threading.get_ident()

    def call_back(self) -> None:
        """Makes the thread call the callbacks of finished Futures. If the thread is not running,
        this method calls them. The thread that closes the cluster calls the remaining ones."""
        if not self._serves:
            self._submitter.call_back()
        elif not self._is_here:
            self.wake()

    def stop(self) -> None:
        """Stops the thread. Unless the caller is that thread, waits until it has stopped, but at
        most STOP_PATIENCE_S, because the thread may be inside a callback."""
        self._closed = True
        if self._thread and self._thread != threading.get_ident():
            self.wake()
            with contextlib.suppress(queue.Empty):
                self._ended.put(self._ended.get(timeout=STOP_PATIENCE_S))  # kept for later calls

    def _run(self) -> None:
        try:
            self._turns()
        finally:
            self._ended.put(None)

    def _sleep(self, seconds: float | None) -> None:
        with contextlib.suppress(queue.Empty):
            self._woken.get(timeout=seconds)

    def _turns(self) -> None:
        memory = self._submitter.memory
        # When the node is gone, the thread that detects this fails the pending objects
        # (_client/closing.py).
        while not self._closed and memory.client.usable and memory.lost is None:
            try:
                self._turn()
            except BaseException:  # for example SystemExit in a callback; the others must still run
                if not self._closed:
                    _log.exception("in the collector thread")
                    self._look_again = True
                    clock.sleep(self._submitter.memory.config.drain_interval_s)

    def _turn(self) -> None:
        submitter = self._submitter
        tasks, memory = submitter.tasks, submitter.memory
        seen = tasks.event()
        submitter.drain()
        submitter.call_back()
        if submitter.client.news():
            memory.collect()
        submitter.look_at_others()
        interval = memory.config.drain_interval_s
        if self._look_again:
            self._look_again = False
            submitter.look_at_all()
            submitter.call_back()
            if self._look_again:  # some completions cannot be processed now
                self._sleep(interval)
                return
        if self._armed or submitter.wants_news:
            tasks.wait_event(seen, clock.monotonic_ns() + int(interval * 1e9), False)
            return
        # Set before the check. If another thread adds an object afterwards, either the check sees
        # the object, or the other thread sees the flag and wakes this thread.
        self._resting = True
        # The garbage collector may have cancelled Futures since `call_back` above.
        if submitter.pending or memory.inner or submitter.ended_futures:
            self._resting = False
            self._sleep(interval)
        else:
            self._sleep(None)
            self._resting = False


# Watches: callbacks that are called when an object is done, without a thread for each wait.
#
# An event loop, or an iteration over completions, waits for many objects, and cannot use a thread
# for each. The code that processes completions (`Submitter.drain`, the collector) notifies the
# watches, and wakes each waiter once for all objects that completed together.


class DoneCallback:
    """A callback for an object, listed together with the tasks that wait for it
    (`Submitting.waits`).

    `tell` is called when the object is done, or will never be done because its cluster has stopped.
    It may be called in any thread, and more than once. It must neither raise an exception nor
    block.
    """

    __slots__ = ("oid",)

    def __init__(self, oid: int) -> None:
        self.oid = oid

    def tell(self) -> None:
        """Notifies the waiter."""
        raise NotImplementedError


class _Call(DoneCallback):
    """A watch that calls a function."""

    __slots__ = ("tell",)

    def __init__(self, oid: int, tell: Callable[[], None]) -> None:
        self.oid = oid
        self.tell = tell  # type: ignore[method-assign]


def watch(submitter: Submitting, oid: int, tell: Callable[[], None]) -> DoneCallback:
    """Starts a watch that calls `tell`."""
    made = _Call(oid, tell)
    begin(submitter, made)
    return made


def begin(submitter: Submitting, made: DoneCallback) -> None:
    """Starts a watch. If the object is already done, the waiter is notified immediately. The caller
    must hold the object as long as the watch exists."""
    oid, memory = made.oid, submitter.memory
    memory.check()
    try:
        with submitter.waits_lock:
            first = not submitter.waits
            submitter.begin_wait(oid, made)
        # Checked after the watch was added: if the completion was processed earlier, no other
        # thread will notify the watch.
        if submitter.tasks.done(oid) or memory.lost is not None:
            submitter.release(oid)
            submitter.wake_waiters()
        else:
            submitter.collector.start()
            # Later watches need no notice: while there is a watch, the collector sleeps on the
            # event word, which changes when a watched object completes.
            if first:
                submitter.collector.notice()
    except BaseException:  # Ctrl-C may leave an entry that the collector must find
        submitter.collector.look_again()
        raise


def withdraw(submitter: Submitting, made: DoneCallback) -> None:
    """Cancels a watch. The list of waiters is replaced instead of changed, because another thread
    may be iterating over it."""
    oid = made.oid
    with submitter.waits_lock:
        listed = submitter.waits.get(oid)
        if listed is None or made not in listed:
            return
        left = [one for one in listed if one is not made]
        if left:
            submitter.waits[oid] = left
        elif submitter.memory.client.usable:
            submitter.end_waits(oid)
