"""`Cluster.stream`: runs a generator in a worker, and yields refs to its items while it is running.

A task returns one result, when it is finished. A generator function is for results that become
ready one by one, or do not fit into memory together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from hoplite_mp._api.executor import COMMON_POOL, Options, TaskExecutor
from hoplite_mp._client.functions import is_async
from hoplite_mp._client.option_checks import refuse_unused
from hoplite_mp._client.queues import SHUT_DOWN, rank_of
from hoplite_mp._client.streams import Stream, StreamPlan
from hoplite_mp._common.object_states import TASK_OWN_STACK, TASK_STREAM
from hoplite_mp.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Iterable

    from hoplite_mp._client.futures import Future
    from hoplite_mp._client.runtime import Runtime

__all__ = ["StreamCalls"]

T = TypeVar("T")


class StreamCalls(TaskExecutor):
    """The `Cluster` method that opens streams."""

    _runtime: Runtime
    _options: Options

    def stream(
        self,
        fn: Callable[..., Generator[T, Any, Any] | AsyncGenerator[T, Any] | Iterable[T]],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Stream[T]:
        """Runs the generator function `fn(*args, **kwargs)`, or an async one, in a worker.

        The generator pauses while `options(buffersize=n)` items, or by default items of
        `Config.stream_bytes_max` bytes, are unread. During a pause another worker replaces the
        generator's worker, and the pause does not count towards `timeout=`. Yielded arrays from
        `current().empty(...)` are published without a copy, and become read-only.

        Parameters
        ----------
        fn : callable
            Yields items.
        *args, **kwargs
            As for `submit`.

        Returns
        -------
        iterator of ObjectRef
            An iterator for `for` and `async for` that yields a ref for each item while the
            generator is running. Closing or dropping the iterator closes the generator at its next
            yield. If the generator raises an exception, the iterator raises it after the last
            item.

        Raises
        ------
        ClosedError
            The cluster was shut down.
        TypeError
            `fn` is an async function that does not yield.

        Notes
        -----
        After the death of its worker or host, the generator runs again, up to `retries` times, and
        recomputes the items that it had yielded before. Recomputed items replace items that were
        lost before they were read, and are otherwise discarded. The generator must therefore yield
        the same items in each run, or have `options(retries=0)`.

        A stream occupies a worker, or one of an actor's `concurrency` slots, until it is read to
        its end or closed; `shutdown` does not wait for it. It cannot be pickled, and reading it
        from two threads at a time raises ValueError.

        Examples
        --------
        >>> def squares(n):
        ...     for i in range(n):
        ...         yield np.full(1000, i * i)
        >>> [int(c.get(ref)[0]) for ref in c.stream(squares, 4)]
        [0, 1, 4, 9]
        """
        if self._was_closed():
            raise ClosedError(SHUT_DOWN)
        if is_async(fn):
            name = getattr(fn, "__name__", type(fn).__name__)
            raise TypeError(
                f"{name}() is an async function without a yield: it has one result, so use "
                f"submit({name}, ...); stream() is for generator functions"
            )
        options, runtime = self._options, self._runtime
        refuse_unused(options, "stream")
        if options.retry_exceptions:
            raise ValueError(
                "retry_exceptions= is not for stream(): a generator's exception is raised after "
                "the items that it has yielded; catch the exception inside the generator"
            )
        if runtime.pool_sizes.get(0) == 0:
            raise RuntimeError(
                "this cluster was created with workers=0, so it cannot run generators: create it "
                "with workers"
            )
        retries = runtime.config.retries if options.retries is None else options.retries

        def begin(plan: StreamPlan) -> Future[Any]:
            pool, nodes = self._pool, options.node
            if options.resources is not None:
                pool = COMMON_POOL
                nodes = runtime.demands.nodes_for_task(options.resources, nodes)
            if nodes is not None:
                pool = self._bound(nodes)
            return runtime.submitter.submit(
                fn,
                (tuple(plan), *args),
                kwargs,
                pool,
                retries - plan.tries,
                options.timeout,
                options.copy,
                options.name,
                more_flags=TASK_STREAM | TASK_OWN_STACK,
                rank=rank_of(
                    options.priority, runtime.submitter.inherited_priority, options.resources
                ),
                demand=options.resources,
            )

        name = options.name or getattr(fn, "__name__", None) or type(fn).__name__
        return Stream(runtime, begin, retries, options.buffersize, name, self)
