"""The public methods for a Group's collective calls. Each call has a form that returns a Future."""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from hoplite_mp import _serialize
from hoplite_mp._common import clock
from hoplite_mp._common.clock import FOREVER_NS, deadline_ns
from hoplite_mp._common.reduction import function_name, is_function
from hoplite_mp._common.signals import is_interruption
from hoplite_mp._common.slice_operators import SliceOperator
from hoplite_mp._group.background import Background, CallFuture
from hoplite_mp._group.bounded import BoundedReductions, GroupOfRounds
from hoplite_mp._group.call_protocol import REJOIN
from hoplite_mp._group.messages import Receive
from hoplite_mp._group.slice_folds import SliceFolds
from hoplite_mp._protocol.local import RESULT_TAG
from hoplite_mp._serialize.contributions import NOTHING, into
from hoplite_mp.errors import (
    ClosedError,
    HopliteTimeoutError,
    PeerLostError,
    StoreFullError,
    TaskError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hoplite_mp._client.memory import Memory
    from hoplite_mp._common.ref import ObjectRef
    from hoplite_mp._group.call_protocol import CallProtocol
    from hoplite_mp._group.member_lifecycle import GroupMembership
    from hoplite_mp._group.messages import MemberMessages

__all__ = ["GroupCollectives", "ObjectFolds"]

# Reductions of picklable values by a user's function.
#
# The ranks first make an allgather of their pickled values. The lowest contributing rank, the
# leader, then folds the values from left to right in rank order, and sends each rank its result in
# a message with a reserved tag. If the leader dies or leaves before its message has arrived, each
# remaining rank folds the gathered values itself.


RESULT, ERROR, FOLD_YOURSELF = "result", "error", "fold yourself"
# Maximum length of an error's class name: the message must fit into a header, outside the store.
NAME_CHARS_MAX = 40


class Parcel:
    """A pickled value. Only ranks that fold the values unpickle it."""

    def __init__(self, payload: bytes, refs: list[ObjectRef[Any]]) -> None:
        self._payload = payload
        self._refs = refs  # keeps alive the objects that the value refers to

    def open(self, memory: Memory, rank: int) -> Any:
        """Unpickles the value. `rank`: the contributor, for error messages."""
        return memory.decode_value(memoryview(self._payload), f"the value of rank {rank}", True)


class Packed:
    """A value that is pickled as a Parcel."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._parcel: tuple[bytes, list[ObjectRef[Any]]] | None = None

    def pack(self) -> None:
        """Pickles the value. Raises TypeError if the value cannot be pickled."""
        encoded = _encoded(self._value, "the value given")
        self._parcel = encoded.tobytes(), list(encoded.refs)

    def __reduce__(self) -> Any:
        assert self._parcel is not None
        return Parcel, self._parcel


class ObjectFolds:
    """A member's reductions whose `op` is a function."""

    def __init__(
        self, member: GroupMembership, calls: CallProtocol, messages: MemberMessages
    ) -> None:
        self._member = member
        self._memory, self._board = member.memory, member.board
        self.name, self.rank, self.size = member.name, member.rank, member.size
        self._calls = calls
        self._messages = messages
        # The error that all ranks raise in the current call.
        self._folded_error: BaseException | None = None

    def fold(self, kind: str, op: Any, root: int, x: Any, out: Any) -> Any:
        self._member.check()
        self._folded_error = None
        self._calls.is_open = True
        try:
            deadline = deadline_ns(self._member.timeout)
            self._messages.inbox.look()
            ended = self._messages.inbox.ended  # before the call, in which the leader may leave
            found = self._committed_fold(kind, op, root, x, deadline, ended)
        except BaseException as error:
            if error is not self._folded_error:
                # An interruption ends the membership, even if its type is in DOCUMENTED.
                self._calls.is_open = self._calls.is_open or is_interruption(error)
                self._calls.end_after(error)
            raise
        finally:
            self._folded_error = None
        return found if found is None or out is None else into(found, out)

    def _committed_fold(
        self, kind: str, op: Any, root: int, x: Any, deadline: int, ended: tuple[int, ...]
    ) -> Any:
        """This rank's result. An error that all ranks raise is stored in `_folded_error`."""
        name = f"{kind} by {function_name(op)}"
        parcels = self._calls.call("allgather", name, root, Packed(x), None)
        assert self._member.calls is not None
        call, ranks = self._member.calls - 1, self._calls.contributors
        if kind == "reduce" and root not in ranks:
            raise PeerLostError(f"group {self.name!r}: the root, rank {root}, is lost")
        fold = lambda: self._results(kind, op, operator.index(root), parcels, ranks)  # noqa: E731
        if self.rank == ranks[0]:
            return self._lead_fold(call, fold, ranks)
        return self._led_fold(call, ranks[0], deadline, ended, fold)

    def _results(
        self, kind: str, op: Any, root: int, parcels: list[Parcel], ranks: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Any]]:
        """Yields pairs (ranks, the result for these ranks). The caller must copy each result before
        the next iteration, because `op` may change its first argument."""
        total = None
        for place, rank in enumerate(ranks):
            if kind == "exscan":
                yield (rank,), total
            value = parcels[rank].open(self._memory, rank)
            total = value if place == 0 else op(total, value)
            if kind == "scan":
                yield (rank,), total
        if kind == "allreduce":
            yield ranks, total
        elif kind == "reduce":
            yield (root,), total
            yield [rank for rank in ranks if rank != root], None
        elif kind == "reduce_scatter":
            parts = _split(total, self.size)
            for rank in ranks:
                yield (rank,), parts[rank]

    # -- the leader ----------------------------------------------------------------------------

    def _lead_fold(self, call: int, fold: Callable[[], Iterator[Any]], ranks: Sequence[int]) -> Any:
        """Folds the values, sends each other rank its result or the error, and returns this rank's
        result."""
        ready = []
        try:
            for some, value in fold():
                try:
                    encoded = _serialize.encode((call, RESULT, value))
                except _serialize.NotPicklable:
                    _encoded(value, "the result of op")  # raises an error that names the result
                    raise
                ready.append((some, encoded, self._memory.put_encoded(encoded)))
        except Exception as error:
            if not is_interruption(error):
                self._send_error(call, ranks, error)
                self._folded_error = error
            raise
        own = None
        for some, encoded, ref in ready:
            self._send_result(some, encoded, ref)
            if self.rank in some:
                own = self._memory.read(self._memory.local_id(ref), FOREVER_NS, True)[2]
        return own

    def _send_error(self, call: int, ranks: Sequence[int], error: Exception) -> None:
        """Sends the error to the other ranks, or only the name of its class if the store has no
        space for the error."""
        if type(error) is TaskError and isinstance(error.__cause__, _serialize.EXITS):
            error = TaskError(str(error))  # without its cause, which would be raised as an exit
        failed = _serialize.encode((call, ERROR, _serialize.encode_error(error).tobytes()))
        try:
            ref = self._memory.put_error(failed)
        except StoreFullError:
            failed = _serialize.encode((call, ERROR, type(error).__name__[:NAME_CHARS_MAX]))
            ref = self._memory.put_encoded(failed)
        self._send_result(ranks, failed, ref)

    def _send_result(
        self, ranks: Sequence[int], encoded: _serialize.Encoded, ref: ObjectRef[Any]
    ) -> None:
        for rank in ranks:
            if rank != self.rank:
                # The returned reason is ignored: a dead rank needs no result.
                self._messages.send_encoded(encoded, ref, rank, RESULT_TAG)

    # -- the other ranks -----------------------------------------------------------------------

    def _led_fold(
        self,
        call: int,
        leader: int,
        deadline: int,
        ended: tuple[int, ...],
        fold: Callable[[], Iterator[Any]],
    ) -> Any:
        """This rank's result, received from the leader. `ended`: `Inbox.ended` before the call."""
        try:
            state, value = self._receive_result(call, leader, deadline, ended)
        except PeerLostError:
            if self._calls.strict:
                raise
            state, value = FOLD_YOURSELF, None
        if state == ERROR and isinstance(value, str):
            raise StoreFullError(
                f"call {call}: folding the values failed at rank {leader} with {value}, and its "
                "store has no space for the whole error; raise memory="
            )
        if state == ERROR:
            self._folded_error = self._memory.failure(memoryview(value))
            raise self._folded_error
        if state == RESULT:
            return value
        try:
            return next((own for some, own in fold() if self.rank in some), None)
        except Exception as error:
            if not is_interruption(error):
                self._folded_error = error
            raise

    def _receive_result(
        self, call: int, leader: int, deadline: int, ended: tuple[int, ...]
    ) -> tuple[str, Any]:
        limit = "" if self._member.timeout is None else f" within {self._member.timeout:g} s"
        late = (
            f"call {call}: rank {leader} did not fold the values{limit}. This rank has left the "
            f"Group. {REJOIN}"
        )

        def arrives() -> bool:
            # The leader sends the results before it makes its next call.
            is_past = self._board.member(leader)[0] > call + 1
            return self._messages.arrives(receive) or is_past

        while True:
            receive = Receive(leader, RESULT_TAG, deadline, self._member.timeout)
            try:
                self._messages.inbox.post(receive)
                receive.ended = ended
                self._member.wait(arrives, deadline, lambda: late)
                if receive.found is None:
                    return FOLD_YOURSELF, None
                receive.deadline = FOREVER_NS if deadline < clock.monotonic_ns() else deadline
                number, state, value = self._messages.inbox.take(receive)
            finally:
                self._messages.inbox.withdraw(receive)
            if number == call:  # otherwise the message is from before this rank joined again
                return state, value


