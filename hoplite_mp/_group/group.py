"""Group: peers that make collective calls and send each other messages.

This module joins, leaves and splits Groups. `collectives` and `messages` define the methods for
calls and messages, `call_protocol` makes the calls, and `member_lifecycle` keeps the membership.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import errors
from hoplite_mp._client.calls import current_call
from hoplite_mp._client.memory import whole
from hoplite_mp._client.option_checks import check_name
from hoplite_mp._common import clock
from hoplite_mp._common.clock import check_timeout
from hoplite_mp._group.call_protocol import CallProtocol, peers_of, split_name
from hoplite_mp._group.collectives import GroupCollectives
from hoplite_mp._group.member_lifecycle import GroupMembership
from hoplite_mp._group.messages import GroupMessages, MemberMessages
from hoplite_mp._protocol.local import GroupJoin, GroupLeave
from hoplite_mp.errors import PeerLostError

if TYPE_CHECKING:
    from hoplite_mp._client.runtime import Runtime

__all__ = ["Group", "join"]

Array = np.ndarray[Any, np.dtype[Any]]

PLACE_MAX = 1 << 31
# Length of a Group's name in the name of its round Group (a second Group that bounded allreduces
# use).
ROUNDS_NAME_CHARS = 100
# Interval between two checks of whether another thread has finished leaving. Polling is used,
# because Ctrl-C may interrupt both threads at any step, and could leave an event unset.
LEAVING_POLL_S = 0.0005


class Group(GroupCollectives, GroupMessages):
    """One member of a Group, created by `Cluster.group`.

    Only one thread at a time may use a Group. Calls are matched by their order, so every member
    must make the same calls. Arrays in results are writable. Reductions accept arrays, numbers and
    bools with the same shape and dtype on every rank, or any values if `op` is a function. Other
    calls accept any picklable object, which may differ between ranks. Each call has an
    ``..._async`` form that returns an awaitable Future.

    A call completes when all living ranks have made it. They all get the same result and the same
    `contributors`.

    Raises
    ------
    ValueError
        On every rank: the ranks' calls differ in their kinds, ops, roots, shapes or dtypes. On one
        rank: its `out` does not fit. That rank then loses the result, but its next call works.
    TypeError
        On every rank: a value cannot be reduced or pickled.
    StoreFullError
        On every rank: the store of one rank is full.
    PeerLostError
        The root is dead or, with `strict=True`, any rank is dead. In the first call, even without
        `strict`: a rank left or died before all ranks had joined, and its task has ended.
    HopliteTimeoutError
        The call took longer than `timeout` seconds, or some ranks did not join within `timeout` or,
        by default, `Config.group_wait_s`. This rank has left the Group.
    ClosedError
        This rank has left the Group.

    Notes
    -----
    If a collective call raises HopliteTimeoutError, or an exception that is not listed above
    (KeyboardInterrupt, or another exception raised by a signal handler), this rank's membership
    ends, even if the call had been decided. The rank's contribution is in the results of all other
    ranks, or of none. The other ranks continue as after a death; with `strict=True` they raise
    PeerLostError. `Cluster.group` with the same name and rank joins again. Before the exception is
    raised, the call waits for the readers of its arrays, so afterwards no other rank reads them.
    `send`, `recv`, `sendrecv` and `probe` never end the membership.

    Examples
    --------
    >>> def train(rank):
    ...     g = hoplite_mp.current().group("run-1", size=2, rank=rank)
    ...     weights = np.zeros(2)
    ...     for step in range(3):
    ...         weights -= 0.5 * g.allreduce(weights - rank, op="mean")
    ...     return weights
    >>> c.spmd(train, 2)[0].result()
    array([0.4375, 0.4375])
    >>> with c.group("background", size=1) as g:
    ...     g.allgather_async("x").result()
    ['x']
    """

    __module__ = "hoplite_mp"  # as users import it

    rank: int
    """This member's number, at least 0. It never changes."""
    size: int
    """The number of ranks, living or dead. It never changes."""
    _cluster: Any = None  # kept alive by this Group

    def __init__(
        self, runtime: Runtime, name: str, size: int, place: Any, strict: bool, timeout: Any
    ) -> None:
        member = GroupMembership(runtime, name, size, place, timeout)
        self.name, self.rank, self.size = name, member.rank, size
        self._messages = MemberMessages(member)
        self._join(member, CallProtocol(member, strict), self._messages)
        self._runtime = runtime
        self._left = False
        self._leave_sent: list[int] = []  # not empty after GroupLeave was sent to the node
        self._leaving_in = 0  # the id of the thread that is leaving now, or 0
        member.leave_of_group = weakref.WeakMethod(self._leave)
        runtime.task_leaves.append(self._leave)

    @property
    def strict(self) -> bool:
        """Whether calls raise PeerLostError if a member is missing.

        Examples
        --------
        >>> with c.group("not strict", size=1) as g:
        ...     print(g.strict)
        False
        """
        return self._calls.strict

    @property
    def calls(self) -> int | None:
        """The number of the next call; None until the first call begins.

        A rank that has joined again starts at the number of the other ranks' next call.

        Examples
        --------
        >>> with c.group("two calls", size=1) as g:
        ...     g.barrier()
        ...     g.barrier()
        ...     print(g.calls)
        2
        """
        return self._member.calls

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks whose contributions are in the result of the last finished call, sorted.

        They are the same on every rank that has finished this call.

        Examples
        --------
        >>> with c.group("contributors", size=1) as g:
        ...     g.barrier()
        ...     print(g.contributors)
        (0,)
        """
        return self._calls.contributors

    @property
    def alive(self) -> tuple[int, ...]:
        """The ranks of the current members, sorted.

        Returns
        -------
        tuple of int
            The value may change at any time, unlike `contributors`, which belongs to the last
            finished call.

        Examples
        --------
        >>> with c.group("living", size=1) as g:
        ...     g.barrier()
        ...     print(g.alive)
        (0,)
        """
        mask = self._member.board.look()[1]
        return tuple(rank for rank in range(self.size) if mask >> rank & 1)

    def split(self, color: int | None, key: int = 0) -> Group | None:
        """Creates one Group for all ranks with the same color.

        Every living rank makes this call. The new Group inherits `strict` and `timeout`, is
        independent of this Group, and is closed like any other. A member that dies before it has
        joined the new Group is a dead rank there.

        Parameters
        ----------
        color : int or None
            Ranks with the same color form one Group. None: this rank joins no Group.
        key : int, optional
            The new ranks are ordered by key, then by rank in this Group. Default: 0.

        Returns
        -------
        Group or None
            None if `color` is None.

        Raises
        ------
        TypeError
            `color` or `key` is not an integer.

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("split", 2, rank)
        ...     mine = g.split(color=0, key=-rank)
        ...     return mine.rank, mine.allgather(rank)
        >>> c.get(c.spmd(peer, 2))
        [(1, [1, 0]), (0, [1, 0])]
        """
        return self._here(self._split, color, key)  # type: ignore[no-any-return]

    def _split(self, color: Any, key: Any) -> Group | None:
        given = self._calls.call("split", "", 0, (color, key, self._member.identity), None)
        if color is None:
            return None
        assert self._member.calls is not None
        peers = peers_of(given, color)
        name = split_name(self.name, self._member.generation, self._member.calls - 1, color, peers)
        try:
            return self._of_peers(name, peers)
        except BaseException as error:
            self._calls.end_after(error)
            raise

    @property
    def _rounds_name(self) -> str:
        return f"{self.name[:ROUNDS_NAME_CHARS]}/{self._member.generation}/rounds"

    def _make_rounds(self) -> Group:
        """Joins the round Group for bounded allreduces, which has the same ranks. The round Group
        waits only for current members of this Group."""
        ask = GroupJoin(
            self._rounds_name, self.size, self.rank, self._member.generation, call=_own_call()
        )
        return _member(self._runtime, ask, False, None)

    def _of_peers(self, name: str, peers: list[tuple[int, Any]]) -> Group:
        """Joins a split Group. peers: (rank, identity) in the order of the new ranks; equal on all
        ranks. The new Group does not wait for a member that leaves this Group before joining the
        new one."""
        ranks = [rank for rank, _ in peers]
        ask = GroupJoin(
            name,
            len(peers),
            ranks.index(self.rank),
            self._member.generation,
            [(rank, *identity) for rank, identity in peers],
            _own_call(),
        )
        made = _member(self._runtime, ask, self.strict, self._member.timeout)
        made._cluster = self._cluster
        return made

    def empty(self, shape: Any, dtype: Any = float, order: str = "C") -> Array:
        """A writable, uninitialised array in the store that reductions need not copy.

        Reductions read such an array in place. If it is used as `out`, its pages are already in
        memory. The same is true of arrays from `Cluster.empty` and large results of earlier calls.
        Every call reads arrays from `Cluster.get` in place. Slices of these arrays, and arrays
        outside the store, are copied. As with `Cluster.empty`, `put` makes the array read-only, so
        it can no longer be used as `out`.

        Parameters
        ----------
        shape : int or tuple of int
            As for `numpy.empty`.
        dtype : dtype, optional
            As for `numpy.empty`, but not `object`. Default: float64.
        order : {"C", "F"}, optional
            Row-major or column-major. Default: "C".

        Returns
        -------
        numpy.ndarray
            An array with this shape and dtype. Its memory outlives the Group, and is freed with the
            last view.

        Raises
        ------
        StoreFullError
            There was no space for `Config.put_wait_s` seconds.

        Notes
        -----
        Do not change the arrays of a call until the call has returned, or the Future of its
        ``..._async`` form is done. If the program changes an array earlier, each changed byte may
        or may not be in the result. Between hosts, the call may fail, because a block that changes
        while it is sent does not match its checksum. Other calls are not affected. When the call
        has returned or raised an exception, no other rank reads the array any more.

        Examples
        --------
        >>> with c.group("in place", size=1) as g:
        ...     x = g.empty(4, np.float32)
        ...     x[:] = 2
        ...     y = g.allreduce(x, out=x)
        >>> y is x, x
        (True, array([2., 2., 2., 2.], dtype=float32))
        """
        self._runtime.memory.check()
        return self._member.memory.empty(shape, dtype, order)

    def close(self) -> None:
        """Leaves the Group. This happens automatically at the end of the task.

        When all members have left, the name is free.

        Examples
        --------
        >>> g = c.group("closed", size=1)
        >>> g.close()
        >>> g.barrier()
        Traceback (most recent call last):
            ...
        hoplite_mp.ClosedError: group 'closed': ...
        """
        self._leave(False)

    def _leave(self, failed: bool, with_task: bool = False, why: str = "") -> None:
        """Leaves the Group after its background calls have finished. failed: whether the task has
        raised an exception, or a call has ended the membership. Background calls are then
        abandoned, because they and the other ranks may be waiting for each other. with_task:
        whether the task has ended. why: the reason, for the errors of later calls."""
        if self._left:
            return
        try:
            self._leaving_in = threading.get_ident()
            self._member.ended_with_task = with_task
            if failed:
                self._member.gave_up, self._member.closed = self._member.gave_up or why, True
                self._wake_all()
            if self._background is not None:
                # A done-callback cannot wait, because it runs in the background thread.
                self._background.end(wait=not self._background.is_here())
            if not self._left:  # otherwise a background call has ended the membership meanwhile
                self._depart(failed)
        finally:
            self._leaving_in = 0

    def _depart(self, failed: bool) -> None:
        """Leaves the Group. Ctrl-C may have interrupted an earlier attempt at any step, so every
        step can be repeated, except for the message to the node: a second message would end a later
        membership."""
        self._member.closed = True
        if self._bounded is not None:
            self._bounded.end()
            for leave in list(self._runtime.task_leaves):  # Ctrl-C may have interrupted its join
                if (leave.__self__.name, leave.__self__.rank) == (self._rounds_name, self.rank):
                    leave(True)
        self._messages.end()
        self._calls.leave_board()
        lost: errors.NodeLostError | None = None
        if self._member.memory.client.usable:
            try:
                self._tell_node()
            except errors.NodeLostError as error:
                lost = error
        self._calls.drop()
        self._calls.return_arrays()
        leaves = self._runtime.task_leaves  # copied, because a loop may use the old list
        self._runtime.task_leaves = [leave for leave in leaves if leave != self._leave]
        self._left = True
        if lost is not None and not failed:
            raise lost  # otherwise the exception of the `with` block or the task propagates

    def _tell_node(self) -> None:
        """Informs the node that this rank is leaving. Waits until the node has registered this, and
        has taken holds on the rank's objects that other ranks are still reading."""
        if self._leave_sent:  # the unread reply precedes the reply to this request
            self._member.why_not()
            return
        leave = GroupLeave(self.name, self._member.generation, self.rank, self._member.calls or 0)
        self._runtime.channel.call(leave, sent=self._leave_sent)

    def _finish_leaving(self, name: str) -> None:
        """Completes an interrupted attempt to leave, so that this rank becomes free. `name`: the
        Group to be joined. If another thread is leaving a Group with this name, waits for that
        thread."""
        if self._background is not None and self._background.is_here():
            return  # the other thread is waiting for this callback
        while self._leaving_in not in (0, threading.get_ident()):
            if self.name != name:
                return
            clock.sleep(LEAVING_POLL_S)
        if self._member.closed:
            self._leave(True)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        self._leave(kind is not None)


