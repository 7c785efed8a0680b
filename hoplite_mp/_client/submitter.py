"""The submitter's side of tasks: sending, dependencies and completions.

A task's state is in its header in shared memory. The submitter sends the task when its arguments
are ready, holds the arguments until the task is done, takes over refs inside the result, and
notifies all waiters. Completions are processed by a thread in `result()`, the next `submit` or the
collector thread, whichever is first.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize, _shm, _tasks
from hoplite_mp._client.closing import Unread, call_back, fail_pending, keep_results
from hoplite_mp._client.collector import Collector, DoneCallback
from hoplite_mp._client.failures import Failures
from hoplite_mp._client.functions import FrozenFunction, Functions, is_async
from hoplite_mp._client.futures import Future
from hoplite_mp._client.option_checks import retry_pause
from hoplite_mp._client.queues import HERE, NO_FLOOR, PLACE, SHUT_DOWN, Pending, Queues
from hoplite_mp._client.waiting import Waiting
from hoplite_mp._common import clock, locks
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.object_states import (
    KIND_OPERATION,
    KIND_TASK,
    STATE,
    STORED,
    TASK_ASYNC,
    TASK_COPY,
    TASK_HERE,
    TASK_OWN_STACK,
    VALUED,
    is_cancelled,
)
from hoplite_mp._common.ref import ByRef, ObjectRef
from hoplite_mp._protocol.local import Interrupt
from hoplite_mp.errors import (
    ClosedError,
    HopliteError,
    HopliteTimeoutError,
    ObjectLostError,
    StoreFullError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hoplite_mp._client.memory import Memory
    from hoplite_mp._client.option_checks import RetryDelay
    from hoplite_mp._client.queues import Settles
    from hoplite_mp._planner.resources import Demand


__all__ = ["Submitter", "last_resort", "run_here"]


NODE_DECIDES = _tasks.RESOURCES_FLAG | TASK_OWN_STACK  # flags of a task that needs resources
NAME_BYTES = 32
HOLDS_OF_CALL = 2  # of a task without refs: the function, and its captured arrays
# A failed dependency's error up to this size is kept for the next task that needs the dependency.
FAILURE_BYTES_MAX = 64 << 10
REFUGE_BYTES = 3 << 10  # maximum size of an error when space is short: fits into a page

_log = logging.getLogger("hoplite_mp")


class Submitter:
    """Sends tasks and collects their completions, for one process."""

    def __init__(self, memory: Memory, tasks: _tasks.Tasks) -> None:
        self.memory = memory
        self.client: _shm.Client = memory.client
        self.tasks = tasks
        # Other threads may change this dictionary at any time. `copy()` is atomic. `list(items())`
        # is not: the garbage collector may run inside it, and let other threads run.
        self.pending: dict[int, Pending] = {}
        self._functions = Functions(memory)
        # Object -> the tasks that need it, and the callbacks to call when it is done.
        self.waits: dict[int, list[Pending | DoneCallback]] = {}
        self.told: deque[Callable[[], None]] = deque()  # functions that wake notified waiters
        self.ended_futures: deque[Settles] = deque()  # Futures whose callbacks have not been called
        self.readers: Any = None  # threads that read values for event loops
        # Bucket in which this process is parked -> dependencies there that other processes own.
        # These never appear in the done bitmaps of this process's own tables.
        self._others: dict[int, set[int]] = {}
        self._unread = Unread()
        # The last failed dependency, its error and the error's payload. Kept because many tasks
        # often have the same dependency.
        self._failed_dependency: tuple[int, BaseException, _serialize.Encoded] | None = None
        self.failures = Failures(memory.client, tasks, self.pending)
        self.waits_lock = locks.rlock("client.waits")
        self.queues = Queues(memory, tasks, self.waits_lock, self.pending)
        self.queue, self.close_queue = self.queues.of, self.queues.close
        self.waiting = Waiting(self)
        self.collector = Collector(self)
        self.closed = False
        # The driver that prints the output of tasks submitted here; 0: this host's driver.
        self.output_owner = 0
        self.inherited_priority = NO_FLOOR  # level of the running task

    # -- sending -------------------------------------------------------------------------------

    def submit(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        pool: int,
        retries: int,
        timeout: float | None,
        copy: bool,
        name: str | None,
        holder: Any = None,
        refusal: BaseException | None = None,
        more_flags: int = 0,
        rank: tuple[int, int] | None = None,
        demand: Demand | None = None,
        delay: RetryDelay | None = None,
    ) -> Future[Any]:
        """Submits a task. holder: an object to hold until the task is done. refusal: if given, the
        task is not sent, and fails with this error. more_flags: see _client/functions.py. rank,
        demand: see _client/queues.py. delay: the pauses before the task's retries."""
        client, memory = self.client, self.memory
        if self.closed or memory.lost is not None or not client.usable:
            memory.check_lost()
            raise ClosedError("this cluster is closed: it takes no new tasks")
        if client.news():
            memory.collect()
        function, carried = self._functions.send(fn)
        call = _serialize.encode_call(args, kwargs, memory.scan)
        if len(call.refs) > len(call.dependencies):  # the task may read the other refs
            memory.note_passed_on(call.refs)
        carries = carried if holder is None else (carried, holder)
        holds: list[Any] = [function, carries, *call.refs]
        inline, args_oid = call.head, 0
        if call.nbytes > _tasks.ARGS_INLINE_BYTES or call.buffers:
            if call.nbytes <= _tasks.ARGS_INLINE_BYTES:
                inline = call.tobytes()
            else:
                ref = memory.put_encoded(call, held=True)
                holds.append(ref)
                inline, args_oid = b"", memory.local_id(ref)
        queues = self.queues
        closings = queues.closings
        queue = self.queue(pool) if rank is None else queues.bag_of(pool)
        hold = client.draft(KIND_TASK, max(pool, 0))
        oid = hold.oid
        flags = (0 if timeout is None else TASK_OWN_STACK) | (TASK_COPY if copy else 0) | more_flags
        future: Future[Any] = Future(self, oid, hold, copy)
        if name is None:
            name = getattr(fn, "__name__", None) or type(fn).__name__
        ready = not call.dependencies and queues.has_room(queue) and refusal is None
        pending = Pending(oid, queue, future, holds)
        if rank is not None:
            ready, pending.rank, pending.demand = False, rank, demand
            flags |= _tasks.RANKED_FLAG | (0 if demand is None else NODE_DECIDES)
            queues.ranked.rank(oid, *rank)
        if delay is not None:
            flags |= _tasks.DELAYED_FLAG
            self.tasks.set_retry_delay(oid, *delay)
        try:
            self.pending[oid] = pending
            # Outside the lock, because this may send a request.
            function_oid = memory.local_id(function)
            with queues.lock:  # another thread may be shutting the executor down
                if queues.closings != closings and queues.was_closed(pool, closings):
                    del self.pending[oid]
                    raise ClosedError(SHUT_DOWN)
                posted = self.tasks.submit(
                    oid,
                    function_oid,
                    inline,
                    args_oid,
                    retries,
                    0 if timeout is None else max(1, int(timeout * 1e9)),
                    flags | (TASK_HERE if pool == HERE else 0),
                    name.encode(errors="replace")[:NAME_BYTES],
                    queue,
                    ready,
                    self.output_owner,
                )
            if not posted:
                self._keep_back(pending, call.dependencies, holder is not None, refusal)
            elif holder is not None:
                queues.look_at_actor(pool)
            hold.keep()
            if carried is not None or holder is not None or len(holds) > HOLDS_OF_CALL:
                # The task may hold the last handle of an actor, so release its holds soon after it
                # is done.
                self.collector.look_soon()
        except BaseException:  # for example Ctrl-C: the caller gets no Future
            self.tasks.cancel(oid, False)
            self.drain()
            raise
        if self.memory.lost is not None:  # lost in the meantime
            self.abandon(self.memory.lost)
        return future

    def _keep_back(
        self,
        pending: Pending,
        dependencies: Sequence[ObjectRef[Any]],
        in_order: bool,
        refusal: BaseException | None,
    ) -> None:
        """Sends a task later, when its arguments are done and its queue has space, or fails the
        task."""
        if refusal is not None:
            self._fail(pending, refusal)
            self.drain()
        elif dependencies:
            if in_order:
                self.queues.keep_place(pending)
            self._depend(pending, dependencies)
        else:
            self.queues.post_later(pending)
            self.collector.start()

    @property
    def wants_news(self) -> bool:
        """Whether completions must be processed even if no call is waiting."""
        return bool(self.queues.overflow or self.waits)

    # -- dependencies --------------------------------------------------------------------------

    def _depend(self, pending: Pending, refs: Sequence[ObjectRef[Any]]) -> None:
        lost: ObjectLostError | None = None
        done: list[int] = []
        with self.waits_lock:  # no other thread may send the task before all refs are checked
            first = not self.waits
            pending.needs = list(refs)
            for ref in refs:
                try:
                    oid = self.memory.local_id(ref)
                except ObjectLostError as error:
                    lost = error
                    break
                if not self.tasks.done(oid):
                    self.begin_wait(oid, pending)
                    if self.tasks.done(oid):  # perhaps processed before `begin_wait`
                        done.append(oid)
            pending.missing.discard(PLACE)
        if lost is not None:
            self._fail(pending, lost)
            return
        if not pending.missing:
            self.send(pending)
            return
        for oid in done:
            self.release(oid)
        self.collector.start()
        # If there were other waits, the collector already sleeps on the event word, which changes
        # at each completion.
        if first:
            self.collector.notice()

    def begin_wait(self, oid: int, pending: Pending | DoneCallback) -> None:
        waiting = self.waits.get(oid)
        if waiting is None:
            waiting = self.waits[oid] = []
            buckets = self.tasks.park([oid])
            if not buckets:  # the object is in one of this process's own tables
                self.tasks.watch(oid)
            for bucket in buckets:
                self._others.setdefault(bucket, set()).add(oid)
        if isinstance(pending, DoneCallback):
            waiting.append(pending)
        elif oid not in pending.missing:
            pending.missing.add(oid)
            waiting.append(pending)

    def release(self, oid: int) -> None:
        """Notifies all waiters for an object that is done. A thread that adds a waiter later calls
        this method, too. Each step is idempotent, and `look_at_all` repeats interrupted steps."""
        seen: set[Pending | DoneCallback] = set()
        while True:
            with self.waits_lock:  # remove the list only when all entries have been notified
                tasks = [task for task in self.waits.get(oid, ()) if task not in seen]
                if not tasks:
                    self.end_waits(oid)
                    return
            for pending in tasks:
                seen.add(pending)
                if isinstance(pending, DoneCallback):
                    pending.tell()
                    continue
                with self.waits_lock:
                    pending.missing.discard(oid)
                    ready = not pending.missing and pending.oid in self.pending
                if ready:
                    self.send(pending)

    def end_waits(self, oid: int) -> None:
        """Stops watching an object that has no more waiters. The caller holds `waits_lock`."""
        if self.waits.pop(oid, None) is not None:
            bucket = self.tasks.bucket(oid)
            if oid in self._others.get(bucket, ()):
                self._others[bucket].discard(oid)
                self.tasks.unpark([bucket])

    def wake_waiters(self) -> None:
        """Wakes every waiter that was notified since the last call, once."""
        while self.told:
            # A single expression: Ctrl-C between the two calls would lose a wake-up, but is
            # unlikely within an expression. IndexError: another thread has taken the last entry.
            with contextlib.suppress(IndexError):
                self.told.popleft()()

    def send(self, pending: Pending) -> None:
        """Posts a task whose arguments are done, or fails it."""
        if self.client.state(pending.oid) != STATE["WAITING"]:
            return  # already sent, or cancelled
        for ref in pending.needs:
            oid = self.memory.local_id(ref)
            if self.client.state(oid) not in VALUED:
                known = self._failed_dependency  # read once: other threads may replace it
                if known is not None and known[0] == oid:
                    _, cause, encoded_cause = known
                    self._fail(pending, cause, encoded_cause)
                    return
                try:
                    error = self.memory.error(oid, FOREVER_NS)
                except CancelledError:  # this task is cancelled, too
                    self.tasks.cancel(pending.oid, False)
                    return
                except Exception as lost:
                    self._fail(pending, lost)
                    return
                if error is not None:
                    encoded = _serialize.encode_error(error)
                    if encoded.nbytes <= FAILURE_BYTES_MAX and not encoded.refs:
                        self._failed_dependency = oid, error, encoded
                    self._fail(pending, error, encoded)
                    return
        self.queues.post_later(pending)
        self.waiting.ready(pending.oid)

    def _fail(
        self, pending: Pending, error: BaseException, encoded: _serialize.Encoded | None = None
    ) -> None:
        """Fails a task that will not run."""
        oid = pending.oid
        try:
            if not self.tasks.take(oid):
                return  # cancelled in the meantime
            self.store_error(oid, error, None, encoded)
        except BaseException:  # for example Ctrl-C after `take`; a short text always fits
            own = self.tasks.claimant(oid) == self.client.slot
            if own and self.client.state(oid) == STATE["CLAIMED"]:
                self.store_result(oid, last_resort(error), True)
            raise

    def store_error(
        self,
        oid: int,
        error: BaseException,
        text: str | None,
        encoded: _serialize.Encoded | None = None,
    ) -> list[Any]:
        """Finishes a task with an error, which is shortened if space is short. `text`: the
        traceback if it is not the error's own. `encoded`: the error's payload if it already exists.
        Returns the refs inside the payload."""
        if encoded is None:
            encoded = _serialize.encode_error(error, text)
        limit = min(encoded.nbytes, self.memory.config.error_bytes_max)
        shorter = (limit, REFUGE_BYTES, _shm.INLINE_BYTES_MAX)
        interrupted: BaseException | None = None
        for nbytes_max in shorter:
            try:
                taken = self.store_result(oid, encoded, True)
                return list(encoded.refs) if taken else []
            except BaseException as problem:  # for example no space; a shorter text may fit
                if self.client.state(oid) != STATE["CLAIMED"]:
                    raise
                if not isinstance(problem, Exception):
                    interrupted = problem
                encoded = _serialize.encode_short_error(error, text or "", nbytes_max)
                if encoded.nbytes > _shm.INLINE_BYTES_MAX == nbytes_max:
                    encoded = last_resort(error)
        self.store_result(oid, encoded, True)
        if interrupted is not None:
            raise interrupted
        return []

    def fail_at_once(self, error: BaseException, copy: bool) -> Future[Any]:
        """A failed Future for a task that cannot be sent. Its exception is `error` itself."""
        client = self.client
        oid = client.new(KIND_OPERATION, STATE["CLAIMED"], client.slot, 0)
        future: Future[Any] = Future(self, oid, client.hold(oid, False), copy)
        future._settle(False, True, error)
        self.store_result(oid, _serialize.encode_error(error), True)
        self.failures.note(future)
        return future

    def store_result(self, oid: int, encoded: _serialize.Encoded, failed: bool) -> bool:
        """Finishes a task that this client has claimed. Returns False if the task was aborted."""
        client, refs = self.client, bool(encoded.refs)
        if refs:
            self.memory.note_passed_on(encoded.refs)
        payload = 0
        if encoded.nbytes <= _shm.INLINE_BYTES_MAX:
            client.bind_inline(
                oid, encoded.head, encoded.buffers, encoded.offsets, encoded.nbytes, refs
            )
        else:
            lease = self.memory.write(encoded, failed, "result")
            payload = lease.payload
            client.bind_lease(oid, lease, encoded.nbytes, refs)
        if self.tasks.finish(oid, failed):
            return True
        if payload:
            client.give_back(payload, oid)
        self.tasks.settle(oid)
        return False

    def look_at_others(self) -> None:
        """Processes the dependencies that other processes own, in all buckets with completions."""
        for bucket in self.tasks.take_parked_news():
            for oid in list(self._others.get(bucket, ())):
                if self.tasks.done(oid):
                    self._look_after(oid)
        self.wake_waiters()

    # -- completions ---------------------------------------------------------------------------

    def expect(self, oid: int, future: Future[Any] | None, holds: Any) -> Pending:
        """Registers an operation's result. holds: objects, such as sources, to hold until the
        operation is done."""
        pending = Pending(oid, -1, future, holds)
        self.pending[oid] = pending
        self.tasks.watch(oid)
        if self.memory.lost is not None:
            self.abandon(self.memory.lost)
        return pending

    def drain(self) -> None:
        """Processes all completions of this process."""
        try:
            for oid in self.tasks.drain():
                self._look_after(oid)
        except BaseException:  # for example Ctrl-C: completions that were taken must be found again
            self.collector.look_again()
            raise
        if self.told:
            self.wake_waiters()
        if self.queues.overflow:
            self.queues.post_overflow()

    def look_at_all(self) -> None:
        """Like drain(), but checks all pending objects, not only the completions that the tables
        report."""
        for oid in (*self.pending, *self.waits):
            if self.tasks.done(oid):
                self._look_after(oid)
        self.wake_waiters()

    def ended(self, oid: int) -> None:
        """Like `drain`, for one result that has just been read."""
        self._look_after(oid)
        self.wake_waiters()

    def _look_after(self, oid: int) -> None:
        try:
            pending = self.pending.get(oid)
            if pending is not None:
                self._finish(pending)
            elif oid in self.waits:
                self.release(oid)
        except Exception as error:  # for example, no space for inner refs: try again later
            full = isinstance(error, (StoreFullError, HopliteTimeoutError))
            _log.log(logging.DEBUG if full else logging.ERROR, "result %#x", oid, exc_info=True)
            self.collector.look_again()

    def _finish(self, pending: Pending) -> None:
        oid = pending.oid
        if not self.tasks.done(oid):
            return  # the bit belongs to an earlier generation of this header
        state = self.client.state(oid)
        has_refs, _ = self.client.flags(oid)
        if has_refs and state in STORED and oid in self.pending:
            # The hold keeps the object while its refs are read, because another thread may process
            # the same completion, and drop the Future.
            hold = self.client.hold(oid)
            if hold is not None:
                self.memory.inner[oid] = self.memory.inner_refs(oid)
                self.tasks.set_taken(oid)
            del hold
        future = pending.future
        if future is not None:
            failed = state not in VALUED
            cancelled = failed and is_cancelled(self.client, oid, state)
            if failed and not cancelled:
                self.failures.note(future)
            if future._settle(cancelled, failed):
                # The collector calls the callbacks: this thread may hold a user's lock that they
                # acquire.
                self.ended_futures.append(future)
                self.collector.call_back()
        # The entry is removed last, so that look_at_all finds it again if Ctrl-C interrupts this.
        if self.pending.pop(oid, None) is not None and future is not None:
            unread = self._unread
            unread.append(weakref.ref(future))
            if len(unread) > unread.limit:
                unread.sort_out()
        pending.holds = None
        pending.needs = []
        if oid in self.waits:
            self.release(oid)

    def call_back(self) -> None:
        """Calls the callbacks of the Futures that are done."""
        while self.ended_futures:
            with contextlib.suppress(IndexError):  # another thread has taken the last one
                self.ended_futures.popleft()._tell()

    def keep_results(self, bytes_max: int) -> None:
        """Keeps unread results readable. Called before the cluster is closed."""
        keep_results(self.memory, self._unread.futures(), bytes_max)

    def abandon(self, error: BaseException) -> None:
        """Fails all unfinished objects, and calls the callbacks. Called after the cluster has
        stopped."""
        fail_pending(self, error)
        call_back(self)

    def fail_pending(self, error: BaseException) -> None:
        """Like `abandon`, but leaves the callbacks to `call_back_at_end`."""
        fail_pending(self, error)

    def call_back_at_end(self) -> None:
        """Calls the callbacks of the Futures that `fail_pending` has completed."""
        call_back(self)

    def forget_waiting(self) -> None:
        """Drops tasks that are waiting for arguments or for space in a queue. They will not be
        sent."""
        with self.waits_lock:
            waiting = [entry for entries in self.waits.values() for entry in entries]
            self.waits.clear()
            self.queues.overflow.clear()
        for entry in waiting:
            if isinstance(entry, DoneCallback):
                entry.tell()
        self.wake_waiters()

    def is_done(self, oid: int) -> bool:
        self.memory.check()
        if self.tasks.done(oid):
            self.drain()
            return True
        return False

    def cancel(self, oid: int, force: bool) -> bool:
        self.memory.check()
        pending = self.pending.get(oid)
        if force and pending is not None and self.queues.is_ordered(pending.queue):
            # An interruption that is not at an await leaves the actor in an undefined state.
            force = bool(self.tasks.task(oid)[3] & TASK_ASYNC)
        outcome = self.tasks.cancel(oid, force)
        if outcome == 2:
            self.memory.channel.tell(Interrupt(oid, self.tasks.claimant(oid)))
        if outcome:
            self.drain()
            # As in the standard library, callbacks are called before `cancel` returns.
            future = None if pending is None else pending.future
            if future is not None:
                with contextlib.suppress(ValueError):  # no callbacks, or the collector calls them
                    self.ended_futures.remove(future)
                    future._tell()
        return outcome != 0

    def stop(self) -> None:
        """Accepts no more tasks, and stops the collector."""
        self.closed = True
        self._functions.close()
        self.collector.stop()
        if self.readers is not None:
            self.readers.shutdown(wait=False)


