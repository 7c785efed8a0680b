"""The calls that all members of a Group make together, each also in a form that returns a Future.

A user sees `call_protocol` as one method for each kind of call, whose docstring says what it takes
and returns.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from hoplite_mp._group.background import Background, CallFuture
from hoplite_mp._group.object_folds import ObjectFolds
from hoplite_mp._serialize.contributions import NOTHING
from hoplite_mp.errors import ClosedError, HopliteTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp._client.runtime import Runtime

__all__ = ["GroupCollectives"]

P = ParamSpec("P")
R = TypeVar("R")
Array = np.ndarray[Any, np.dtype[Any]]
IN_BACKGROUND = """`{name}` in the background; the arguments are the same.

Calls that were begun are made in their order by one thread of the Group. Do not write to the arrays
that are given before the Future is done: see the Notes of `empty`.

Returns
-------
concurrent.futures.Future
    Of what `{name}` returns or raises. `await` waits for it in an event loop; a cancelled `await`
    does not cancel the call, nor does `cancel()`: calls are matched by their order, so a rank that
    left one out would give each later part to another call. A wait that times out or is interrupted
    leaves the call running, too. If the call itself takes longer than the Group's `timeout`,
    counted from when the calls before it are over, this rank leaves the Group: this Future and all
    later ones fail with HopliteTimeoutError.
