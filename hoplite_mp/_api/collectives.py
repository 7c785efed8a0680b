"""The `Cluster` methods for collectives on refs, and for joining a Group.

They check their arguments, and raise errors for invalid arguments immediately. The planner detects
all other errors during the operation.
"""

from __future__ import annotations

import functools
import numbers
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._api.nodes import node_numbers, other_places
from hoplite_mp._api.pytree import as_refs
from hoplite_mp._client.memory import whole
from hoplite_mp._client.option_checks import refuse_unused
from hoplite_mp._client.runtime import current_runtime
from hoplite_mp._common import clock
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.reduction import is_function, operation_name, prefix
from hoplite_mp._common.ref import ObjectRef, by_ref
from hoplite_mp._common.slice_operators import SliceOperator, fold_whole, is_finite
from hoplite_mp._serialize import Folded
from hoplite_mp.errors import ObjectLostError, ReduceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp._api.executor import Options
    from hoplite_mp._client.futures import Future
    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._group.group import Group

__all__ = ["CollectiveCalls", "GroupCalls", "fold_refs", "keep_copies", "place_copies"]


def fold_refs(
    op: Any,
    refs: list[ObjectRef[Any]],
    num: int,
    deadline_s: float | None,
    ready: list[int],
    called: tuple[int, int],
    finite: bool,
    one_of: list[list[int]] | None,
) -> Folded:
    """Folds the first `num` values to become ready, from left to right in the order of `refs`.

    This function runs in a task that `reduce` submits. `deadline_s`: the number of seconds after
    the call to `reduce` after which the ready values are folded; if no value is ready, the result
    is the first value to become ready. `ready`: the indices of the refs that were ready at the call
    to `reduce`. `called`: the number of the caller's node, and the time of the call on the
    monotonic clock of the caller's host. `finite`: whether an array with a NaN or an infinite value
    counts as failed. `one_of`: groups of indices into `refs`. If given, only the first value of
    each group to become ready is folded, in the order of the groups, and `num` is a number of
    groups. Raises ReduceError if too few refs succeed.
    """
    runtime = current_runtime()
    memory, tasks = runtime.memory, runtime.submitter.tasks
    oids = [memory.local_id(ref) for ref in refs]
    node, called_ns = called
    now = clock.monotonic_ns()
    if node != tasks.node_number:  # clocks of two hosts differ, so the deadline counts from now
        called_ns = now
    until = FOREVER_NS if deadline_s is None else called_ns + int(deadline_s * 1e9)
    groups = one_of or [[at] for at in range(len(refs))]
    group_of = {at: place for place, group in enumerate(groups) for at in group}
    values: dict[int, tuple[int, Any]] = {}  # group -> the index of its ref, and the value
    copies = is_function(op)  # a function may change its first argument
    failure: Exception | None = None
    early = set(ready)
    left = [*ready, *(at for at in range(len(refs)) if at not in early)]
    # Number of refs at the start of `left` that may be read in the next round. If the task begins
    # after the deadline, only the refs in `ready` are known to have been ready in time.
    known = len(ready) if ready and now >= until else len(refs)
    while len(values) < num:
        open_groups = len({group_of[at] for at in left})
        if open_groups < num - len(values):
            what = "sources" if one_of is None else "groups of sources"
            raise ReduceError(
                f"reduce: {len(values) + open_groups} of {len(groups)} {what} are left, and {num} "
                f"are needed; the first failure: {failure!r}"
            ) from failure
        runtime.submitter.waiting.wait_many([oids[at] for at in left], num - len(values), until)
        for at in [at for at in left[:known] if tasks.done(oids[at])]:
            if len(values) == num:
                break
            left.remove(at)
            if group_of[at] in values:
                continue
            try:
                value = memory.read(oids[at], FOREVER_NS, copies)
                if finite and not is_finite(np.asarray(value)):
                    raise ReduceError(f"ref {at} has a NaN or an infinite value")
                values[group_of[at]] = at, value
            except Exception as error:
                failure = error if failure is None else failure
        left = [at for at in left if group_of[at] not in values]
        known = len(refs)
        if clock.monotonic_ns() >= until:
            num, until = max(1, len(values)), FOREVER_NS
    return _folded(op, dict(value for _, value in sorted(values.items())))