ERROR_CHARS_MAX = 40  # so that the error fits into a header
NO_SPACE_FOR_DETAILS = "no space for details; raise memory="


def last_resort(error: BaseException) -> _serialize.Encoded:
    """A short replacement for an error for which the store has no space. It fits into the object's
    header. The library's own errors keep their type, for `except` clauses."""
    kind = type(error)
    if isinstance(error, HopliteError) and kind.__module__ == HopliteError.__module__:
        return _serialize.encode_error(kind(NO_SPACE_FOR_DETAILS), "")
    brief = f"no space for its error: {kind.__name__}"[:ERROR_CHARS_MAX]
    return _serialize.encode_error(HopliteError(brief), "")


# Tasks of `Cluster(debug=True)`: each runs during the call to submit, in the calling process.
#
# pdb, coverage and profilers treat such a task as part of the program. Its result is stored as an
# object, like any task's result, so it must be picklable and is read-only. Its exception is raised
# unchanged.


def run_here(
    submitter: Submitter,
    fn: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    copy: bool,
    retries: int,
    delay: RetryDelay | None,
) -> Future[Any]:
    """Runs the task, and returns its finished Future. retries: the maximum number of retries after
    exceptions listed in a FrozenFunction. delay: the pauses before the retries."""
    memory = submitter.memory

    def get(ref: Any) -> Any:
        target = ref.ref if isinstance(ref, Future) else ref
        return memory.read(memory.local_id(target), FOREVER_NS, copy)

    retryable: tuple[type[Exception], ...] = ()
    if isinstance(fn, FrozenFunction):
        fn, retryable = fn.fn, fn.again
    for tries in range(retries + 1):
        if tries and delay is not None:
            clock.sleep(retry_pause(delay, tries))
        try:
            values = [_resolved(one, get) for one in args]
            named = {name: _resolved(one, get) for name, one in kwargs.items()}
            value = _call(fn, values, named)
            encoded = _serialize.encode(value, memory.scan)
        except retryable as error:
            if tries == retries:
                return submitter.fail_at_once(error, copy)
        except KeyboardInterrupt:  # the user's Ctrl-C
            raise
        except BaseException as error:
            return submitter.fail_at_once(memory.to_raise(error), copy)
        else:
            return _succeed(submitter, encoded, copy)
    raise AssertionError("the last try returns")