def join(
    runtime: Runtime, name: str, size: int, rank: int | None, strict: bool, timeout: float | None
) -> Group:
    """Joins a Group. Raises ValueError if an argument is wrong, the rank is taken, or the Group is
    full."""
    runtime.memory.check()
    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r}: a group needs a name")
    check_name(name, "a group")
    for what, value in (("size", size), ("rank", rank)):
        optional = value is None and what == "rank"
        if whole(value) is None and not optional:
            raise TypeError(f"{what}={value!r}: it must be an integer")
        if value is not None and abs(int(value)) > PLACE_MAX:
            raise ValueError(f"{what}={value!r}: no group can be that large")
    if not isinstance(strict, bool):
        raise TypeError(f"strict={strict!r}: it must be True or False")
    check_timeout(timeout)
    for leave in list(runtime.task_leaves):  # Ctrl-C may have interrupted an attempt to leave
        leave.__self__._finish_leaving(name)
    ask = GroupJoin(name, int(size), None if rank is None else int(rank), call=_own_call())
    try:
        return _member(runtime, ask, strict, timeout)
    except ValueError as error:
        own = [leave.__self__ for leave in runtime.task_leaves]
        if any((one.name, one.rank) == (name, rank) for one in own):
            raise ValueError(f"{error}, which is this program: close() that Group first") from None
        raise


