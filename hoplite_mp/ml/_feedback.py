"""Compressed allreduce with error feedback: residuals are kept, and sent with later calls."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp.ml._compressors import Compressor, PowerSGD, orthogonal
from hoplite_mp.ml._member_operations import MemberOperations

if TYPE_CHECKING:
    from hoplite_mp import Group

__all__ = ["Feedback"]

Array = np.ndarray[Any, np.dtype[Any]]
OPS = ("sum", "mean")
HEAD = struct.Struct("<16sH")  # a digest of the call, and the length of the error text that follows
STEP = struct.Struct("<Q")  # the sender's step, before its code, in a call with a deadline
COMPLAINT_MAX = 500


@dataclasses.dataclass
class _Stream:
    """A rank's state for the arrays with one name."""

    residual: Array | None = None  # residual of the whole array; None: zeros
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)  # the compressor's memory
    step: int = 0
    # The residual of the slice that this rank owns, and the compressor's memory for the slice. Both
    # are dropped when the members change.
    owned: Array | None = None
    owner_notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    factor: Array | None = None  # Q of PowerSGD


class Feedback:
    """Allreduce of compressed arrays over a Group, with error feedback.

    Each rank keeps a residual for each name: the part of its earlier arrays that its codes have
    left out. In a call, a rank adds the residual to its array, and sends the code of each slice to
    the slice's owner; every rank owns one slice. An owner adds up the codes, adds what its own
    earlier codes have left out, and sends the code of the result to all ranks. Seide et al.,
    Interspeech 2014; Karimireddy et al., ICML 2019; compression in both directions as in Tang et
    al., ICML 2019 (DoubleSqueeze). `PowerSGD` makes two dense reductions instead.

    Parameters
    ----------
    group : Group
        A Group that is used for nothing else.
    compressor : TopK, Threshold, RandomBlocks, Quantise, Float16 or PowerSGD
        The compressor, which must be the same on all ranks.

    Notes
    -----
    A call has the same result, bit for bit, and the same contributors on all ranks. If a rank dies
    during a call, the others repeat the call without it, so its array is in no rank's result. If a
    call raises an exception, the residuals are the same as before the call.

    A replacement for a dead rank creates a new Feedback on a Group with the same name and rank. Its
    residuals start as zeros, and it takes part in the call that the others are making. When the
    members change, slices get other owners, and the owners' residuals (the parts of earlier results
    that have not been sent) are lost.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> def train(rank):
    ...     g = hoplite_mp.current().group("feedback", 2, rank)
    ...     feedback = ml.Feedback(g, ml.TopK(0.25))
    ...     grads = [np.array([4, 3, 0, 0], np.float32), np.zeros(4, np.float32)]
    ...     return [feedback.allreduce("w", one, op="sum").tolist() for one in grads]
    >>> c.spmd(train, 2)[0].result()
    [[8.0, 0.0, 0.0, 0.0], [0.0, 6.0, 0.0, 0.0]]
    """

    __module__ = "hoplite_mp.ml"

    def __init__(self, group: Group, compressor: Compressor | PowerSGD) -> None:
        if not isinstance(compressor, (Compressor, PowerSGD)):
            raise TypeError(f"compressor={compressor!r} is not a compressor of hoplite_mp.ml")
        self.compressor = compressor
        self._group = group
        self._streams: dict[str, _Stream] = {}
        self._operations = MemberOperations(
            group, self._get_state, self._set_state, self._drop_owned
        )
        self._contributors: tuple[int, ...] = ()
        self._sent = self._received = 0

    @property
    def sent(self) -> int:
        """Bytes of codes that this rank has sent to others, in all calls so far.

        For the dense reductions of `PowerSGD`, the number is computed for an allreduce by slices.
        """
        return self._sent

    @property
    def received(self) -> int:
        """Bytes of codes that this rank has received from others, in all calls so far."""
        return self._received

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks whose arrays are in the last result, sorted; the same on all ranks."""
        return self._contributors

    def residual(self, name: str) -> Array | None:
        """The residual: the part of the arrays with that name that this rank has not sent.

        Returns
        -------
        numpy.ndarray or None
            A one-dimensional float32 copy. None before the first call with that name.
        """
        stream = self._streams.get(name)
        return None if stream is None or stream.residual is None else stream.residual.copy()

    def allreduce(
        self,
        name: str,
        grad: Array,
        op: str = "mean",
        *,
        num: int | None = None,
        deadline: float | None = None,
    ) -> Array:
        """Reduces an array of every rank, together with the residuals of earlier calls.

        Parameters
        ----------
        name : str
            Arrays with the same name share a residual. All ranks make the same calls in the same
            order.
        grad : numpy.ndarray
            A float32 or float64 array, of the same shape on every rank; float64 is rounded to
            float32.
        op : {"mean", "sum"}, optional
            Default: "mean".
        num, deadline : int and float (seconds), optional
            As for `Group.allreduce`: late ranks are left out. The whole array of a late rank is
            added to its residual. Each rank sends its code to all others, and there are no owners.
            `PowerSGD` raises ValueError. Default: wait for all ranks.

        Returns
        -------
        numpy.ndarray
            A new array with the shape and the dtype of `grad`. It has the same bits on every rank.

        Raises
        ------
        ValueError
            On every rank: the ranks' names, shapes, dtypes, ops or compressors differ, an array has
            a value that is not finite, or its size differs from that of earlier arrays with that
            name.
        PeerLostError
            The Group is strict, and a rank has died.

        Examples
        --------
        >>> from hoplite_mp import ml
        >>> with c.group("one", 1) as g:
        ...     feedback = ml.Feedback(g, ml.Float16())
        ...     feedback.allreduce("w", np.array([[1.5, 2.5]]))
        array([[1.5, 2.5]])
        """
        grad, complaint = np.asarray(grad), ""
        if op not in OPS:
            complaint = f"op={op!r}: it must be one of {', '.join(OPS)}"
        elif grad.dtype not in (np.float32, np.float64):
            complaint = f"{name!r} has dtype {grad.dtype}, not float32 or float64"
        # Even an invalid call is made, because the other ranks are waiting for it.
        flat = np.zeros(grad.size, np.float32)
        if not complaint:
            flat[:] = grad.reshape(-1)
        if num is not None or deadline is not None:
            total = self._reduce_bounded(name, grad, flat, op, complaint, num, deadline)
        else:
            total = self._operations.run(lambda: self._reduce(name, grad, flat, op, complaint))
            self._contributors = self._operations.members
        return total.reshape(grad.shape).astype(grad.dtype, copy=False)

    def _reduce(self, name: str, grad: Array, flat: Array, op: str, complaint: str) -> Array:
        """Makes one attempt at a call. Changes the state only if the attempt succeeds."""
        stream = self._streams.get(name) or _Stream()
        self._streams[name] = stream
        complaint = complaint or _complaint(name, flat, stream)
        values = flat
        if not complaint and stream.residual is not None:
            values = flat + stream.residual
        about = (name, grad.shape, grad.dtype.str, op, stream.step, self.compressor)
        head = _head(about, complaint)
        if not isinstance(self.compressor, PowerSGD):
            return self._reduce_slices(stream, values, op, head)
        self._agree(self._operations.call(self._group.allgather, _array(head)))
        if self.compressor.is_low(grad.shape):
            return self._reduce_low(stream, values.reshape(grad.shape[0], -1), name, op)
        total = self._dense(values, op)
        stream.residual, stream.step = np.zeros_like(values), stream.step + 1
        return total

    # -- calls with a deadline -------------------------------------------------------------------

    def _reduce_bounded(
        self, name: str, grad: Array, flat: Array, op: str, complaint: str, num: Any, deadline: Any
    ) -> Array:
        """Makes a call that leaves late ranks out. Changes the state only if the call succeeds."""
        stream = self._streams.setdefault(name, _Stream())
        compressor, step = self.compressor, stream.step
        complaint = complaint or _complaint(name, flat, stream)
        if not complaint and not isinstance(compressor, Compressor):
            complaint = "deadline= takes no PowerSGD, whose reductions depend on each other"
        text = f"Feedback.allreduce of {name!r}, {grad.shape} {grad.dtype}, {op}, {compressor}"
        error = ValueError(f"Feedback.allreduce: {complaint}") if complaint else None
        values, code, payload = flat, None, None
        if error is None:
            assert isinstance(compressor, Compressor)
            values = flat if stream.residual is None else flat + stream.residual
            values = values.copy()
            compressor.prepare(values, step, stream.notes)
            code = compressor.encode(values, step, 0, stream.notes)
            payload = _array(STEP.pack(step), code)
        others = len(self._group.alive) - 1
        members, payloads = self._group._bounded_gather(text, payload, num, deadline, error)
        assert isinstance(compressor, Compressor)
        assert code is not None
        assert payload is not None
        self._contributors = members
        self._sent += others * payload.nbytes
        total = np.zeros_like(values)
        for member, one in zip(members, payloads, strict=True):
            (sender_step,) = STEP.unpack_from(one.data)
            compressor.add(one[STEP.size :], total, sender_step, 0)
            self._received += 0 if member == self._group.rank else one.nbytes
        if op == "mean":
            total /= np.float32(len(members))
        if self._group.rank in members:
            compressor.add(code, values, step, 0, -1.0)
        stream.residual, stream.step = values, step + 1
        return total

    # -- slices and their owners -----------------------------------------------------------------

    def _reduce_slices(self, stream: _Stream, values: Array, op: str, head: bytes) -> Array:
        compressor, step = self.compressor, stream.step
        assert isinstance(compressor, Compressor)
        members, rank = self._operations.members, self._group.rank
        stripes = np.array_split(values, len(members))
        compressor.prepare(values, step, stream.notes)
        codes = [compressor.encode(one, step, at, stream.notes) for at, one in enumerate(stripes)]
        parts: list[Array | None] = [None] * self._group.size
        for member, code in zip(members, codes, strict=True):
            parts[member] = _array(head, code)
        received = self._operations.call(self._group.alltoall, parts)
        self._count([part for at, part in enumerate(parts) if at != rank], received)
        slice_codes = self._agree(received)

        # Folds the slice that this rank owns.
        at = members.index(rank)
        folded = np.zeros(stripes[at].size, np.float32)
        for member in members:
            compressor.add(slice_codes[member], folded, step, at)
        if op == "mean":
            folded /= np.float32(len(members))
        if stream.owned is not None:
            folded += stream.owned
        compressor.prepare(folded, step, stream.owner_notes)
        code = compressor.encode(folded, step, at, stream.owner_notes)
        results = self._operations.call(self._group.allgather, code)
        self._count([code] * (len(members) - 1), results)

        total = np.zeros_like(values)
        for at, (member, stripe) in enumerate(
            zip(members, np.array_split(total, len(members)), strict=True)
        ):
            compressor.add(results[member], stripe, step, at)
        for at, (stripe, sent) in enumerate(zip(stripes, codes, strict=True)):
            compressor.add(sent, stripe, step, at, -1.0)  # the stripes are views of `values`
        compressor.add(code, folded, step, members.index(rank), -1.0)
        stream.residual, stream.owned, stream.step = values, folded, step + 1
        return total

    def _agree(self, received: list[Any]) -> dict[int, Array]:
        """The codes by rank. Raises ValueError if a rank reports an error, or the calls of the
        ranks differ."""
        codes, heads = {}, {}
        for rank in self._operations.members:
            found = np.asarray(received[rank])
            heads[rank], length = HEAD.unpack_from(found.data)
            if length:
                text = found[HEAD.size : HEAD.size + length].tobytes().decode()
                raise ValueError(f"Feedback.allreduce, rank {rank}: {text}")
            codes[rank] = found[HEAD.size :]
        first = heads[min(heads)]
        different = [rank for rank, one in heads.items() if one != first]
        if different:
            raise ValueError(
                "Feedback.allreduce: the ranks' names, shapes, dtypes, ops or compressors differ; "
                f"{_listed(different)} and rank {min(heads)} differ"
            )
        return codes

    def _count(self, sent: list[Any], received: list[Any]) -> None:
        self._sent += sum(part.nbytes for part in sent if part is not None)
        own_rank = self._group.rank
        self._received += sum(
            part.nbytes for at, part in enumerate(received) if at != own_rank and part is not None
        )

    # -- PowerSGD ----------------------------------------------------------------------------------

    def _dense(self, values: Array, op: str) -> Array:
        total = self._operations.call(self._group.allreduce, values, op)
        members = len(self._operations.members)
        moved = 2 * values.nbytes * (members - 1) // members
        self._sent += moved
        self._received += moved
        return total

    def _reduce_low(self, stream: _Stream, matrix: Array, name: str, op: str) -> Array:
        compressor = self.compressor
        assert isinstance(compressor, PowerSGD)
        q = stream.factor
        if q is None:
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
            q = compressor.start(matrix.shape, seed + stream.step)
        # The mean, so that the columns of P have the same magnitude as those of the gradient.
        p = orthogonal(self._dense(matrix @ q, "mean"))
        own = compressor.right(matrix, p)
        q = self._dense(own, op)
        residual = matrix - p @ own.T
        total = np.zeros_like(matrix)
        for at in range(p.shape[1]):  # element by element, so every CPU gives the same bits
            total += p[:, at, None] * q[None, :, at]
        stream.residual, stream.factor = residual.reshape(-1), q
        stream.step += 1
        return total

    # -- members -----------------------------------------------------------------------------------

    def _get_state(self) -> dict[str, int]:
        return {name: stream.step for name, stream in self._streams.items()}

    def _set_state(self, steps: dict[str, int]) -> None:
        for name, step in steps.items():
            self._streams.setdefault(name, _Stream()).step = step

    def _drop_owned(self) -> None:
        for stream in self._streams.values():
            stream.owned = stream.factor = None
            stream.owner_notes = {}


def _complaint(name: str, flat: Array, stream: _Stream) -> str:
    """An error text about this rank's array; empty if the array is valid."""
    if not np.isfinite(flat).all():
        return f"{name!r} has values that are not finite"
    if stream.residual is not None and stream.residual.size != flat.size:
        return f"{name!r} had {stream.residual.size} elements in earlier calls, and now {flat.size}"
    return ""


def _head(about: tuple[Any, ...], complaint: str) -> bytes:
    text = complaint.encode()[:COMPLAINT_MAX]
    digest = hashlib.blake2b(repr(about).encode(), digest_size=16).digest()
    return HEAD.pack(digest, len(text)) + text


def _array(*parts: Any) -> Array:
    return np.frombuffer(b"".join(parts), np.uint8)


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