def _folded(op: Any, values: dict[int, Any]) -> Folded:
    """Reduces the values in their order. `values`: the index of each ref -> its value."""
    if is_function(op):
        return Folded(functools.reduce(op, values.values()), tuple(sorted(values)))
    ranks = tuple(values)
    if isinstance(op, SliceOperator):
        result, accepted = fold_whole(op, list(values.values()))
        return Folded(result, tuple(sorted(ranks[index] for index in accepted)))
    arrays = [np.asarray(value) for value in values.values()]
    first = arrays[0]
    for rank, array in zip(ranks, arrays, strict=True):
        if (array.shape, array.dtype) != (first.shape, first.dtype):
            raise ValueError(
                f"refs {ranks[0]} and {rank} differ: {first.dtype.name} {first.shape} and "
                f"{array.dtype.name} {array.shape}"
            )
    return Folded(prefix(operation_name(op), arrays, 1), tuple(sorted(ranks)))


Array = np.ndarray[Any, np.dtype[Any]]

NO_FOLDS = (
    "a function, a robust operator or finite=True needs a task to reduce the values, and this "
    "cluster has no workers: call functools.reduce(op, c.get(refs, copy=True)) instead, or create "
    "the cluster with workers"
)
DEADLINE_S_MAX = 1e9  # 31 years; a longer deadline is treated as no deadline


def _reduce(
    runtime: Runtime,
    refs: Sequence[ObjectRef[Any]],
    op: str | Callable[..., Any],
    num: int | None,
    deadline: Any,
    reproducible: bool,
    to: Sequence[int],
    kind: str = "reduce",
    slices: int = 1,
    one_of: Any = None,
) -> list[ObjectRef[Any]]:
    """Starts a reduction of `refs`. Returns one result ref for each slice. `to`: the numbers of the
    nodes that receive the result."""
    name = operation_name(op)
    groups = _groups(refs, one_of)
    wanted, deadline = _limits(refs, num, deadline, groups)
    reproducible = bool(reproducible)
    if kind != "reduce_scatter":
        to = list(dict.fromkeys(to))
    results = runtime.collective(
        refs, kind, name, wanted, deadline, reproducible, slices, to, groups
    )
    return [ObjectRef(runtime.memory.public_id(hold.oid), hold) for hold in results]


def _groups(refs: Sequence[ObjectRef[Any]], one_of: Any) -> list[list[int]] | None:
    """Converts the argument `one_of` to lists. Raises ValueError unless each ref is in exactly one
    group."""
    if one_of is None:
        return None
    try:
        given = [list(group) for group in one_of]
    except TypeError:
        raise ValueError(f"one_of={one_of!r}: it must be groups of indices") from None
    groups: list[list[int]] = []
    found: dict[int, int] = {}
    for place, group in enumerate(given):
        if not group:
            raise ValueError(f"one_of: group {place} is empty")
        groups.append([])
        for one in group:
            index = whole(one)
            if index is None or not 0 <= index < len(refs):
                raise ValueError(
                    f"one_of: group {place} has {one!r}, which is not an index into {len(refs)} "
                    "refs"
                )
            if index in found:
                raise ValueError(
                    f"one_of: ref {index} is in group {found[index]} and in group {place}"
                )
            found[index] = place
            groups[-1].append(index)
    for index in range(len(refs)):
        if index not in found:
            raise ValueError(f"one_of: ref {index} is in no group; give it its own group")
    return groups


