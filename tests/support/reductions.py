"""Reductions by NumPy as a reference, and arguments of every dtype with extremes."""

from __future__ import annotations

import functools
import platform
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
HALVES = ["float16", "bfloat16"]
FLOATS = ["float32", "float64"]
COMPLEX = ["complex64", "complex128"]
DTYPES = ["bool", *INTEGERS, *HALVES, *FLOATS, *COMPLEX]
UFUNCS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "mean": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
NUMERIC = ["sum", "prod", "min", "max", "mean"]
OPS_OF = {
    "bool": list(UFUNCS),
    **{dtype: list(UFUNCS) for dtype in INTEGERS},
    **{dtype: NUMERIC for dtype in HALVES + FLOATS},
    **{dtype: ["sum", "prod"] for dtype in COMPLEX},
}
PAIRS = [(op, dtype) for dtype in DTYPES for op in OPS_OF[dtype]]
every_pair = pytest.mark.parametrize(("op", "dtype"), PAIRS)


# NumPy's minimum(0.0, -0.0) is the second argument on x86 and the smaller sign elsewhere.
ZEROS_ARE_ORDERED_AS_ON_X86 = platform.machine() in ("x86_64", "AMD64")


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def times_by_parts(a: Array, b: Array) -> Array:
    """The product of complex numbers with every step rounded: no fused multiply-add."""
    product = np.empty_like(a)
    product.real = a.real * b.real - a.imag * b.imag
    product.imag = a.real * b.imag + a.imag * b.real
    return product


def reference_fold(op: str, dtype: str, arrays: list[Array]) -> Array:
    wide = np.dtype(dtype) if dtype not in HALVES else np.dtype(np.float32)
    result = numpy_dtype(dtype)
    if op == "mean" and dtype in ["bool", *INTEGERS]:
        wide = result = np.dtype(np.float64)
    fold = times_by_parts if op == "prod" and dtype in COMPLEX else UFUNCS[op]
    with np.errstate(all="ignore"):
        total = functools.reduce(fold, [array.astype(wide) for array in arrays])
        if op == "mean":
            total = total / wide.type(len(arrays))
        return total.astype(result)


def bits(array: Array, zeros_signed: bool) -> bytes:
    """The bytes, with every NaN the same one."""
    if array.dtype.kind == "c":
        array = array.view(array.real.dtype)
    if array.dtype.kind in "biu":
        return array.tobytes()
    found = array.view(f"u{array.itemsize}").copy()
    with np.errstate(invalid="ignore"):  # bfloat16: a signalling NaN is reported by isnan
        found[np.isnan(array)] = -1 % (1 << 8 * array.itemsize)  # a NaN
        if not zeros_signed:
            found[array == 0] = 0
    return found.tobytes()


def assert_same_fold(op: str, found: Array, expected: Array) -> None:
    zeros_signed = op not in ("min", "max") or ZEROS_ARE_ORDERED_AS_ON_X86
    assert found.dtype == expected.dtype
    if bits(found, zeros_signed) != bits(expected, zeros_signed):
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(found, expected)  # names the elements
        raise AssertionError("the values agree, the bits do not: signs of zeros")


def specials(dtype: np.dtype[Any]) -> Array:
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.array([info.min, info.max, info.max - 1, 0, 1, 2], dtype)
    least, most = np.zeros(1, dtype), np.zeros(1, dtype)
    least.view(f"u{dtype.itemsize}")[0] = 1  # the least subnormal
    most[0] = ml_dtypes.finfo(dtype).max  # type: ignore[no-untyped-call]
    rest = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 3.0], dtype)
    return np.concatenate([least, -least, most, -most, rest])


def random_values(dtype_name: str, count: int, rng: np.random.Generator) -> Array:
    """A third any bits, a third ordinary numbers, a third extremes."""
    dtype = numpy_dtype(dtype_name)
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    if dtype.kind == "c":
        return random_values(dtype.char.lower(), 2 * count, rng).view(dtype)
    bits_of = f"u{dtype.itemsize}"
    any_bits = np.frombuffer(rng.bytes(count * dtype.itemsize), bits_of)
    ordinary = rng.integers(0, 9, count) if dtype.kind in "iu" else rng.normal(0, 3, count)
    extreme = rng.choice(specials(dtype).view(bits_of), count)
    choices = [any_bits, ordinary.astype(dtype).view(bits_of), extreme]
    return np.choose(rng.integers(0, 3, count), choices).view(dtype)
