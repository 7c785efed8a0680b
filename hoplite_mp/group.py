"""Group: peers that call together, and send each other messages.

Why it exists: in synchronous training nobody should ask a manager at each step. This is what a user
sees of it: one method for each kind of call, each with its form that returns a Future.
It must never know: how a call is made (`calling`), how a message arrives (`inbox`), other groups,
who starts peers.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from hoplite_mp.client.memory import check_timeout
from hoplite_mp.contributions import NOTHING
from hoplite_mp.errors import PeerLostError
from hoplite_mp.messaging import Messages
from hoplite_mp.protocol.local import GroupJoin, GroupLeave
from hoplite_mp.splitting import peers_of, split_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp.client.runtime import Runtime

__all__ = ["Group", "join"]

P = ParamSpec("P")
R = TypeVar("R")
NAME_CHARS_MAX = 1024
PLACE_MAX = 1 << 31
Array = np.ndarray[Any, np.dtype[Any]]


def _in_background(
    call: Callable[Concatenate[Group, P], R],
) -> Callable[Concatenate[Group, P], concurrent.futures.Future[R]]:
    """The form of a call that returns a Future."""

    def later(group: Group, /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[R]:
        return group._background(functools.partial(call, group), args, kwargs)

    name = call.__name__
    later.__name__, later.__qualname__ = f"{name}_async", f"Group.{name}_async"
    later.__doc__ = f"`{name}` in the background; its result, or what it raises, is the Future's."
    form = inspect.signature(call)
    result = f"concurrent.futures.Future[{form.return_annotation}]"
    later.__signature__ = form.replace(return_annotation=result)  # type: ignore[attr-defined]
    return later


class Group(Messages):
    """One member of a Group; belongs to one thread at a time.

    Arrays in, writable arrays out. Reductions take arrays, numbers and bools, the same shape and
    dtype on every rank; the other calls carry any picklable object as itself, each rank its own.
    `out=`: a writable array of the result's shape and dtype that takes the result; where the result
    is a list, a list of them, of which those of dead ranks stay as they are. Each call has an
    `..._async` form that returns a Future. What a call raises, it raises on every rank: a different
    kind, op, root, shape or dtype is a ValueError, what cannot be reduced or pickled a TypeError, a
    rank without room in its store a StoreFullError; a dead root or, with strict=True, any dead peer
    is a PeerLostError.
    """

    rank: int
    """This member's place, from 0; it never changes."""
    size: int
    """How many members the group has when it is whole; it never changes."""
    calls: int | None
    """The number of the next call; None until the first one begins."""
    contributors: tuple[int, ...]
    """The ranks whose parts are in the result of the last finished call, sorted."""

    _cluster: Any = None  # held as long as this is

    def __init__(
        self, runtime: Runtime, name: str, size: int, place: Any, strict: bool, timeout: Any
    ) -> None:
        super().__init__(runtime, name, size, place, strict, timeout)
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        runtime.task_leaves.append(self.close)

    # What a user sees of a Group stands in one place, wherever it is written.
    alive = Messages.alive
    send, recv, recv_async = Messages.send, Messages.recv, Messages.recv_async
    sendrecv, probe = Messages.sendrecv, Messages.probe

    # -- the calls -----------------------------------------------------------------------------

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

    def gather(
        self, x: Any, root: int = 0, *, out: Sequence[Array] | None = None
    ) -> list[Any] | None:
        """At `root` the list of all x by rank, None for the dead; None elsewhere. Where None is an
        x, too, `contributors` tells who is dead. `out`: an array for each rank."""
        result: list[Any] | None = self._here(self._call, "gather", "", root, x, out)
        return result

    def allgather(self, x: Any, *, out: Sequence[Array] | None = None) -> list[Any]:
        """The list of all x by rank, None for the dead, on every rank. `out`: an array for each
        rank."""
        result: list[Any] = self._here(self._call, "allgather", "", 0, x, out)
        return result

    def reduce_scatter(self, x: Any, op: Any = "sum", *, out: Array | None = None) -> Array:
        """Slice `rank` of the reduction, cut as np.array_split(axis=0) by size."""
        result: Array = self._here(self._call, "reduce_scatter", op, 0, x, out)
        return result

    def alltoall(self, parts: list[Any], *, out: Sequence[Array] | None = None) -> list[Any]:
        """parts[j] goes to rank j; returns what each rank sent here, None for the dead. `out`: an
        array for each rank."""
        result: list[Any] = self._here(self._call, "alltoall", "", 0, parts, out)
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

    def split(self, color: int | None, key: int = 0) -> Group | None:
        """A Group of the ranks that give the same color, ordered by key, then by rank here; with
        color None the call is made, but no Group is joined, and None is returned.

        Every living rank makes the call. The new Group has this one's `strict` and `timeout`, is
        independent of it, and is closed like any other. Who dies before it has joined is a dead
        rank of the new Group. TypeError: color or key is no integer.
        """
        return self._here(self._split, color, key)  # type: ignore[no-any-return]

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

    def _split(self, color: Any, key: Any) -> Group | None:
        call = self._begin()
        given = self._call("split", "", 0, (color, key, self._identity), None)
        if color is None:
            return None
        name = split_name(self.name, self._generation, call, color)
        return self._of_peers(name, peers_of(given, color))

    def _of_peers(self, name: str, peers: list[tuple[int, Any]]) -> Group:
        """A Group of members of this one, given as (rank, identity) in the order of the new ranks,
        the same on each of them. Nobody waits there for one that leaves this Group first."""
        ranks = [rank for rank, _ in peers]
        ask = GroupJoin(
            name,
            len(peers),
            ranks.index(self.rank),
            self._generation,
            [(rank, *identity) for rank, identity in peers],
        )
        place = self._runtime.channel.call(ask).value
        made = Group(self._runtime, name, len(peers), place, self.strict, self._timeout)
        made._cluster = self._cluster
        return made

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

    def close(self) -> None:
        """Leaves the group; happens by itself at the end of the task."""
        if self._closed:
            return
        if self._thread is not None:
            self._thread.shutdown()
        self._closed = True
        self._end_messages()
        leaves = self._runtime.task_leaves  # a new list: the old one may be on its way through
        self._runtime.task_leaves = [leave for leave in leaves if leave != self.close]
        if self._memory.client.usable:
            self._runtime.channel.call(GroupLeave(self.name, self._generation, self.rank))
        self._result = self._part = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        self.close()


_inside = threading.local()  # .now: this is the thread that makes the calls in the background


def _marked(pool: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _inside.now = True
    try:
        return call(*args, **kwargs)
    finally:
        _inside.now = False


def join(
    runtime: Runtime, name: str, size: int, rank: int | None, strict: bool, timeout: float | None
) -> Group:
    """Becomes a member; ValueError for a wrong size, a taken rank, one too many."""
    runtime.memory.check()
    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r}: a group needs a name")
    if len(name) > NAME_CHARS_MAX:
        raise ValueError(f"a group's name of {len(name)} characters: at most {NAME_CHARS_MAX}")
    for what, value in (("size", size), ("rank", rank)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer, type(None))):
            raise TypeError(f"{what}={value!r}: it must be an integer")
        if value is not None and abs(int(value)) > PLACE_MAX:
            raise ValueError(f"{what}={value!r}: no group is as large")
    check_timeout(timeout)
    ask = GroupJoin(name, int(size), None if rank is None else int(rank))
    place = runtime.channel.call(ask).value
    if isinstance(place, str):
        raise PeerLostError(place)
    return Group(runtime, name, int(size), place, strict, timeout)
