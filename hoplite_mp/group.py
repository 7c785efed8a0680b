"""Group: peers that call together, through a board in shared memory.

Why it exists: in synchronous training nobody should ask a manager at each step. A call is: publish
your part, and the lowest living rank (the leader) adds all parts up and commits by one store of the
call number; everybody reads the committed object. A death before the commit means that the next
leader begins the call again with the living; after it, that the result stands. So all survivors get
the same bits and the same contributors.
It must never know: other groups, who starts peers.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import threading
import time
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from hoplite_mp import _tasks, errors
from hoplite_mp.client.memory import FOREVER_NS, check_timeout
from hoplite_mp.collectives import operation_name
from hoplite_mp.contributions import (
    NOTHING,
    REDUCTIONS,
    contribution,
    contributors_of,
    into,
    is_plain_array,
    mask_of,
)
from hoplite_mp.errors import ClosedError, HopliteTimeoutError, PeerLostError
from hoplite_mp.leading import MISTAKE, Leading
from hoplite_mp.member import HostsMember, Interrupted
from hoplite_mp.protocol.group_calls import error_kind, error_of
from hoplite_mp.protocol.local import (
    GroupAdmit,
    GroupJoin,
    GroupLeave,
    GroupRefusal,
)
from hoplite_mp.ref import ObjectRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.client.runtime import Runtime

__all__ = ["Group", "join"]

P = ParamSpec("P")
R = TypeVar("R")
BLOCKED_AFTER_NS = 2_000_000
NAME_CHARS_MAX = 1024
PLACE_MAX = 1 << 31
MISTAKE_CHARS_MAX = 8000  # of the message of a mistake, which must find room on every host
Array = np.ndarray[Any, np.dtype[Any]]


class Retry(Exception):
    """A member died while the leader was reading: look at the board again."""


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


class Group:
    """One member of a Group; belongs to one thread at a time.

    Arrays in, writable arrays out. Reductions take arrays, numbers and bools, the same shape and
    dtype on every rank; the other calls carry any picklable object as itself, each rank its own.
    `out=`: a writable array of the result's shape and dtype that takes the result. Each call has an
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
        self._runtime = runtime
        self._memory = runtime.memory
        self._tasks = runtime.tasks
        board, self._generation, self.rank, hosts = (int(x) for x in place)
        self._board = _tasks.Board(runtime.tasks, board)
        self.name = name
        self.size = size
        self.strict = strict
        self._timeout = timeout
        self.calls = None
        self.contributors = ()
        self._part: Any = None  # what this member has published of an uncommitted call
        self._result: Any = None  # a committed result that this member led
        self._leading = Leading(runtime, name)
        self._hosts = HostsMember(runtime, self._generation, self.rank, size) if hosts else None
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._closed = False
        runtime.task_leaves.append(self.close)

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks that are members now."""
        mask = self._board.look()[1]
        return tuple(rank for rank in range(self.size) if mask >> rank & 1)

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

    def close(self) -> None:
        """Leaves the group; happens by itself at the end of the task."""
        if self._closed:
            return
        if self._thread is not None:
            self._thread.shutdown()
        self._closed = True
        leaves = self._runtime.task_leaves  # a new list: the old one may be on its way through
        self._runtime.task_leaves = [leave for leave in leaves if leave != self.close]
        if self._memory.client.usable:
            self._runtime.channel.call(GroupLeave(self.name, self._generation, self.rank))
        self._result = self._part = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        self.close()

    # -- one call ------------------------------------------------------------------------------

    def _call(self, kind: str, op: Any, root: int, x: Any, out: Array | None) -> Any:
        if not self._tasks.tracing:
            return self._make(kind, op, root, x, out)
        begun, failed = time.monotonic_ns(), True
        try:
            result = self._make(kind, op, root, x, out)
            failed = False
            return result
        finally:
            name = f"{kind} {self.name}".encode(errors="replace")
            self._tasks.note_group_call(name, (self.calls or 1) - 1, self.rank, begun, failed)

    def _make(self, kind: str, op: Any, root: int, x: Any, out: Array | None) -> Any:
        if self._closed:
            raise ClosedError(f"group {self.name!r}: this member has left")
        self._memory.check()
        call = self._begin()
        mistake: Exception | None = None
        try:
            part = self._part_of(kind, op, root, x)
        except Exception as error:  # everybody's: the others would wait for this rank for ever
            mistake = error
            part = self._mistake(error)
        mistake = self._publish(call, part) or mistake
        result = self._committed(call)
        if self._hosts is not None:
            self._hosts.finished()
        self._result, led = result if self._leads else None, self._result
        self.calls = call + 1
        self._part = None
        del led  # everybody has finished the call before this one
        if mistake is None:
            return self._take(kind, root, result, out)
        try:
            self._take("barrier", root, result, None)
        except Exception as error:  # in the same words on every rank
            raise error from mistake
        raise mistake

    def _mistake(self, error: Exception) -> tuple[str, str, int, Any]:
        return MISTAKE, _words(f"rank {self.rank}: {error}"), 0, error_kind(error)

    def _publish(self, call: int, part: tuple[str, str, int, Any]) -> Exception | None:
        """Hands the part over; returns what prevented it, which the others then know, too."""
        try:
            if self._hosts is not None:
                try:
                    self._part = self._hosts.give(call, part)
                except Interrupted as interrupted:  # this rank's alone: the others have its part
                    cause = interrupted.__cause__
                    assert cause is not None
                    if not isinstance(cause, Exception):
                        raise cause from None
                    return cause
                return None
            self._part = self._memory.put(self._stored(part))  # held until the commit
        except Exception as error:
            wrong = self._mistake(error)
            if self._hosts is not None:
                self._hosts.give(call, wrong)
                return error
            self._part = self._memory.put_text(wrong, 1)
            self._board.publish(self.rank, call, self._memory.local_id(self._part))
            return error
        self._board.publish(self.rank, call, self._memory.local_id(self._part))
        return None

    def _stored(self, part: tuple[str, str, int, Any]) -> tuple[str, str, int, Any]:
        """With a ref in the place of each value that only pickle describes: the leader reads all
        parts, but unpickles only what is its own."""
        kind, op, root, values = part
        if kind == MISTAKE:
            return part
        put = self._memory.put
        return kind, op, root, [v if is_plain_array(v) else put(v) for v in values]

    def _read(self, value: Any, out: Array | None = None) -> Any:
        """One value as the caller's own: of a part that `_stored` has made."""
        if type(value) is ObjectRef:
            value = self._memory.read(self._memory.local_id(value), FOREVER_NS, True)
            return value if out is None else into(value, out)
        return into(value, out)

    def _part_of(self, kind: str, op: Any, root: int, x: Any) -> tuple[str, str, int, Any]:
        """What this rank contributes; raises for what is wrong with it."""
        if not 0 <= root < self.size:
            raise ValueError(f"root={root}: it must be from 0 to {self.size - 1}")
        name = operation_name(op) if kind in REDUCTIONS else ""
        gives = kind != "broadcast" or self.rank == root
        return kind, name, root, contribution(kind, x, self.size, gives=gives)

    def _begin(self) -> int:
        """The number of the next call; the first one waits for all, or for being let in."""
        if self.calls is not None:
            return self.calls
        wait_s = self._timeout
        if wait_s is None:
            wait_s = self._runtime.config.group_wait_s

        def admitted() -> int:
            return int(self._board.member(self.rank)[1])

        self._wait(admitted, time.monotonic_ns() + int(wait_s * 1e9), self._not_full)
        self.calls = admitted() - 1
        return self.calls

    def _not_full(self) -> str:
        _, alive, joining, *_ = self._board.look()
        came = (alive | joining).bit_count()
        refusal = self._runtime.channel.call(GroupRefusal(self.name)).value
        why = f"; one was refused: {refusal}" if refusal else ""
        return f"{came} of {self.size} members came{why}"

    def _committed(self, call: int) -> Any:
        """Waits for the commit of `call`, leading it when this is the lowest living rank."""
        self._leads = False
        deadline = FOREVER_NS
        if self._timeout is not None:
            deadline = time.monotonic_ns() + int(self._timeout * 1e9)
        found: list[Any] = []

        def look() -> bool:
            _, alive, joining, epoch, result_call, result_id = self._board.look()
            if result_call > call:
                ref = self._memory.make_ref(self._memory.public_id(result_id))
                found.append(ref)
                return True
            if self._hosts is not None:
                return False  # the leading node decides
            ranks = self._participants(alive | joining, call)
            missing = self._board.missing(alive | joining, call)
            if epoch & 1 or self._board.look()[3] != epoch:
                return False  # the node is changing the membership, and wakes us when it has
            if ranks and ranks[0] == self.rank and not missing:
                try:
                    found.append(self._lead(call, ranks, joining))
                except Retry:
                    return False
                return True
            return False

        self._wait(look, deadline, lambda: self._late(call))
        return found[0]

    def _late(self, call: int) -> str:
        _, alive, joining, *_ = self._board.look()
        if self._hosts is not None:
            return f"call {call} is not decided yet: a member has not made it, or its host is slow"
        missing = self._board.missing(alive | joining, call)
        ranks = [rank for rank in range(self.size) if missing >> rank & 1]
        return f"call {call} still misses ranks {ranks}"

    def _participants(self, mask: int, call: int) -> list[int]:
        return [
            rank
            for rank in range(self.size)
            if mask >> rank & 1 and 0 < self._board.member(rank)[1] <= call + 1
        ]

    def _wait(self, condition: Callable[[], Any], deadline: int, why: Callable[[], str]) -> None:
        """Until the condition holds; a worker that waits long counts as blocked."""
        blocked = False
        in_worker = self._runtime.submitter.waiting.run_in_place is not None
        blocked_at = time.monotonic_ns() + BLOCKED_AFTER_NS
        try:
            while True:
                seen = self._tasks.event()
                if condition():
                    return
                self._memory.check()
                now = time.monotonic_ns()
                if now >= deadline:
                    raise HopliteTimeoutError(f"group {self.name!r}: {why()}")
                if in_worker and not blocked and now >= blocked_at:
                    blocked = True
                    self._runtime.submitter.waiting.count_blocked(1)
                until = min(deadline, blocked_at) if in_worker and not blocked else deadline
                if self._tasks.wait_event(seen, until, True) == _tasks.CLOSING:
                    self._memory.check_lost()
                    raise errors.NodeLostError("the node of this host has ended")
        finally:
            if blocked:
                self._runtime.submitter.waiting.count_blocked(-1)

    # -- leading -------------------------------------------------------------------------------

    def _lead(self, call: int, ranks: list[int], joining: int) -> ObjectRef[Any]:
        """Reads all parts, decides, commits. Nothing is visible before the commit."""
        self._leads = True
        parts: dict[int, Any] = {}
        refs: dict[int, ObjectRef[Any]] = {}
        for rank in ranks:
            oid = self._board.member(rank)[2]
            ref = self._memory.make_ref(self._memory.public_id(oid))
            if ref._hold is None:
                raise Retry  # that member has just died: its mask bit will go
            refs[rank] = ref
        try:
            for rank, ref in refs.items():
                parts[rank] = self._memory.read(self._memory.local_id(ref), FOREVER_NS, False)
            data = self._leading.combine(parts, refs)
            committed = self._memory.put((mask_of(ranks), "", "", data))
        except Exception as error:  # whatever it is, it is everybody's: nobody may wait for ever
            failed = mask_of(ranks), error_kind(error), _words(str(error)), None
            committed = self._memory.put_text(failed, 2)
        self._board.commit(call, self._memory.local_id(committed))
        for rank in range(self.size):
            if joining >> rank & 1:  # its first call is fixed, so from here on it is one of us
                self._runtime.channel.tell(GroupAdmit(self.name, self._generation, rank))
        return committed

    # -- reading the commit --------------------------------------------------------------------

    def _take(self, kind: str, root: int, result: ObjectRef[Any], out: Array | None) -> Any:
        read = self._memory.read
        local = self._memory.local_id
        mask, failed, text, data = read(local(result), FOREVER_NS, False)
        self.contributors = contributors_of(mask)
        if failed:
            raise error_of(failed, text)
        if self.strict and len(self.contributors) < self.size:
            lost = sorted(set(range(self.size)) - set(self.contributors))
            raise PeerLostError(f"group {self.name!r}: ranks {lost} are lost")
        if kind == "barrier":
            return None
        if kind in ("reduce", "gather") and self.rank != root:
            return None
        if self._hosts is not None:
            return self._hosts.take(kind, root, data, out)
        if kind in ("allreduce", "reduce"):
            return into(read(local(data), FOREVER_NS, False), out)
        if kind == "reduce_scatter":
            total = read(local(data), FOREVER_NS, False)
            return into(np.array_split(total, self.size)[self.rank], out)
        if kind == "broadcast":
            return self._read(read(local(data), FOREVER_NS, False)[3][0], out)
        gathered: list[Any] = [None] * self.size
        for rank, ref in data.items():
            values = read(local(ref), FOREVER_NS, False)[3]
            gathered[rank] = self._read(values[self.rank if kind == "alltoall" else 0])
        return gathered


def _words(text: str) -> str:
    """Of an error, for messages: not too long, and without halves of surrogate pairs."""
    return text[:MISTAKE_CHARS_MAX].encode(errors="replace").decode()


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