def _limits(
    refs: Sequence[ObjectRef[Any]],
    num: int | None,
    deadline: Any,
    groups: list[list[int]] | None = None,
) -> tuple[int, float | None]:
    """Returns the number of refs, or of groups of refs, to reduce, and the deadline in seconds;
    None: no deadline."""
    if not refs:
        raise ValueError("there is nothing to reduce: no refs were given")
    most = len(groups or refs)
    wanted = most if num is None else whole(num)
    if wanted is None or not 1 <= wanted <= most:
        what = "refs" if groups is None else "groups"
        raise ValueError(f"num={num!r}: it must be from 1 to the number of {what}, {most}")
    if deadline is None:
        return wanted, None
    number = isinstance(deadline, numbers.Real) and not isinstance(deadline, bool)
    seconds = float(deadline) if number else -1.0
    if not seconds >= 0:
        raise ValueError(f"deadline={deadline!r}: it must be a number of seconds, at least 0")
    return wanted, None if seconds > DEADLINE_S_MAX else seconds


def _fold(
    cluster: Any,
    refs: Any,
    op: Any,
    num: int | None,
    deadline: Any,
    to: Sequence[int],
    finite: bool,
    one_of: Any,
) -> ObjectRef[Any]:
    """Starts a task that folds the values of `refs`. Places its result on the nodes `to`."""
    found = as_refs(refs)
    if not is_function(op) and not isinstance(op, SliceOperator):
        operation_name(op)  # raises ValueError for an unknown name
    groups = _groups(found, one_of)
    wanted, seconds = _limits(found, num, deadline, groups)
    runtime = cluster._runtime
    if runtime.pool_sizes.get(0) == 0 and not cluster._debugs:
        raise RuntimeError(NO_FOLDS)
    oids = [runtime.memory.local_id(ref) for ref in found]
    ready = [at for at, oid in enumerate(oids) if runtime.tasks.done(oid)]
    called = runtime.tasks.node_number, clock.monotonic_ns()
    task = cluster.submit(
        fold_refs, op, by_ref(found), wanted, seconds, ready, called, finite, groups
    )
    ref: ObjectRef[Any] = task.ref
    if len(cluster.nodes) > 1:
        placed = place_copies(runtime, [ref], "broadcast", to)
        _placing.add(placed)
        placed.add_done_callback(_placing.discard)
    return ref


_placing: set[Any] = set()  # keeps alive the Futures of results that are being placed


def place_copies(
    runtime: Runtime, refs: Sequence[ObjectRef[Any]], kind: str, to: Sequence[int]
) -> Future[None]:
    """Places objects on the nodes with the numbers `to`. The Future is done when all objects are in
    place. `kind`: "broadcast", "gather", "allgather" or "alltoall"."""
    if not refs:
        raise ValueError("no refs were given")
    if kind != "alltoall":
        to = list(dict.fromkeys(to))
    (result,) = runtime.collective(refs, kind, "", len(refs), None, False, 1, to)
    return runtime.operation_future(result)


def keep_copies(runtime: Runtime, ref: ObjectRef[Any], copies: int, to: Sequence[int]) -> None:
    """Places copies of the object on the nodes `to`, and waits until they are in place. Nodes that
    die meanwhile are replaced, so that there are `copies` copies in total. Raises ValueError if too
    few nodes are left."""
    while to:
        lost: ObjectLostError | None = None
        try:
            place_copies(runtime, [ref], "broadcast", to).result()
        except ObjectLostError as error:
            lost = error
        again = other_places(runtime, copies, keep=to)
        if sorted(again) == sorted(to):
            if lost is not None:
                raise lost
            return
        to = again


