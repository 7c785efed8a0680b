"""The submitter's side of tasks: sending, dependencies, completions.

Why it exists: the truth about a task is its header, but its submitter must hold the arguments until
it is done, send it when its arguments are there, take over refs inside its result, and tell whoever
waits. Whoever comes first does that: the thread in `result()`, the next submit, or the collector
thread, which sleeps unless a callback, a standard waiter or a dependency needs it.
It must never know: how a task is run.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from hoplite_mp import _shm, _tasks, serial
from hoplite_mp.client.functions import Functions
from hoplite_mp.client.futures import Future
from hoplite_mp.client.memory import FOREVER_NS, STATE, Memory
from hoplite_mp.errors import ClosedError, HopliteTimeoutError, NodeLostError, ObjectLostError
from hoplite_mp.protocol.local import Interrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp.ref import ObjectRef

__all__ = ["KIND_OPERATION", "KIND_TASK", "Pending", "Submitter"]

KIND_TASK, KIND_OPERATION = 2, 3
FLAG_OWN_STACK = 1  # not to be run in place by a waiting worker
NAME_BYTES = 32
BLOCKED_AFTER_NS = 2_000_000
FINISHED_MIN = 1024


class Pending:
    """What the submitter keeps of one task until it is done."""

    __slots__ = ("future", "holds", "missing", "oid", "queue")

    def __init__(self, oid: int, queue: int, future: Future[Any] | None, holds: Any) -> None:
        self.oid = oid
        self.queue = queue
        self.future = future
        self.holds = holds
        self.missing = 0  # dependencies that are not done


class Submitter:
    """Sends tasks and collects their completions, for one process."""

    def __init__(self, memory: Memory, tasks: _tasks.Tasks) -> None:
        self.memory = memory
        self.client: _shm.Client = memory.client
        self.tasks = tasks
        self.pending: dict[int, Pending] = {}
        self.run_in_place: Callable[[int], bool] | None = None  # set in a worker
        self._functions = Functions(memory)
        self._queues: dict[int, int] = {}
        self._waiting: dict[int, list[Pending]] = {}  # dependency -> tasks that need it
        self._overflow: deque[Pending] = deque()  # ready, but their queue's ring was full
        self._armed = 0
        self._finished: list[weakref.ref[Future[Any]]] = []  # perhaps with results not yet read
        self._finished_max = FINISHED_MIN
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._idle = threading.Condition()
        self.closed = False

    # -- sending -------------------------------------------------------------------------------

    def queue(self, pool: int) -> int:
        """The hint queue from this process to a pool."""
        queue = self._queues.get(pool)
        if queue is None:
            with self._lock:
                queue = self._queues.get(pool)
                if queue is None:
                    queue = self._queues[pool] = self.tasks.open_queue(pool)
        return queue

    def close_queue(self, pool: int) -> None:
        with self._lock:
            queue = self._queues.pop(pool, None)
            if queue is not None and self.client.usable:
                self.tasks.close_queue(queue)

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
    ) -> Future[Any]:
        if self.closed or not self.client.usable:
            self.memory.check()
            raise ClosedError("this cluster is closed: it takes no new tasks")
        client, memory = self.client, self.memory
        if client.news():
            memory.collect()
        function, carried = self._functions.send(fn)
        call = serial.encode_call(args, kwargs)
        holds: list[Any] = [function, carried, *call.refs]
        inline, args_oid = call.head, 0
        if call.nbytes > _tasks.ARGS_INLINE_BYTES or call.buffers:
            if call.nbytes <= _tasks.ARGS_INLINE_BYTES:
                inline = _flat(call)
            else:
                ref = memory.put_encoded(call)
                holds.append(ref)
                inline, args_oid = b"", memory.local_id(ref)
        queue = self.queue(pool)
        oid = client.new(KIND_TASK, STATE["WAITING"], 0, pool)
        hold = client.hold(oid, False)
        future: Future[Any] = Future(self, oid, hold, copy)
        if name is None:
            name = getattr(fn, "__name__", None) or type(fn).__name__
        ready = not call.dependencies and not self._overflow
        pending = Pending(oid, queue, future, holds)
        try:
            self.pending[oid] = pending
            posted = self.tasks.submit(
                oid,
                memory.local_id(function),
                inline,
                args_oid,
                retries,
                0 if timeout is None else max(1, int(timeout * 1e9)),
                FLAG_OWN_STACK if timeout is not None else 0,
                name.encode(errors="replace")[:NAME_BYTES],
                queue,
                ready,
            )
            if not posted:
                if call.dependencies:
                    self._depend(pending, call.dependencies)
                else:
                    self._overflow.append(pending)
                    self._post_overflow()
                    self.start_thread()
        except BaseException:  # Ctrl-C, say: nobody gets this Future, so nobody waits for the task
            self.tasks.cancel(oid, False)
            self.drain()
            raise
        return future

    def _post_overflow(self) -> None:
        with self._lock:
            while self._overflow:
                task = self._overflow[0]
                if not self.tasks.post(task.oid, task.queue):
                    return
                self._overflow.popleft()

    # -- dependencies --------------------------------------------------------------------------

    def _depend(self, pending: Pending, refs: Sequence[ObjectRef[Any]]) -> None:
        with self._lock:
            pending.missing = 1  # not sent before all have been looked at
            for ref in refs:
                try:
                    oid = self.memory.local_id(ref)
                except ObjectLostError as error:
                    self._fail(pending, error)
                    return
                if not self.tasks.done(oid):
                    pending.missing += 1
                    self._waiting.setdefault(oid, []).append(pending)
            pending.holds = [pending.holds, list(refs)]
        self._arrived(pending, refs)
        if pending.missing:
            self.start_thread()
            self._wake.set()

    def _arrived(self, pending: Pending, refs: Sequence[ObjectRef[Any]] = ()) -> None:
        """One thing less is missing; with nothing missing the task is sent, or fails."""
        with self._lock:
            pending.missing -= 1
            if pending.missing or pending.oid not in self.pending:
                return
        for ref in pending.holds[1]:
            oid = self.memory.local_id(ref)
            if self.client.state(oid) not in _USABLE:
                try:
                    error = self.memory.error(oid, FOREVER_NS)
                except BaseException as lost:
                    error = lost
                if error is not None:
                    self._fail(pending, error)
                    return
        with self._lock:
            self._overflow.append(pending)
        self._post_overflow()

    def _fail(self, pending: Pending, error: BaseException) -> None:
        """The task will not run: it fails with what its argument failed with."""
        oid = pending.oid
        if not self.tasks.take(oid):
            return  # cancelled meanwhile
        self.store_result(oid, serial.encode_error(error), True)

    def store_result(self, oid: int, encoded: serial.Encoded, failed: bool) -> bool:
        """Writes and finishes a result that this client has claimed; False: it was aborted."""
        client, refs = self.client, bool(encoded.refs)
        payload = 0
        if encoded.nbytes <= _shm.INLINE_BYTES_MAX:
            client.bind_inline(
                oid, encoded.head, encoded.buffers, encoded.offsets, encoded.nbytes, refs
            )
        else:
            payload = self.memory.write(encoded)
            client.bind(oid, payload, encoded.nbytes, refs)
        if self.tasks.finish(oid, failed):
            return True
        if payload:
            client.give_back(payload, oid)
        self.tasks.settle(oid)
        return False

    def _check_waiting(self) -> None:
        """Dependencies that others own: has one become done?"""
        for oid in list(self._waiting):
            if self.tasks.done(oid):
                self._release(oid)

    def _release(self, oid: int) -> None:
        with self._lock:
            tasks = self._waiting.pop(oid, ())
        for pending in tasks:
            self._arrived(pending)

    # -- completions ---------------------------------------------------------------------------

    def expect(self, oid: int, future: Future[Any] | None, holds: Any) -> Pending:
        """An operation's result of ours: its sources are held until it is done."""
        pending = Pending(oid, -1, future, holds)
        self.pending[oid] = pending
        self.tasks.watch(oid)
        return pending

    def drain(self) -> None:
        """Looks after everything of ours that has become done."""
        for oid in self.tasks.drain():
            pending = self.pending.get(oid)
            if pending is not None:
                self._finish(pending)
            elif oid in self._waiting:
                self._release(oid)
        if self._overflow:
            self._post_overflow()
        if not self.pending:
            with self._idle:
                self._idle.notify_all()

    def _finish(self, pending: Pending) -> None:
        oid = pending.oid
        state = self.client.state(oid)
        if not self.tasks.done(oid):
            return  # a bit of an earlier life of this header
        if state in (*_USABLE, STATE["FAILED"]) and self.client.flags(oid)[0]:
            self.memory.inner[oid] = self.memory.inner_refs(oid)
            self.tasks.set_taken(oid)
        if self.pending.pop(oid, None) is None:
            return  # another thread was first
        pending.holds = None
        future = pending.future
        if future is not None:
            self._finished.append(weakref.ref(future))
            if len(self._finished) > self._finished_max:
                self._forget_read()
            cancelled = state in (STATE["CANCELLED"], STATE["ABORTED"])
            future._complete(cancelled, state in (STATE["FAILED"], STATE["DELETED"]))
        if oid in self._waiting:
            self._release(oid)

    def _forget_read(self) -> None:
        """Drops Futures that are gone, or whose result has been read."""
        living = [(ref, ref()) for ref in self._finished]
        self._finished = [ref for ref, future in living if future is not None and future.unread]
        self._finished_max = max(FINISHED_MIN, 2 * len(self._finished))

    def keep_results(self) -> None:
        """Before the end: results that nobody has asked for yet stay readable."""
        for ref in self._finished:
            future = ref()
            try:
                if future is not None:
                    future._keep()
            except HopliteTimeoutError:
                return  # spilled, and there is no room to read them back
            except Exception:  # lost already: result() will say so
                continue

    def abandon(self, error: BaseException) -> None:
        """After the end: what is not finished fails, whoever waits for it."""
        while self.pending:
            _, pending = self.pending.popitem()
            if pending.future is not None:
                pending.future._abandon(error)

    def is_done(self, oid: int) -> bool:
        if not self.client.usable:
            return True
        if self.tasks.done(oid):
            self.drain()
            return True
        return False

    def cancel(self, oid: int, force: bool) -> bool:
        self.memory.check()
        outcome = self.tasks.cancel(oid, force)
        if outcome == 2:
            self.memory.channel.tell(Interrupt(oid, self.tasks.claimant(oid)))
        if outcome:
            self.drain()
        return outcome != 0

    # -- waiting -------------------------------------------------------------------------------

    def wait_done(self, oid: int, deadline: int) -> None:
        """Until the object is done. A worker runs what it waits for, or counts as blocked."""
        if self.tasks.done(oid):
            return
        if self.run_in_place is not None:
            while not self.tasks.done(oid) and self.run_in_place(oid):
                pass
        self.wait_many([oid], 1, deadline)
        if not self.tasks.done(oid):
            raise HopliteTimeoutError("the result was not ready within the timeout")

    def wait_many(self, oids: list[int], need: int, deadline: int) -> bool:
        """Until `need` of them are done; False at the deadline."""
        blocked = False
        try:
            while True:
                self.memory.check()
                until = deadline
                if self.run_in_place is not None and not blocked:
                    until = min(deadline, time.monotonic_ns() + BLOCKED_AFTER_NS)
                outcome = self.tasks.wait(oids, need, until, True)
                if outcome == _tasks.NEWS:
                    self.drain()
                elif outcome == _tasks.DONE:
                    return True
                elif outcome == _tasks.CLOSING:
                    raise NodeLostError("the node of this host has ended")
                elif time.monotonic_ns() >= deadline:
                    return False
                elif not blocked:
                    blocked = True
                    self.tasks.set_blocked(True)
        finally:
            if blocked and self.client.usable:
                self.tasks.set_blocked(False)

    def wait_idle(self, deadline: int) -> bool:
        """Until every task of this process is done."""
        while self.pending:
            self.drain()
            oids = list(self.pending)
            if oids and not self.wait_many(oids, len(oids), deadline):
                return False
            self.drain()
            if oids and all(self.tasks.done(oid) for oid in oids):
                for oid in oids:  # the bits of the last ones may still be on their way
                    pending = self.pending.get(oid)
                    if pending is not None:
                        self._finish(pending)
        return True

    # -- the collector thread ------------------------------------------------------------------

    def arm(self) -> None:
        """Somebody waits with the standard library's means: completions must be looked for."""
        with self._lock:
            self._armed += 1
        self.start_thread()
        self._wake.set()

    def disarm(self) -> None:
        with self._lock:
            self._armed -= 1

    def start_thread(self) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self.closed:
                    self._thread = threading.Thread(
                        target=self._collect, name="hoplite_mp collector", daemon=True
                    )
                    self._thread.start()

    def _collect(self) -> None:
        interval = self.memory.config.drain_interval_s
        parked: dict[int, list[int]] = {}
        while not self.closed and self.client.usable:
            seen = self.tasks.event()
            self.drain()
            if self.client.news():
                self.memory.collect()
            self._park(parked)
            self._check_waiting()
            if self._armed or self._overflow or self._waiting:
                deadline = time.monotonic_ns() + int(interval * 1e9)
                if self.tasks.wait_event(seen, deadline, False) == _tasks.TIMEOUT:
                    self._look_at_all()
            else:
                busy = self.pending or self.memory.inner
                self._wake.wait(interval if busy else None)
                self._wake.clear()

    def _look_at_all(self) -> None:
        """A thread that Ctrl-C stopped in drain() had taken news with it."""
        for oid, pending in list(self.pending.items()):
            if self.tasks.done(oid):
                self._finish(pending)

    def _park(self, parked: dict[int, list[int]]) -> None:
        for oid in list(self._waiting):
            if oid not in parked:
                parked[oid] = self.tasks.park([oid])
        for oid in [o for o in parked if o not in self._waiting]:
            self.tasks.unpark(parked.pop(oid))

    def stop(self) -> None:
        """No more tasks; the collector ends."""
        self.closed = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self.tasks.wake(self.client.slot)
            thread.join(1.0)


_USABLE = (STATE["SEALED"], STATE["SPILLING"], STATE["SPILLED"])


def _flat(encoded: serial.Encoded) -> bytes:
    """A small payload as one piece."""
    data = bytearray(encoded.nbytes)
    data[: len(encoded.head)] = encoded.head
    for buffer, offset in zip(encoded.buffers, encoded.offsets, strict=True):
        data[offset : offset + buffer.nbytes] = buffer
    return bytes(data)
