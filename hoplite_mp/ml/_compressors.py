"""Compressors for float32 arrays, which encode an array in fewer bytes.

A compressor encodes a one-dimensional array as a code (bytes), and adds the values in a code to an
array. `Feedback` keeps the difference between the array and the decoded code, and sends it later.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from hoplite_mp import _reduce
from hoplite_mp.ml._draws import draw_blocks, draw_floats, elements_of

__all__ = [
    "PAIR",
    "Compressor",
    "Float16",
    "PowerSGD",
    "Quantise",
    "RandomBlocks",
    "Threshold",
    "TopK",
    "orthogonal",
]

Array = np.ndarray[Any, np.dtype[Any]]
PAIR = np.dtype([("index", "<u4"), ("value", "<f4")])
FLOAT16_MAX = float(np.finfo(np.float16).max)
OVERFULL = 8  # a code with more than OVERFULL * fraction of the entries needs a new threshold
SAMPLED_MIN = 10  # minimum expected number of sampled values above the threshold


def _check(name: str, value: Any, low: float, high: float, kind: type = float) -> None:
    number = isinstance(value, int if kind is int else (int, float)) and value is not True
    if not number or not low <= value <= high:
        what = "an integer" if kind is int else "a number"
        raise ValueError(f"{name}={value!r}: it must be {what} from {low:g} to {high:g}")


def _floats(values: Array) -> Array:
    if values.ndim != 1:
        raise ValueError(f"a compressor takes one-dimensional arrays, not shape {values.shape}")
    return np.ascontiguousarray(values, np.float32)


@dataclasses.dataclass(frozen=True)
class Compressor:
    """The interface of compressors for `Feedback`. A compressor has no state.

    Arguments of the methods: `step` and `stripe` are the numbers of the call and of the slice, and
    must be the same when an array is encoded and when its code is added. `memory` is a dict that
    the caller keeps for a sequence of arrays, or None.
    """

    def prepare(self, values: Array, step: int = 0, memory: dict[str, Any] | None = None) -> None:
        """Prepares for an array. Called with the whole array before its slices are encoded."""

    def encode(
        self, values: Array, step: int = 0, stripe: int = 0, memory: dict[str, Any] | None = None
    ) -> Array:
        """The code of a one-dimensional array, as uint8."""
        raise NotImplementedError

    def add(
        self, code: Array, into: Array, step: int = 0, stripe: int = 0, factor: float = 1.0
    ) -> None:
        """``into += factor * decode(code)``, in place; `into` is float32.

        Raises
        ------
        ValueError
            The code does not belong to an array of this size.
        """
        raise NotImplementedError

    def decode(self, code: Array, size: int, step: int = 0, stripe: int = 0) -> Array:
        """The float32 array of `size` elements that a code represents."""
        found = np.zeros(size, np.float32)
        self.add(code, found, step, stripe)
        return found


def _pairs(values: Array, indices: Array) -> Array:
    pairs = np.empty(indices.size, PAIR)
    pairs["index"] = indices
    pairs["value"] = values[indices]
    return pairs.view(np.uint8)


class _Sparse(Compressor):
    """A compressor whose codes are pairs of a uint32 index and a float32 value."""

    def add(
        self, code: Array, into: Array, step: int = 0, stripe: int = 0, factor: float = 1.0
    ) -> None:
        _reduce.add_pairs(code, into, factor)


@dataclasses.dataclass(frozen=True)
class TopK(_Sparse):
    """Sends the entries with the largest magnitudes.

    An array of n elements becomes ⌈fraction·n⌉ pairs of a uint32 index and a float32 value, 8 bytes
    each. `Feedback` applies it to each slice of an array. Aji and Heafield, EMNLP 2017.

    Parameters
    ----------
    fraction : float
        The share of the entries that is sent, from 1e-6 to 1.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> top = ml.TopK(0.5)
    >>> code = top.encode(np.array([1, -3, 0, 2], np.float32))
    >>> len(code), top.decode(code, 4)
    (16, array([ 0., -3.,  0.,  2.], dtype=float32))
    """

    fraction: float

    def __post_init__(self) -> None:
        _check("fraction", self.fraction, 1e-6, 1)

    def encode(
        self, values: Array, step: int = 0, stripe: int = 0, memory: dict[str, Any] | None = None
    ) -> Array:
        values = _floats(values)
        count = math.ceil(self.fraction * values.size)
        if count == values.size:
            return _pairs(values, np.arange(count))
        return _pairs(values, np.sort(np.argpartition(np.abs(values), -count)[-count:]))


@dataclasses.dataclass(frozen=True)
class Threshold(_Sparse):
    """Sends the entries at or above a threshold, which is estimated from samples at intervals.

    The threshold is the ⌈fraction·m⌉-th largest magnitude of m sampled entries. It is estimated
    again in every `refresh`-th step, and when more than 8·fraction of the entries reach it. In
    `Feedback`, more than `fraction` of the entries are sent on average, because residuals grow
    until they reach the threshold. The code has the same form as that of `TopK`. This is the
    threshold of DCT: Gupta et al., KDD 2021, section 3.

    Parameters
    ----------
    fraction : float
        The target for the share of entries at or above the threshold, from 1e-6 to 1.
    refresh : int, optional
        The number of steps between two samples. Default: 1000.
    sample : float, optional
        The share of the entries that is sampled, but at least 10/fraction entries. Default: 0.01.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> large = ml.Threshold(0.25)
    >>> large.decode(large.encode(np.array([1, -3, 0, 2], np.float32)), 4)
    array([ 0., -3.,  0.,  0.], dtype=float32)
    """

    fraction: float
    refresh: int = 1000
    sample: float = 0.01

    def __post_init__(self) -> None:
        _check("fraction", self.fraction, 1e-6, 1)
        _check("refresh", self.refresh, 1, 1 << 40, int)
        _check("sample", self.sample, 1e-6, 1)

    def prepare(self, values: Array, step: int = 0, memory: dict[str, Any] | None = None) -> None:
        if memory is None:
            return
        if "threshold" not in memory or step % self.refresh == 0:
            memory["threshold"] = self._draw(values, step)

    def _draw(self, values: Array, step: int) -> float:
        """The threshold for these values. It is above 0, so zeros are never sent."""
        count = max(math.ceil(self.sample * values.size), math.ceil(SAMPLED_MIN / self.fraction))
        if count < values.size:
            values = values[elements_of(step, values.size, count)]
        if not values.size:
            return math.inf
        kept = math.ceil(self.fraction * values.size)
        found = float(np.partition(np.abs(values), -kept)[-kept])
        return max(found, float(np.finfo(np.float32).smallest_subnormal))

    def encode(
        self, values: Array, step: int = 0, stripe: int = 0, memory: dict[str, Any] | None = None
    ) -> Array:
        values = _floats(values)
        kept = {} if memory is None else memory
        if "threshold" not in kept:
            kept["threshold"] = self._draw(values, step)
        found = np.flatnonzero(np.abs(values) >= kept["threshold"])
        if found.size > max(16, OVERFULL * self.fraction * values.size):
            kept["threshold"] = self._draw(values, step)
            found = np.flatnonzero(np.abs(values) >= kept["threshold"])
        return _pairs(values, found)


@dataclasses.dataclass(frozen=True)
class RandomBlocks(Compressor):
    """Sends blocks that are drawn from a seed shared by all ranks, so that no indices are sent.

    An array has ⌈n/block⌉ blocks, of which one in `ratio`, but at least one, is sent. The owner of
    a slice sends the same blocks back, so its code leaves nothing out. Xie et al., NeurIPS 2020
    (GRBS).

    Parameters
    ----------
    ratio : float
        One in `ratio` blocks is sent; from 1 to 1e6.
    seed : int, optional
        The seed, which must be the same on all ranks. Default: 0.
    block : int, optional
        The number of elements in a block. Default: 256.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> blocks = ml.RandomBlocks(2, block=1)
    >>> code = blocks.encode(np.ones(4, np.float32), step=3)
    >>> len(code), blocks.decode(code, 4, step=3).sum()
    (8, np.float32(2.0))
    """

    ratio: float
    seed: int = 0
    block: int = 256

    def __post_init__(self) -> None:
        _check("ratio", self.ratio, 1, 1e6)
        _check("seed", self.seed, 0, (1 << 63) - 1, int)
        _check("block", self.block, 1, 1 << 40, int)

    def _drawn(self, size: int, step: int, stripe: int) -> list[slice]:
        blocks = draw_blocks(self.seed, step, stripe, -(-size // self.block), self.ratio)
        return [slice(at * self.block, min(size, (at + 1) * self.block)) for at in blocks.tolist()]

    def encode(
        self, values: Array, step: int = 0, stripe: int = 0, memory: dict[str, Any] | None = None
    ) -> Array:
        values = _floats(values)
        parts = [values[where] for where in self._drawn(values.size, step, stripe)]
        return np.concatenate([np.empty(0, np.float32), *parts]).view(np.uint8)

    def add(
        self, code: Array, into: Array, step: int = 0, stripe: int = 0, factor: float = 1.0
    ) -> None:
        values, at = _items(code, np.float32), 0
        drawn = self._drawn(into.size, step, stripe)
        _check_size(values.size, sum(where.stop - where.start for where in drawn))
        for where in drawn:
            size = where.stop - where.start
            into[where] += np.float32(factor) * values[at : at + size]
            at += size


def _items(code: Array, dtype: Any) -> Array:
    """The elements of a code, which need not be aligned."""
    if code.nbytes % np.dtype(dtype).itemsize:
        raise ValueError(f"a code of {code.nbytes} bytes is not a whole number of {dtype} elements")
    return np.frombuffer(code, dtype)


def _check_size(found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"the code has {found} elements, but this array needs {expected}")


@dataclasses.dataclass(frozen=True)
class Quantise(Compressor):
    """Sends integers with few bits, and one float32 scale for each block.

    x becomes ``round(x / scale)``, where ``scale = max(abs(x)) / (2**(bits-1) - 1)`` in the block
    of x. These are the 8-bit approximations of Dettmers, ICLR 2016, but with a scale for each
    block.

    Parameters
    ----------
    bits : {8, 4, 2}, optional
        The number of bits in an integer. Default: 8.
    block : int, optional
        The number of elements that share a scale. Default: 256.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> eight = ml.Quantise()
    >>> code = eight.encode(np.array([1, -2, 0, 127], np.float32))
    >>> len(code), eight.decode(code, 4)
    (8, array([  1.,  -2.,   0., 127.], dtype=float32))
    """

    bits: int = 8
    block: int = 256

    def __post_init__(self) -> None:
        if self.bits not in (8, 4, 2):
            raise ValueError(f"bits={self.bits!r}: it must be 8, 4 or 2")
        _check("block", self.block, 1, 1 << 40, int)

    def encode(
        self, values: Array, step: int = 0, stripe: int = 0, memory: dict[str, Any] | None = None
    ) -> Array:
        values = _floats(values)
        blocks, packed = -(-values.size // self.block), -(-values.size * self.bits // 8)
        code = np.empty(4 * blocks + packed, np.uint8)
        levels = np.empty(values.size, np.int8) if self.bits < 8 else code[4 * blocks :]
        most = (1 << (self.bits - 1)) - 1
        _reduce.quantise(values, code[: 4 * blocks], levels, self.block, most)
        if self.bits < 8:
            code[4 * blocks :] = self._pack(levels)
        return code

    def add(
        self, code: Array, into: Array, step: int = 0, stripe: int = 0, factor: float = 1.0
    ) -> None:
        blocks, packed = -(-into.size // self.block), -(-into.size * self.bits // 8)
        _check_size(code.nbytes, 4 * blocks + packed)
        levels = code[4 * blocks :]
        if self.bits < 8:
            levels = self._unpack(levels, into.size)
        _reduce.add_quantised(levels, code[: 4 * blocks], into, self.block, factor)

    def _pack(self, levels: Array) -> Array:
        """Packs several integers into each byte, the first one into its lowest bits."""
        each = 8 // self.bits
        padded = np.zeros((-(-levels.size // each), each), np.uint8)
        padded.reshape(-1)[: levels.size] = levels.view(np.uint8) & ((1 << self.bits) - 1)
        shifts = np.arange(each, dtype=np.uint8) * self.bits
        packed: Array = np.bitwise_or.reduce(padded << shifts.astype(np.uint8), axis=1)
        return packed

    def _unpack(self, packed: Array, size: int) -> Array:
        each, sign = 8 // self.bits, 1 << (self.bits - 1)
        shifts = np.arange(each, dtype=np.uint8) * self.bits
        found = (packed[:, None] >> shifts.astype(np.uint8)) & ((1 << self.bits) - 1)
        signed = (found ^ sign).astype(np.int8) - np.int8(sign)
        return np.ascontiguousarray(signed.reshape(-1)[:size])


@dataclasses.dataclass(frozen=True)
class Float16(Compressor):
    """Sends float16 values, rounded to nearest even. Magnitudes above 65504 become 65504.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> half = ml.Float16()
    >>> half.decode(half.encode(np.array([0.5, 1e6], np.float32)), 2)
    array([5.0000e-01, 6.5504e+04], dtype=float32)
    """

    def encode(
        self, values: Array, step: int = 0, stripe: int = 0, memory: dict[str, Any] | None = None
    ) -> Array:
        clipped = np.clip(_floats(values), -FLOAT16_MAX, FLOAT16_MAX)
        return clipped.astype(np.float16).view(np.uint8)

    def add(
        self, code: Array, into: Array, step: int = 0, stripe: int = 0, factor: float = 1.0
    ) -> None:
        values = _items(code, np.float16)
        _check_size(values.size, into.size)
        into += np.float32(factor) * values.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class PowerSGD:
    """Sends a matrix as the product of two thin ones.

    A gradient of shape (a, ...) is a matrix M with a rows and b columns. With Q from the previous
    step, P = orthogonal(mean of M·Q) and the new Q = mean of Mᵀ·P; the result is P·Qᵀ. Two dense
    reductions, together of (a + b)·rank float32 values, replace one of a·b values. Vectors and
    numbers, and matrices for which nothing would be saved, are reduced unchanged. Vogels et al.,
    NeurIPS 2019, algorithms 1 and 2.

    Parameters
    ----------
    rank : int
        The number of columns of P and Q, from 1 to 1024.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> low, m = ml.PowerSGD(1), np.outer([1, 2], [3, 4, 5]).astype(np.float32)
    >>> p = low.left(m, low.start(m.shape))
    >>> np.allclose(p @ low.right(m, p).T, m, rtol=1e-5)
    True
    """

    rank: int

    def __post_init__(self) -> None:
        _check("rank", self.rank, 1, 1024, int)

    def is_low(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape is sent as two thin matrices."""
        size = math.prod(shape)
        return len(shape) > 1 and size > 0 and self.rank * (shape[0] + size // shape[0]) < size

    def start(self, shape: tuple[int, ...], seed: int = 0) -> Array:
        """Q for the first step, of shape (columns, rank). The same seed gives the same Q."""
        columns = math.prod(shape[1:])
        return draw_floats(seed, columns * self.rank).reshape(columns, self.rank)

    def left(self, matrix: Array, q: Array) -> Array:
        """orthogonal(M·Q), of shape (rows, rank)."""
        return orthogonal(matrix @ q)

    def right(self, matrix: Array, p: Array) -> Array:
        """Mᵀ·P, of shape (columns, rank)."""
        found: Array = matrix.T @ p
        return found


def orthogonal(p: Array) -> Array:
    """Orthonormal columns with the same span (Gram-Schmidt). A linearly dependent column becomes 0.

    Sums are float64, in the order of the elements, so every CPU gives the same bits."""
    columns: list[Array] = []
    for at in range(p.shape[1]):
        column = p[:, at].astype(np.float64)
        size = math.sqrt(_dot(column, column))
        for _ in range(2):  # two passes are enough (Giraud et al. 2005)
            for other in columns:
                column = column - _dot(column, other) * other
        left = math.sqrt(_dot(column, column))
        columns.append(column / left if left > 1e-6 * size else np.zeros_like(column))
    return np.stack(columns, axis=1).astype(np.float32)


def _dot(a: Array, b: Array) -> float:
    return float(np.cumsum(a * b)[-1])
