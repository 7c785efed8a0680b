"""The protocol of a Group's calls, from this member's contribution to its result.

`Group` has the public methods; this module makes the calls. Each member publishes its contribution.
The lowest living rank, the leader, combines all contributions, and commits the call by writing its
number in a single step. Then all members read the committed object. If a member dies before the
commit, the lowest living rank begins the call again with the living ranks. If a member dies after
the commit, the result remains valid. So all survivors get the same bits and the same contributors.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _serialize
from hoplite_mp._client.in_place import InPlace, own_copy
from hoplite_mp._client.memory import whole
from hoplite_mp._common import clock
from hoplite_mp._common.clock import FOREVER_NS, deadline_ns
from hoplite_mp._common.reduction import operation_name, prefix
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._common.signals import is_interruption
from hoplite_mp._group.multi_host import MultiHost
from hoplite_mp._group.single_host import INVALID_CALL, Combiner, SingleHost, mistake_words
from hoplite_mp._protocol.group_calls import error_kind, error_of
from hoplite_mp._protocol.local import GroupAdmit
from hoplite_mp._serialize.contributions import (
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
from hoplite_mp.errors import (
    HopliteError,
    HopliteTimeoutError,
    PeerLostError,
    ReduceError,
    StoreFullError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hoplite_mp._group.member_lifecycle import GroupMembership

__all__ = ["CallProtocol", "check_split", "peers_of", "split_name"]


Array = np.ndarray[Any, np.dtype[Any]]
# The documented errors of calls. Any other exception ends this rank's membership.
DOCUMENTED = (ValueError, TypeError, StoreFullError, ReduceError, PeerLostError)
REJOIN = "To continue, join it again with the same name and rank"
# Interval between two checks of whether other ranks are still reading this rank's arrays. Polling
# is necessary, because a reader wakes no other process when it releases an array, and a reader's
# death is visible only in the array's pins.
LENT_POLL_S = 0.0005


class Retry(Exception):
    """The board has changed while the leader was reading it, so the leader has to read it again."""


class CallProtocol:
    """The collective calls of one member, below the methods that users call."""

    contributors: tuple[int, ...]

    def __init__(self, member: GroupMembership, strict: bool) -> None:
        self._member = member
        self._runtime, self._memory, self._tasks = member.runtime, member.memory, member.tasks
        self._board, self._generation = member.board, member.generation
        self.name, self.rank, self.size = member.name, member.rank, member.size
        self._identity = member.identity
        self.strict = strict
        self.contributors = ()
        self._last_mask = 0
        self._part: Any = None  # keeps this member's published contribution alive until the commit
        self._result: Any = None  # keeps alive the result of the last call led by this member
        self._lends = True  # whether this rank's arrays may be read in place
        self._gets = True  # whether this rank gets new arrays, because the call has no `out`
        self.is_open = False  # whether a call is in progress for this rank
        self._led = -1  # the latest call that this member has committed as an object
        runtime, rank = member.runtime, member.rank
        self._leading = Combiner(runtime, member.name)
        self._single_host = SingleHost(runtime, self._board, self._generation, rank, member.size)
        # This rank's arrays that other ranks are reading in place.
        self._in_place = InPlace(self._memory)
        self._hosts: MultiHost | None = None
        if member.has_hosts:
            self._hosts = MultiHost(
                runtime, member.board_number, self._generation, rank, member.size, self._in_place
            )

    # -- one call ------------------------------------------------------------------------------

    def call(self, kind: str, op: Any, root: int, x: Any, out: Any) -> Any:
        if self._member.closed:
            self._member.check()
        self._memory.check()
        self.is_open = True
        try:
            if self._tasks.tracing:
                return self._traced(kind, op, root, x, out)
            return self._make(kind, op, root, x, out)
        except BaseException as error:
            self.end_after(error)
            raise

    def _traced(self, kind: str, op: Any, root: int, x: Any, out: Any) -> Any:
        begun, failed = clock.monotonic_ns(), True
        try:
            result = self._make(kind, op, root, x, out)
            failed = False
            return result
        finally:
            name = f"{kind} {self.name}".encode(errors="replace")
            self._tasks.note_group_call(
                name, (self._member.calls or 1) - 1, self.rank, begun, failed, _bytes_of(x)
            )

    def end_after(self, error: BaseException) -> None:
        """Ends the membership after a call was interrupted or timed out. The membership continues
        after PeerLostError, and after other documented errors if the call is over for this rank."""
        if isinstance(error, PeerLostError) or (not self.is_open and isinstance(error, DOCUMENTED)):
            return
        late = isinstance(error, HopliteTimeoutError)
        what = "timed out" if late else f"ended by {type(error).__name__}"
        self._member.timed_out = str(error) if late else ""
        self._member.leave(f", because a call {what}. {REJOIN}")

    def _make(self, kind: str, op: Any, root: int, x: Any, out: Any) -> Any:
        deadline = FOREVER_NS if self._member.timeout is None else deadline_ns(self._member.timeout)
        call = self._member.begin() if self._member.calls is None else self._member.calls
        mistake: Exception | None = None
        self._lends, self._gets = kind in REDUCTIONS, out is None
        try:
            part = self._part_of(kind, op, root, x)
        except DOCUMENTED as error:  # sent to the other ranks, which are waiting for this rank
            mistake = error
            part = self._mistake(error)
        mask = self._single_host.make(call, part, deadline) if self._hosts is None else None
        if mask:
            self._over(call)
            return self._take_here(kind, part[2], call, mask, out)
        if mask is None:
            mistake = self._publish(call, part) or mistake
        try:
            try:
                result = self._committed(call, deadline)
            except HopliteTimeoutError as late:
                raise late from mistake  # the wait for space may have caused the timeout
            try:
                return self._finish(call, kind, part, result, out, mistake)
            finally:
                del part, result
                if self._in_place.lends:
                    self._take_back(deadline)
        finally:
            mistake = None  # no reference cycle through its traceback

    def _finish(
        self, call: int, kind: str, part: tuple[str, str, int, Any], result: ObjectRef[Any] | None,
        out: Any, mistake: Exception | None,
    ) -> Any:  # fmt: skip
        """Called after the commit. Returns this rank's result, or raises the call's error."""
        taken = False
        try:
            if self._hosts is not None:
                self._hosts.finished()
            self._part = None
            self._over(call)
            if mistake is None:
                found = self._take(kind, part[1], part[2], result, out)
                taken = True
                return found
            try:
                self._take("barrier", "", 0, result, None)
            except Exception as error:  # has the same text on every rank
                raise error from mistake
            raise mistake
        finally:
            if self._hosts is not None and not taken and self._member.calls == call + 1:
                self._hosts.drop(None if result is None else self._data_of(result))
            del part, result, mistake

    def _over(self, call: int) -> None:
        """Records that `call` is committed. Releases the previous call's result, because all
        members have finished that call."""
        self._member.calls, self.is_open = call + 1, False
        if self._led != call:
            self._result = None

    def _take_back(self, deadline: int) -> None:
        """Waits until the other ranks have released this rank's arrays, so that the caller may
        write to them. Only reductions lend arrays, and all arrays have been read when a reduction
        is committed. So if the deadline passes here, the call still returns its result, and the
        blocks remain lent."""
        with contextlib.suppress(HopliteTimeoutError):
            self._member.wait(self._in_place.take_back, deadline, lambda: "")

    def set_contributors(self, ranks: tuple[int, ...]) -> None:
        """Sets `contributors` after a reduction that has left out ranks in its calls."""
        self.contributors, self._last_mask = ranks, 0

    def leave_board(self) -> None:
        """Leaves the board. Called when this member will make no more calls."""
        self._single_host.leave()

    def drop(self) -> None:
        """Releases this member's objects. Called when the node has registered that this member has
        left."""
        self._result = self._part = None
        if self._hosts is not None:
            self._hosts.close()

    def return_arrays(self) -> None:
        """Called after this rank has left in the middle of a call. Waits until the other ranks have
        released this rank's arrays. A reader releases the arrays after its fold, when it detects
        that this rank has left, or when it dies."""
        while self._memory.client.usable and not self._in_place.take_back():
            clock.sleep(LENT_POLL_S)

    def _mistake(self, error: Exception) -> tuple[str, str, int, Any]:
        return INVALID_CALL, mistake_words(f"rank {self.rank}: {error}"), 0, error_kind(error)

    def _publish(self, call: int, part: tuple[str, str, int, Any]) -> Exception | None:
        """Publishes this rank's contribution. If an error prevents this, publishes and returns the
        error instead. This rank raises the error when the call is over."""
        raised: Exception | None = None
        if self._hosts is not None:
            try:
                held = self._part = []
                self._hosts.give(call, part, self._lends, self._gets, held)
            except DOCUMENTED as error:
                raised = error
                self._hosts.give(call, self._mistake(error), False, False, [])
            return raised
        try:
            self._part = self._memory.put(self._stored(part))  # held until the commit
        except DOCUMENTED as error:
            raised = error
            self._part = self._memory.put_text(self._mistake(error), 1)
        self._board.publish(self.rank, call, self._memory.local_id(self._part))
        return raised

    def _stored(self, part: tuple[str, str, int, Any]) -> tuple[str, str, int, Any]:
        """The contribution in its stored form. Values that need pickle are replaced by refs, so the
        leader reads all contributions but unpickles only its own values. Arrays that are read in
        place are replaced by refs, too."""
        kind, op, root, values = part
        if kind == INVALID_CALL:
            return part
        put, in_place, lends = self._memory.put, self._in_place.ref, self._lends
        stored = [(in_place(v, lends) or v) if is_plain_array(v) else put(v) for v in values]
        return kind, op, root, stored

    def _read(self, value: Any, rank: int, out: Array | None = None) -> Any:
        """A copy of one value in the stored contribution of `rank`, for the caller."""
        if type(value) is ObjectRef:
            mem = self._memory.payload(self._memory.local_id(value), FOREVER_NS)
            array = _serialize.payload_kind(mem) == _serialize.ARRAY
            value = self._memory.decode_value(mem, f"the value of rank {rank}", not array)
            if out is None and not array:
                return value
        return self._own(value, out)

    def _own(self, value: Any, out: Array | None) -> Any:
        """A copy of a value for the caller, or `out` filled with the value."""
        if out is None and type(value) is np.ndarray:
            return own_copy(self._memory, value)
        return into(value, out)

    def _seen(self, value: Any) -> Array:
        """A read-only array from a stored contribution."""
        if type(value) is ObjectRef:
            value = self._memory.read(self._memory.local_id(value), FOREVER_NS, False)
        return value  # type: ignore[no-any-return]

    def _part_of(self, kind: str, op: Any, root: int, x: Any) -> tuple[str, str, int, Any]:
        """This rank's contribution. Raises an error if an argument is wrong."""
        number = root if type(root) is int else whole(root)
        if number is None:
            raise TypeError(f"root={root!r}: a rank is an integer")
        if not 0 <= number < self.size:
            raise ValueError(f"root={number}: it must be from 0 to {self.size - 1}")
        if kind == "split":
            check_split(*x[:2])
        elif kind == "allgather" and op:  # the call is a reduction by a function
            x.pack()
        name = operation_name(op) if kind in REDUCTIONS or kind in PREFIXES else op
        gives = kind not in ("broadcast", "scatter") or self.rank == number
        return kind, name, number, contribution(kind, x, self.size, gives=gives)

    def _committed(self, call: int, deadline: int) -> ObjectRef[Any] | None:
        """Waits for the commit of `call`, and leads the call if this is the lowest living rank.
        Returns a ref to the result, or None if the result is on the board."""
        found: list[ObjectRef[Any] | None] = []

        def look() -> bool:
            _, alive, joining, epoch, result_call, result_id = self._board.look()
            if result_call > call:
                public = self._memory.public_id(result_id)
                found.append(self._memory.make_ref(public) if result_id else None)
                return True
            if self._hosts is not None:
                if self._hosts.small.is_done(call):
                    found.append(None)
                    return True
                self._member.admitted()  # raises if this member was removed
                return False  # the leading node decides
            if self._board.lead(self.rank, call):
                found.append(None)
                return True
            ranks = self._participants(alive | joining, call)
            missing = self._board.missing(alive | joining, call)
            if epoch & 1 or self._board.look()[3] != epoch:
                return False  # the node is changing the membership, and will wake this member
            if ranks and ranks[0] == self.rank and not missing:
                try:
                    found.append(self._lead(call, ranks, joining, epoch))
                except Retry:
                    return False
                return True
            return False

        def late() -> str:
            limit = "" if self._member.timeout is None else f", after {self._member.timeout:g} s"
            return f"{self._late(call)}{limit}. This rank has left the Group. {REJOIN}"

        self._member.wait(look, deadline, late)
        return found[0]

    def _late(self, call: int) -> str:
        _, alive, joining, *_ = self._board.look()
        if self._hosts is not None:
            return f"call {call} is undecided: a member has not made it, or its host is slow"
        missing = self._board.missing(alive | joining, call)
        ranks = [rank for rank in range(self.size) if missing >> rank & 1]
        if not ranks:
            return f"call {call} is undecided, although all ranks have made it"
        return f"call {call} is still waiting for ranks {ranks}"

    def _participants(self, mask: int, call: int) -> list[int]:
        return [
            rank
            for rank in range(self.size)
            if mask >> rank & 1 and 0 < self._board.member(rank)[1] <= call + 1
        ]

    # -- leading -------------------------------------------------------------------------------

    def _lead(self, call: int, ranks: list[int], joining: int, epoch: int) -> ObjectRef[Any]:
        """Reads and combines all contributions, and commits the call. The result is not visible to
        other members before the commit."""
        parts: dict[int, Any] = {}
        refs: dict[int, ObjectRef[Any]] = {}
        for rank in ranks:
            oid = self._board.member(rank)[2]
            if not oid:
                parts[rank] = self._single_host.part(rank)
                if parts[rank] is None or self._board.member(rank)[2]:
                    raise Retry  # the contribution is being published
                continue
            ref = self._memory.make_ref(self._memory.public_id(oid))
            if ref._hold is None:
                raise Retry  # that member has died, and will be removed from the mask
            refs[rank] = ref
        if self._board.look()[3] != epoch:
            raise Retry  # a contribution may be from a new member with a dead member's rank
        try:
            for rank, part in parts.items():
                if part[0] not in REDUCTIONS and part[3]:  # the other ranks read these values
                    refs[rank] = self._memory.put(self._stored(part))
            for rank, ref in refs.items():
                parts[rank] = self._memory.read(self._memory.local_id(ref), FOREVER_NS, False)
            data = self._leading.combine(dict(sorted(parts.items())), refs)
            parts.clear()  # the ranks may write to their arrays after the commit
            committed = self._memory.put((mask_of(ranks), "", "", data))
        except Exception as error:  # the error is committed, so that every rank raises it
            parts.clear()
            if is_interruption(error):
                raise
            _serialize.drop_traceback(error)  # its frames refer to the parts
            failed = mask_of(ranks), error_kind(error), mistake_words(str(error)), None
            committed = self._memory.put_text(failed, 2)
        # Stored before the commit, because other members read the result even if this member
        # leaves.
        self._result, led = committed, self._result
        self._led = call
        self._board.commit(call, self._memory.local_id(committed))
        del led  # all members have finished the previous call
        for rank in range(self.size):
            if joining >> rank & 1:  # its first call is committed, so it is a member now
                self._runtime.channel.tell(GroupAdmit(self.name, self._generation, rank))
        return committed

    # -- reading the commit --------------------------------------------------------------------

    def _check_contributors(self, mask: int) -> None:
        if mask != self._last_mask:
            self.contributors, self._last_mask = contributors_of(mask), mask
        if self.strict and len(self.contributors) < self.size:
            lost = sorted(set(range(self.size)) - set(self.contributors))
            raise PeerLostError(f"group {self.name!r}: ranks {lost} are lost")

    def _take(self, kind: str, op: str, root: int, result: ObjectRef[Any] | None, out: Any) -> Any:
        read = self._memory.read
        local = self._memory.local_id
        if result is not None:
            mask, failed, text, data = read(local(result), FOREVER_NS, False)
        elif self._hosts is not None:
            mask, failed, text, data = self._hosts.small.result()
        else:
            assert self._member.calls is not None
            return self._take_here(
                kind, root, self._member.calls - 1, self._board.contributors(), out
            )
        if failed:
            self.contributors, self._last_mask = contributors_of(mask), mask
            raise error_of(failed, text)
        if self._hosts is not None:
            return self._take_remote(kind, op, root, mask, data, out)
        self._check_contributors(mask)
        if kind == "barrier":
            return None
        if kind in ("reduce", "gather") and self.rank != root:
            return None
        if kind in ("allreduce", "reduce"):
            return self._own(read(local(data), FOREVER_NS, False), out)
        if kind == "reduce_scatter":
            total = read(local(data), FOREVER_NS, False)
            return self._own(np.array_split(total, self.size)[self.rank], out)
        if kind in ("broadcast", "scatter"):
            values = read(local(data), FOREVER_NS, False)[3]
            return self._read(values[self.rank if kind == "scatter" else 0], root, out)
        if kind in PREFIXES:
            below = [rank for rank in sorted(data) if rank < self.rank + (kind == "scan")]
            arrays = [self._seen(read(local(data[r]), FOREVER_NS, False)[3][0]) for r in below]
            return self._folded(op, arrays, out)
        outs = outs_of(kind, out, self.size)
        gathered: list[Any] = [None] * self.size
        for rank, ref in data.items():
            values = read(local(ref), FOREVER_NS, False)[3]
            value = values[self.rank if kind in TARGETED else 0]
            gathered[rank] = self._read(value, rank, outs[rank])
        return gathered

    def _take_here(self, kind: str, root: int, call: int, mask: int, out: Any) -> Any:
        """Like `_take`, for a call without objects. Raises PeerLostError if this member was
        removed, because other members may have overwritten the result before it was read."""
        try:
            if mask != self._last_mask or self.strict:
                self._check_contributors(mask)
            found = self._single_host.take(kind, root, call, mask, out)
        except Exception:  # other ranks may have overwritten the bytes if this member was removed
            self._check_held()
            raise
        if self._board.holds(self.rank, self._identity[1], self._generation) <= 0:
            self._check_held()
        return found

    def _check_held(self) -> None:
        """Raises PeerLostError if the planner has removed this member."""

        def holds() -> int:
            return self._board.holds(self.rank, self._identity[1], self._generation)

        held = holds()
        if held < 0:
            self._member.wait(lambda: holds() >= 0, FOREVER_NS, str)
            held = holds()
        if held == 0:
            self._member.admitted()
            raise PeerLostError(
                f"group {self.name!r}: this member was removed: its host was declared lost"
            )

    def _take_remote(self, kind: str, op: str, root: int, mask: int, data: Any, out: Any) -> Any:
        """Like `_take`, for a Group over several hosts. The node has leased some of the blocks in
        `data` to this rank."""
        assert self._hosts is not None
        self._check_contributors(mask)
        if kind == "barrier" or (kind in ("reduce", "gather") and self.rank != root):
            return None
        return self._hosts.take(kind, op, root, data, out)

    def _data_of(self, result: ObjectRef[Any]) -> Any:
        """The data that `_take` would read; None if the data cannot be read."""
        with contextlib.suppress(HopliteError):
            return self._memory.read(self._memory.local_id(result), FOREVER_NS, False)[3]
        return None

    def _folded(self, op: str, arrays: list[Array], out: Array | None) -> Array | None:
        """This rank's result of a scan or exscan; None if there are no arrays to fold."""
        if not arrays:
            return None
        threads = self._runtime.config.reduce_threads or self._runtime.tasks.cores
        total = prefix(op, arrays, threads)
        return total if out is None else into(total, out)