def _encoded(value: Any, what: str) -> _serialize.Encoded:
    """The payload of a user's value. If the value cannot be pickled, raises TypeError with `what`
    as the name of the value."""
    try:
        return _serialize.encode(value)
    except _serialize.NotPicklable as error:
        text = str(error).replace("cannot pickle value", f"cannot pickle {what}", 1)
        made = type(error)(text)
        made.place = error.place
        raise made from error.__cause__


def _split(total: Any, size: int) -> Sequence[Any]:
    """A reduce_scatter's total, divided into one part for each rank."""
    if isinstance(total, np.ndarray) and total.ndim:
        return np.array_split(total, size)
    if isinstance(total, (list, tuple)) and len(total) == size:
        return total
    raise TypeError(
        f"reduce_scatter by a function needs arrays, or lists with one item for each of {size} "
        f"ranks, not {type(total).__name__}"
    )


P = ParamSpec("P")
R = TypeVar("R")
Array = np.ndarray[Any, np.dtype[Any]]
IN_BACKGROUND = """Makes the call `{name}` in the background; takes the same arguments.

A thread of the Group makes these calls in the order in which they were started. Do not write to the
arrays of a call before its Future is done: see the notes on `empty`.

Returns
-------
concurrent.futures.Future
    An awaitable Future for the result of `{name}`. Neither a cancelled `await` nor `cancel()`
    cancels the call: calls are matched by their order, so every rank must make every call. If a
    wait times out or is interrupted, the call keeps running. If the call itself takes longer than
    the Group's `timeout`, counted from the end of the previous call, this rank leaves the Group:
    this Future and all later ones fail with HopliteTimeoutError.
"""


