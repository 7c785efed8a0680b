"""One call of a Group, from what this member gives to what it takes: the same for every kind.

Why it exists: `Group` is what a user sees of the calls; this is how one is made. A call is: publish
the part, and the lowest living rank (the leader) adds all parts up and commits by one store of the
call number; everybody reads the committed object. A death before the commit means that the next
leader begins the call again with the living; after it, that the result stands. So all survivors get
the same bits and the same contributors.
It must never know: other groups, who starts peers, messages from one member to another.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _tasks, errors
from hoplite_mp.client.memory import FOREVER_NS
from hoplite_mp.collectives import operation_name
from hoplite_mp.contributions import (
    PREFIXES,
    REDUCTIONS,
    TARGETED,
    contribution,
    contributors_of,
    into,
    is_plain_array,
    mask_of,
    outs_of,
)
from hoplite_mp.errors import ClosedError, HopliteTimeoutError, PeerLostError
from hoplite_mp.leading import MISTAKE, Leading
from hoplite_mp.member import HostsMember, Interrupted
from hoplite_mp.protocol.group_calls import error_kind, error_of
from hoplite_mp.protocol.local import GroupAdmit, GroupRefusal
from hoplite_mp.reduction import prefix
from hoplite_mp.ref import ObjectRef
from hoplite_mp.splitting import check_split

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.client.runtime import Runtime

__all__ = ["Calling"]

BLOCKED_AFTER_NS = 2_000_000
MISTAKE_CHARS_MAX = 8000  # of the message of a mistake, which must find room on every host
Array = np.ndarray[Any, np.dtype[Any]]


class Retry(Exception):
    """A member died while the leader was reading: look at the board again."""


class Calling:
    """What a Group is made of below its calls. `place`: what the node has answered to GroupJoin."""

    rank: int
    size: int
    calls: int | None
    contributors: tuple[int, ...]

    def __init__(
        self, runtime: Runtime, name: str, size: int, place: Any, strict: bool, timeout: Any
    ) -> None:
        self._runtime = runtime
        self._memory = runtime.memory
        self._tasks = runtime.tasks
        board, self._generation, self.rank, hosts, self._identity = place
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
        self._closed = False

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks that are members now, sorted.

        Returns
        -------
        tuple of int
            It may change at any time; `contributors` are those of the last finished call.

        Examples
        --------
        >>> with c.group("living", size=1) as g:
        ...     g.barrier()
        ...     print(g.alive)
        (0,)
        """
        mask = self._board.look()[1]
        return tuple(rank for rank in range(self.size) if mask >> rank & 1)

    # -- one call ------------------------------------------------------------------------------

    def _call(self, kind: str, op: Any, root: int, x: Any, out: Any) -> Any:
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

    def _make(self, kind: str, op: Any, root: int, x: Any, out: Any) -> Any:
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
        self.calls = call + 1
        self._part = None
        if not self._leads:
            self._result = None  # everybody has finished the call before this one
        if mistake is None:
            return self._take(kind, part[1], root, result, out)
        try:
            self._take("barrier", "", root, result, None)
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
        if kind == "split":
            check_split(*x[:2])
        name = operation_name(op) if kind in REDUCTIONS or kind in PREFIXES else ""
        gives = kind not in ("broadcast", "scatter") or self.rank == root
        return kind, name, root, contribution(kind, x, self.size, gives=gives)

    def _begin(self, timeout: float | None = None) -> int:
        """The number of the next call; the first one waits for all, or for being let in."""
        if self.calls is not None:
            return self.calls
        wait_ns = self._whole_ns() if timeout is None else int(timeout * 1e9)
        limit = self._whole_limit() if timeout is None else f"timeout={timeout:.3g} s"
        until = time.monotonic_ns() + wait_ns
        self._wait(self._admitted, until, lambda: self._not_full(limit))
        if self.calls is None:  # else another thread has made the first call meanwhile
            self.calls = self._admitted() - 1
        return self.calls

    def _admitted(self) -> int:
        """The first call of this member + 1; 0: the group is not whole, or has not let it in.
        PeerLostError: this member is none any more: it has come back and nobody else will, or its
        host was given up."""
        _, start, _, client = self._board.member(self.rank)
        if client != self._identity[1] or self._board.generation() != self._generation:
            _, why = self._why_not()
            raise PeerLostError(why or f"group {self.name!r} has ended")
        return int(start)

    def _why_not(self) -> tuple[bool, str]:
        """Is this member none any more, and why; or else why another one was refused."""
        ask = GroupRefusal(self.name, self._generation, self.rank)
        over, why = self._runtime.channel.call(ask).value
        return over, why

    def _whole_ns(self) -> int:
        """How long a group may take to be whole."""
        wait_s = self._runtime.config.group_wait_s if self._timeout is None else self._timeout
        return int(wait_s * 1e9)

    def _whole_limit(self) -> str:
        """As errors name it."""
        if self._timeout is None:
            return f"group_wait_s={self._runtime.config.group_wait_s:g} s"
        return f"timeout={self._timeout:g} s"

    def _not_full(self, limit: str) -> str:
        _, alive, joining, *_ = self._board.look()
        here = alive | joining
        absent = [str(rank) for rank in range(self.size) if not here >> rank & 1]
        who = f"rank{'s' * (len(absent) > 1)} {', '.join(absent)}"
        over, refusal = self._why_not()
        if over:
            raise PeerLostError(refusal)
        why = f"; one was refused: {refusal}" if refusal else ""
        if not absent:  # they wait for a leader's word
            return f"all {self.size} members came, but were not let in within {limit}{why}"
        return (
            f"{here.bit_count()} of {self.size} members came within {limit}; missing: {who}, which "
            f"never came or left again{why}"
        )

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
                self._admitted()  # raises if this member was given up
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

    def _wait(
        self,
        condition: Callable[[], Any],
        deadline: int,
        why: Callable[[], str],
        counts: bool = True,
    ) -> None:
        """Until the condition holds; a worker that waits long counts as blocked, unless the task
        goes on in another thread (`counts` False)."""
        blocked = False
        in_worker = counts and self._runtime.submitter.waiting.run_in_place is not None
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
        # Held from before the commit on: the others read it also if this one is interrupted then.
        self._result, led = committed, self._result
        self._board.commit(call, self._memory.local_id(committed))
        del led  # everybody has finished the call before this one
        for rank in range(self.size):
            if joining >> rank & 1:  # its first call is fixed, so from here on it is one of us
                self._runtime.channel.tell(GroupAdmit(self.name, self._generation, rank))
        return committed

    # -- reading the commit --------------------------------------------------------------------

    def _take(self, kind: str, op: str, root: int, result: ObjectRef[Any], out: Any) -> Any:
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
            return self._hosts.take(kind, op, root, data, out)
        if kind in ("allreduce", "reduce"):
            return into(read(local(data), FOREVER_NS, False), out)
        if kind == "reduce_scatter":
            total = read(local(data), FOREVER_NS, False)
            return into(np.array_split(total, self.size)[self.rank], out)
        if kind in ("broadcast", "scatter"):
            values = read(local(data), FOREVER_NS, False)[3]
            return self._read(values[self.rank if kind == "scatter" else 0], out)
        if kind in PREFIXES:
            below = [rank for rank in sorted(data) if rank < self.rank + (kind == "scan")]
            arrays = [read(local(data[rank]), FOREVER_NS, False)[3][0] for rank in below]
            return self._folded(op, arrays, out)
        outs = outs_of(kind, out, self.size)
        gathered: list[Any] = [None] * self.size
        for rank, ref in data.items():
            values = read(local(ref), FOREVER_NS, False)[3]
            gathered[rank] = self._read(values[self.rank if kind in TARGETED else 0], outs[rank])
        return gathered

    def _folded(self, op: str, arrays: list[Array], out: Array | None) -> Array | None:
        """This rank's result of a scan; None where no rank comes before it."""
        if not arrays:
            return None
        threads = self._runtime.config.reduce_threads or self._runtime.tasks.cores
        total = prefix(op, arrays, threads)
        return total if out is None else into(total, out)


def _words(text: str) -> str:
    """Of an error, for messages: not too long, and without halves of surrogate pairs."""
    return text[:MISTAKE_CHARS_MAX].encode(errors="replace").decode()
