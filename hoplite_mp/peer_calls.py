"""The calls that all members of a Group make together, each with its form that returns a Future.

Why it exists: one method for each kind of call is what a user sees of `calling`, and where it says
what each of them takes and returns.
It must never know: how a call is made, how a member joins or leaves.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from hoplite_mp.contributions import NOTHING
from hoplite_mp.messaging import Messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.client.runtime import Runtime

__all__ = ["PeerCalls"]

P = ParamSpec("P")
R = TypeVar("R")
Array = np.ndarray[Any, np.dtype[Any]]


_inside = threading.local()  # .now: this is the thread that makes the calls in the background


def _marked(pool: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _inside.now = True
    try:
        return call(*args, **kwargs)
    finally:
        _inside.now = False


def _in_background(
    call: Callable[Concatenate[PeerCalls, P], R],
) -> Callable[Concatenate[PeerCalls, P], concurrent.futures.Future[R]]:
    """The form of a call that returns a Future."""

    def later(me: PeerCalls, /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[R]:
        return me._background(functools.partial(call, me), args, kwargs)

    name = call.__name__
    later.__name__, later.__qualname__ = f"{name}_async", f"Group.{name}_async"
    later.__doc__ = f"`{name}` in the background; its result, or what it raises, is the Future's."
    form = inspect.signature(call)
    result = f"concurrent.futures.Future[{form.return_annotation}]"
    later.__signature__ = form.replace(return_annotation=result)  # type: ignore[attr-defined]
    return later


class PeerCalls(Messages):
    """A member that makes calls, in its own thread or in the background."""

    def __init__(
        self, runtime: Runtime, name: str, size: int, place: Any, strict: bool, timeout: Any
    ) -> None:
        super().__init__(runtime, name, size, place, strict, timeout)
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    def allreduce(self, x: Any, op: Any = "sum", *, out: Array | None = None) -> Array:
        """The reduction of every living rank's x, on every rank."""
        result: Array = self._here(self._call, "allreduce", op, 0, x, out)
        return result

    def reduce(
        self, x: Any, op: Any = "sum", root: int = 0, *, out: Array | None = None
    ) -> Array | None:
        """The reduction at `root`; None elsewhere."""
        result: Array | None = self._here(self._call, "reduce", op, root, x, out)
        return result

    def broadcast(self, x: Any = NOTHING, root: int = 0, *, out: Array | None = None) -> Any:
        """root's x on every rank; x is ignored elsewhere."""
        return self._here(self._call, "broadcast", "", root, x, out)

    def gather(self, x: Any, root: int = 0) -> list[Any] | None:
        """At `root` the list of all x by rank, None for the dead; None elsewhere. Where None is an
        x, too, `contributors` tells who is dead."""
        result: list[Any] | None = self._here(self._call, "gather", "", root, x, None)
        return result

    def allgather(self, x: Any) -> list[Any]:
        """The list of all x by rank, None for the dead, on every rank."""
        result: list[Any] = self._here(self._call, "allgather", "", 0, x, None)
        return result

    def reduce_scatter(self, x: Any, op: Any = "sum", *, out: Array | None = None) -> Array:
        """Slice `rank` of the reduction, cut as np.array_split(axis=0) by size."""
        result: Array = self._here(self._call, "reduce_scatter", op, 0, x, out)
        return result

    def alltoall(self, parts: list[Any]) -> list[Any]:
        """parts[j] goes to rank j; returns what each rank sent here, None for the dead."""
        result: list[Any] = self._here(self._call, "alltoall", "", 0, parts, None)
        return result

    def scatter(self, parts: Any = NOTHING, root: int = 0, *, out: Array | None = None) -> Any:
        """parts[rank] of root's list of one value for each rank; parts is ignored elsewhere.
        ValueError: another number of parts; PeerLostError: the root is dead."""
        return self._here(self._call, "scatter", "", root, parts, out)

    def scan(self, x: Any, op: Any = "sum", *, out: Array | None = None) -> Array:
        """The reduction, from left to right, of x of every living rank up to this one."""
        result: Array = self._here(self._call, "scan", op, 0, x, out)
        return result

    def exscan(self, x: Any, op: Any = "sum", *, out: Array | None = None) -> Array | None:
        """The reduction of x of every living rank below this one; None on the lowest of them, which
        leaves `out` as it is."""
        result: Array | None = self._here(self._call, "exscan", op, 0, x, out)
        return result

    def barrier(self) -> None:
        """Returns when every living rank has called it."""
        self._here(self._call, "barrier", "", 0, None, None)

    allreduce_async = _in_background(allreduce)
    reduce_async = _in_background(reduce)
    broadcast_async = _in_background(broadcast)
    gather_async = _in_background(gather)
    allgather_async = _in_background(allgather)
    reduce_scatter_async = _in_background(reduce_scatter)
    alltoall_async = _in_background(alltoall)
    scatter_async = _in_background(scatter)
    scan_async = _in_background(scan)
    exscan_async = _in_background(exscan)
    barrier_async = _in_background(barrier)

    def _background(
        self, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        """Calls are matched by their order, so one thread makes them in order."""
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "hoplite_mp group")
        return self._thread.submit(_marked, self._thread, call, args, kwargs)

    def _here(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._thread is not None and not getattr(_inside, "now", False):
            return self._background(call, args, {}).result()
        return call(*args)
