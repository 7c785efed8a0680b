"""`Cluster.run`: calls a function once in every worker of the common pool.

Programs use it to empty caches, change settings or reload modules while the cluster is running.
The node implements it as a worker broadcast (_node/tasks/worker_broadcast.py): one task for each
worker, between two other tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from hoplite_mp import _serialize, _tasks, errors
from hoplite_mp._api.executor import TaskExecutor
from hoplite_mp._client.functions import FrozenFunction, flags_of, is_async
from hoplite_mp._client.option_checks import refuse_unused
from hoplite_mp._client.runtime import current_runtime
from hoplite_mp._client.waiting import BLOCKED_AFTER_NS
from hoplite_mp._common import clock
from hoplite_mp._common.clock import FOREVER_NS, check_timeout, deadline_ns
from hoplite_mp._common.object_states import CONCURRENCY_SHIFT
from hoplite_mp._protocol.local import (
    BeginWorkerBroadcast,
    ClosePool,
    EndWorkerBroadcast,
    OpenWorkerBroadcast,
)
from hoplite_mp.errors import HopliteTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp._client.futures import Future
    from hoplite_mp._client.runtime import Runtime

__all__ = ["RunOnWorkersCalls"]

T = TypeVar("T")


class RunOnWorkersCalls(TaskExecutor):
    """The `Cluster` method that calls a function in every worker."""

    def run(
        self, fn: Callable[..., T], /, *args: Any, node: Any = None, timeout: float | None = None
    ) -> dict[str, T]:
        """Calls `fn(*args)` once in every worker of the cluster, between two tasks.

        The workers of executors, peers and actors do not run the function, nor do workers that
        start later (use `executor(initializer=)`). The result does not include workers that die,
        or whose node is lost. A worker that is waiting inside a task is busy with that task. If a
        task calls `run`, the task's own worker runs the function inside the call.
        `options(retries=)` and `options(timeout=)` do not apply.

        Parameters
        ----------
        fn : callable
            The function to call. An async function runs in the event loop of its worker.
        *args
            Its arguments. Refs among them are replaced by their values, as for `submit`.
        node : Node, str, or a list of them, optional
            Call the function only in the workers on these nodes. Default: on all nodes.
        timeout : float, optional
            Seconds to wait. Workers that are still busy after this time will not run the function.
            Default: no limit.

        Returns
        -------
        dict
            The results by the workers' names, `{"2@h0": ..., "3@h0": ...}`. These are the names
            that precede a worker's output, as in `(worker 3@h0)`.

        Raises
        ------
        Exception
            The exception of the first worker that failed, after all workers have run the function.
        HopliteTimeoutError
            Some workers have not run the function in time. Calls that have begun continue.

        Examples
        --------
        >>> import os
        >>> pids = c.run(os.getpid)
        >>> len(set(pids.values())) == sum(node.workers for node in c.nodes)
        True
        """
        refuse_unused(self._options, "run")
        numbers = self._resolved({"node": node})["node"] or self._options.node or ()
        options = self._options
        return _run(self._runtime, fn, args, numbers, timeout, options.copy, options.name)


class _Named:
    """A function whose result also contains the name of the worker that has run it."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__qualname__ = getattr(fn, "__qualname__", None) or type(fn).__qualname__

    def __reduce__(self) -> Any:
        return _Named, (self.fn,)

    def __call__(self, *args: Any) -> Any:
        if is_async(self.fn):
            return self._awaited(args)
        return _own_name(), self.fn(*args)

    async def _awaited(self, args: tuple[Any, ...]) -> Any:
        return _own_name(), await self.fn(*args)


def _own_name() -> tuple[int, int]:
    """The node and the slot of this worker."""
    runtime = current_runtime()
    return runtime.tasks.node_number, runtime.client.slot


