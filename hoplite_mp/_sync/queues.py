"""Queue: a first-in, first-out queue for all processes in a cluster.

The package's docstring describes the design. The queue's actor does not unpickle items. Small items
are sent as bytes inside the calls. Larger items are objects in the store, and the queue holds refs
to them.
"""

from __future__ import annotations

import contextlib
import queue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from hoplite_mp import _serialize, errors
from hoplite_mp._api.actor import _identity_of
from hoplite_mp._client.memory import whole
from hoplite_mp._common.clock import deadline_ns
from hoplite_mp._common.ref import ObjectRef, by_ref
from hoplite_mp._common.signals import is_interruption
from hoplite_mp._sync import sync_actors
from hoplite_mp._sync.handles import Handle, Read, Until, run, run_async, waits
from hoplite_mp._sync.waiting import CallAnswer
from hoplite_mp.errors import ClosedError, HopliteError

if TYPE_CHECKING:
    from collections.abc import Generator

    from hoplite_mp._client.futures import Future

__all__ = ["Queue", "ShutDown"]

T = TypeVar("T")


class ShutDown(ClosedError, getattr(queue, "ShutDown", Exception)):  # type: ignore[misc]
    """The queue was shut down. In Python 3.13 and later, this is also a `queue.ShutDown`."""


_ShutDown = ShutDown
# The interrupted calls by this process whose items may have to be given back: (identity of the
# queue's actor, call). Threads need no lock, because each change of a list is a single C call.
_interrupted: list[tuple[bytes, Future[Any]]] = []


