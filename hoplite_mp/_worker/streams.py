"""Runs a generator in a worker. Each item becomes an object that a link refers to.

A stream is a task whose result is its first *link*, an object that is initially pending. A finished
link contains refs to an item and to the next link. A process on any host that holds a link waits
for it and reads it like any object. A reader that has taken the item releases the link. The worker
derives from the links how many items the generator is ahead of its reader. If no process holds the
pending link, no more items are needed.
"""

from __future__ import annotations

import sys
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize, _tasks
from hoplite_mp._client.streams import END, ITEM, RAISED, StreamPlan
from hoplite_mp._client.submitter import NAME_BYTES
from hoplite_mp._common import clock
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.object_states import GONE, KIND_OPERATION, KIND_STREAM, STATE
from hoplite_mp._worker.forked import end_if_forked
from hoplite_mp.errors import ClosedError

if TYPE_CHECKING:
    from hoplite_mp._common.ref import ObjectRef
    from hoplite_mp._worker.ports import OfWorker

__all__ = ["STREAMED", "StreamSource"]

STREAMED = object()  # returned in place of a result that has already been written
# An item counts as at least this many bytes for Config.stream_bytes_max, because its object and its
# link need about this much memory.
ITEM_BYTES_MIN = 4096


class StreamSource:
    """One generator's items."""

    def __init__(self, worker: OfWorker, oid: int, plan: StreamPlan, timeout_ns: int) -> None:
        self.worker = worker
        self.oid = oid
        self.plan = plan
        self.memory = worker.memory
        self.tasks = worker.tasks
        self.slots = worker.concurrent.slots
        self.name = worker.tasks.name(oid)
        self.output_owner = worker.tasks.output_owner(oid)
        # The timeout, and the time that remains when the generator is paused.
        self.timeout_ns = self.left_ns = timeout_ns
        self.ends_ns = 0  # time at which the timeout expires; 0: paused, or no timeout
        self.limited = 0  # the link to which this worker's deadline applies; 0: none
        self.link: Any = self._new_link()  # the pending link
        # For each item that has not been taken: (its link, its size in bytes).
        self.ahead: deque[tuple[int, int]] = deque()
        self.bytes_ahead = 0
        self.first: Any = None  # holds the first link until the reader holds it

    def run(self, function: Any, args: tuple[Any, ...], /, **kwargs: Any) -> Any:
        """Runs the generator to its end. Returns STREAMED, or raises the error with which the task
        itself must fail."""
        try:
            items = self._items(function(*args, **kwargs))
        except BaseException as error:
            end_if_forked(self.worker.pid, error)
            self._drop_link()  # no reader will ever get the link
            raise
        end_if_forked(self.worker.pid)
        first = _serialize.encode(self.link)
        if self.timeout_ns:  # from now on, the timeout applies to the links, not to the task
            self.worker.concurrent.limit(self.oid, 0)
            self.slots.deadline(0, 0)
        if not self.worker.submitter.store_result(self.oid, first, False):
            items.close()  # the task was cancelled
            self._drop_link()
            return STREAMED
        self.first = first.refs
        del first
        self._resume()
        try:
            self._send(items)
        except BaseException as error:  # the task has already succeeded, so the stream fails
            self._give_up(error)
        finally:
            self._limit(0)
        if self.first is not None:
            self.worker.untaken.append((self.oid, self.first))
        return STREAMED

    def _items(self, made: Any) -> Any:
        if hasattr(made, "__aiter__"):
            return _Awaited(self.worker.concurrent.loop, made)
        try:
            return _Plain(iter(made))
        except TypeError:
            raise TypeError(
                f"{self.name}() returned a {type(made).__name__}, which is not iterable: "
                "stream() is for generator functions, submit() for other functions"
            ) from None

    def _send(self, items: Any) -> None:
        """Sends items until the generator has ended, or no more items are needed."""
        raised: BaseException | None = None
        number, pid = 0, self.worker.pid
        try:
            while not self._unwanted() if number < self.plan.skip else self._wait_for_space():
                try:
                    value = items.next()
                except StopIteration:
                    end_if_forked(pid)
                    break
                end_if_forked(pid)
                number += 1
                if number > self.plan.skip:
                    self._send_item(value)
                del value
        except BaseException as error:
            end_if_forked(pid, error)
            raised = error
        try:
            items.close()
        except BaseException as error:
            raised = error if raised is None else raised
        self._end(raised)

    def _send_item(self, value: Any) -> None:
        item = self._put(value)
        nbytes = max(self.slots.size(self.memory.local_id(item)), ITEM_BYTES_MIN)
        following = self._new_link()
        self._fulfil((ITEM, item, following), nbytes)
        self.link = following
        if self.ends_ns:
            self._limit(self.ends_ns)

    def _put(self, value: Any) -> ObjectRef[Any]:
        try:
            return self.memory.put(value)
        except Exception as error:
            cause = _serialize.failure_within(error)
            if not isinstance(error, _serialize.NotPicklable):
                raise
            what = f"an item of {self.name}(), a {type(value).__name__}"
            why = (
                f"{type(cause).__name__}: {_serialize.text_of(cause)}{getattr(error, 'place', '')}"
            )
            reason = _serialize.reworded(cause, f"{what}, does not pickle: {why}")
            raise reason from _serialize.cause_of(cause)

    def _end(self, raised: BaseException | None) -> None:
        """Writes the last link after the generator has ended or raised an exception."""
        self._limit(0)
        if raised is None:
            self._fulfil((END, None, None), 0)
            return
        oid = self.memory.client.new(KIND_OPERATION, STATE["CLAIMED"], self.memory.client.slot, 0)
        failure = self.memory.own_ref(oid)
        refs = self.worker.submitter.store_error(oid, raised, self.worker.traceback_of(raised))
        if refs:
            self.memory.inner[oid] = refs
        _serialize.drop_traceback(raised)
        self._fulfil((RAISED, failure, None), 0)

    def _give_up(self, error: BaseException) -> None:
        """Fails the pending link, if possible, because items can no longer be sent."""
        try:
            if self.link is not None and self.memory.client.usable:
                oid = self.memory.local_id(self.link)
                text = self.worker.traceback_of(error)
                self.worker.submitter.store_error(oid, error, text)
        except BaseException:
            if not isinstance(error, ClosedError) and not self.memory.client.closing:
                traceback.print_exc(file=sys.stderr)

    # -- links ---------------------------------------------------------------------------------

    def _new_link(self) -> ObjectRef[Any]:
        """A pending link, claimed by this worker."""
        client = self.memory.client
        oid = client.new(KIND_STREAM, STATE["CLAIMED"], client.slot, 0)
        self.slots.link(
            oid,
            self.name.encode(errors="replace")[:NAME_BYTES],
            self.plan.tries,
            self.output_owner,
            self.timeout_ns,
        )
        return self.memory.own_ref(oid)

    def _fulfil(self, value: tuple[Any, ...], nbytes: int) -> None:
        """Seals the pending link. The refs inside it are recorded first, because the link may be
        freed immediately."""
        oid = self.memory.local_id(self.link)
        encoded = _serialize.encode(value, self.memory.scan)
        self.memory.inner[oid] = list(encoded.refs)
        self.ahead.append((oid, nbytes))
        self.bytes_ahead += nbytes
        self.worker.submitter.store_result(oid, encoded, False)
        self.link = None

    def _drop_link(self) -> None:
        """Cancels the pending link, which no reader has received."""
        oid = self.memory.local_id(self.link)
        self.tasks.cancel(oid, True)
        self.tasks.settle(oid)
        self.link = None

    # -- items that have not been taken --------------------------------------------------------

    def _drop_taken(self) -> None:
        """Removes the links whose items were taken. A reader acquires the next link before it
        releases the previous one. So if only this worker holds the first remaining link, the reader
        has taken the link's item."""
        if self.first is not None and self.tasks.taken(self.oid):
            self.first = None
        client = self.memory.client
        while self.ahead and self.first is None:
            oid, nbytes = self.ahead[0]
            if client.state(oid) not in GONE and not self.slots.alone(oid):
                break
            self.ahead.popleft()
            self.bytes_ahead -= nbytes
        while client.news():  # freeing a link may release the last hold on the next one
            self.memory.collect()

    def _unwanted(self) -> bool:
        """Whether no more items are needed, because no reader holds the pending link or an earlier
        link."""
        if self.memory.client.closing:
            return True
        self._drop_taken()
        return (
            self.first is None
            and not self.ahead
            and self.slots.alone(self.memory.local_id(self.link))
        )

    def _is_full(self) -> bool:
        if self.plan.buffersize is not None:
            return len(self.ahead) >= self.plan.buffersize
        return self.bytes_ahead >= self.plan.bytes_max

    def _wait_for_space(self) -> bool:
        """Waits until there is space for another item. Returns False if no more items are
        needed."""
        blocked = False
        waiting = self.worker.submitter.waiting
        try:
            while True:
                seen = self.tasks.event()
                if self._unwanted():
                    return False
                if not self._is_full():
                    return True
                if not blocked:
                    self._pause()
                    blocked = True
                    waiting.count_blocked(1)  # meanwhile another worker replaces this one
                outcome = self.tasks.wait_event(seen, FOREVER_NS, False)
                if outcome == _tasks.CLOSING:
                    return False
        finally:
            if blocked:
                waiting.count_blocked(-1)
                self._resume()

    # -- the timeout, which runs only while the generator runs ---------------------------------

    def _limit(self, at_ns: int) -> None:
        """Sets the time at which this worker is killed if the pending link is not done by then; 0:
        never."""
        if self.limited:
            self.worker.concurrent.limit(self.limited, 0)
        self.limited = 0
        if at_ns:
            self.limited = self.memory.local_id(self.link)
            self.worker.concurrent.limit(self.limited, at_ns)

    def _pause(self) -> None:
        if self.ends_ns:
            self.left_ns = max(1, self.ends_ns - clock.monotonic_ns())
            self.ends_ns = 0
            self._limit(0)

    def _resume(self) -> None:
        if self.timeout_ns:
            self.ends_ns = clock.monotonic_ns() + self.left_ns
            self._limit(self.ends_ns)


class _Plain:
    """A plain generator, or any iterator."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def next(self) -> Any:
        return next(self.iterator)

    def close(self) -> None:
        close = getattr(self.iterator, "close", None)
        if close is not None:
            close()


class _Awaited:
    """An async generator. It runs in the worker's event loop."""

    def __init__(self, loop: Any, made: Any) -> None:
        self.loop = loop
        self.iterator = made.__aiter__()

    async def _next(self) -> tuple[Any, ...]:
        try:
            return (await self.iterator.__anext__(),)
        except StopAsyncIteration:
            return ()

    def next(self) -> Any:
        found = self.loop.run(self._next())
        if not found:
            raise StopIteration
        return found[0]

    async def _close(self) -> None:
        close = getattr(self.iterator, "aclose", None)
        if close is not None:
            await close()

    def close(self) -> None:
        self.loop.run(self._close())