class CollectiveCalls:
    """The collectives on refs, as methods of the cluster."""

    _runtime: Runtime

    def reduce(
        self,
        refs: Any,
        op: Any = "sum",
        num: int | None = None,
        deadline: float | None = None,
        to: Any = None,
        reproducible: bool = False,
        finite: bool = False,
        one_of: Any = None,
    ) -> ObjectRef[Array]:
        """Reduces arrays element by element, over the first `num` refs that are ready.

        Returns immediately. The refs need not be ready yet.

        Parameters
        ----------
        refs : iterable of ObjectRef or Future
            Refs to arrays or numbers of the same shape and dtype, or to any values if `op` is a
            function. A ref that is given twice counts twice.
        op : str, numpy.ufunc or callable, optional
            "sum", "prod", "min", "max", "mean", "and", "or", "xor" (the last three bitwise), or an
            associative and commutative binary ufunc. Any other callable ``f(a, b)`` folds the
            values from left to right in the order of `refs`, in one task of the cluster. If the
            function raises an exception, `get` raises it. A robust operator from `hoplite_mp.ml`
            also runs in such a task. Default: "sum".
        num : int, optional
            The number of refs to reduce, 1 to len(refs). Default: all.
        deadline : float, optional
            Seconds from this call. After the deadline, the refs that are ready are reduced or, if
            none is ready, the first ref to become ready. Before the deadline, a failed ref is an
            error unless `num` other refs are left. If `op` is a function and its task begins after
            the deadline, the refs that were ready at the call are reduced. Default: no deadline.
        to : Node or str, optional
            The node that receives the result. Default: the caller's node.
        reproducible : bool, optional
            True: folds from left to right in the order of `refs`, so that the same contributors
            produce the same bits on any number of hosts. Default: False.
        finite : bool, optional
            True: an array with a NaN or an infinite value counts as a failed source. The arrays
            are then reduced in one task, as with a function. Default: False.
        one_of : sequence of sequences of int, optional
            Groups of indices into `refs`; each ref is in exactly one group. In each group, only
            the first ref to become ready is reduced, and `num` is a number of groups. A group fails
            when all its refs have failed. With `reproducible`, or if `op` is a function, values are
            folded in the order of the groups, whichever refs were first. Default: each ref is a
            group of its own.

        Returns
        -------
        ObjectRef
            A ref to an array with the sources' shape and dtype; the "mean" of integers is float64.
            `result.contributors` contains the indices of the reduced refs. float16 and bfloat16
            values are added up as float32 and rounded once.

        Raises
        ------
        ValueError
            There are no refs, `num` is out of range, `op` is unknown, or `one_of` has an empty
            group, contains an index twice or out of range, or does not contain all refs. From
            `get`: shapes or dtypes differ.
        ReduceError
            From `get`: fewer than `num` sources or groups have succeeded; `__cause__` is the first
            failure.
        RuntimeError
            `op` is a function, and the cluster was made with ``workers=0``.

        Notes
        -----
        Sources are streamed through a tree of hosts in the order in which they become ready, as in
        Zhuang et al., *Hoplite: Efficient and Fault-Tolerant Collective Communication for
        Task-Based Distributed Systems*, SIGCOMM 2021.

        Examples
        --------
        >>> parts = [c.put(np.full(3, n)) for n in range(4)]
        >>> total = c.reduce(parts, op="sum")
        >>> c.get(total), total.contributors
        (array([6, 6, 6]), (0, 1, 2, 3))
        >>> len(c.reduce(parts, num=2).contributors or ()) in (0, 2)
        True
        >>> replicas = [c.put(n) for n in (1, 1, 20, 20)]
        >>> c.get(c.reduce(replicas, one_of=[[0, 1], [2, 3]])).item()
        21
        >>> c.get(c.reduce([c.put({n, 7}) for n in range(3)], op=lambda a, b: a | b))
        {0, 1, 2, 7}
        """
        places = node_numbers(self._runtime, to, "to= of reduce")
        if finite or is_function(op) or isinstance(op, SliceOperator):
            here = [self._runtime.tasks.node_number]
            return _fold(self, refs, op, num, deadline, places or here, finite, one_of)
        (result,) = _reduce(
            self._runtime,
            as_refs(refs),
            op,
            num,
            deadline,
            reproducible,
            places,
            one_of=one_of,
        )
        return result

    def allreduce(
        self,
        refs: Any,
        op: Any = "sum",
        num: int | None = None,
        deadline: float | None = None,
        to: Any = None,
        reproducible: bool = False,
        finite: bool = False,
        one_of: Any = None,
    ) -> ObjectRef[Array]:
        """Reduces like `reduce`, and places the result on several nodes.

        Parameters
        ----------
        refs, op, num, deadline, reproducible, finite, one_of
            As for `reduce`.
        to : Node, str, or a list of them, optional
            The nodes that receive the result. Default: the nodes that hold one of `refs`.

        Returns
        -------
        ObjectRef
            Ready when each of these nodes that is still alive holds the result. If `op` is a
            function: ready when the values are folded; the nodes receive the result later.

        Raises
        ------
        ValueError, ReduceError, RuntimeError
            As for `reduce`.

        Notes
        -----
        Large arrays are reduced by a reduce-scatter followed by an allgather, which sends the
        fewest bytes over each link (Rabenseifner 2004; Patarasuk and Yuan 2009).

        Examples
        --------
        >>> mean = c.allreduce([c.submit(np.full, 2, float(n)) for n in range(3)], op="mean")
        >>> c.get(mean)
        array([1., 1.])
        """
        to = node_numbers(self._runtime, to)
        if finite or is_function(op) or isinstance(op, SliceOperator):
            return _fold(self, refs, op, num, deadline, to, finite, one_of)
        (result,) = _reduce(
            self._runtime,
            as_refs(refs),
            op,
            num,
            deadline,
            reproducible,
            to,
            "allreduce",
            one_of=one_of,
        )
        return result

    def broadcast(self, ref: Any, to: Any = None) -> Future[None]:
        """Places an object on several nodes.

        Parameters
        ----------
        ref : ObjectRef or Future
            The object. Several refs are placed as by `allgather`.
        to : Node, str, or a list of them, optional
            Default: all nodes.

        Returns
        -------
        Future
            Done, with None, when every living node in `to` holds the object.

        Notes
        -----
        A node forwards data that it is still receiving, as in Hoplite (SIGCOMM 2021).

        Examples
        --------
        >>> ref = c.put(np.zeros(1000))
        >>> c.broadcast(ref).result()
        >>> c.locations(ref)
        ['h0']
        """
        found = as_refs(ref)
        kind = "broadcast" if len(found) == 1 else "allgather"  # a broadcast of several objects
        return place_copies(self._runtime, found, kind, node_numbers(self._runtime, to))

    def gather(self, refs: Any, to: Any = None) -> Future[None]:
        """Places objects on one node.

        Parameters
        ----------
        refs : iterable of ObjectRef or Future
            The objects.
        to : Node or str, optional
            Default: the caller's node.

        Returns
        -------
        Future
            Done, with None, when that node holds all objects.

        Examples
        --------
        >>> futures = [c.submit(np.ones, n) for n in (1, 2)]
        >>> c.gather(futures).result()
        >>> [len(array) for array in c.get(futures)]
        [1, 2]
        """
        to = node_numbers(self._runtime, to, "to= of gather")
        return place_copies(self._runtime, as_refs(refs), "gather", to)

    def allgather(self, refs: Any, to: Any = None) -> Future[None]:
        """Places objects on several nodes.

        Parameters
        ----------
        refs : iterable of ObjectRef or Future
            The objects.
        to : Node, str, or a list of them, optional
            Default: all nodes.

        Returns
        -------
        Future
            Done, with None, when every living node in `to` holds all objects.

        Examples
        --------
        >>> c.allgather([c.put(1), c.put(2)]).result()
        """
        to = node_numbers(self._runtime, to)
        return place_copies(self._runtime, as_refs(refs), "allgather", to)

    def reduce_scatter(self, refs: Any, op: Any = "sum", to: Any = None) -> list[ObjectRef[Array]]:
        """Reduces arrays and cuts the result into slices, one for each ref.

        Parameters
        ----------
        refs : iterable of ObjectRef or Future
            Arrays of one shape and dtype.
        op : str or numpy.ufunc, optional
            As for `reduce`. Default: "sum".
        to : list of Node or str, optional
            Slice i is placed at to[i]; a single node receives all slices. Default: the nodes that
            hold the refs, in the order of `refs`.

        Returns
        -------
        list of ObjectRef
            The slices, cut like `np.array_split(total, len(refs), axis=0)`.

        Raises
        ------
        ValueError
            `to` and `refs` differ in length; otherwise as for `reduce`. From `get` of a slice:
            several hosts take part, and on one host, the number of refs times the number of slices
            exceeds 262 144 (more than 512 refs, if all are on that host).

        Examples
        --------
        >>> slices = c.reduce_scatter([c.put(np.arange(4)), c.put(np.arange(4))])
        >>> c.get(slices)
        [array([0, 2]), array([4, 6])]
        """
        found = as_refs(refs)
        if isinstance(to, (list, tuple)) and len(to) != len(found):
            raise ValueError(f"to= names {len(to)} nodes for {len(found)} slices")
        numbers = node_numbers(self._runtime, to)
        if len(numbers) == 1:
            numbers *= len(found)
        return _reduce(
            self._runtime,
            found,
            op,
            None,
            None,
            False,
            numbers,
            "reduce_scatter",
            len(found) or 1,
        )

    def alltoall(self, matrix: Any, to: Any) -> Future[None]:
        """Places the columns of a matrix of refs on different nodes.

        Parameters
        ----------
        matrix : iterable of iterables of ObjectRef or Future
            Rows of equal length.
        to : Node, str, or a list of them
            matrix[i][j] is placed at to[j]; a single node receives all objects.

        Returns
        -------
        Future
            Done, with None, when every object is on its node.

        Raises
        ------
        ValueError
            A row and `to` differ in length.

        Examples
        --------
        >>> rows = [[c.put(10 * i + j) for j in range(1)] for i in range(2)]
        >>> c.alltoall(rows, to=[c.here]).result()
        """
        rows = [as_refs(row) for row in matrix]
        if isinstance(to, (list, tuple)) and any(len(row) != len(to) for row in rows):
            raise ValueError(f"each row of the matrix needs {len(to)} refs, one per node in to=")
        if to is None:
            raise ValueError("alltoall needs to=: one node for each column of the matrix")
        numbers = node_numbers(self._runtime, to)
        refs = [ref for row in rows for ref in row]
        return place_copies(self._runtime, refs, "alltoall", numbers)


