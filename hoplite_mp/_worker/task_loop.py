"""A worker's loop: claims tasks, runs them and writes results until the worker must exit.

Of the library's processes, only workers run user code. The loop takes little time, because tasks
are claimed, and results are pickled and written, by a few calls to compiled modules.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _serialize, _tasks
from hoplite_mp._client.functions import Caught, Raised
from hoplite_mp._client.memory import freeze
from hoplite_mp._client.streams import StreamPlan
from hoplite_mp._client.submitter import last_resort
from hoplite_mp._common import clock
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.object_states import (
    STATE,
    TASK_ASYNC,
    TASK_COPY,
    TASK_OWN_STACK,
    TASK_STREAM,
)
from hoplite_mp._protocol.actors import (
    BACKLOG_CALLS_MAX,
    ActorBacklog,
    ActorEndRequest,
    ActorReady,
)
from hoplite_mp._protocol.fields import PAYLOAD_BYTES_MAX
from hoplite_mp._protocol.local import LINE_LOST, GetBroadcastTasks
from hoplite_mp._protocol.resources import AssignedResources
from hoplite_mp._worker import preimport, task_options
from hoplite_mp._worker.concurrent_tasks import ConcurrentTasks
from hoplite_mp._worker.forked import end_if_forked
from hoplite_mp._worker.streams import STREAMED, StreamSource
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._client.actors import ActorSetup
    from hoplite_mp._client.functions import Exceptions
    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._worker.ports import OfWorker
    from hoplite_mp._worker.stdio import OutputRouting

__all__ = ["Worker"]


COMMON_POOL = 0


def join_worker_broadcasts(worker: OfWorker) -> None:
    """Lets this worker take part in worker broadcasts while its own task is waiting for a broadcast
    that the task has started. Otherwise two such tasks would wait for each other indefinitely."""
    if worker.pool != COMMON_POOL:
        return

    def take_part_now() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "run() in an async task, or in a thread started by a task: this worker can take "
                "part only when that task has ended, and the task would wait for this worker; call "
                "run() in a plain task's own thread, in an actor, or in the program"
            )
        if worker.concurrent.slots.called:
            run_broadcast_tasks(worker)

    worker.runtime.take_part = take_part_now


def run_broadcast_tasks(worker: OfWorker) -> None:
    """Requests this worker's tasks in worker broadcasts from the node, and runs them."""
    for oid in worker.runtime.channel.call(GetBroadcastTasks()).value:
        if worker.tasks.claim(oid):
            worker.run(oid)
            worker.housekeeping(True)


POLL_NS = 500_000_000
UNTAKEN_POLLS = 8  # entries of `untaken` that are checked after each task; a task adds fewer
FUNCTIONS_MAX, FUNCTIONS_BYTES_MAX = 512, 64 << 20  # limits of the cache of decoded functions
RANKED: int = _tasks.RANKED_FLAG
PACKAGE = __name__.rpartition(".")[0] + "."