def _run(
    runtime: Runtime,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    numbers: Sequence[int],
    timeout: float | None,
    copy: bool,
    name: str | None,
) -> dict[str, Any]:
    """Implements `run`. `numbers`: the numbers of the nodes; empty: all nodes."""
    if not callable(fn):
        raise TypeError(f"run() takes a function, not {fn!r:.80}")
    check_timeout(timeout)
    if timeout is not None and timeout < 0:
        raise ValueError(f"timeout={timeout!r}: it must be a number of seconds, at least 0")
    flags = flags_of(fn)
    runtime.memory.check()
    if runtime.take_part is not None:
        runtime.take_part()  # raises RuntimeError if this worker cannot run the function now
    deadline = deadline_ns(timeout)
    submitter, memory = runtime.submitter, runtime.memory
    needed = _serialize.encode_call(args, {}, memory.scan).dependencies
    oids = [memory.local_id(ref) for ref in needed]
    if oids and not submitter.waiting.wait_many(oids, len(oids), deadline):
        raise HopliteTimeoutError(f"an argument of run() was not ready within {timeout:g} s")
    left = None if deadline == FOREVER_NS else max(0.0, (deadline - clock.monotonic_ns()) / 1e9)
    opened = runtime.channel.call(OpenWorkerBroadcast(list(numbers), left)).value
    if opened is None:
        raise HopliteTimeoutError(f"not all nodes have answered run() within {timeout:g} s")
    pool, count = opened
    submitter.queues.opened(pool)
    fixed: Any = FrozenFunction(_Named(fn))
    name = name or getattr(fn, "__name__", None) or type(fn).__name__
    futures: list[Future[Any]] = []
    ended: list[Any] = []  # in the order in which they ended
    try:
        for _ in range(count):
            future = submitter.submit(
                fixed,
                args,
                {},
                pool,
                0,
                None,
                copy,
                name,
                more_flags=flags | (1 << CONCURRENCY_SHIFT if flags else 0),
            )
            future.add_done_callback(ended.append)
            futures.append(future)
        runtime.channel.tell(BeginWorkerBroadcast(pool))
        if not _wait(runtime, [future._oid for future in futures], deadline):
            submitter.drain()
            missing = sum(not future.done() for future in futures)
            for future in futures:
                future.cancel()
            submitter.close_queue(pool)
            runtime.channel.call(EndWorkerBroadcast(pool))
            raise HopliteTimeoutError(
                f"{missing} of {count} workers have not run {name}() within {timeout:g} s: they "
                "are busy with other tasks, and those that have not begun will not run it"
            )
        return _results(futures, ended)
    finally:
        for future in futures:
            future._seen()
            future.cancel()
        if runtime.client.usable:
            submitter.close_queue(pool)
            runtime.channel.tell(ClosePool(pool, False))


def _wait(runtime: Runtime, oids: list[int], deadline: int) -> bool:
    """Waits until all tasks are done. Returns False if the deadline passes first. If this process
    is a worker, it takes part in this broadcast, and in other callers' broadcasts, while it
    waits."""
    waiting, take_part, tasks = runtime.submitter.waiting, runtime.take_part, runtime.tasks
    if take_part is None:
        return waiting.wait_many(oids, len(oids), deadline)
    blocked = False
    try:
        while True:
            seen = tasks.event()
            take_part()
            runtime.memory.check()
            runtime.submitter.drain()
            open_ = [oid for oid in oids if not tasks.done(oid)]
            now = clock.monotonic_ns()
            if not open_ or now >= deadline:
                return not open_
            until = deadline if blocked else min(deadline, now + BLOCKED_AFTER_NS)
            if tasks.wait_event(seen, until, False, open_[0]) == _tasks.CLOSING:
                runtime.memory.check_lost()
                raise errors.NodeLostError("the node of this host has ended")
            if not blocked and clock.monotonic_ns() >= until:
                blocked = True
                waiting.count_blocked(1)
    finally:
        if blocked:
            waiting.count_blocked(-1)


def _results(futures: list[Future[Any]], ended: list[Future[Any]]) -> dict[str, Any]:
    """The results by the workers' names, excluding workers that have died meanwhile. Raises the
    function's first exception."""
    for future in (*ended, *futures):
        error = future.exception()
        if error is not None and not _is_loss(error):
            raise error
    found = dict(future.result() for future in futures if future.exception() is None)
    return {f"{slot}@h{node}": found[node, slot] for node, slot in sorted(found)}


def _is_loss(error: BaseException) -> bool:
    """Whether the error means that the worker has died. An exception that the function itself has
    raised has a cause, which is the worker's traceback."""
    return isinstance(error, errors.WorkerLostError) and error.__cause__ is None
