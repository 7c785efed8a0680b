"""reduce on refs gives the bits that functools.reduce of numpy gives."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.values import bits, same_array

if TYPE_CHECKING:
    from hoplite_mp import Cluster

UFUNC = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "mean": np.add,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    *map(np.dtype, ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")),
    *map(np.dtype, ("c8", "c16", ">f4", ">i2", "m8[ns]")),
    BFLOAT16,
]
NARROW = (np.dtype("f2"), BFLOAT16)


def samples(dtype: np.dtype[Any], count: int, shape: Any = (37, 11)) -> list[Any]:
    """Values that round, wrap, overflow and are NaN where the dtype can."""
    random = np.random.default_rng(7)
    found = []
    for _ in range(count):
        if dtype.kind == "b":
            array = random.integers(0, 2, shape).astype(dtype)
        elif dtype.kind in "ium":
            raw = random.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
            array = raw.view(dtype.newbyteorder("=")).reshape(shape).astype(dtype)
            if dtype.kind == "m":  # numpy 2.5 and later refuse sums that wrap, we do not
                array = (array // 8).astype(dtype)
        else:
            array = (random.normal(size=shape) * 10.0 ** random.integers(-4, 4, shape)).astype(
                dtype
            )
            if dtype.kind == "c":
                array = array + 1j * random.normal(size=shape).astype(dtype)
                array = array.astype(dtype)
            array.flat[random.integers(0, array.size, 3)] = np.nan
            array.flat[random.integers(0, array.size, 3)] = np.inf
        found.append(array)
    return found


def _times(a: Any, b: Any) -> Any:
    """The product of complex numbers, every step rounded: numpy's own depends on the processor."""
    product = np.empty_like(a)
    product.real = a.real * b.real - a.imag * b.imag
    product.imag = a.real * b.imag + a.imag * b.real
    return product


def expected(op: str, arrays: list[Any]) -> Any:
    """The documented meaning, written with nothing but numpy."""
    dtype = arrays[0].dtype
    if op == "mean" and dtype.kind in "biu":
        arrays = [array.astype(np.float64) for array in arrays]
    elif dtype in NARROW:
        arrays = [array.astype(np.float32) for array in arrays]
    fold = _times if op == "prod" and dtype.kind == "c" else UFUNC[op]
    with np.errstate(all="ignore"):
        total = functools.reduce(fold, arrays)
        if op == "mean":
            count = len(arrays)
            total = total / (count if dtype.kind == "m" else np.asarray(count, total.dtype))
        if op == "mean" and dtype.kind in "biu":
            return np.asarray(total, np.float64)
        return np.asarray(total).astype(dtype.newbyteorder("="))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.str + dtype.name)
def test_every_op_has_the_bits_of_numpy(cluster: Cluster, dtype: np.dtype[Any]) -> None:
    arrays = samples(dtype, 5)
    refs = [cluster.put(array) for array in arrays]
    for op in UFUNC:
        result = cluster.reduce(refs, op, reproducible=True)
        try:
            wanted = expected(op, arrays)
        except TypeError:
            with pytest.raises(ValueError, match=op):
                cluster.get(result)
            continue
        got = cluster.get(result)
        assert got.dtype == wanted.dtype, op
        assert same_array(got, wanted), op
        assert result.contributors == (0, 1, 2, 3, 4)


def test_one_source_has_the_dtype_that_several_have(cluster: Cluster) -> None:
    for op, array, wanted in (
        ("sum", np.array([1, 2], ">f4"), np.array([1, 2], "<f4")),
        ("mean", np.array([1, 2], "i2"), np.array([1, 2], "f8")),
        (np.logical_and, np.array([0.0, 2.0]), np.array([False, True])),
    ):
        for count in (1, 2):
            got = cluster.get(cluster.reduce([cluster.put(array)] * count, op))
            assert got.dtype == wanted.dtype
            assert (got == (wanted * count if op == "sum" else wanted)).all()


def test_narrow_floats_are_rounded_once(cluster: Cluster) -> None:
    """2048 + 1 is 2048 in float16, but 2048 + 1 + 1 is not, when it is added up in float32."""
    for dtype, big in ((np.dtype("f2"), 2048), (BFLOAT16, 256)):
        parts = [np.array([n], dtype) for n in (big, 1, 1)]
        assert cluster.get(cluster.reduce([cluster.put(p) for p in parts])) == big + 2