class GroupCalls:
    """The `Cluster` method that joins Groups."""

    _runtime: Runtime
    _options: Options

    def group(
        self,
        name: str,
        size: int,
        rank: int | None = None,
        *,
        strict: bool = False,
        timeout: float | None = None,
    ) -> Group:
        """Joins the Group `name`.

        Returns immediately. The first collective call waits until all members have joined. If a
        rank leaves or dies before all have joined, the Group waits for it to join again as long as
        the rank's task is running or will be retried. If the task ends without joining again, the
        first call by every other member raises PeerLostError.

        Parameters
        ----------
        name : str
            The same for all members.
        size : int
            The number of members, 1 to `Config.group_members_max`.
        rank : int, optional
            This member's rank, 0 to size - 1. Default: the lowest free rank.
        strict : bool, optional
            True: calls raise PeerLostError if a member is missing. Default: calls complete among
            the survivors.
        timeout : float, optional
            Maximum number of seconds for each call, and for the wait until all members have
            joined. After this time the rank leaves the Group. For a background call, the time
            starts at the end of the previous call. Default: no limit for calls, and
            `Config.group_wait_s` for the wait.

        Returns
        -------
        Group
            Close it with `close()` or `with`. Otherwise it is closed at the end of the task or
            actor call that created it. A Group created in an actor's constructor stays open as long
            as the actor runs.

        Raises
        ------
        ValueError
            Other members passed another size, the rank is taken, all ranks are taken, or an option
            of `options()` has no effect on a Group.
        PeerLostError
            This task was a member before its process died, and the Group has ended meanwhile. (If
            the task had left the Group before its process died, its first collective call raises
            this error instead.) Also raised if a peer from the same `spmd` call was a member, has
            left, and will not join again.

        Examples
        --------
        >>> with c.group("alone", size=1) as g:
        ...     print(g.rank, g.allgather("x"))
        0 ['x']
        """
        from hoplite_mp._group.group import join  # imported here: most programs join no Group

        refuse_unused(self._options, "group")
        member = join(self._runtime, name, size, rank, strict, timeout)
        member._cluster = self
        return member