class Worker:
    """The loop of one worker process."""

    def __init__(
        self, runtime: Runtime, pool: int, max_tasks: int, output_routing: OutputRouting
    ) -> None:
        self.runtime = runtime
        self.output_routing = output_routing
        self.memory = runtime.memory
        self.tasks = runtime.tasks
        self.submitter = runtime.submitter
        self.pool = pool
        self.max_tasks = max_tasks
        self.pid = os.getpid()
        self.thread = threading.get_ident()
        self.done_tasks = 0
        self.depth = 0
        self.in_user_code = False
        self.current = 0
        # Running tasks in which KeyboardInterrupt was raised. The node repeats its signal, but each
        # task must be interrupted only once.
        self.interrupted: set[int] = set()
        self.running: list[int] = []  # ids of the nested tasks, the outermost first
        # Whether one of these tasks was cancelled; the tasks nested in it are interrupted first.
        self.unwinds = False
        # Whether the outermost task has a timeout, at which this process may be killed.
        self.limited = False
        # Id -> (function, globals to check before it runs, size of the encoded function in bytes).
        self.functions: dict[int, tuple[Any, _serialize.BroughtGlobals | None, int]] = {}
        self.functions_bytes = 0
        self.first_use = False  # whether garbage collection is postponed for imports
        self.is_actor = False
        self.concurrency = 1  # for an actor: maximum number of concurrent calls
        self.again: Exceptions = ()  # for an actor: exceptions after which calls are retried
        self.own_again: list[int] = []  # for an actor: calls that must be retried
        self.concurrent = ConcurrentTasks(self)
        # Results whose inner refs the submitter has not yet taken over.
        self.untaken: deque[tuple[int, Any]] = deque()
        self.line = runtime.channel.line
        runtime.channel.taken_away = self.end_without_line
        runtime.own_pool = pool
        self.submitter.inherited_priority = 0
        self.submitter.waiting.run_in_place = self.run_in_place
        join_worker_broadcasts(self)

    def become_actor(self, setup: ActorSetup) -> None:
        """Makes this worker an actor's process. Its tasks are calls to one object, so a call that
        waits for another call does not run that call itself."""
        self.is_actor = self.runtime.is_actor = True
        self.concurrency = concurrency = setup.concurrency
        self.again = _serialize.decode_function(setup.again) if setup.again else ()
        self.submitter.waiting.run_in_place = None
        self.submitter.waiting.forbid(self.pool, concurrency)

    def loop(self) -> None:
        """Runs tasks until the cluster or the pool closes, or this worker must retire."""
        client, tasks = self.memory.client, self.tasks
        if self.is_actor:
            if self.concurrency > 1:
                self.concurrent.serve(self.concurrency, self.backlog())
            else:
                self.run_backlog()
        while not client.closing and self.concurrency == 1:
            if self.concurrent.slots.called:
                run_broadcast_tasks(self)
            oid = tasks.next(self.pool, POLL_NS)
            if oid:
                self.run_whole(oid)
                if self.max_tasks and self.done_tasks >= self.max_tasks:
                    break
            elif tasks.retire or (tasks.pool_state(self.pool) != 1 and self.may_end()):
                break
            self.housekeeping(bool(oid))
        self.concurrent.close()
        self.finish_own()
        self.submitter.failures.report_all()

    def backlog(self) -> Iterator[int]:
        """The calls that were made before this process created its object, in order. The queues may
        lack these calls, if an earlier process of the actor took them before it died."""
        calls = self.runtime.channel.call(ActorReady()).value
        while True:
            yield from calls
            if len(calls) < BACKLOG_CALLS_MAX:
                return
            calls = self.runtime.channel.call(ActorBacklog()).value

    def run_backlog(self) -> None:
        for oid in self.backlog():
            if self.tasks.claim(oid):
                self.run_whole(oid)
                self.housekeeping(True)

    def run_whole(self, oid: int) -> None:
        """Runs a task, or an actor's call with all its retries, before the next call begins."""
        self.run(oid)
        while self.own_again:
            oid = self.own_again.pop()
            if self.tasks.claim(oid):
                self.run(oid)

    def may_end(self) -> bool:
        """Whether this worker may exit. Called when its pool is closing. An actor's worker first
        runs the calls that are waiting for their arguments."""
        return not self.is_actor or bool(self.runtime.channel.call(ActorEndRequest()).value)

    def finish_own(self) -> None:
        """Waits for tasks that this worker has submitted, because they would fail when it exits.
        Meanwhile this worker counts as blocked, so that another worker can run them. When this
        process has exited, the node holds the refs inside this worker's results for submitters that
        do not hold them yet."""
        client, tasks, pending = self.memory.client, self.tasks, self.submitter.pending
        if not pending:
            return
        self.submitter.waiting.count_blocked(1)
        while pending and not client.closing and tasks.pool_state(self.pool) == 1:
            oid = next(iter(pending), 0)
            outcome = tasks.wait([oid], 1, clock.monotonic_ns() + POLL_NS, True)
            self.housekeeping(False)
            if oid in pending and outcome != _tasks.NEWS:  # the notification may have been lost
                self.submitter.look_at_all()

    def housekeeping(self, busy: bool) -> None:
        while self.memory.client.news():  # freeing an object may release further ones
            self.memory.collect()
        if self.submitter.pending and not busy:
            self.submitter.drain()
        if not busy:
            if not self.line.there():
                self.end_without_line()
            self.memory.give_empty_spans()
            self.forget_functions()
        for _ in range(min(len(self.untaken), UNTAKEN_POLLS if busy else len(self.untaken))):
            item = self.untaken.popleft()
            if not self.tasks.taken(item[0]):
                self.untaken.append(item)

    def end_without_line(self) -> None:
        """Exits, because user code has closed the connection to the node. The running task counts
        as killed."""
        if os.getpid() == self.pid:  # otherwise this is a child that a task has forked
            self.output_routing.flush()
            os._exit(LINE_LOST)

    def forget_functions(self) -> None:
        """Drops cached functions that their submitters no longer hold. This frees the objects in
        their closures."""
        for function_id in list(self.functions):
            header = self.memory.client.inspect(function_id)
            if header["id"] != function_id or header["owner"] not in header["refs"]:
                self.functions_bytes -= self.functions.pop(function_id)[2]

    # -- one task ------------------------------------------------------------------------------

    def run_in_place(self, oid: int) -> bool:
        """Runs a task that this worker is waiting for, if the task may run here."""
        if self.limited or self.concurrent.running:
            return False  # this process, and so this task, may be killed at another task's deadline
        limit = self.runtime.config.nested_depth_max
        if self.depth >= limit or threading.get_ident() != self.thread:
            return False
        if self.tasks.pool_of(oid) != self.pool or self.tasks.task(oid)[3] & TASK_OWN_STACK:
            return False
        if self.current and self.memory.client.inspect(self.current)["tries"] and self.replaced():
            # The current task's worker has died before, perhaps because of such a nested task.
            return False
        if not self.tasks.claim(oid):
            return False
        self.run(oid)
        self.interrupt_waiting()
        return True

    def replaced(self) -> bool:
        """Whether another worker takes this worker's place while it waits. A worker with its own
        resources is not replaced."""
        own = self.runtime.channel.call(AssignedResources(self.current)).value
        return not own and self.runtime.config.blocked_workers_max > 0

    def interrupt_waiting(self) -> None:
        """Called after a nested task. Interrupts the waiting task if it, or a task that it is
        nested in, was cancelled meanwhile."""
        if not self.current:
            return
        cancelled = self.current not in self.interrupted and self.tasks.aborted(self.current)
        if self.unwinds or cancelled:
            if self.tasks.aborted(self.current):
                self.interrupted.add(self.current)
                self.unwinds = any(map(self.tasks.aborted, self.running[:-1]))
            raise KeyboardInterrupt("this task was cancelled")

    def run(self, oid: int) -> None:
        function_id, args_id, inline, flags, timeout_ns, _ = self.tasks.task(oid)
        if flags & TASK_ASYNC and not self.depth:
            self.concurrent.run(oid, flags)
            return
        before, leaves = self.current, self.runtime.process_leaves
        self.current = oid
        self.runtime.process_leaves = []
        outer = self.tasks.begin(oid)
        self.running.append(oid)
        self.depth += 1
        failed = again = False
        exceptions: Exceptions = ()
        value: Any = None
        brought = _serialize.begin_run()
        output_owner, inherited_priority = (
            self.submitter.output_owner,
            self.submitter.inherited_priority,
        )
        if flags & RANKED:
            task_options.begins(self.runtime, oid, flags)
        else:
            self.submitter.inherited_priority = 0
        try:
            self.speak_to(self.tasks.output_owner(oid))
            if self.depth == 1:
                self.limited = timeout_ns != 0
            function, carried = self.function(oid, function_id)
            args, kwargs = self.arguments(oid, args_id, inline, bool(flags & TASK_COPY))
            # Checked after the arguments were read, because functions among the arguments may have
            # brought globals.
            if carried is not None:
                if self.depth > 1 and oid in self.submitter.pending:
                    carried.check_own()
                else:
                    carried.check()
            exceptions = task_options.exceptions_of(self, function, flags)
            function = task_options.prepared(self, oid, function, args_id, inline, flags)
            self.in_user_code = True
            if flags & TASK_STREAM:
                function, args = self.streamed(oid, function, args)
            value = function(*args, **kwargs)
            if flags & TASK_ASYNC:  # nested in a task that is waiting for it
                value = self.concurrent.loop.run(value)
        except BaseException as error:
            self.in_user_code = False
            end_if_forked(self.pid, error)
            failed, value, again = True, error, issubclass(type(error), exceptions)
            if self.unwinds and issubclass(type(error), KeyboardInterrupt):
                value, again = self.lost_inside(oid), True
        finally:
            self.in_user_code = False
            function = carried = None
            args, kwargs = (), {}
        end_if_forked(self.pid)
        self.check_line()
        self.leave_groups(failed)
        self.output_routing.finish()
        again = again and task_options.try_again(self, oid)
        if value is not STREAMED and not again:
            # Before `end_run`, because pickling functions in the result needs their globals.
            failed = self.store(oid, value, failed)
        value = None
        _serialize.end_run(brought)
        self.depth -= 1
        self.done_tasks += 1
        self.submitter.inherited_priority = inherited_priority
        if flags & RANKED:
            task_options.ended(self.runtime, oid, flags)
        if before:
            self.speak_to(output_owner)
        self.tasks.end(outer, -1 if again else failed)
        self.running.pop()
        self.unwinds = self.unwinds and bool(self.running)
        self.current = before
        self.interrupted.discard(oid)
        self.runtime.process_leaves = leaves
        self.in_user_code = bool(before)

    def prepared(
        self, oid: int, flags: int
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any], Exceptions]:
        """(function, args, kwargs, exceptions after which the task is retried) for a task that runs
        concurrently with other tasks."""
        function_id, args_id, inline, *_ = self.tasks.task(oid)
        function, carried = self.function(oid, function_id)
        args, kwargs = self.arguments(oid, args_id, inline, bool(flags & TASK_COPY))
        if carried is not None:
            carried.check()
        again = task_options.exceptions_of(self, function, flags)
        function = task_options.prepared(self, oid, function, args_id, inline, flags)
        return function, args, kwargs, again

    def streamed(self, oid: int, function: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        """Returns a function that calls the user's function and exhausts its generator, and the
        arguments for this function."""
        source = StreamSource(self, oid, StreamPlan(*args[0]), self.tasks.task(oid)[4])
        return source.run, (function, args[1:])

    def check_line(self) -> None:
        """Exits if a task has closed the connection. Called before the task's result counts."""
        if not self.line.there():
            self.end_without_line()

    def speak_to(self, output_owner: int) -> None:
        """Sets the output owner for later output by this worker, and for tasks submitted here. The
        owner stays set after the task until another task begins."""
        if output_owner != self.submitter.output_owner and not self.is_actor:
            _serialize.turn_to_output_owner(output_owner)
        self.submitter.output_owner = output_owner
        self.output_routing.turn_to(output_owner)

    def leave_groups(self, failed: bool) -> None:
        for leave in self.runtime.task_leaves:
            with contextlib.suppress(HopliteError):  # the cluster and its Groups are closing
                leave(failed, with_task=True)

    def function(self, oid: int, function_id: int) -> tuple[Any, _serialize.BroughtGlobals | None]:
        known = self.functions.get(function_id)
        if known is not None:
            return known[:2]
        value = self.memory.read(function_id, FOREVER_NS, False)
        data, beside = value if type(value) is tuple else (value, ())
        attached = self.memory.attached
        # Ids are sufficient, because the function's object holds these objects as long as they are
        # needed.
        ids = [ref._id for ref in beside]
        try:
            function, carried = _serialize.decode_with_carried(data, ids)
        except BaseException as error:
            made = self.memory.call_not_loaded(error, f"the function {self.tasks.name(oid)}()")
            if made is error:
                raise
            raise made from _serialize.cause_of(made)
        del value, beside
        if self.memory.attached != attached:
            # The function is not cached, because its refs may be held only while it runs.
            return function, carried
        # The cache holds no ref to the function's object, because closures may contain large
        # values. An id is never reused, so the cache needs no ref.
        self.functions[function_id] = (function, carried or None, carried.nbytes)
        self.functions_bytes += carried.nbytes
        while len(self.functions) > 1 and (
            len(self.functions) > FUNCTIONS_MAX or self.functions_bytes > FUNCTIONS_BYTES_MAX
        ):
            self.functions_bytes -= self.functions.pop(next(iter(self.functions)))[2]
        return function, carried

    def arguments(
        self, oid: int, args_id: int, inline: bytes, copy: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mem = self.memory.payload(args_id, FOREVER_NS) if args_id else memoryview(inline)
        try:
            return _serialize.decode_call(
                mem,
                make_ref=self.memory.make_ref,
                resolve=lambda ref: self.memory.read(self.memory.local_id(ref), FOREVER_NS, copy),
                writable=True,
            )
        except BaseException as error:
            made = self.memory.call_not_loaded(error, f"the arguments of {self.tasks.name(oid)}()")
            if made is error:
                raise
            raise made from _serialize.cause_of(made)
        finally:
            if self.first_use:
                self.first_use = False
                preimport.collect_again()

    # -- its result ----------------------------------------------------------------------------

    def store(self, oid: int, value: Any, failed: bool) -> bool:
        """Writes the result, or the error. Returns whether the task has failed."""
        try:
            if not failed and type(value) is np.ndarray:
                block = self.memory.block_to_publish(value)
                if block is not None and self.store_block(oid, value, block):
                    return False
            if not failed:
                self.write(oid, self.encode_result(oid, value))
                return False
        except BaseException as error:  # the value cannot be pickled, or there is no space
            value = error
        try:
            refs = self.submitter.store_error(oid, value, self.traceback_of(value))
        except KeyboardInterrupt:  # the task was cancelled while the error was being written
            refs = []
            if self.memory.client.state(oid) == STATE["CLAIMED"]:  # a reducer was interrupted
                self.submitter.store_result(oid, last_resort(value), True)
        if refs:
            self.untaken.append((oid, refs))
        # Otherwise the error's frames would keep the task's arrays alive until the next garbage
        # collection.
        _serialize.drop_traceback(value)
        return True

    def encode_result(self, oid: int, value: Any, part: bool = False) -> _serialize.Encoded:
        """Encodes a task's result. part: whether the value is the result of a single item in a
        chunk."""
        try:
            return _serialize.encode(value, self.memory.scan)
        except Exception as error:  # reworded, because it may name a value unknown to the user
            if type(value) is Caught and not part:  # only items that cannot be pickled fail
                return self.encode_result(oid, Caught(self.or_raised(oid, value)), True)
            cause = _serialize.failure_within(error)
            what = f"the result of {self.tasks.name(oid)}(), a {type(value).__name__}"
            if isinstance(value, _serialize.Folded):
                what = f"the result of a reduction, a {type(value.value).__name__}"
            why = (
                f"{type(cause).__name__}: {_serialize.text_of(cause)}{getattr(error, 'place', '')}"
            )
            reason = _serialize.reworded(cause, f"{what}, does not pickle: {why}")
            raise reason from _serialize.cause_of(cause)

    def or_raised(self, oid: int, results: Caught) -> Iterator[Any]:
        """The results of a chunk, with a Raised in place of each result that cannot be pickled."""
        for value in results:
            try:
                self.encode_result(oid, value, True)
                yield value
            except Exception as error:
                yield Raised(error, self.traceback_of(error))

    def write(self, oid: int, encoded: _serialize.Encoded) -> None:
        if self.submitter.store_result(oid, encoded, False) and encoded.refs:
            self.untaken.append((oid, encoded.refs))

    def traceback_of(self, error: BaseException) -> str:
        """The traceback without this package's frames."""
        frame = _serialize.get_traceback(error)
        while frame is not None:
            if not frame.tb_frame.f_globals.get("__name__", "").startswith(PACKAGE):
                break
            frame = frame.tb_next
        return f"in {self.runtime.label}:\n" + _serialize.format_error(error, frame)

    def error_in_message(self, error: BaseException) -> bytes:
        """An error payload without refs that fits into a message to the node."""
        text = self.traceback_of(error)
        encoded = _serialize.encode_error(error, text)
        if encoded.refs or encoded.nbytes > PAYLOAD_BYTES_MAX:
            encoded = _serialize.encode_short_error(error, text, PAYLOAD_BYTES_MAX)
        _serialize.drop_traceback(error)
        return encoded.tobytes()

    def store_block(self, oid: int, array: Any, block: Any) -> bool:
        """Makes the block of an array from c.empty() the result, without a copy. Returns False if
        this is impossible."""
        head = self.memory.block_head(array, block)
        if head is None:
            return False
        client = self.memory.client
        client.write(block.payload, head, [], [])
        client.bind(oid, block.payload, len(block), False)
        block.become(oid)
        freeze(array)
        if not self.tasks.finish(oid, False):
            block.unbecome()
            self.tasks.settle(oid)
        return True

    # -- interruption --------------------------------------------------------------------------

    def on_signal(self, number: int, frame: Any) -> None:
        self.concurrent.cancel_aborted()
        if not self.in_user_code:
            return
        for oid in self.running:
            if oid not in self.interrupted and self.tasks.aborted(oid):
                self.interrupted.add(oid)
                self.unwinds = oid != self.current
                raise KeyboardInterrupt("this task was cancelled")

    def lost_inside(self, oid: int) -> BaseException:
        """The error for a task that ran inside a cancelled task and is not retried."""
        from hoplite_mp.errors import WorkerLostError  # imports multiprocessing

        name, outer = self.tasks.name(oid), self.tasks.name(self.running[0])
        return WorkerLostError(
            f"{name}() ran inside {outer}(), which was waiting for it and was cancelled"
        )
