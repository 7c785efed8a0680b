"""Reductions of any picklable values by a function of the user, as methods of a Group.

The call itself is an allgather of the pickled values. Its contributors are those of the reduction.
The lowest contributing rank, the leader, folds the values from left to right in the order of ranks,
and sends each rank its result by a message with a tag that no user has. If the leader dies or
leaves before its message has arrived, each rank folds the values itself; it has them from the
allgather.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _serialize
from hoplite_mp._client.deadlines import FOREVER_NS, deadline_ns
from hoplite_mp._common import clock
from hoplite_mp._common.interruptions import is_interruption
from hoplite_mp._common.operators import function_name, is_function
from hoplite_mp._group.call_protocol import REJOIN
from hoplite_mp._group.inbox import Receive
from hoplite_mp._group.messages import Messages
from hoplite_mp._protocol.local import RESULT_TAG
from hoplite_mp._serialize.contributions import into
from hoplite_mp.errors import PeerLostError, StoreFullError, TaskError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hoplite_mp._client.memory import Memory
    from hoplite_mp._common.ref import ObjectRef

__all__ = ["ObjectFolds"]

RESULT, ERROR, FOLD_YOURSELF = "result", "error", "fold yourself"
NAME_CHARS_MAX = 40  # of an error's class: such a message fits into a header, beside the store


class Parcel:
    """A value that only the ranks that fold it unpickle."""

    def __init__(self, payload: bytes, refs: list[ObjectRef[Any]]) -> None:
        self._payload = payload
        self._refs = refs  # keeps the objects inside the value alive

    def open(self, memory: Memory, rank: int) -> Any:
        """The value, which that rank has given."""
        return memory.decode_value(memoryview(self._payload), f"the value of rank {rank}", True)


class Packed:
    """Pickles a value as a Parcel."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._parcel: tuple[bytes, list[ObjectRef[Any]]] | None = None

    def pack(self) -> None:
        """Pickles the value. TypeError: it cannot be pickled."""
        encoded = _encoded(self._value, "the value given")
        self._parcel = encoded.tobytes(), list(encoded.refs)

    def __reduce__(self) -> Any:
        assert self._parcel is not None
        return Parcel, self._parcel


class ObjectFolds(Messages):
    """The reductions of a member whose `op` is a function."""

    # The error that all ranks raise, of the call under way.
    _folded_error: BaseException | None = None

    def _call_by(self, op: Any) -> Callable[..., Any]:
        """The method that makes a reduction with this operator."""
        return self._fold if is_function(op) else self._call

    def _fold(self, kind: str, op: Any, root: int, x: Any, out: Any) -> Any:
        self._check_member()
        self._folded_error = None
        self._open = True
        try:
            deadline = deadline_ns(self._timeout)
            self._inbox.look()
            ended = self._inbox.ended  # the members that had ended before the call
            found = self._committed_fold(kind, op, root, x, deadline, ended)
        except BaseException as error:
            if error is not self._folded_error:
                self._open = self._open or is_interruption(error)  # also of a documented type
                self._end_after(error)
            raise
        finally:
            self._folded_error = None
        return found if found is None or out is None else into(found, out)

    def _committed_fold(
        self, kind: str, op: Any, root: int, x: Any, deadline: int, ended: tuple[int, ...]
    ) -> Any:
        """This rank's result. An error of all ranks becomes the `_folded_error`."""
        name = f"{kind} by {function_name(op)}"
        parcels = self._call("allgather", name, root, Packed(x), None)
        assert self.calls is not None
        call, ranks = self.calls - 1, self.contributors
        if kind == "reduce" and root not in ranks:
            raise PeerLostError(f"group {self.name!r}: the root, rank {root}, is lost")
        fold = lambda: self._results(kind, op, operator.index(root), parcels, ranks)  # noqa: E731
        if self.rank == ranks[0]:
            return self._lead_fold(call, fold, ranks)
        return self._led_fold(call, ranks[0], deadline, ended, fold)

    def _results(
        self, kind: str, op: Any, root: int, parcels: list[Parcel], ranks: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Any]]:
        """What ranks get: (ranks, result). A result is to be copied before the next one is made,
        because `op` may change its first argument."""
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
        """Folds, sends every other rank its result or the error, and returns this rank's."""
        ready = []
        try:
            for some, value in fold():
                try:
                    encoded = _serialize.encode((call, RESULT, value))
                except _serialize.NotPicklable:
                    _encoded(value, "the result of op")  # raises an error that names it
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
        """Sends the error to the others; without room for it, only the name of its class."""
        if type(error) is TaskError and isinstance(error.__cause__, _serialize.EXITS):
            error = TaskError(str(error))  # with that cause it would travel as an exit
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
                self._send_encoded(encoded, ref, rank, RESULT_TAG)  # a dead rank needs none

    # -- the other ranks -----------------------------------------------------------------------

    def _led_fold(
        self,
        call: int,
        leader: int,
        deadline: int,
        ended: tuple[int, ...],
        fold: Callable[[], Iterator[Any]],
    ) -> Any:
        """This rank's result, from the leader. `ended`: the members that had ended before the
        call."""
        try:
            state, value = self._receive_result(call, leader, deadline, ended)
        except PeerLostError:
            if self.strict:
                raise
            state, value = FOLD_YOURSELF, None
        if state == ERROR and isinstance(value, str):
            raise StoreFullError(
                f"call {call}: folding the values failed at rank {leader}, whose store has no room "
                f"for more than the class of the error, {value}; raise memory="
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
        limit = "" if self._timeout is None else f" within {self._timeout:g} s"
        late = (
            f"call {call}: rank {leader} has not folded the values{limit}. This rank has left the "
            f"Group. {REJOIN}"
        )

        def arrives() -> bool:
            has_gone_on = self._board.member(leader)[0] > call + 1  # its message was sent before
            return self._arrives(receive) or has_gone_on

        while True:
            receive = Receive(leader, RESULT_TAG, deadline, self._timeout)
            try:
                self._inbox.post(receive)
                receive.ended = ended
                self._wait(arrives, deadline, lambda: late)
                if receive.found is None:
                    return FOLD_YOURSELF, None
                receive.deadline = FOREVER_NS if deadline < clock.monotonic_ns() else deadline
                number, state, value = self._inbox.take(receive)
            finally:
                self._inbox.withdraw(receive)
            if number == call:  # otherwise of a call before this rank had joined again
                return state, value


def _encoded(value: Any, what: str) -> _serialize.Encoded:
    """The payload of a user's value. TypeError: it cannot be pickled; `what` names it."""
    try:
        return _serialize.encode(value)
    except _serialize.NotPicklable as error:
        text = str(error).replace("cannot pickle value", f"cannot pickle {what}", 1)
        made = type(error)(text)
        made.place = error.place
        raise made from error.__cause__


def _split(total: Any, size: int) -> Sequence[Any]:
    """The parts of a reduce_scatter's total, by rank."""
    if isinstance(total, np.ndarray) and total.ndim:
        return np.array_split(total, size)
    if isinstance(total, (list, tuple)) and len(total) == size:
        return total
    raise TypeError(
        f"reduce_scatter by a function needs arrays, or lists with one item for each of {size} "
        f"ranks: {type(total).__name__}"
    )
