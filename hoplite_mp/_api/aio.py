"""connect: opens and closes a Cluster in an event loop.

Opening a cluster starts processes or contacts other hosts, and closing a cluster waits for tasks.
Both would block the loop, so they are done in a thread. If the loop is closed meanwhile, a cluster
that the program has not received is closed, too.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hoplite_mp._api.cluster import Cluster
from hoplite_mp._common import locks

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator

__all__ = ["connect"]

P = ParamSpec("P")
T = TypeVar("T")


class Connecting:
    """The result of `connect`. Opens a Cluster when it is awaited or entered."""

    def __init__(self, make: Callable[[], Cluster]) -> None:
        self._make: Callable[[], Cluster] | None = make
        self._cluster: Cluster | None = None

    def __await__(self) -> Generator[Any, None, Cluster]:
        return self._opened().__await__()

    async def __aenter__(self) -> Cluster:
        self._cluster = await self._opened()
        return self._cluster

    async def __aexit__(self, kind: Any, value: Any, traceback: Any) -> None:
        import asyncio

        cluster, self._cluster = self._cluster, None
        assert cluster is not None
        try:
            await in_own_thread(functools.partial(cluster.__exit__, kind, value, traceback))
        except asyncio.CancelledError:
            if kind is None:  # the caller no longer waits for the tasks
                await in_own_thread(cluster._abort)
            raise

    async def _opened(self) -> Cluster:
        make, self._make = self._make, None
        if make is None:
            raise RuntimeError(
                "the result of connect() can be used only once: call hoplite_mp.connect(...) again"
            )
        return await in_own_thread(make, Cluster._abort)


def _takes_arguments_of(
    make: Callable[P, Cluster],
) -> Callable[[Callable[..., Connecting]], Callable[P, Connecting]]:
    """A decorator for `connect`. Type checkers and `help` then show the arguments of `make`, which
    documents them."""

    def as_is(function: Callable[..., Connecting]) -> Callable[P, Connecting]:
        function.__wrapped__ = make  # type: ignore[attr-defined]
        return function

    return as_is


@_takes_arguments_of(Cluster)
def connect(*args: Any, **kwargs: Any) -> Connecting:
    """Opens a Cluster without blocking the event loop.

    Parameters
    ----------
    *args, **kwargs
        As for `Cluster`.

    Returns
    -------
    awaitable
        Use it with `async with`, or `await` it to get the Cluster.

    Raises
    ------
    RuntimeError
        The result was awaited or entered twice.

    Notes
    -----
    The end of `async with` waits in a thread for all submitted tasks, like the end of `with`. If
    the block ends with an exception, or this wait is cancelled, waiting tasks are cancelled and
    running tasks are interrupted. Close a cluster from ``c = await hoplite_mp.connect()`` with
    ``await asyncio.to_thread(c.shutdown)``; otherwise it is closed at interpreter exit. If the
    opening is cancelled, the cluster is closed as soon as it is open.

    Examples
    --------
    >>> import asyncio
    >>> async def main():
    ...     async with hoplite_mp.connect(workers=1) as small:
    ...         return await small.submit(pow, 2, 10)
    >>> asyncio.run(main())
    1024
    """
    return Connecting(functools.partial(Cluster, *args, **kwargs))


connect.__module__ = "hoplite_mp"  # as users import it


async def in_own_thread(call: Callable[[], T], dispose: Callable[[T], Any] | None = None) -> T:
    """Runs `call()` in a new thread, and returns its result. If the caller is cancelled before it
    receives the result, `dispose(result)` is called in a thread. The interpreter waits for these
    threads when it exits."""
    from hoplite_mp._client.awaiting import inbox_here

    inbox = inbox_here()
    waiter: asyncio.Future[None] = inbox.loop.create_future()
    context = contextvars.copy_context()  # as in asyncio.to_thread; notebooks need it for output
    # Either the loop takes the result, or the thread passes it to `dispose`.
    taking = locks.lock("cluster.connecting")
    cancelled = False
    found: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            result = context.run(call)
        except BaseException as error:
            failed.append(error)
        else:
            with taking:
                if not cancelled:
                    found.append(result)
            if not found and dispose is not None:
                dispose(result)
            del result
        inbox.hand_over(waiter)

    threading.Thread(target=work, name="hoplite_mp connect").start()
    try:
        await waiter
    except BaseException:
        with taking:
            cancelled = True
        if found and dispose is not None:
            # The caller was cancelled after the result was available, or even handed over.
            result = found.pop()
            threading.Thread(target=dispose, args=(result,), name="hoplite_mp connect").start()
        raise
    if failed:
        try:
            raise failed.pop()
        finally:
            failed.clear()
    return found.pop()
