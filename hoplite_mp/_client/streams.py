"""The reader's side of a stream: an iterator of refs to the items that a generator yields.

The generator's task returns a *link*, an object that is initially pending. A finished link contains
refs to an item and to the next link. A reader waits for its link, takes the item, and releases the
link, which shows the generator's worker that the item was taken. If a link is lost with its process
or host, the task is sent again, and skips the items that were taken.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from hoplite_mp import _serialize, errors
from hoplite_mp._client.channel import take_over_all
from hoplite_mp._common import ids, locks
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.object_states import GONE, STATE
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._protocol.local import Import
from hoplite_mp.errors import HopliteTimeoutError, ObjectLostError

if TYPE_CHECKING:
    import threading
    from collections.abc import AsyncIterator, Callable, Iterator

    from hoplite_mp._client.futures import Future
    from hoplite_mp._client.runtime import Runtime

__all__ = ["END", "ITEM", "RAISED", "Stream", "StreamPlan"]

T = TypeVar("T")
# The kinds of link values: an item and the next link; the end; the end, with an object that has
# failed with the generator's exception.
ITEM, END, RAISED = 0, 1, 2
_AGAIN: Any = object()
_LOST = (STATE["FAILED"], STATE["DELETED"], *GONE)


class StreamPlan(NamedTuple):
    """Instructions for the generator's worker. The first argument of the generator's task."""

    skip: int  # number of items to compute without sending them
    buffersize: int | None
    bytes_max: int
    tries: int  # how many processes of the generator have died so far


class Stream(Generic[T]):
    """An iterator of refs to the items of a generator that runs in a worker.

    It works with `for` and `async for`. Closing or dropping it closes the generator, so that
    `finally` blocks run.
    """

    def __init__(
        self,
        runtime: Runtime,
        begin: Callable[[StreamPlan], Future[Any]],
        retries: int,
        buffersize: int | None,
        name: str,
        cluster: Any = None,
    ) -> None:
        """begin: submits the generator's task."""
        self._runtime = runtime
        self._memory = runtime.memory
        self._begin = begin
        self._retries = retries
        self._buffersize = buffersize
        self._name = name
        self._cluster = cluster  # kept alive, because a Cluster without references is closed
        self._count = 0  # number of items taken
        self._tries = 0
        self._link: ObjectRef[Any] | None = None
        self._lock = locks.lock("stream.reading")
        self._closed = False
        self._task: Future[Any] | None = None
        self._send()

    def _send(self) -> None:
        plan = StreamPlan(
            self._count, self._buffersize, self._runtime.config.stream_bytes_max, self._tries
        )
        self._task = self._begin(plan)

    # -- for -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ObjectRef[T]]:
        return self

    def __next__(self) -> ObjectRef[T]:
        with _Alone(self._lock):
            while True:
                if self._closed:
                    raise StopIteration
                self._wait()
                item: ObjectRef[T] | None = self._look()
                if item is None:
                    raise StopIteration
                if item is not _AGAIN:
                    return item

    def _wait(self) -> None:
        """Waits until `_look` may find an item or the end."""
        waiting = self._runtime.submitter.waiting
        if self._task is not None:
            self._memory.check()
            waiting.wait_done(self._memory.local_id(self._task.ref), FOREVER_NS)
        if self._link is not None:
            self._memory.check()
            waiting.wait_done(self._memory.local_id(self._link), FOREVER_NS)

    def _look(self) -> Any:
        """The next item; None at the end; _AGAIN if the caller must wait again."""
        if self._task is not None:
            task, self._task = self._task, None
            try:
                self._link = task.result()
            except BaseException as error:
                del task  # no reference cycle through its error's traceback
                self._finish()
                if (other := self._not_an_end(error)) is not error:
                    raise other from error
                raise
            # Releases the holds of the task's result. Now only this stream holds the links, and
            # each link is freed when it has been read.
            self._runtime.submitter.drain()
            self._memory.inner.pop(task._oid, None)
            return _AGAIN
        link = self._link
        assert link is not None
        try:
            kind, item, following = self._read(link)
            if kind == ITEM and (self._is_lost(item) or following._hold is None):
                raise ObjectLostError(f"an item of {self._name}() was lost: {item}")
        except (ObjectLostError, HopliteTimeoutError) as error:
            if not self._retry(error):
                raise
            return _AGAIN
        except errors.WorkerLostError as error:
            if not self._retry(error):
                raise
            return _AGAIN
        if kind == ITEM:
            self._count += 1
            self._link = following
            return item
        self._finish()
        if kind == RAISED:
            raised = self._not_an_end(self._error_of(item))
            try:
                raise raised
            finally:
                del raised  # no reference cycle through the traceback
        return None

    def _error_of(self, failure: ObjectRef[Any]) -> BaseException:
        try:
            found = self._memory.error(self._memory.local_id(failure), FOREVER_NS)
        except BaseException as lost:
            return lost
        return RuntimeError(f"{self._name}() has failed") if found is None else found

    def _not_an_end(self, error: BaseException) -> BaseException:
        """The error to raise. A StopIteration raised by the task would end the `for` loop silently,
        so it becomes the cause of a RuntimeError, as in a generator (PEP 479)."""
        if not issubclass(type(error), (StopIteration, StopAsyncIteration)):
            return error
        made = RuntimeError(f"{self._name}() raised {type(error).__name__}")
        made.__cause__ = error
        return made

    def _read(self, link: ObjectRef[Any]) -> Any:
        """The value of a link. A single request to the node acquires holds on all other hosts'
        objects that the link refers to."""
        memory = self._memory
        mem = memory.payload(memory.local_id(link), FOREVER_NS)
        if _serialize.payload_kind(mem) == _serialize.ERROR:
            raise memory.failure(mem)
        host_id, holds = memory.client.host_id, dict[bytes, Any]()
        far = [one for one in _serialize.read_refs(mem) if ids.unpack_id(one)[0] != host_id]
        if far:
            holds.update(zip(far, take_over_all(memory, Import(far), list), strict=True))

        def make_ref(one: bytes) -> ObjectRef[Any]:
            return ObjectRef(one, holds[one]) if one in holds else memory.make_ref(one)

        return _serialize.decode(mem, make_ref=make_ref, writable=False)

    def _is_lost(self, item: ObjectRef[Any]) -> bool:
        return item._hold is None or self._memory.client.state(self._memory.local_id(item)) in _LOST

    def _retry(self, error: BaseException) -> bool:
        """Called when the generator's process or host has died, or its task has timed out. After a
        timeout, or without retries left, returns False. Otherwise sends the task again, and returns
        True."""
        self._link = None
        if isinstance(error, HopliteTimeoutError) or self._tries >= self._retries:
            self._finish()
            return False
        self._tries += 1
        self._send()
        return True

    # -- async for -----------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[ObjectRef[T]]:
        return self

    async def __anext__(self) -> ObjectRef[T]:
        with _Alone(self._lock):
            while True:
                if self._closed:
                    raise StopAsyncIteration
                await self._await()
                item: ObjectRef[T] | None = self._look()
                if item is None:
                    raise StopAsyncIteration
                if item is not _AGAIN:
                    return item

    async def _await(self) -> None:
        from hoplite_mp._client.awaiting import ended

        ref = self._link if self._task is None else self._task.ref
        assert ref is not None
        self._memory.check_lost()
        oid = self._memory.local_id(ref)
        await ended(self._runtime.submitter, oid)
        self._memory.check_lost()

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the generator, which stops at its next `yield`. Items that were taken remain
        valid."""
        if not self._closed:
            with _Alone(self._lock):
                self._finish()

    async def aclose(self) -> None:
        """Like `close`, for `contextlib.aclosing`."""
        self.close()

    def _finish(self) -> None:
        self._closed = True
        task, self._task, self._link = self._task, None, None
        self._begin, self._cluster = _nothing, None
        if task is not None:
            task._seen()
        if task is not None and self._memory.client.usable:
            # This cancels a task that has not begun. A task that has begun stops by itself, because
            # its link has no holder. No lock is acquired, because the garbage collector may call
            # this at any time.
            self._runtime.tasks.cancel(task._oid, False)
            self._runtime.submitter.collector.notice()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # partly initialised, or the interpreter is exiting
            if not self._closed:
                self._finish()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._count} taken"
        return f"<Stream of {self._name}(): {state}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a stream belongs to the process that reads it and does not pickle; send its refs"
        )


class _Alone:
    """A context manager around a read of a stream. It is a class because
    `contextlib.contextmanager` sets an attribute on exceptions, which some exception classes
    refuse."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ValueError("another thread or task is already reading this stream")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _nothing(plan: StreamPlan) -> Any:
    raise RuntimeError("this stream is closed")