def _succeed(submitter: Submitter, encoded: _serialize.Encoded, copy: bool) -> Future[Any]:
    client = submitter.client
    oid = client.new(KIND_OPERATION, STATE["CLAIMED"], client.slot, 0)
    future: Future[Any] = Future(submitter, oid, client.hold(oid, False), copy)
    submitter.expect(oid, future, None)
    submitter.store_result(oid, encoded, False)
    submitter.ended(oid)
    return future


def _resolved(value: Any, get: Callable[[Any], Any]) -> Any:
    """The argument with values in place of refs and Futures, as a worker receives it."""
    kind = type(value)
    if kind is ByRef:
        return value.value
    if isinstance(value, (ObjectRef, Future)):
        return get(value)
    if kind in (list, tuple, set):
        return kind([_resolved(one, get) for one in value])
    if kind is dict:
        return {key: _resolved(one, get) for key, one in value.items()}
    return value


def _call(fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if not is_async(fn):
        return fn(*args, **kwargs)
    import asyncio

    if asyncio._get_running_loop() is None:
        return asyncio.run(fn(*args, **kwargs))
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append((asyncio.run(fn(*args, **kwargs)), None))
        except BaseException as error:
            ended.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()  # blocks the caller's event loop, as a plain function would
    value, error = ended.pop()
    if error is not None:
        raise error
    return value