"""


def _in_background(
    call: Callable[Concatenate[GroupCollectives, P], R],
) -> Callable[Concatenate[GroupCollectives, P], CallFuture[R]]:
    """The form of a call that returns a Future."""

    def later(me: GroupCollectives, /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[R]:
        return me._begin_in_background(functools.partial(call, me, *args, **kwargs))

    name = call.__name__
    later.__name__, later.__qualname__ = f"{name}_async", f"Group.{name}_async"
    later.__doc__ = IN_BACKGROUND.format(name=name)
    form = inspect.signature(call)
    result = f"concurrent.futures.Future[{form.return_annotation}]"
    later.__signature__ = form.replace(return_annotation=result)  # type: ignore[attr-defined]
    return later


class GroupCollectives(ObjectFolds):
    """A member that makes calls, in its own thread or in the background."""

    def __init__(
        self, runtime: Runtime, name: str, size: int, place: Any, strict: bool, timeout: Any
    ) -> None:
        super().__init__(runtime, name, size, place, strict, timeout)
        self._background: Background | None = None

    def allreduce(self, x: Any, op: Any = "sum", *, out: Array | None = None) -> Array:
        """Reduces x of every living rank, and returns the result on every rank.

        Parameters
        ----------
        x : array or number
            The same shape and dtype on every rank. If `op` is a function: any value that pickles.
        op : str, numpy.ufunc or callable, optional
            A name or a ufunc as for `Cluster.reduce`. Any other callable ``f(a, b)`` folds the
            values from left to right in the order of ranks, at the lowest living rank. If it
            raises, every rank raises that exception. It must have the same module and qualified
            name on every rank. If the folding rank dies or leaves, the others fold the values
            themselves, so the function should give equal results for equal values. Default: "sum".
        out : numpy.ndarray, optional
            A writable array of the result's shape and dtype that takes the result.

        Returns
        -------
        numpy.ndarray
            The same bits on every rank. A number gives an array without dimensions. If `op` is a
            function: the value that it has returned, each rank's own.

        Raises
        ------
        ValueError, TypeError, PeerLostError, StoreFullError
            As for `Group`.

        Notes
        -----
        The leading rank commits the call by one write, so a rank that dies counts on all survivors
        or on none. Over several hosts large arrays move as a reduce-scatter and an allgather
        (Rabenseifner 2004; Patarasuk and Yuan 2009).

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("allreduce", 2, rank)
        ...     return g.allreduce(np.array([1.0, rank])), g.contributors
        >>> c.spmd(peer, 2)[0].result()
        (array([2., 1.]), (0, 1))
        >>> with c.group("allreduce any value", 1) as g:
        ...     g.allreduce({1 << 80}, op=lambda a, b: a | b)
        {1208925819614629174706176}
        """
        result: Array = self._here(
            self._call if type(op) is str else self._call_by(op), "allreduce", op, 0, x, out
        )
        return result

    def reduce(
        self, x: Any, op: Any = "sum", root: int = 0, *, out: Array | None = None
    ) -> Array | None:
        """Reduces x of every living rank, and returns the result at `root`.

        Parameters
        ----------
        x, op, out
            As for `allreduce`.
        root : int, optional
            The rank that receives the result. Default: 0.

        Returns
        -------
        numpy.ndarray or None
            None on the other ranks.

        Raises
        ------
        PeerLostError
            The root is dead; otherwise as for `allreduce`.

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("reduce", 2, rank)
        ...     return g.reduce(np.full(2, rank + 1), op="max", root=1)
        >>> c.get(c.spmd(peer, 2))
        [None, array([2, 2])]
        """
        result: Array | None = self._here(
            self._call if type(op) is str else self._call_by(op), "reduce", op, root, x, out
        )
        return result

    def broadcast(self, x: Any = NOTHING, root: int = 0, *, out: Array | None = None) -> Any:
        """Returns root's x on every rank.

        Parameters
        ----------
        x : object, optional
            Anything that pickles. It is needed at the root, and ignored elsewhere.
        root : int, optional
            The rank whose x it is. Default: 0.
        out : numpy.ndarray, optional
            A writable array of x's shape and dtype that takes the result.

        Returns
        -------
        object
            Each rank's own; an array is writable.

        Raises
        ------
        PeerLostError
            The root is dead.

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("broadcast", 2, rank)
        ...     return g.broadcast({"step": 5} if rank == 0 else None)
        >>> c.get(c.spmd(peer, 2))
        [{'step': 5}, {'step': 5}]
        """
        return self._here(self._call, "broadcast", "", root, x, out)

    def gather(
        self, x: Any, root: int = 0, *, out: Sequence[Array] | None = None
    ) -> list[Any] | None:
        """Returns the x of all ranks at `root`.

        Parameters
        ----------
        x : object
            Anything that pickles.
        root : int, optional
            The rank that receives them. Default: 0.
        out : list of numpy.ndarray, optional
            At the root: one writable array for each rank, of its value's shape and dtype, into
            which the value goes; that of a dead rank stays as it is.

        Returns
        -------
        list or None
            At the root a list by rank, with None in the place of a dead rank; if None may also be
            an x, `contributors` tells which ranks are dead. None on the other ranks.

        Raises
        ------
        PeerLostError
            The root is dead.

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("gather", 2, rank)
        ...     return g.gather(f"rank {rank}")
        >>> c.get(c.spmd(peer, 2))
        [['rank 0', 'rank 1'], None]
        """
        result: list[Any] | None = self._here(self._call, "gather", "", root, x, out)
        return result

    def allgather(self, x: Any, *, out: Sequence[Array] | None = None) -> list[Any]:
        """Returns the x of all ranks on every rank.

        Parameters
        ----------
        x : object
            Anything that pickles.
        out : list of numpy.ndarray, optional
            One writable array for each rank, of its value's shape and dtype, into which the
            value goes; that of a dead rank stays as it is.

        Returns
        -------
        list
            By rank, None in the place of a dead rank.

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("allgather", 2, rank)
        ...     return g.allgather(rank * 10)
        >>> c.get(c.spmd(peer, 2))
        [[0, 10], [0, 10]]
        """
        result: list[Any] = self._here(self._call, "allgather", "", 0, x, out)
        return result

    def reduce_scatter(self, x: Any, op: Any = "sum", *, out: Array | None = None) -> Array:
        """Reduces x of every living rank, and returns to each rank its slice of the result.

        Parameters
        ----------
        x, op, out
            As for `allreduce`.

        Returns
        -------
        numpy.ndarray
            `np.array_split(total, size, axis=0)[rank]`. If `op` is a function, the total may also
            be a list or a tuple with one item for each rank.

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("reduce_scatter", 2, rank)
        ...     return g.reduce_scatter(np.arange(4))
        >>> c.get(c.spmd(peer, 2))
        [array([0, 2]), array([4, 6])]
        """
        result: Array = self._here(
            self._call if type(op) is str else self._call_by(op), "reduce_scatter", op, 0, x, out
        )
        return result

    def alltoall(self, parts: list[Any], *, out: Sequence[Array] | None = None) -> list[Any]:
        """Sends parts[j] to rank j, and returns what each rank has sent here.

        Parameters
        ----------
        parts : list of object
            One for each rank.
        out : list of numpy.ndarray, optional
            One writable array for each rank, of its value's shape and dtype, into which the
            value goes; that of a dead rank stays as it is.

        Returns
        -------
        list
            By rank, None in the place of a dead rank.

        Raises
        ------
        ValueError
            The number of parts is not `size`.

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("alltoall", 2, rank)
        ...     return g.alltoall([f"{rank} to 0", f"{rank} to 1"])
        >>> c.get(c.spmd(peer, 2))
        [['0 to 0', '1 to 0'], ['0 to 1', '1 to 1']]
        """
        result: list[Any] = self._here(self._call, "alltoall", "", 0, parts, out)
        return result

    def scatter(self, parts: Any = NOTHING, root: int = 0, *, out: Array | None = None) -> Any:
        """Returns to each rank its part of root's list.

        Parameters
        ----------
        parts : list of object, optional
            One for each rank. It is needed at the root, and ignored elsewhere.
        root : int, optional
            The rank whose list it is. Default: 0.
        out : numpy.ndarray, optional
            A writable array of the part's shape and dtype that takes the result.

        Returns
        -------
        object
            parts[rank].

        Raises
        ------
        ValueError
            The number of parts is not `size`.
        PeerLostError
            The root is dead.

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("scatter", 2, rank)
        ...     return g.scatter(["a", "b"] if rank == 0 else None)
        >>> c.get(c.spmd(peer, 2))
        ['a', 'b']
        """
        return self._here(self._call, "scatter", "", root, parts, out)

    def scan(self, x: Any, op: Any = "sum", *, out: Array | None = None) -> Array:
        """Reduces x of every living rank up to this one, from left to right.

        Parameters
        ----------
        x, op, out
            As for `allreduce`.

        Returns
        -------
        numpy.ndarray
            On rank r the reduction over ranks 0 to r.

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("scan", 2, rank)
        ...     return int(g.scan(rank + 1))
        >>> c.get(c.spmd(peer, 2))
        [1, 3]
        """
        result: Array = self._here(
            self._call if type(op) is str else self._call_by(op), "scan", op, 0, x, out
        )
        return result

    def exscan(self, x: Any, op: Any = "sum", *, out: Array | None = None) -> Array | None:
        """Reduces x of every living rank below this one, from left to right.

        Parameters
        ----------
        x, op, out
            As for `allreduce`.

        Returns
        -------
        numpy.ndarray or None
            On rank r the reduction over ranks 0 to r - 1. None on the lowest living rank, which
            leaves `out` as it is.

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("exscan", 2, rank)
        ...     below = g.exscan(rank + 1)
        ...     return None if below is None else int(below)
        >>> c.get(c.spmd(peer, 2))
        [None, 1]
        """
        result: Array | None = self._here(
            self._call if type(op) is str else self._call_by(op), "exscan", op, 0, x, out
        )
        return result

    def barrier(self) -> None:
        """Returns when every living rank has called it.

        Examples
        --------
        >>> def peer(rank):
        ...     hoplite_mp.current().group("barrier", 2, rank).barrier()
        >>> c.get(c.spmd(peer, 2))
        [None, None]
        """
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

    def _begin_in_background(self, call: Callable[[], R]) -> CallFuture[R]:
        """Gives the call to the Group's thread, which is started with its first call."""
        self._check_member()
        if self._background is None:
            background = Background(self.name)
            weakref.finalize(self, background.stop).atexit = False
            self._background = background
        return self._background.begin(self._make_queued, call)

    def _make_queued(self, call: Callable[[], R]) -> R:
        """A call whose turn has come. HopliteTimeoutError: an earlier one has timed out."""
        if self._timed_out:
            raise HopliteTimeoutError(self._timed_out)
        return call()

    def _wake_all(self) -> None:
        """Makes all threads of this process look at what they wait for."""
        if self._memory.client.usable:
            self._tasks.wake(self._runtime.client.slot)

    def _here(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._background is None or self._background.is_here():
            return call(*args)
        self._check_member()
        future: CallFuture[Any] | None = None
        try:
            future = self._background.begin(call, *args)
            return future.result()
        except BaseException as error:
            is_its_own = future is not None and future.is_settled and error is future.exception(0)
            if not is_its_own and not isinstance(error, ClosedError):
                self._open = True  # this wait was interrupted
                self._end_after(error)
            raise
        finally:
            del future, call, args  # no reference cycle through the traceback