def _in_background(
    call: Callable[Concatenate[GroupCollectives, P], R],
) -> Callable[Concatenate[GroupCollectives, P], CallFuture[R]]:
    """The form of a method that makes the call in the background and returns a Future."""

    def later(me: GroupCollectives, /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[R]:
        return me._begin_in_background(functools.partial(call, me, *args, **kwargs))

    name = call.__name__
    later.__name__, later.__qualname__ = f"{name}_async", f"Group.{name}_async"
    later.__doc__ = IN_BACKGROUND.format(name=name)
    form = inspect.signature(call)
    result = f"concurrent.futures.Future[{form.return_annotation}]"
    later.__signature__ = form.replace(return_annotation=result)  # type: ignore[attr-defined]
    return later


class GroupCollectives:
    """The collective calls of a Group, as methods of `Group`: blocking, and in the background."""

    _member: GroupMembership
    _calls: CallProtocol
    _folds: ObjectFolds
    _make_rounds: Callable[[], GroupOfRounds]  # defined by the subclass

    def _join(self, member: GroupMembership, calls: CallProtocol, messages: MemberMessages) -> None:
        """Creates the objects that make this member's calls."""
        self._member = member
        self._calls = calls
        self._folds = ObjectFolds(member, calls, messages)
        self._slice_folds = SliceFolds(member, calls)
        self._bounded: BoundedReductions | None = None
        self._background: Background | None = None

    def _call_by(self, op: Any, finite: bool = False) -> Callable[..., Any]:
        """The function that makes a reduction with this operator."""
        if isinstance(op, SliceOperator) or finite:
            return functools.partial(self._slice_folds.reduce, finite=finite)
        return self._folds.fold if is_function(op) else self._calls.call

    def _bounded_gather(
        self, text: str, payload: Any, num: Any, deadline: Any, error: Exception | None
    ) -> tuple[tuple[int, ...], list[Any]]:
        """For `hoplite_mp.ml`: the ranks that are in time, and the payloads of these ranks."""
        about = text, payload, num, deadline, error
        return self._here(self._bounded_reductions().gather, *about)  # type: ignore[no-any-return]

    def _bounded_reductions(self) -> BoundedReductions:
        """The object that makes bounded allreduces. Its first call starts a thread."""
        if self._bounded is None:
            about = self._member, self._calls, self._folds._messages
            self._bounded = BoundedReductions(*about, self._make_rounds)
        return self._bounded

    def allreduce(
        self,
        x: Any,
        op: Any = "sum",
        *,
        out: Array | None = None,
        finite: bool = False,
        num: int | None = None,
        deadline: float | None = None,
    ) -> Array:
        """Reduces x over all living ranks, and returns the result on every rank.

        Parameters
        ----------
        x : array or number
            The same shape and dtype on every rank. If `op` is a function: any picklable value.
        op : str, numpy.ufunc or callable, optional
            A name or a ufunc, as for `Cluster.reduce`. Any other callable ``f(a, b)`` folds the
            values from left to right in rank order, at the lowest living rank. If the function
            raises an exception, every rank raises this exception. The function must have the same
            module and qualified name on every rank. If the folding rank dies or leaves, the other
            ranks fold the values, so the function should return equal results for equal values. The
            robust operators in `hoplite_mp.ml` take float32 and float64. Default: "sum".
        out : numpy.ndarray, optional
            A writable array with the result's shape and dtype, which receives the result.
        finite : bool, optional
            If True, ranks whose x contains a NaN or an infinite value are left out, and are not in
            `contributors`. Allowed for "sum", "mean", "prod", "min", "max" and the robust
            operators. Default: False.
        num : int, optional
            With `deadline`: the minimum number of ranks whose x is included, from 1 to `size`. If
            fewer ranks are alive, all of them must be included. Default: 1.
        deadline : float, optional
            Seconds after the call by the lowest living rank. Ranks whose slices have not all
            arrived by then are left out if at least `num` ranks remain. Default: None, which waits
            for all ranks.

        Returns
        -------
        numpy.ndarray
            The same bits on every rank. If x is a number, an array without dimensions. If `op` is a
            function, its result, copied for each rank.

        Raises
        ------
        ValueError, TypeError, PeerLostError, StoreFullError
            As for `Group`.
        ReduceError
            On every rank: `finite` is True and no x is finite, or a robust operator accepts no x.

        Notes
        -----
        A reduction by a robust operator or with `finite` counts as several calls in `calls`.

        With `deadline`, `op` must be a name or a ufunc, and `calls` does not count the call. Ranks
        that are left out get the same result and `contributors` as the others when they make the
        call; their x is discarded (`hoplite_mp.ml.Feedback` keeps it). When a rank is late by
        `Config.group_late_calls_max` calls, the others wait for it. The first such call in a Group
        waits for all ranks, and starts a thread that takes part when the program is late. A rank
        that joins again takes part in the first undecided call. If a late rank's arguments differ,
        only that rank raises ValueError. If a rank dies before a late rank has received the result,
        another rank sends the result; if no living rank has it, the late rank raises PeerLostError.
        If the store has no space for a rank's slices, only that rank raises StoreFullError, and its
        membership ends. The idea is from OptiReduce (Warraich et al., NSDI 2025), here over TCP.

        Calls with `deadline` never match calls without it. If some ranks pass `deadline` and others
        do not, some ranks are late, or all wait until their `timeout`.

        The leading rank commits the call by a single write, so a dying rank's contribution is in
        the results of all survivors, or of none. Over several hosts, large arrays are reduced by a
        reduce-scatter and an allgather (Rabenseifner 2004; Patarasuk and Yuan 2009).

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
        if num is not None or deadline is not None:
            bounded = self._bounded_reductions().allreduce
            return self._here(bounded, x, op, out, finite, num, deadline)  # type: ignore[no-any-return]
        result: Array = self._here(
            self._calls.call if type(op) is str and not finite else self._call_by(op, finite),
            "allreduce",
            op,
            0,
            x,
            out,
        )
        return result

    def reduce(
        self,
        x: Any,
        op: Any = "sum",
        root: int = 0,
        *,
        out: Array | None = None,
        finite: bool = False,
    ) -> Array | None:
        """Reduces x over all living ranks, and returns the result at `root`.

        Parameters
        ----------
        x, op, out, finite
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
            The root is dead. Other errors are as for `allreduce`.

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("reduce", 2, rank)
        ...     return g.reduce(np.full(2, rank + 1), op="max", root=1)
        >>> c.get(c.spmd(peer, 2))
        [None, array([2, 2])]
        """
        result: Array | None = self._here(
            self._calls.call if type(op) is str and not finite else self._call_by(op, finite),
            "reduce",
            op,
            root,
            x,
            out,
        )
        return result

    def broadcast(self, x: Any = NOTHING, root: int = 0, *, out: Array | None = None) -> Any:
        """Returns the root's x on every rank.

        Parameters
        ----------
        x : object, optional
            Any picklable value. Required at the root, ignored on other ranks.
        root : int, optional
            The rank that provides x. Default: 0.
        out : numpy.ndarray, optional
            A writable array of x's shape and dtype for the result.

        Returns
        -------
        object
            A copy for each rank; an array is writable.

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
        return self._here(self._calls.call, "broadcast", "", root, x, out)

    def gather(
        self, x: Any, root: int = 0, *, out: Sequence[Array] | None = None
    ) -> list[Any] | None:
        """Gathers x from all living ranks, and returns the values at `root`.

        Parameters
        ----------
        x : object
            Any picklable value.
        root : int, optional
            The rank that receives the values. Default: 0.
        out : list of numpy.ndarray, optional
            At the root: one writable array for each rank, with the shape and dtype of that rank's
            value. The array of a dead rank is left unchanged.

        Returns
        -------
        list or None
            At the root, a list indexed by rank, with None for dead ranks; `contributors`
            distinguishes these from ranks whose x is None. On the other ranks, None.

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
        result: list[Any] | None = self._here(self._calls.call, "gather", "", root, x, out)
        return result

    def allgather(self, x: Any, *, out: Sequence[Array] | None = None) -> list[Any]:
        """Gathers x from all living ranks, and returns the values on every rank.

        Parameters
        ----------
        x : object
            Any picklable value.
        out : list of numpy.ndarray, optional
            One writable array for each rank, with the shape and dtype of that rank's value. The
            array of a dead rank is left unchanged.

        Returns
        -------
        list
            By rank, with None for a dead rank.

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("allgather", 2, rank)
        ...     return g.allgather(rank * 10)
        >>> c.get(c.spmd(peer, 2))
        [[0, 10], [0, 10]]
        """
        result: list[Any] = self._here(self._calls.call, "allgather", "", 0, x, out)
        return result

    def reduce_scatter(self, x: Any, op: Any = "sum", *, out: Array | None = None) -> Array:
        """Reduces x over all living ranks, and returns to each rank its slice of the result.

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
            self._calls.call if type(op) is str else self._call_by(op),
            "reduce_scatter",
            op,
            0,
            x,
            out,
        )
        return result

    def alltoall(self, parts: list[Any], *, out: Sequence[Array] | None = None) -> list[Any]:
        """Sends parts[j] to rank j, and returns the parts that all ranks have sent to this rank.

        Parameters
        ----------
        parts : list of object
            One for each rank.
        out : list of numpy.ndarray, optional
            One writable array for each rank, with the shape and dtype of that rank's value. The
            array of a dead rank is left unchanged.

        Returns
        -------
        list
            By rank, with None for a dead rank.

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
        result: list[Any] = self._here(self._calls.call, "alltoall", "", 0, parts, out)
        return result

    def scatter(self, parts: Any = NOTHING, root: int = 0, *, out: Array | None = None) -> Any:
        """Returns to each rank its part of the root's list.

        Parameters
        ----------
        parts : list of object, optional
            One for each rank. Required at the root, ignored on other ranks.
        root : int, optional
            The rank that provides the list. Default: 0.
        out : numpy.ndarray, optional
            A writable array of the part's shape and dtype for the result.

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
        return self._here(self._calls.call, "scatter", "", root, parts, out)

    def scan(self, x: Any, op: Any = "sum", *, out: Array | None = None) -> Array:
        """Reduces x over the living ranks up to and including this one, from left to right.

        Parameters
        ----------
        x, op, out
            As for `allreduce`.

        Returns
        -------
        numpy.ndarray
            On rank r, the reduction over ranks 0 to r.

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("scan", 2, rank)
        ...     return int(g.scan(rank + 1))
        >>> c.get(c.spmd(peer, 2))
        [1, 3]
        """
        result: Array = self._here(
            self._calls.call if type(op) is str else self._call_by(op), "scan", op, 0, x, out
        )
        return result

    def exscan(self, x: Any, op: Any = "sum", *, out: Array | None = None) -> Array | None:
        """Reduces x over the living ranks below this one, from left to right.

        Parameters
        ----------
        x, op, out
            As for `allreduce`.

        Returns
        -------
        numpy.ndarray or None
            On rank r, the reduction over ranks 0 to r - 1. None on the lowest living rank, where
            `out` is left unchanged.

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
            self._calls.call if type(op) is str else self._call_by(op), "exscan", op, 0, x, out
        )
        return result

    def barrier(self) -> None:
        """Waits until every living rank has made this call.

        Examples
        --------
        >>> def peer(rank):
        ...     hoplite_mp.current().group("barrier", 2, rank).barrier()
        >>> c.get(c.spmd(peer, 2))
        [None, None]
        """
        self._here(self._calls.call, "barrier", "", 0, None, None)

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
        """Queues the call for the Group's background thread. The first call starts the thread."""
        self._member.check()
        if self._background is None:
            background = Background(self._member.name)
            weakref.finalize(self, background.stop).atexit = False
            self._background = background
        return self._background.begin(self._make_queued, call)

    def _make_queued(self, call: Callable[[], R]) -> R:
        """Makes a queued call. Raises HopliteTimeoutError if an earlier call has timed out."""
        if self._member.timed_out:
            raise HopliteTimeoutError(self._member.timed_out)
        return call()

    def _wake_all(self) -> None:
        """Wakes all waiting threads of this process."""
        if self._member.memory.client.usable:
            self._member.tasks.wake(self._member.runtime.client.slot)

    def _here(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._background is None or self._background.is_here():
            return call(*args)
        self._member.check()
        future: CallFuture[Any] | None = None
        try:
            future = self._background.begin(call, *args)
            return future.result()
        except BaseException as error:
            is_its_own = future is not None and future.is_settled and error is future.exception(0)
            if not is_its_own and not isinstance(error, ClosedError):
                self._calls.is_open = True  # this wait was interrupted
                self._calls.end_after(error)
            raise
        finally:
            del future, call, args  # no reference cycle through the traceback
