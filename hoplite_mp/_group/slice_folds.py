"""Group reductions in which each rank folds one slice of all arrays, or ranks are left out.

Such a reduction is a sequence of calls. An allgather of headers establishes the operator and the
participating ranks. An alltoall sends each owner its slice of every array. Small allgathers add up
the statistics that the operator needs. An allgather returns the folded slices. Each call has the
same contributors on all ranks. If a rank dies during the sequence, all other ranks detect the death
in the same call, and begin the sequence again.

A rank that joins again may make its first call while the others are at any step of the sequence.
These steps have a root, which no other allgather or alltoall has, so its call never matches: every
rank gets the error for different calls. The ranks in the sequence then begin it again. The new
member does so, too, if its call is the same reduction; otherwise it raises the error.

If the host that decided the alltoall is lost, some ranks may have their slices, and others not.
The ranks without slices begin the sequence again. Their headers meet the next step of the other
ranks, in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._common.call_mismatch import MISMATCH
from hoplite_mp._common.reduction import operation_name
from hoplite_mp._common.signals import is_interruption
from hoplite_mp._common.slice_operators import (
    Array,
    SliceOperator,
    is_finite,
    no_finite_input,
    slice_array,
)
from hoplite_mp._serialize.contributions import LOST_SHARE, STEP_ROOT, into
from hoplite_mp.errors import PeerLostError, ReduceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hoplite_mp._group.call_protocol import CallProtocol
    from hoplite_mp._group.member_lifecycle import GroupMembership

__all__ = ["SliceFolds"]

# The element that a rank contributes in place of its array if it is left out.
_IDENTITIES = {"sum": 0, "mean": 0, "prod": 1, "min": np.inf, "max": -np.inf}


class _Again(Exception):
    """The ranks have changed since the headers: all ranks begin the sequence again. is_alone: this
    rank has lost its slices, so the others are in the next step, which its headers interrupt."""

    def __init__(self, is_alone: bool = False) -> None:
        self.is_alone = is_alone


class _Header:
    """A rank's operator, and the dtype and shape of its input. `error`: the reason why its input
    cannot be reduced, or None. `finite`: whether its input counts."""

    def __init__(self, op: str) -> None:
        self.op, self.form = op, ""
        self.error: ValueError | TypeError | None = None
        self.finite = True

    def pack(self) -> None:
        """Called by the call protocol. Does nothing, because a header can be pickled as it is."""


class SliceFolds:
    """A member's reductions by a SliceOperator or with `finite=True`."""

    def __init__(self, member: GroupMembership, calls: CallProtocol) -> None:
        self._member, self._calls = member, calls
        self.name, self.rank, self.size = member.name, member.rank, member.size
        self._agreed: BaseException | None = None  # the error that all ranks raise

    def reduce(self, kind: str, op: Any, root: int, x: Any, out: Any, finite: bool) -> Any:
        """This rank's result. In a reduce, None on all ranks except the root."""
        self._member.check()
        if kind not in ("allreduce", "reduce"):
            raise ValueError(f"{kind} takes no {type(op).__name__}: use allreduce or reduce")
        self._agreed = None
        self._calls.is_open = True
        try:
            return self._reduce(kind, op, root, x, out, finite)
        except BaseException as error:
            if error is not self._agreed:
                self._calls.is_open = self._calls.is_open or is_interruption(error)
                self._calls.end_after(error)
            raise
        finally:
            self._agreed = None

    def _reduce(self, kind: str, op: Any, root: int, x: Any, out: Any, finite: bool) -> Any:
        fold = self._by_slices if isinstance(op, SliceOperator) else self._by_name
        interrupts = self._member.calls is None
        while True:
            try:
                ranks, taking, array = self._headers(kind, op, root, x, finite)
            except ValueError as error:
                if interrupts and MISMATCH in str(error):
                    interrupts = False
                    continue  # the other ranks were in the middle of a sequence
                raise
            interrupts, self._calls.is_open = False, True
            try:
                result, accepted = fold(kind, op, root, array, ranks, taking)
            except _Again as again:
                interrupts = again.is_alone
                continue
            except ValueError as error:
                if MISMATCH not in str(error):
                    raise
                continue  # a new member has sent headers during this sequence
            self._calls.is_open = False
            self._calls.set_contributors(accepted)
            return result if result is None or out is None else into(result, out)

    # -- agreement -----------------------------------------------------------------------------

    def _headers(
        self, kind: str, op: Any, root: int, x: Any, finite: bool
    ) -> tuple[tuple[int, ...], list[int], Array]:
        """The ranks in this reduction, the ranks whose inputs count, and this rank's input. If a
        rank's input is wrong, every rank raises the lowest such rank's error."""
        array: Array | None = None
        text = op.text() if isinstance(op, SliceOperator) else str(op)
        header = _Header(f"{text}, root={root}, finite={finite}")
        try:
            array = self._input(op, x, finite)
            header.form = f"{array.dtype.name} {array.shape}"
            header.finite = not finite or is_finite(array)
        except (TypeError, ValueError) as wrong:
            header.error = type(wrong)(f"rank {self.rank}: {wrong}")
        name = type(op).__name__ if isinstance(op, SliceOperator) else f"finite {text}"
        headers = self._calls.call("allgather", f"{kind} by {name}", root, header, None)
        ranks = self._calls.contributors
        first = ranks[0]
        for rank in ranks:
            if headers[rank].error is not None:
                raise self._all_raise(headers[rank].error)
            for name in ("op", "form"):
                one, other = getattr(headers[first], name), getattr(headers[rank], name)
                if one != other:
                    text = f"ranks {first} and {rank} of {kind} differ: {one} and {other}"
                    raise self._all_raise(ValueError(text))
        if kind == "reduce" and root not in ranks:
            lost = f"group {self.name!r}: the root, rank {root}, is lost"
            raise self._all_raise(PeerLostError(lost))
        taking = [rank for rank in ranks if headers[rank].finite]
        if not taking:
            raise self._all_raise(no_finite_input(len(ranks)))
        assert array is not None
        if isinstance(op, SliceOperator):
            try:
                op.check(len(taking), array.shape)
            except ValueError as wrong:
                raise self._all_raise(wrong) from None
        return ranks, taking, array

    def _input(self, op: Any, x: Any, finite: bool) -> Array:
        if isinstance(op, SliceOperator):
            return slice_array(x, type(op).__name__)
        if finite and operation_name(op) not in _IDENTITIES:
            raise ValueError(f"finite=True needs an op of {', '.join(_IDENTITIES)}, not {op!r}")
        array = np.asarray(x)
        if array.dtype.kind not in "biufcV" or array.dtype.names is not None:
            raise TypeError(f"{op} reduces arrays and numbers, not {type(x).__name__}")
        return array

    def _all_raise(self, error: BaseException) -> BaseException:
        """Marks an error as raised by all ranks. It does not end their memberships."""
        self._agreed, self._calls.is_open = error, False
        return error

    def _step(self, ranks: Sequence[int], kind: str, x: Any, out: Any = None) -> Any:
        """Makes one call of the sequence. _Again: its contributors are not the ranks of the
        headers, or this rank's slices are lost."""
        try:
            result = self._calls.call(kind, "", min(STEP_ROOT, self.size - 1), x, out)
        except PeerLostError as error:
            if self._calls.strict or LOST_SHARE not in str(error):
                raise
            raise _Again(is_alone=True) from None
        finally:
            self._calls.is_open = True  # after an error here, the other ranks may continue
        if self._calls.contributors != tuple(ranks):
            raise _Again
        return result

    # -- by slices -----------------------------------------------------------------------------

    def _by_slices(
        self, kind: str, op: SliceOperator, root: int, array: Array, ranks: Sequence[int],
        taking: Sequence[int],
    ) -> tuple[Array | None, tuple[int, ...]]:  # fmt: skip
        flat = array.reshape(-1)
        bounds = [len(flat) * place // len(ranks) for place in range(len(ranks) + 1)]
        cuts = {rank: (bounds[at], bounds[at + 1]) for at, rank in enumerate(ranks)}
        own = flat if self.rank in taking else flat[:0]
        parts = [own[slice(*cuts.get(rank, (0, 0)))] for rank in range(self.size)]
        found = self._step(ranks, "alltoall", parts)
        piece, accepted = self._owned(op, [found[rank] for rank in taking], ranks, cuts)
        result = np.empty(array.shape, array.dtype)
        pieces = [result.reshape(-1)[slice(*cuts.get(rank, (0, 0)))] for rank in range(self.size)]
        self._step(ranks, "allgather", piece, pieces)
        contributors = tuple(taking[index] for index in accepted)
        return result if kind == "allreduce" or self.rank == root else None, contributors

    def _owned(
        self, op: SliceOperator, slices: Sequence[Array], ranks: Sequence[int],
        cuts: dict[int, tuple[int, int]],
    ) -> tuple[Array, tuple[int, ...]]:  # fmt: skip
        """Folds this rank's slice. The owners exchange statistics between the steps of the fold."""
        fold = op.fold(slices, cuts[self.rank][0])
        try:
            partial = next(fold)
            while True:
                statistics = self._step(ranks, "allgather", partial)
                partial = fold.send(sum(statistics[rank] for rank in ranks))
        except StopIteration as end:
            piece, accepted = end.value
            return piece, accepted
        except ReduceError as error:  # raised on all ranks, because their statistics are equal
            self._all_raise(error)
            raise

    # -- by name, with finite=True ---------------------------------------------------------------

    def _by_name(
        self, kind: str, op: Any, root: int, array: Array, ranks: Sequence[int],
        taking: Sequence[int],
    ) -> tuple[Array | None, tuple[int, ...]]:  # fmt: skip
        name = operation_name(op)
        if len(taking) == len(ranks):
            result = self._calls.call(kind, name, root, array, None)
            return result, self._same(ranks)
        half = array.dtype.itemsize == 2
        wide = array.astype(np.float32) if half else array
        if self.rank not in taking:
            wide = np.full_like(wide, _IDENTITIES[name])
        total = self._calls.call(kind, "sum" if name == "mean" else name, root, wide, None)
        accepted = tuple(rank for rank in self._same(ranks) if rank in taking)
        if not accepted:
            raise self._all_raise(no_finite_input(len(ranks)))
        if total is not None and name == "mean":
            total /= len(accepted)
        return total.astype(array.dtype) if half and total is not None else total, accepted

    def _same(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The contributors to the last call. _Again: a rank has joined since the headers."""
        contributors = self._calls.contributors
        self._calls.is_open = True
        if not set(contributors) <= set(ranks):
            raise _Again
        return contributors
