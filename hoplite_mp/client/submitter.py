"""The submitter's side of tasks: sending, dependencies, completions.

Why it exists: the truth about a task is its header, but its submitter must hold the arguments until
it is done, send it when its arguments are there, take over refs inside its result, and tell whoever
waits. Whoever comes first does that: the thread in `result()`, the next submit, or the collector.
It must never know: how a task is run.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from hoplite_mp import _shm, _tasks, serial
from hoplite_mp.client.collector import Collector
from hoplite_mp.client.functions import Functions
from hoplite_mp.client.futures import Future
from hoplite_mp.client.keeping import keep_results
from hoplite_mp.client.losing import abandon
from hoplite_mp.client.memory import FOREVER_NS, STATE, Memory
from hoplite_mp.client.waiting import Waiting
from hoplite_mp.errors import (
    ClosedError,
    HopliteError,
    HopliteTimeoutError,
    ObjectLostError,
    StoreFullError,
)
from hoplite_mp.protocol.local import Interrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp.ref import ObjectRef

__all__ = ["KIND_OPERATION", "KIND_TASK", "Pending", "Submitter", "last_resort"]

KIND_TASK, KIND_OPERATION = 2, 3
# Of a task: not to be run in place by a waiting worker; values of refs are writable copies for it.
FLAG_OWN_STACK, FLAG_COPY, FLAG_HERE = 1, 2, 4
# In place of a pool's number: the common pool, but only its workers on this host.
HERE = -1
NAME_BYTES = 32
FINISHED_MIN = 1024
HOLDS_OF_CALL = 2  # the function, and what it carries
ERROR_CHARS_MAX = 40  # of the last resort, which must fit into a record
NO_ROOM_EVEN_FOR_WORDS = "no room, even for details; raise memory="

_log = logging.getLogger("hoplite_mp")


class Pending:
    """What the submitter keeps of one task until it is done."""

    __slots__ = ("future", "holds", "missing", "needs", "oid", "queue")

    def __init__(self, oid: int, queue: int, future: Future[Any] | None, holds: Any) -> None:
        self.oid = oid
        self.queue = queue
        self.future = future
        self.holds = holds
        self.missing = 0  # dependencies that are not done
        self.needs: list[ObjectRef[Any]] = []  # all its dependencies


class Submitter:
    """Sends tasks and collects their completions, for one process."""

    def __init__(self, memory: Memory, tasks: _tasks.Tasks) -> None:
        self.memory = memory
        self.client: _shm.Client = memory.client
        self.tasks = tasks
        self.pending: dict[int, Pending] = {}
        self._functions = Functions(memory)
        self._queues: dict[int, int] = {}
        self._waiting: dict[int, list[Pending]] = {}  # dependency -> tasks that need it
        # queue -> tasks that are ready, but the queue's ring was full
        self._overflow: dict[int, deque[Pending]] = {}
        self._finished: list[weakref.ref[Future[Any]]] = []  # perhaps with results not yet read
        self._finished_max = FINISHED_MIN
        self._lock = threading.RLock()
        self.waiting = Waiting(self)
        self.collector = Collector(self)
        self.closed = False
        # Home of the host whose driver hears what the tasks sent from here print; 0: this host's.
        self.audience = 0

    # -- sending -------------------------------------------------------------------------------

    def queue(self, pool: int) -> int:
        """The hint queue from this process to a pool."""
        queue = self._queues.get(pool)
        if queue is None:
            with self._lock:
                queue = self._queues.get(pool)
                if queue is None:
                    queue = self.tasks.open_queue(max(pool, 0), pool == HERE)
                    self._queues[pool] = queue
        return queue

    def close_queue(self, pool: int) -> None:
        with self._lock:
            queue = self._queues.pop(pool, None)
            if queue is None:
                return
            self._overflow.pop(queue, None)  # cancelled, all of them
            if self.client.usable:
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
        client, memory = self.client, self.memory
        if self.closed or memory.lost is not None or not client.usable:
            memory.check_lost()
            raise ClosedError("this cluster is closed: it takes no new tasks")
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
                ref = memory.put_encoded(call, held=True)
                holds.append(ref)
                inline, args_oid = b"", memory.local_id(ref)
        queue = self.queue(pool)
        hold = client.draft(KIND_TASK, max(pool, 0))
        oid = hold.oid
        flags = (0 if timeout is None else FLAG_OWN_STACK) | (FLAG_COPY if copy else 0)
        future: Future[Any] = Future(self, oid, hold, copy)
        if name is None:
            name = getattr(fn, "__name__", None) or type(fn).__name__
        ready = not call.dependencies and queue not in self._overflow
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
                flags | (FLAG_HERE if pool == HERE else 0),
                name.encode(errors="replace")[:NAME_BYTES],
                queue,
                ready,
                self.audience,
            )
            if not posted:
                if call.dependencies:
                    self._depend(pending, call.dependencies)
                else:
                    self._post_later(pending)
                    self.collector.start()
            hold.keep()
            if len(holds) > HOLDS_OF_CALL:  # what it holds is to go soon after, asked for or not
                self.collector.start()
                self.collector.notice()
        except BaseException:  # Ctrl-C, say: nobody gets this Future, so nobody waits for the task
            self.tasks.cancel(oid, False)
            self.drain()
            raise
        if self.memory.lost is not None:  # meanwhile
            self.abandon(self.memory.lost)
        return future

    def _post_later(self, pending: Pending) -> None:
        """Posts it behind what waits for room in the same queue."""
        with self._lock:
            if pending.queue not in self._queues.values():
                return  # its pool has been closed: it is cancelled
            self._overflow.setdefault(pending.queue, deque()).append(pending)
            self._post_overflow()

    def _post_overflow(self) -> None:
        with self._lock:
            for queue, tasks in list(self._overflow.items()):
                while tasks:
                    task = tasks[0]
                    if task.oid in self.pending and not self.tasks.post(task.oid, queue):
                        break
                    tasks.popleft()
                else:
                    del self._overflow[queue]

    @property
    def wants_news(self) -> bool:
        """Somebody must look for completions though nobody waits."""
        return bool(self._overflow or self._waiting)

    # -- dependencies --------------------------------------------------------------------------

    def _depend(self, pending: Pending, refs: Sequence[ObjectRef[Any]]) -> None:
        lost: ObjectLostError | None = None
        with self._lock:
            pending.missing = 1  # not sent before all have been looked at
            pending.needs = list(refs)
            for ref in refs:
                try:
                    oid = self.memory.local_id(ref)
                except ObjectLostError as error:
                    lost = error
                    break
                if not self.tasks.done(oid):
                    pending.missing += 1
                    self._waiting.setdefault(oid, []).append(pending)
        if lost is not None:
            self._fail(pending, lost)
            return
        self._arrived(pending)
        if pending.missing:
            self.collector.start()
            self.collector.wake()

    def _arrived(self, pending: Pending) -> None:
        """One thing less is missing; with nothing missing the task is sent, or fails."""
        with self._lock:
            pending.missing -= 1
            if pending.missing or pending.oid not in self.pending:
                return
            needs = pending.needs
        for ref in needs:
            oid = self.memory.local_id(ref)
            if self.client.state(oid) not in _USABLE:
                try:
                    error = self.memory.error(oid, FOREVER_NS)
                except Exception as lost:
                    error = lost
                if error is not None:
                    self._fail(pending, error)
                    return
        self._post_later(pending)

    def _fail(self, pending: Pending, error: BaseException) -> None:
        """The task will not run: it fails with what its argument failed with."""
        oid = pending.oid
        try:
            if not self.tasks.take(oid):
                return  # cancelled meanwhile
            self.store_result(oid, serial.encode_error(error), True)
        except BaseException as problem:  # it found no room, or Ctrl-C: a few words always fit
            own = self.tasks.claimant(oid) == self.client.slot
            if own and self.client.state(oid) == STATE["CLAIMED"]:
                self.store_result(oid, last_resort(error), True)
            if not isinstance(problem, Exception):
                raise

    def store_result(self, oid: int, encoded: serial.Encoded, failed: bool) -> bool:
        """Writes and finishes a result that this client has claimed; False: it was aborted."""
        client, refs = self.client, bool(encoded.refs)
        payload = 0
        if encoded.nbytes <= _shm.INLINE_BYTES_MAX:
            client.bind_inline(
                oid, encoded.head, encoded.buffers, encoded.offsets, encoded.nbytes, refs
            )
        else:
            lease = self.memory.write(encoded)
            payload = lease.payload
            client.bind_lease(oid, lease, encoded.nbytes, refs)
        if self.tasks.finish(oid, failed):
            return True
        if payload:
            client.give_back(payload, oid)
        self.tasks.settle(oid)
        return False

    def check_waiting(self) -> None:
        """Dependencies that others own: has one become done?"""
        for oid in self.awaited():
            if self.tasks.done(oid):
                self._release(oid)

    def awaited(self) -> set[int]:
        """Ids that tasks of ours wait for."""
        with self._lock:
            return set(self._waiting)

    def _release(self, oid: int) -> None:
        with self._lock:
            tasks = self._waiting.get(oid)
        while tasks:
            with contextlib.suppress(IndexError):  # another thread took the last one
                self._arrived(tasks.pop())
        with self._lock:  # it is done, so nothing has been added meanwhile
            self._waiting.pop(oid, None)

    # -- completions ---------------------------------------------------------------------------

    def expect(self, oid: int, future: Future[Any] | None, holds: Any) -> Pending:
        """An operation's result of ours: its sources are held until it is done."""
        pending = Pending(oid, -1, future, holds)
        self.pending[oid] = pending
        self.tasks.watch(oid)
        if self.memory.lost is not None:
            self.abandon(self.memory.lost)
        return pending

    def drain(self) -> None:
        """Looks after everything of ours that has become done."""
        try:
            for oid in self.tasks.drain():
                self._look_after(oid)
        except BaseException:  # Ctrl-C: what had been taken out of the tables must be found again
            self.collector.look_again()
            raise
        if self._overflow:
            self._post_overflow()

    def look_at_all(self) -> None:
        """As drain(), without being told which."""
        for oid in list(self.pending):
            if self.tasks.done(oid):
                self._look_after(oid)

    def _look_after(self, oid: int) -> None:
        try:
            pending = self.pending.get(oid)
            if pending is not None:
                self._finish(pending)
            elif oid in self._waiting:
                self._release(oid)
        except Exception as error:  # no room for refs inside it, say: later again, the others now
            full = isinstance(error, (StoreFullError, HopliteTimeoutError))
            _log.log(logging.DEBUG if full else logging.ERROR, "result %#x", oid, exc_info=True)
            self.collector.look_again()

    def _finish(self, pending: Pending) -> None:
        oid = pending.oid
        if not self.tasks.done(oid):
            return  # a bit of an earlier life of this header
        state = self.client.state(oid)
        has_refs, deleted = self.client.flags(oid)
        if has_refs and state in (*_USABLE, STATE["FAILED"]) and oid in self.pending:
            # Held meanwhile: another thread may finish it too, and its Future may be dropped.
            hold = self.client.hold(oid)
            if hold is not None:
                self.memory.inner[oid] = self.memory.inner_refs(oid)
                self.tasks.set_taken(oid)
            del hold
        future = pending.future
        if future is not None:
            cancelled = state == STATE["CANCELLED"] or (state == STATE["ABORTED"] and not deleted)
            future._complete(cancelled, state not in _USABLE)
        # The last step: what Ctrl-C stops before it is done again by whoever looks at all.
        if self.pending.pop(oid, None) is not None and future is not None:
            self._finished.append(weakref.ref(future))
            if len(self._finished) > self._finished_max:
                self._forget_read()
        pending.holds = None
        pending.needs = []
        if oid in self._waiting:
            self._release(oid)

    def _forget_read(self) -> None:
        """Drops Futures that are gone, or whose result has been read."""
        living = [(ref, ref()) for ref in self._finished]
        self._finished = [ref for ref, future in living if future is not None and future.unread]
        self._finished_max = max(FINISHED_MIN, 2 * len(self._finished))

    def keep_results(self, bytes_max: int) -> None:
        """Before the end: results that nobody has asked for yet stay readable."""
        living = [future for ref in self._finished if (future := ref()) is not None]
        keep_results(self.memory, living, bytes_max)

    def abandon(self, error: BaseException) -> None:
        """After the end: what is not finished fails, whoever waits for it."""
        abandon(self, error)

    def forget_waiting(self) -> None:
        """Nobody sends what waits for arguments, or for room in a queue."""
        with self._lock:
            self._waiting.clear()
            self._overflow.clear()

    def is_done(self, oid: int) -> bool:
        self.memory.check()
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

    def stop(self) -> None:
        """No more tasks; the collector ends."""
        self.closed = True
        self.collector.stop()


def last_resort(error: BaseException) -> serial.Encoded:
    """An error for which there was no room, in a few words, which fit into the record. One of this
    library keeps its type: its name is what `except` clauses look for."""
    kind = type(error)
    if isinstance(error, HopliteError) and kind.__module__ == HopliteError.__module__:
        return serial.encode_error(kind(NO_ROOM_EVEN_FOR_WORDS), "")
    brief = f"its error found no room: {kind.__name__}"[:ERROR_CHARS_MAX]
    return serial.encode_error(HopliteError(brief), "")


_USABLE = (STATE["SEALED"], STATE["SPILLING"], STATE["SPILLED"])


def _flat(encoded: serial.Encoded) -> bytes:
    """A small payload as one piece."""
    data = bytearray(encoded.nbytes)
    data[: len(encoded.head)] = encoded.head
    for buffer, offset in zip(encoded.buffers, encoded.offsets, strict=True):
        data[offset : offset + buffer.nbytes] = buffer
    return bytes(data)
