"""Runs tasks and calls concurrently in one worker.

Async tasks, calls to async methods, and calls to an actor with `concurrency` above 1 run
concurrently. The worker's main thread starts them in order, reads their arguments, and writes their
results. Coroutines run in the event loop, and plain methods run in threads.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize, _tasks
from hoplite_mp._client.calls import Call, current_call
from hoplite_mp._common import clock, locks
from hoplite_mp._common.locks import starting_thread
from hoplite_mp._common.object_states import (
    CONCURRENCY_MAX,
    CONCURRENCY_SHIFT,
    TASK_ASYNC,
    TASK_STREAM,
)
from hoplite_mp._worker import task_options
from hoplite_mp._worker.forked import end_if_forked
from hoplite_mp._worker.streams import STREAMED
from hoplite_mp._worker.task_options import try_again

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from hoplite_mp._client.functions import Exceptions
    from hoplite_mp._worker.event_loop import EventLoop
    from hoplite_mp._worker.ports import OfWorker

__all__ = ["ConcurrentTasks"]

POLL_NS = 500_000_000
HOUSE_S = POLL_NS / 1e9  # the interval of `housekeeping` while no task begins or ends
POOL_OPEN = 1


class _Running(Call):
    """A task or call that is running."""

    def __init__(self, oid: int, concurrency: int) -> None:
        super().__init__(oid)
        self.concurrency = concurrency
        self.coroutine: Any = None
        # The coroutine's asyncio task, once it has begun. A task that is cancelled before its first
        # step ends without running any of its code.
        self.task: asyncio.Task[Any] | None = None
        # Whether the call was cancelled or has ended, so that it must not be cancelled again.
        self.unwanted = False
        self.again: Exceptions = ()  # exceptions after which the task is retried
        self.flags = 0  # the task's flags if it has a priority or resources


class ConcurrentTasks:
    """All tasks and calls in this worker's event loop and threads."""

    def __init__(self, worker: OfWorker) -> None:
        self.worker = worker
        self.tasks = worker.tasks
        self.slots = _tasks.ConcurrentSlots(worker.tasks)
        self.running: dict[int, _Running] = {}
        self._loop: EventLoop | None = None
        self._ended: queue.SimpleQueue[tuple[_Running, Any, bool]] = queue.SimpleQueue()
        self._deadlines: dict[int, int] = {}
        self._lock = locks.lock("worker.deadlines")  # guards `_deadlines`
        self._brought: _serialize.Run = 0, None

    @property
    def loop(self) -> EventLoop:
        """The event loop. It is created when first needed, because importing asyncio is slow."""
        if self._loop is None:
            from hoplite_mp._worker.event_loop import EventLoop

            self._loop = EventLoop()
            waiting, collector = self.worker.submitter.waiting, self.worker.submitter.collector
            # While a task awaits another task, this worker counts as blocked, and another worker
            # takes its place.
            collector.tell_armed(waiting.count_blocked)
            if waiting.own_calls is not None:
                waiting.own_calls.loop_runs_in(self._loop.ident, TASK_ASYNC)
        return self._loop

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()

    # -- in the worker's own thread ---------------------------------------------------------------

    def run(self, oid: int, flags: int) -> None:
        """Runs an async task, and other tasks that arrive meanwhile and may run concurrently with
        it."""
        self._begin(oid, flags)
        output_owner = self.tasks.output_owner(oid)
        while self.running:
            free = min(call.concurrency for call in self.running.values()) - len(self.running)
            self._handle_event(free > 0 and self._may_begin(), output_owner, False)

    def _may_begin(self) -> bool:
        worker = self.worker
        limit = worker.max_tasks
        return (
            not worker.is_actor
            and not (self.tasks.retire or self.slots.called)
            and self.tasks.pool_state(worker.pool) == POOL_OPEN
            and (not limit or worker.done_tasks + len(self.running) < limit)
        )

    def serve(self, concurrency: int, backlog: Iterator[int]) -> None:
        """Runs an actor's calls, at most `concurrency` at a time, until the actor ends. The calls
        in the backlog run first."""
        worker, tasks = self.worker, self.tasks
        for oid in backlog:
            while len(self.running) >= concurrency:
                self._handle_event(False, 0, True)
            if tasks.claim(oid):
                self._begin(oid, tasks.task(oid)[3])
        while not worker.memory.client.closing:
            if not self.running and (
                tasks.retire or (tasks.pool_state(worker.pool) != POOL_OPEN and worker.may_end())
            ):
                break
            self._handle_event(len(self.running) < concurrency, 0, True)
        while self.running and not worker.memory.client.closing:
            self._handle_event(False, 0, True)

    def _handle_event(self, may_begin: bool, output_owner: int, any_task: bool) -> None:
        """Waits until a running task ends or, if `may_begin`, until another task can begin. Handles
        this event."""
        if may_begin:
            seen = self.slots.word()
            if self._ended.empty():
                count = len(self.running)
                pool = self.worker.pool
                oid = self.slots.next(pool, count, output_owner, any_task, seen, POLL_NS)
                if oid:
                    self._begin(oid, self.tasks.task(oid)[3])
                    self.worker.housekeeping(True)
                    return
            self._settle(False)
        else:
            self._settle(True)

    def _settle(self, wait: bool) -> None:
        """Writes the result of a task that has ended. wait: whether to wait up to HOUSE_S until a
        task ends."""
        try:
            call, value, failed = self._ended.get(wait, HOUSE_S)
        except queue.Empty:
            self.worker.housekeeping(False)
            return
        self._end(call, value, failed)
        self.worker.housekeeping(True)

    def _begin(self, oid: int, flags: int) -> None:
        worker = self.worker
        call = _Running(oid, flags >> CONCURRENCY_SHIFT or CONCURRENCY_MAX)
        if not self.running:
            self._brought = _serialize.begin_run()
        self.running[oid] = call
        self.slots.begin(oid)
        worker.speak_to(self.tasks.output_owner(oid))
        if flags & _tasks.RANKED_FLAG:
            call.flags = flags
            task_options.begins(worker.runtime, oid, flags)
        timeout_ns = self.tasks.task(oid)[4]
        if timeout_ns:
            self.limit(oid, clock.monotonic_ns() + timeout_ns)
        context = contextvars.copy_context()
        context.run(current_call.set, call)
        try:
            function, args, kwargs, call.again = context.run(worker.prepared, oid, flags)
            if flags & TASK_STREAM:
                function, args = context.run(worker.streamed, oid, function, args)
            if flags & TASK_ASYNC:
                loop = self.loop.loop  # before the coroutine, which must run once it is created
                call.coroutine = context.run(function, *args, **kwargs)
                loop.call_soon_threadsafe(self._start, call, context=context)
            else:
                thread = threading.Thread(
                    target=context.run,
                    args=(self._run_plain, call, function, args, kwargs),
                    name=self.tasks.name(oid),
                    daemon=True,
                )
                with starting_thread("runs a call of this actor"):
                    thread.start()
        except BaseException as error:
            self._end(call, error, True)

    def _end(self, call: _Running, value: Any, failed: bool) -> None:
        """Finishes a task or call, and writes the result."""
        worker, oid = self.worker, call.oid
        call.coroutine = call.task = None
        worker.check_line()
        token = current_call.set(call)
        try:
            worker.leave_groups(failed)
            worker.output_routing.finish()
            again = failed and issubclass(type(value), call.again) and try_again(worker, oid)
            if value is not STREAMED and not again:
                failed = worker.store(oid, value, failed)
        finally:
            current_call.reset(token)
        self.limit(oid, 0)
        del self.running[oid]
        if not self.running:
            _serialize.end_run(self._brought)
        worker.done_tasks += 1
        if call.flags:
            task_options.ended(worker.runtime, oid, call.flags)
        if not self.running:
            worker.submitter.inherited_priority = 0
        self.slots.end(oid, -1 if again else failed, next(iter(self.running), 0))
        while worker.own_again:
            oid = worker.own_again.pop()
            if self.tasks.claim(oid):
                self._begin(oid, self.tasks.task(oid)[3])

    def limit(self, oid: int, at_ns: int) -> None:
        """Sets the time at which this worker is killed if the task is still running; 0 removes the
        deadline."""
        with self._lock:
            if at_ns:
                self._deadlines[oid] = at_ns
            elif self._deadlines.pop(oid, None) is None:
                return
            first = min(self._deadlines, key=lambda task: self._deadlines[task], default=0)
            self.slots.deadline(first, self._deadlines.get(first, 0))

    # -- in other threads --------------------------------------------------------------------------

    def _report_end(self, call: _Running, value: Any, failed: bool) -> None:
        end_if_forked(self.worker.pid, value if failed else None)
        self._ended.put((call, value, failed))
        self.slots.wake()

    def _run_plain(self, call: _Running, function: Any, args: Any, kwargs: Any) -> None:
        """Runs a plain method in a new thread."""
        try:
            value, failed = function(*args, **kwargs), False
        except BaseException as error:
            value, failed = error, True
        self._report_end(call, value, failed)

    def _start(self, call: _Running) -> None:
        """Starts a coroutine. Called in the event loop."""
        if self.tasks.aborted(call.oid):
            call.unwanted = True
        self.loop.loop.create_task(self._run_coroutine(call))

    async def _run_coroutine(self, call: _Running) -> None:
        import asyncio

        call.task = asyncio.current_task()
        try:
            if call.unwanted:
                call.coroutine.close()
                raise asyncio.CancelledError
            value, failed = await call.coroutine, False
        except BaseException as error:  # even SystemExit ends only this task, not the loop
            value, failed = error, True
        call.unwanted = True  # the call has ended, and must no longer be cancelled
        self._report_end(call, value, failed)

    def cancel_aborted(self) -> None:
        """Called after a signal. Raises CancelledError at an await in each task that was cancelled
        by force."""
        if self._loop is not None:
            for oid, call in self.running.copy().items():
                if self.tasks.aborted(oid) and call.coroutine is not None:
                    self._loop.loop.call_soon_threadsafe(self._cancel, call)

    def _cancel(self, call: _Running) -> None:
        if not call.unwanted:
            call.unwanted = True  # a second cancellation would interrupt the clean-up
            if call.task is not None:
                call.task.cancel()