def _bytes_of(x: Any) -> int:
    """The number of bytes in the arrays that a rank contributes to a call. Other values count as
    0."""
    if isinstance(x, (list, tuple)):
        return sum(one.nbytes for one in x if isinstance(one, np.ndarray))
    return x.nbytes if isinstance(x, np.ndarray) else 0


NAME_SHARE_CHARS = 100  # length of a Group's name in the names of Groups split from it
LIMIT = 1 << 62


def check_split(color: Any, key: Any) -> None:
    """Raises TypeError or ValueError if `color` or `key` is not allowed."""
    for name, value in (("color", color), ("key", key)):
        if name == "color" and value is None:
            continue
        number = whole(value)
        if number is None:
            raise TypeError(
                f"{name}={value!r}: it must be an integer" + " or None" * (name == "color")
            )
        if abs(number) > LIMIT:
            raise ValueError(f"{name}={value!r}: it must be from {-LIMIT} to {LIMIT}")


def peers_of(given: Sequence[Any], color: int) -> list[tuple[int, Any]]:
    """(rank, identity) for each rank with that color, in the order of the new ranks. `given`:
    (color, key, identity) by rank, with None for dead ranks."""
    same = [
        (one[1], rank, one[2])
        for rank, one in enumerate(given)
        if one is not None and one[0] is not None and one[0] == color
    ]
    return [(rank, identity) for _, rank, identity in sorted(same)]


def split_name(
    name: str, generation: int, call: int, color: int, peers: Sequence[tuple[int, Any]]
) -> str:
    """A unique name for a split Group. Each generation number, and each call number in a
    generation, is used once. The name also contains the ranks of `peers` in hexadecimal: if a host
    is lost or leaves, the call is decided again without this host, but the host's members may have
    created a larger Group after the first decision."""
    ranks = sum(1 << rank for rank, _ in peers)
    return f"{name[:NAME_SHARE_CHARS]}/{generation}.{call}/{color}/{ranks:x}"