class Queue(Handle, Generic[T]):
    """A first-in, first-out queue for processes on all hosts.

    `Queue()` creates an actor in the current cluster (`hoplite_mp.current()`). The handle is passed
    to tasks, actors and other drivers like any argument. The queue is deleted when its last handle
    is gone. The methods block, like the methods of `queue.Queue`. For each method that may wait,
    there is also a coroutine function for event loops, such as `get_async`. The errors are the
    standard library's `queue.Empty` and `queue.Full`.

    Parameters
    ----------
    maxsize : int, optional
        Maximum number of items in the queue; 0 for no limit. Default: the limit of an existing
        queue with this name; otherwise no limit.
    name : str, optional
        `Queue(name="jobs")` is the same queue in every process in the cluster. The first call
        creates it. In later calls, `node` and `detached` have no effect, and a different `maxsize`
        raises ValueError.
    node : Node or str, optional
        The node that runs the queue's actor. Default: this host's node.
    detached : bool, optional
        If True, the queue exists until `Actor.close(q.actor)`, even without handles. Default:
        False.
    copy : bool, optional
        If True, `get` on this handle and on its copies returns arrays as writable copies. Default:
        arrays are read-only and not copied.

    Notes
    -----
    When `put` returns, the item is in the queue, and stays there if the sending process dies. An
    item of more than `Config.queue_item_bytes_max` bytes stays on the sender's host until it is
    read. If this host is lost, the item is lost, too, and `get` raises ObjectLostError. If a
    process dies while it is waiting in `get`, no item is lost. If the actor's process or host dies,
    all items in the queue are lost, and every call raises ActorLostError.

    Examples
    --------
    >>> jobs = hoplite_mp.Queue(maxsize=100)
    >>> def produce(jobs):
    ...     for n in range(3):
    ...         jobs.put(np.full(4, n))
    >>> done = c.submit(produce, jobs)
    >>> [int(jobs.get().sum()) for _ in range(3)]
    [0, 4, 8]
    """

    __module__ = "hoplite_mp"  # as users import it

    __slots__ = ("_copy",)

    _served = sync_actors.QueueActor
    ShutDown = _ShutDown
    _copy: bool

    def __init__(
        self,
        maxsize: int | None = None,
        *,
        name: str | None = None,
        node: Any = None,
        detached: bool = False,
        copy: bool = False,
    ) -> None:
        size = whole(0 if maxsize is None else maxsize)
        if size is None:
            raise TypeError(f"maxsize={maxsize!r}: it must be a whole number, or None")
        size = max(size, 0)
        self._copy = bool(copy)
        self._make((size,), name, node, detached)
        if name and maxsize is not None and (found := self.maxsize) != size:
            raise ValueError(
                f"maxsize={maxsize!r}: the queue named {name!r} was created with maxsize={found}; "
                "omit maxsize= to open it, or choose another name"
            )

    def _extras(self) -> tuple[Any, ...]:
        return (self._copy,)

    def _take_extras(self, copy: bool = False) -> None:
        self._copy = copy

    # -- put -----------------------------------------------------------------------------------

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Adds the item at the end. Waits while the queue is full.

        Parameters
        ----------
        item : object
            Any picklable value. If it has more than `Config.queue_item_bytes_max` bytes, it becomes
            an object in the store.
        block : bool, optional
            Whether to wait. Default: True.
        timeout : float, optional
            Seconds to wait. Default: no limit.

        Raises
        ------
        queue.Full
            The queue was full.
        Queue.ShutDown
            The queue was shut down.

        Examples
        --------
        >>> jobs = hoplite_mp.Queue(maxsize=1)
        >>> jobs.put("a")
        >>> jobs.put("b", timeout=0)
        Traceback (most recent call last):
            ...
        queue.Full
        """
        run(self._putting(item, block, timeout))

    def put_nowait(self, item: T) -> None:
        """Adds the item, or raises `queue.Full` without waiting: `put(item, block=False)`.

        Parameters
        ----------
        item : object
            As for `put`.

        Examples
        --------
        >>> hoplite_mp.Queue().put_nowait("a")
        """
        run(self._putting(item, False, None))

    async def put_async(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Like `put`, but does not block the event loop while it waits.

        A cancelled call has not put the item."""
        await run_async(self._putting(item, block, timeout))

    def _packed(self, item: Any) -> Any:
        """The item as bytes, or as a ref to an object in the store."""
        memory = self._runtime.memory
        memory.check()
        most = memory.config.queue_item_bytes_max
        if type(item) is np.ndarray and item.nbytes > most:
            return memory.put(item)  # does not copy an array that is already in the store
        encoded = _serialize.encode(item, memory.scan)
        if encoded.refs or encoded.nbytes > most:
            return memory.put_encoded(encoded)
        return encoded.tobytes()

    def _putting(
        self, item: Any, block: bool, timeout: float | None
    ) -> Generator[Future[Any] | Until | Read, Any, None]:
        may_wait, deadline = waits(block, timeout)
        packed = self._packed(item)
        if isinstance(packed, ObjectRef):
            packed = by_ref(packed)
        ticket = self._ticket()
        try:
            code, promised = yield self._call("put", *ticket, packed, may_wait)
            answer: CallAnswer | None = CallAnswer(code)
            if answer is CallAnswer.WAIT:
                answer = yield from self._until(promised, deadline)
                if answer is None:
                    answer = CallAnswer((yield self._call("stop_putting", ticket)))
        except BaseException:  # Ctrl-C, a signal handler's error, or a cancelled await
            self._post("stop_putting", ticket)
            raise
        if answer is CallAnswer.ENDED:
            raise _ShutDown(f"{self!r} was shut down: no more items can be put")
        if answer is CallAnswer.REFUSED:
            raise queue.Full

    # -- get -----------------------------------------------------------------------------------

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Takes the oldest item. Waits while the queue is empty.

        Parameters
        ----------
        block : bool, optional
            Whether to wait. Default: True.
        timeout : float, optional
            Seconds to wait. Default: no limit.

        Returns
        -------
        object
            The item.

        Raises
        ------
        queue.Empty
            The queue was empty.
        Queue.ShutDown
            The queue was shut down and has no items left.
        ObjectLostError
            The item was lost with its sender's host.
        Exception
            The item could not be unpickled. It has been removed from the queue.

        Examples
        --------
        >>> jobs = hoplite_mp.Queue()
        >>> jobs.put("a")
        >>> jobs.get()
        'a'
        """
        return run(self._getting(block, timeout))

    def get_nowait(self) -> T:
        """Takes the oldest item, or raises `queue.Empty` without waiting: `get(block=False)`.

        Returns
        -------
        object
            The item.

        Examples
        --------
        >>> hoplite_mp.Queue().get_nowait()
        Traceback (most recent call last):
            ...
        _queue.Empty
        """
        return run(self._getting(False, None))

    async def get_async(self, block: bool = True, timeout: float | None = None) -> T:
        """Like `get`, but does not block the event loop while it waits.

        A cancelled call does not remove an item. To keep items in order, other calls do not take
        the next item until this call has returned, but wait for at most 0.5 seconds."""
        return await run_async(self._getting(block, timeout, True))

    def _getting(
        self, block: bool, timeout: float | None, cancellable: bool = False
    ) -> Generator[Future[Any] | Until | Read, Any, T]:
        """The steps of `get`. `cancellable`: whether the call may be cancelled at any time, and
        would then give its item back."""
        may_wait, deadline = waits(block, timeout)
        yield from self._all_given_back()
        ticket = self._ticket()
        call: Future[Any] | None = None
        try:
            while True:
                call = self._call("take", *ticket, may_wait, *([True] if cancellable else ()))
                code, *found = yield call
                call = None
                if code == CallAnswer.BUSY:
                    yield from self._until(found[0], deadline_ns(sync_actors.UNCERTAIN_S))
                    continue
                if code != CallAnswer.WAIT:
                    break
                # After the deadline, there is one more attempt without waiting.
                may_wait = (yield from self._until(found[0], deadline)) is not None
        except BaseException:  # Ctrl-C, a signal handler's error, or a cancelled await
            self._post("stop_taking", ticket)
            if call is not None:
                _interrupted.append((self._key, call))
                call.add_done_callback(self._give_back)
            raise
        if code == CallAnswer.ENDED:
            raise _ShutDown(f"{self!r} was shut down, and has no items left")
        if code == CallAnswer.REFUSED:
            raise queue.Empty
        value: Any = found[1]
        try:
            if isinstance(value, ObjectRef):
                read = yield Read(self._runtime, value, self._copy)
            else:
                read = self._runtime.memory.decode_value(
                    memoryview(value), lambda: f"an item of {self!r}", self._copy
                )
            if cancellable:
                self._post("keep_item", *ticket)
            return read  # type: ignore[no-any-return]
        except BaseException as error:
            if _is_interrupt(error):  # the item was taken, but the caller does not receive it
                self._post("give_back", ticket[0], found[0], by_ref(value))
            elif cancellable:
                self._post("keep_item", *ticket)
            raise

    @property
    def _key(self) -> bytes:
        return bytes(_identity_of(self._actor)._id)

    def _all_given_back(self) -> Generator[Future[Any], None, None]:
        """Waits until interrupted calls by this process have given back their items. Otherwise a
        later call could take later items first."""
        while calls := [call for key, call in _interrupted.copy() if key == self._key]:
            call = calls[0]
            with contextlib.suppress(Exception):  # the call has failed
                yield call
            self._give_back(call)

    def _give_back(self, call: Any) -> None:
        """Gives back the item of an interrupted call, unless another thread does so."""
        with contextlib.suppress(ValueError):
            _interrupted.remove((self._key, call))
            self._return_item(call)

    def _return_item(self, call: Any) -> None:
        with contextlib.suppress(Exception):  # the call has failed
            code, *found = call.result(0)
            if code == CallAnswer.DONE:
                self._post("give_back", self._process(), found[0], by_ref(found[1]))

    def _post(self, method: str, *args: Any) -> None:
        """Makes a call without waiting for its result."""
        with contextlib.suppress(HopliteError):
            self._call(method, *args)

    # -- state ---------------------------------------------------------------------------------

    def qsize(self) -> int:
        """Returns the number of items in the queue.

        Returns
        -------
        int

        Examples
        --------
        >>> hoplite_mp.Queue().qsize()
        0
        """
        return int(self._call("sizes").result()[0])

    def empty(self) -> bool:
        """Whether the queue is empty now.

        Returns
        -------
        bool

        Examples
        --------
        >>> hoplite_mp.Queue().empty()
        True
        """
        return self.qsize() == 0

    def full(self) -> bool:
        """Whether the queue is full now.

        Returns
        -------
        bool

        Examples
        --------
        >>> hoplite_mp.Queue(maxsize=1).full()
        False
        """
        items, most = self._call("sizes").result()
        return bool(0 < most <= items)

    @property
    def maxsize(self) -> int:
        """The maximum number of items in the queue; 0 means no limit.

        Examples
        --------
        >>> hoplite_mp.Queue(maxsize=7).maxsize
        7
        """
        return int(self._call("sizes").result()[1])

    # -- finished items and shutdown -----------------------------------------------------------

    def task_done(self) -> None:
        """Marks one item that was taken from the queue as finished.

        Raises
        ------
        ValueError
            There were more calls than items.

        Examples
        --------
        >>> jobs = hoplite_mp.Queue()
        >>> jobs.put("a")
        >>> _ = jobs.get()
        >>> jobs.task_done()
        """
        _check_finished(self._call("finish_one", self._process()).result())

    async def task_done_async(self) -> None:
        """Like `task_done`, but does not block the event loop."""
        _check_finished(await self._call("finish_one", self._process()))

    def join(self) -> None:
        """Waits until `task_done` has been called for every item.

        Raises
        ------
        WorkerLostError
            All unfinished items were taken by processes that have died.

        Examples
        --------
        >>> hoplite_mp.Queue().join()
        """
        run(self._joining())

    async def join_async(self) -> None:
        """Like `join`, but does not block the event loop."""
        await run_async(self._joining())

    def _joining(self) -> Generator[Future[Any] | Until | Read, Any, None]:
        while True:
            code, found = yield self._call("join")
            if code == CallAnswer.DONE:
                return
            if code == CallAnswer.REFUSED:
                raise errors.WorkerLostError(
                    f"{found} item{'s' if found != 1 else ''} of {self!r} will never be finished: "
                    "the processes that took them died before task_done()"
                )
            yield from self._until(found, waits(True, None)[1])

    def shutdown(self, immediate: bool = False) -> None:
        """Shuts down the queue: no more items can be put, and `get` fails once the queue is empty.

        These calls raise `Queue.ShutDown`, even if they are already waiting. On every Python
        version, this works like `queue.Queue.shutdown` in Python 3.13.

        Parameters
        ----------
        immediate : bool, optional
            If True, the items in the queue are dropped. Default: False.

        Examples
        --------
        >>> jobs = hoplite_mp.Queue()
        >>> jobs.put("a")
        >>> jobs.shutdown()
        >>> jobs.get()
        'a'
        >>> jobs.get()
        Traceback (most recent call last):
            ...
        hoplite_mp._sync.queues.ShutDown: ...
        """
        self._call("end", bool(immediate)).result()


def _is_interrupt(error: BaseException) -> bool:
    """Whether the error is an interruption of the call: by Ctrl-C, a cancelled `await`, or a signal
    handler that ends the program. Any other error is caused by the item itself, which is then not
    given back, because the next call would fail, too."""
    if issubclass(type(error), Exception):
        return False
    from asyncio import CancelledError

    kinds = KeyboardInterrupt, GeneratorExit, CancelledError
    return issubclass(type(error), kinds) or is_interruption(error)


def _check_finished(there_was_one: bool) -> None:
    if not there_was_one:
        raise ValueError("task_done() called too many times")