def test_ufuncs_round_narrow_floats_once_too(cluster: Cluster) -> None:
    for dtype in (np.dtype("f2"), BFLOAT16, np.dtype(">f2")):
        parts = [np.array([n, 0.1 * n], dtype) for n in (3, 4, 0.5, 0.25)]
        wide = functools.reduce(np.hypot, [part.astype(np.float32) for part in parts])
        got = cluster.get(cluster.reduce([cluster.put(p) for p in parts], np.hypot))
        assert bits(got) == bits(wide.astype(dtype.newbyteorder("=")))


def test_a_sum_of_bools_is_or_and_integers_wrap(cluster: Cluster) -> None:
    flags = [np.array([False, False, True]), np.array([False, True, True])]
    got = cluster.get(cluster.reduce([cluster.put(f) for f in flags]))
    assert bits(got) == bits(np.array([False, True, True]))
    wrapped = cluster.get(cluster.reduce([cluster.put(np.array([200], np.uint8))] * 2))
    assert bits(wrapped) == bits(np.array([144], np.uint8))


def test_nan_goes_through_min_and_max_as_in_numpy(cluster: Cluster) -> None:
    a, b = np.array([1.0, np.nan, 3.0]), np.array([np.nan, 2.0, -0.0])
    refs = [cluster.put(a), cluster.put(b)]
    assert same_array(cluster.get(cluster.reduce(refs, "max")), np.maximum(a, b))
    assert same_array(cluster.get(cluster.reduce(refs, "min")), np.minimum(a, b))
    assert same_array(cluster.get(cluster.reduce(refs, np.fmax)), np.fmax(a, b))


@pytest.mark.parametrize(
    ("ufunc", "dtype"),
    [
        (np.add, "f4"), (np.multiply, "i4"), (np.minimum, "f8"), (np.maximum, "u2"),
        (np.bitwise_and, "i8"), (np.bitwise_or, "u1"), (np.bitwise_xor, "i2"), (np.fmax, "f4"),
        (np.fmin, "f8"), (np.gcd, "i4"), (np.lcm, "i8"), (np.hypot, "f8"), (np.logaddexp, "f4"),
        (np.logaddexp2, "f8"), (np.logical_and, "i4"), (np.logical_or, "?"),
        (np.logical_xor, "f4"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_associative_and_commutative_ufuncs(cluster: Cluster, ufunc: Any, dtype: str) -> None:
    arrays = [np.arange(1, 9).astype(dtype) + np.array(k, dtype) for k in (1, 2, 3)]
    wanted = functools.reduce(ufunc, arrays)
    got = cluster.get(cluster.reduce([cluster.put(a) for a in arrays], ufunc, reproducible=True))
    assert bits(got) == bits(wanted)


@pytest.mark.parametrize(
    "op",
    [np.subtract, np.divide, np.power, np.arctan2, np.sin, np.left_shift, np.greater, np.matmul,
     np.frompyfunc(lambda a, b: a + b, 2, 1), "plus", "", None, 3],
    ids=str,
)  # fmt: skip
def test_other_operators_are_refused_at_the_call(cluster: Cluster, op: Any) -> None:
    with pytest.raises(ValueError, match=r"op|reduce"):
        cluster.reduce([cluster.put(1.0)], op)


def test_reproducible_gives_the_same_bits_for_any_order_of_arrival(
    cluster: Cluster, tmp_path: Any
) -> None:
    from tests.support.functions import after
    from tests.support.waiting import Gate

    values = [np.full(9, v, np.float32) for v in (1e8, 1.0, -1e8, 0.3)]
    wanted = bits(functools.reduce(np.add, values))
    with cluster.executor(4) as pool:
        for number, order in enumerate(
            itertools.islice(itertools.permutations(range(4)), 0, 24, 5)
        ):
            gates = [Gate(tmp_path, f"{number}-{k}") for k in range(4)]
            tasks = [pool.submit(after, gates[k], values[k]) for k in range(4)]
            result = cluster.reduce(tasks, reproducible=True)
            for k in order:
                gates[k].open()
                tasks[k].result()
            assert bits(cluster.get(result)) == wanted