def _member(runtime: Runtime, ask: GroupJoin, strict: bool, timeout: float | None) -> Group:
    """Joins a Group. If an exception interrupts this function, the rank is free afterwards, and no
    other rank waits for it."""
    places: list[Any] = []

    def take(place: Any, number: int, seen: list[int]) -> Any:
        # First, because the node frees the rank only if the reply was not read.
        places.append(place)
        seen[0] = number
        return place

    try:
        place = runtime.channel.call(ask, take)
        if isinstance(place, str):
            raise PeerLostError(place)
        return Group(runtime, ask.name, ask.size, place, strict, timeout)
    except BaseException:
        for place in places:
            if not isinstance(place, str):
                _give_back(runtime, ask.name, place[1], place[2])
        raise


def _give_back(runtime: Runtime, name: str, generation: int, rank: int) -> None:
    """Leaves a Group just after joining it, perhaps before a Group object exists."""
    for leave in list(runtime.task_leaves):
        member = leave.__self__
        if (member._member.generation, member.rank) == (generation, rank):
            member._leave(True)
            return
    runtime.channel.call(GroupLeave(name, generation, rank))


def _own_call() -> int:
    """The id of the running task if this process runs several tasks; otherwise 0."""
    call = current_call.get()
    return 0 if call is None else call.oid
