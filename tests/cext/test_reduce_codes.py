"""Codes of compressed arrays against numpy: sparse pairs, and integers in blocks with a scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hoplite_mp import _reduce

PAIR = np.dtype([("index", "<u4"), ("value", "<f4")])
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)
Array = np.ndarray[Any, np.dtype[Any]]


def float_arrays(elements: st.SearchStrategy[float] = FLOATS) -> st.SearchStrategy[Array]:
    return arrays.arrays(np.float32, st.integers(0, 300), elements=elements)


def unaligned(array: Array) -> Array:
    """The same elements one byte beside an aligned address."""
    found = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype)
    found[:] = array
    return found


@settings(max_examples=100)
@given(
    into=float_arrays(),
    pairs=st.lists(st.tuples(st.integers(0, 299), FLOATS), max_size=50),
    factor=st.sampled_from([1.0, -1.0, 0.5, 3.25]),
)
def test_add_pairs_of_any_indices_is_numpys_add_at(
    into: Array, pairs: list[tuple[int, float]], factor: float
) -> None:
    given_pairs = np.array([one for one in pairs if one[0] < into.size], PAIR)
    expected = into.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        np.add.at(expected, given_pairs["index"], np.float32(factor) * given_pairs["value"])
    found = unaligned(into)
    _reduce.add_pairs(unaligned(given_pairs), found, factor)
    assert found.tobytes() == expected.tobytes()


def test_add_pairs_with_an_index_outside_adds_nothing() -> None:
    into = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="pair 1 of 2 has an index not below 3"):
        _reduce.add_pairs(np.array([(0, 1.0), (3, 1.0)], PAIR), into)
    assert not into.any()


def reference(values: Array, block: int, levels: int) -> tuple[Array, Array]:
    """Scales and codes by numpy."""
    scales, codes = [], []
    for at in range(0, values.size, block):
        part = values[at : at + block]
        if not np.isfinite(part).all():
            scales.append(np.float32(np.nan))
            codes.append(np.zeros(part.size, np.int8))
            continue
        scale = np.abs(part).max() / np.float32(levels)
        scales.append(scale)
        quotient = np.rint(part / scale) if scale > 0 else np.zeros_like(part)
        codes.append(np.clip(quotient, -levels, levels).astype(np.int8))
    return np.array(scales, np.float32), np.concatenate([np.empty(0, np.int8), *codes])


@settings(max_examples=200)
@given(
    values=float_arrays(st.floats(width=32, allow_nan=True) | FLOATS | st.just(0.0)),
    block=st.integers(1, 70),
    levels=st.sampled_from([127, 7, 1, 100]),
)
def test_quantise_of_any_floats_gives_numpys_scales_and_codes(
    values: Array, block: int, levels: int
) -> None:
    scales, codes = reference(values, block, levels)
    found_scales, found = unaligned(np.empty_like(scales)), np.empty_like(codes)
    _reduce.quantise(unaligned(values), found_scales, found, block, levels)
    np.testing.assert_array_equal(found_scales, scales)
    np.testing.assert_array_equal(found, codes)
    into = np.ones(values.size, np.float32)
    _reduce.add_quantised(found, found_scales, into, block, -0.5)
    with np.errstate(over="ignore"):  # the largest float may be rounded to infinity
        decoded = scales.repeat(block)[: values.size] * codes.astype(np.float32)
    np.testing.assert_array_equal(into, 1 + np.float32(-0.5) * decoded)


@settings(max_examples=100)
@given(values=float_arrays(), block=st.integers(1, 70))
def test_quantise_then_add_is_within_half_a_level_of_the_values(values: Array, block: int) -> None:
    scales = np.empty(-(-values.size // block), np.float32)
    codes = np.empty(values.size, np.int8)
    _reduce.quantise(values, scales, codes, block)
    found = np.zeros_like(values)
    _reduce.add_quantised(codes, scales, found, block)
    allowed = 0.5001 * scales.astype(float).repeat(block)[: values.size] + 1e-43
    assert (np.abs(found.astype(float) - values) <= allowed).all()


@pytest.mark.parametrize(
    ("sizes", "block", "levels", "match"),
    [
        ((8, 1, 8), 0, 127, "block must be at least 1"),
        ((8, 1, 8), 4, 127, "2 scales"),
        ((8, 2, 7), 4, 127, "8 codes"),
        ((8, 2, 8), 4, 128, "levels must be from 1 to 127"),
    ],
)
def test_quantise_into_buffers_that_do_not_fit_raises(
    sizes: tuple[int, int, int], block: int, levels: int, match: str
) -> None:
    values, scales = (np.zeros(size, np.float32) for size in sizes[:2])
    with pytest.raises(ValueError, match=match):
        _reduce.quantise(values, scales, np.zeros(sizes[2], np.int8), block, levels)


def test_buffers_of_a_fraction_of_an_item_raise() -> None:
    with pytest.raises(ValueError, match="pairs has 9 bytes"):
        _reduce.add_pairs(b"123456789", np.zeros(2, np.float32))
    with pytest.raises(BufferError):
        _reduce.add_pairs(b"", b"1234")
